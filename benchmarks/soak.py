"""Walk at random through two slides in one viewer for minutes, and see whether anything piles up.

Usage: ``python -m benchmarks.soak [--minutes 10 --seed 0 --folder DIR --json FILE]``

Pans, zooms, jumps; layers removed and put back, duplicated, opened again, hidden; grid and 3D.
After each of these the viewer shows the same two slides, so that what is counted every 10 s,
after a rest and a garbage collection, may not grow from the second minute to the last. Of what is
resident the tile cache is taken off; what the C library has allocated does not hold it, as tiles
have pages of their own. The status is 1 if something grew, or the plugin warned of anything.
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
    """Return of each figure its value after the first minute and at the end, and whether it may.

    Of memory these are medians of a minute; of counts the least of it, as what is at work only
    for a moment is no leak.
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
    given = parser.parse_args()
    slides = [
        ensure_slide(given.folder, 32768, "jpeg"),
        ensure_slide(given.folder, 16384, "jpeg2000"),
    ]
    with TemporaryDirectory() as folder:
        result = Path(folder) / "soak.json"
        options = ["--minutes", str(given.minutes), "--seed", str(given.seed)]
        run_part(
            PART,
            ["--slides", *map(str, slides), *options, "--json", str(result)],
            MINUTE * (given.minutes + 5),
        )
        figures: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))

    grown = growth(figures["samples"])
    rows = [
        [name, f"{begin:.0f}", f"{end:.0f}", f"{end - begin:+.0f}", verdict(met)]
        for name, (begin, end, met) in grown.items()
    ]
    heads = ["held", "after a minute", "at the end", "growth", "verdict"]
    print_table(f"{given.minutes:g} minutes, {figures['done']}", heads, rows)
    for who in ("plugin_said", "others_said"):
        for text, count in figures[who].items():
            print(f"{who} {count} times: {text}")
    print(f"threads after the viewer was closed: {figures['threads_after_close'] or 'none'}")
    write_json(given.json, {"growth": grown, **figures})
    return int(bool(figures["plugin_said"]) or not all(met for *_, met in grown.values()))


if __name__ == "__main__":
    ensure_display()
    raise SystemExit(main())
