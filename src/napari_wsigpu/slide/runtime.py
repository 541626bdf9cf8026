"""`Runtime`: caches, devices and threads that the slides of a process share."""

from __future__ import annotations

import atexit
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

from napari_wsigpu.display.fetcher import TileFetcher
from napari_wsigpu.gpu.device.devices import Devices
from napari_wsigpu.reading.cache import TileCache
from napari_wsigpu.reading.open_slides import OpenSlides

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from napari_wsigpu.reading.level import LevelOwner


class Runtime:
    """Caches, devices and threads that slides share, and the decoding speeds measured so far.

    A forked process gets its own copy, which starts empty and keeps the settings.

    Parameters
    ----------
    devices : Devices, optional
        Devices that decode in addition to the CPU; by default this machine's CUDA devices.

    Attributes
    ----------
    tiles : TileCache
        Decoded tiles in host memory; ``tiles.budget`` is their maximum size in bytes.
    devices : Devices
        The CUDA devices with their workers and caches.
    fetcher : TileFetcher
        Decodes the tiles that displays need, in the background.
    open_slides : OpenSlides
        Slides opened by tasks.

    Examples
    --------
    >>> from napari_wsigpu import runtime
    >>> runtime.default().tiles.budget = 2_000_000_000  # doctest: +SKIP
    """

    def __init__(self, devices: Devices | None = None) -> None:
        self._set_up(Devices() if devices is None else devices)
        _runtimes.add(self)

    def _set_up(self, devices: Devices) -> None:
        self.tiles = TileCache()
        self.devices = devices
        self.fetcher = TileFetcher()
        self.open_slides = OpenSlides()

    def close(self) -> None:
        """Close the slides that tasks opened, and stop the devices' threads."""
        self.open_slides.close()
        self.devices.close()

    def reset_after_fork(self) -> None:
        """Replace everything in a forked process, where the parent's threads may hold the locks."""
        budget = self.tiles.budget
        self._set_up(self.devices.renewed())
        self.tiles.budget = budget


_runtimes: WeakSet[Runtime] = WeakSet()
_default = Runtime()
atexit.register(lambda: _default.open_slides.close())


def default() -> Runtime:
    """Return the runtime that slides use unless another one is specified."""
    return _default


def _reset_after_fork() -> None:
    for runtime in list(_runtimes):
        runtime.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


@contextmanager
def using(runtime: Runtime) -> Iterator[Runtime]:
    """Make another runtime the default in a ``with`` block, in all threads.

    Parameters
    ----------
    runtime : Runtime
        The runtime that `default` returns in the block. It is not closed at the end.
    """
    global _default
    before, _default = _default, runtime
    try:
        yield runtime
    finally:
        _default = before


@dataclass(frozen=True)
class PackedSlide:
    """A pickled slide for tasks: each process opens it once, in its default runtime.

    Parameters
    ----------
    data : bytes
        Return value of `napari_wsigpu.reading.open_slides.pack`.
    """

    data: bytes

    def use(self) -> AbstractContextManager[LevelOwner]:
        """Return a context manager that keeps the slide open at least until it exits."""
        return default().open_slides.use(self.data)
