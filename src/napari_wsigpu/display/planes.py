"""Planes that displays show or may show next, opened and read in the background."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from napari_wsigpu.model.errors import SlideError, SlideReadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.reading.level import LevelArray
    from napari_wsigpu.reading.stack import StackLevel

    Position = tuple[int, ...]

# Rows of an overview that are read at a time, so that what is wanted no more soon ends.
BLOCK_ROWS = 512

# Planes that are kept though nobody wants them now: whoever steps on may step back.
MOST_KEPT = 8

logger = logging.getLogger(__name__)

# Layers of channels want the same planes: who comes second finds the tiles in the cache.
_turn = threading.Lock()


class Plane(NamedTuple):
    """A plane that is open.

    Attributes
    ----------
    levels : list of LevelArray
        Its levels, finest first.
    overview : ndarray
        All pixels of the coarsest one.
    """

    levels: list[LevelArray]
    overview: NDArray[Any]


Loaded = TypeVar("Loaded")


class Loader(Generic[Loaded]):
    """Loads planes in a thread of its own, which lives as long as any are wanted.

    Parameters
    ----------
    landed : callable
        Called in that thread when a plane was loaded, or can't be.
    """

    def __init__(self, landed: Callable[[], None]) -> None:
        self._on_landed = landed
        self._changed = threading.Condition()
        self._wanted: list[Position] = []
        self._loaded: dict[Position, Loaded | SlideError] = {}
        self._thread: threading.Thread | None = None

    def want(self, positions: Sequence[Position]) -> None:
        """Replace what is wanted, the most urgent first; of others some that were loaded last stay.

        Those that could not be loaded are tried again when they are wanted again.
        """
        with self._changed:
            others = [
                (at, found)
                for at, found in self._loaded.items()
                if at not in positions and not isinstance(found, SlideError)
            ]
            own = {at: self._loaded[at] for at in positions if at in self._loaded}
            self._loaded = dict(others[-MOST_KEPT:] if positions else ()) | own
            self._wanted = [at for at in positions if at not in own]
            if self._wanted and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="wsigpu-planes", daemon=True)
                self._thread.start()

    def get(self, position: Position, until: float = 0.0) -> Loaded | None:
        """Return what was loaded of a plane, None if it is not there yet.

        Parameters
        ----------
        position : tuple of int
            The plane.
        until : float
            By `time.perf_counter`, how long to wait for it if it is wanted.

        Raises
        ------
        SlideError
            If the plane can't be read.
        """
        with self._changed:
            while position in self._wanted and (left := until - time.perf_counter()) > 0:
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            found = self._loaded.get(position)
        if isinstance(found, SlideError):
            raise found
        return found

    def finish(self) -> None:
        """Return once all that is wanted was loaded, or can't be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._wanted)

    @property
    def at_rest(self) -> bool:
        """Whether all that is wanted was loaded, or can't be."""
        return not self._wanted

    @property
    def error(self) -> SlideError | None:
        """Why one of the planes can't be read, if that is so."""
        with self._changed:
            errors = [found for found in self._loaded.values() if isinstance(found, SlideError)]
        return errors[0] if errors else None

    def close(self) -> None:
        """Want nothing, and return once nothing is read any more."""
        self.want(())
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _load(self, position: Position) -> Loaded | None:
        """Load a plane; None if it is wanted no more."""
        raise NotImplementedError

    def _overview(self, position: Position, level: LevelArray) -> Iterator[tuple[slice, Any]]:
        """Yield rows of a level, and their pixels, as long as the plane is wanted."""
        for top in range(0, level.shape[0], BLOCK_ROWS):
            rows = slice(top, min(top + BLOCK_ROWS, level.shape[0]))
            if position not in self._wanted:
                return
            with _turn:
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
                logger.exception("A plane of a display could not be read")
                found = SlideReadError(f"A plane can't be read ({error}).")
            with self._changed:
                if position not in self._wanted or found is None:
                    continue
                self._wanted.remove(position)
                self._loaded[position] = found
                self._changed.notify_all()
            self._on_landed()

    def _next(self) -> Position | None:
        """Return which plane to load next; None ends the thread."""
        with self._changed:
            if self._wanted:
                return self._wanted[0]
            self._thread = None
            return None


class PlaneLoader(Loader[Plane]):
    """Opens planes of a stack and reads their overviews.

    Parameters
    ----------
    levels : sequence of StackLevel
        The stack's levels, finest first.
    landed : callable
        As `Loader` takes it.
    """

    def __init__(self, levels: Sequence[StackLevel], landed: Callable[[], None]) -> None:
        super().__init__(landed)
        self._levels = tuple(levels)

    def _load(self, position: Position) -> Plane | None:
        levels = [level.level(position) for level in self._levels]
        coarsest = levels[-1]
        overview, done = np.empty(coarsest.shape, coarsest.dtype), 0
        for rows, pixels in self._overview(position, coarsest):
            overview[rows], done = pixels, rows.stop
        return Plane(levels, overview) if done == len(overview) else None


class VolumeLoader(Loader[bool]):
    """Reads a level of all planes along an axis into one array.

    Parameters
    ----------
    level : StackLevel
        The level.
    positions : sequence of tuple of int
        The planes.
    most_bytes : int
        If the volume would take more, only each so manieth pixel across and down is taken.
    landed : callable
        As `Loader` takes it.

    Attributes
    ----------
    pixels : ndarray, shape (planes, height, width) or (planes, height, width, channels)
        Planes that are not read yet are 0.
    """

    def __init__(
        self,
        level: StackLevel,
        positions: Sequence[Position],
        most_bytes: int,
        landed: Callable[[], None],
    ) -> None:
        super().__init__(landed)
        self._level = level
        self._places = {position: place for place, position in enumerate(positions)}
        height, width, *channels = level.level_shape
        plane_bytes = height * width * int(np.prod(channels)) * level.dtype.itemsize
        self._step = 1
        while len(positions) * plane_bytes > most_bytes * self._step**2:
            self._step += 1
        size = -(-height // self._step), -(-width // self._step)
        self.pixels: NDArray[Any] = np.zeros((len(positions), *size, *channels), level.dtype)
        self.want(positions)

    def _load(self, position: Position) -> bool | None:
        level, step, done = self._level.level(position), self._step, 0
        into = self.pixels[self._places[position]]
        for rows, pixels in self._overview(position, level):
            first = -(-rows.start // step)
            taken = pixels[first * step - rows.start :: step, ::step]
            into[first : first + len(taken)] = taken
            done = rows.stop
        return True if done == level.shape[0] else None
