"""`Picture`: the picture of a slide that a display shows while tiles are being decoded."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from napari_wsigpu.display.available_tiles import AvailableTiles, TileLookup
from napari_wsigpu.display.drawing import Drawing, View
from napari_wsigpu.model.geometry import Rect

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from napari_wsigpu.display.device_pixels import DevicePixels
    from napari_wsigpu.model.arrays import AnyArray, Array
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.cache import TileKey
    from napari_wsigpu.storage.buffers import PictureMemory

    Tile = tuple[int, int]

# If more than this share of a view is missing, the graphics card enlarges a coarser view instead.
WORTH_DRAWING = 0.5
# How many of the next coarser levels may replace a view.
COARSER_LEVELS = 2


class Composed(NamedTuple):
    """The pixels to show for a view.

    Attributes
    ----------
    view : View
        The view itself, or the same area of a coarser level.
    pixels : ndarray or DevicePixels, shape (height, width) or (height, width, channels)
        The pixels of `view`. If `view` is the requested view and the pixels are in host memory,
        the same array is improved as tiles arrive, until the view changes.
    exact : bool
        Whether all pixels belong to the requested view, at the time of the call.
    """

    view: View
    pixels: Array | DevicePixels
    exact: bool = False


@dataclass(eq=False)
class Shown:
    """The current view of a picture and the state of its tiles.

    Attributes
    ----------
    view : View
        The region.
    missing : collection of (int, int)
        Row and column of each tile that does not show its own pixels yet.
    served : set of TileKey
        The tiles that have arrived for the view.
    count : int
        Number of tiles of the view.
    changed : threading.Condition
        Held by the thread that draws; notified when tiles have arrived.
    """

    view: View
    missing: Collection[Tile] = ()
    served: set[TileKey] = field(default_factory=set)
    count: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)


AnyShown = TypeVar("AnyShown", bound=Shown)


class LevelPicture(ABC, Generic[AnyShown]):
    """One display's picture of a slide, composed of the available tiles.

    Any thread may call `add`; a single thread calls everything else.

    Parameters
    ----------
    tiles : AvailableTiles
        The available tiles of the slide; kept as an attribute.

    Attributes
    ----------
    found, lacked : list of TileKey
        The tiles of the view that were available when it was first composed, and the others.
    """

    def __init__(self, tiles: AvailableTiles) -> None:
        self.tiles = tiles
        self.found: list[TileKey] = []
        self.lacked: list[TileKey] = []
        self._now: AnyShown | None = None

    @property
    def levels(self) -> list[LevelLayout]:
        """The levels, finest first."""
        return self.tiles.levels

    @property
    def view(self) -> View | None:
        """The view that was composed last."""
        return None if self._now is None else self._now.view

    @property
    def missing(self) -> Collection[Tile]:
        """Row and column of each tile of the view that does not show its own pixels yet."""
        return [] if self._now is None else list(self._now.missing)

    def was_served(self, level: int, row: int, column: int) -> bool:
        """Return whether a tile has arrived for this view, even if it has been evicted since."""
        return self._now is not None and self.tiles.key_of(level, row, column) in self._now.served

    @abstractmethod
    def compose(self, view: View, fetch: Callable[[], float] = lambda: 0.0) -> Composed:
        """Return the best available pixels of a view.

        Parameters
        ----------
        view : View
            The view to show.
        fetch : callable
            Requests the `missing` tiles, and returns the `time.perf_counter` value until which
            drawing may wait for them. Called before anything is drawn, and again if tiles turn out
            to have been evicted.
        """

    def add(self, decoded: Mapping[TileKey, object]) -> bool:
        """Add decoded tiles; return whether they improve the view, now or when it is next drawn."""
        now = self._now  # read once: `compose` may replace it in another thread
        if now is None:
            return False
        with now.changed:
            if not now.missing:
                return False
            useful = self.tiles.useful(decoded, now.view.level, now.missing)
            now.served.update(useful)
            self._add(now, {key: decoded[key] for key in useful})
            now.changed.notify_all()
            return bool(useful)

    @abstractmethod
    def _add(self, now: AnyShown, decoded: Mapping[TileKey, Any]) -> None:
        """Use tiles that have arrived; the caller holds `now.changed`."""

    @abstractmethod
    def _draw_coarser(self, coarse: View, view: View, most_absent: float) -> AnyArray | None:
        """Draw a coarser view; return None if more than `most_absent` of its tiles are absent."""

    def _list_tiles(self, now: AnyShown, tiles: Iterable[Tile]) -> None:
        """Record which tiles of a new view are available and which are missing."""
        self.found, self.lacked = [], []
        for tile in tiles:
            keys = self.lacked if tile in now.missing else self.found
            keys.append(self.tiles.key_of(now.view.level, *tile))
        now.count = len(self.found) + len(self.lacked)

    @staticmethod
    def _wait(now: AnyShown, until: float) -> None:
        """Wait for missing tiles until a time; the caller holds `now.changed`."""
        while now.missing and (left := until - time.perf_counter()) > 0:
            now.changed.wait(left)

    def _coarser_view(self, view: View) -> Composed:
        """Return the same area of a coarser level. It is small, so it is drawn for each call."""
        views = _coarser_views(self.levels, view)
        for coarse in views:
            if coarse.level == len(self.levels) - 1:
                image = self.levels[coarse.level]
                part = Rect(0, 0, image.height, image.width).slices(coarse.rect)
                return Composed(coarse, self.tiles.overview[part])
            most = 1.0 if coarse == views[-1] else WORTH_DRAWING
            pixels = self._draw_coarser(coarse, view, most)
            if pixels is not None:
                return Composed(coarse, pixels)
        raise AssertionError("the overview can replace every view")


@dataclass(eq=False, kw_only=True)
class _Drawn(Shown):
    """A view drawn in its own array.

    `common` is the part that the previous view also shows; `fresh` holds available tiles that are
    not drawn yet; `waited_for` is set while `compose` waits for tiles, so that `add` leaves
    approximations to it.
    """

    drawing: Drawing
    common: Rect | None = None
    fresh: dict[Tile, Array] = field(default_factory=dict)
    waited_for: bool = False


class Picture(LevelPicture[_Drawn]):
    """A picture in host memory.

    Missing tiles show the best substitute: the next finer level, or else a coarser level, or else
    the overview, which is always available. If most tiles of a view are missing, a view of a
    coarser level replaces it.

    `add` draws in the thread that calls it.

    Parameters
    ----------
    tiles : AvailableTiles
        The available tiles of the slide; kept as an attribute.
    memory : PictureMemory
        Provides arrays for views.
    """

    def __init__(self, tiles: AvailableTiles, memory: PictureMemory) -> None:
        super().__init__(tiles)
        self._memory = memory

    def compose(self, view: View, fetch: Callable[[], float] = lambda: 0.0) -> Composed:
        """Return the best available pixels of a view; see `LevelPicture.compose`."""
        now, before = self._now, None
        is_new = now is None or now.view != view
        if now is None or is_new:
            now, before = self._start(view), now
        # No other thread knows a new view yet, so its lock is free.
        if not now.changed.acquire(blocking=is_new):
            # `add` is drawing in another thread; it triggers a refresh when it is done.
            if now.drawing.undrawn:
                return self._coarser_view(view)
            return Composed(view, now.drawing.pixels, not now.missing)
        try:
            self._now = now
            until = fetch()
            self._draw_own(now, before)
            now.waited_for = True
            self._wait(now, until)
            now.waited_for = False
            if now.drawing.undrawn:
                lookup = TileLookup(self.tiles, {})
                now.drawing.approximate(lookup, coarser=False)
                if now.drawing.undrawn > WORTH_DRAWING * now.count:
                    return self._coarser_view(view)
                now.drawing.approximate(lookup)
                self._draw_edges(now, before)
        finally:
            now.changed.release()
        return Composed(view, now.drawing.pixels, not now.missing)

    def _add(self, now: _Drawn, decoded: Mapping[TileKey, Array]) -> None:
        """Draw tiles that have arrived, and approximate missing tiles from them."""
        drawing, own = now.drawing, self.tiles.numbers[now.view.level]
        shown = {key: self.tiles.shown(pixels) for key, pixels in decoded.items()}
        for key, pixels in shown.items():
            if key.image == own:
                drawing.paste((key.row, key.column), pixels)
        # Don't approximate while a coarser view is shown instead, or while `compose` waits.
        undrawn, others = drawing.undrawn, any(key.image != own for key in shown)
        if (undrawn or others) and undrawn < now.count and not now.waited_for:
            drawing.approximate(TileLookup(self.tiles, shown))

    def _start(self, view: View) -> _Drawn:
        """Start a new view: find its available tiles and the part that the previous view shows."""
        drawing = self._new_drawing(view)
        missing, level = drawing.missing, view.level
        now = _Drawn(view, missing, drawing=drawing)
        kept: dict[Tile, int | None] = {}
        if self._now is not None and self._now.view.level == level:
            before = self._now.drawing
            ranks, seen = dict(before.missing), before.view.rect
            now.common = view.rect.intersection(seen)
            for tile in drawing.tiles:
                if seen.contains(drawing.part(tile)):
                    kept[tile] = ranks.get(tile)
        for tile in drawing.tiles:
            rank = kept.get(tile, drawing.nothing)
            if rank is None:
                continue
            own = self.tiles.get(level, *tile)
            if own is None:
                missing[tile] = rank
            else:
                now.fresh[tile] = own
        self._list_tiles(now, drawing.tiles)
        return now

    def _new_drawing(self, view: View, magnification: float = 1) -> Drawing:
        shape = (view.rect.height, view.rect.width, *self.tiles.overview.shape[2:])
        pixels = self._memory.empty(shape, self.levels[view.level].dtype)
        return Drawing(view, self.tiles, pixels, magnification)

    def _draw_own(self, now: _Drawn, before: _Drawn | None) -> None:
        """Copy pixels from the previous view and draw available tiles, once for each view."""
        drawing = now.drawing
        if before is not None and now.common is not None:
            old = before.drawing
            part = drawing.view.rect.slices(now.common)
            drawing.pixels[part] = old.pixels[old.view.rect.slices(now.common)]
        for tile, own in now.fresh.items():
            drawing.paste(tile, own)
        now.fresh.clear()

    def _draw_edges(self, now: _Drawn, before: _Drawn | None) -> None:
        """Copy the parts of missing tiles that the previous view shows."""
        if before is None or now.common is None:
            return
        new, old = now.drawing, before.drawing
        for tile in new.missing:
            part = new.part(tile).intersection(now.common)
            if part is not None and old.missing.get(tile) != old.nothing:
                drawn = old.pixels[old.view.rect.slices(part)]
                new.pixels[new.view.rect.slices(part)] = drawn

    def _draw_coarser(self, coarse: View, view: View, most_absent: float) -> AnyArray | None:
        """Draw a coarser view; return None if more than `most_absent` of its tiles are absent."""
        down = self.levels[coarse.level].height / self.levels[view.level].height
        drawing, lookup = self._new_drawing(coarse, 1 / down), TileLookup(self.tiles, {})
        found = {tile: lookup.tile(coarse.level, tile) for tile in drawing.tiles}
        absent = [tile for tile, pixels in found.items() if pixels is None]
        if len(absent) > most_absent * len(found):
            return None
        drawing.missing |= dict.fromkeys(absent, drawing.nothing)
        drawing.approximate(lookup)
        for tile, pixels in found.items():
            if pixels is not None:
                drawing.paste(tile, pixels)
        return drawing.pixels


def _coarser_views(levels: list[LevelLayout], view: View) -> list[View]:
    """Return the views of coarser levels that may replace a view, finest first."""
    own = levels[view.level]
    found = []
    for level in range(view.level + 1, min(view.level + COARSER_LEVELS, len(levels) - 1) + 1):
        image = levels[level]
        down, across = image.height / own.height, image.width / own.width
        rect = Rect.between(
            int(view.rect.top * down),
            min(math.ceil(view.rect.bottom * down), image.height),
            int(view.rect.left * across),
            min(math.ceil(view.rect.right * across), image.width),
        )
        found.append(View(level, rect))
    return found
