"""Slides that this process opened for tasks: each once, a bounded number at a time."""

from __future__ import annotations

import pickle
import threading
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from napari_wsigpu.reading.level import LevelOwner

MOST_IDLE = 16


def pack(opener: Callable[[], LevelOwner]) -> bytes:
    """Return what `OpenSlides` opens a slide by; equal bytes are the same slide.

    Most of it says where tiles lie: 16 bytes a tile before they are compressed.
    """
    return zlib.compress(pickle.dumps(opener), 1)


class OpenSlides:
    """Opens a slide when it is first needed, and closes those that were not used for longest.

    Safe under many threads.

    Parameters
    ----------
    most_idle : int
        How many slides stay open that nobody reads.
    """

    def __init__(self, most_idle: int = MOST_IDLE) -> None:
        self._most_idle = most_idle
        self._lock = threading.Lock()
        self._open: dict[bytes, LevelOwner] = {}
        self._users: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def use(self, packed: bytes) -> Iterator[LevelOwner]:
        """Give out a slide, which stays open at least as long as the context.

        Parameters
        ----------
        packed : bytes
            What `pack` returned, here or in another process.

        Raises
        ------
        SlideError
            If it can't be opened here.
        """
        with self._lock:
            slide = self._open.pop(packed, None)
            if slide is None:
                slide = pickle.loads(zlib.decompress(packed))()
            self._open[packed] = slide
            self._users[packed] = self._users.get(packed, 0) + 1
        try:
            yield slide
        finally:
            with self._lock:
                self._users[packed] -= 1
                if not self._users[packed]:
                    del self._users[packed]
            self._close_idle(self._most_idle)

    def close(self) -> None:
        """Close all slides that nobody reads."""
        self._close_idle(0)

    def _close_idle(self, most: int) -> None:
        with self._lock:
            idle = [packed for packed in self._open if packed not in self._users]
            surplus = [self._open.pop(packed) for packed in idle[: max(0, len(idle) - most)]]
        for slide in surplus:
            slide.close()
