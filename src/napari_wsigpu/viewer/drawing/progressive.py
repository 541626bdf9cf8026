"""Layers that are drawn before all tiles are decoded, and refreshed as more arrive.

`ProgressiveDisplay` replaces the slicing methods of one layer; `napari_internals` lists the private
parts of napari that it needs. Without them, napari blocks until all tiles of a view are decoded.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import is_
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np
from qtpy.QtCore import QObject, Signal

from napari_wsigpu.display import resample
from napari_wsigpu.display.composite_source import CompositeSource, source_of
from napari_wsigpu.display.device_composite import on_device
from napari_wsigpu.display.device_picture import AvailableDeviceTiles, DevicePicture, draws
from napari_wsigpu.display.device_pixels import DevicePixels
from napari_wsigpu.display.picture import Picture
from napari_wsigpu.display.tile_priority import next_likely, on_screen, own_tiles
from napari_wsigpu.model.errors import (
    DeviceError,
    PlaneError,
    SlideChangedError,
    SlideClosedError,
    SlideError,
)
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading.level import VIEWER_CHUNK
from napari_wsigpu.reading.stack import StackLevel
from napari_wsigpu.storage.buffers import PictureMemory
from napari_wsigpu.viewer import napari_internals as internals
from napari_wsigpu.viewer.drawing.canvas import slice_before_drawing, without_collection
from napari_wsigpu.viewer.drawing.frame_clock import FrameClock
from napari_wsigpu.viewer.drawing.slice_request import Composed, affordable, blank, fits, within
from napari_wsigpu.viewer.drawing.stack_planes import (
    DrawnByDevice,
    ShownPlanes,
    available_tiles,
    cut_of,
    forever,
    shown_color,
)
from napari_wsigpu.viewer.drawing.texture import ON, LayerTexture
from napari_wsigpu.viewer.layers.slide_layers import image_of, image_of_data, slide_of
from napari_wsigpu.viewer.window.main_window import single_shot
from napari_wsigpu.viewer.window.notifications import show_warning

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napari import Viewer
    from napari.components import Dims
    from napari.layers import Image, Layer
    from napari.layers._scalar_field._slice import _ScalarFieldSliceRequest as SliceRequest
    from napari.layers._scalar_field._slice import _ScalarFieldSliceResponse as SliceResponse
    from napari.layers.utils._slice_input import _SliceInput as SliceInput
    from napari.layers.utils._slice_input import _ThickNDSlice as ThickNDSlice
    from napari.utils.events import Event

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.display.drawing import View
    from napari_wsigpu.display.fetcher import TileFetcher
    from napari_wsigpu.display.planes import Position, VolumeLoader
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.reading.cache import TileKey
    from napari_wsigpu.reading.level import LevelArray
    from napari_wsigpu.slide.runtime import Runtime
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.drawing.stack_planes import Source

# New tiles refresh the layer after a pause of this many frame durations, so that drawing takes at
# most a third of the main thread's time.
REST = 2.0
IDLE_MS = 100
FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 1_000, 30_000
PREFETCH_SHARE = 0.25

# Errors that a retry cannot fix. Others may be temporary: a signed URL is renewed, or a disk is
# mounted.
PERMANENT = DeviceError, PlaneError, SlideChangedError, SlideClosedError

logger = logging.getLogger(__name__)

_memory = PictureMemory()
_frames = FrameClock()
_displays: WeakKeyDictionary[Layer, ProgressiveDisplay] = WeakKeyDictionary()


def display_progressively(viewer: Viewer) -> None:
    """Draw the slides that are added to a viewer as soon as some of their tiles are decoded."""
    weak = ref(viewer)

    def on_inserted(event: Event) -> None:
        shown = weak()
        if shown is not None:
            _hide_secrets(event.value)
            _start_display(shown, event.value)

    viewer.layers.events.inserted.connect(on_inserted)
    slice_before_drawing(viewer, _displays_of, _frames)


def display_of(layer: Layer) -> ProgressiveDisplay | None:
    """Return the display of a layer; None if napari slices the layer without one."""
    return _displays.get(layer)


def _displays_of(viewer: Viewer) -> list[ProgressiveDisplay]:
    return [_displays[layer] for layer in viewer.layers if layer in _displays]


def stop_display(layer: Layer) -> None:
    """Return a layer to napari's own slicing, and stop fetching tiles for it."""
    display = _displays.pop(layer, None)
    if display is not None:
        display.close()
    if not _displays:
        _memory.clear()


