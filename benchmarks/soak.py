"""Use two slides in one viewer at random for minutes, and check that nothing accumulates.

Usage: ``python -m benchmarks.soak [--minutes 10 --seed 0 --folder DIR --json FILE]``

The actions are pans, zooms and jumps; layers removed and put back, duplicated, opened again and
hidden; grid and 3D. After each action the viewer shows the same two slides. Every 10 s, after a
rest and a garbage collection, counts are taken that must not grow between the second and the last
minute. The tile cache is subtracted from the resident memory; the C library's allocations do not
include it, because tiles have their own pages. The status is 1 if something grew or the plugin
logged a warning.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common import SLIDES, ensure_slide, verdict, write_json
from benchmarks.stage import ensure_display, run_part
from napari_wsigpu.cli.bench import print_table

PART = "benchmarks.soaking"
MEMORY_MARGIN_MB = 100.0
MEMORY = {
    "rss_mb - cache": lambda sample: sample["rss_mb"] - sample["cache_mb"],
    "allocated_mb": lambda sample: sample["allocated_mb"],
}
COUNTS = ("threads", "files", "timers", "timers_active", "callbacks")
MINUTE = 60.0


def growth(samples: list[dict[str, float]]) -> dict[str, tuple[float, float, bool]]:
    """Return each count after the first minute and at the end, and whether it may grow that much.

    Memory uses the median of a minute. Other counts use its minimum, because something that exists
    only for a moment is not a leak.
    """
    warm = min(MINUTE, samples[-1]["seconds"] / 3)
    first = [item for item in samples if warm <= item["seconds"] <= 2 * warm]
    last = [item for item in samples if item["seconds"] >= samples[-1]["seconds"] - warm]
    grown = {}
    for name, figure in MEMORY.items():
        begin, end = (statistics.median(map(figure, part)) for part in (first, last))
        grown[name] = (begin, end, end - begin <= MEMORY_MARGIN_MB)
    for name in COUNTS:
        begin, end = (min(item[name] for item in part) for part in (first, last))
        grown[name] = (begin, end, end <= begin)
    return grown


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Walk at random through two slides.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=SLIDES, help="where slides are kept")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    slides = [
        ensure_slide(args.folder, 32768, "jpeg"),
        ensure_slide(args.folder, 16384, "jpeg2000"),
    ]
    with TemporaryDirectory() as folder:
        result = Path(folder) / "soak.json"
        options = ["--minutes", str(args.minutes), "--seed", str(args.seed)]
        run_part(
            PART,
            ["--slides", *map(str, slides), *options, "--json", str(result)],
            MINUTE * (args.minutes + 5),
        )
        figures: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))

    grown = growth(figures["samples"])
    rows = [
        [name, f"{begin:.0f}", f"{end:.0f}", f"{end - begin:+.0f}", verdict(met)]
        for name, (begin, end, met) in grown.items()
    ]
    heads = ["held", "after a minute", "at the end", "growth", "verdict"]
    print_table(f"{args.minutes:g} minutes, {figures['done']}", heads, rows)
    for who in ("plugin_said", "others_said"):
        for text, count in figures[who].items():
            print(f"{who} {count} times: {text}")
    print(f"threads after the viewer was closed: {figures['threads_after_close'] or 'none'}")
    write_json(args.json, {"growth": grown, **figures})
    return int(bool(figures["plugin_said"]) or not all(met for *_, met in grown.values()))


if __name__ == "__main__":
    ensure_display()
    raise SystemExit(main())
