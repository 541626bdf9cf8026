"""The walk through a slide: each stored pixel is read once, and averaged as it passes."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.annotations.masks import inside
from napari_wsigpu.conversion.checksum import crc32
from napari_wsigpu.conversion.plan import segments_of
from napari_wsigpu.conversion.stripped import stripped
from napari_wsigpu.model.errors import TileError
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading.average import area_average
from napari_wsigpu.reading.batches import read_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.conversion.options import Outline
    from napari_wsigpu.conversion.plan import Plan
    from napari_wsigpu.model.layout import PyramidLevel
    from napari_wsigpu.slide.slide import Slide

    # Made in any thread, and then given to `write` of what writes the result.
    Job = Callable[[], Sequence["Segment"]]
    Mask = Callable[[NDArray[Any], int, int], NDArray[Any]]

COPIED_AT_ONCE = 256
READERS, BLOCKS_AHEAD = 2, 1


class Block(NamedTuple):
    """Pixels of some tiles of a level.

    Attributes
    ----------
    level : int
        Index of the planned level.
    row, column : int
        Of the upper left one of its tiles.
    pixels : ndarray, shape (height, width, channels)
        Cut to the level.
    """

    level: int
    row: int
    column: int
    pixels: NDArray[Any]


class Segment(NamedTuple):
    """The encoded bytes of one plane of a tile; none where the source lacks them.

    Attributes
    ----------
    level, plane, row, column : int
        Its place; the level is the index of a planned one.
    data : bytes or memoryview
        What is still to be written.
    check : int
        The CRC-32 of what is written of it in all.
    """

    level: int
    plane: int
    row: int
    column: int
    data: bytes | memoryview
    check: int


def copied_segments(
    slide: Slide, plan: Plan, level: int, done: NDArray[np.bool_]
) -> Generator[list[Segment], None, None]:
    """Yield the encoded tiles of a level that are not done, some at a time.

    They are as they lie in the source, less the text in them if its coding says so.

    Raises
    ------
    TileError
        If the source ends before a tile does.
    """
    tiles = np.argwhere(~done)
    coding, plane = plan.levels[level].coding, plan.levels[level].plane
    slide = slide.plane(plane.z, plane.t)

    def read(place: tuple[int, int]) -> list[Segment]:
        batch = [(row, column) for row, column in tiles[place[0] : place[1]].tolist()]
        offsets, counts = segments_of(plan.levels[level], batch).reshape(2, -1).tolist()
        found = slide.read_bytes(list(zip(offsets, counts, strict=True)))
        short = [index for index, data in enumerate(found) if len(data) < counts[index]]
        if short:
            source = plan.levels[level].source.number
            failures = []
            for index in short:
                row, column = batch[index % len(batch)]
                name = f"level {source}, row {row}, column {column}"
                failures.append((name, "the file ends before it does"))
            raise TileError(slide.path, failures)
        if coding is not None and coding.stripped:
            found = [stripped(data, coding.compression) for data in found]
        planes = len(found) // max(1, len(batch))
        return [
            Segment(level, plane, *batch[index], data, crc32(data))
            for index in range(len(batch))
            for plane in range(planes)
            for data in [found[plane * len(batch) + index]]
        ]

    places = [
        (start, min(start + COPIED_AT_ONCE, len(tiles)))
        for start in range(0, len(tiles), COPIED_AT_ONCE)
    ]
    with closing(_ahead(read, places)) as batches:
        yield from batches


def read_blocks(
    slide: Slide, plan: Plan, group: range, done: list[NDArray[np.bool_]]
) -> Generator[Block, None, None]:
    """Yield the blocks of a level, and of those averaged from it, that hold tiles not done.

    Four finer blocks come just before the coarser one that is averaged from them, so that no
    more than four blocks of each level are held at a time.

    Parameters
    ----------
    slide, plan
        What is read, and what is written.
    group : range
        Indices of a planned level and of those that are averaged from it.
    done : list of ndarray of bool
        Of each planned level, which tiles need not be written.
    """
    walk = _Walk(slide, plan, group, done)
    with closing(_ahead(walk.read, walk.leaves())) as leaves:
        walk.blocks_read = leaves
        yield from walk.blocks()


class _Walk:
    def __init__(
        self, slide: Slide, plan: Plan, group: range, done: list[NDArray[np.bool_]]
    ) -> None:
        self._plan = plan
        self._group = group
        first = plan.levels[group.start]
        self._window = first.window
        slide = slide.plane(first.plane.z, first.plane.t)
        self._array = slide.level_array(first.source.number, color=plan.color)
        self._mask = mask_of(slide, first.source, plan.outline)
        rows, columns = first.block
        self._side = rows * first.tile_height, columns * first.tile_width
        self._undone = {
            level: _any_in_blocks(~done[level] & (not plan.levels[level].copied), (rows, columns))
            for level in group
        }
        # A block is needed for its own tiles, or for the coarser one that is averaged from it.
        self._needed = dict(self._undone)
        for level in reversed(group[:-1]):
            coarser = self._needed[level + 1].repeat(2, axis=0).repeat(2, axis=1)
            shape = self._undone[level].shape
            self._needed[level] = self._undone[level] | coarser[: shape[0], : shape[1]]
        self.blocks_read: Iterator[NDArray[Any]] = iter(())

    def leaves(self) -> list[tuple[int, int]]:
        """Return the blocks of the group's first level that are read, in their order."""
        found: list[tuple[int, int]] = []
        for place in np.ndindex(self._needed[self._group[-1]].shape):
            found += self._leaves(self._group[-1], *place)
        return found

    def read(self, place: tuple[int, int]) -> NDArray[Any]:
        """Read a block of the group's first level."""
        top, left = place[0] * self._side[0], place[1] * self._side[1]
        bottom = min(top + self._side[0], self._window.height)
        right = min(left + self._side[1], self._window.width)
        y, x = self._window.top, self._window.left
        pixels = self._array[y + top : y + bottom, x + left : x + right]
        return pixels if self._mask is None else self._mask(pixels, y + top, x + left)

    def blocks(self) -> Iterator[Block]:
        """Yield all blocks that hold tiles to write."""
        for place in np.ndindex(self._needed[self._group[-1]].shape):
            yield from self._visit(self._group[-1], *place)

    def _visit(
        self, level: int, row: int, column: int
    ) -> Generator[Block, None, NDArray[Any] | None]:
        """Yield what is below a block and then itself; return its pixels."""
        pixels: NDArray[Any] | None = None
        if level == self._group.start:
            if not self._needed[level][row, column]:
                return None
            pixels = next(self.blocks_read)
        else:
            size = self._size(level, row, column)
            for finer in self._finer(level, row, column):
                part = yield from self._visit(level - 1, *finer)
                if part is None or not self._needed[level][row, column]:
                    continue
                if pixels is None:
                    pixels = np.empty((*size, self._plan.channels), self._plan.dtype)
                top = finer[0] % 2 * self._side[0] // 2
                left = finer[1] % 2 * self._side[1] // 2
                average = area_average(part, 2, 2)
                pixels[top : top + average.shape[0], left : left + average.shape[1]] = average
        if pixels is not None and self._undone[level][row, column]:
            rows, columns = self._plan.levels[level].block
            yield Block(level, row * rows, column * columns, pixels)
        return pixels

    def _leaves(self, level: int, row: int, column: int) -> Iterator[tuple[int, int]]:
        if level > self._group.start:
            for finer in self._finer(level, row, column):
                yield from self._leaves(level - 1, *finer)
        elif self._needed[level][row, column]:
            yield row, column

    def _finer(self, level: int, row: int, column: int) -> Iterator[tuple[int, int]]:
        rows, columns = self._needed[level - 1].shape
        for y in (2 * row, 2 * row + 1):
            for x in (2 * column, 2 * column + 1):
                if y < rows and x < columns:
                    yield y, x

    def _size(self, level: int, row: int, column: int) -> tuple[int, int]:
        height, width = self._side
        planned = self._plan.levels[level]
        return (
            min(height, planned.height - row * height),
            min(width, planned.width - column * width),
        )


