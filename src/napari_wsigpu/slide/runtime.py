"""`Runtime`: all that the slides of a process share."""

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
from napari_wsigpu.reading.throughput import Throughput

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from napari_wsigpu.reading.level import LevelOwner


class Runtime:
    """Caches, devices and threads that slides share, and how fast each way of decoding was.

    A forked process has a copy of each, which starts empty and keeps its settings.

    Parameters
    ----------
    devices : Devices, optional
        What decodes beside the CPU; by default this machine's CUDA devices.

    Attributes
    ----------
    tiles : TileCache
        Decoded tiles in host memory. ``tiles.budget`` is how many bytes of them are kept.
    devices : Devices
        The CUDA devices, with their workers and caches.
    throughput : Throughput
        What was learnt of how fast tiles are decoded.
    fetcher : TileFetcher
        Decodes what displays want, in the background.
    open_slides : OpenSlides
        Slides that were opened for tasks.

    Examples
    --------
    >>> from napari_wsigpu import runtime
    >>> runtime.default().tiles.budget = 2_000_000_000  # doctest: +SKIP
    """

    def __init__(self, devices: Devices | None = None) -> None:
        self._begin(Devices() if devices is None else devices)
        _runtimes.add(self)

    def _begin(self, devices: Devices) -> None:
        self.tiles = TileCache()
        self.devices = devices
        self.throughput = Throughput()
        self.fetcher = TileFetcher()
        self.open_slides = OpenSlides()

    def close(self) -> None:
        """Close the slides that were opened for tasks, and end the devices' threads."""
        self.open_slides.close()
        self.devices.close()

    def renew(self) -> None:
        """Start again in a forked process: threads that are not there may hold the locks."""
        budget = self.tiles.budget
        self._begin(self.devices.renewed())
        self.tiles.budget = budget


_runtimes: WeakSet[Runtime] = WeakSet()
_default = Runtime()
atexit.register(lambda: _default.open_slides.close())


def default() -> Runtime:
    """Return the runtime of slides that are opened without one."""
    return _default


def _renew() -> None:
    for runtime in list(_runtimes):
        runtime.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


@contextmanager
def using(runtime: Runtime) -> Iterator[Runtime]:
    """Let slides that are opened in this context use another runtime, in whatever thread.

    Parameters
    ----------
    runtime : Runtime
        What `default` returns meanwhile. It is not closed at the end.
    """
    global _default
    before, _default = _default, runtime
    try:
        yield runtime
    finally:
        _default = before


@dataclass(frozen=True)
class PackedSlide:
    """A slide for tasks, which open it once in a process, in the default runtime there.

    Parameters
    ----------
    data : bytes
        What `napari_wsigpu.reading.open_slides.pack` returned.
    """

    data: bytes

    def use(self) -> AbstractContextManager[LevelOwner]:
        """Give out the slide, which stays open at least as long as the context."""
        return default().open_slides.use(self.data)
