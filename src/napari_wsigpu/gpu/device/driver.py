"""Whether CUDA can be used, and the import of its packages."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from functools import cache
from importlib import import_module
from typing import Any

from napari_wsigpu.model.errors import DeviceError

DRIVERS = {"win32": "nvcuda.dll"}
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


NO_DRIVER = "this machine has no NVIDIA driver"
FORKED = "this process was forked from one that uses the GPU"

logger = logging.getLogger(__name__)
_started_in: int | None = None


def note_start() -> None:
    """Note that this process starts CUDA, which processes forked from it can't do any more."""
    global _started_in
    _started_in = os.getpid()


def started_before_fork() -> bool:
    """Whether a process that this one was forked from uses CUDA."""
    return _started_in not in (None, os.getpid())


@cache
def warn_of_fork() -> None:
    """Say once that the CPU decodes in this process, because it was forked from one with a GPU."""
    logger.warning(
        "Slides are decoded on the CPU, because %s; start processes by 'spawn' to use it", FORKED
    )


def check_process(device: str) -> None:
    """Refuse to start a device in a process that was forked from one that uses CUDA.

    Raises
    ------
    DeviceError
        If this one was.
    """
    if started_before_fork():
        raise DeviceError(
            f"'{device}' can't be used, because {FORKED}; start processes by 'spawn', or use "
            "device='cpu'."
        )


def driver_is_there() -> bool:
    """Whether CUDA can be used: an NVIDIA driver can be loaded; nothing is initialised."""
    if started_before_fork():
        return False
    try:
        ctypes.CDLL(DRIVERS.get(sys.platform, "libcuda.so.1"))
    except OSError:
        return False
    return True


def import_cuda(package: str, device: str) -> Any:
    """Import a package of the CUDA extras, for the use of a device.

    Raises
    ------
    DeviceError
        If there is no driver, or the package is not installed or broken.
    """
    check_process(device)
    if not driver_is_there():
        raise DeviceError(f"'{device}' can't be used, because {NO_DRIVER}; use device='cpu'.")
    # Both are read when CUDA or nvImageCodec starts. JPEG 2000 tiles are decoded side by side
    # by up to 32 queues instead of 8; what can't be decoded is said by our own errors.
    os.environ.setdefault(CONNECTIONS, "32")
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    try:
        return import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        raise DeviceError(
            f"'{device}' can't be used, because {package} can't be loaded ({error}); install "
            "napari-wsigpu[cuda12] or napari-wsigpu[cuda13], as your driver's CUDA version is, "
            "or use device='cpu'."
        ) from error
