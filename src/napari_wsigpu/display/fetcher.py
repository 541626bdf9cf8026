"""Tiles for displays, fetched in the background: what is on screen before what may be next."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from napari_wsigpu.codecs.cpu import threads_at_work
from napari_wsigpu.model.errors import SlideError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from napari_wsigpu.display.device_source import DeviceSource
    from napari_wsigpu.display.source import DisplaySource
    from napari_wsigpu.reading.cache import TileKey

    TileSource: TypeAlias = DisplaySource | DeviceSource

BATCH_SECONDS = 0.05
# What a view lacks is read at once if it takes no longer: each batch ends with idle cores, and a
# frame of half the view holds up the rest.
VIEW_SECONDS = 0.15
AHEAD_SECONDS = 0.015
BATCH_TILES = 256
SLOWEST_AHEAD = 0.2
# A batch that takes so many times as long as expected says that all do now.
SLOWER = 2
MOST_REMEMBERED = 1 << 16

logger = logging.getLogger(__name__)


class Display(Protocol):
    """Who wants tiles of a slide. The fetcher calls it from its own thread."""

    @property
    def source(self) -> TileSource:
        """What has the slide's tiles; the same for all displays of it."""

    def land(self, tiles: Mapping[TileKey, Any]) -> None:
        """Take tiles of one level, wanted or not."""

    def fail(self, error: Exception) -> None:
        """Learn that wanted tiles can't be had."""


@dataclass
class _Wanted:
    """What one display wants of a slide, in its order."""

    source: TileSource
    on_screen: list[TileKey]
    next_likely: list[TileKey]
    waits: bool


class _Batch(NamedTuple):
    source: TileSource
    keys: list[TileKey]
    ahead: bool
    waited_for: bool


