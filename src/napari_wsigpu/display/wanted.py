"""Which tiles a display wants, and in which order: those on screen, then those likely next."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from napari_wsigpu.display.blocks import touched
from napari_wsigpu.model.geometry import Rect

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TypeAlias

    from napari_wsigpu.display.at_hand import TilesAtHand
    from napari_wsigpu.display.device_picture import DevicePicture
    from napari_wsigpu.display.drawing import View
    from napari_wsigpu.display.picture import Picture
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.cache import TileKey

    AnyPicture: TypeAlias = Picture | DevicePicture
    Place = tuple[int, int, int]

# A coarser level this much smaller has at most an eighth of the tiles: worth to be seen first,
# unless it needs more than a quarter of what is lacking after all.
PREVIEW_STEP = 2.8
PREVIEW_SHARE = 1 / 4


def own_tiles(picture: AnyPicture) -> list[TileKey]:
    """Return the tiles of its view that a picture lacks, from the centre on."""
    view = picture.view
    if view is None:
        return []
    own = [(view.level, *tile) for tile in picture.missing]
    return [picture.tiles.key_of(*place) for place in _from_centre(own, picture, view)]


def on_screen(picture: AnyPicture) -> list[TileKey]:
    """Return a coarse preview of what a picture lacks, then the tiles themselves.

    Returns
    -------
    list of TileKey
    """
    view, missing = picture.view, picture.missing
    if view is None or not missing:
        return []
    image = picture.levels[view.level]
    preview: list[Place] = []
    level = _preview_level(picture.levels, view.level)
    if level is not None:
        coarse = picture.levels[level]
        down, across = coarse.height / image.height, coarse.width / image.width
        lacking = {
            (int((row + 0.5) * image.grid.tile_height * down) // coarse.grid.tile_height,
             int((column + 0.5) * image.grid.tile_width * across) // coarse.grid.tile_width)
            for row, column in missing
        }  # fmt: skip
        preview = [
            (level, *tile)
            for tile in _in_grid(lacking, coarse)
            if not picture.was_served(level, *tile) and picture.tiles.get(level, *tile) is None
        ]
        if len(preview) > PREVIEW_SHARE * len(missing):
            preview = []
        preview = _from_centre(preview, picture, view)
    return [picture.tiles.key_of(*place) for place in preview] + own_tiles(picture)


def tiles_of_view(tiles: TilesAtHand, view: View, most_bytes: int) -> list[TileKey]:
    """Return the tiles of a view that are not at hand, as many as fit into so many bytes."""
    image = tiles.levels[view.level]
    lacked = [
        tiles.key_of(view.level, *tile)
        for tile in touched(image, view.rect).cells()
        if tiles.get(view.level, *tile) is None
    ]
    return lacked[: most_bytes // image.tile_bytes]


def next_likely(
    picture: AnyPicture, motion: tuple[float, float], most_bytes: int, *, at_rest: bool
) -> list[TileKey]:
    """Return the tiles that the next view may need, the likeliest first.

    These are the ring around the view in the direction of motion, then, of a view at rest, the
    next coarser and the next finer level under its centre.

    Parameters
    ----------
    picture : Picture
        The display's picture.
    motion : tuple of float
        How far the view moved last, (down, right); no motion wants the whole ring.
    most_bytes : int
        How many bytes of pixels to want at most.
    at_rest : bool
        Whether the view has come to rest. Of one that still changes only the next step is likely,
        and the cores are needed to draw it.

    Returns
    -------
    list of TileKey
    """
    view = picture.view
    if view is None:
        return []
    around: list[int] = []
    if at_rest:
        top = len(picture.levels) - 1
        around = [level for level in (view.level + 1, view.level - 1) if 0 <= level < top]
    likely = chain(
        _ring(picture, view, motion) if at_rest or any(motion) else (),
        *(_under_centre(picture, view, level) for level in around),
    )
    return [picture.tiles.key_of(*place) for place in _affordable(picture, likely, most_bytes)]


def _preview_level(levels: Sequence[LevelLayout], level: int) -> int | None:
    """Return the finest stored level that costs little beside a level, if it has to be read."""
    source = level
    while levels[source].computed and source > 0:
        source -= 1
    for coarser in range(level + 1, len(levels) - 1):
        step = levels[source].width / levels[coarser].width
        if not levels[coarser].computed and step >= PREVIEW_STEP:
            return coarser
    return None


def _ring(picture: AnyPicture, view: View, motion: tuple[float, float]) -> Iterator[Place]:
    """Return the tiles just outside of a view on the sides it moves to, a screen's eighth wide."""
    image = picture.levels[view.level]
    block = touched(image, view.rect)
    high, wide = max(1, block.height // 8), max(1, block.width // 8)
    down, right = motion
    still = down == right == 0
    ring = Rect.between(
        block.top - high * (still or down < 0),
        block.bottom + high * (still or down > 0),
        block.left - wide * (still or right < 0),
        block.right + wide * (still or right > 0),
    )
    inside = set(block.cells())
    outside = [(view.level, *tile) for tile in _in_grid(set(ring.cells()) - inside, image)]
    yield from _from_centre(outside, picture, view)


def _under_centre(picture: AnyPicture, view: View, level: int) -> Iterator[Place]:
    """Return the tiles of another level that a view of as many pixels would show there."""
    own, other = picture.levels[view.level], picture.levels[level]
    down, across = other.height / own.height, other.width / own.width
    y, x = view.rect.centre
    y, x, height, width = y * down, x * across, view.rect.height / 2, view.rect.width / 2
    there = Rect.between(
        max(0, int(y - height)), int(y + height), max(0, int(x - width)), int(x + width)
    )
    tiles = _in_grid(set(touched(other, there).cells()), other)
    yield from _from_centre([(level, *tile) for tile in tiles], picture, view)


def _affordable(picture: AnyPicture, places: Iterable[Place], most_bytes: int) -> Iterator[Place]:
    for place in places:
        if picture.tiles.get(*place) is None:
            most_bytes -= picture.levels[place[0]].tile_bytes
            if most_bytes < 0:
                return
            yield place


def _in_grid(tiles: Iterable[tuple[int, int]], image: LevelLayout) -> list[tuple[int, int]]:
    rows = -(-image.height // image.grid.tile_height)
    columns = -(-image.width // image.grid.tile_width)
    return [(row, column) for row, column in tiles if 0 <= row < rows and 0 <= column < columns]


def _from_centre(places: list[Place], picture: AnyPicture, view: View) -> list[Place]:
    """Sort tiles of one level by how far they are from the centre of a view."""
    if not places:
        return places
    own, image = picture.levels[view.level], picture.levels[places[0][0]]
    grid = image.grid
    y, x = view.rect.centre
    y, x = y * image.height / own.height, x * image.width / own.width

    def distance(place: Place) -> float:
        _, row, column = place
        down = (row + 0.5) * grid.tile_height - y
        across = (column + 0.5) * grid.tile_width - x
        return down * down + across * across

    return sorted(places, key=distance)
