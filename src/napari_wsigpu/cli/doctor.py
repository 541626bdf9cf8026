"""The command ``wsigpu doctor``: shows what can decode slides on this machine.

The doctor tries each CUDA library in a separate process. If the library hangs or crashes, the
report says so; the library's own output is kept out of the report.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import random
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np

from napari_wsigpu import __version__, native
from napari_wsigpu.cli.probes import HARDWARE, JPEG2000, cuda_version, run_probe
from napari_wsigpu.codecs.compressions import COMPRESSIONS, storage_name
from napari_wsigpu.gpu.device.driver import CONNECTIONS
from napari_wsigpu.gpu.jpeg.codestream import COMPRESSED, recipe_for
from napari_wsigpu.gpu.jpeg.jpeg_engine import may_use_engine
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.printable import printable
from napari_wsigpu.model.tags import COMPRESSION, WAVELET
from napari_wsigpu.slide.slide import open_slide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from napari_wsigpu.model.layout import LevelLayout

    SlideRoutes = dict["Route", list[int]]

OLDEST_CUDA = 12000  # in the driver's notation: 1000 * major + 10 * minor
WHEELS = {  # wheels for CUDA 12 and 13; nvImageCodec features that need the library
    "nvJPEG": ("nvidia-nvjpeg-cu12", "nvidia-nvjpeg", {HARDWARE}),
    "nvJPEG2000": ("nvidia-nvjpeg2k-cu12", "nvidia-nvjpeg2k-cu13", {JPEG2000}),
    "nvTIFF": ("nvidia-nvtiff-cu12", "nvidia-nvtiff-cu13", set()),
    "nvCOMP": ("nvidia-nvcomp-cu12", "nvidia-nvcomp-cu13", set()),
}
WITHOUT_NVJPEG2000 = (
    "nvJPEG2000 is missing or does not work: the CPU decodes HT and multi-tile code streams"
)
BY_GPU = "NVIDIA GPU"
# How much of a slide is decoded to measure a rate.
MEASURED_TILES, MEASURED_BYTES, MEASURED_SECONDS = 256, 64 << 20, 0.2
JPEG_COLORS = {"gray": "gray", "stored": "RGB", "ycbcr": "YCbCr"}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of looking for one piece of software or hardware.

    `version` is None if it is missing, `note` adds a detail, `works` lists the features that passed
    a test, `reason` states why it can't be used, and `advice` names the remedy or the consequence.
    """

    name: str
    version: str | None
    note: str = ""
    works: tuple[str, ...] = ()
    reason: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """One CUDA device; `memory` is in bytes."""

    name: str
    memory: int
    compute_capability: str


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver, its CUDA version and devices; `reason` states why it cannot be used."""

    version: str | None = None
    cuda: str | None = None
    devices: tuple[Device, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """The decoder of an encoding.

    `reason` names the library, or states why no GPU is used or which images still need the CPU.
    """

    encoding: str
    decoder: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All findings on this machine; `routes` are as `find_routes` returns them."""

    software: tuple[Finding, ...]
    driver: Driver
    cuda: tuple[Finding, ...]
    routes: tuple[Route, Route, Route, Route]


def report(slides: Iterable[str], *, as_json: bool) -> int:
    """Print the findings and the decoders of the given slides.

    Parameters
    ----------
    slides : iterable of str
        Paths of slides.
    as_json : bool
        Whether to print JSON instead of text.

    Returns
    -------
    int
        Exit status: 0, or 1 if a slide can't be opened (the error is printed on standard error).
    """
    found = diagnose()
    status, routes = 0, {}
    for path in slides:
        try:
            routes[path] = find_slide_routes(path, found)
        except SlideError as error:
            print(printable(str(error)), file=sys.stderr)
            status = 1
    print(_as_json(found, routes) if as_json else "\n".join(_as_lines(found, routes)))
    return status


