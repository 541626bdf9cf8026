"""What a user feels of a viewer: slices, stalls of the main thread, and what frames show."""

from __future__ import annotations

import gc
import math
import threading
import time
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from napari.layers._scalar_field.scalar_field import ScalarFieldSlicingState
from qtpy.QtCore import Qt, QTimer
from vispy import gloo

from benchmarks.stage import scene_canvas

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari import Viewer
    from numpy.typing import NDArray

BLANK = np.array([255, 0, 255], np.uint8)
EVERY = 4
INSET = 2


class Span(NamedTuple):
    """Something that kept the main thread.

    Attributes
    ----------
    begin : float
        By `time.perf_counter`.
    seconds : float
        How long, without what the benchmark itself took.
    collecting : float
        Seconds of these that Python collected garbage.
    """

    begin: float
    seconds: float
    collecting: float = 0.0


class CollectionClock:
    """Times Python's garbage collections, which stop all threads.

    Attributes
    ----------
    seconds : float
        All so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began


class SliceClock:
    """Times slices for display in the main thread, from the outermost call on.

    Parameters
    ----------
    collections : CollectionClock
        Tells how much of it is garbage collection.

    Attributes
    ----------
    slices : list of Span
        All so far.
    """

    def __init__(self, collections: CollectionClock) -> None:
        self.slices: list[Span] = []
        self._collections = collections
        self._inside = False
        for name in ("_set_view_slice", "_make_slice_request"):
            setattr(
                ScalarFieldSlicingState, name, self._timed(getattr(ScalarFieldSlicingState, name))
            )

    def _timed(self, slice_it: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(slice_it)
        def timed(*arguments: Any, **options: Any) -> Any:
            if self._inside or threading.current_thread() is not threading.main_thread():
                return slice_it(*arguments, **options)
            self._inside = True
            begin, collected = time.perf_counter(), self._collections.seconds
            try:
                return slice_it(*arguments, **options)
            finally:
                passed = time.perf_counter() - begin
                self.slices.append(Span(begin, passed, self._collections.seconds - collected))
                self._inside = False

        return timed


class Heartbeat:
    """A timer of 1 ms in the main thread: the gaps between its beats are stalls.

    Parameters
    ----------
    collections : CollectionClock
        Tells how much of a gap is garbage collection.

    Attributes
    ----------
    gaps : list of Span
        All since the start.
    measuring : float
        Seconds that the benchmark itself has kept the main thread; whoever does, adds to it.
    """

    def __init__(self, collections: CollectionClock) -> None:
        self.gaps: list[Span] = []
        self.measuring = 0.0
        self._collections = collections
        self._last = (0.0, 0.0, 0.0)
        self._timer = QTimer()
        self._timer.setTimerType(Qt.TimerType.PreciseTimer)
        self._timer.timeout.connect(self._beat)

    def start(self) -> None:
        """Begin to beat."""
        self._last = (time.perf_counter(), self.measuring, self._collections.seconds)
        self._timer.start(1)

    def stop(self) -> None:
        """Note the last gap, and beat no more."""
        self._beat()
        self._timer.stop()

    def _beat(self) -> None:
        now = (time.perf_counter(), self.measuring, self._collections.seconds)
        passed, measuring, collecting = (b - a for a, b in zip(self._last, now, strict=True))
        self.gaps.append(Span(self._last[0], passed - measuring, collecting))
        self._last = now


class Frame(NamedTuple):
    """One drawn frame that the slide lies in.

    Attributes
    ----------
    time : float
        When it was drawn, by `time.perf_counter`.
    blank : float
        Share of the canvas that lies inside the slide and shows the background.
    shown : bool
        Whether any of the slide is seen.
    """

    time: float
    blank: float
    shown: bool


class FrameLog:
    """Reads every frame back after it was drawn, and looks for blank places in it.

    What drawing takes is waited for first, so that only the reading counts as measuring.

    Parameters
    ----------
    viewer : Viewer
        Its canvas is watched; its first layer is the slide.
    heartbeat : Heartbeat
        Told of the time that this takes.
    film : callable, optional
        Given each frame and its pixels.

    Attributes
    ----------
    frames : list of Frame
        Since there is a layer.
    """

    def __init__(
        self,
        viewer: Viewer,
        heartbeat: Heartbeat,
        film: Callable[[Frame, NDArray[np.uint8]], None] | None = None,
    ) -> None:
        self.frames: list[Frame] = []
        self._viewer = viewer
        self._heartbeat = heartbeat
        self._film = film
        self._canvas = scene_canvas(viewer)
        self._canvas.events.draw.connect(self._on_draw, position="last")

    def blank_between(self, begin: float, end: float) -> float:
        """Return how much of the canvas was blank on average, each frame until the next one."""
        moments = [frame.time for frame in self.frames]
        until = [*moments[1:], end]
        shares = [
            (frame.blank, min(stop, end) - max(start, begin))
            for frame, start, stop in zip(self.frames, moments, until, strict=True)
            if stop > begin and start < end
        ]
        return sum(blank * seconds for blank, seconds in shares) / (end - begin)

    def _on_draw(self, event: Any) -> None:
        self._canvas.context.finish()
        begin = time.perf_counter()
        if self._viewer.layers:
            width, height = self._canvas.size
            pixels = gloo.read_pixels((0, 0, width, height))[..., :3]
            left, top, right, bottom = self._slide_on_canvas(width, height)
            inside = pixels[top:bottom:EVERY, left:right:EVERY]
            blank = (inside == BLANK).all(axis=2)
            if blank.size:
                part = (right - left) * (bottom - top) / (width * height)
                self.frames.append(Frame(begin, float(blank.mean()) * part, not blank.all()))
                if self._film is not None:
                    self._film(self.frames[-1], pixels)
        self._heartbeat.measuring += time.perf_counter() - begin

    def _slide_on_canvas(self, width: int, height: int) -> list[int]:
        """Return left, top, right, bottom of the slide in pixels of the canvas, and in it."""
        camera = self._viewer.scene.camera
        centre, middle = np.array(camera.center[-2:]), np.array((height, width)) / 2
        (top, left), (bottom, right) = (
            (corner - centre) * camera.zoom + middle
            for corner in self._viewer.layers[0].extent.world[:, -2:]
        )
        return [
            min(max(math.ceil(left) + INSET, 0), width),
            min(max(math.ceil(top) + INSET, 0), height),
            min(max(math.floor(right) - INSET, 0), width),
            min(max(math.floor(bottom) - INSET, 0), height),
        ]
