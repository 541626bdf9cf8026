"""Read a slide for a conversion: each stored pixel once, averaging coarser levels along the way."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from napari_wsigpu.annotations.masks import rings_mask
from napari_wsigpu.conversion.checksum import crc32
from napari_wsigpu.conversion.conversion_plan import segments_of
from napari_wsigpu.conversion.redaction import redact
from napari_wsigpu.model.errors import TileError
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.model.tags import COMPRESSION
from napari_wsigpu.reading.average import area_average
from napari_wsigpu.reading.batches import read_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from napari_wsigpu.conversion.conversion_plan import Plan
    from napari_wsigpu.conversion.options import Outline
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.geometry import Mask, Pair
    from napari_wsigpu.model.layout import PyramidLevel
    from napari_wsigpu.slide.slide import Slide

    # Encodes tiles in any thread; the calling thread passes the result to the target's `write`.
    Job = Callable[[], Sequence["Segment"]]
    Masking = Callable[[Array, int, int], Array]

Item = TypeVar("Item")
Result = TypeVar("Result")

COPIED_AT_ONCE = 256
READERS, BLOCKS_AHEAD = 2, 1


class Block(NamedTuple):
    """Decoded pixels of a rectangle of tiles.

    Attributes
    ----------
    level : int
        Index of the planned level.
    row, column : int
        Row and column of the upper left tile.
    pixels : ndarray, shape (height, width, channels)
        The pixels, cropped to the level.
    """

    level: int
    row: int
    column: int
    pixels: Array


class Segment(NamedTuple):
    """The encoded bytes of one plane of a tile; empty if the source lacks the tile.

    Attributes
    ----------
    level, plane, row, column : int
        Position of the segment; `level` is the index of the planned level.
    data : bytes or memoryview
        Bytes to append to the target; empty if the job has written them already.
    check : int
        CRC-32 of all bytes written for the segment.
    """

    level: int
    plane: int
    row: int
    column: int
    data: bytes | memoryview
    check: int


def copied_segments(slide: Slide, plan: Plan, level: int, done: Mask) -> Generator[list[Segment]]:
    """Yield batches of a level's encoded tiles that are not done yet.

    The bytes are unchanged, except that text is redacted if the level's coding requires it.

    Raises
    ------
    TileError
        If the source ends within a tile.
    """
    tiles = np.argwhere(~done)
    coding, plane = plan.levels[level].coding, plan.levels[level].plane
    slide = slide.plane(plane.z, plane.t)
    is_raw = coding is not None and coding.compression == COMPRESSION.NONE
    is_exact = is_raw or slide.layout.has_tile_sizes

    def read(start: int) -> list[Segment]:
        part = tiles[start : start + COPIED_AT_ONCE]
        batch = [(row, column) for row, column in part.tolist()]
        offsets, counts = segments_of(plan.levels[level], batch).reshape(2, -1).tolist()
        found = slide.read_bytes(list(zip(offsets, counts, strict=True)))
        short = [
            index
            for index, data in enumerate(found)
            if len(data) < (counts[index] if is_exact else 1)
        ]
        if short:
            source = plan.levels[level].source.number
            cut = (batch[index % len(batch)] for index in short)
            names = (f"level {source}, row {row}, column {column}" for row, column in cut)
            raise TileError(slide.path, [(name, "the file ends within it") for name in names])
        if coding is not None and coding.redacted:
            found = [redact(data, coding.compression) for data in found]
        return [
            Segment(level, plane, *tile, data, crc32(data))
            for index, tile in enumerate(batch)
            for plane, data in enumerate(found[index :: len(batch)])
        ]

    parts = range(0, len(tiles), COPIED_AT_ONCE)
    with closing(_prefetch(read, parts)) as batches:
        yield from batches


def read_blocks(slide: Slide, plan: Plan, group: range, done: list[Mask]) -> Generator[Block]:
    """Yield the blocks with unfinished tiles of a level and of the levels averaged from it.

    Each coarser block follows the four finer blocks that it averages, so at most four blocks per
    level are in memory.

    Parameters
    ----------
    slide, plan
        The slide, and the plan of its conversion.
    group : range
        Indices of a planned level and of the levels averaged from it.
    done : list of ndarray of bool
        Mask of finished tiles for each planned level.
    """
    walk = _Walk(slide, plan, group, done)
    with closing(_prefetch(walk.read, walk.leaves())) as leaves:
        walk.blocks_read = leaves
        yield from walk.blocks()


class _Walk:
    """A depth-first walk over the quadtree of blocks of a group, reading leaves from the slide."""

    def __init__(self, slide: Slide, plan: Plan, group: range, done: list[Mask]) -> None:
        self._plan = plan
        self._group = group
        first = plan.levels[group.start]
        self._window = first.window
        slide = slide.plane(first.plane.z, first.plane.t)
        self._array = slide.level_array(first.source.number, color=plan.color)
        self._mask = outline_mask(slide, first.source, plan.outline)
        rows, columns = first.block
        self._side = rows * first.tile_height, columns * first.tile_width
        self._undone = {
            level: _any_per_block(~done[level] & (not plan.levels[level].copied), (rows, columns))
            for level in group
        }
        # A block is needed for its own tiles, or for the coarser block that averages it.
        self._needed = dict(self._undone)
        for level in reversed(group[:-1]):
            coarser = self._needed[level + 1].repeat(2, axis=0).repeat(2, axis=1)
            shape = self._undone[level].shape
            self._needed[level] = self._undone[level] | coarser[: shape[0], : shape[1]]
        self.blocks_read: Iterator[Array] = iter(())

    def leaves(self) -> list[Pair]:
        """Return the blocks of the group's first level to read, in the order of the walk."""
        found: list[Pair] = []
        for block in np.ndindex(self._needed[self._group[-1]].shape):
            found += self._leaves(self._group[-1], *block)
        return found

    def read(self, block: Pair) -> Array:
        """Read the pixels of a block (row, column) of the group's first level."""
        top, left = block[0] * self._side[0], block[1] * self._side[1]
        bottom = min(top + self._side[0], self._window.height)
        right = min(left + self._side[1], self._window.width)
        y, x = self._window.top, self._window.left
        pixels = self._array[y + top : y + bottom, x + left : x + right]
        return pixels if self._mask is None else self._mask(pixels, y + top, x + left)

    def blocks(self) -> Iterator[Block]:
        """Yield all blocks that contain tiles to write."""
        for block in np.ndindex(self._needed[self._group[-1]].shape):
            yield from self._visit(self._group[-1], *block)

    def _visit(self, level: int, row: int, column: int) -> Generator[Block, None, Array | None]:
        """Yield the finer blocks of a block, then the block itself; return its pixels."""
        pixels: Array | None = None
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

    def _leaves(self, level: int, row: int, column: int) -> Iterator[Pair]:
        if level > self._group.start:
            for finer in self._finer(level, row, column):
                yield from self._leaves(level - 1, *finer)
        elif self._needed[level][row, column]:
            yield row, column

    def _finer(self, level: int, row: int, column: int) -> Iterator[Pair]:
        rows, columns = self._needed[level - 1].shape
        for y in (2 * row, 2 * row + 1):
            for x in (2 * column, 2 * column + 1):
                if y < rows and x < columns:
                    yield y, x

    def _size(self, level: int, row: int, column: int) -> Pair:
        height, width = self._side
        planned = self._plan.levels[level]
        bottom, right = planned.height - row * height, planned.width - column * width
        return min(height, bottom), min(width, right)