def diagnose() -> Report:
    """Find all decoders on this machine, and the one used for each encoding."""
    driver = find_driver()
    cupy, codec = find_cupy(driver), find_nvimagecodec(driver)
    others = find_kvikio(driver), find_connections(), find_display(driver)
    cuda = (cupy, codec, *find_wheels(driver, codec), *others)
    return Report(find_software(), driver, cuda, find_routes(driver, cupy, codec))


# Search


def find_software() -> tuple[Finding, ...]:
    """Find this package, the CPU decoders and napari."""
    jpeg, jpeg2000 = map(_codec_version, (imagecodecs.jpeg8_version, imagecodecs.jpeg2k_version))
    return (
        Finding("napari-wsigpu", __version__),
        Finding("Python", platform.python_version(), f"{platform.system()} {platform.machine()}"),
        Finding("NumPy", np.__version__),
        Finding("imagecodecs", imagecodecs.__version__, f"{jpeg}, {jpeg2000}"),
        Finding("CPU cores", str(os.cpu_count() or 1)),
        find_core(),
        find_napari(),
    )


def find_napari() -> Finding:
    """Find napari, and the private attributes for drawing that this version lacks."""
    version = _wheel_version("napari")
    if version is None:
        return Finding("napari", None, 'for the viewer: pip install "napari-wsigpu[all]"')
    found = run_probe("probe", "napari_wsigpu.viewer.napari_internals")
    if found.get("reason"):
        return Finding("napari", version, f"the test failed: {found['reason']}")
    if not found["missing"]:
        return Finding("napari", version, "draws slides while their tiles are decoded")
    names, losses = ", ".join(found["missing"]), dict.fromkeys(found["missing"].values())
    advice = f"slides are shown correctly, but {'; '.join(losses)}"
    return Finding("napari", version, reason=f"this version lacks {names}", advice=advice)


def find_core() -> Finding:
    """Find the native core, or the reason why it is missing."""
    name = "native core:"
    if native.available:
        return Finding(name, native.reason)
    advice = "imagecodecs decodes tiles in Python threads, which is slower"
    return Finding(name, None, reason=native.reason, advice=advice)


def find_driver() -> Driver:
    """Query the NVIDIA driver's versions and devices."""
    try:
        return _query_driver(load_library("nvcuda.dll" if os.name == "nt" else "libcuda.so.1"))
    except (OSError, AttributeError) as error:
        if isinstance(error, FileNotFoundError) or "no such file" in str(error).lower():
            return Driver(reason="no NVIDIA driver was found")
        return Driver(reason=f"the NVIDIA driver can't be loaded ({error})")


def find_cupy(driver: Driver) -> Finding:
    """Find CuPy and try a kernel."""
    finding = _find("CuPy", "cupy-cuda{}x", "probe_cupy", driver, _extra(driver))
    if finding.reason and finding.note:
        return replace(finding, advice=f'pip install "cupy-cuda{_generation(driver)}x[ctk]"')
    return finding


def find_nvimagecodec(driver: Driver) -> Finding:
    """Find nvImageCodec and try to decode with it."""
    wheel = "nvidia-nvimgcodec-cu{}"
    return _find("nvImageCodec", wheel, "probe_nvimagecodec", driver, _extra(driver))


def find_kvikio(driver: Driver) -> Finding:
    """Find kvikio, try to read a file with it, and check whether GPUDirect Storage is used."""
    wheel = '"napari-wsigpu[gds]"' if _generation(driver) == "12" else "kvikio-cu13"
    finding = _find("kvikio", "kvikio-cu{}", "probe_kvikio", driver, f"pip install {wheel}")
    if finding.works:
        return finding
    notes = finding.note, f"GPUDirect Storage: off, {driver.reason or finding.reason}"
    return replace(finding, note="; ".join(filter(None, notes)))


