"""`TileFetcher`: decode tiles for displays in the background, tiles on screen first."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from napari_wsigpu.codecs.cpu import default_threads
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.reading.plan import Cancellation, CancelledError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from napari_wsigpu.display.composite_source import CompositeSource
    from napari_wsigpu.display.device_source import DeviceSource
    from napari_wsigpu.display.source import DisplaySource
    from napari_wsigpu.reading.cache import TileKey

    TileSource: TypeAlias = DisplaySource | DeviceSource | CompositeSource

# Target duration of a batch of tiles on screen.
BATCH_SECONDS = 0.05
# All missing tiles of a view form one batch if that takes no longer: each batch ends with idle
# cores, and drawing a half-complete view delays the rest.
VIEW_SECONDS = 0.4
# A source may ask for larger batches of tiles on screen, up to this duration. The first batch,
# whose duration is unknown, has a part of their size.
LONGEST_SECONDS, FIRST_PART = 0.75, 4
# Target duration of a batch of prefetched tiles.
AHEAD_SECONDS = 0.015
BATCH_TILES = 256
# Tiles that take longer than this, in seconds, are not prefetched.
SLOWEST_AHEAD = 0.2
# If a batch takes longer than expected by this factor, older measurements are dropped.
SLOWER = 2
MOST_REMEMBERED = 1 << 16

logger = logging.getLogger(__name__)


class Display(Protocol):
    """A display of a slide. The fetcher calls it from its own thread."""

    @property
    def source(self) -> TileSource:
        """Source of the slide's tiles, shared by all displays of the slide."""

    def deliver(self, tiles: Mapping[TileKey, Any]) -> None:
        """Receive tiles of one level, requested by this display or by another one."""

    def fail(self, error: Exception) -> None:
        """Receive the error of a failed read; the request has been dropped."""


@dataclass
class _Request:
    """The tiles that one display requests, in order of priority."""

    source: TileSource
    on_screen: list[TileKey]
    next_likely: list[TileKey]
    waits: bool


class _FetchBatch(NamedTuple):
    """Tiles of one level that are read together; `waited_for` if the display waits for them."""

    source: TileSource
    keys: list[TileKey]
    ahead: bool
    waited_for: bool
    cancellation: Cancellation


