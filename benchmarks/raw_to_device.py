"""A level of raw tiles to device memory, beside the same bytes by a plain read and copy.

Run as ``python -m benchmarks.raw_to_device [--side 16384] [--json FILE]`` on a machine with a GPU.
The yardstick is several threads that fill pieces of page-locked memory by ``preadv`` and upload
each as soon as it is there, into one buffer, with nothing laid out. All are measured in turn, in
one process, with the file in the page cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tifffile

from benchmarks.common import write_json
from benchmarks.transfers.plain_copy import PlainCopy
from napari_wsigpu import open_slide
from napari_wsigpu.gpu.transfer import gds

if TYPE_CHECKING:
    from collections.abc import Callable

TILE = 512
ROUNDS = 15


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=16384, help="pixels of a side")
    parser.add_argument("--folder", help="where the slide is written")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder, "raw.tif")
        tile = np.random.default_rng(0).integers(0, 255, (TILE, TILE, 3), np.uint8)
        count = (options.side // TILE) ** 2
        tiles = (tile + np.uint8(number % 256) for number in range(count))
        shape = (options.side, options.side, 3)
        tifffile.imwrite(
            path,
            tiles,
            shape=shape,
            dtype=np.uint8,
            tile=(TILE, TILE),
            photometric="rgb",
            bigtiff=True,
        )
        found = measure(path, options.side)
    for name, seconds in found["median_s"].items():
        print(f"{name:<28} {seconds * 1e3:8.2f} ms  {found['bytes'] / seconds / 1e9:6.2f} GB/s")
    write_json(options.json, found)


def measure(path: Path, side: int) -> dict[str, Any]:
    """Return the medians of all ways, after their pixels were compared."""
    cupy = import_module("cupy")
    size = side * side * 3
    with open_slide(path, device="cuda") as slide, ExitStack() as stack:
        first = int(slide.layout.levels[0].grid.offsets[0, 0, 0])
        out, buffer = cupy.empty((side, side, 3), np.uint8), cupy.empty(size, np.uint8)

        def ours() -> None:
            slide.read_region((0, 0), (side, side), device="cuda", out=out)

        def by(way: str) -> Callable[[], None]:
            os.environ[gds.GDS] = way
            reads = gds.DirectReads()
            module = reads.module()

            def read() -> None:
                gds.direct_reads = reads
                ours()

            return read if way == "off" or module is not None else lambda: None

        ways: dict[str, Callable[[], None]] = {
            f"plain, {threads} x {piece >> 20} MiB": partial(
                PlainCopy(str(path), first, size, threads, piece, stack), buffer
            )
            for threads, piece in (
                (4, 4 << 20),
                (8, 4 << 20),
                (8, 8 << 20),
                (16, 4 << 20),
                (16, 8 << 20),
            )
        }
        ways |= {"ours, by threads": by("off"), "ours, by kvikio": by("kvikio")}
        with tifffile.TiffFile(path) as file:
            expected = file.pages[0].asarray()
        for name, read in ways.items():
            out.fill(0)
            read()
            read()
            if name.startswith("ours") and not (out == cupy.asarray(expected)).all():
                raise SystemExit(f"{name}: wrong pixels")
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, read in ways.items():
                cupy.cuda.Device().synchronize()
                begin = time.perf_counter()
                read()
                cupy.cuda.Device().synchronize()
                seconds[name].append(time.perf_counter() - begin)
    state: Any
    try:
        state = gds.gds_state()._asdict()
    except (ImportError, OSError, RuntimeError) as error:
        state = str(error)
    return {
        "bytes": size,
        "gds": state,
        "cores": os.cpu_count(),
        "median_s": {name: statistics.median(each) for name, each in seconds.items()},
        "all_s": seconds,
    }


if __name__ == "__main__":
    main()