def outline_mask(
    slide: Slide, level: PyramidLevel, outline: Outline | None, blank: float | None = None
) -> Masking | None:
    """Return a function that fills pixels outside an outline with `blank`, or with background.

    The function takes pixels, and the row and column of the upper left pixel in the level. Without
    an outline, the result is None.
    """
    if outline is None:
        return None
    rings = [np.array(ring) for ring in outline]
    downsample = level.layout.downsample(slide.layout.levels[0])
    background = slide.layout.background if blank is None else blank

    def masked(pixels: Array, top: int, left: int) -> Array:
        within = rings_mask(rings, Rect(top, left, *pixels.shape[:2]), downsample)
        return np.where(within[..., None], pixels, pixels.dtype.type(background))

    return masked


def _any_per_block(tiles: Mask, block: Pair) -> Mask:
    """Return a mask of the blocks in which any tile is set, shape (block rows, block columns)."""
    down = np.logical_or.reduceat(tiles, np.arange(0, tiles.shape[0], block[0]), axis=0)
    found: Mask = np.logical_or.reduceat(down, np.arange(0, tiles.shape[1], block[1]), axis=1)
    return found


def _prefetch(read: Callable[[Item], Result], parts: Iterable[Item]) -> Generator[Result]:
    yield from read_ahead(
        lambda batch, check: read(batch[0]),
        parts,
        batch_size=None,
        num_workers=READERS,
        prefetch_factor=BLOCKS_AHEAD,
    )
