"""Measure the responsiveness of a viewer: slices, stalls of the main thread, and frames."""

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
    """A period during which the main thread was busy.

    Attributes
    ----------
    start : float
        Time of `time.perf_counter`.
    seconds : float
        Duration, without the time of the benchmark itself.
    collecting : float
        Seconds of garbage collection within it.
    """

    start: float
    seconds: float
    collecting: float = 0.0


class CollectionClock:
    """Time Python's garbage collections, which stop all threads.

    Attributes
    ----------
    seconds : float
        Total so far.
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
    """Time slices for display in the main thread, at the outermost call.

    Parameters
    ----------
    collections : CollectionClock
        Provides the share of garbage collection.

    Attributes
    ----------
    slices : list of Span
        Total so far.
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
    """A 1 ms timer in the main thread; the gaps between its beats are stalls.

    Parameters
    ----------
    collections : CollectionClock
        Provides the share of garbage collection.

    Attributes
    ----------
    gaps : list of Span
        All gaps since the start.
    measuring : float
        Seconds that the benchmark itself has used in the main thread; its code adds to this.
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
        """Start the timer."""
        self._last = (time.perf_counter(), self.measuring, self._collections.seconds)
        self._timer.start(1)

    def stop(self) -> None:
        """Record the last gap and stop the timer."""
        self._beat()
        self._timer.stop()

    def _beat(self) -> None:
        now = (time.perf_counter(), self.measuring, self._collections.seconds)
        passed, measuring, collecting = (b - a for a, b in zip(self._last, now, strict=True))
        self.gaps.append(Span(self._last[0], passed - measuring, collecting))
        self._last = now


class Frame(NamedTuple):
    """One drawn frame that contains the slide.

    Attributes
    ----------
    time : float
        Time of drawing (`time.perf_counter`).
    blank : float
        Share of the canvas inside the slide that shows the background.
    shown : bool
        Whether any part of the slide is visible.
    """

    time: float
    blank: float
    shown: bool


class FrameLog:
    """Read every frame back after it was drawn, and find its blank areas.

    Drawing is finished first, so that only the reading counts as measuring.

    Parameters
    ----------
    viewer : Viewer
        Its first layer is the slide.
    heartbeat : Heartbeat
        Excludes the time of the reading.
    film : callable, optional
        Called with each frame and its pixels.

    Attributes
    ----------
    frames : list of Frame
        Frames since the first layer was added.
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
        """Return the average blank share of the canvas over time."""
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
        """Return left, top, right and bottom of the visible slide in canvas pixels."""
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
