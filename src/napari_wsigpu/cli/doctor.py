"""What this machine has to decode slides with: the command ``wsigpu doctor``.

What a CUDA library can do is found by using it, in a process of its own: a library that
prints, hangs or crashes there becomes a line of the report.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np

from napari_wsigpu import __version__, native
from napari_wsigpu.cli.probes import HARDWARE, HYBRID, JPEG2000, cuda_version, run_probe
from napari_wsigpu.codecs.table import COMPRESSIONS, storage_name
from napari_wsigpu.gpu.device.driver import CONNECTIONS
from napari_wsigpu.gpu.jpeg.codestream import recipe
from napari_wsigpu.gpu.jpeg.jpeg_engine import JPEG_ENGINE
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.tags import COMPRESSION, JPEG_2000
from napari_wsigpu.slide.slide import open_slide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from napari_wsigpu.model.layout import LevelLayout

    SlideRoutes = dict["Route", list[int]]

OLDEST_CUDA = 12000
WHEELS = {  # for CUDA 12, for CUDA 13, what it does through nvImageCodec
    "nvJPEG": ("nvidia-nvjpeg-cu12", "nvidia-nvjpeg", {HARDWARE, HYBRID}),
    "nvJPEG2000": ("nvidia-nvjpeg2k-cu12", "nvidia-nvjpeg2k-cu13", {JPEG2000}),
    "nvTIFF": ("nvidia-nvtiff-cu12", "nvidia-nvtiff-cu13", set()),
    "nvCOMP": ("nvidia-nvcomp-cu12", "nvidia-nvcomp-cu13", set()),
}
WITHOUT_NVJPEG2000 = "nvJPEG2000 is missing or does not work: the CPU decodes HT and several tiles"
JPEG_COLORS = {"gray": "gray", "stored": "RGB", "ycbcr": "YCbCr"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for.

    Its `version` is None where it is missing; `works` is what was tried with it and worked,
    `reason` why it can't be used, `advice` what to do about that.
    """

    name: str
    version: str | None
    note: str = ""
    works: tuple[str, ...] = ()
    reason: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """One CUDA device, its memory in bytes."""

    name: str
    memory: int
    compute_capability: str


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver, the CUDA version it supports, and why it can't be used."""

    version: str | None = None
    cuda: str | None = None
    devices: tuple[Device, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """What decodes an encoding; where it is the CPU, why or by what."""

    encoding: str
    decoder: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found on this machine; routes of JPEG, of JPEG 2000, of the rest."""

    software: tuple[Finding, ...]
    driver: Driver
    cuda: tuple[Finding, ...]
    routes: tuple[Route, Route, Route]


def report(slides: Iterable[str], *, as_json: bool) -> int:
    """Print what was found, and what decodes each of some slides.

    Parameters
    ----------
    slides : iterable of str
        Paths.
    as_json : bool
        Whether machines read it.

    Returns
    -------
    int
        Exit status: 0, or 1 if a slide can't be opened, which is said on standard error.
    """
    found = diagnose()
    status, routes = 0, {}
    for path in slides:
        try:
            routes[path] = find_slide_routes(path, found)
        except SlideError as error:
            print(error, file=sys.stderr)
            status = 1
    print(_as_json(found, routes) if as_json else "\n".join(_as_lines(found, routes)))
    return status


def diagnose() -> Report:
    """Find what this machine has, and what decodes what on it."""
    driver = find_driver()
    cupy, codec = find_cupy(driver), find_nvimagecodec(driver)
    others = find_kvikio(driver), find_connections(), find_display(driver)
    cuda = (cupy, codec, *find_wheels(driver, codec), *others)
    return Report(find_software(), driver, cuda, find_routes(driver, cupy, codec))


# What is there


def find_software() -> tuple[Finding, ...]:
    """Find what decodes on the CPU."""
    jpeg, jpeg2000 = map(_codec_version, (imagecodecs.jpeg8_version, imagecodecs.jpeg2k_version))
    return (
        Finding("napari-wsigpu", __version__),
        Finding("Python", platform.python_version(), f"{platform.system()} {platform.machine()}"),
        Finding("NumPy", np.__version__),
        Finding("imagecodecs", imagecodecs.__version__, f"{jpeg}, {jpeg2000}"),
        Finding("CPU cores", str(os.cpu_count() or 1)),
        find_core(),
    )


def find_core() -> Finding:
    """Find the native core, or why tiles are decoded without it."""
    name = "native core:"
    if native.available:
        return Finding(name, native.reason)
    advice = "tiles are decoded in Python, more slowly"
    return Finding(name, None, reason=native.reason, advice=advice)


def find_driver() -> Driver:
    """Ask the NVIDIA driver for its versions and devices."""
    try:
        return _ask_driver(load_library("nvcuda.dll" if os.name == "nt" else "libcuda.so.1"))
    except (OSError, AttributeError) as error:
        if isinstance(error, FileNotFoundError) or "no such file" in str(error).lower():
            return Driver(reason="no NVIDIA driver was found")
        return Driver(reason=f"the NVIDIA driver can't be loaded ({error})")


def find_cupy(driver: Driver) -> Finding:
    """Find CuPy and run a kernel with it."""
    finding = _find("CuPy", "cupy-cuda{}x", "probe_cupy", driver, _extra(driver))
    if finding.reason and finding.note:
        return replace(finding, advice=f'pip install "cupy-cuda{_generation(driver)}x[ctk]"')
    return finding


def find_nvimagecodec(driver: Driver) -> Finding:
    """Find nvImageCodec and decode with it."""
    wheel = "nvidia-nvimgcodec-cu{}"
    return _find("nvImageCodec", wheel, "probe_nvimagecodec", driver, _extra(driver))


def find_kvikio(driver: Driver) -> Finding:
    """Find kvikio and read a file with it; say whether that is GPUDirect Storage, and why not."""
    wanted = '"napari-wsigpu[gds]"' if _generation(driver) == "12" else "kvikio-cu13"
    finding = _find("kvikio", "kvikio-cu{}", "probe_kvikio", driver, f"pip install {wanted}")
    if finding.works:
        return finding
    notes = finding.note, f"GPUDirect Storage: off, {driver.reason or finding.reason}"
    return replace(finding, note="; ".join(filter(None, notes)))


def find_wheels(driver: Driver, codec: Finding) -> Iterator[Finding]:
    """Find the libraries behind nvImageCodec."""
    for name, (wheel12, wheel13, abilities) in WHEELS.items():
        wheel = wheel12 if _generation(driver) == "12" else wheel13
        version = _wheel_version(wheel)
        if version is not None:
            yield Finding(name, version)
        elif abilities & set(codec.works):
            yield Finding(name, None, "no wheel, but it works")
        elif not driver.devices:
            yield Finding(name, None, f"for NVIDIA GPUs: pip install {wheel}")
        else:
            reason = f"{name} is not installed"
            yield Finding(name, None, reason=reason, advice=f"pip install {wheel}")


def find_connections() -> Finding:
    """Find how many queues of work CUDA may open."""
    value = os.environ.get(CONNECTIONS)
    if value in (None, "32"):
        return Finding(CONNECTIONS, value or "not set")
    reason = f"nvJPEG2000 is fastest with {CONNECTIONS}=32"
    return Finding(CONNECTIONS, value, reason=reason, advice="set it so, or unset it")


def find_display(driver: Driver) -> Finding:
    """Find whether pictures that the GPU decodes are shown without visiting the host."""
    if not driver.devices:
        return Finding("OpenGL", "not asked", "slides are drawn on the host")
    found = run_probe("probe", "napari_wsigpu.viewer.texture")
    reason, version = found["reason"], found.get("version")
    if not reason:
        return Finding("OpenGL", version, "shows what the GPU decodes without a copy to the host")
    advice = "that takes longer"
    return Finding(
        "OpenGL", version, reason=f"slides are drawn on the host: {reason}", advice=advice
    )


def find_routes(driver: Driver, cupy: Finding, codec: Finding) -> tuple[Route, Route, Route]:
    """Say what decodes JPEG, JPEG 2000, and the rest."""
    against = driver.reason or cupy.reason or codec.reason
    works = () if against else codec.works
    nothing = "nvImageCodec decodes none here; {} is missing or does not work"
    jpeg = Route("JPEG (RGB, YCbCr, gray; 8 bit)", "CPU", against or nothing.format("nvJPEG"))
    if HYBRID in works:
        jpeg = Route(jpeg.encoding, "hybrid, NVIDIA GPU and CPU")
    if HARDWARE in works and os.environ.get(JPEG_ENGINE) != "hybrid":
        jpeg = Route(jpeg.encoding, "NVIDIA hardware engine")
    jpeg2000 = Route("JPEG 2000 (8, 16 bit)", "CPU", against)
    if not against:  # our kernels, of which CuPy was seen to compile and run one
        forms = "" if JPEG2000 in works else WITHOUT_NVJPEG2000
        jpeg2000 = Route(
            jpeg2000.encoding, "NVIDIA GPU and CPU, whichever is measured faster", forms
        )
    others = {COMPRESSION.NONE, COMPRESSION.JPEG, *JPEG_2000}
    names = [entry.name for entry in COMPRESSIONS if others.isdisjoint(entry.codes)]
    return jpeg, jpeg2000, Route(", ".join([*names, "uncompressed"]), "CPU", "imagecodecs")


def find_slide_routes(path: str, found: Report) -> SlideRoutes:
    """Say what decodes which stored levels of a slide.

    Raises
    ------
    SlideError
        If it can't be opened.
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
    how = recipe(level)
    if level.library is not None:
        return Route(name, level.library.name, str(how))
    if encoding.compression not in (COMPRESSION.JPEG, *JPEG_2000):
        return Route(name, "CPU", "imagecodecs" if level.array is None else "zarr")
    if isinstance(how, str):
        return Route(name, "CPU", how)
    return replace(found.routes[0 if how.kind == "jpeg" else 1], encoding=name)


# How it is found


def load_library(name: str) -> Any:
    """Load a shared library."""
    return ctypes.CDLL(name)


def _ask_driver(cuda: Any) -> Driver:
    supported, count, text = ctypes.c_int(), ctypes.c_int(), ctypes.c_char_p()
    cuda.cuDriverGetVersion(ctypes.byref(supported))
    versions = _driver_version(), cuda_version(supported.value)
    status = cuda.cuInit(0)
    if status:
        cuda.cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"").decode() or f"error {status}"
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            reason += f"; CUDA_VISIBLE_DEVICES is '{os.environ['CUDA_VISIBLE_DEVICES']}'"
        return Driver(*versions, reason=f"CUDA does not start ({reason})")
    cuda.cuDeviceGetCount(ctypes.byref(count))
    devices = tuple(_ask_device(cuda, index) for index in range(count.value))
    reason = "" if devices else "the NVIDIA driver shows no device"
    if supported.value < OLDEST_CUDA:
        reason = f"the NVIDIA driver supports CUDA {versions[1]}, update it to one for CUDA 12"
    return Driver(*versions, devices, reason)


