"""Compare regions decoded on the GPU with the CPU, with peers, and with the engine alone.

Usage: ``python -m benchmarks.gpu [PART ...] [--json OUT]``; the parts, all by default, are
fidelity, viewport, color, proof, sweep, jpeg2000 and cores.

Needs a CUDA device. cuCIM and OpenSlide are measured in the same run where they are installed;
every reader in turn reads the same random, unaligned regions one after the other, as who moves in
a slide does, in a random order of readers. Our caches are cleared before each read. Cores of rented
machines are shared: "loop" is what a loop in Python took before and after a reader's turn.
``WSIGPU_JPEG_ENGINE=hybrid`` in the environment measures cards without a JPEG engine.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import threading
import time
from contextlib import suppress
from functools import partial
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import cupy
import imagecodecs
import numpy as np

from benchmarks.color import COLORS, open_profiled
from benchmarks.common import SLIDES, ensure_slide, write_json
from napari_wsigpu import open_slide
from napari_wsigpu.cli.bench import print_table
from napari_wsigpu.gpu.device import verify
from napari_wsigpu.reading.device import LIMITS, tile_format
from napari_wsigpu.reading.throughput import tile_kind
from napari_wsigpu.slide import runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from napari_wsigpu import Slide
    from napari_wsigpu.gpu.jpeg.batch import GpuBatch
    from napari_wsigpu.reading.device import DeviceBackend

SIDE = 65536
SIZES = (512, 1024, 2048, 4096)
REGIONS, WARM_UP = 72, 8
SLOW_REGIONS, SLOW_WARM_UP = 17, 2
PROOFS, PROOFS_WARM_UP = 60, 4
SWEEPS = 3
JPEG2000_ROUNDS = 15
CUDA_PACKAGES = ("cucim-cu13", "cucim-cu12", "cupy-cuda13x", "cupy-cuda12x")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Measure decoding on the GPU.")
    parts: dict[str, Callable[[argparse.Namespace], Any]] = {
        "fidelity": fidelity,
        "viewport": viewport,
        "color": color,
        "proof": proof,
        "sweep": sweep,
        "jpeg2000": jpeg2000,
        "cores": cores,
    }
    parser.add_argument("parts", nargs="*", metavar="|".join(parts))
    parser.add_argument("--slides", type=Path, default=SLIDES, help="folder for large slides")
    parser.add_argument("--samples", type=Path, default=None, help="folder of slides to compare")
    parser.add_argument("--alone", action="store_true", help="leave the peers out")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    if not set(given.parts) <= set(parts):
        parser.error(f"parts are {', '.join(parts)}")
    figures = {"gpu": gpu(), **{part: parts[part](given) for part in given.parts or parts}}
    write_json(given.json, figures)


def gpu() -> dict[str, Any]:
    """Describe the device and what decodes on it."""
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    worker = runtime.default().devices.worker(0)
    engines: dict[str, str | None] = {}
    with worker.device.active():
        worker.start("jpeg")
        engines["jpeg"] = worker.made_engine("jpeg")
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


def fidelity(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare whole levels by the GPU with the CPU decoder."""
    found: list[dict[str, Any]] = []
    with resources.as_file(resources.files("napari_wsigpu") / "resources/he_phantom.svs") as sample:
        folder = given.samples
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


