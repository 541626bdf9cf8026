"""Tiles of Zarr arrays, as if they lay uncompressed one after another in one file."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import imagecodecs
import numpy as np

from napari_wsigpu.model.errors import (
    SlideError,
    UnsupportedArrayError,
    file_error,
)
from napari_wsigpu.model.layout import SHOWN
from napari_wsigpu.storage.buffers import TileMemory
from napari_wsigpu.storage.file import check_unchanged
from napari_wsigpu.storage.readers import closed_error
from napari_wsigpu.storage.remote.connection import MOST_AT_ONCE
from napari_wsigpu.storage.source import DecodedSource, DecodedTile, Unreadable
from napari_wsigpu.storage.zarr.array import brief, open_array
from napari_wsigpu.storage.zarr.chunks import Axis, ChunkFile, encoded, find_chunks
from napari_wsigpu.storage.zarr.guard import decode_blosc
from napari_wsigpu.storage.zarr.server import ServerFolder, ZarrServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Sized

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LevelLayout, SlideFile
    from napari_wsigpu.storage.source import Fill
    from napari_wsigpu.storage.zarr.chunks import Chunk, Encoded

DECODERS: dict[str, Callable[..., Sized]] = {
    "zstd": imagecodecs.zstd_decode,
    "lz4": partial(imagecodecs.lz4_decode, header=True),
    "blosc": decode_blosc,
    "gzip": imagecodecs.gzip_decode,
    "zlib": imagecodecs.zlib_decode,
}
ALGORITHMS = {prefix + name: name for name in DECODERS for prefix in ("", "numcodecs.")}


class _Opened(NamedTuple):
    """An array, and how its chunks are stored unless only zarr can read them."""

    array: Any
    stored: Encoded | None


class ZarrTiles(DecodedSource):
    """Levels and associated images that are Zarr arrays; safe to read from any thread.

    Chunks that do not exist have the array's fill value; a tile whose chunks are damaged is
    `Unreadable`. zarr itself reads those that are stored in a rare way.

    Parameters
    ----------
    path : str
        Path of the slide, for messages; or a title, which then stands for the path of any file.
    images : sequence of LevelLayout
        All that have an array.
    threads : int, optional
        How many tiles are read at the same time; by default as many as there are cores.
    """

    def __init__(
        self, path: str, images: Sequence[LevelLayout], threads: int | None = None
    ) -> None:
        super().__init__(images)
        self._path = path
        self._threads = threads or os.cpu_count()
        self._lock = threading.Lock()
        self._arrays: dict[str, _Opened] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._memory = TileMemory()
        self._closed = False

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; fewer where its tile ends before."""
        self._check()
        tiles = [self._tile_at(offset) for offset, _ in ranges]
        found = self._read_tiles([*dict.fromkeys(tile for tile in tiles if tile is not None)])
        views = []
        for (offset, length), tile in zip(ranges, tiles, strict=True):
            first = 0 if tile is None else offset - tile.begin
            views.append(found[tile][first : first + length] if tile else memoryview(b""))
        return views

    def release(self) -> None:
        """Forget the arrays and join the threads until the next read; there is no handle."""
        with self._lock:
            self._arrays.clear()
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        self._memory.clear()

    def close(self) -> None:
        """Read no more."""
        self._closed = True
        self.release()

    def _check(self) -> None:
        """Make sure that the arrays can be read."""
        if self._closed:
            raise closed_error(self._path)

    def _open(self, path: str) -> _Opened:
        """Open an array by the path that its level names."""
        raise NotImplementedError

    @contextmanager
    def _naming(self, path: str) -> Iterator[None]:
        """Let errors have the slide's title, if it has one, instead of the path of a part of it."""
        try:
            yield
        except Exception as error:
            if path.startswith(self._path):
                raise
            if isinstance(error, OSError) and error.filename:
                error.filename = self._path
                raise
            kind = type(error) if isinstance(error, SlideError) else ValueError
            raise kind(str(error).replace(path, self._path)) from None

    def _opened(self, tile: DecodedTile) -> _Opened:
        assert tile.image.array is not None
        path = tile.image.array.path
        with self._lock:
            found = self._arrays.get(path)
            if found is None:
                with self._naming(path):
                    found = self._arrays[path] = self._open(path)
            return found

    def _read_tiles(self, tiles: Sequence[DecodedTile]) -> dict[DecodedTile, memoryview]:
        """Read whole tiles, several at the same time; one alone needs no thread."""
        opened = [self._opened(tile) for tile in tiles]
        if len(tiles) < 2:
            return dict(zip(tiles, map(self._read_tile, tiles, opened), strict=True))
        with self._lock:
            ZarrTiles._check(self)  # close joins no threads that begin after it
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "wsigpu-zarr")
            views = self._pool.map(self._read_tile, tiles, opened)
        return dict(zip(tiles, views, strict=True))

    def _read_tile(self, tile: DecodedTile, opened: _Opened) -> memoryview:
        view = np.empty(tile.image.tile_bytes, np.uint8).data
        try:
            self._fill(tile, opened, view)
        except ValueError as error:
            return memoryview(Unreadable(str(error)))
        return view

    def _fill(self, tile: DecodedTile, opened: _Opened, view: memoryview) -> int:
        assert tile.image.array is not None
        canvas = _canvas(tile.image, opened.array.dtype, view)
        try:
            with self._naming(tile.image.array.path):
                if opened.stored is not None:
                    with suppress(UnsupportedArrayError):
                        self._read_chunks(tile, opened.array, opened.stored, canvas)
                        return len(view)
                _read_by_zarr(tile, opened.array, canvas)
        except SlideError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise file_error(error.filename or self._path, error) from error
            # Codecs of damaged chunks raise what they like; other tiles must not suffer from it.
            raise ValueError(f"its chunks can't be read ({brief(error)})") from error
        return len(view)

    def _read_chunks(
        self, tile: DecodedTile, array: Any, stored: Encoded, canvas: NDArray[Any]
    ) -> None:
        """Read the chunks that a tile lies in right from their files."""
        axes = _axes(tile)
        chunks, complete = find_chunks(array, stored, axes)
        if len(chunks) == 1 and canvas.shape == stored.chunk and canvas.flags.c_contiguous:
            _decode(chunks[0], stored, canvas.reshape(-1).view(np.uint8))
            return
        if not complete or canvas.shape != tuple(axis.length for axis in axes):
            canvas[...] = _fill_value(array)
        memory = self._memory.take(stored.size)
        for chunk in chunks:
            _decode(chunk, stored, memory)
            pixels = memory.view(stored.dtype).reshape(stored.chunk)
            _paste(canvas[chunk.target], pixels[chunk.inside], tile.image)


