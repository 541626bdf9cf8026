"""The planes of a slide that were asked for, each opened once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_READY = 64


class Releasable(Protocol):
    """A plane: it holds file handles, threads and tiles."""

    def release(self) -> None:
        """Let go of them until the next read."""


Plane = TypeVar("Plane", bound=Releasable)


class OpenPlanes(Generic[Plane]):
    """Planes of a slide by (z, t), each a slide of its own; thread-safe.

    Parameters
    ----------
    opener : callable
        Opens a plane.
    """

    def __init__(self, opener: Callable[[tuple[int, int]], Plane]) -> None:
        self._opener = opener
        self._lock = threading.Lock()
        self._planes: dict[tuple[int, int], Plane] = {}

    def get(self, which: tuple[int, int]) -> Plane:
        """Return a plane; of those beyond `MOST_READY`, the one not asked for longest lets go."""
        with self._lock:
            plane = self._planes.pop(which, None) or self._opener(which)
            self._planes[which] = plane
            last = list(self._planes.values())[-MOST_READY - 1 : -MOST_READY]
        for each in last:
            each.release()
        return plane

    def renew(self) -> None:
        """Take another lock in a forked process: a thread that is not there may hold this one."""
        self._lock = threading.Lock()

    def all(self) -> list[Plane]:
        """Return all planes that were asked for."""
        with self._lock:
            return list(self._planes.values())
