"""Layers of slides that never wait: napari's slices are composed of what is at hand.

It touches what napari keeps to itself, a layer's slicing state; more of that is in `requests`,
`canvas` and `texture`. A layer that lacks what is needed shows exact levels, as any other does.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import napari
import numpy as np
from qtpy.QtCore import QObject, QTimer, Signal

from napari_wsigpu.display import resample
from napari_wsigpu.display.device_picture import DevicePicture, DeviceTilesAtHand, draws
from napari_wsigpu.display.device_pixels import DevicePixels
from napari_wsigpu.display.device_source import DeviceSource
from napari_wsigpu.display.picture import Picture
from napari_wsigpu.display.wanted import next_likely, on_screen, own_tiles
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
from napari_wsigpu.viewer.canvas import slice_before_drawing, without_collection
from napari_wsigpu.viewer.frames import Frames
from napari_wsigpu.viewer.layers import image_of, image_of_data, slide_of
from napari_wsigpu.viewer.notifications import show_warning
from napari_wsigpu.viewer.planes import (
    ShownPlanes,
    forever,
    is_inside,
    is_one_plane,
    is_volume,
    position_of,
    tiles_at_hand,
)
from napari_wsigpu.viewer.requests import SEAM, Composed, affordable, blank, fits, within
from napari_wsigpu.viewer.texture import ON, LayerTexture

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from napari import Viewer
    from napari.layers import Image, Layer
    from numpy.typing import NDArray

    from napari_wsigpu.display.drawing import View
    from napari_wsigpu.display.fetcher import TileFetcher
    from napari_wsigpu.display.planes import Position, VolumeLoader
    from napari_wsigpu.display.source import DisplaySource
    from napari_wsigpu.reading.cache import TileKey
    from napari_wsigpu.reading.level import LevelArray
    from napari_wsigpu.slide.runtime import Runtime
    from napari_wsigpu.slide.slide import Slide

# Tiles that land refresh the layer once frames have rested so many times as long as one takes.
REST = 2.0
IDLE_MS = 100
FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 1_000, 30_000
PREFETCH_SHARE = 0.25

# Whatever else a source says, it may give its tiles later: a link is renewed, a disk mounted.
LASTING = DeviceError, PlaneError, SlideChangedError, SlideClosedError

logger = logging.getLogger(__name__)

_memory = PictureMemory()
_frames = Frames()
_displays: WeakKeyDictionary[Layer, ProgressiveDisplay] = WeakKeyDictionary()


def display_progressively(viewer: Viewer) -> None:
    """Let slides that are added to a viewer be drawn without waiting for their tiles."""
    weak = ref(viewer)

    def on_inserted(event: Any) -> None:
        shown = weak()
        if shown is not None:
            _hide_secrets(event.value)
            _start_display(shown, event.value)

    viewer.layers.events.inserted.connect(on_inserted)
    slice_before_drawing(viewer, _displays_of, _frames)


def open_viewers() -> list[Viewer]:
    """Return all viewers that are open, as far as napari tells."""
    return list(getattr(napari.Viewer, "_instances", ()))


def on_window_closed(viewer: Viewer, react: Callable[[], None]) -> None:
    """Have a function called when a viewer's window is gone, also if its layers are not."""
    with suppress(AttributeError):
        viewer.window._qt_window.destroyed.connect(react)


def display_of(layer: Layer) -> ProgressiveDisplay | None:
    """Return what draws a layer progressively, if anything does."""
    return _displays.get(layer)


def _displays_of(viewer: Viewer) -> list[ProgressiveDisplay]:
    return [_displays[layer] for layer in viewer.layers if layer in _displays]


def stop_display(layer: Layer) -> None:
    """Show a layer's exact levels again; nothing is fetched for it any more."""
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
    # The level that napari picks has up to twice the canvas' pixels along each axis.
    height, width = (2 * side + 2 * VIEWER_CHUNK for side in viewer.canvas.size)
    base = layer.data[0]
    samples = 1 if base.channel is not None else base.layout.channels
    size = height * width * samples * base.dtype.itemsize
    threading.Thread(target=_prepare, args=(size,), name="wsigpu-memory").start()
    if isinstance(base, StackLevel):
        # Its first plane is waited for: it was just read, which others may not be yet.
        layer.refresh(thumbnail=False, highlight=False, extent=False)


