"""The planes of a slide that have been requested, each opened once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

# Planes beyond this number are released until they are read again.
MOST_READY = 64


class Releasable(Protocol):
    """A plane, which holds file handles, threads and tiles."""

    def release(self) -> None:
        """Release its resources until the next read."""


Plane = TypeVar("Plane", bound=Releasable)


class OpenPlanes(Generic[Plane]):
    """Planes of a slide by (z, t), each opened as a separate slide. Thread-safe.

    Parameters
    ----------
    opener : callable
        Opens the plane at (z, t).
    """

    def __init__(self, opener: Callable[[tuple[int, int]], Plane]) -> None:
        self._opener = opener
        self._lock = threading.Lock()
        # The least recently requested plane comes first.
        self._planes: dict[tuple[int, int], Plane] = {}

    def get(self, position: tuple[int, int]) -> Plane:
        """Return the plane at (z, t); release all but the `MOST_READY` most recently requested."""
        with self._lock:
            plane = self._planes.pop(position, None) or self._opener(position)
            self._planes[position] = plane
            excess = list(self._planes.values())[-MOST_READY - 1 : -MOST_READY]
        # Outside of the lock, because releasing a plane waits for its reads.
        for each in excess:
            each.release()
        return plane

    def reset_lock(self) -> None:
        """Replace the lock in a forked process: a thread of the parent may hold the old one."""
        self._lock = threading.Lock()

    def all(self) -> list[Plane]:
        """Return all planes that have been requested."""
        with self._lock:
            return list(self._planes.values())
