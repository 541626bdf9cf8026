"""Time one viewport with every installed reader, cold, and with ours also from the cache.

Usage: ``python -m benchmarks.viewport [--rounds 20 --folder DIR --json FILE]``
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tifffile

import napari_wsigpu
from benchmarks.common import SLIDES, ensure_slide, verdict, write_json
from napari_wsigpu.cli.bench import print_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from benchmarks.synthetic import Codec

    Position = tuple[int, int]
    Read = Callable[[int, int], NDArray[Any]]

WIDTH, HEIGHT = 1536, 1024
CHECKED = 3
OURS, OURS_WARM = "napari-wsigpu", "napari-wsigpu, warm"
SIDES: dict[Codec, int] = {"jpeg": 32768, "jpeg2000": 16384}
TARGETS: dict[Codec, dict[str, float]] = {
    "jpeg": {"FastSlide": 1.3, "OpenSlide": 4, "napari-wsi": 9},
    "jpeg2000": {"OpenSlide": 1.7},
}


class Reader(NamedTuple):
    """A reader of viewports.

    Attributes
    ----------
    read : callable
        Returns the viewport at (x, y) as an array; this is timed.
    prepare : callable, optional
        Called with the same position before the timed read.
    """

    read: Read
    prepare: Callable[[int, int], object] | None = None


def ours(path: Path) -> Reader:
    """Slice a level, as napari does, with an empty cache."""
    slide = napari_wsigpu.open_slide(path, device="cpu")
    level = slide.levels[0]
    return Reader(
        lambda x, y: level[y : y + HEIGHT, x : x + WIDTH], lambda x, y: slide.clear_cache()
    )


def ours_warm(path: Path) -> Reader:
    """Read the same viewport again."""
    read = ours(path).read
    return Reader(read, read)


def openslide(path: Path) -> Reader:
    """Read with OpenSlide without its cache."""
    from openslide import OpenSlide, OpenSlideCache

    slide = OpenSlide(path)
    slide.set_cache(OpenSlideCache(0))
    return Reader(lambda x, y: np.asarray(slide.read_region((x, y), 0, (WIDTH, HEIGHT))))


def tiffslide(path: Path) -> Reader:
    """Read with tiffslide, directly into an array."""
    from tiffslide import TiffSlide

    slide = TiffSlide(path)
    return Reader(
        lambda x, y: np.asarray(slide.read_region((x, y), 0, (WIDTH, HEIGHT), as_array=True))
    )


def fastslide(path: Path) -> Reader:
    """Read with FastSlide without a cache."""
    from fastslide import FastSlide

    slide = FastSlide.from_file_path(str(path), cache=None)
    return Reader(lambda x, y: np.asarray(slide.read_region((x, y), 0, (WIDTH, HEIGHT)).numpy()))


def napari_wsi(path: Path) -> Reader:
    """Slice the array that napari-wsi passes to napari."""
    from napari_wsi.reader import wsi_reader_openslide

    layer = wsi_reader_openslide(str(path))(str(path))[0]
    level = layer[0][0]
    return Reader(lambda x, y: np.asarray(level[y : y + HEIGHT, x : x + WIDTH]))


def tifffile_zarr(path: Path) -> Reader:
    """Slice tifffile's view of level 0 as a zarr array."""
    import zarr

    level: Any = zarr.open(tifffile.imread(path, aszarr=True, series=0, level=0), mode="r")
    return Reader(lambda x, y: np.asarray(level[y : y + HEIGHT, x : x + WIDTH]))


READERS: dict[str, Callable[[Path], Reader]] = {
    OURS: ours,
    OURS_WARM: ours_warm,
    "FastSlide": fastslide,
    "tifffile as zarr": tifffile_zarr,
    "tiffslide": tiffslide,
    "OpenSlide": openslide,
    "napari-wsi": napari_wsi,
}


