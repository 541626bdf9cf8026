"""What a display shows of a slide while tiles are still being decoded."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from napari_wsigpu.display.at_hand import Hand, TilesAtHand
from napari_wsigpu.display.drawing import Drawing, View
from napari_wsigpu.model.geometry import Rect

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.cache import TileKey
    from napari_wsigpu.storage.buffers import PictureMemory

    Tile = tuple[int, int]

# Of a view of which less is at hand, a coarser one is shown: the graphics card enlarges it.
WORTH_DRAWING = 0.5
# A coarser view is of one of so many next levels.
STAND_IN_LEVELS = 2


class Composed(NamedTuple):
    """What to show for a view.

    Attributes
    ----------
    view : View
        What is shown: the view itself, or as much of a coarser level that stands in for it.
    pixels : ndarray, shape (height, width) or (height, width, channels)
        Its pixels. They get better as tiles land, in the same array while the view is the same.
    exact : bool
        Whether these are all pixels of the view itself: tiles may have landed since.
    """

    view: View
    pixels: NDArray[Any]
    exact: bool = False


@dataclass(eq=False)
class Shown:
    """The view that a picture shows, and what is known of it.

    Attributes
    ----------
    view : View
        The region.
    missing : collection of (int, int)
        Row and column of each of its tiles that does not show its own pixels yet.
    served : set of TileKey
        The tiles that have landed for it.
    count : int
        How many tiles it has.
    landed : threading.Condition
        Held by the thread that draws; notified when tiles have landed.
    """

    view: View
    missing: Collection[Tile] = ()
    served: set[TileKey] = field(default_factory=set)
    count: int = 0
    landed: threading.Condition = field(default_factory=threading.Condition)


AnyShown = TypeVar("AnyShown", bound=Shown)


class LevelPicture(ABC, Generic[AnyShown]):
    """One display's picture of a slide's levels, composed of what is at hand.

    `land` may be called by any thread; everything else by one.

    Parameters
    ----------
    tiles : TilesAtHand
        Which pixels of the slide are at hand; kept as an attribute.

    Attributes
    ----------
    found, lacked : list of TileKey
        The tiles of the view that were at hand when it was composed first, and the others.
    """

    def __init__(self, tiles: TilesAtHand) -> None:
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
        """The region that was composed last."""
        return None if self._now is None else self._now.view

    @property
    def missing(self) -> Collection[Tile]:
        """Row and column of each tile of the view that does not show its own pixels yet."""
        return [] if self._now is None else list(self._now.missing)

    def was_served(self, level: int, row: int, column: int) -> bool:
        """Whether a tile has landed for this view, though it may be at hand no more."""
        return self._now is not None and self.tiles.key_of(level, row, column) in self._now.served

    @abstractmethod
    def compose(self, view: View, fetch: Callable[[], float] = lambda: 0.0) -> Composed:
        """Return the best pixels of a region.

        Parameters
        ----------
        view : View
            What to show.
        fetch : callable
            Called once it is known what is `missing`, before anything is drawn, to have that
            fetched. Returns until when, by `time.perf_counter`, its landing may be waited for.
        """

    def land(self, landed: Mapping[TileKey, Any]) -> bool:
        """Take decoded tiles; return whether the view shows better pixels by them, or will."""
        now = self._now
        if now is None:
            return False
        with now.landed:
            if not now.missing:
                return False
            useful = self.tiles.useful(landed, now.view.level, now.missing)
            now.served.update(useful)
            self._take(now, {key: landed[key] for key in useful})
            now.landed.notify_all()
            return bool(useful)

    @abstractmethod
    def _take(self, now: AnyShown, landed: Mapping[TileKey, Any]) -> None:
        """Use tiles that have landed; the view's lock is held."""

    @abstractmethod
    def _draw_coarser(self, coarse: View, view: View, most_absent: float) -> Any:
        """Draw what stands in for a view; None if more than this share of its tiles is absent."""

    def _list_tiles(self, now: AnyShown, tiles: Iterable[Tile]) -> None:
        """Note which tiles a new view has, and which of them are missing."""
        keys = [self.tiles.key_of(now.view.level, *tile) for tile in tiles]
        self.found = [key for key in keys if (key.row, key.column) not in now.missing]
        self.lacked = [key for key in keys if (key.row, key.column) in now.missing]
        now.count = len(keys)

    @staticmethod
    def _wait(now: AnyShown, until: float) -> None:
        """Wait for what is missing, but no longer than until a time; the view's lock is held."""
        while now.missing and (left := until - time.perf_counter()) > 0:
            now.landed.wait(left)

    def _stand_in(self, view: View) -> Composed:
        """Return a view of a coarser level that shows as much; it is small, and made each time."""
        views = _stand_ins(self.levels, view)
        for coarse in views:
            if coarse.level == len(self.levels) - 1:
                image = self.levels[coarse.level]
                part = Rect(0, 0, image.height, image.width).slices(coarse.rect)
                return Composed(coarse, self.tiles.overview[part])
            most = 1.0 if coarse == views[-1] else WORTH_DRAWING
            pixels = self._draw_coarser(coarse, view, most)
            if pixels is not None:
                return Composed(coarse, pixels)
        raise AssertionError("the overview stands in for all levels")


