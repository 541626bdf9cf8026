"""Tiles of Zarr arrays, as if they lay uncompressed one after another in one file."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.engine.blocks import Block, blocks, extent
from napari_wsigpu.errors import SlideChangedError, SlideClosedError, file_error
from napari_wsigpu.formats.zarr_array import brief, open_array
from napari_wsigpu.storage.source import Unreadable, join_views

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.formats.layout import LevelLayout, SlideFile, ZarrArray

    Tiles = dict[tuple[int, int], memoryview]


class ZarrSource:
    """Levels and associated images that are Zarr arrays; safe to read from any thread.

    zarr reads and decodes the chunks that tiles lie in, several at the same time. Chunks that do
    not exist have the array's fill value; a tile whose chunks are damaged is `Unreadable`.

    Parameters
    ----------
    path : str
        Path of the slide, for messages.
    images : sequence of LevelLayout
        All that have an array.
    files : sequence of SlideFile
        Their metadata, which must not have changed at any read.
    """

    def __init__(
        self, path: str, images: Sequence[LevelLayout], files: Sequence[SlideFile]
    ) -> None:
        self._path = path
        self._images = sorted(images, key=_begin)
        self._begins = np.array([_begin(image) for image in self._images], np.int64)
        self._files = files
        self._lock = threading.Lock()
        self._arrays: dict[str, Any] = {}
        self._closed = False

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; fewer where its tile ends before."""
        self._check()
        views = [memoryview(b"")] * len(ranges)
        wanted: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        for index, (offset, _) in enumerate(ranges):
            number = int(np.searchsorted(self._begins, offset, "right")) - 1
            tile = self._tile_at(number, offset)
            if tile is not None:
                wanted[number][index] = tile
        for number, tiles in wanted.items():
            image = self._images[number]
            found = self._tiles(image, set(tiles.values()))
            for index, tile in tiles.items():
                offset, length = ranges[index]
                first = offset - int(image.grid.offsets[0, *tile])
                views[index] = found[tile][first : first + length]
        return views

    def read_joined(
        self,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        room: Callable[[int], bytearray] = bytearray,
    ) -> tuple[bytearray, NDArray[np.int64], NDArray[np.int64]]:
        """Read many ranges into one buffer; see `ByteSource.read_joined`."""
        ranges = list(zip(offsets.tolist(), lengths.tolist(), strict=True))
        return join_views(self.read(ranges), room)

    def release(self) -> None:
        """Forget the arrays until the next read; there is no handle."""
        with self._lock:
            self._arrays.clear()

    def close(self) -> None:
        """Read no more."""
        self._closed = True
        self.release()

    def _check(self) -> None:
        if self._closed:
            raise SlideClosedError(f"'{self._path}' was closed; open the slide again.")
        for file in self._files:
            try:
                status = Path(file.path).stat()
            except OSError as error:
                raise file_error(file.path, error) from error
            if (status.st_size, status.st_mtime_ns) != (file.size, file.modified_ns):
                raise SlideChangedError(
                    f"'{self._path}' has changed since it was opened; open the slide again."
                )

    def _tile_at(self, number: int, offset: int) -> tuple[int, int] | None:
        """Return row and column of the tile of an image in which a place lies."""
        if number < 0:
            return None
        image = self._images[number]
        index = (offset - int(self._begins[number])) // image.tile_bytes
        row, column = divmod(index, image.grid.columns)
        return (row, column) if row < image.grid.rows else None

    def _tiles(self, image: LevelLayout, tiles: Collection[tuple[int, int]]) -> Tiles:
        assert image.array is not None
        array = self._array(image.array)
        found: Tiles = {}
        for block in blocks(tiles):
            found |= _read_block(array, image, block)
        return found

    def _array(self, named: ZarrArray) -> Any:
        with self._lock:
            array = self._arrays.get(named.path)
            if array is None:
                array = self._arrays[named.path] = open_array(named.path)
            return array


def _begin(image: LevelLayout) -> int:
    return int(image.grid.offsets[0, 0, 0])


def _read_block(array: Any, image: LevelLayout, block: Block) -> Tiles:
    """Read a rectangle of tiles at once; where that fails, find the tiles that it fails for."""
    rows, columns = extent(image, block)
    try:
        pixels = _pixels(
            array,
            image,
            slice(rows.start, rows.start + rows.length),
            slice(columns.start, columns.start + columns.length),
        )
    except Exception as error:
        # Codecs of damaged chunks raise what they like; other tiles must not suffer from it.
        halves = _halves(block)
        if not halves:
            reason = f"its chunks can't be read ({brief(error)})"
            return {(block.top, block.left): memoryview(Unreadable(reason))}
        return {
            tile: view for half in halves for tile, view in _read_block(array, image, half).items()
        }
    return {tile: _cut(pixels, image, block, *tile) for tile in block.tiles()}


def _halves(block: Block) -> tuple[Block, ...]:
    """Return the halves of a rectangle of tiles; nothing for a single one."""
    if block.bottom - block.top > 1:
        middle = (block.top + block.bottom) // 2
        return block._replace(bottom=middle), block._replace(top=middle)
    if block.right - block.left > 1:
        middle = (block.left + block.right) // 2
        return block._replace(right=middle), block._replace(left=middle)
    return ()


def _pixels(array: Any, image: LevelLayout, rows: slice, columns: slice) -> NDArray[Any]:
    """Return a region of the plane that a level shows, of shape (height, width, channels)."""
    assert image.array is not None
    letters = image.array.axes
    selection = {"y": rows, "x": columns, "c": slice(None)}
    chosen = tuple(
        selection.get(letter, position)
        for letter, position in zip(letters, image.array.position, strict=True)
    )
    pixels = np.asarray(array[chosen])
    kept = [letter for letter in letters if letter in selection]
    pixels = pixels.transpose([kept.index(letter) for letter in "yxc" if letter in kept])
    return pixels if "c" in kept else pixels[..., np.newaxis]


def _cut(
    pixels: NDArray[Any], image: LevelLayout, block: Block, row: int, column: int
) -> memoryview:
    """Return the bytes of a tile of a block, padded with zeros to its full size."""
    grid = image.grid
    top, left = (row - block.top) * grid.tile_height, (column - block.left) * grid.tile_width
    part = pixels[top : top + grid.tile_height, left : left + grid.tile_width]
    shape = (grid.tile_height, grid.tile_width, image.channels)
    new = np.empty if part.shape == shape else np.zeros
    tile = new(shape, image.dtype.newbyteorder("<"))
    inside = tile[: part.shape[0], : part.shape[1]]
    # Planes are interleaved three times as fast one by one.
    for channel in range(image.channels):
        inside[..., channel] = part[..., channel]
    return tile.reshape(-1).view(np.uint8).data