def _ask_device(cuda: Any, index: int) -> Device:
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
    """Return the CUDA generation whose wheels are wanted, "12" or "13"."""
    newest = driver.cuda is None or int(driver.cuda.partition(".")[0]) >= 13
    if newest and _wheel_version("nvidia-nvimgcodec-cu12") is None:
        return "13" if driver.cuda or _wheel_version("nvidia-nvimgcodec-cu13") else "12"
    return "12"


def _extra(driver: Driver) -> str:
    if driver.cuda is None:
        return 'pip install "napari-wsigpu[cuda12]" or "napari-wsigpu[cuda13]"'
    return f'pip install "napari-wsigpu[cuda{_generation(driver)}]"'


# How it is said


def _as_json(found: Report, slides: dict[str, SlideRoutes]) -> str:
    listed = [
        {"path": path, "routes": [{**asdict(route), "levels": n} for route, n in routes.items()]}
        for path, routes in slides.items()
    ]
    return json.dumps({**asdict(found), "slides": listed}, indent=2)


def _as_lines(found: Report, slides: dict[str, SlideRoutes]) -> Iterator[str]:
    for finding in (*found.software, *_driver_findings(found.driver), *found.cuda):
        note = f" ({finding.note})" if finding.note else ""
        yield f"{finding.name:<14} {finding.version or 'not found'}{note}"
        if finding.reason:
            yield f"  {finding.reason}; {finding.advice}."
    yield "\nWhat decodes what"
    yield from (f"  {_route_text(route)}" for route in found.routes)
    for path, routes in slides.items():
        yield f"\n{path}"
        for route, levels in routes.items():
            numbers = ", ".join(map(str, levels))
            yield f"  level{'s' if len(levels) > 1 else ''} {numbers}: {_route_text(route)}"


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