def find_wheels(driver: Driver, codec: Finding) -> Iterator[Finding]:
    """Find the libraries that nvImageCodec uses."""
    for name, (wheel12, wheel13, abilities) in WHEELS.items():
        wheel = wheel12 if _generation(driver) == "12" else wheel13
        version = _wheel_version(wheel)
        if version is not None:
            yield Finding(name, version)
        elif abilities & set(codec.works):
            yield Finding(name, None, "works without the wheel")
        elif not driver.devices:
            yield Finding(name, None, f"for NVIDIA GPUs: pip install {wheel}")
        else:
            reason = f"{name} is not installed"
            yield Finding(name, None, reason=reason, advice=f"pip install {wheel}")


def find_connections() -> Finding:
    """Check the number of hardware work queues that CUDA may open."""
    value = os.environ.get(CONNECTIONS)
    if value in (None, "32"):
        return Finding(CONNECTIONS, value or "not set")
    reason = f"nvJPEG2000 is fastest with {CONNECTIONS}=32"
    return Finding(CONNECTIONS, value, reason=reason, advice="set it to 32, or unset it")


def find_display(driver: Driver) -> Finding:
    """Find out whether OpenGL can draw from GPU memory without a copy to the host."""
    if not driver.devices:
        return Finding("OpenGL", "not tested", "slides are drawn from host memory")
    found = run_probe("probe", "napari_wsigpu.viewer.drawing.texture")
    reason, version = found["reason"], found.get("version")
    if not reason:
        return Finding("OpenGL", version, "draws from GPU memory, without a copy to the host")
    reason = f"slides are drawn from host memory: {reason}"
    return Finding("OpenGL", version, reason=reason, advice="drawing is slower")


def find_routes(driver: Driver, cupy: Finding, codec: Finding) -> tuple[Route, Route, Route, Route]:
    """Return the decoders of JPEG, JPEG 2000, compressed bytes and all other encodings."""
    obstacle = driver.reason or cupy.reason or codec.reason
    works = () if obstacle else codec.works
    jpeg = Route("JPEG (RGB, YCbCr, gray; 8 bit)", "CPU", obstacle)
    jpeg2000 = Route("JPEG 2000, HTJ2K (8, 16 bit)", "CPU", obstacle)
    compressed = Route("LZW, deflate, PackBits, zstd", "CPU", obstacle)
    if not obstacle:  # CUDA kernels of this package decode them, and CuPy can run kernels
        exceptions = "" if JPEG2000 in works else WITHOUT_NVJPEG2000
        engine = " and its JPEG engine" if HARDWARE in works and may_use_engine() else ""
        jpeg = Route(jpeg.encoding, f"{BY_GPU}{engine}")
        jpeg2000 = Route(jpeg2000.encoding, BY_GPU, exceptions)
        compressed = Route(compressed.encoding, BY_GPU)
    listed_apart = {COMPRESSION.NONE, COMPRESSION.JPEG, *WAVELET, *COMPRESSED}
    names = [entry.name for entry in COMPRESSIONS if listed_apart.isdisjoint(entry.codes)]
    rest = Route(", ".join(names), "CPU", "imagecodecs")
    return jpeg, jpeg2000, compressed, rest


def find_slide_routes(path: str, found: Report) -> SlideRoutes:
    """Map each route of a slide to the numbers of the stored levels that it decodes.

    Raises
    ------
    SlideError
        If the slide can't be opened.
    """
    routes: SlideRoutes = {}
    with open_slide(path, device="cpu") as slide:
        for index, level in enumerate(slide.layout.levels):
            if not level.computed:
                # Parts of a mosaic may be stored in different ways.
                for route in dict.fromkeys(_level_route(image, found) for image in level.stored):
                    routes.setdefault(route, []).append(index)
    return routes


def _level_route(level: LevelLayout, found: Report) -> Route:
    encoding = level.encoding
    colors = JPEG_COLORS.get(encoding.jpeg_color, encoding.jpeg_color)
    colors = f", {colors}" if encoding.compression == COMPRESSION.JPEG else ""
    name = f"{storage_name(level)}{colors}, {level.channels} x {level.dtype}"
    how = recipe_for(level)
    if level.library is not None:
        return Route(name, level.library.name, str(how))
    if encoding.compression == COMPRESSION.NONE and level.array is None:
        return Route(name, "CPU", "read as stored")
    if encoding.compression not in (COMPRESSION.JPEG, *WAVELET, *COMPRESSED):
        return Route(name, "CPU", "imagecodecs" if level.array is None else "zarr")
    if isinstance(how, str):
        return Route(name, "CPU", how)
    number = {"jpeg": 0, "jpeg2000": 1}.get(how.kind, 2)
    return replace(found.routes[number], encoding=name)