class ZarrSource(ZarrTiles):
    """Zarr arrays on disk.

    Parameters
    ----------
    path, images
        As `ZarrTiles` takes them.
    files : sequence of SlideFile
        Their metadata, which must not have changed at any read.
    """

    def __init__(
        self, path: str, images: Sequence[LevelLayout], files: Sequence[SlideFile]
    ) -> None:
        super().__init__(path, images)
        self._files = files

    def fills(self, ranges: Sequence[tuple[int, int]]) -> list[Fill]:
        """Return what reads each whole tile later; see `FillingSource.fills`."""
        self._check()
        tiles = [self._tile_at(offset) for offset, _ in ranges]
        return [partial(self._fill, tile, self._opened(tile)) for tile in tiles if tile is not None]

    def _check(self) -> None:
        super()._check()
        for file in self._files:
            with self._naming(file.path):
                check_unchanged(file, self._path)

    def _open(self, path: str) -> _Opened:
        array, stored = open_array(Path(path)), None
        with suppress(UnsupportedArrayError):
            stored = encoded(array, ALGORITHMS)
        return _Opened(array, stored)


class ZarrServerSource(ZarrTiles):
    """Zarr arrays on a server, of which zarr reads many tiles at the same time.

    Parameters
    ----------
    path, images
        As `ZarrTiles` takes them.
    url : str
        Where the slide is; see `ZarrServer`.
    """

    def __init__(self, path: str, images: Sequence[LevelLayout], url: str) -> None:
        super().__init__(path, images, MOST_AT_ONCE)
        self._server = ZarrServer(url)

    def release(self) -> None:
        """Let go of connection, arrays and threads until the next read; reads in flight fail."""
        self._server.release()
        super().release()

    def close(self) -> None:
        """Read no more."""
        self._server.close()
        super().close()

    def _open(self, path: str) -> _Opened:
        key = path.removeprefix(self._server.name).strip("/")
        return _Opened(open_array(ServerFolder(self._server, key)), None)


def _axes(tile: DecodedTile) -> tuple[Axis, ...]:
    """Return what of each axis of its array lies in a tile."""
    image, rect = tile.image, tile.rect
    assert image.array is not None
    shown = {
        "y": Axis(rect.top, 1, rect.height, kept=True),
        "x": Axis(rect.left, 1, rect.width, kept=True),
        "c": Axis(0, 1, image.channels, kept=True),
    }
    return tuple(
        shown.get(letter, Axis(position, 1, 1, kept=False))
        for letter, position in zip(image.array.axes, image.array.position, strict=True)
    )


def _canvas(image: LevelLayout, dtype: np.dtype[Any], view: memoryview) -> NDArray[Any]:
    """Return a tile's memory as a part of its array, with all axes of that."""
    assert image.array is not None
    letters, grid = image.array.axes, image.grid
    pixels = np.frombuffer(view, dtype.newbyteorder("<"))
    pixels = pixels.reshape(grid.tile_height, grid.tile_width, image.channels)
    if "c" not in letters:
        pixels = pixels[..., 0]
    pixels = pixels.transpose([SHOWN.index(letter) for letter in letters if letter in SHOWN])
    return pixels[tuple(slice(None) if letter in SHOWN else None for letter in letters)]


def _read_by_zarr(tile: DecodedTile, array: Any, canvas: NDArray[Any]) -> None:
    axes = _axes(tile)
    lengths = tuple(axis.length for axis in axes)
    if canvas.shape != lengths:
        canvas[...] = _fill_value(array)
    pixels = array[tuple(slice(axis.start, axis.start + axis.length) for axis in axes)]
    _paste(canvas[tuple(map(slice, lengths))], np.asarray(pixels), tile.image)


def _decode(chunk: Chunk, stored: Encoded, memory: NDArray[np.uint8]) -> None:
    """Read a chunk and decode it into memory of its size."""
    with ChunkFile(chunk.path).reading() as read:
        if stored.algorithm is None:
            read(memory.data, chunk.offset)
            return
        data = np.empty(chunk.size, np.uint8)
        read(data.data, chunk.offset)
    if len(DECODERS[stored.algorithm](data, out=memory)) != stored.size:
        raise UnsupportedArrayError(f"'{chunk.path}' holds less than a chunk")


def _paste(target: NDArray[Any], pixels: NDArray[Any], image: LevelLayout) -> None:
    assert image.array is not None
    axis = image.array.axes.find("c")
    if axis in (-1, target.ndim - 1):
        target[...] = pixels
        return
    # Planes are interleaved three times as fast one by one.
    planes = np.moveaxis(target, axis, 0), np.moveaxis(pixels, axis, 0)
    for plane, values in zip(*planes, strict=True):
        plane[...] = values


def _fill_value(array: Any) -> Any:
    return 0 if array.fill_value is None else array.fill_value
