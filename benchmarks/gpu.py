"""Compare regions decoded on the GPU with the CPU, with other libraries, and with the engine alone.

Usage: ``python -m benchmarks.gpu [fidelity] [viewport] [--json OUT]``; both parts by default.

Needs a CUDA device. cuCIM and OpenSlide are measured in the same run if they are installed. The
readers run one after the other in random order, and each reads the same random, unaligned regions.
Our caches are cleared before each read. Rented machines share their cores, so "loop" records how
long a fixed Python loop took before and after each reader. Set ``WSIGPU_JPEG_ENGINE=kernels`` to
measure what a card without a JPEG engine would do.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from contextlib import suppress
from importlib import metadata, resources
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import cupy
import numpy as np

from benchmarks.common import SLIDES, ensure_slide, write_json
from napari_wsigpu import open_slide
from napari_wsigpu.cli.bench import print_table
from napari_wsigpu.reading.device import LIMITS, tile_format
from napari_wsigpu.slide import runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from napari_wsigpu import Slide
    from napari_wsigpu.gpu.jpeg.gpu_batch import GpuBatch
    from napari_wsigpu.reading.device import DeviceBackend

SIDE = 65536
SIZES = (512, 1024, 2048, 4096)
REGIONS, WARM_UP = 72, 8
SLOW_REGIONS, SLOW_WARM_UP = 17, 2
CUDA_PACKAGES = ("cucim-cu13", "cucim-cu12", "cupy-cuda13x", "cupy-cuda12x")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Measure decoding on the GPU.")
    parts: dict[str, Callable[[argparse.Namespace], Any]] = {
        "fidelity": fidelity,
        "viewport": viewport,
    }
    parser.add_argument("parts", nargs="*", metavar="|".join(parts))
    parser.add_argument("--slides", type=Path, default=SLIDES, help="folder for large slides")
    parser.add_argument("--samples", type=Path, default=None, help="folder of slides to compare")
    parser.add_argument("--alone", action="store_true", help="leave the peers out")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if not set(args.parts) <= set(parts):
        parser.error(f"parts are {', '.join(parts)}")
    figures = {"gpu": gpu(), **{part: parts[part](args) for part in args.parts or parts}}
    write_json(args.json, figures)


def gpu() -> dict[str, Any]:
    """Describe the device and what decodes on it."""
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    worker = runtime.default().devices.worker(0)
    engines: dict[str, str | None] = {}
    with worker.device.active():
        worker.start("jpeg")
        engines["jpeg"] = worker.active_engine("jpeg")
    names = [
        name
        for name in (distribution.metadata["Name"] for distribution in metadata.distributions())
        if name.startswith("nvidia-nv") or name in CUDA_PACKAGES
    ]
    return {
        "name": properties["name"].decode(),
        "jpeg": engines["jpeg"],
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "packages": {name: metadata.version(name) for name in sorted(set(names))},
    }


# Fidelity


def fidelity(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare whole levels decoded by the GPU with the CPU decoder."""
    found: list[dict[str, Any]] = []
    with resources.as_file(resources.files("napari_wsigpu") / "resources/he_phantom.svs") as sample:
        folder = args.samples
        paths = [sample, *(sorted(folder.rglob("*.*")) if folder else ())]
        for path in paths:
            if path.suffix in (".svs", ".tif", ".tiff", ".ndpi"):
                found += compare(path)
    rows = [
        (item["slide"], str(item["level"]), str(item["difference"]), str(item["decoded"]))
        for item in found
    ]
    print_table("GPU against CPU", ("slide", "level", "max difference", "decoded by"), rows)
    return found


