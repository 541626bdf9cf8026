"""The NVIDIA driver: whether CUDA can be used in this process, and the import of CUDA packages."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from types import ModuleType

DRIVERS = {"win32": "nvcuda.dll"}
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

NO_DRIVER = "this machine has no NVIDIA driver"
FORKED = "this process was forked from one that uses the GPU"

logger = logging.getLogger(__name__)
# Id of the process that started CUDA. A forked child inherits the value, but has another id.
_started_in: int | None = None


def record_start() -> None:
    """Record that this process starts CUDA; processes forked from it later cannot use CUDA."""
    global _started_in
    _started_in = os.getpid()


def started_before_fork() -> bool:
    """Return whether this process was forked from one that had started CUDA."""
    return _started_in not in (None, os.getpid())


@cache
def warn_of_fork() -> None:
    """Warn, once in a process, that the CPU decodes because the process was forked."""
    logger.warning(
        "Slides are decoded on the CPU because %s; use the start method 'spawn' to use the GPU",
        FORKED,
    )


def check_process(device: str) -> None:
    """Raise an error if this process was forked from one that had started CUDA.

    Parameters
    ----------
    device : str
        Name of the device, for the message.

    Raises
    ------
    DeviceError
        If this is such a process.
    """
    if started_before_fork():
        raise DeviceError(
            f"'{device}' can't be used because {FORKED}; use the start method 'spawn', or use "
            "device='cpu'."
        )


def driver_available() -> bool:
    """Return whether this process can load and use an NVIDIA driver; does not initialize CUDA."""
    if started_before_fork():
        return False
    try:
        ctypes.CDLL(DRIVERS.get(sys.platform, "libcuda.so.1"))
    except OSError:
        return False
    return True


def import_cuda(package: str, device: str) -> ModuleType:
    """Import a package of the CUDA extras.

    Parameters
    ----------
    package : str
        Name to import.
    device : str
        Name of the device that needs it, for messages.

    Raises
    ------
    DeviceError
        If there is no driver, or if the package is not installed or does not work.
    """
    check_process(device)
    if not driver_available():
        raise DeviceError(f"'{device}' can't be used because {NO_DRIVER}; use device='cpu'.")
    # CUDA and nvImageCodec read these variables when they start. 32 hardware queues instead of 8
    # let more JPEG 2000 tiles decode concurrently. Failures are reported by our own errors.
    os.environ.setdefault(CONNECTIONS, "32")
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    try:
        return import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        raise DeviceError(
            f"'{device}' can't be used because {package} can't be loaded ({error}); install "
            "napari-wsigpu[cuda12] or napari-wsigpu[cuda13], matching your driver's CUDA version, "
            "or use device='cpu'."
        ) from error
