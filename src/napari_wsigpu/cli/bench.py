"""The command ``wsigpu bench``: how fast each decoder of this machine reads a slide."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.cli.doctor import diagnose
from napari_wsigpu.codecs.table import storage_name
from napari_wsigpu.model.errors import DeviceError, SlideError, TargetWriteError, TileError
from napari_wsigpu.model.interrupt import noticed_interrupt
from napari_wsigpu.slide.slide import Slide, open_slide

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from threading import Event

    Pair = tuple[int, int]

VIEWPORT, PATCH, SWEEP = (1920, 1200), (256, 256), (2048, 2048)
BATCH = 64
MEMORIES = {"cpu": "host", "cuda": "GPU"}
COLUMNS = {
    "viewport_median_ms": "viewport ms",
    "viewport_p95_ms": "p95 ms",
    "patches_per_second": "patches/s",
    "megapixels_per_second": "sweep MP/s",
}
EPILOG = """\
A viewport is a region of 1920 x 1200 at a random place of level 0, read with an empty cache (the
median, and what 95 % do not exceed). Patches are regions of 256 x 256 at random places, read ahead
in batches of 64, after each of which the cache is emptied. The sweep reads level 0 from its top,
ahead, as far as it gets. The system keeps in memory what it has read of a file: the second time, no
disk is measured.
"""


def add_command(commands: Any) -> None:
    """Add the command to those of ``wsigpu``."""
    parser = commands.add_parser(
        "bench",
        help="time viewports, patches and a sweep of a slide",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("slide", help="path of a slide")
    parser.add_argument("--seconds", type=_seconds, default=5, help="for each measurement (5)")
    parser.add_argument("--json", type=output_file, help="write figures and machine to this file")
    parser.set_defaults(run=_run)


def output_file(text: str) -> Path:
    """Return the path of a file to write; what can't be one is an error of the command line."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text: the first column to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    print(f"\n{title}")
    for row in (heads, ["-" * width for width in widths], *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        print("  ".join(cells).rstrip())


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return seconds


def _run(options: argparse.Namespace) -> int:
    try:
        with noticed_interrupt() as interrupted:
            record = _measure(options.slide, options.seconds, interrupted)
        if options.json is not None:
            _write(options.json, record | {"machine": asdict(diagnose())})
        if record["failed_tiles"]:
            raise TileError(record["slide"], tuple(record["failed_tiles"].items()))
    except SlideError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _measure(path: str, seconds: float, interrupted: Event) -> dict[str, Any]:
    """Measure all decoders and print the table; return the figures, JSON-serialisable."""
    no_gpu = ""
    with open_slide(path, device="cpu") as slide:
        trial = _Trial(slide, "cpu", seconds, interrupted, {})
        trial.warm_up()
        rows = [trial.row()]
    try:
        with open_slide(path, device="cuda") as on_gpu:
            for device in MEMORIES:
                trial = replace(trial, slide=on_gpu, device=device)
                trial.warm_up()
                decoder, why = on_gpu.decoder
                if device == "cpu" and decoder == rows[0]["decoder"]:
                    no_gpu = why  # what the CPU decodes to the host was measured above
                else:
                    rows.append(trial.row())
    except DeviceError as error:
        no_gpu = str(error).partition(";")[0].removesuffix(".")
    print_table(_title(slide), ("decoder", *COLUMNS.values()), [_cells(row) for row in rows])
    if no_gpu:
        print(f"not by a GPU: {no_gpu}")
    facts = {"slide": slide.path, "size": slide.dimensions, "seconds": seconds}
    return {**facts, "rows": rows, "no_gpu": no_gpu, "failed_tiles": trial.failed}


@dataclass(frozen=True, slots=True)
class _Trial:
    """Reads of a slide to a device; regions and batches with a damaged tile don't count."""

    slide: Slide
    device: str
    seconds: float
    interrupted: Event
    failed: dict[str, str]

    def row(self) -> dict[str, Any]:
        """Measure all; a figure is None where damaged tiles left nothing to time."""
        milliseconds = self.time_viewports()
        median, p95 = np.percentile(milliseconds or 0, (50, 95)).tolist()
        patches = self.rate(self.places(PATCH), self.fitting(PATCH), BATCH)
        width, height = self.slide.dimensions
        columns, rows = math.ceil(width / SWEEP[0]), math.ceil(height / SWEEP[1])
        across, down = width // columns, height // rows
        grid = ((x * across, y * down) for y in range(rows) for x in range(columns))
        regions = self.rate(grid, (across, down))
        return {
            "decoder": self.slide.decoder[0],
            "memory": MEMORIES[self.device],
            "viewports": len(milliseconds),
            "viewport_median_ms": median or None,
            "viewport_p95_ms": p95 or None,
            "patches_per_second": patches,
            "megapixels_per_second": regions and regions * across * down / 1e6,
        }

    def warm_up(self) -> None:
        """Start the decoder, which may take seconds."""
        self.time_viewport(next(self.places(VIEWPORT)))

    def time_viewports(self) -> list[float]:
        begin, milliseconds = time.perf_counter(), []
        for place in self.places(VIEWPORT):
            milliseconds += self.time_viewport(place)
            if self.is_over(begin):
                break
        return milliseconds

    def time_viewport(self, place: Pair) -> list[float]:
        self.slide.clear_cache()
        begin = time.perf_counter()
        try:
            self.slide.read_region(place, self.fitting(VIEWPORT), device=self.device)
        except TileError as error:
            self.failed.update(error.failures)
            return []
        return [(time.perf_counter() - begin) * 1e3]

    def rate(
        self, places: Iterator[Pair], size: Pair, batch_size: int | None = None
    ) -> float | None:
        """Return how many regions are read a second, until time is up."""
        self.slide.clear_cache()
        rate, count, begin = None, 0, time.perf_counter()
        while True:
            try:
                for pixels in self.slide.read_regions(
                    places, size, batch_size=batch_size, device=self.device
                ):
                    count += 1 if batch_size is None else len(pixels)
                    rate = count / (time.perf_counter() - begin)
                    if self.is_over(begin):
                        break
                    if batch_size is not None:  # or all of a small slide would soon be at hand
                        self.slide.clear_cache()
                return rate
            except TileError as error:  # what was read ahead is lost; the next places follow
                self.failed.update(error.failures)
                if self.is_over(begin):
                    return rate

    def fitting(self, size: Pair) -> Pair:
        width, height = self.slide.dimensions
        return min(size[0], width), min(size[1], height)

    def places(self, size: Pair) -> Iterator[Pair]:
        """Yield random places of regions, the same ones each time."""
        choose = random.Random(0)
        (width, height), (across, down) = self.slide.dimensions, self.fitting(size)
        while True:
            yield choose.randint(0, width - across), choose.randint(0, height - down)

    def is_over(self, begin: float) -> bool:
        if self.interrupted.is_set():
            raise KeyboardInterrupt
        return time.perf_counter() - begin >= self.seconds


def _title(slide: Slide) -> str:
    (width, height), level = slide.dimensions, slide.layout.levels[0]
    return (
        f"{Path(slide.path).name}, level 0: {width} x {height}, {level.channels} x {level.dtype}, "
        f"tiles {level.grid.tile_width} x {level.grid.tile_height}, {storage_name(level)}"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    values = (row[name] for name in COLUMNS)
    name = f"{row['decoder']}, to {row['memory']} memory"
    return [name, *("-" if value is None else f"{value:,.1f}" for value in values)]


def _write(path: Path, record: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise TargetWriteError(
            f"'{path}' can't be written ({error.strerror or error}); give another file."
        ) from None
