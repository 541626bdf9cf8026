"""Decoding rates for the "Decoding" page, from a slide's counters over the last minute."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu.model.units import byte_size

if TYPE_CHECKING:
    from collections.abc import Mapping

# How many seconds of steps to keep, and the maximum number of characters in a line of text.
SECONDS = 60.0
LONGEST = 300
TILES, DECODED, READ = "Tiles", "Decoded", "Read"
WAITING, BATCH, HITS = "Waiting", "Batch", "Cache hits"
PREFETCH, ALL_READ = "Prefetch hits", "Total read"
RATE_TOOLTIPS = {
    TILES: "Tiles of this slide decoded per second",
    DECODED: "Decoded pixels per second, in bytes",
    READ: "Encoded bytes read from the file per second",
    WAITING: "Tiles that a display is waiting for",
    BATCH: "Tiles decoded in one batch",
    HITS: "Share of the tiles requested in the last minute that were in the cache",
    PREFETCH: "Share of prefetched tiles that were shown later",
    ALL_READ: "Encoded bytes read since the slide was opened",
}


class Step(NamedTuple):
    """Change of the counters between updates.

    Attributes
    ----------
    start, end : float
        Times of the updates, in seconds.
    tiles, bytes_decoded, bytes_read, requested, hits : int
        Tiles decoded, their size in bytes, encoded bytes read, tiles requested, and tiles found in
        the cache.
    """

    start: float
    end: float
    tiles: int
    bytes_decoded: int
    bytes_read: int
    requested: int
    hits: int

    def rate(self, count: int) -> float:
        """Convert a count of this step to a count per second."""
        return count / (self.end - self.start)


class Rates:
    """The steps of the last minute."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque()
        self._last: tuple[float, tuple[int, ...]] | None = None

    @property
    def latest(self) -> Step | None:
        """The most recent step; None before the second update."""
        return self.steps[-1] if self.steps else None

    def add(self, now: float, stats: Mapping[str, Any]) -> None:
        """Add a step from the counters' current values."""
        names = "bytes_decoded", "bytes_read", "tiles_asked", "cache_hits"
        counts = sum(stats["decoded"].values()), *(stats[name] for name in names)
        if self._last is not None and now > self._last[0]:
            start, before = self._last
            changes = (new - old for new, old in zip(counts, before, strict=True))
            self.steps.append(Step(start, now, *changes))
        self._last = now, counts
        while self.steps and self.steps[0].end <= now - SECONDS:
            self.steps.popleft()

    def pause(self) -> None:
        """Ignore activity until the next update."""
        self._last = None

    def texts(self, stats: Mapping[str, Any]) -> dict[str, str]:
        """Return the text of each of `RATE_TOOLTIPS` whose value is known."""
        values = {ALL_READ: byte_size(stats["bytes_read"])}
        step = self.latest
        if step is not None:
            values[TILES] = per_second(step.rate(step.tiles))
            values[DECODED] = f"{byte_size(round(step.rate(step.bytes_decoded)))}/s"
            values[READ] = f"{byte_size(round(step.rate(step.bytes_read)))}/s"
        requested = sum(step.requested for step in self.steps)
        hits = _part(sum(step.hits for step in self.steps), requested)
        values[HITS] = f"{hits} in the last minute" if requested else "no tiles in the last minute"
        display = stats["display"]
        values[WAITING] = f"{display['queue']:,} tiles"
        values[BATCH] = f"{display['batch']:,} tiles"
        values[PREFETCH] = _part(display["prefetch_hits"], display["prefetched"])
        return values


def per_second(rate: float) -> str:
    """Format a number of tiles per second."""
    return f"{rate:,.0f} tiles/s" if rate >= 10 or not rate else f"{rate:.1f} tiles/s"


def failure_lines(count: int, reasons: Mapping[str, str]) -> list[str]:
    """Return a line per named failed tile, and one for the rest of `count`."""
    lines = [_short(f"{name}: {reason}") for name, reason in reasons.items()]
    more = count - len(lines)
    return [*lines, f"And {more:,} more."] if more > 0 else lines


def _part(count: int, whole: int) -> str:
    return f"{count / whole:.0%} of {whole:,} tiles" if whole else "no tiles yet"


def _short(text: str) -> str:
    line = " ".join(text[: LONGEST + 1].split())
    return line if len(text) <= LONGEST else f"{line[:LONGEST]}…"
