"""Time batches of JPEG 2000 tiles: by our kernels, by nvJPEG2000, and by the cores.

Usage: ``python -m benchmarks.jpeg2000 [SLIDE] [--tiles N ...] [--json OUT]``.

Needs a CUDA device. The bytes are in page-locked memory; the pixels come to the device, those of
the cores to the host. Without a slide, a synthetic one of 256² tiles is made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import numpy as np

from benchmarks.common import SLIDES, ensure_slide, write_json
from napari_wsigpu import open_slide, runtime
from napari_wsigpu.bench import print_table
from napari_wsigpu.codecs.tile import decode_tile
from napari_wsigpu.gpu.codestream import Jpeg2000Streams, recipe
from napari_wsigpu.gpu.jpeg2000.tiles import Jpeg2000Tiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari_wsigpu.codecs.decoder import EncodedBatch
    from napari_wsigpu.gpu.worker import DecodeWorker

ROUNDS, WARM_UP = 7, 2


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time batches of JPEG 2000 tiles.")
    parser.add_argument("slide", type=Path, nargs="?", default=None)
    parser.add_argument("--tiles", type=int, nargs="+", default=[81, 256, 1024])
    parser.add_argument("--slides", type=Path, default=SLIDES, help="folder for the synthetic one")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args(arguments)
    path = given.slide or ensure_slide(given.slides, 16384, "jpeg2000", 256)
    rows = [row for count in given.tiles for row in batches(path, count)]
    heads = ("tiles", "decoder", "median ms", "MP/s", "cores busy")
    print_table("JPEG 2000", heads, [tuple(map(str, row.values())) for row in rows])
    write_json(given.json, {"batches": rows})


def batches(path: Path, count: int) -> list[dict[str, Any]]:
    """Time each decoder on the first tiles of a slide."""
    worker = runtime.default().devices.worker(0)
    with open_slide(path, device="cpu") as slide:
        image = slide.layout.levels[0]
        tiles = np.argwhere(np.ones((image.grid.rows, image.grid.columns), bool))[:count]
        executor = slide._reader.offload.executor(worker)
        batch = executor.pipeline.encoded(image, tiles)
        how = recipe(image)
        if isinstance(how, str):
            raise SystemExit(f"The GPU can't decode these tiles: {how}.")
        ways: dict[str, Callable[[], None]] = {
            "our kernels": partial(
                by_device, worker, Jpeg2000Tiles(image, how, worker.jpeg2000), batch
            ),
            "nvJPEG2000": partial(by_device, worker, Jpeg2000Streams(image, how), batch),
            "imagecodecs": partial(by_cores, batch),
        }
        pixels = len(tiles) * image.grid.tile_width * image.grid.tile_height
        return [
            {"tiles": len(tiles), "decoder": name, **timed(way, pixels)}
            for name, way in ways.items()
        ]


def by_device(
    worker: DecodeWorker, maker: Jpeg2000Tiles | Jpeg2000Streams, batch: EncodedBatch
) -> None:
    """Decode a batch to device memory, and wait."""
    size = batch.level.tile_bytes
    start, memory = worker.device.allocate(len(batch) * size)

    def decode(worker: DecodeWorker) -> None:
        work = worker.take_workspace()
        with worker.device.active():
            prepared = maker.prepare(batch, len(batch), work)
            prepared.describe([start + size * k for k in range(len(batch))], worker.stream)
            worked = prepared.decode(worker)
            worker.stream.synchronize()
        refused = len(batch) - sum(worked) + len(prepared.doubtful(range(len(batch))))
        worker.give_workspace(work)
        if refused:
            raise SystemExit(f"{refused} tiles were not decoded.")

    worker.run(decode)
    del memory


def by_cores(batch: EncodedBatch) -> None:
    """Decode a batch by all cores."""
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        memory = np.empty((len(batch), batch.level.tile_bytes), np.uint8)
        for _ in pool.map(decode_tile, batch, memory, chunksize=4):
            pass


def timed(way: Callable[[], None], pixels: int) -> dict[str, float]:
    """Time one way to decode so many pixels."""
    seconds = []
    for number in range(WARM_UP + ROUNDS):
        if number == WARM_UP:
            busy, begun = time.process_time(), time.perf_counter()
        begin = time.perf_counter()
        way()
        seconds.append(time.perf_counter() - begin)
    cores = (time.process_time() - busy) / (time.perf_counter() - begun)
    median = statistics.median(seconds[WARM_UP:])
    return {
        "median_ms": round(median * 1e3, 2),
        "megapixels_a_second": round(pixels / median / 1e6),
        "cores_busy": round(cores, 1),
    }


if __name__ == "__main__":
    main()
