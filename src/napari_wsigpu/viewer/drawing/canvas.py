"""Slices each new view before it is drawn; napari alone does so one frame late."""

from __future__ import annotations

import gc
import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from napari_wsigpu.viewer.drawing.texture import ON
from napari_wsigpu.viewer.napari_internals import (
    CANVAS,
    FIGURES,
    lay_out_cells,
    qt_viewer,
    view_box_size,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from napari import Viewer
    from napari.utils.events import Event

    from napari_wsigpu.display.fetcher import TileFetcher
    from napari_wsigpu.viewer.drawing.frame_clock import FrameClock

    Displays = Callable[[Viewer], Sequence["Display"]]

LONGEST_FRAME = 0.25  # seconds after which prefetching resumes even if the frame has not ended

logger = logging.getLogger(__name__)


class Display(Protocol):
    """The part of a layer's display that the canvas needs."""

    waits: bool

    @property
    def fetcher(self) -> TileFetcher:
        """The fetcher that reads the layer's tiles."""

    @property
    def interop(self) -> str:
        """Either "on" if the layer's texture is filled on the GPU, or the reason why it is not."""


def update_view(viewer: Viewer) -> None:
    """Slice a viewer's current view now instead of at its next frame."""
    with suppress(AttributeError):
        CANVAS.get(qt_viewer(viewer).canvas, "on_draw")(None)


def slice_before_drawing(viewer: Viewer, displays: Displays, frames: FrameClock) -> None:
    """Slice each new view before napari draws it.

    Parameters
    ----------
    viewer : Viewer
        A viewer whose window is open.
    displays : callable
        Returns the displays of a viewer's layers.
    frames : FrameClock
        Clock that is started and stopped with each frame.
    """
    try:
        canvas = qt_viewer(viewer).canvas
        scene_canvas, on_draw = CANVAS.get(canvas), CANVAS.get(canvas, "on_draw")
        draw = scene_canvas.events.draw
    except AttributeError:
        logger.warning("This version of napari draws each new view of a slide one frame late")
        return
    weak = ref(viewer)
    size_before: tuple[int, ...] | None = None

    def before_drawing(event: Event) -> None:
        nonlocal size_before
        shown, size_before = weak(), None
        if shown is not None and displays(shown):
            frames.start()
            for each in _fetchers(displays(shown)):
                each.pause_prefetch(LONGEST_FRAME)
            with without_collection():
                lay_out_cells(canvas)
                on_draw(event)
            size_before = view_box_size(canvas)

    def after_drawing(event: Event) -> None:
        # napari would slice here. Skip that unless drawing has changed the layout.
        if size_before is None or size_before != view_box_size(canvas):
            on_draw(event)
        frames.end(event)
        if swapped is None:
            after_swapping()

    def after_swapping() -> None:
        """Resume decoding after the frame; during it, decoding would delay the buffer swap."""
        shown = weak()
        if shown is not None:
            for each in _fetchers(displays(shown)):
                each.pause_prefetch(0.0)

    swapped = getattr(scene_canvas.native, "frameSwapped", None)
    if swapped is not None:
        swapped.connect(after_swapping)
    draw.disconnect(on_draw)
    draw.connect(before_drawing, position="first")
    draw.connect(after_drawing, position="last")
    scene = ref(scene_canvas)

    def before_removal(event: Event) -> None:
        drawn = scene()
        if drawn is not None:
            # napari frees the layer's textures in the current OpenGL context. If this context
            # belongs to another window, the process crashes at the next frame.
            drawn.set_current()

    viewer.layers.events.removing.connect(before_removal)
    _wait_for_figures(viewer, displays)


def _wait_for_figures(viewer: Viewer, displays: Displays) -> None:
    """Make displays wait for exact slices while napari draws a figure of another size."""
    weak, window = ref(viewer), ref(qt_viewer(viewer))
    try:
        resize_canvas = FIGURES.get(type(window()))
    except AttributeError:
        logger.warning("This version of napari exports figures without waiting for their tiles")
        return

    @contextmanager
    def resized_exactly(size: tuple[int, int] | None, scale: float) -> Iterator[None]:
        """Let displays block: a figure is drawn once, and cannot be refined later."""
        shown = weak()
        resizes = shown is not None and (size is not None or scale != 1)
        waiting = displays(shown) if resizes else []
        try:
            for display in waiting:
                display.waits = True
            with resize_canvas(window(), size, scale):
                yield
        finally:
            for display in waiting:
                display.waits = False

    FIGURES.override(window(), "resize_canvas", resized_exactly)


def _fetchers(displays: Iterable[Display]) -> set[TileFetcher]:
    """Return the fetchers that decode on the GPU. Decoding on the CPU does not delay a frame."""
    return {each.fetcher for each in displays if each.interop == ON}


@contextmanager
def without_collection() -> Iterator[None]:
    """Postpone garbage collection, which can take 0.15 s with napari loaded."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