def reference(path: Path, x: int, y: int) -> NDArray[Any]:
    """Decode a viewport tile by tile with tifffile and imagecodecs."""
    with tifffile.TiffFile(path) as file:
        page = file.pages.first
        side = page.tilewidth
        top, left = y // side, x // side
        bottom, right = -(-(y + HEIGHT) // side), -(-(x + WIDTH) // side)
        pixels = np.zeros(((bottom - top) * side, (right - left) * side, 3), np.uint8)
        for row in range(top, bottom):
            for column in range(left, right):
                index = row * -(-page.imagewidth // side) + column
                file.filehandle.seek(page.dataoffsets[index])
                data = file.filehandle.read(page.databytecounts[index])
                tile: Any = page.decode(data, index, jpegtables=page.jpegtables)[0]
                down, across = (row - top) * side, (column - left) * side
                pixels[down : down + side, across : across + side] = tile[0]
    return pixels[y - top * side :, x - left * side :][:HEIGHT, :WIDTH]


def open_readers(path: Path) -> tuple[dict[str, Reader], dict[str, str]]:
    """Open a slide with every reader; return the readers, and why others are missing."""
    readers, missing = {}, {}
    for name, opener in READERS.items():
        try:
            readers[name] = opener(path)
        except ImportError as error:
            missing[name] = f"not installed ({error})"
        except Exception as error:  # whatever a peer raises
            if opener in (ours, ours_warm):
                raise
            missing[name] = f"can't open the slide ({error!r})"
    return readers, missing


def largest_difference(read: Read, path: Path, positions: list[Position]) -> int:
    """Return the largest difference of any sample from the reference decode."""
    return max(
        int(np.abs(read(x, y)[..., :3].astype(int) - reference(path, x, y)).max())
        for x, y in positions
    )


def time_readers(readers: dict[str, Reader], positions: list[Position]) -> dict[str, list[float]]:
    """Return the seconds per reader and position; a different reader is first each round."""
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    names = list(readers)
    for turn, (x, y) in enumerate(positions):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            reader = readers[name]
            if reader.prepare is not None:
                reader.prepare(x, y)
            begin = time.perf_counter()
            pixels = reader.read(x, y)
            seconds[name].append(time.perf_counter() - begin)
            del pixels
    return seconds


def measure(path: Path, codec: Codec, rounds: int) -> dict[str, Any]:
    """Measure one slide and print its table."""
    readers, missing = open_readers(path)
    side = SIDES[codec]
    choose = random.Random(0)
    positions = [
        (choose.randrange(side - WIDTH), choose.randrange(side - HEIGHT))
        for _ in range(CHECKED + 1 + rounds)
    ]
    differences = {
        name: largest_difference(reader.read, path, positions[:CHECKED])
        for name, reader in readers.items()
    }
    timed = time_readers(readers, positions[CHECKED:])
    seconds = {name: statistics.median(times[1:]) for name, times in timed.items()}

    cold = seconds[OURS]
    figures: dict[str, Any] = {}
    for name, median in seconds.items():
        warm = name == OURS_WARM
        ratio = cold / median if warm else median / cold
        target = TARGETS[codec].get(name)
        figures[name] = {
            "median_ms": round(median * 1e3, 3),
            "megapixels_per_second": round(WIDTH * HEIGHT / 1e6 / median, 1),
            "largest_difference": differences[name],
            "cold_by_warm" if warm else "peer_by_ours": round(ratio, 2),
            "target": target,
            "verdict": None if target is None else verdict(ratio >= target),
        }
    report(f"{codec}, {side} x {side}: one viewport of {WIDTH} x {HEIGHT}", figures, missing)
    return {"slide_side": side, "rounds": rounds, "readers": figures, "missing": missing}


def report(title: str, figures: dict[str, Any], missing: dict[str, str]) -> None:
    """Print the table of one slide."""
    rows = [
        [
            name,
            f"{row['median_ms']:.2f}",
            f"{row['megapixels_per_second']:.0f}",
            str(row["largest_difference"]),
            f"{row['cold_by_warm']:.1f}" if name == OURS_WARM else f"{row['peer_by_ours']:.2f}",
            f"{row['target']:g}" if row["target"] else "",
            row["verdict"] or "",
        ]
        for name, row in figures.items()
    ]
    heads = ["reader", "median ms", "MP/s", "max diff", "ratio", "target", "verdict"]
    print_table(title, heads, rows)
    print("ratio: time of the reader / our cold time; of our warm read: our cold time / its time")
    for name, why in missing.items():
        print(f"MISSING {name}: {why}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time one viewport with every reader.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=SLIDES, help="where the slides are kept")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    figures = {}
    for codec, side in SIDES.items():
        path = ensure_slide(args.folder, side, codec)
        figures[codec] = measure(path, codec, args.rounds)
    write_json(args.json, {"viewport": [WIDTH, HEIGHT], "codecs": figures})


if __name__ == "__main__":
    main()