@dataclass(eq=False, kw_only=True)
class _Drawn(Shown):
    """A view in an array of its own."""

    drawing: Drawing
    common: Rect | None = None
    fresh: dict[Tile, NDArray[Any]] = field(default_factory=dict)
    waited_for: bool = False


class Picture(LevelPicture[_Drawn]):
    """A picture in host memory.

    Tiles that are not at hand yet show the best other pixels there are: those of the next finer
    level, else of the coarser ones, at last of the overview, which always is at hand. Where that
    would be most of a view, a view of a coarser level stands in for it.

    `land` draws in the thread that calls it.

    Parameters
    ----------
    tiles : TilesAtHand
        Which pixels of the slide are at hand; kept as an attribute.
    memory : PictureMemory
        What to compose in.
    """

    def __init__(self, tiles: TilesAtHand, memory: PictureMemory) -> None:
        super().__init__(tiles)
        self._memory = memory

    def compose(self, view: View, fetch: Callable[[], float] = lambda: 0.0) -> Composed:
        """Return the best pixels of a region; see `LevelPicture.compose`."""
        now, before = self._now, None
        begins = now is None or now.view != view
        if now is None or begins:
            now, before = self._begin(view), now
        if not now.landed.acquire(blocking=begins):
            # Tiles are being drawn in another thread, which tells when they are.
            if now.drawing.undrawn:
                return self._stand_in(view)
            return Composed(view, now.drawing.pixels, not now.missing)
        try:
            self._now = now
            until = fetch()
            self._draw_own(now, before)
            now.waited_for = True
            self._wait(now, until)
            now.waited_for = False
            if now.drawing.undrawn:
                hand = Hand(self.tiles, {})
                now.drawing.approximate(hand, coarser=False)
                if now.drawing.undrawn > WORTH_DRAWING * now.count:
                    return self._stand_in(view)
                now.drawing.approximate(hand)
                self._draw_edges(now, before)
        finally:
            now.landed.release()
        return Composed(view, now.drawing.pixels, not now.missing)

    def _take(self, now: _Drawn, landed: Mapping[TileKey, NDArray[Any]]) -> None:
        """Draw tiles that have landed, and others by them."""
        drawing, own = now.drawing, self.tiles.numbers[now.view.level]
        taken = {key: self.tiles.shown(pixels) for key, pixels in landed.items()}
        for key, pixels in taken.items():
            if key.level == own:
                drawing.paste((key.row, key.column), pixels)
        # Not as long as a coarser view stands in for all of it, or it may be exact soon.
        undrawn, others = drawing.undrawn, any(key.level != own for key in taken)
        if (undrawn or others) and undrawn < now.count and not now.waited_for:
            drawing.approximate(Hand(self.tiles, taken))

    def _begin(self, view: View) -> _Drawn:
        """Find out what of another region is at hand."""
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

    def _new_drawing(self, view: View, magnified: float = 1) -> Drawing:
        shape = (view.rect.height, view.rect.width, *self.tiles.overview.shape[2:])
        pixels = self._memory.empty(shape, self.levels[view.level].dtype)
        return Drawing(view, self.tiles, pixels, magnified)

    def _draw_own(self, now: _Drawn, before: _Drawn | None) -> None:
        """Draw what the last view showed, and tiles that were at hand; once for each view."""
        drawing = now.drawing
        if before is not None and now.common is not None:
            old = before.drawing
            part = drawing.view.rect.slices(now.common)
            drawing.pixels[part] = old.pixels[old.view.rect.slices(now.common)]
        for tile, own in now.fresh.items():
            drawing.paste(tile, own)
        now.fresh.clear()

    def _draw_edges(self, now: _Drawn, before: _Drawn | None) -> None:
        """Draw what the last view showed of tiles that are missing, and reach beyond it."""
        if before is None or now.common is None:
            return
        new, old = now.drawing, before.drawing
        for tile in new.missing:
            part = new.part(tile).intersection(now.common)
            if part is not None and old.missing.get(tile) != old.nothing:
                drawn = old.pixels[old.view.rect.slices(part)]
                new.pixels[new.view.rect.slices(part)] = drawn

    def _draw_coarser(self, coarse: View, view: View, most_absent: float) -> Any:
        """Draw what stands in for a view; None if more than this share of its tiles is absent."""
        down = self.levels[coarse.level].height / self.levels[view.level].height
        drawing, hand = self._new_drawing(coarse, 1 / down), Hand(self.tiles, {})
        at_hand = {tile: hand.tile(coarse.level, tile) for tile in drawing.tiles}
        absent = [tile for tile, pixels in at_hand.items() if pixels is None]
        if len(absent) > most_absent * len(at_hand):
            return None
        drawing.missing |= dict.fromkeys(absent, drawing.nothing)
        drawing.approximate(hand)
        for tile, pixels in at_hand.items():
            if pixels is not None:
                drawing.paste(tile, pixels)
        return drawing.pixels


def _stand_ins(levels: list[LevelLayout], view: View) -> list[View]:
    """Return the views of coarser levels that may be shown instead of one, the finest first."""
    own = levels[view.level]
    found = []
    for level in range(view.level + 1, min(view.level + STAND_IN_LEVELS, len(levels) - 1) + 1):
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
