"""Order the tiles that a display requests: tiles on screen first, then tiles likely to be next."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from napari_wsigpu.display.blocks import touched
from napari_wsigpu.model.geometry import Rect

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TypeAlias

    from napari_wsigpu.display.available_tiles import AvailableTiles
    from napari_wsigpu.display.device_picture import DevicePicture
    from napari_wsigpu.display.drawing import View
    from napari_wsigpu.display.picture import Picture
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.cache import TileKey

    AnyPicture: TypeAlias = Picture | DevicePicture
    Position = tuple[int, int, int]

# A level that is coarser by this factor has about an eighth of the tiles, so it is shown first.
PREVIEW_STEP = 2.8
# There is no preview if its missing tiles exceed this share of the view's missing tiles.
PREVIEW_SHARE = 1 / 8


def own_tiles(picture: AnyPicture) -> list[TileKey]:
    """Return the missing tiles of the view of a picture, nearest to the center first."""
    view = picture.view
    if view is None:
        return []
    own = [(view.level, *tile) for tile in picture.missing]
    return [picture.tiles.key_of(*position) for position in _from_center(own, picture, view)]


def on_screen(picture: AnyPicture) -> list[TileKey]:
    """Return the tiles of a coarse preview of a picture's missing tiles, then these tiles."""
    view, missing = picture.view, picture.missing
    if view is None or not missing:
        return []
    image = picture.levels[view.level]
    preview: list[Position] = []
    level = _preview_level(picture.levels, view.level)
    if level is not None:
        coarse = picture.levels[level]
        down, across = coarse.height / image.height, coarse.width / image.width
        # Tiles of the coarse level under the centers of missing tiles.
        uncovered = {
            (int((row + 0.5) * image.grid.tile_height * down) // coarse.grid.tile_height,
             int((column + 0.5) * image.grid.tile_width * across) // coarse.grid.tile_width)
            for row, column in missing
        }  # fmt: skip
        preview = [
            (level, *tile)
            for tile in _in_grid(uncovered, coarse)
            if not picture.was_served(level, *tile) and picture.tiles.get(level, *tile) is None
        ]
        if len(preview) > PREVIEW_SHARE * len(missing):
            preview = []
        preview = _from_center(preview, picture, view)
    return [picture.tiles.key_of(*position) for position in preview] + own_tiles(picture)


def tiles_of_view(tiles: AvailableTiles, view: View, most_bytes: int) -> list[TileKey]:
    """Return the unavailable tiles of a view, as many as fit into `most_bytes`."""
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
    """Return the tiles that the next view may need, likeliest first.

    These are the tiles around the view, in the direction of motion. For a view at rest, they are
    followed by tiles of the next coarser and the next finer level around its center.

    Parameters
    ----------
    picture : Picture
        Picture of the display.
    motion : tuple of float
        Latest movement of the view, (down, right). Without motion, the whole ring is likely.
    most_bytes : int
        Largest total size of the tiles when decoded.
    at_rest : bool
        Whether the view has come to rest. While it moves, only the next step is likely, and the
        cores are needed for drawing.

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
        *(_under_center(picture, view, level) for level in around),
    )
    return [
        picture.tiles.key_of(*position) for position in _affordable(picture, likely, most_bytes)
    ]


def _preview_level(levels: Sequence[LevelLayout], level: int) -> int | None:
    """Return the finest stored level that costs little compared to `level`, or None."""
    source = level
    # Reading a computed level costs as much as the stored level below it.
    while levels[source].computed and source > 0:
        source -= 1
    for coarser in range(level + 1, len(levels) - 1):
        step = levels[source].width / levels[coarser].width
        if not levels[coarser].computed and step >= PREVIEW_STEP:
            return coarser
    return None


def _ring(picture: AnyPicture, view: View, motion: tuple[float, float]) -> Iterator[Position]:
    """Return the tiles in a border around a view, an eighth of its size.

    The border lies on the sides that the view is moving toward; without motion, on all sides.
    """
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
    yield from _from_center(outside, picture, view)


def _under_center(picture: AnyPicture, view: View, level: int) -> Iterator[Position]:
    """Return the tiles of another level in a view of the same size and center."""
    own, other = picture.levels[view.level], picture.levels[level]
    down, across = other.height / own.height, other.width / own.width
    y, x = view.rect.center
    y, x, height, width = y * down, x * across, view.rect.height / 2, view.rect.width / 2
    there = Rect.between(
        max(0, int(y - height)), int(y + height), max(0, int(x - width)), int(x + width)
    )
    tiles = _in_grid(set(touched(other, there).cells()), other)
    yield from _from_center([(level, *tile) for tile in tiles], picture, view)


def _affordable(
    picture: AnyPicture, positions: Iterable[Position], most_bytes: int
) -> Iterator[Position]:
    """Yield unavailable tiles until they exceed a number of bytes."""
    for position in positions:
        if picture.tiles.get(*position) is None:
            most_bytes -= picture.levels[position[0]].tile_bytes
            if most_bytes < 0:
                return
            yield position


def _in_grid(tiles: Iterable[tuple[int, int]], image: LevelLayout) -> list[tuple[int, int]]:
    """Return the tiles that exist in the grid of an image."""
    rows = -(-image.height // image.grid.tile_height)
    columns = -(-image.width // image.grid.tile_width)
    return [(row, column) for row, column in tiles if 0 <= row < rows and 0 <= column < columns]


def _from_center(positions: list[Position], picture: AnyPicture, view: View) -> list[Position]:
    """Sort tiles of one level by their distance from the center of a view."""
    if not positions:
        return positions
    own, image = picture.levels[view.level], picture.levels[positions[0][0]]
    grid = image.grid
    y, x = view.rect.center
    y, x = y * image.height / own.height, x * image.width / own.width

    def distance(position: Position) -> float:
        _, row, column = position
        down = (row + 0.5) * grid.tile_height - y
        across = (column + 0.5) * grid.tile_width - x
        return down * down + across * across

    return sorted(positions, key=distance)
