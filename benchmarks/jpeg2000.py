"""Time JPEG 2000 tiles: our kernels, nvJPEG2000, CPU decoders, and slides read with `open_slide`.

Usage: ``python -m benchmarks.jpeg2000 [SLIDE ...] [--tiles N ...] [--whole] [--json OUT]``.

Needs a CUDA device. The encoded bytes of a batch are in page-locked memory. GPU decoders write
pixels to the device, CPU decoders to the host; all are compared with imagecodecs. If a slide has
too few tiles, they are repeated. Tiles may be high-throughput JPEG 2000.
``--whole`` also reads each slide with a device (a view, the whole level, random patches) and
compares it with the CPU. Without a slide, a synthetic one with tiles of 256 x 256 is made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("OPENCV_LOG_LEVEL", "ERROR")  # nvImageCodec's CPU backend

import numpy as np

from benchmarks.common import SLIDES, ensure_slide, write_json
from napari_wsigpu import open_slide
from napari_wsigpu.cli.bench import print_table
from napari_wsigpu.codecs.tile import decode_tile
from napari_wsigpu.gpu.jpeg.codestream import Jpeg2000Streams, recipe_for
from napari_wsigpu.gpu.jpeg2000.form_decoder import programs
from napari_wsigpu.gpu.jpeg2000.jpeg2000_engine import form_of_stream
from napari_wsigpu.gpu.jpeg2000.jpeg2000_tiles import Jpeg2000Tiles
from napari_wsigpu.slide import runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from napari_wsigpu import Slide
    from napari_wsigpu.codecs.decoder import EncodedBatch
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.model.arrays import Array

ROUNDS, WARM_UP = 7, 2
VIEW, PATCH, PATCHES, AT_ONCE, COMPARED = 2048, 256, 8192, 256, 3600
# nvImageCodec's device number for decoding on the CPU only.
NO_DEVICE = -99999


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time JPEG 2000 tiles.")
    parser.add_argument("slides", type=Path, nargs="*")
    parser.add_argument("--tiles", type=int, nargs="+", default=[81, 256, 1024])
    parser.add_argument("--whole", action="store_true", help="read whole slides too")
    parser.add_argument("--folder", type=Path, default=SLIDES, help="folder for the synthetic one")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args(arguments)
    paths = args.slides or [ensure_slide(args.folder, 16384, "jpeg2000", 256)]
    device = runtime.default().devices.worker(0).device
    begin = time.perf_counter()
    device.compile(*programs())
    figures: dict[str, Any] = {"compile_s": round(time.perf_counter() - begin, 2)}
    print(f"The kernels were compiled, or loaded, in {figures['compile_s']} s.")
    rows = [row for path in paths for count in args.tiles for row in batches(path, count)]
    figures["batches"] = rows
    heads: tuple[str, ...] = ("codec", "tile", "KB", "tiles", "decoder", "median ms", "GP/s")
    heads += "cores busy", "largest difference"
    print_table("JPEG 2000", heads, [tuple(map(str, row.values())) for row in rows])
    if args.whole:
        figures["slides"] = [whole(path) for path in paths]
        heads = tuple(figures["slides"][0])
        print_table("Slides", heads, [tuple(map(str, row.values())) for row in figures["slides"]])
    write_json(args.json, figures)


class Way(NamedTuple):
    """A decoder of a batch, and how to get the pixels that it decoded last."""

    decode: Callable[[], None]
    pixels: Callable[[], Array]


def batches(path: Path, count: int) -> list[dict[str, Any]]:
    """Time each decoder on a number of tiles of a slide, and compare the pixels."""
    worker = runtime.default().devices.worker(0)
    with open_slide(path, device="cpu") as slide:
        image = slide.layout.levels[0]
        grid = image.grid
        positions = np.argwhere(np.ones((grid.rows, grid.columns), bool))
        tiles = np.resize(positions, (count, 2))
        batch = slide._reader.offload.backend(worker).encoded(image, tiles)
        how = recipe_for(image)
        if isinstance(how, str):
            raise SystemExit(f"The GPU can't decode these tiles: {how}.")
        shape = count, grid.tile_height, grid.tile_width, image.encoding.samples
        ways = {
            "ours": by_device(worker, Jpeg2000Tiles(image, how, worker.jpeg2000), batch, shape),
            "nvJPEG2000": by_device(worker, Jpeg2000Streams(image, how), batch, shape),
            "imagecodecs": by_cores(batch, shape),
            "nvImageCodec, CPU": by_library(batch),
        }
        pixels = count * grid.tile_width * grid.tile_height
        size = round(float(batch.lengths.mean()) / 1e3, 1)
        form = form_of_stream(memoryview(batch[0].segments[0] or b""))
        fast = not isinstance(form, str) and form.header.fast
        kind: dict[str, Any] = {"codec": "HTJ2K" if fast else "JPEG 2000", "tile": grid.tile_width}
        kind |= {"kilobytes": size, "tiles": count}
        rows = [
            {**kind, "decoder": name, **timed(way.decode, pixels)} for name, way in ways.items()
        ]
        expected = ways["imagecodecs"].pixels().astype(np.int16)
        for row, way in zip(rows, ways.values(), strict=True):
            row["largest_difference"] = int(np.abs(way.pixels() - expected).max())
        return rows


def by_device(
    worker: DecodeWorker,
    maker: Jpeg2000Tiles | Jpeg2000Streams,
    batch: EncodedBatch,
    shape: tuple[int, ...],
) -> Way:
    """Decode a batch to device memory, which is allocated once, like the cache of a slide."""
    found = worker.device.empty(shape, batch.level.dtype)
    targets = worker.device.address(found) + batch.level.tile_bytes * np.arange(len(batch))

    def decode() -> None:
        work, stream = worker.acquire_workspace(), worker.acquire_stream()
        with worker.device.active(), worker.decoding:
            prepared = maker.prepare(batch, len(batch), work)
            prepared.set_targets(targets.tolist(), stream)
            worked = prepared.decode(worker)
            stream.synchronize()
        refused = len(batch) - sum(worked) + len(prepared.doubtful(range(len(batch))))
        worker.release_workspace(work)
        worker.release_stream(stream)
        if refused:
            raise SystemExit(f"{refused} tiles were not decoded.")

    def pixels() -> Array:
        stream = worker.device.new_stream()
        host = worker.device.download(found, stream)
        stream.synchronize()
        return host

    return Way(decode, pixels)


def by_cores(batch: EncodedBatch, shape: tuple[int, ...]) -> Way:
    """Decode a batch on all cores."""
    cores = os.cpu_count() or 1
    memory = np.empty((len(batch), batch.level.tile_bytes), np.uint8)

    def decode() -> None:
        with ThreadPoolExecutor(cores) as pool:
            for _ in pool.map(decode_tile, batch, memory, chunksize=4):
                pass

    return Way(decode, lambda: memory.view(batch.level.dtype).reshape(shape))


def by_library(batch: EncodedBatch) -> Way:
    """Decode a batch with nvImageCodec's CPU backend."""
    library = import_module("nvidia.nvimgcodec")
    backend = library.Backend(library.BackendKind.CPU_ONLY)
    decoder = library.Decoder(
        device_id=NO_DEVICE, max_num_cpu_threads=os.cpu_count() or 1, backends=[backend]
    )
    texts = [bytes(tile.segments[0] or b"") for tile in batch]
    found: list[Any] = []

    def decode() -> None:
        found[:] = decoder.decode([library.CodeStream(text) for text in texts])
        if None in found:
            raise SystemExit("nvImageCodec's CPU backend did not decode all tiles.")

    return Way(decode, lambda: np.stack([np.asarray(image) for image in found]))


