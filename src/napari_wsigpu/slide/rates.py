"""What the page "Decoding" says: rates from the counters of a slide, and their last minute."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu.model.units import byte_size

if TYPE_CHECKING:
    from collections.abc import Mapping

SECONDS = 60.0
LONGEST = 300  # characters
TILES, DECODED, READ = "Tiles", "Decoded", "Read"
WAITING, BATCH, HITS = "Waiting", "Batch", "Cache hits"
PREFETCH, ALL_READ = "Prefetch hits", "Read in all"
READINGS = {
    TILES: "Tiles of this slide that are decoded now",
    DECODED: "Pixels that are decoded now",
    READ: "Encoded bytes that are read from the file now",
    WAITING: "Tiles that a display waits for",
    BATCH: "Tiles that are decoded together",
    HITS: "Part of the tiles of the last minute that were in memory already",
    PREFETCH: "Part of the tiles decoded ahead that were shown later",
    ALL_READ: "Encoded bytes read since the slide was opened",
}


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

    def readings(self, stats: Mapping[str, Any]) -> dict[str, str]:
        """Return a text for each of `READINGS` that is known."""
        values = {ALL_READ: byte_size(stats["bytes_read"])}
        step = self.latest
        if step is not None:
            values[TILES] = per_second(step.rate(step.tiles))
            values[DECODED] = f"{byte_size(round(step.rate(step.bytes_decoded)))}/s"
            values[READ] = f"{byte_size(round(step.rate(step.bytes_read)))}/s"
        asked = sum(step.asked for step in self.steps)
        hits = _part(sum(step.hits for step in self.steps), asked)
        values[HITS] = f"{hits} in this minute" if asked else "no tiles in this minute"
        display = stats["display"]
        values[WAITING] = f"{display['queue']:,} tiles"
        values[BATCH] = f"{display['batch']:,} tiles"
        values[PREFETCH] = _part(display["prefetch_hits"], display["prefetched"])
        return values


def per_second(rate: float) -> str:
    """Return how many tiles a second these are."""
    return f"{rate:,.0f} tiles/s" if rate >= 10 or not rate else f"{rate:.1f} tiles/s"


def failure_lines(count: int, reasons: Mapping[str, str]) -> list[str]:
    """Return a line for each failed tile that is named, and one for the rest of `count`."""
    lines = [_short(f"{name}: {why}") for name, why in reasons.items()]
    more = count - len(lines)
    return [*lines, f"And {more:,} more."] if more > 0 else lines


def _part(count: int, whole: int) -> str:
    return f"{count / whole:.0%} of {whole:,} tiles" if whole else "no tiles yet"


def _short(text: str) -> str:
    line = " ".join(text[: LONGEST + 1].split())
    return line if len(text) <= LONGEST else f"{line[:LONGEST]}…"