class TileFetcher:
    """Decodes the tiles that displays request, in one thread that ends when no request is left.

    Tiles on any screen come before prefetched tiles. A batch takes about 50 ms, or 15 ms for
    prefetched tiles, so that a view sharpens while it is read. All missing tiles of a view form one
    batch if that takes at most 0.4 s. A batch that no display wants any more is cancelled. Tiles
    that take longer than 0.2 s each are not prefetched. While a GPU decodes, prefetching pauses
    during frames, because the decoding and the drawing thread would compete for the GIL.
    """

    def __init__(self) -> None:
        # Guards all fields. Released while tiles are read or delivered, because the displays take
        # their own locks then; `forget_slide` waits on it for the batch in flight.
        self._changed = threading.Condition()
        self._requests: dict[Display, _Request] = {}
        self._thread: threading.Thread | None = None
        self._in_flight: frozenset[TileKey] = frozenset()
        self._flight_source: TileSource | None = None
        self._flight_cancellation = Cancellation()
        # The displays that requested tiles in flight and still want some of them.
        self._flight_wanted_by: set[Display] = set()
        self._flight_is_ahead = False
        self._arrives_at: float | None = None
        self._paused_until = 0.0
        # For each slide and image: number of tiles and duration in seconds of the latest batch,
        # by the bit length of the number of tiles.
        self._batches: dict[tuple[int, int], dict[int, tuple[int, float]]] = {}
        # Prefetched tiles that no view has shown yet.
        self._ahead: set[TileKey] = set()
        self._fetched_ahead: Counter[int] = Counter()
        self._hits_ahead: Counter[int] = Counter()
        self._last_batch: dict[int, int] = {}

    def request(
        self,
        display: Display,
        on_screen: Sequence[TileKey],
        next_likely: Sequence[TileKey] = (),
        *,
        waits: bool = False,
    ) -> None:
        """Replace the request of a display; tiles that are no longer requested are dropped.

        Parameters
        ----------
        display : Display
            The display.
        on_screen, next_likely : sequence of TileKey
            The tiles to fetch, in order of priority.
        waits : bool
            Whether the display blocks until the tiles on screen arrive.
        """
        with self._changed:
            waiting = self._requests.pop(display, None)
            self._changed.notify_all()
            if not on_screen and not next_likely:
                self._cancel_unwanted({display})
                return
            in_flight = self._coming if display.source is self._flight_source else frozenset()
            if in_flight.isdisjoint(on_screen) and in_flight.isdisjoint(next_likely):
                self._cancel_unwanted({display})
            else:
                self._flight_wanted_by.add(display)
            request = _Request(
                display.source,
                [key for key in on_screen if key not in in_flight],
                [key for key in next_likely if key not in in_flight],
                waits,
            )
            if waiting is None or request.on_screen:
                # The display that made the latest request is being moved, so it comes first.
                self._requests = {display: request} | self._requests
            else:
                self._requests[display] = request
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="wsigpu-fetch", daemon=True)
                self._thread.start()

    def pause_prefetch(self, seconds: float) -> None:
        """Pause prefetching for at most this long; 0 resumes it."""
        with self._changed:
            self._paused_until = time.perf_counter() + seconds
            self._changed.notify_all()

    def cancel(self, display: Display) -> None:
        """Drop the request of a display; tiles in flight may still be delivered."""
        self.request(display, ())

    def expected(self, keys: Sequence[TileKey]) -> float | None:
        """Return how many seconds tiles of one level would take to arrive if requested now.

        Parameters
        ----------
        keys : sequence of TileKey
            The tiles.

        Returns
        -------
        float or None
            None if the speed of this level, or of the level of the batch in flight, has not been
            measured yet, or a cancelled batch has not ended yet.
        """
        with self._changed:
            left: float | None = 0.0
            coming = self._coming
            if self._in_flight and not coming:
                return None  # a cancelled batch ends sooner or later
            if coming:
                left = self._arrives_at and max(0.0, self._arrives_at - time.perf_counter())
            others = [key for key in keys if key not in coming]
            seconds = self._seconds_of(others[0], len(others)) if others else 0.0
            return None if left is None or seconds is None else left + seconds

    def shown(self, found: Iterable[TileKey], lacked: Iterable[TileKey]) -> None:
        """Record which tiles of a new view were available and which were not, to count hits."""
        found, lacked = set(found), set(lacked)
        with self._changed:
            for key in self._ahead & found:
                self._hits_ahead[key.slide] += 1
            self._ahead -= found | lacked

    def stats(self, slide: int) -> dict[str, int]:
        """Return the counters of a slide: queue, batch, prefetched and prefetch_hits."""
        with self._changed:
            requests = self._requests.values()
            queue = sum(key.slide == slide for request in requests for key in request.on_screen)
            in_flight = () if self._flight_is_ahead else self._in_flight
            return {
                "queue": queue + sum(key.slide == slide for key in in_flight),
                "batch": self._last_batch.get(slide, 0),
                "prefetched": self._fetched_ahead[slide],
                "prefetch_hits": self._hits_ahead[slide],
            }

    def forget_slide(self, slide: int) -> None:
        """Drop all state of a slide, and wait until none of its tiles is in flight."""
        with self._changed:
            for request in self._requests.values():
                for keys in (request.on_screen, request.next_likely):
                    keys[:] = [key for key in keys if key.slide != slide]
            if any(key.slide == slide for key in self._in_flight):
                self._cancel_unwanted(self._flight_wanted_by)
                self._changed.wait_for(lambda: all(key.slide != slide for key in self._in_flight))
            self._ahead = {key for key in self._ahead if key.slide != slide}
            for level in [level for level in self._batches if level[0] == slide]:
                del self._batches[level]
            for counts in (self._fetched_ahead, self._hits_ahead, self._last_batch):
                counts.pop(slide, None)

    def _run(self) -> None:
        try:
            self._fetch()
        finally:
            with self._changed:
                # Also after an unexpected error, so that the next request starts a new thread.
                if self._thread is threading.current_thread():
                    self._thread = None
                    self._in_flight = frozenset()
                    self._changed.notify_all()

    def _fetch(self) -> None:
        while (batch := self._next()) is not None:
            start = time.perf_counter()
            try:
                tiles = batch.source.read_tiles(batch.keys, batch.cancellation)
            except CancelledError:
                with self._changed:
                    self._in_flight = frozenset()
                    self._changed.notify_all()
            except Exception as error:
                if not isinstance(error, SlideError):
                    logger.exception("Tiles of a display can't be read")
                # Displays decide whether to request the tiles again.
                for display in self._drop(batch.source):
                    display.fail(error)
            else:
                self._deliver(batch, tiles, time.perf_counter() - start)

    def _next(self) -> _FetchBatch | None:
        """Return the next batch; None ends the thread."""
        with self._changed:
            while True:
                for request in self._requests.values():
                    if request.on_screen:
                        return self._take_batch(request, request.on_screen, ahead=False)
                for request in self._requests.values():
                    keys = request.next_likely
                    keys[:] = [key for key in keys if not self._is_slow(key)]
                if not any(request.next_likely for request in self._requests.values()):
                    # Under the lock, so that a request from now on starts a new thread.
                    self._thread = None
                    return None
                pause = self._paused_until - time.perf_counter()
                if pause <= 0:
                    request = next(w for w in self._requests.values() if w.next_likely)
                    return self._take_batch(request, request.next_likely, ahead=True)
                self._changed.wait(pause)

    def _take_batch(self, request: _Request, keys: list[TileKey], *, ahead: bool) -> _FetchBatch:
        """Remove a batch, the first tiles of one level, from a list of requested tiles."""
        first, source = keys[0], request.source
        image = _image(first)
        batch = [key for key in keys if _image(key) == image]
        view = self._seconds_of(first, len(batch))
        if ahead or view is None or view > VIEW_SECONDS or len(batch) > BATCH_TILES:
            most = self._batch_size(first, source, AHEAD_SECONDS if ahead else BATCH_SECONDS)
            least = source.least_batch if ahead else self._least_on_screen(first, source)
            del batch[max(most, least) :]
        self._in_flight, self._flight_is_ahead = frozenset(batch), ahead
        self._flight_source, self._flight_cancellation = source, Cancellation()
        self._flight_wanted_by = {
            display
            for display, other in self._requests.items()
            if other.source is source
            and not self._in_flight.isdisjoint((*other.on_screen, *other.next_likely))
        }
        seconds = self._seconds_of(first, len(batch))
        self._arrives_at = None if seconds is None else time.perf_counter() + seconds
        # The batch is delivered to all displays of the source.
        for other in self._requests.values():
            if other.source is not source:
                continue
            for waiting in (other.on_screen, other.next_likely):
                waiting[:] = [key for key in waiting if key not in self._in_flight]
        self._last_batch[first.slide] = len(batch)
        return _FetchBatch(
            source, batch, ahead, request.waits and not ahead, self._flight_cancellation
        )

    @property
    def _coming(self) -> frozenset[TileKey]:
        """The tiles in flight, unless they are no longer wanted: then they may never arrive."""
        return self._in_flight if self._flight_wanted_by else frozenset()

    def _cancel_unwanted(self, displays: Collection[Display]) -> None:
        """Note that displays want no tile in flight; cancel the batch if nobody does."""
        self._flight_wanted_by -= {*displays}
        if self._in_flight and not self._flight_wanted_by:
            self._flight_cancellation.cancel()

    def _batch_size(self, key: TileKey, source: TileSource, most_seconds: float) -> int:
        """Return how many tiles keep all cores busy for at most `most_seconds`."""
        concurrent = -(-default_threads() // source.parts_of(key.image))
        if (key.slide, key.image) not in self._batches:
            return concurrent
        most = BATCH_TILES
        while most > concurrent and (self._seconds_of(key, most) or 0) > most_seconds:
            most //= 2
        return max(1, most // concurrent) * concurrent

    def _least_on_screen(self, key: TileKey, source: TileSource) -> int:
        """Return the smallest batch on screen that is worth reading and not too slow."""
        least, seconds = source.least_view_batch, self._seconds_of(key, source.least_view_batch)
        if seconds is None:
            return max(source.least_batch, least // FIRST_PART)
        while least > source.least_batch and seconds > LONGEST_SECONDS:
            half = max(source.least_batch, least // 2)
            of_half = self._seconds_of(key, half)
            if of_half is None or of_half >= seconds:  # not measured, only bounded
                break
            least, seconds = half, of_half
        return least

    def _is_slow(self, key: TileKey) -> bool:
        """Return whether tiles of a level are known to be too slow for prefetching."""
        batches = self._batches.get((key.slide, key.image), {}).values()
        return bool(batches) and all(seconds > SLOWEST_AHEAD * tiles for tiles, seconds in batches)

    def _seconds_of(self, key: TileKey, tiles: int) -> float | None:
        """Return the expected duration of a batch of a level; None if nothing has been measured.

        Batches have a fixed cost, and other work may delay them. So each measurement is an upper
        bound: as it stands for smaller batches, and scaled by the number of tiles for larger ones.
        """
        batches = self._batches.get((key.slide, key.image), {}).values()
        return min((max(1.0, tiles / count) * seconds for count, seconds in batches), default=None)

    def _measure(self, key: TileKey, tiles: int, seconds: float) -> None:
        """Record the duration of a batch; drop earlier ones if it was much slower than expected."""
        batches = self._batches.setdefault((key.slide, key.image), {})
        expected = self._seconds_of(key, tiles)
        if expected is not None and seconds > SLOWER * expected:
            batches.clear()
        batches[tiles.bit_length()] = tiles, seconds

    def _deliver(self, batch: _FetchBatch, tiles: Mapping[TileKey, Any], seconds: float) -> None:
        first = batch.keys[0]
        # Drawing frames slows down reads; record how long this read would take without it.
        if not batch.waited_for:
            seconds /= batch.source.slowed
        with self._changed:
            self._measure(first, len(batch.keys), seconds)
            if batch.ahead:
                if len(self._ahead) > MOST_REMEMBERED:
                    self._ahead.clear()
                self._ahead.update(batch.keys)
                self._fetched_ahead[first.slide] += len(batch.keys)
            # Later requests for these tiles are served from the cache.
            self._in_flight = frozenset()
            self._changed.notify_all()
            displays = self._displays_of(batch.source)
        # Outside of the lock: displays take their own locks and request more tiles.
        for display in displays:
            display.deliver(tiles)

    def _drop(self, source: TileSource) -> Collection[Display]:
        """Drop all requests for a source; return the displays that made them."""
        with self._changed:
            self._in_flight = frozenset()
            self._changed.notify_all()
            displays = self._displays_of(source)
            for display in displays:
                del self._requests[display]
            return displays

    def _displays_of(self, source: TileSource) -> list[Display]:
        """Return the displays with requests for a source."""
        return [display for display, request in self._requests.items() if request.source is source]


def _image(key: TileKey) -> tuple[int, int, str]:
    """Return the properties that all tiles of a batch share."""
    return key.slide, key.image, key.color