class TileFetcher:
    """Decodes the tiles that displays want, in one thread that lives as long as any are wanted.

    What is on any screen comes before what may be next on one. Batches take about 50 ms each, of
    what may be next 15 ms, so that a new view waits no longer than that for the end of an old one;
    all that a view lacks is one batch where that takes no longer than 150 ms, as on many cores;
    tiles of which one alone takes longer than 0.2 s are not fetched ahead. Where a
    GPU decodes, nothing is begun for later while a frame is drawn: the interpreter would have the
    two threads take turns.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wanted: dict[Display, _Wanted] = {}
        self._thread: threading.Thread | None = None
        self._in_flight: frozenset[TileKey] = frozenset()
        self._flies_for: TileSource | None = None
        self._flies_ahead = False
        self._lands_at: float | None = None
        self._quiet_until = 0.0
        # Of each level: tiles and seconds of the last batch of about so many (as a power of 2).
        self._batches: dict[tuple[int, int], dict[int, tuple[int, float]]] = {}
        self._ahead: set[TileKey] = set()
        self._fetched_ahead: Counter[int] = Counter()
        self._hits_ahead: Counter[int] = Counter()
        self._last_batch: dict[int, int] = {}

    def want(
        self,
        display: Display,
        on_screen: Sequence[TileKey],
        next_likely: Sequence[TileKey] = (),
        *,
        waits: bool = False,
    ) -> None:
        """Replace what a display wants; what it wanted before and wants no more is dropped.

        Parameters
        ----------
        display : Display
            Who wants it.
        on_screen, next_likely : sequence of TileKey
            What, in this order.
        waits : bool
            Whether the display does nothing else until the tiles on screen have landed.
        """
        with self._changed:
            waiting = self._wanted.pop(display, None)
            self._changed.notify_all()
            if not on_screen and not next_likely:
                return
            flying = self._in_flight if display.source is self._flies_for else frozenset()
            wanted = _Wanted(
                display.source,
                [key for key in on_screen if key not in flying],
                [key for key in next_likely if key not in flying],
                waits,
            )
            if waiting is None or wanted.on_screen:
                # Who asks last moves something now, and is served first.
                self._wanted = {display: wanted} | self._wanted
            else:
                self._wanted[display] = wanted
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="wsigpu-fetch", daemon=True)
                self._thread.start()

    def be_quiet(self, seconds: float) -> None:
        """Begin nothing for later from now on, for so long at most; 0 ends that."""
        with self._changed:
            self._quiet_until = time.perf_counter() + seconds
            self._changed.notify_all()

    def forget(self, display: Display) -> None:
        """Drop what a display wants; tiles in flight may still land."""
        self.want(display, ())

    def expected(self, keys: Sequence[TileKey]) -> float | None:
        """Return in how many seconds tiles of one level would land if they were wanted now.

        Parameters
        ----------
        keys : sequence of TileKey
            The tiles.

        Returns
        -------
        float or None
            None as long as that is not known of this level.
        """
        with self._changed:
            left: float | None = 0.0
            if self._in_flight:
                left = self._lands_at and max(0.0, self._lands_at - time.perf_counter())
            others = [key for key in keys if key not in self._in_flight]
            seconds = self._seconds_of(others[0], len(others)) if others else 0.0
            return None if left is None or seconds is None else left + seconds

    def shown(self, found: Iterable[TileKey], lacked: Iterable[TileKey]) -> None:
        """Learn which tiles of a new view were at hand, and which were not, to count hits."""
        found, lacked = set(found), set(lacked)
        with self._changed:
            for key in self._ahead & found:
                self._hits_ahead[_number(key)] += 1
            self._ahead -= found | lacked

    def stats(self, slide: int) -> dict[str, int]:
        """Return a slide's counters: queue, batch, prefetched, prefetch_hits."""
        with self._changed:
            queue = sum(
                _number(key) == slide
                for wanted in self._wanted.values()
                for key in wanted.on_screen
            )
            flying = () if self._flies_ahead else self._in_flight
            return {
                "queue": queue + sum(_number(key) == slide for key in flying),
                "batch": self._last_batch.get(slide, 0),
                "prefetched": self._fetched_ahead[slide],
                "prefetch_hits": self._hits_ahead[slide],
            }

    def forget_slide(self, slide: int) -> None:
        """Drop all that is wanted and known of a slide, and return once none of it is decoded."""
        with self._changed:
            for wanted in self._wanted.values():
                for keys in (wanted.on_screen, wanted.next_likely):
                    keys[:] = [key for key in keys if _number(key) != slide]
            self._changed.wait_for(lambda: all(_number(key) != slide for key in self._in_flight))
            self._ahead = {key for key in self._ahead if _number(key) != slide}
            for level in [level for level in self._batches if level[0] == slide]:
                del self._batches[level]
            for counts in (self._fetched_ahead, self._hits_ahead, self._last_batch):
                counts.pop(slide, None)

    def _run(self) -> None:
        try:
            self._fetch()
        finally:
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None
                    self._in_flight = frozenset()
                    self._changed.notify_all()

    def _fetch(self) -> None:
        while (batch := self._next()) is not None:
            begin = time.perf_counter()
            try:
                tiles = batch.source.read_tiles(batch.keys)
            except Exception as error:
                if not isinstance(error, SlideError):
                    logger.exception("Tiles of a display could not be read")
                for display in self._drop(batch.source):
                    display.fail(error)
            else:
                self._land(batch, tiles, time.perf_counter() - begin)

    def _next(self) -> _Batch | None:
        """Return what to fetch next; None ends the thread."""
        with self._changed:
            while True:
                for wanted in self._wanted.values():
                    if wanted.on_screen:
                        return self._take(wanted, wanted.on_screen, ahead=False)
                for wanted in self._wanted.values():
                    keys = wanted.next_likely
                    keys[:] = [key for key in keys if not self._takes_long(key)]
                if not any(wanted.next_likely for wanted in self._wanted.values()):
                    self._thread = None
                    return None
                quiet = self._quiet_until - time.perf_counter()
                if quiet <= 0:
                    wanted = next(w for w in self._wanted.values() if w.next_likely)
                    return self._take(wanted, wanted.next_likely, ahead=True)
                self._changed.wait(quiet)

    def _take(self, wanted: _Wanted, keys: list[TileKey], *, ahead: bool) -> _Batch:
        """Take the first tiles of one level from a list."""
        first, source = keys[0], wanted.source
        taken = [key for key in keys if key[:2] == first[:2]]
        view = self._seconds_of(first, len(taken))
        if ahead or view is None or view > VIEW_SECONDS or len(taken) > BATCH_TILES:
            most = self._batch_size(first, source, AHEAD_SECONDS if ahead else BATCH_SECONDS)
            del taken[max(most, source.least_batch) :]
        self._in_flight, self._flies_ahead = frozenset(taken), ahead
        self._flies_for = source
        seconds = self._seconds_of(first, len(taken))
        self._lands_at = None if seconds is None else time.perf_counter() + seconds
        for other in self._wanted.values():
            if other.source is not source:
                continue
            for waiting in (other.on_screen, other.next_likely):
                waiting[:] = [key for key in waiting if key not in self._in_flight]
        self._last_batch[_number(first)] = len(taken)
        return _Batch(source, taken, ahead, wanted.waits and not ahead)

    def _batch_size(self, key: TileKey, source: TileSource, most_seconds: float) -> int:
        """Return how many tiles keep all cores at work for as long as a batch may take."""
        side_by_side = -(-threads_at_work() // source.parts_of(key.level))
        if (_number(key), key.level) not in self._batches:
            return side_by_side
        most = BATCH_TILES
        while most > side_by_side and (self._seconds_of(key, most) or 0) > most_seconds:
            most //= 2
        return max(1, most // side_by_side) * side_by_side

    def _takes_long(self, key: TileKey) -> bool:
        """Whether one tile of a level is known to take too long to be fetched ahead."""
        batches = self._batches.get((_number(key), key.level), {}).values()
        return bool(batches) and all(seconds > SLOWEST_AHEAD * tiles for tiles, seconds in batches)

    def _seconds_of(self, key: TileKey, tiles: int) -> float | None:
        """Return how long so many tiles of a level take, None as long as that is not known.

        A batch costs more than its tiles do, and at times it is held up by something else. So
        larger ones tell at most how long it takes, and so do smaller ones, tile by tile.
        """
        batches = self._batches.get((_number(key), key.level), {}).values()
        return min((max(1.0, tiles / count) * seconds for count, seconds in batches), default=None)

    def _learn(self, key: TileKey, tiles: int, seconds: float) -> None:
        """Note how long a batch took; what was learnt before counts no more if that was shorter."""
        batches = self._batches.setdefault((_number(key), key.level), {})
        expected = self._seconds_of(key, tiles)
        if expected is not None and seconds > SLOWER * expected:
            batches.clear()
        batches[tiles.bit_length()] = tiles, seconds

    def _land(self, batch: _Batch, tiles: Mapping[TileKey, Any], seconds: float) -> None:
        first = batch.keys[0]
        if not batch.waited_for:
            seconds /= batch.source.slowed
        with self._changed:
            self._learn(first, len(batch.keys), seconds)
            if batch.ahead:
                if len(self._ahead) > MOST_REMEMBERED:
                    self._ahead.clear()
                self._ahead.update(batch.keys)
                self._fetched_ahead[_number(first)] += len(batch.keys)
            # Who asks for these from now on is served from the cache.
            self._in_flight = frozenset()
            self._changed.notify_all()
            displays = self._of(batch.source)
        for display in displays:
            display.land(tiles)

    def _drop(self, source: TileSource) -> Collection[Display]:
        """Drop what is wanted of a slide; return whose displays wanted it."""
        with self._changed:
            self._in_flight = frozenset()
            self._changed.notify_all()
            displays = self._of(source)
            for display in displays:
                del self._wanted[display]
            return displays

    def _of(self, source: TileSource) -> list[Display]:
        return [display for display, wanted in self._wanted.items() if wanted.source is source]


def _number(key: TileKey) -> int:
    """Return the number of a key's slide, whatever colours it is in."""
    return key.slide if key.slide >= 0 else ~key.slide
