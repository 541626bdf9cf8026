"""Open and read, in the background, the planes that displays show or may show next."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from napari_wsigpu.model.errors import SlideError, SlideReadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.reading.level import LevelArray
    from napari_wsigpu.reading.stack import StackLevel

    Position = tuple[int, ...]

# Rows read at a time, so that a plane that is no longer requested is abandoned soon.
BLOCK_ROWS = 512

# Loaded planes to keep after their request has ended: users step back too.
MAX_KEPT = 8

logger = logging.getLogger(__name__)

# The layers of a slide's channels load the same planes. Only one of them reads at a time, so that
# the next one finds the tiles in the cache.
_reading = threading.Lock()


class Plane(NamedTuple):
    """An open plane.

    Attributes
    ----------
    levels : list of LevelArray
        The levels of the plane, finest first.
    overview : ndarray
        All pixels of the coarsest level.
    """

    levels: list[LevelArray]
    overview: Array


Loaded = TypeVar("Loaded")


class Loader(Generic[Loaded]):
    """Loads planes in its own thread, which ends when no requested plane is left.

    Parameters
    ----------
    on_loaded : callable
        Called in that thread when a plane has been loaded or has failed.
    """

    def __init__(self, on_loaded: Callable[[], None]) -> None:
        self._on_loaded = on_loaded
        # Guards the fields below; notified when a plane has been loaded or has failed.
        self._changed = threading.Condition()
        self._requested: list[Position] = []
        self._loaded: dict[Position, Loaded | SlideError] = {}
        self._thread: threading.Thread | None = None

    def request(self, positions: Sequence[Position]) -> None:
        """Replace the requested planes, most urgent first.

        The last `MAX_KEPT` loaded planes outside the request are kept, unless the request is empty.
        A failed plane is retried only after a request that leaves it out.
        """
        with self._changed:
            # Errors outside the request are dropped, so that a later request tries again.
            others = [
                (at, found)
                for at, found in self._loaded.items()
                if at not in positions and not isinstance(found, SlideError)
            ]
            own = {at: self._loaded[at] for at in positions if at in self._loaded}
            self._loaded = dict(others[-MAX_KEPT:] if positions else ()) | own
            self._requested = [at for at in positions if at not in own]
            if self._requested and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="wsigpu-planes", daemon=True)
                self._thread.start()

    def get(self, position: Position, until: float = 0.0) -> Loaded | None:
        """Return a loaded plane; None if it is not loaded yet.

        Parameters
        ----------
        position : tuple of int
            The plane.
        until : float
            The `time.perf_counter` value until which to wait for a requested plane.

        Raises
        ------
        SlideError
            If the plane can't be read.
        """
        with self._changed:
            while position in self._requested and (left := until - time.perf_counter()) > 0:
                # `until` may be infinite, which `wait` does not accept.
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            found = self._loaded.get(position)
        if isinstance(found, SlideError):
            raise found
        return found

    def finish(self) -> None:
        """Wait until every requested plane has been loaded or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._requested)

    @property
    def at_rest(self) -> bool:
        """Whether every requested plane has been loaded or has failed."""
        return not self._requested

    @property
    def error(self) -> SlideError | None:
        """The error of a plane that failed; None if none has."""
        with self._changed:
            errors = [found for found in self._loaded.values() if isinstance(found, SlideError)]
        return errors[0] if errors else None

    def close(self) -> None:
        """Cancel the request and wait until the thread has ended."""
        self.request(())
        thread = self._thread
        # The thread itself may get here through `on_loaded`, and can't join itself.
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _load(self, position: Position) -> Loaded | None:
        """Load a plane; return None if it is no longer requested."""
        raise NotImplementedError

    def _rows(self, position: Position, level: LevelArray) -> Iterator[tuple[slice, Array]]:
        """Yield rows of a level and their pixels for as long as the plane is requested."""
        for top in range(0, level.shape[0], BLOCK_ROWS):
            rows = slice(top, min(top + BLOCK_ROWS, level.shape[0]))
            if position not in self._requested:
                return
            with _reading:
                pixels = level[rows]
            yield rows, pixels

    def _run(self) -> None:
        while (position := self._next()) is not None:
            found: Loaded | SlideError | None
            try:
                found = self._load(position)
            except SlideError as error:
                found = error
            except Exception as error:
                logger.exception("A plane of a display can't be read")
                found = SlideReadError(f"A plane can't be read ({error}).")
            with self._changed:
                if position not in self._requested or found is None:
                    continue
                self._requested.remove(position)
                self._loaded[position] = found
                self._changed.notify_all()
            # Outside of the lock: the listener may get a plane, or close this loader.
            self._on_loaded()

    def _next(self) -> Position | None:
        """Return the next plane to load; None ends the thread."""
        with self._changed:
            if self._requested:
                return self._requested[0]
            self._thread = None
            return None


class PlaneLoader(Loader[Plane]):
    """Opens planes of a stack and reads their overviews.

    Parameters
    ----------
    levels : sequence of StackLevel
        The stack's levels, finest first.
    on_loaded : callable
        As in `Loader`.
    """

    def __init__(self, levels: Sequence[StackLevel], on_loaded: Callable[[], None]) -> None:
        super().__init__(on_loaded)
        self._levels = tuple(levels)

    def _load(self, position: Position) -> Plane | None:
        levels = [level.level(position) for level in self._levels]
        coarsest = levels[-1]
        overview, done = np.empty(coarsest.shape, coarsest.dtype), 0
        for rows, pixels in self._rows(position, coarsest):
            overview[rows], done = pixels, rows.stop
        return Plane(levels, overview) if done == len(overview) else None


class VolumeLoader(Loader[bool]):
    """Reads one level of many planes into one array.

    Parameters
    ----------
    level : StackLevel
        The level.
    positions : sequence of tuple of int
        Positions of the planes.
    most_bytes : int
        Largest size of the volume. A larger one is subsampled by the same integer in y and x.
    on_loaded : callable
        As in `Loader`.

    Attributes
    ----------
    pixels : ndarray, shape (planes, height, width) or (planes, height, width, channels)
        The volume; planes that are not loaded yet are 0.
    """

    def __init__(
        self,
        level: StackLevel,
        positions: Sequence[Position],
        most_bytes: int,
        on_loaded: Callable[[], None],
    ) -> None:
        super().__init__(on_loaded)
        self._level = level
        self._index = {position: index for index, position in enumerate(positions)}
        height, width, *channels = level.level_shape
        plane_bytes = height * width * int(np.prod(channels)) * level.dtype.itemsize
        self._step = 1
        while len(positions) * plane_bytes > most_bytes * self._step**2:
            self._step += 1
        size = -(-height // self._step), -(-width // self._step)
        self.pixels: Array = np.zeros((len(positions), *size, *channels), level.dtype)
        self.request(positions)

    def _load(self, position: Position) -> bool | None:
        level, step, done = self._level.level(position), self._step, 0
        into = self.pixels[self._index[position]]
        for rows, pixels in self._rows(position, level):
            first = -(-rows.start // step)
            sampled = pixels[first * step - rows.start :: step, ::step]
            into[first : first + len(sampled)] = sampled
            done = rows.stop
        return True if done == level.shape[0] else None