def _start_display(viewer: Viewer, layer: Layer) -> None:
    slide = image_of(layer)
    if layer in _displays or slide is None or not layer.multiscale:
        return
    if not fits(layer):
        logger.warning("This version of napari draws slides only once all tiles are decoded")
        return
    _displays[layer] = ProgressiveDisplay(viewer, layer, slide.runtime)
    # The level that napari picks has up to twice the canvas's pixels along each axis.
    height, width = (2 * side + 2 * VIEWER_CHUNK for side in viewer.canvas.size)
    base = layer.data[0]
    samples = 1 if base.channel is not None else base.layout.channels
    size = height * width * samples * base.dtype.itemsize
    threading.Thread(target=_prepare, args=(size,), name="wsigpu-memory").start()
    if isinstance(base, StackLevel) or slide.displayed.has_failures:
        # Show the first plane now, as it has just been read; later ones are shown on arrival.
        # The slice that napari has made itself shows damaged tiles as background.
        layer.refresh(thumbnail=False, highlight=False, extent=False)


def _prepare(size: int) -> None:
    """Touch memory and import code that the first slices need, off the main thread."""
    _memory.prepare(size)
    resample.prepare()


def _hide_secrets(layer: Layer) -> None:
    """Remove user, password and query from the URL that napari shows as a layer's source."""
    slide = slide_of(layer)
    if slide is not None and slide.layout.remote is not None:
        with suppress(AttributeError):
            source = layer.source.model_copy(update={"path": slide.path})
            internals.LAYER_SOURCE.override(layer, "_source", source)


class _Signals(QObject):  # type: ignore[misc]
    """Signals from the fetcher's threads, which Qt delivers in the main thread."""

    arrived = Signal()
    failed = Signal()