def _prepare(size: int) -> None:
    """Have at hand what the first slices need, so that they do not wait for it."""
    _memory.prepare(size)
    resample.prepare()


def _hide_secrets(layer: Layer) -> None:
    """Have a layer name its slide's URL without user, password and query, as the slide does."""
    slide = slide_of(layer)
    if slide is not None and slide.layout.remote is not None:
        with suppress(AttributeError):
            layer._source = layer.source.model_copy(update={"path": slide.path})


class _Landings(QObject):  # type: ignore[misc]
    """Brings news from the fetcher's thread to the main one."""

    landed = Signal()
    failed = Signal()


class ProgressiveDisplay:
    """One layer's slices, composed of what is at hand and refreshed as tiles land.

    Parameters
    ----------
    viewer : Viewer
        Where the layer is.
    layer : Image
        A layer that shows a slide.
    runtime : Runtime
        What that slide shares with others.

    Attributes
    ----------
    waits : bool
        Whether slices are read exactly for the time being.
    """

    def __init__(self, viewer: Viewer, layer: Image, runtime: Runtime) -> None:
        self._layer = ref(layer)
        self._on_host = "only the overview is shown"
        self._source: DisplaySource | DeviceSource
        self._runtime = runtime
        self._levels: list[LevelArray] = []
        # Of a stack: whether its plane is not open yet, or can't be; and its volume in space.
        self._planes: ShownPlanes | None = None
        self._is_behind = self._is_blank = self._rests = False
        self._volume: VolumeLoader | None = None
        self._position: Position = ()
        self._view: View | None = None
        self._looks: tuple[str, int] = ("", 0)
        self.waits = False
        self._warned = False
        self._picture: Picture | DevicePicture | None = None
        self._drawn: tuple[int, DevicePixels] | None = None
        self._motion = (0.0, 0.0)
        self._exact = True
        self._asked = False
        self._error: Exception | None = None
        self._newest = -1
        self._response: Any = None
        self._news = threading.Event()
        self._landings = _Landings()
        self._landings.landed.connect(self._on_landed)
        self._landings.failed.connect(self._on_failed)
        self._texture = LayerTexture(viewer, layer, self._landings.failed.emit)
        self._timer = QTimer()
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self._refresh)
        self._idle = QTimer()
        self._idle.setSingleShot(True)
        self._idle.timeout.connect(self._prefetch)
        self._again = QTimer()
        self._again.setSingleShot(True)
        self._again.timeout.connect(self._retry)
        self._pause_ms = FIRST_PAUSE_MS
        self._last_refresh = 0.0
        state = layer._slicing_state
        state._make_slice_request_internal = self._make_internal
        state._make_slice_request = self._make
        state._update_slice_response = self._update

    # What the fetcher sees

    @property
    def source(self) -> DisplaySource | DeviceSource:
        """What has the tiles of the slide that the layer shows."""
        return self._source

    def land(self, tiles: Mapping[TileKey, Any]) -> None:
        """Take tiles of one level and have the layer refreshed if it shows them."""
        picture = self._picture
        if picture is not None and picture.land(tiles):
            self._tell()

    def _tell(self) -> None:
        """Have the main thread look at what has landed."""
        if not self._news.is_set():
            self._news.set()
            with suppress(RuntimeError):  # the application ends, and Qt's part is gone already
                self._landings.landed.emit()

    def fail(self, error: Exception) -> None:
        """Say why tiles can't be had; `wait` raises it. What may pass is tried again."""
        if isinstance(self._picture, DevicePicture) and _is_of_device(error):
            self._texture.refuse(error)
            return
        self._error = error
        passing = isinstance(error, SlideError) and not isinstance(error, LASTING)
        if passing:
            with suppress(RuntimeError):  # the application ends, and Qt's part is gone already
                self._landings.failed.emit()
        again = ", and are tried again by themselves" if passing else ""
        self._warn(
            f"Some {'planes stay blank' if self._is_blank else 'tiles stay blurred'}{again}", error
        )

    def _warn(self, what: str, error: Exception) -> None:
        """Tell the user, but once."""
        if not self._warned:
            self._warned = True
            show_warning(f"{what}: {error.message if isinstance(error, SlideError) else error}")

    # What napari calls, all in its main thread

    def _make_internal(self, **arguments: Any) -> Any:
        """Make a request whose pixels are composed instead of read."""
        layer = self._layer()
        assert layer is not None
        slice_input, data_slice = arguments["slice_input"], arguments["data_slice"]
        position = position_of(data_slice, layer.data)
        in_space = is_volume(layer, slice_input)
        shown = is_one_plane(layer, slice_input, data_slice) and is_inside(position, layer.data)
        if shown:
            self._follow(layer, position)
        request = self._by_napari("_make_slice_request_internal", **arguments)
        if in_space:
            return self._in_space(request, layer, position)
        self._view = None
        if shown and self._is_blank:
            return blank(request, layer, len(position))
        top = len(request.level_shapes) - 1
        if self._picture is None or not shown or (request.data_level == top and not position):
            self._settle()
            return request
        level, corners = affordable(request)
        if self.waits:
            self._settle()
            exact = layer.data[level]
            return replace(
                request, data_level=level, corner_pixels=corners, data_at_data_level=exact
            )
        overview = self._picture.tiles.overview
        if level == top:
            self._settle(exact=not self._is_behind)
            rect = within(level, corners[:, -2:], self._picture.levels[level]).rect
            pixels = overview[Rect(0, 0, *overview.shape[:2]).slices(rect)]
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

    def _make(self, dims: Any) -> Any:
        """Make a request for asynchronous slicing: shown at once, it has nothing left to do."""
        request = self._by_napari("_make_slice_request", dims)
        layer = self._layer()
        shown = self._picture is not None or self._is_blank
        if layer is None or not shown or request.slice_input.ndisplay != 2:
            return request
        if isinstance(request.data_at_data_level, StackLevel) and not self.waits:
            return request  # several planes, or a cut across them
        self._update(request())
        layer.events.set_data()
        return _Answered(request.id, self)

    def _update(self, response: Any) -> None:
        """Take a slice unless a newer one is shown already."""
        if response.request_id > self._newest:
            self._newest = response.request_id
            if self._drawn is not None and self._drawn[0] == response.request_id:
                response = replace(response, image=response.image.from_view(self._drawn[1]))
            self._response = response
            self._by_napari("_update_slice_response", response)

    def _by_napari(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call what was put aside of the layer's slicing state, without keeping the layer."""
        layer = self._layer()
        assert layer is not None
        state = layer._slicing_state
        return getattr(type(state), name)(state, *arguments, **named)

    def _compose(
        self, picture: Picture | DevicePicture, level: int, corners: NDArray[Any]
    ) -> tuple[int, Rect, Any]:
        """Return the pixels of a region as they are at hand, and have the others fetched.

        Returns
        -------
        level : int
            That level, or a coarser one that stands in for it.
        rect : Rect
            The region there.
        pixels : ndarray
            Its pixels.
        """
        view = self._view = within(level, corners, picture.levels[level])
        if view != picture.view:
            self._forget_failure()
            self._motion = _motion(picture.view, view)
            self._asked = False
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
        self._exact = exact and not self._is_behind
        if not self._asked:
            self._asked = True
            self._runtime.fetcher.shown(picture.found, picture.lacked)
            self.source.count_shown(len(picture.found) + len(picture.lacked), len(picture.found))
        self._begin_to_rest()
        return shown.level, shown.rect, pixels

    def _in_space(self, request: Any, layer: Image, position: Position) -> Any:
        """Make a request for all planes of a level, as far as they are read."""
        self._view, level = None, request.data_level
        displayed = request.slice_input.displayed
        volume = self._volume = self._planes_of(layer).volume(displayed, position, level)
        if self.waits:
            volume.finish()
        self._settle(exact=volume.at_rest)
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

    # The rest

    @property
    def exact(self) -> bool:
        """Whether the layer's slice shows its level's own pixels everywhere."""
        return self._exact

    @property
    def fetcher(self) -> TileFetcher:
        """What fetches its tiles."""
        return self._runtime.fetcher

    @property
    def error(self) -> Exception | None:
        """Why the rest of the slice can't be had; None unless that is so."""
        return self._error

    @property
    def interop(self) -> str:
        """Whether the layer's texture is filled on the GPU: "on", or why not."""
        return self._texture.refusal or self._on_host or ON

    def close(self) -> None:
        """Give the layer its own slicing back, and want no tiles any more."""
        self._texture.close()
        self._runtime.fetcher.forget(self)
        with suppress(RuntimeError):  # the application ends, and Qt's part is gone already
            self._timer.stop()
            self._idle.stop()
            self._again.stop()
            self._landings.landed.disconnect(self._on_landed)
            self._landings.failed.disconnect(self._on_failed)
        self._picture = None
        if self._planes is not None:
            self._planes.close()
        layer = self._layer()
        if layer is not None:
            for name in SEAM:
                vars(layer._slicing_state).pop(name, None)

    def _follow(self, layer: Image, position: Position) -> None:
        """Begin a new picture where the layer shows other levels, planes or colours than before."""
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
        looks = slide.display_color, source.clearings
        before = self._picture
        same = before is not None and _same(levels, self._levels)
        if same and looks == self._looks and source is self._source:
            return
        if before is not None and same and looks[0] == self._looks[0]:
            overview = before.tiles.overview  # a cache that was cleared is no reason to wait for it
        elif plane is not None:
            overview = plane.overview
        else:
            if before is not None:
                layer._reset_thumbnail_level_data()
            materialize = layer._level_materializer or (lambda number: np.asarray(levels[number]))
            overview = materialize(len(levels) - 1)
        self._source, self._levels, self._looks = source, levels, looks
        self._runtime = slide.runtime
        tiles = tiles_at_hand(source, slide, levels, overview)
        if isinstance(source, DeviceSource) and isinstance(tiles, DeviceTilesAtHand):
            self._picture = DevicePicture(tiles, source.table(slide.display_color))
        else:
            self._picture = Picture(tiles, _memory)

    def _planes_of(self, layer: Image) -> ShownPlanes:
        """Return what opens the planes of a layer's stack, in the colours that are shown."""
        slide, levels = image_of(layer), list(layer.data)
        assert slide is not None
        planes = self._planes
        if (
            planes is None
            or not _same(levels, planes.levels)
            or planes.color != slide.display_color
        ):
            if planes is not None:
                planes.close()
            planes = ShownPlanes(levels, slide, self._source_of, self._tell)
        self._planes = planes
        return planes

    def _source_of(self, slide: Slide, levels: list[LevelArray]) -> DisplaySource | DeviceSource:
        """Return what has the tiles where they are drawn, on a device if that can be."""
        found = slide.displayed_on_device()
        first = levels[0]
        if found is None:
            self._on_host = "the CPU decodes"
        elif first.layout.categorical or not draws(first.layout, first.channel):
            self._on_host = "such pixels are drawn on the host"
        elif self._texture.follow(found.tiles.device):
            self._on_host = ""
            return found
        return slide.displayed

    def _fetch(self, picture: Picture | DevicePicture) -> float:
        """Have what a view lacks fetched; return until when that is worth waiting for."""
        if self._error is not None:
            return 0.0
        fetcher = self._runtime.fetcher
        until = _frames.patient_until(on_device=isinstance(picture, DevicePicture))
        wanted = own_tiles(picture)
        seconds = fetcher.expected(wanted)
        patient = seconds is not None and time.perf_counter() + seconds < until
        if not patient:
            wanted = on_screen(picture)
        fetcher.want(self, wanted, self._likely(picture, at_rest=False), waits=patient)
        return until if patient else 0.0

    def _prefetch(self) -> None:
        """Have all that may be next fetched, now that the view is exact and at rest."""
        if self._picture is None or not self._exact:
            return
        self._rests = True
        self._expect_planes()
        if self._view is not None:
            self._runtime.fetcher.want(self, (), self._likely(self._picture, at_rest=True))

    def _expect_planes(self) -> None:
        """Have the planes opened and fetched that may be next."""
        if self._planes is not None and self._exact and self._volume is None:
            self._planes.expect(self._view, self._most_ahead, at_rest=self._rests)

    def _likely(self, picture: Picture | DevicePicture, *, at_rest: bool) -> list[TileKey]:
        return next_likely(picture, self._motion, self._most_ahead, at_rest=at_rest)

    @property
    def _most_ahead(self) -> int:
        return int(self._runtime.tiles.budget * PREFETCH_SHARE)

    def _begin_to_rest(self) -> None:
        """Note that something else is shown; it may stay so, if it is exact."""
        self._rests = False
        if self._exact:
            self._idle.start(IDLE_MS)
            self._expect_planes()
        else:
            self._idle.stop()

    def _settle(self, *, exact: bool = True) -> None:
        """Show what is there as it is: no tile is missing."""
        self._exact = exact
        self._forget_failure()
        self._runtime.fetcher.forget(self)
        if self._planes is None:
            self._idle.stop()
        else:
            self._begin_to_rest()

    def _fail_plane(self, error: SlideError) -> None:
        """Show no plane, say why, and try again what may pass."""
        self._picture, self._is_blank, self._exact = None, True, False
        self._runtime.fetcher.forget(self)
        self.fail(error)

    def _forget_failure(self) -> None:
        """Begin anew with another view: what failed of the last one is of no interest."""
        self._error = None
        self._again.stop()
        self._pause_ms = FIRST_PAUSE_MS

    def _on_failed(self) -> None:
        """Try again after a pause, which is longer each time that nothing lands meanwhile."""
        if isinstance(self._picture, DevicePicture) and self._texture.refusal is not None:
            self._exact = False  # what is shown may be lost
            self._timer.start(0)
        elif self._error is not None and not self._exact:
            self._again.start(self._pause_ms)
            self._pause_ms = min(2 * self._pause_ms, LONGEST_PAUSE_MS)

    def _retry(self) -> None:
        """Want again what the view lacks; a hidden layer does so when it is shown."""
        self._error = None
        picture, layer = self._picture, self._layer()
        if layer is None or not layer.visible:
            return
        if picture is not None:
            self._fetch(picture)
        elif self._planes is not None:
            self._planes.rest()
            self._refresh()

    def _on_landed(self) -> None:
        """Refresh the layer, but not much more often than an eye can see."""
        self._news.clear()
        self._pause_ms = FIRST_PAUSE_MS
        picture, layer = self._picture, self._layer()
        if picture is None and self._planes is None:
            return
        if layer is None or not layer.visible:
            # It is sliced again when it is shown; until then tiles would only pile up.
            self._runtime.fetcher.forget(self)
            if self._planes is not None:
                self._planes.rest()
            return
        due = self._last_refresh + REST * _frames.seconds - time.perf_counter()
        missing = picture is not None and bool(picture.missing)
        if due <= 0 or not (missing if self._volume is None else not self._volume.at_rest):
            self._refresh()
            self._expect_planes()
        elif not self._timer.isActive():
            self._timer.start(math.ceil(due * 1000))

    def _refresh(self) -> None:
        self._timer.stop()
        layer = self._layer()
        if layer is not None and layer.visible and not self._exact:
            was_behind = self._is_behind or self._volume is not None
            with without_collection():
                layer.set_view_slice()
                layer.events.set_data()
                if was_behind and self._exact:
                    layer._update_thumbnail()
        self._last_refresh = time.perf_counter()


@dataclass(frozen=True)
class _Answered:
    """A request whose answer is shown already."""

    id: int
    display: ProgressiveDisplay

    def __call__(self) -> Any:
        return replace(self.display._response, request_id=self.id)


def _is_of_device(error: Exception) -> bool:
    """Whether it is no fault of the slide."""
    return isinstance(error, DeviceError) or not isinstance(error, SlideError)


def _same(levels: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(levels) == len(others) and all(map(lambda a, b: a is b, levels, others))


def _motion(last: View | None, view: View) -> tuple[float, float]:
    """Return how far a view moved, (down, right); nothing where the level changed."""
    if last is None or last.level != view.level:
        return 0.0, 0.0
    (y, x), (last_y, last_x) = view.rect.centre, last.rect.centre
    return y - last_y, x - last_x
