"""Time viewports of a MIRAX slide beside the same tiles in an SVS, and beside other readers.

Usage: ``python -m benchmarks.mirax [--devices cpu cuda --rounds 20 --folder DIR --json FILE]``
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tifffile

import napari_wsigpu
from benchmarks.common import SLIDES, write_json
from benchmarks.synthetic import TAGS, encode, make_picture
from napari_wsigpu.cli.bench import print_table
from tests.writers import mirax

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Read = Callable[[int, int], Any]

TILE, DIVISIONS, OVERLAP = 256, 4, 24
SIZE = 2048
CHECKED = 3


def make_slides(folder: Path, side: int) -> tuple[Path, Path, Path]:
    """Write a MIRAX slide, one whose photos overlap, and an SVS of the same tiles.

    Parameters
    ----------
    folder : Path
        Where; slides that are there already are taken.
    side : int
        Pixels a side of each, if photos lie side by side; a multiple of 1024.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flat, lapped, other = (folder / f"{name}-{side}" for name in ("flat", "lapped", "same"))
    flat, lapped, other = (
        flat.with_suffix(".mrxs"), lapped.with_suffix(".mrxs"), other.with_suffix(".svs")
    )  # fmt: skip
    if other.exists():
        return flat, lapped, other
    pixels = make_picture(side, TILE)
    slide = mirax.Mirax(
        images=(side // TILE, side // TILE), divisions=DIVISIONS, size=(TILE, TILE), levels=1,
        encode=lambda image: encode(image, "jpeg"), mixed=False,
    )  # fmt: skip
    mirax.write(flat, slide, pixels)
    places = mirax.scattered(slide, OVERLAP // 2)
    mirax.write(lapped, slide._replace(positions=places), pixels)
    tiles = pixels.reshape(side // TILE, TILE, side // TILE, TILE, 3).swapaxes(1, 2)
    tifffile.imwrite(
        other,
        (encode(tile, "jpeg") for tile in tiles.reshape(-1, TILE, TILE, 3)),
        shape=pixels.shape,
        dtype=np.uint8,
        tile=(TILE, TILE),
        description=f"Aperio Image Library v12.0.15 \r\n{side}x{side}|AppMag = 40|MPP = 0.25",
        metadata=None,
        **TAGS["jpeg"],
    )
    return flat, lapped, other


def ours(path: Path, device: str) -> Read:
    """Read by `Slide.read_region` with an empty cache."""
    slide = napari_wsigpu.open_slide(path, device=device)

    def read(x: int, y: int) -> Any:
        slide.clear_cache()
        begin = time.perf_counter(), time.process_time()
        pixels = slide.read_region((x, y), (SIZE, SIZE), device=device)
        if device != "cpu":
            import_module("cupy").cuda.get_current_stream().synchronize()
        return pixels, begin

    return read


def fastslide(path: Path) -> Read:
    """Read by FastSlide without a cache."""
    from fastslide import FastSlide

    slide = FastSlide.from_file_path(str(path), cache=None)

    def read(x: int, y: int) -> Any:
        begin = time.perf_counter(), time.process_time()
        return np.asarray(slide.read_region((x, y), 0, (SIZE, SIZE)).numpy()), begin

    return read


def openslide(path: Path) -> Read:
    """Read by OpenSlide without its cache."""
    from openslide import OpenSlide, OpenSlideCache

    slide = OpenSlide(path)
    slide.set_cache(OpenSlideCache(0))

    def read(x: int, y: int) -> Any:
        begin = time.perf_counter(), time.process_time()
        return np.asarray(slide.read_region((x, y), 0, (SIZE, SIZE))), begin

    return read


def on_host(pixels: Any) -> NDArray[np.int16]:
    """Return the colours of a region, on white, as signed numbers to be subtracted."""
    if not isinstance(pixels, np.ndarray):
        pixels = pixels.get()
    found: NDArray[np.int16] = pixels[..., :3].astype(np.int16)
    if pixels.shape[2] == 4:
        found[pixels[..., 3] == 0] = 255
    return found


def measure(paths: tuple[Path, Path, Path], devices: list[str], rounds: int) -> dict[str, Any]:
    """Time all readers in turn at the same places, another one first each time."""
    names = ("MIRAX, side by side", "MIRAX, overlapping", "the same tiles in an SVS")
    readers: dict[str, Read] = {}
    peers: dict[str, Read] = {}
    for device in devices:
        for name, path in zip(names, paths, strict=True):
            readers[f"{name}, ours, {device}"] = ours(path, device)
    for peer, opener in (("FastSlide", fastslide), ("OpenSlide", openslide)):
        for name, path in zip(names[:2], paths, strict=False):
            try:
                peers[f"{name}, {peer}"] = opener(path)
            except Exception as error:  # whatever a peer raises
                print(f"{peer} of {name}: not measured ({error!r})")
    readers |= peers
    choose = random.Random(0)
    side = min(napari_wsigpu.open_slide(path, "cpu").dimensions[0] for path in paths)
    places = [tuple(choose.randrange(side - SIZE) for _ in "xy") for _ in range(rounds + CHECKED)]
    found: dict[str, dict[str, Any]] = {
        name: {"wall_ms": [], "cpu_ms": [], "largest_difference": 0} for name in readers
    }
    for x, y in places[:CHECKED]:
        truth = {name: on_host(ours(path, "cpu")(x, y)[0]) for name, path in zip(names, paths)}  # noqa: B905
        for name, read in readers.items():
            expected = next(pixels for start, pixels in truth.items() if name.startswith(start))
            difference = int(np.abs(on_host(read(x, y)[0]) - expected).max())
            found[name]["largest_difference"] = max(found[name]["largest_difference"], difference)
    order = list(readers)
    for turn, (x, y) in enumerate(places[CHECKED:]):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            pixels, (wall, cpu) = readers[name](x, y)
            found[name]["wall_ms"].append((time.perf_counter() - wall) * 1e3)
            found[name]["cpu_ms"].append((time.process_time() - cpu) * 1e3)
            del pixels
    for values in found.values():
        for clock in ("wall_ms", "cpu_ms"):
            values[f"median_{clock}"] = round(statistics.median(values[clock]), 3)
            values[clock] = [round(value, 3) for value in values[clock]]
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", nargs="+", default=["cpu"], choices=["cpu", "cuda"])
    parser.add_argument("--side", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=SLIDES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    paths = make_slides(options.folder, options.side)
    found = measure(paths, options.devices, options.rounds)
    heads = ("reader", "median, ms", "processor, ms", "largest difference")
    rows = [
        [name, *(f"{values[f'median_{key}_ms']:.2f}" for key in ("wall", "cpu")),
         str(values["largest_difference"])]
        for name, values in found.items()
    ]  # fmt: skip
    print_table(f"Cold viewports of {SIZE} x {SIZE}, {options.rounds} rounds", heads, rows)
    write_json(options.json, {"rounds": options.rounds, "readers": found})


if __name__ == "__main__":
    main()