def mask_of(slide: Slide, level: PyramidLevel, outline: Outline | None) -> Mask | None:
    """Return what makes background of pixels of a level outside of an outline, None for none.

    It takes the pixels, and the row and column of the first one on the level.
    """
    if outline is None:
        return None
    rings = [np.array(ring) for ring in outline]
    downsample = level.layout.downsample(slide.layout.levels[0])
    background = slide.layout.background

    def masked(pixels: NDArray[Any], top: int, left: int) -> NDArray[Any]:
        within = inside(rings, Rect(top, left, *pixels.shape[:2]), downsample)
        return np.where(within[..., None], pixels, pixels.dtype.type(background))

    return masked


def _any_in_blocks(tiles: NDArray[np.bool_], block: tuple[int, int]) -> NDArray[np.bool_]:
    """Return for each block of tiles whether it has a true one."""
    down = np.logical_or.reduceat(tiles, np.arange(0, tiles.shape[0], block[0]), axis=0)
    found: NDArray[np.bool_] = np.logical_or.reduceat(
        down, np.arange(0, tiles.shape[1], block[1]), axis=1
    )
    return found


def _ahead(read: Any, places: list[tuple[int, int]]) -> Generator[Any, None, None]:
    yield from read_ahead(
        lambda batch, check: read(batch[0]),
        places,
        batch_size=None,
        num_workers=READERS,
        prefetch_factor=BLOCKS_AHEAD,
    )