def viewport(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Time cold regions at random positions, by every reader."""
    found = []
    for tile in (256, 512):
        path = ensure_slide(given.slides, SIDE, "jpeg", tile)
        with open_slide(path, device="cuda") as slide, open_slide(path) as auto:
            settle_auto(auto)
            readers = {**own_readers(slide, auto), **({} if given.alone else peers(path))}
            for size in SIZES:
                found += time_regions(readers, tile, size)
    return found


def own_readers(slide: Slide, auto: Slide) -> dict[str, Callable[[int, int, int], Any]]:
    """Return our ways to read a region."""

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
        "ours, cached, to host": cached,
        "decode alone": lambda x, y, size: decode_alone(slide, x, y, size),
    }


def timed(read: Callable[[], Any]) -> tuple[float, Any]:
    """Return seconds and result."""
    begin = time.perf_counter()
    result = read()
    return time.perf_counter() - begin, result


def loop() -> float:
    """Return the seconds of a loop in Python: how much of a core is ours just now."""

    def once() -> float:
        begin, total = time.perf_counter(), 0
        for number in range(100_000):
            total += number
        return time.perf_counter() - begin

    return min(once() for _ in range(3))


def device_backend(slide: Slide) -> DeviceBackend:
    """Return the part of a slide that reads through the device."""
    return slide._reader.offload.backend(runtime.default().devices.worker(0))


def decode_alone(slide: Slide, x: int, y: int, size: int) -> tuple[float, None]:
    """Time the decoder on a region's tiles, their bytes in memory."""
    backend, image = device_backend(slide), slide.layout.levels[0]
    tile = image.grid.tile_width
    slide.clear_cache()
    decoder = backend.decoder
    rows, columns = np.mgrid[y // tile : -(-(y + size) // tile), x // tile : -(-(x + size) // tile)]
    tiles = np.stack([rows.ravel(), columns.ravel()], -1)
    cache, format_ = runtime.default().devices.tiles(backend.device), tile_format(image)
    count = -(-len(tiles) // LIMITS.tiles)
    parts = [backend.encoded(image, part) for part in np.array_split(tiles, count)]
    places = [cache.reserve(format_, image.tile_bytes, len(part)) for part in parts]
    stream = backend.device.new_stream()
    begin = time.perf_counter()
    flying: list[GpuBatch] = []
    for part, reserved in zip(parts, places, strict=True):
        flying.append(decoder.schedule(part, reserved.slots, lambda rows: None, stream))
        if len(flying) > 1:
            flying.pop(0).wait()
    flying.pop().wait()
    seconds = time.perf_counter() - begin
    for reserved in places:
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
    places = [
        (random_place.randrange(limit), random_place.randrange(limit)) for _ in range(REGIONS)
    ]
    random_place.shuffle(order)
    for name in order:
        slow = name in ("OpenSlide", "cuCIM, cuda")
        here = places[:SLOW_REGIONS] if slow else places
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


def color(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Time regions as they are stored and in sRGB, with and without decoding."""
    path = ensure_slide(given.slides, SIDE, "jpeg", 256)
    found = []
    with open_profiled(path, "cuda") as slide:
        slide.read_region((0, 0), (1, 1), device="cuda", color="srgb")

        def read(device: str, shown: Any, warm: bool, x: int, y: int, size: int) -> Any:
            region = partial(slide.read_region, (x, y), (size, size), device=device, color=shown)
            slide.clear_cache()
            if warm:
                region()
            return timed(region)

        readers: dict[str, Callable[[int, int, int], Any]] = {
            f"{'cached' if warm else 'cold'}, to {device}, {shown}": partial(
                read, device, shown, warm
            )
            for warm in (False, True)
            for device in ("cuda", "cpu")
            for shown in COLORS
        }
        for size in SIZES:
            found += time_regions(readers, 256, size)
    return found


def proof(given: argparse.Namespace) -> dict[str, Any]:
    """Time the first viewport of a slide with and without the proof of its pixels."""
    path = ensure_slide(given.slides, SIDE, "jpeg", 256)
    random_place = random.Random(0)
    ways = {"with": verify.TILES_A_SLIDE, "without": 0}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    gc.collect()
    gc.disable()
    for number in range(PROOFS_WARM_UP + PROOFS):
        x, y = (random_place.randrange(SIDE - 2048) for _ in range(2))
        for way in sorted(ways, reverse=number % 2 > 0):
            verify.TILES_A_SLIDE = ways[way]
            with open_slide(path, device="cuda") as slide:
                taken, _ = timed(partial(slide.read_region, (x, y), (2048, 2048)))
            if number >= PROOFS_WARM_UP:
                seconds[way].append(taken)
    gc.enable()
    verify.TILES_A_SLIDE = ways["with"]
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    pairs = zip(seconds["with"], seconds["without"], strict=True)
    found = {
        "with_ms": round(medians["with"] * 1e3, 3),
        "without_ms": round(medians["without"] * 1e3, 3),
        "median_difference_ms": round(statistics.median(a - b for a, b in pairs) * 1e3, 3),
        "cost": round(medians["with"] / medians["without"] - 1, 4),
    }
    rows = [(name, f"{value:.3f}") for name, value in found.items()]
    print_table("First 2048 x 2048 of a slide, to host, pixels proven", ("", ""), rows)
    return found


# Whole levels


def sweep(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every tile of a level once, to the device: one by one, ahead, and decode alone."""
    found = []
    for tile, side in ((256, 4096), (512, 8192)):
        path = ensure_slide(given.slides, SIDE, "jpeg", tile)
        places = [(x, y) for y in range(0, SIDE, side) for x in range(0, SIDE, side)]
        with open_slide(path, device="cuda") as slide:
            alone = statistics.median(sweep_alone(slide, places, side) for _ in range(SWEEPS))
            slide.read_region((0, 0), (side, side), device="cuda")
            rows = [("decode alone", "", f"{rate(alone):.2f}", "")]
            for file in ("warm", "cold"):
                for way in ("sync", "async"):
                    passes = []
                    for _ in range(SWEEPS):
                        slide.clear_cache()
                        if file == "cold":
                            forget(path)
                        begin = time.perf_counter()
                        read_all(slide, places, side, ahead=way == "async")
                        passes.append(time.perf_counter() - begin)
                    taken = statistics.median(passes)
                    found.append(
                        {
                            "tile": tile,
                            "file": file,
                            "way": way,
                            "gigapixels_a_second": round(rate(taken), 3),
                            "decode_alone": round(rate(alone), 3),
                        }
                    )
                    rows.append((way, file, f"{rate(taken):.2f}", f"{alone / taken:.0%}"))
        heads = ("way", "file", "GP/s", "of decode alone")
        print_table(f"{SIDE} x {SIDE}, {tile} x {tile} JPEG tiles", heads, rows)
    return found


def rate(seconds: float) -> float:
    """Return gigapixels a second of one whole level."""
    return SIDE * SIDE / seconds / 1e9


def sweep_alone(slide: Slide, places: list[tuple[int, int]], side: int) -> float:
    """Time the decoder on the tiles of some regions, extrapolated to the level."""
    chosen = places[:: max(1, len(places) // 32)]
    decode_alone(slide, *chosen[0], side)
    return sum(decode_alone(slide, *place, side)[0] for place in chosen) * len(places) / len(chosen)


def read_all(slide: Slide, places: list[tuple[int, int]], side: int, *, ahead: bool) -> None:
    """Read every region and drop it."""
    if ahead:
        for _ in slide.read_regions(places, (side, side), device="cuda"):
            pass
        return
    for place in places:
        slide.read_region(place, (side, side), device="cuda")


def forget(path: Path) -> None:
    """Drop a file from the operating system's page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# JPEG 2000


def jpeg2000(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Time 256 tiles of JPEG 2000: by the GPU, by the CPU, and by what is chosen."""
    path = ensure_slide(given.slides, 16384, "jpeg2000", 256)
    found = []
    with (
        open_slide(path, device="cpu") as cpu,
        open_slide(path, device="cuda") as by_gpu,
        open_slide(path) as auto,
    ):
        slides = {"CPU": cpu, "GPU": by_gpu, "auto": auto}
        seconds: dict[str, list[float]] = {name: [] for name in slides}
        settle_auto(auto)
        for number in range(JPEG2000_ROUNDS):
            place = 4096 * (number % 4), 4096 * (number // 4 % 4)
            for name, slide in slides.items():
                slide.clear_cache()
                read = partial(slide.read_region, place, (4096, 4096))
                seconds[name].append(timed(read)[0])
        rows = []
        for name, taken in seconds.items():
            speed = 4096 * 4096 / statistics.median(taken) / 1e6
            found.append({"decoder": name, "megapixels_a_second": round(speed)})
            rows.append((name, f"{statistics.median(taken) * 1e3:.1f}", f"{speed:.0f}"))
        print_table("256 tiles of JPEG 2000", ("decoder", "median ms", "MP/s"), rows)
        print("chosen:", runtime.default().throughput.choose(tile_kind(auto.layout.levels[0])))
    return found


def cores(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure JPEG 2000 by the GPU and CPU threads at once, and how many cores that takes."""
    path = ensure_slide(given.slides, 16384, "jpeg2000", 256)
    found = []
    with open_slide(path, device="cuda") as slide:
        for by_gpu, threads in ((0, 16), (1, 0), (1, 4), (1, 8), (1, 12), (1, 15)):
            found.append(
                {"by_gpu": by_gpu > 0, "cpu_threads": threads, **at_once(slide, by_gpu, threads)}
            )
    rows = [tuple(str(value) for value in item.values()) for item in found]
    heads = ("GPU", "CPU threads", "MP/s by GPU", "by CPU", "cores busy")
    print_table("JPEG 2000 by GPU and CPU at once", heads, rows)
    return found


def at_once(slide: Slide, by_gpu: int, threads: int) -> dict[str, float]:
    """Decode 256 tiles again and again in each thread, for a second."""
    backend, image = device_backend(slide), slide.layout.levels[0]
    places = np.argwhere(np.ones((16, 16), bool))
    tiles = [bytes(tile.segments[0] or b"") for tile in backend.encoded(image, places)]
    cache = runtime.default().devices.tiles(backend.device)
    reserved = cache.reserve(tile_format(image), image.tile_bytes, len(places))
    counts = [0] * (by_gpu + threads)
    stop = threading.Event()

    def gpu_tiles(number: int) -> None:
        stream = backend.device.new_stream()
        while not stop.is_set():
            batch = backend.encoded(image, places)
            backend.decoder.schedule(batch, reserved.slots, lambda rows: None, stream).wait()
            counts[number] += len(tiles)

    def cpu_tiles(number: int) -> None:
        out = np.empty((256, 256, 3), np.uint8)
        while not stop.is_set():
            imagecodecs.jpeg2k_decode(tiles[counts[number] % len(tiles)], out=out)
            counts[number] += 1

    begin, busy = time.perf_counter(), time.process_time()
    work = [gpu_tiles] * by_gpu + [cpu_tiles] * threads
    running = [threading.Thread(target=each, args=(k,)) for k, each in enumerate(work)]
    for thread in running:
        thread.start()
    time.sleep(1)
    stop.set()
    for thread in running:
        thread.join()
    seconds = time.perf_counter() - begin
    cache.unpin(reserved)
    speed = 256 * 256 / 1e6 / seconds
    return {
        "gpu_megapixels_a_second": round(sum(counts[:by_gpu]) * speed),
        "cpu_megapixels_a_second": round(sum(counts[by_gpu:]) * speed),
        "cores_busy": round((time.process_time() - busy) / seconds, 1),
    }


def settle_auto(slide: Slide) -> None:
    """Read until everything was tried and the fastest is used."""
    key = tile_kind(slide.layout.levels[0])
    deadline = time.perf_counter() + 20
    while not runtime.default().throughput.settled(key) and time.perf_counter() < deadline:
        slide.clear_cache()
        slide.read_region((0, 0), (4096, 4096))


if __name__ == "__main__":
    main()
