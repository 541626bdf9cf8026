"""A record of the machine and of the versions that were measured."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_wsigpu.cli.doctor import find_driver, find_kvikio

if TYPE_CHECKING:
    from napari_wsigpu.cli.doctor import Driver

PACKAGES = (
    "napari-wsigpu",
    "cuda-bindings",
    "cucim-cu12",
    "cucim-cu13",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "fastslide",
    "imagecodecs",
    "kvikio-cu12",
    "kvikio-cu13",
    "napari",
    "napari-wsi",
    "numcodecs",
    "numpy",
    "nvidia-nvcomp-cu12",
    "nvidia-nvcomp-cu13",
    "nvidia-nvimgcodec-cu12",
    "nvidia-nvimgcodec-cu13",
    "openslide-bin",
    "openslide-python",
    "PyOpenGL",
    "PyQt6",
    "PyQt6-Qt6",
    "tifffile",
    "tiffslide",
    "torch",
    "vispy",
    "zarr",
)


def environment() -> dict[str, Any]:
    """Describe the machine and the versions of what is measured; JSON-serialisable."""
    driver = find_driver()
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "gpus": [asdict(device) for device in driver.devices],
        "driver": driver.version,
        "cuda": driver.cuda,
        "gpudirect_storage": _gpudirect_storage(driver),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def memory_bytes() -> int:
    """Return the size of the host's memory, 0 where the system doesn't say."""
    if not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpudirect_storage(driver: Driver) -> str:
    if not driver.devices:
        return f"not here, {driver.reason}"
    kvikio = find_kvikio(driver)
    if kvikio.reason:
        return f"not here, {kvikio.reason}"
    return kvikio.note.removeprefix("GPUDirect Storage: ")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
