"""Views of slides are sliced before they are drawn; napari does so one frame late.

It touches the canvas, which napari keeps to itself.
"""

from __future__ import annotations

import gc
import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from napari_wsigpu.viewer.texture import ON

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from napari import Viewer

    from napari_wsigpu.display.fetcher import TileFetcher
    from napari_wsigpu.viewer.frames import Frames

    Displays = Callable[[Viewer], Sequence["Display"]]

LONGEST_FRAME = 0.25

logger = logging.getLogger(__name__)


class Display(Protocol):
    """What draws a layer."""

    waits: bool

    @property
    def fetcher(self) -> TileFetcher:
        """What fetches its tiles."""

    @property
    def interop(self) -> str:
        """Whether its texture is filled on the GPU, or why not."""


def update_view(viewer: Viewer) -> None:
    """Let a viewer find the slices of its view now, not when it is drawn next."""
    with suppress(AttributeError):
        viewer.window._qt_viewer.canvas.on_draw(None)


def slice_before_drawing(viewer: Viewer, displays: Displays, frames: Frames) -> None:
    """Let napari find the slice of a new view before it draws that view, not after.

    Parameters
    ----------
    viewer : Viewer
        Its window is open.
    displays : callable
        Returns the displays of a viewer's layers.
    frames : Frames
        Told when frames begin and end.
    """
    try:
        qt_viewer = viewer.window._qt_viewer
        canvas = qt_viewer.canvas
        draw, on_draw = canvas._scene_canvas.events.draw, canvas.on_draw
        resize_canvas = type(qt_viewer).resize_canvas
    except AttributeError:
        logger.warning("This version of napari draws each new view of a slide one frame late")
        return
    weak = ref(viewer)
    before: Any = None

    def before_drawing(event: Any) -> None:
        nonlocal before
        shown, before = weak(), None
        if shown is not None and displays(shown):
            frames.begin()
            for each in _fetchers(displays(shown)):
                each.be_quiet(LONGEST_FRAME)
            with without_collection():
                on_draw(event)
            before = _laid_out(canvas)

    def after_drawing(event: Any) -> None:
        # Once a frame is enough, but for boxes of a grid, whose sizes are found by drawing them.
        if before is None or before != _laid_out(canvas):
            on_draw(event)
        frames.end(event)
        if swapped is None:
            after_swapping()

    def after_swapping() -> None:
        """End the quiet: before, decoding would hold up the graphics card and who waits for it."""
        shown = weak()
        if shown is not None:
            for each in _fetchers(displays(shown)):
                each.be_quiet(0.0)

    swapped = getattr(canvas._scene_canvas.native, "frameSwapped", None)
    if swapped is not None:
        swapped.connect(after_swapping)
    draw.disconnect(on_draw)
    draw.connect(before_drawing, position="first")
    draw.connect(after_drawing, position="last")
    scene = ref(canvas._scene_canvas)

    def before_removal(event: Any) -> None:
        drawn = scene()
        if drawn is not None:
            # napari frees the layer's textures in whatever context is current; in another one
            # than its own that ends the process at the next frame.
            drawn.set_current()

    viewer.layers.events.removing.connect(before_removal)

    @contextmanager
    def resized_exactly(size: Any, scale: float) -> Iterator[None]:
        """Wait for all tiles of a figure: it is drawn once, at another resolution."""
        shown = weak()
        other = shown is not None and (size is not None or scale != 1)
        exactly = displays(shown) if other else []
        try:
            for display in exactly:
                display.waits = True
            with resize_canvas(window(), size, scale):
                yield
        finally:
            for display in exactly:
                display.waits = False

    window = ref(qt_viewer)
    qt_viewer.resize_canvas = resized_exactly


def _fetchers(displays: Iterable[Display]) -> set[TileFetcher]:
    """Return what has a GPU decode; cores decode beside what draws, without the interpreter."""
    return {each.fetcher for each in displays if each.interop == ON}


def _laid_out(canvas: Any) -> tuple[int, ...] | None:
    """Return the size of a canvas' boxes; None if unknown, or something is to be laid out."""
    if getattr(canvas, "_needs_overlay_position_update", True):
        return None
    return tuple(getattr(canvas, "_current_viewbox_size", ())) or None


@contextmanager
def without_collection() -> Iterator[None]:
    """Put garbage collection off until a slice is done: in napari one can take 0.15 s."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