def measure(path: str, route: Route, number: int) -> float | str:
    """Decode random tiles of a level as its route says, to where they are decoded.

    Returns
    -------
    float or str
        Gigapixels per second, or why they can't be measured.
    """
    device = "cuda" if route.decoder.startswith(BY_GPU) else "cpu"
    try:
        with open_slide(path, device=device) as slide:
            level = slide.layout.levels[number]
            grid, stored = level.grid, level.grid.byte_counts.any(axis=0)
            if slide.layout.remote is not None:
                return "the slide is on a server"
            if level.parts:
                return "the level consists of several images"
            if not stored.any():
                return "the level has no tiles"
            size = min(grid.tile_width, level.width), min(grid.tile_height, level.height)
            across, down = slide.dimensions[0] / level.width, slide.dimensions[1] / level.height
            corners = [
                (round(column * grid.tile_width * across), round(row * grid.tile_height * down))
                for row, column in np.argwhere(stored).tolist()
            ]
            chosen = random.Random(0)
            count = max(1, min(MEASURED_TILES, MEASURED_BYTES // level.tile_bytes, len(corners)))

            def read() -> float:
                # Each tile once: a read decodes it only once.
                places = chosen.sample(corners, count)
                slide.clear_cache()
                begin = time.perf_counter()
                options: Any = {"level": number, "batch_size": count, "device": device}
                for _ in slide.read_regions(places, size, **options):
                    pass
                return time.perf_counter() - begin

            read()  # it also starts threads, or a GPU
            seconds, batches = 0.0, 0
            while seconds < MEASURED_SECONDS:
                seconds, batches = seconds + read(), batches + 1
            return batches * count * size[0] * size[1] / seconds / 1e9
    except SlideError as error:
        return error.message.rstrip(".")


# Details of the search


def load_library(name: str) -> ctypes.CDLL:
    """Load a shared library; tests replace this function."""
    return ctypes.CDLL(name)


def _query_driver(cuda: ctypes.CDLL) -> Driver:
    supported, count, text = ctypes.c_int(), ctypes.c_int(), ctypes.c_char_p()
    cuda.cuDriverGetVersion(ctypes.byref(supported))
    versions = _driver_version(), cuda_version(supported.value)
    status = cuda.cuInit(0)
    if status:
        cuda.cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"").decode() or f"error {status}"
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            reason += f"; CUDA_VISIBLE_DEVICES is '{os.environ['CUDA_VISIBLE_DEVICES']}'"
        return Driver(*versions, reason=f"CUDA can't be initialized ({reason})")
    cuda.cuDeviceGetCount(ctypes.byref(count))
    devices = tuple(_query_device(cuda, index) for index in range(count.value))
    reason = "" if devices else "the NVIDIA driver reports no device"
    if supported.value < OLDEST_CUDA:
        reason = (
            f"the NVIDIA driver supports only CUDA {versions[1]} and must be updated for CUDA 12"
        )
    return Driver(*versions, devices, reason)


def _query_device(cuda: ctypes.CDLL, index: int) -> Device:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return Device(name.value.decode(), memory.value, f"{major.value}.{minor.value}")


def _driver_version() -> str | None:
    text = ctypes.create_string_buffer(96)
    with suppress(OSError, AttributeError):
        nvml = load_library("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            nvml.nvmlSystemGetDriverVersion(text, len(text))
            nvml.nvmlShutdown()
    return text.value.decode() or None


def _find(name: str, wheel: str, probe: str, driver: Driver, install: str) -> Finding:
    version = _wheel_version(*(wheel.format(generation) for generation in ("12", "13")))
    if not driver.devices:
        return Finding(name, version, "" if version else f"for NVIDIA GPUs: {install}")
    found = run_probe(probe)
    version, reason = version or found.get("version"), found.get("reason", "")
    if reason:
        absent = version is None and reason.startswith("No module named")
        reason = f"{name} is not installed" if absent else f"{name} can't be used ({reason})"
    works = tuple(found.get("works", ()))
    return Finding(name, version, found.get("note", ""), works, reason, install if reason else "")


def _codec_version(function: Callable[[], str]) -> str:
    try:
        return function().partition("/")[0].replace("_", "-").replace("openjpeg", "OpenJPEG")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"broken: {error}"


def _wheel_version(*names: str) -> str | None:
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _generation(driver: Driver) -> str:
    """Return the CUDA major version whose wheels fit this machine, "12" or "13"."""
    newest = driver.cuda is None or int(driver.cuda.partition(".")[0]) >= 13
    if newest and _wheel_version("nvidia-nvimgcodec-cu12") is None:
        return "13" if driver.cuda or _wheel_version("nvidia-nvimgcodec-cu13") else "12"
    return "12"


def _extra(driver: Driver) -> str:
    if driver.cuda is None:
        return 'pip install "napari-wsigpu[cuda12]" or "napari-wsigpu[cuda13]"'
    return f'pip install "napari-wsigpu[cuda{_generation(driver)}]"'


# Output


def _as_json(found: Report, slides: dict[str, SlideRoutes]) -> str:
    listed = [
        {
            "path": path,
            "routes": [
                {
                    **asdict(route),
                    "levels": levels,
                    "gigapixels_a_second": rate if isinstance(rate, float) else None,
                    "pixels": _exactness(route),
                }
                for route, levels in routes.items()
                for rate in [measure(path, route, levels[0])]
            ],
        }
        for path, routes in slides.items()
    ]
    return json.dumps({**asdict(found), "slides": listed}, indent=2)


def _as_lines(found: Report, slides: dict[str, SlideRoutes]) -> Iterator[str]:
    for finding in (*found.software, *_driver_findings(found.driver), *found.cuda):
        note = f" ({finding.note})" if finding.note else ""
        yield f"{finding.name:<14} {finding.version or 'not found'}{note}"
        if finding.reason:
            yield f"  {finding.reason}; {finding.advice}."
    yield "\nDecoders"
    yield from (f"  {_route_text(route)}" for route in found.routes)
    for path, routes in slides.items():
        yield f"\n{printable(path)}"
        for route, levels in routes.items():
            numbers = ", ".join(map(str, levels))
            yield f"  level{'s' if len(levels) > 1 else ''} {numbers}: {_route_text(route)}"
            rate = measure(path, route, levels[0])
            shown = f"not measured ({rate})"
            if isinstance(rate, float):
                shown = f"{rate:.3g} gigapixels per second"
            yield f"    {shown}, pixels {_exactness(route)}"


def _exactness(route: Route) -> str:
    """Return how a route's pixels compare with those of the CPU, which are exact."""
    lossy = route.encoding.startswith(("JPEG 2000", "HTJ2K")) and route.decoder.startswith(BY_GPU)
    return "exact if lossless, else within 1" if lossy else "exact"


def _driver_findings(driver: Driver) -> Iterator[Finding]:
    note, advice = f"CUDA {driver.cuda}" if driver.cuda else "", "tiles are decoded on the CPU"
    version = driver.version or (driver.cuda and "unknown version")
    reason = driver.reason[:1].upper() + driver.reason[1:]
    yield Finding("NVIDIA driver", version, note, reason=reason, advice=advice)
    for index, device in enumerate(driver.devices):
        facts = f"{device.memory / 2**30:.0f} GiB, compute capability {device.compute_capability}"
        yield Finding(f"GPU {index}", device.name, facts)


def _route_text(route: Route) -> str:
    return f"{route.encoding}: {route.decoder}" + (f" ({route.reason})" if route.reason else "")
