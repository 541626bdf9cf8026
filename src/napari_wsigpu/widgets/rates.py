"""Rates from the counters of a slide, and their last minute."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

SECONDS = 60.0


class Step(NamedTuple):
    """What happened between two looks at the counters.

    Attributes
    ----------
    begin, end : float
        When, in seconds.
    tiles, bytes_decoded, bytes_read, asked, hits : int
        Tiles decoded, their bytes of pixels, bytes read, tiles asked, and those in the cache.
    """

    begin: float
    end: float
    tiles: int
    bytes_decoded: int
    bytes_read: int
    asked: int
    hits: int

    def rate(self, count: int) -> float:
        """Return how many these are a second."""
        return count / (self.end - self.begin)


class Rates:
    """The steps of the last minute."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque()
        self._last: tuple[float, tuple[int, ...]] | None = None

    @property
    def latest(self) -> Step | None:
        """The step that ended last; None before there is one."""
        return self.steps[-1] if self.steps else None

    def add(self, now: float, stats: Mapping[str, Any]) -> None:
        """Take note of the counters as they are now."""
        counts = (
            sum(stats["decoded"].values()),
            stats["bytes_decoded"],
            stats["bytes_read"],
            stats["tiles_asked"],
            stats["cache_hits"],
        )
        if self._last is not None and now > self._last[0]:
            begin, before = self._last
            changes = (new - old for new, old in zip(counts, before, strict=True))
            self.steps.append(Step(begin, now, *changes))
        self._last = now, counts
        while self.steps and self.steps[0].end <= now - SECONDS:
            self.steps.popleft()

    def pause(self) -> None:
        """Leave out what happens until the next look."""
        self._last = None
