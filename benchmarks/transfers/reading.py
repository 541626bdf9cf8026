"""Reading through kvikio, run in a process of its own."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.transfers.readers import own
from benchmarks.transfers.target import Target
from napari_wsigpu.gpu.transfer.gds import direct_reads
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from benchmarks.transfers.reference import Region

KVIKIO_ONLY_RAW = "kvikio reads uncompressed tiles, and these are not"

_stack = ExitStack()


def read(
    wants_pixels: bool, path: str, level: int, region: Region, cold: bool
) -> NDArray[Any] | float:
    """Read a region to the device; return its pixels on the host, or seconds.

    Raises
    ------
    DeviceError
        If kvikio could not read, so that something else did.
    """
    target = opened(path, level, cold)
    by_gpu = own("", target, target.gpu_slide(), "cuda").way()
    result = by_gpu.pixels(region) if wants_pixels else by_gpu.seconds(region)
    check_kvikio()
    return result


@cache
def opened(path: str, level: int, cold: bool) -> Target:
    """Open a level once; `close` closes it."""
    return Target(Path(path), level, _stack, cold=cold)


def close() -> None:
    """Close all levels."""
    opened.cache_clear()
    _stack.close()


def check_kvikio() -> None:
    """Raise a DeviceError if files are not read by kvikio any more."""
    if direct_reads.module() is None:
        raise DeviceError("kvikio could not read the file, so it was read without it.")
