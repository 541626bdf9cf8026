"""`OpenSlides`: slides that this process has opened for tasks, each once."""

from __future__ import annotations

import pickle
import threading
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from napari_wsigpu.reading.level import LevelOwner

MAX_IDLE = 16


def pack(opener: Callable[[], LevelOwner]) -> bytes:
    """Serialize a function that opens a slide, for `OpenSlides`; equal bytes mean the same slide.

    Most of the bytes are offsets and lengths of tiles, 16 bytes per tile before compression.
    """
    return zlib.compress(pickle.dumps(opener), 1)


class OpenSlides:
    """Opens each slide when it is first needed, and closes the least recently used ones.

    Thread-safe.

    Parameters
    ----------
    max_idle : int
        Number of unused slides to keep open.
    """

    def __init__(self, max_idle: int = MAX_IDLE) -> None:
        self._max_idle = max_idle
        self._lock = threading.Lock()  # guards both dicts; held while a slide is opened too
        # The least recently used slide comes first.
        self._open: dict[bytes, LevelOwner] = {}
        self._users: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def use(self, packed: bytes) -> Iterator[LevelOwner]:
        """Provide a slide that stays open at least until the context ends.

        Parameters
        ----------
        packed : bytes
            The result of `pack`, in this or another process.

        Raises
        ------
        SlideError
            If the slide can't be opened in this process.
        """
        with self._lock:
            slide = self._open.pop(packed, None)
            if slide is None:
                slide = pickle.loads(zlib.decompress(packed))()
            # Inserted last: the dict keeps slides in order of their latest use.
            self._open[packed] = slide
            self._users[packed] = self._users.get(packed, 0) + 1
        try:
            yield slide
        finally:
            with self._lock:
                self._users[packed] -= 1
                if not self._users[packed]:
                    del self._users[packed]
            self._close_idle(self._max_idle)

    def close(self) -> None:
        """Close all slides that are not in use."""
        self._close_idle(0)

    def _close_idle(self, most: int) -> None:
        """Close unused slides until at most this many are left."""
        with self._lock:
            idle = [packed for packed in self._open if packed not in self._users]
            surplus = [self._open.pop(packed) for packed in idle[: max(0, len(idle) - most)]]
        # Without holding the lock: closing a slide may take a long time.
        for slide in surplus:
            slide.close()
