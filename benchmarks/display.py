"""Time a real napari window from a movement of the camera to an exact frame: ours and others.

Usage: ``python -m benchmarks.display [--slide FILE --devices cpu cuda --windows 1920x1200
--seconds 30 --repeats 30 --rounds 1 --json FILE]``

Each mode, device and window size runs in its own process (`displaying.py`) for the given seconds.
Modes alternate, a different one first in each round. In ``ours`` the plugin opens the slide; in
``blocking`` the same levels are added as they are, and napari slices them synchronously. ``empty``
shows the canvas without the slide: what napari, Qt and OpenGL need for a frame.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.common import SLIDES, ensure_slide, write_json
from benchmarks.stage import LARGE_SCREEN, ensure_display, run_part, size_of
from napari_wsigpu.cli.bench import output_file, print_table
from napari_wsigpu.cli.doctor import find_driver

MODES = ("ours", "blocking", "empty")
PART = "benchmarks.displaying"
SIDE = 65536
STARTING_SECONDS = 120
SHARES = (50, 95)
# Figures of a series that are joined over rounds, and the columns of its table.
TIMES = ("first_ms", "exact_ms", "slice_ms", "draw_ms")
COLUMNS = ("first p50", "p95", "exact p50", "p95", "slice p50", "p95", "draw p50", "p95")

Figures = dict[str, Any]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time a napari window until frames are exact.")
    parser.add_argument("--slide", type=Path, help="by default one that is made")
    parser.add_argument("--folder", type=Path, default=SLIDES, help="where slides are kept")
    parser.add_argument("--side", type=int, default=SIDE, help="of the slide that is made")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--devices", nargs="+", help="by default cpu, and cuda where it is")
    parser.add_argument(
        "--windows", nargs="+", type=size_of, default=[(1920, 1200)], metavar="WIDTHxHEIGHT"
    )
    parser.add_argument("--zooms", nargs="+", type=float, default=[1.0, 0.4])
    parser.add_argument("--series", nargs="+", help="by default all: jump, pan ...")
    parser.add_argument("--seconds", type=float, default=30, help="for each process")
    parser.add_argument("--repeats", type=int, default=30, help="movements of a series, at most")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--frames", type=Path, help="write last frames into this folder, as PNG")
    parser.add_argument("--json", type=output_file, help="write all figures to this file")
    return run(parser.parse_args())


def run(args: argparse.Namespace) -> int:
    """Run all processes and print tables; return 1 if a frame is wrong or never exact."""
    ensure_display(LARGE_SCREEN)
    slide = args.slide or ensure_slide(args.folder, args.side, "jpeg")
    devices = args.devices or (["cpu", "cuda"] if find_driver().devices else ["cpu"])
    runs: list[Figures] = []
    for turn in range(args.rounds):
        first = turn % len(args.modes)
        for device in devices:
            for window in args.windows:
                for mode in [*args.modes[first:], *args.modes[:first]]:
                    print(f"Round {turn + 1} of {args.rounds}: {mode}, {device} ...", flush=True)
                    runs.append(displayed(args, mode, device, window, slide))
    tables = summary(runs)
    report(tables)
    record = {"slide": slide.name, "seconds": args.seconds, "repeats": args.repeats}
    write_json(args.json, {**record, "summary": tables, "runs": runs})
    wrong = [
        f"{run['mode']}, {run['device']}: {name}"
        for run in runs
        for name, row in run["series"].items()
        if row.get("never_exact") or not row.get("whole_frame_exact", True)
    ]
    if wrong:
        print(f"\nNEVER EXACT: {'; '.join(wrong)}")
    return int(bool(wrong))


def displayed(
    args: argparse.Namespace, mode: str, device: str, window: tuple[int, int], slide: Path
) -> Figures:
    """Run one mode in a fresh process."""
    with TemporaryDirectory() as folder:
        result = Path(folder) / "display.json"
        words: list[object] = [mode, "--slide", slide, "--device", device, "--json", result]
        words += ["--window", *window, "--zooms", *args.zooms]
        words += ["--seconds", args.seconds, "--repeats", args.repeats]
        words += ["--series", *args.series] if args.series else []
        if args.frames is not None:
            frames = args.frames / f"{mode}-{device}-{window[0]}x{window[1]}"
            frames.mkdir(parents=True, exist_ok=True)
            words += ["--frames", frames]
        patience = 2 * args.seconds + STARTING_SECONDS
        run_part(PART, [str(word) for word in words], patience, gpu=device != "cpu")
        figures: Figures = json.loads(result.read_text(encoding="utf-8"))
    return {"window": list(window), **figures}


def summary(runs: list[Figures]) -> list[Figures]:
    """Return p50 and p95 of each series over all rounds."""
    rows: dict[tuple[Any, ...], list[Figures]] = {}
    for run in runs:
        for name, row in run["series"].items():
            key = (run["device"], tuple(run["window"]), name, run["mode"])
            rows.setdefault(key, []).append(row)
    return [
        {"device": device, "window": list(window), "series": name, "mode": mode, **_together(same)}
        for (device, window, name, mode), same in sorted(rows.items())
    ]


def _together(rows: list[Figures]) -> Figures:
    figures: Figures = {}
    for name in rows[0]:
        values = [row[name] for row in rows if row[name] is not None]
        if name in TIMES:
            joined = [value for row in values for value in row] or [0.0]
            for share in SHARES:
                figures[f"{name}_p{share}"] = round(float(np.percentile(joined, share)), 2)
            figures[f"{name}_count"] = sum(map(len, values))
        elif name == "whole_frame_exact":
            figures[name] = all(values)
        elif name in ("never_exact", "frames", "looked_at"):
            figures[name] = sum(values)
        elif values:
            figures[name] = round(float(np.mean(values)), 2)
    return figures


def report(tables: list[Figures]) -> None:
    """Print a table for each device and window."""
    for device, window in sorted({(row["device"], tuple(row["window"])) for row in tables}):
        rows = [row for row in tables if row["device"] == device and row["window"] == list(window)]
        moved = [
            [
                row["series"],
                row["mode"],
                *(f"{row[f'{name}_p{share}']:.1f}" for name in TIMES for share in SHARES),
                f"{row['to_host_bytes_a_frame'] / 1e6:.2f}",
                str(row["exact_ms_count"]),
                str(row["never_exact"]) if row["whole_frame_exact"] else "WRONG",
            ]
            for row in rows
            if "exact_ms_p50" in row
        ]
        title = f"{device}, window {window[0]} x {window[1]}, ms"
        print_table(title, ["series", "mode", *COLUMNS, "host MB", "moves", "never"], moved)
        panned = [
            [
                row["series"],
                row["mode"],
                f"{row['frames_per_s']:.1f}",
                "?" if "exact_percent" not in row else f"{row['exact_percent']:.0f}",
                f"{row['to_host_bytes_a_frame'] / 1e6:.2f}",
            ]
            for row in rows
            if "frames_per_s" in row
        ]
        print_table("free pan", ["series", "mode", "frames/s", "exact %", "host MB"], panned)


if __name__ == "__main__":
    raise SystemExit(main())