def timed(way: Callable[[], None], pixels: int) -> dict[str, float]:
    """Time one decoder."""
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
        "gigapixels_a_second": round(pixels / median / 1e9, 3),
        "cores_busy": round(cores, 1),
    }


def whole(path: Path) -> dict[str, Any]:
    """Time cold reads of a slide as in a script, and compare the pixels with the CPU."""
    with open_slide(path, device="cuda") as slide, open_slide(path, device="cpu") as by_cpu:
        width, height = slide.level_dimensions[0]

        def view() -> None:
            slide.clear_cache()
            slide.read_region((0, 0), (min(VIEW, width), min(VIEW, height)), 0)

        begin = time.perf_counter()
        view()  # the CPU decodes a tile of it, too, with which the GPU's is compared
        first = time.perf_counter() - begin
        rng = np.random.default_rng(1)
        side = min(COMPARED, width, height)
        differing = slide.read_region((0, 0), (side, side), 0) != by_cpu.read_region(
            (0, 0), (side, side), 0
        )

        def read(positions: Iterator[tuple[int, int]], size: int, at_once: int) -> None:
            slide.clear_cache()
            regions = slide.read_regions(
                list(positions), (size, size), batch_size=at_once, device="cuda"
            )
            for _ in regions:
                pass

        grid = partial(corners, slide, min(VIEW, width, height))
        patches = min(PATCHES, width * height // PATCH**2)

        def anywhere() -> Iterator[tuple[int, int]]:
            across = rng.integers(0, max(1, width - PATCH), patches)
            down = rng.integers(0, max(1, height - PATCH), patches)
            return zip(across.tolist(), down.tolist(), strict=True)

        size = min(VIEW, width, height)
        pixels = len(list(grid())) * size**2
        sweep = timed(lambda: read(grid(), size, 4), pixels)
        random = timed(lambda: read(anywhere(), PATCH, AT_ONCE), patches * PATCH**2)
        return {
            "tile": slide.layout.levels[0].grid.tile_width,
            "width": width,
            "samples": side * side * 3,
            "samples_that_differ": int(np.count_nonzero(differing)),
            "first_view_2048_to_host_ms": round(first * 1e3, 2),
            "view_2048_to_host_ms": timed(view, 1)["median_ms"],
            "sweep_gigapixels_a_second": sweep["gigapixels_a_second"],
            "sweep_cores_busy": sweep["cores_busy"],
            "patches_a_second": round(patches / random["median_ms"] * 1e3),
            "patches_cores_busy": random["cores_busy"],
        }


def corners(slide: Slide, side: int) -> Iterator[tuple[int, int]]:
    """Yield the corners of all squares of a level, row by row."""
    width, height = slide.level_dimensions[0]
    for y in range(0, height - side + 1, side):
        for x in range(0, width - side + 1, side):
            yield x, y


if __name__ == "__main__":
    main()
