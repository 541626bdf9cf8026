"""The command ``wsigpu bench``: measures how fast each of this machine's decoders reads a slide."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from napari_wsigpu.cli.doctor import diagnose
from napari_wsigpu.codecs.compressions import storage_name
from napari_wsigpu.model.errors import DeviceError, SlideError, TileError, write_errors
from napari_wsigpu.model.interrupt import interrupt_event
from napari_wsigpu.model.printable import printable
from napari_wsigpu.slide.slide import Slide, open_slide

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction
    from collections.abc import Iterator, Sequence
    from threading import Event

    from napari_wsigpu.model.geometry import Pair

# (width, height) of regions in pixels, and the number of patches in a batch.
VIEWPORT, PATCH, SWEEP = (1920, 1200), (256, 256), (2048, 2048)
BATCH = 64
MEMORIES = {"cpu": "host", "cuda": "GPU"}
Row = dict[str, str | float | None]
COLUMNS = {
    "viewport_median_ms": "viewport ms",
    "viewport_p95_ms": "p95 ms",
    "patches_per_second": "patches/s",
    "megapixels_per_second": "sweep MP/s",
}
EPILOG = """\
A viewport is a region of 1920 x 1200 pixels at a random location of level 0, read with an empty
cache; the figures are the median and the 95th percentile. Patches are 256 x 256 pixels at
random locations, read ahead in batches of 64; the cache is emptied after each batch. The sweep
reads level 0 from the top until the time is up or the whole level has been read. The operating
system caches files, so a second run does not measure the disk.
"""


class Record(TypedDict):
    """Results of all measurements, JSON-serializable."""

    slide: str
    size: tuple[int, int]
    seconds: float
    rows: list[Row]
    no_gpu: str
    failed_tiles: dict[str, str]


def add_command(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add the parser of this command."""
    parser = commands.add_parser(
        "bench",
        help="time viewports, patches and a sweep of a slide",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("slide", help="path of a slide")
    parser.add_argument(
        "--seconds", type=_seconds, default=5, help="seconds per measurement (default: 5)"
    )
    parser.add_argument(
        "--json",
        type=output_file,
        help="also write the figures and the doctor's findings to this file",
    )
    parser.set_defaults(run=_run)


def output_file(text: str) -> Path:
    """Convert a command-line argument to the path of a file that can be written."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is left-aligned, all others are right-aligned."""
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
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return seconds


def _run(options: argparse.Namespace) -> int:
    try:
        with interrupt_event() as interrupted:
            record = _measure(options.slide, options.seconds, interrupted)
        if options.json is not None:
            report = {**record, "machine": asdict(diagnose())}
            with write_errors(options.json):
                options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if record["failed_tiles"]:
            raise TileError(record["slide"], tuple(record["failed_tiles"].items()))
    except SlideError as error:
        print(printable(str(error)), file=sys.stderr)
        return 1
    return 0


def _measure(path: str, seconds: float, interrupted: Event) -> Record:
    """Measure all decoders, and print a table of the results."""
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
                decoder, reason = on_gpu.decoder
                if device == "cpu" and decoder == rows[0]["decoder"]:
                    no_gpu = reason  # decoding on the CPU to the host was measured above
                else:
                    rows.append(trial.row())
    except DeviceError as error:
        no_gpu = str(error).partition(";")[0].removesuffix(".")
    print_table(_title(slide), ("decoder", *COLUMNS.values()), [_cells(row) for row in rows])
    if no_gpu:
        print(f"not decoded by a GPU: {no_gpu}")
    return {
        "slide": slide.path,
        "size": slide.dimensions,
        "seconds": seconds,
        "rows": rows,
        "no_gpu": no_gpu,
        "failed_tiles": trial.failed,
    }


@dataclass(frozen=True, slots=True)
class _Trial:
    """Timed reads of a slide to a device. Regions and batches with damaged tiles do not count."""

    slide: Slide
    device: str
    seconds: float
    interrupted: Event
    failed: dict[str, str]

    def row(self) -> Row:
        """Run all measurements; a figure is None if damaged tiles left nothing to time."""
        milliseconds = self.time_viewports()
        median, p95 = np.percentile(milliseconds or 0, (50, 95)).tolist()
        patches = self.rate(self.locations(PATCH), self.fitting(PATCH), BATCH)
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
        self.time_viewport(next(self.locations(VIEWPORT)))

    def time_viewports(self) -> list[float]:
        start, milliseconds = time.perf_counter(), []
        for location in self.locations(VIEWPORT):
            milliseconds += self.time_viewport(location)
            if self.is_over(start):
                break
        return milliseconds

    def time_viewport(self, location: Pair) -> list[float]:
        """Return the time in ms, as a list that is empty if a tile is damaged."""
        self.slide.clear_cache()
        start = time.perf_counter()
        try:
            self.slide.read_region(location, self.fitting(VIEWPORT), device=self.device)
        except TileError as error:
            self.failed.update(error.failures)
            return []
        return [(time.perf_counter() - start) * 1e3]

    def rate(self, locations: Iterator[Pair], size: Pair, batch: int | None = None) -> float | None:
        """Read until time is up or the locations end; return regions per second, or None."""
        slide = self.slide
        slide.clear_cache()
        rate, count, start = None, 0, time.perf_counter()
        while True:
            try:
                for pixels in slide.read_regions(
                    locations, size, batch_size=batch, device=self.device
                ):
                    count += 1 if batch is None else len(pixels)
                    rate = count / (time.perf_counter() - start)
                    if self.is_over(start):
                        break
                    if batch is not None:  # the cache would soon hold a whole small slide
                        slide.clear_cache()
                return rate
            except TileError as error:  # continue with the remaining locations
                self.failed.update(error.failures)
                if self.is_over(start):
                    return rate

    def fitting(self, size: Pair) -> Pair:
        """Return a size limited to the slide's size."""
        width, height = self.slide.dimensions
        return min(size[0], width), min(size[1], height)

    def locations(self, size: Pair) -> Iterator[Pair]:
        """Yield random locations of regions, the same ones in each run."""
        choose = random.Random(0)
        (width, height), (across, down) = self.slide.dimensions, self.fitting(size)
        while True:
            yield choose.randint(0, width - across), choose.randint(0, height - down)

    def is_over(self, start: float) -> bool:
        if self.interrupted.is_set():
            raise KeyboardInterrupt
        return time.perf_counter() - start >= self.seconds


def _title(slide: Slide) -> str:
    (width, height), level = slide.dimensions, slide.layout.levels[0]
    return (
        f"{printable(Path(slide.path).name)}, level 0: {width} x {height}, "
        f"{level.channels} x {level.dtype}, "
        f"tiles {level.grid.tile_width} x {level.grid.tile_height}, {storage_name(level)}"
    )


def _cells(row: Row) -> list[str]:
    values = (row[name] for name in COLUMNS)
    name = f"{row['decoder']}, to {row['memory']} memory"
    return [name, *("-" if value is None else f"{value:,.1f}" for value in values)]