class ProgressiveDisplay:
    """Composes a layer's slices from decoded tiles, and refreshes the layer as more tiles arrive.

    Parameters
    ----------
    viewer : Viewer
        The viewer that holds the layer.
    layer : Image
        A layer that shows a slide.
    runtime : Runtime
        Caches and threads that the slide shares with other slides.

    Attributes
    ----------
    source : DisplaySource, DeviceSource, CompositeSource or DeviceComposite
        Source of the tiles that the layer shows.
    waits : bool
        Whether slices block until they are exact, as exported figures require.
    exact : bool
        Whether every pixel of the slice comes from the requested level.
    error : Exception or None
        The error that keeps the slice from becoming exact.
    """

    def __init__(self, viewer: Viewer, layer: Image, runtime: Runtime) -> None:
        self._layer = ref(layer)
        self._on_host = "only the overview is shown"
        self.source: Source
        self._runtime = runtime
        self._levels: list[LevelArray] = []
        # Stacks only. `_is_behind`: the plane is still being opened; `_is_blank`: that failed.
        self._planes: ShownPlanes | None = None
        self._is_behind = self._is_blank = self._is_at_rest = False
        # Whether the overview shows damaged tiles hatched, unlike napari's copy of it; and whether
        # it still shows a composite's earlier settings.
        self._is_hatched = self._is_outdated = False
        self._volume: VolumeLoader | None = None
        self._position: Position = ()
        self._view: View | None = None
        # Appearance of the picture's tiles; before the first picture, that of napari's copy of the
        # coarsest level.
        self._appearance = _appearance(layer)
        self.waits = False
        self._warned = False
        self._picture: Picture | DevicePicture | None = None
        self._drawn: tuple[int, DevicePixels] | None = None
        self._motion = (0.0, 0.0)
        self.exact = True
        self._is_counted = False
        self.error: Exception | None = None
        self._newest = -1
        self._response: SliceResponse
        self._woken = threading.Event()
        self._signals = _Signals()
        self._signals.arrived.connect(self._on_tiles)
        self._signals.failed.connect(self._on_failed)
        self._texture = LayerTexture(viewer, layer, self._signals.failed.emit)
        self._refresh_timer = single_shot(self._refresh)
        self._idle_timer = single_shot(self._prefetch, IDLE_MS)
        self._retry_timer = single_shot(self._retry)
        self._pause_ms = FIRST_PAUSE_MS
        self._last_refresh = 0.0
        state, requests = internals.SLICING.get(layer), internals.SLICE_REQUESTS
        requests.override(state, "_make_slice_request_internal", self._make_internal)
        requests.override(state, "_make_slice_request", self._make)
        requests.override(state, "_update_slice_response", self._update)

    # The interface that the fetcher calls, from its own threads

    def deliver(self, tiles: Mapping[TileKey, Any]) -> None:
        """Accept tiles of one level, and schedule a refresh if the layer shows them."""
        picture = self._picture
        if picture is not None and picture.add(tiles):
            self._wake()

    def _wake(self) -> None:
        """Notify the main thread, unless a notification is already pending."""
        if not self._woken.is_set():
            self._woken.set()
            with suppress(RuntimeError):  # at exit, Qt deletes its part of the object first
                self._signals.arrived.emit()

    def fail(self, error: Exception) -> None:
        """Store an error for `wait` to raise, and warn the user; retry unless it is permanent."""
        if isinstance(self._picture, DevicePicture) and _is_device_error(error):
            self._texture.refuse(error)
            return
        self.error = error
        passing = isinstance(error, SlideError) and not isinstance(error, PERMANENT)
        if passing:
            with suppress(RuntimeError):  # at exit, Qt deletes its part of the object first
                self._signals.failed.emit()
        until = " until an automatic retry succeeds" if passing else ""
        problem = "planes stay blank" if self._is_blank else "tiles stay blurred"
        self._warn(f"Some {problem}{until}", error)

    def _warn(self, problem: str, error: Exception) -> None:
        """Warn the user, once per layer."""
        if not self._warned:
            self._warned = True
            show_warning(f"{problem}: {error.message if isinstance(error, SlideError) else error}")

    # Overrides of the layer's slicing state, which napari calls in the main thread

    def _make_internal(
        self, slice_input: SliceInput, data_slice: ThickNDSlice, **arguments: object
    ) -> SliceRequest:
        """Return napari's request with its data replaced by a composed picture."""
        layer = self._layer()
        assert layer is not None
        cut = cut_of(layer, slice_input, data_slice)
        position, shown = cut.position, cut.is_plane
        if shown:
            self._follow(layer, position)
        request = self._call_napari(
            "_make_slice_request_internal",
            slice_input=slice_input,
            data_slice=data_slice,
            **arguments,
        )
        if cut.is_volume:
            return self._show_volume(request, layer, position)
        self._view = None
        if shown and self._is_blank:
            return blank(request, layer, len(position))
        top = len(request.level_shapes) - 1
        own = request.data_level == top and not position and not self._is_hatched
        if self._picture is None or not shown or own:
            self._finish_view()
            return request
        level, corners = affordable(request)
        if self.waits:
            self._finish_view()
            exact = layer.data[level]
            return replace(
                request, data_level=level, corner_pixels=corners, data_at_data_level=exact
            )
        if self._is_outdated and level == top:
            self._renew_overview()
        overview = self._picture.tiles.overview
        if level == top:
            self._finish_view(exact=not self._is_behind)
            rect = within(level, corners[:, -2:], self._picture.levels[level]).rect
            pixels: Array | DevicePixels = overview[Rect(0, 0, *overview.shape[:2]).slices(rect)]
        else:
            level, rect, pixels = self._compose(self._picture, level, corners[:, -2:])
        corners = np.zeros_like(corners)
        corners[:, -2:] = [rect.top, rect.left], [rect.bottom - 1, rect.right - 1]
        self._drawn = None
        if isinstance(pixels, DevicePixels):
            displayed = list(slice_input.displayed)
            if displayed == sorted(displayed):
                self._drawn = request.id, pixels
                pixels = np.broadcast_to(np.zeros((), pixels.dtype), pixels.shape)
            else:
                pixels = pixels.host
        fixed = tuple(range(len(position)))
        request = replace(
            request,
            data_level=level,
            corner_pixels=corners,
            data_at_data_level=Composed(pixels, fixed),
        )
        if position:
            request = replace(request, data_at_thumbnail_level=Composed(overview, fixed))
        return request

    def _make(self, dims: Dims) -> SliceRequest | _Answered:
        """Return a request for asynchronous slicing; show a composed slice immediately."""
        request = self._call_napari("_make_slice_request", dims)
        layer = self._layer()
        shown = self._picture is not None or self._is_blank
        if layer is None or not shown or request.slice_input.ndisplay != 2:
            return request
        if isinstance(request.data_at_data_level, StackLevel) and not self.waits:
            return request  # several planes, or a cut across them
        self._update(request())
        layer.events.set_data()
        return _Answered(request.id, self)

    def _update(self, response: SliceResponse) -> None:
        """Show a slice, unless a newer one is already shown."""
        if response.request_id > self._newest:
            self._newest = response.request_id
            if self._drawn is not None and self._drawn[0] == response.request_id:
                response = replace(response, image=response.image.from_view(self._drawn[1]))
            self._response = response
            self._call_napari("_update_slice_response", response)

    def _call_napari(self, name: str, *arguments: object, **named: object) -> Any:
        """Call the method that an override hides, without storing a reference to the layer."""
        layer = self._layer()
        assert layer is not None
        state = internals.SLICING.get(layer)
        return internals.SLICE_REQUESTS.get(type(state), name)(state, *arguments, **named)

    def _compose(
        self, picture: Picture | DevicePicture, level: int, corners: Array
    ) -> tuple[int, Rect, Array | DevicePixels]:
        """Compose a region from decoded tiles, and request the missing ones.

        Returns
        -------
        level : int
            The requested level, or a coarser substitute.
        rect : Rect
            The region in pixels of that level.
        pixels : ndarray or DevicePixels
            The region's pixels, (height, width, samples).
        """
        view = self._view = within(level, corners, picture.levels[level])
        if view != picture.view:
            self._forget_failure()
            self._motion = _motion(picture.view, view)
            self._is_counted = False
        try:
            if self._is_behind:
                shown, pixels, exact = picture.compose(view)
            else:
                shown, pixels, exact = picture.compose(view, lambda: self._fetch(picture))
        except Exception as error:
            if not isinstance(picture, DevicePicture):
                raise
            self._texture.refuse(error)
            layer = self._layer()
            assert layer is not None
            self._follow(layer, self._position)
            if not isinstance(self._picture, Picture):
                raise
            return self._compose(self._picture, level, corners)
        self.exact = exact and not self._is_behind
        if not self._is_counted:
            self._is_counted = True
            self._runtime.fetcher.shown(picture.found, picture.lacked)
            self.source.count_shown(len(picture.found) + len(picture.lacked), len(picture.found))
        self._restart_idle()
        return shown.level, shown.rect, pixels

    def _show_volume(self, request: SliceRequest, layer: Image, position: Position) -> SliceRequest:
        """Return napari's request for a volume, filled with the planes read so far."""
        self._view, level = None, request.data_level
        displayed = request.slice_input.displayed
        volume = self._volume = self._planes_of(layer).volume(displayed, position, level)
        if self.waits:
            volume.finish()
        self._finish_view(exact=volume.at_rest)
        if volume.error is not None:
            self._warn("Some planes stay blank", volume.error)
        factors = request.downsample_factors.copy()
        factors[level, -2:] = request.level_shapes[0][-2:] / volume.pixels.shape[1:3]
        fixed = tuple(axis for axis in range(len(position)) if axis not in displayed)
        pixels = Composed(volume.pixels, fixed)
        return replace(
            request,
            data_at_data_level=pixels,
            data_at_thumbnail_level=pixels,
            downsample_factors=factors,
        )

    # State and tile requests

    @property
    def fetcher(self) -> TileFetcher:
        """The fetcher that reads the layer's tiles."""
        return self._runtime.fetcher

    @property
    def interop(self) -> str:
        """Either "on" if the layer's texture is filled on the GPU, or the reason why it is not."""
        return self._texture.refusal or self._on_host or ON

    def close(self) -> None:
        """Undo the overrides, and cancel the layer's requests for tiles."""
        self._texture.close()
        self._runtime.fetcher.cancel(self)
        with suppress(RuntimeError):  # at exit, Qt deletes its part of the object first
            self._refresh_timer.stop()
            self._idle_timer.stop()
            self._retry_timer.stop()
            self._signals.arrived.disconnect(self._on_tiles)
            self._signals.failed.disconnect(self._on_failed)
        self._picture = None
        if self._planes is not None:
            self._planes.close()
        layer = self._layer()
        if layer is not None:
            internals.SLICE_REQUESTS.restore(internals.SLICING.get(layer))

    def _follow(self, layer: Image, position: Position) -> None:
        """Replace the picture if the layer's levels, plane or colors have changed."""
        slide = image_of(layer)
        self._is_behind, self._volume, self._position = False, None, position
        if slide is None:
            self._picture = None
            return
        levels, plane = list(layer.data), None
        if position:
            first = self._picture is None and not self._is_blank
            until = forever() if first or self.waits else _frames.patient_until()
            try:
                plane = self._planes_of(layer).plane(position, until)
            except SlideError as error:
                self._fail_plane(error)
                return
            self._is_behind = plane is None
            if plane is None:
                return
            levels, slide = plane.levels, image_of_data(plane.levels[0])
            assert slide is not None
        self._is_blank = False
        source = self._source_of(slide, levels)
        appearance = _appearance(layer)
        before = self._picture
        same = before is not None and _same(levels, self._levels)
        is_finer = layer.data_level < len(levels) - 1
        if same and appearance == self._appearance and source is self.source:
            if self._is_outdated and not is_finer:
                self._renew_overview()
            return
        recolored = appearance[0] != self._appearance[0]
        composes = isinstance(source, CompositeSource) and plane is None
        if before is not None and same and (not recolored or (composes and is_finer)):
            # Reading the overview again would block when the cache is cleared, and composing it
            # would double the time until a change of contrast shows.
            overview, self._is_outdated = before.tiles.overview, self._is_outdated or recolored
        else:
            if plane is not None:
                read = plane.overview
            else:
                is_old = before is not None or recolored
                read = internals.coarsest_pixels(layer, levels, renew=is_old)
            overview = self._hatched(source, slide, levels, read)
        self.source, self._levels, self._appearance = source, levels, appearance
        self._runtime = slide.runtime
        tiles = available_tiles(source, slide, levels, overview)
        if isinstance(source, DrawnByDevice) and isinstance(tiles, AvailableDeviceTiles):
            self._picture = DevicePicture(tiles, source.table(slide.display_color))
        else:
            self._picture = Picture(tiles, _memory)

    def _hatched(
        self, source: Source, slide: Slide, levels: list[LevelArray], overview: Array
    ) -> Array:
        """Return an overview that has just been read, with damaged tiles hatched."""
        background = source.background(slide.display_color)
        hatched = source.hatch(source.image_of(levels[-1])[0], overview, background)
        self._is_hatched, self._is_outdated = hatched is not overview, False
        return hatched

    def _renew_overview(self) -> None:
        """Compose the overview with the current settings."""
        picture, layer = self._picture, self._layer()
        slide = None if layer is None else image_of(layer)
        if picture is not None and layer is not None and slide is not None:
            read = internals.coarsest_pixels(layer, self._levels, renew=True)
            picture.tiles.overview = self._hatched(self.source, slide, self._levels, read)

    def _planes_of(self, layer: Image) -> ShownPlanes:
        """Return the opened planes of a layer's stack, in the colors that are shown."""
        slide, levels = image_of(layer), list(layer.data)
        assert slide is not None
        planes = self._planes
        if (
            planes is None
            or not _same(levels, planes.levels)
            or planes.color != shown_color(slide, levels[0])
        ):
            if planes is not None:
                planes.close()
            planes = ShownPlanes(levels, slide, self._source_of, self._wake)
        self._planes = planes
        return planes

    def _source_of(self, slide: Slide, levels: list[LevelArray]) -> Source:
        """Return the source of a slide's tiles: the device if it can draw them, else the host."""
        composite, first = source_of(levels[0]), levels[0]
        stored = slide.displayed_on_device()
        found = stored if stored is None or composite is None else on_device(composite, stored)
        if stored is None:
            self._on_host = "the CPU decodes"
        elif found is None or first.layout.categorical or not draws(first.layout, first.channel):
            self._on_host = "the host draws this kind of pixels"
        elif self._texture.follow(stored.tiles.device):
            self._on_host = ""
            return found
        return slide.displayed if composite is None else composite

    def _fetch(self, picture: Picture | DevicePicture) -> float:
        """Request a view's missing tiles; return the time until which to wait for them."""
        if self.error is not None:
            return 0.0
        fetcher, on_device = self._runtime.fetcher, isinstance(picture, DevicePicture)
        if isinstance(self.source, CompositeSource):
            if not on_device:
                # Changes of contrast or color show in the next frame. Until then, the cores are not
                # to compose tiles around the view.
                fetcher.cancel(self)
                picture.add(self.source.compose_cached(own_tiles(picture)))
            if self._is_outdated and picture.missing:
                self._renew_overview()
        jumped = len(picture.found) < len(picture.lacked) / 2
        until = _frames.patient_until(on_device=on_device, jumped=jumped)
        keys = own_tiles(picture)
        seconds = fetcher.expected(keys)
        patient = seconds is not None and time.perf_counter() + seconds < until
        if not patient:
            keys = on_screen(picture)
        fetcher.request(self, keys, self._likely(picture, at_rest=False), waits=patient)
        return until if patient else 0.0

    def _prefetch(self) -> None:
        """Request tiles that are likely next, once the view is exact and has not changed."""
        if self._picture is None or not self.exact:
            return
        if self._is_outdated:
            self._renew_overview()
            self._refresh(thumbnail=True)  # restarts the timer that calls this
            return
        self._is_at_rest = True
        self._expect_planes()
        if self._view is not None:
            self._runtime.fetcher.request(self, (), self._likely(self._picture, at_rest=True))

    def _expect_planes(self) -> None:
        """Open the planes that are likely next, and request their tiles."""
        if self._planes is not None and self.exact and self._volume is None:
            self._planes.expect(self._view, self._most_ahead, at_rest=self._is_at_rest)

    def _likely(self, picture: Picture | DevicePicture, *, at_rest: bool) -> list[TileKey]:
        keys = next_likely(picture, self._motion, self._most_ahead, at_rest=at_rest)
        # Composing a tile takes little time, and each change of the composite would repeat it.
        return self.source.undecoded(keys) if isinstance(self.source, CompositeSource) else keys

    @property
    def _most_ahead(self) -> int:
        weight = self.source.weight if isinstance(self.source, CompositeSource) else 1.0
        return int(self._runtime.tiles.budget * PREFETCH_SHARE / weight)

    def _restart_idle(self) -> None:
        """Restart the idle timer: prefetching starts once an exact view has not changed."""
        self._is_at_rest = False
        if self.exact:
            self._idle_timer.start()
            self._expect_planes()
        else:
            self._idle_timer.stop()

    def _finish_view(self, *, exact: bool = True) -> None:
        """Record that the slice needs no tiles, and cancel the last view's requests."""
        self.exact = exact
        self._forget_failure()
        self._runtime.fetcher.cancel(self)
        if self._planes is None:
            self._idle_timer.stop()
        else:
            self._restart_idle()

    def _fail_plane(self, error: SlideError) -> None:
        """Show a blank plane, and report the error."""
        self._picture, self._is_blank, self.exact = None, True, False
        self._runtime.fetcher.cancel(self)
        self.fail(error)

    def _forget_failure(self) -> None:
        """Drop the last view's error, and cancel its retry."""
        self.error = None
        self._retry_timer.stop()
        self._pause_ms = FIRST_PAUSE_MS

    def _on_failed(self) -> None:
        """Draw on the host if the device failed; else retry after a pause that doubles."""
        if isinstance(self._picture, DevicePicture) and self._texture.refusal is not None:
            self.exact = False  # the texture's content may be lost with the device
            self._refresh_timer.start(0)
        elif self.error is not None and not self.exact:
            self._retry_timer.start(self._pause_ms)
            self._pause_ms = min(2 * self._pause_ms, LONGEST_PAUSE_MS)

    def _retry(self) -> None:
        """Request the missing tiles again; a hidden layer requests them when it is shown."""
        self.error = None
        picture, layer = self._picture, self._layer()
        if layer is None or not layer.visible:
            return
        if picture is not None:
            self._fetch(picture)
        elif self._planes is not None:
            self._planes.rest()
            self._refresh()

    def _on_tiles(self) -> None:
        """Refresh the layer now, or after the pause that `REST` requires."""
        self._woken.clear()
        self._pause_ms = FIRST_PAUSE_MS
        picture, layer = self._picture, self._layer()
        if picture is None and self._planes is None:
            return
        if layer is None or not layer.visible:
            # napari slices the layer again when it is shown; until then, tiles would pile up.
            self._runtime.fetcher.cancel(self)
            if self._planes is not None:
                self._planes.rest()
            return
        due = self._last_refresh + REST * _frames.seconds - time.perf_counter()
        missing = picture is not None and bool(picture.missing)
        if due <= 0 or not (missing if self._volume is None else not self._volume.at_rest):
            self._refresh()
            self._expect_planes()
        elif not self._refresh_timer.isActive():
            self._refresh_timer.start(math.ceil(due * 1000))

    def _refresh(self, *, thumbnail: bool = False) -> None:
        """Draw a visible layer again unless it is exact, and its thumbnail if that may differ."""
        self._refresh_timer.stop()
        layer = self._layer()
        if layer is not None and layer.visible and (thumbnail or not self.exact):
            thumbnail |= self._is_behind or self._volume is not None
            with without_collection():
                layer.set_view_slice()
                layer.events.set_data()
                if thumbnail and self.exact:
                    with suppress(AttributeError):
                        internals.THUMBNAIL.get(layer)()
        self._last_refresh = time.perf_counter()


@dataclass(frozen=True)
class _Answered:
    """A request whose response is already shown; napari may still call it."""

    id: int
    display: ProgressiveDisplay

    def __call__(self) -> SliceResponse:
        return replace(self.display._response, request_id=self.id)


def _is_device_error(error: Exception) -> bool:
    """Whether drawing on the host can avoid an error."""
    return isinstance(error, DeviceError) or not isinstance(error, SlideError)


def _appearance(layer: Layer) -> tuple[Color, int]:
    """Return the color and the number of cache clearings, which identify a layer's tiles."""
    slide = image_of(layer)
    assert slide is not None
    return shown_color(slide, layer.data[0]), slide.displayed.clearings


def _same(levels: Sequence[object], others: Sequence[object]) -> bool:
    return len(levels) == len(others) and all(map(is_, levels, others))


def _motion(last: View | None, view: View) -> tuple[float, float]:
    """Return how far a view moved, (down, right) in pixels; zeros if it shows another place."""
    if last is None or last.level != view.level or last.rect.intersection(view.rect) is None:
        return 0.0, 0.0
    (y, x), (last_y, last_x) = view.rect.center, last.rect.center
    return y - last_y, x - last_x