def compare(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the largest difference of each level of a slide."""
    with open_slide(path, device="cpu") as cpu, open_slide(path, device="cuda") as by_gpu:
        for index, level in enumerate(cpu.levels):
            difference = 0.0
            for top in range(0, level.shape[0], 4096):
                for left in range(0, level.shape[1], 4096):
                    part = np.s_[top : top + 4096, left : left + 4096]
                    expected, pixels = level[part], by_gpu.levels[index][part]
                    apart = np.abs(expected.astype(np.float64) - pixels).max()
                    difference = max(difference, float(apart))
            yield {
                "slide": path.name,
                "level": index,
                "difference": difference,
                "decoded": by_gpu.stats()["decoded"],
            }


# Viewports


def viewport(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time cold regions at random positions with every reader."""
    found = []
    for tile in (256, 512):
        path = ensure_slide(args.slides, SIDE, "jpeg", tile)
        with (
            open_slide(path, device="cuda") as slide,
            open_slide(path) as auto,
            open_slide(path) as same,
        ):
            settle_auto(auto)
            readers = {**own_readers(slide, auto, same), **({} if args.alone else peers(path))}
            for size in SIZES:
                found += time_regions(readers, tile, size)
    return found


def own_readers(
    slide: Slide, auto: Slide, same: Slide
) -> dict[str, Callable[[int, int, int], Any]]:
    """Return our readers of a region.

    With ``"auto"``, each has its own slide, which would otherwise cache the tiles that both read.
    """

    def cleared(slide: Slide, device: str) -> Callable[[int, int, int], Any]:
        def read(x: int, y: int, size: int) -> Any:
            slide.clear_cache()
            return timed(lambda: slide.read_region((x, y), (size, size), device=device))

        return read

    def cached(x: int, y: int, size: int) -> Any:
        slide.read_region((x, y), (size, size))
        return timed(lambda: slide.read_region((x, y), (size, size)))

    return {
        "ours, to host": cleared(slide, "cpu"),
        "ours, to device": cleared(slide, "cuda"),
        "ours, auto, to host": cleared(auto, "cpu"),
        "ours, auto, to device": cleared(same, "cuda"),
        "ours, cached, to host": cached,
        "decode alone": lambda x, y, size: decode_alone(slide, x, y, size),
    }


def timed(read: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a read, and its result."""
    begin = time.perf_counter()
    result = read()
    return time.perf_counter() - begin, result


def loop() -> float:
    """Return the seconds of a fixed Python loop, as a measure of the available CPU."""

    def once() -> float:
        begin, total = time.perf_counter(), 0
        for number in range(100_000):
            total += number
        return time.perf_counter() - begin

    return min(once() for _ in range(3))


def device_backend(slide: Slide) -> DeviceBackend:
    """Return the device backend of a slide."""
    return slide._reader.offload.backend(runtime.default().devices.worker(0))


def decode_alone(slide: Slide, x: int, y: int, size: int) -> tuple[float, None]:
    """Time the decoder alone on a region's tiles, whose bytes are in memory."""
    backend, image = device_backend(slide), slide.layout.levels[0]
    tile = image.grid.tile_width
    slide.clear_cache()
    decoder = backend.decoder
    rows, columns = np.mgrid[y // tile : -(-(y + size) // tile), x // tile : -(-(x + size) // tile)]
    tiles = np.stack([rows.ravel(), columns.ravel()], -1)
    cache, format_ = runtime.default().devices.tiles(backend.device), tile_format(image)
    count = -(-len(tiles) // LIMITS.tiles)
    parts = [backend.encoded(image, part) for part in np.array_split(tiles, count)]
    positions = [cache.reserve(format_, image.tile_bytes, len(part)) for part in parts]
    stream = backend.device.new_stream()
    begin = time.perf_counter()
    flying: list[GpuBatch] = []
    for part, reserved in zip(parts, positions, strict=True):
        flying.append(decoder.schedule(part, reserved.slots, lambda rows: None, stream))
        if len(flying) > 1:
            flying.pop(0).wait()
    flying.pop().wait()
    seconds = time.perf_counter() - begin
    for reserved in positions:
        cache.unpin(reserved)
    return seconds, None


def peers(path: Path) -> dict[str, Callable[[int, int, int], Any]]:
    """Return the peers that are installed."""
    found: dict[str, Callable[[int, int, int], Any]] = {}
    with suppress(ImportError):
        import openslide

        other = openslide.OpenSlide(path)
        found["OpenSlide"] = lambda x, y, size: timed(
            lambda: np.asarray(other.read_region((x, y), 0, (size, size)))
        )
    with suppress(ImportError):
        from cucim import CuImage

        image = CuImage(str(path))

        def on_device(x: int, y: int, size: int) -> Any:
            pixels = cupy.asarray(image.read_region((x, y), (size, size), 0, device="cuda"))
            cupy.cuda.Device().synchronize()
            return pixels

        found["cuCIM, cuda"] = lambda x, y, size: timed(lambda: on_device(x, y, size))
        found["cuCIM, 16 workers"] = lambda x, y, size: timed(
            lambda: np.asarray(image.read_region((x, y), (size, size), 0, num_workers=16))
        )
    return found


def time_regions(
    readers: dict[str, Callable[[int, int, int], Any]], tile: int, size: int
) -> list[dict[str, Any]]:
    """Time every reader at the same positions, one reader after the other."""
    random_place = random.Random(size)
    limit = SIDE - size
    seconds: dict[str, list[float]] = {}
    loops: dict[str, float] = {}
    order = list(readers)
    gc.collect()
    gc.disable()
    positions = [
        (random_place.randrange(limit), random_place.randrange(limit)) for _ in range(REGIONS)
    ]
    random_place.shuffle(order)
    for name in order:
        slow = name in ("OpenSlide", "cuCIM, cuda")
        here = positions[:SLOW_REGIONS] if slow else positions
        before = loop()
        taken = [readers[name](x, y, size)[0] for x, y in here]
        seconds[name] = taken[SLOW_WARM_UP if slow else WARM_UP :]
        loops[name] = (before + loop()) / 2
    gc.enable()
    found: list[dict[str, Any]] = [
        {
            "tile": tile,
            "size": size,
            "reader": name,
            "median_ms": round(statistics.median(taken) * 1e3, 3),
            "best_ms": round(min(taken) * 1e3, 3),
            "loop_ms": round(loops[name] * 1e3, 1),
        }
        for name, taken in seconds.items()
    ]
    rows = [
        (
            item["reader"],
            f"{item['median_ms']:.2f}",
            f"{item['best_ms']:.2f}",
            f"{item['loop_ms']:.1f}",
        )
        for item in found
    ]
    heads = ("reader", "median ms", "best", "loop ms")
    print_table(f"{size} x {size}, {tile} x {tile} JPEG tiles", heads, rows)
    return found


def settle_auto(slide: Slide) -> None:
    """Read until the GPU has started in the background.

    No tile is read twice: the slide would then cache the tiles of later regions, which costs time.
    """
    deadline = time.perf_counter() + 20
    steps = range(0, SIDE, 4096)
    places = product(steps, steps)
    while slide.decoder[0] == "CPU" and time.perf_counter() < deadline:
        slide.read_region(next(places), (4096, 4096))


if __name__ == "__main__":
    main()
