"""Sources that read uncompressed tiles from Zarr arrays."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import imagecodecs
import numpy as np

from napari_wsigpu.model.errors import SlideError, UnsupportedArrayError, file_error
from napari_wsigpu.model.layout import SHOWN
from napari_wsigpu.model.reasons import codec_reason
from napari_wsigpu.storage.buffers import TileMemory
from napari_wsigpu.storage.file_source import check_unchanged
from napari_wsigpu.storage.readers import closed_error
from napari_wsigpu.storage.remote.connection import MAX_CONCURRENT
from napari_wsigpu.storage.source import DecodedSource, DecodedTile, Unreadable
from napari_wsigpu.storage.zarr.archive import ZipArchive
from napari_wsigpu.storage.zarr.array import open_array
from napari_wsigpu.storage.zarr.chunks import Axis, chunk_encoding, find_chunks, local_files, split
from napari_wsigpu.storage.zarr.guard import decode_blosc
from napari_wsigpu.storage.zarr.server import KeyFolder, ZarrServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Sized

    import zarr

    from napari_wsigpu.model.arrays import Array, ByteArray, DType
    from napari_wsigpu.model.layout import LevelLayout, SlideFile
    from napari_wsigpu.storage.source import Fill
    from napari_wsigpu.storage.zarr.chunks import Chunk, ChunkEncoding, ChunkFiles

DECODERS: dict[str, Callable[..., Sized]] = {
    "zstd": imagecodecs.zstd_decode,
    "lz4": partial(imagecodecs.lz4_decode, header=True),
    "blosc": decode_blosc,
    "gzip": imagecodecs.gzip_decode,
    "zlib": imagecodecs.zlib_decode,
}
ALGORITHMS = {prefix + name: name for name in DECODERS for prefix in ("", "numcodecs.")}


class _OpenArray(NamedTuple):
    """An array; `files` and `encoding` are None if only zarr can read its chunks."""

    array: zarr.Array
    files: ChunkFiles | None = None
    encoding: ChunkEncoding | None = None


class ZarrTiles(DecodedSource):
    """Levels and associated images that are Zarr arrays; safe to read from any thread.

    Chunks that do not exist have the array's fill value. A tile with damaged chunks is
    `Unreadable`. Common encodings are read directly, rare ones by zarr.

    Parameters
    ----------
    path : str
        Path of the slide, or a title that replaces the paths of all its files in messages.
    images : sequence of LevelLayout
        All images of the slide that are arrays.
    threads : int, optional
        Number of tiles to read at the same time; by default the number of cores.
    """

    def __init__(self, path: str, images: Sequence[LevelLayout], threads: int = 0) -> None:
        super().__init__(images)
        self._path = path
        self._threads = threads or os.cpu_count()
        self._lock = threading.Lock()  # guards `_arrays` and `_pool`
        self._arrays: dict[str, _OpenArray] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._memory = TileMemory()
        self._closed = False

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; fewer at the end of a tile."""
        self._check()
        tiles = [self._tile_at(offset) for offset, _ in ranges]
        found = self._read_tiles([*dict.fromkeys(tile for tile in tiles if tile is not None)])
        views = []
        for (offset, length), tile in zip(ranges, tiles, strict=True):
            first = 0 if tile is None else offset - tile.start
            views.append(found[tile][first : first + length] if tile else memoryview(b""))
        return views

    def release(self) -> None:
        """Close the arrays and join the threads; the next read reopens them."""
        with self._lock:
            self._arrays.clear()
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        self._memory.clear()

    def close(self) -> None:
        """Release everything, and refuse further reads."""
        self._closed = True
        self.release()

    def _check(self) -> None:
        """Raise an error if the arrays can no longer be read."""
        if self._closed:
            raise closed_error(self._path)

    def _open(self, path: str) -> _OpenArray:
        """Open the array at the path in its level's layout."""
        raise NotImplementedError

    @contextmanager
    def _hide_path(self, path: str) -> Iterator[None]:
        """Replace the path of an array in error messages with the slide's title, if it has one."""
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

    def _opened(self, tile: DecodedTile) -> _OpenArray:
        assert tile.image.array is not None
        path = tile.image.array.path
        with self._lock:
            found = self._arrays.get(path)
            if found is None:
                with self._hide_path(path):
                    found = self._arrays[path] = self._open(path)
            return found

    def _read_tiles(self, tiles: Sequence[DecodedTile]) -> dict[DecodedTile, memoryview]:
        """Read whole tiles in the thread pool; a single tile is read by the calling thread."""
        opened = [self._opened(tile) for tile in tiles]
        if len(tiles) < 2:
            return dict(zip(tiles, map(self._read_tile, tiles, opened), strict=True))
        with self._lock:
            # `close` would not join a pool that is created after it.
            ZarrTiles._check(self)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "wsigpu-zarr")
            views = self._pool.map(self._read_tile, tiles, opened)
        return dict(zip(tiles, views, strict=True))

    def _read_tile(self, tile: DecodedTile, opened: _OpenArray) -> memoryview:
        view = np.empty(tile.image.tile_bytes, np.uint8).data
        try:
            self._fill(tile, opened, view)
        except ValueError as error:
            return memoryview(Unreadable(str(error)))
        return view

    def _fill(self, tile: DecodedTile, opened: _OpenArray, view: memoryview) -> int:
        """Read a tile into a view; with its first two arguments bound, this method is a `Fill`."""
        assert tile.image.array is not None
        canvas = _canvas(tile.image, opened.array.dtype, view)
        try:
            with self._hide_path(tile.image.array.path):
                if opened.files is not None and opened.encoding is not None:
                    with suppress(UnsupportedArrayError):
                        self._read_chunks(tile, opened.array, opened.files, opened.encoding, canvas)
                        return len(view)
                _read_with_zarr(tile, opened.array, canvas)
        except SlideError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise file_error(error.filename or self._path, error) from error
            # Codecs raise arbitrary exceptions for damaged chunks; other tiles must still be read.
            damaged = _damaged_chunk(tile, opened.array)
            which = "chunks" if damaged is None else f"chunk {damaged}"
            raise ValueError(f"its {which} can't be read ({codec_reason(error)})") from error
        return len(view)

    def _read_chunks(
        self,
        tile: DecodedTile,
        array: zarr.Array,
        files: ChunkFiles,
        encoding: ChunkEncoding,
        canvas: Array,
    ) -> None:
        """Read the chunks that intersect a tile directly from their files."""
        axes = _axes(tile)
        chunks, complete = find_chunks(array, encoding, axes, files)
        if len(chunks) == 1 and canvas.shape == encoding.chunk and canvas.flags.c_contiguous:
            _decode(files, chunks[0], encoding, canvas.reshape(-1).view(np.uint8))
            return
        if not complete or canvas.shape != tuple(axis.length for axis in axes):
            canvas[...] = _fill_value(array)
        memory = self._memory.allocate(encoding.size)
        for chunk in chunks:
            _decode(files, chunk, encoding, memory)
            pixels = memory.view(encoding.dtype).reshape(encoding.chunk)
            _paste(canvas[chunk.target], pixels[chunk.inside], tile.image)


class ZarrSource(ZarrTiles):
    """Zarr arrays on disk.

    Parameters
    ----------
    path, images
        See `ZarrTiles`.
    files : sequence of SlideFile
        The metadata files, which each read checks for changes.
    """

    def __init__(
        self, path: str, images: Sequence[LevelLayout], files: Sequence[SlideFile]
    ) -> None:
        super().__init__(path, images)
        self._files = files

    def fills(self, ranges: Sequence[tuple[int, int]]) -> list[Fill]:
        """Return one function per tile, which reads the whole tile; see `FillingSource.fills`."""
        self._check()
        tiles = [self._tile_at(offset) for offset, _ in ranges]
        return [partial(self._fill, tile, self._opened(tile)) for tile in tiles if tile is not None]

    def _check(self) -> None:
        super()._check()
        for file in self._files:
            with self._hide_path(file.path):
                check_unchanged(file, self._path)

    def _open(self, path: str) -> _OpenArray:
        array = open_array(Path(path))
        return _with_encoding(array, local_files(array))


class ZarrArchiveSource(ZarrTiles):
    """Zarr arrays in a ZIP file; all reads share one handle to it.

    Parameters
    ----------
    path, images
        See `ZarrTiles`.
    file : SlideFile
        The archive, which each read checks for changes.
    """

    def __init__(self, path: str, images: Sequence[LevelLayout], file: SlideFile) -> None:
        super().__init__(path, images)
        self._archive = ZipArchive(file)

    def fills(self, ranges: Sequence[tuple[int, int]]) -> list[Fill]:
        """Return one function per tile, which reads the whole tile; see `FillingSource.fills`."""
        self._check()
        tiles = [self._tile_at(offset) for offset, _ in ranges]
        return [partial(self._fill, tile, self._opened(tile)) for tile in tiles if tile is not None]

    def release(self) -> None:
        """Close the archive and join the threads; the next read reopens it."""
        super().release()
        self._archive.release()

    def close(self) -> None:
        """Release everything, and refuse further reads."""
        super().close()
        self._archive.close()

    def _check(self) -> None:
        super()._check()
        with self._hide_path(self._archive.name):
            self._archive.check()

    def _open(self, path: str) -> _OpenArray:
        key = path.removeprefix(self._archive.name).strip("/")
        array = open_array(KeyFolder(self._archive, key))
        return _with_encoding(array, self._archive.files(key))


class ZarrServerSource(ZarrTiles):
    """Zarr arrays on a server; zarr reads many tiles concurrently.

    Parameters
    ----------
    path, images
        See `ZarrTiles`.
    url : str
        URL of the slide; see `ZarrServer`.
    """

    def __init__(self, path: str, images: Sequence[LevelLayout], url: str) -> None:
        super().__init__(path, images, MAX_CONCURRENT)
        self._server = ZarrServer(url)

    def release(self) -> None:
        """Release connections, arrays and threads; the next read reopens them.

        Reads in progress fail.
        """
        self._server.release()
        super().release()

    def close(self) -> None:
        """Release everything, and refuse further reads; reads in progress fail."""
        self._server.close()
        super().close()

    def _open(self, path: str) -> _OpenArray:
        key = path.removeprefix(self._server.name).strip("/")
        return _OpenArray(open_array(KeyFolder(self._server, key)))


def _with_encoding(array: zarr.Array, files: ChunkFiles) -> _OpenArray:
    with suppress(UnsupportedArrayError):
        return _OpenArray(array, files, chunk_encoding(array, ALGORITHMS))
    return _OpenArray(array)


def _axes(tile: DecodedTile) -> tuple[Axis, ...]:
    """Return the positions along each axis of the array that a tile covers."""
    image, rect = tile.image, tile.rect
    assert image.array is not None
    first = image.array.position[image.array.axes.index("c")] if "c" in image.array.axes else 0
    shown = {
        "y": Axis(rect.top, 1, rect.height, kept=True),
        "x": Axis(rect.left, 1, rect.width, kept=True),
        "c": Axis(first, 1, image.channels, kept=True),
    }
    return tuple(
        shown.get(letter, Axis(position, 1, 1, kept=False))
        for letter, position in zip(image.array.axes, image.array.position, strict=True)
    )


def _canvas(image: LevelLayout, dtype: DType, view: memoryview) -> Array:
    """View a tile's memory, laid out as (height, width, channels), with the axes of its array."""
    assert image.array is not None
    letters, grid = image.array.axes, image.grid
    pixels = np.frombuffer(view, dtype.newbyteorder("<"))
    pixels = pixels.reshape(grid.tile_height, grid.tile_width, image.channels)
    if "c" not in letters:
        pixels = pixels[..., 0]
    pixels = pixels.transpose([SHOWN.index(letter) for letter in letters if letter in SHOWN])
    return pixels[tuple(slice(None) if letter in SHOWN else None for letter in letters)]


def _read_with_zarr(tile: DecodedTile, array: zarr.Array, canvas: Array) -> None:
    axes = _axes(tile)
    lengths = tuple(axis.length for axis in axes)
    if canvas.shape != lengths:
        canvas[...] = _fill_value(array)
    pixels = array[tuple(slice(axis.start, axis.start + axis.length) for axis in axes)]
    _paste(canvas[tuple(map(slice, lengths))], np.asarray(pixels), tile.image)


def _damaged_chunk(tile: DecodedTile, array: zarr.Array) -> tuple[int, ...] | None:
    """Return the index of a tile's first chunk that zarr can't read; None if it reads all of them.

    A tile covers several chunks if these are small.
    """
    splits = [split(axis, size) for axis, size in zip(_axes(tile), array.chunks, strict=True)]
    for parts in product(*splits):
        index = tuple(number for number, _, _ in parts)
        first = (
            number * size + inside.start
            for (number, inside, _), size in zip(parts, array.chunks, strict=True)
        )
        try:
            array[tuple(slice(start, start + 1) for start in first)]
        except Exception:  # codecs raise arbitrary exceptions
            return index
    return None


def _decode(files: ChunkFiles, chunk: Chunk, encoding: ChunkEncoding, memory: ByteArray) -> None:
    """Read a chunk, and decode it into memory of the decoded size."""
    with files.open_reader(chunk.path) as read:
        if encoding.algorithm is None:
            read(memory.data, chunk.offset)
            return
        data = np.empty(chunk.size, np.uint8)
        read(data.data, chunk.offset)
    if len(DECODERS[encoding.algorithm](data, out=memory)) != encoding.size:
        raise UnsupportedArrayError(f"'{chunk.path}' contains less than a chunk")


def _paste(target: Array, pixels: Array, image: LevelLayout) -> None:
    assert image.array is not None
    axis = image.array.axes.find("c")
    if axis in (-1, target.ndim - 1):
        target[...] = pixels
        return
    # Copying plane by plane is three times as fast as one transposed copy.
    planes = np.moveaxis(target, axis, 0), np.moveaxis(pixels, axis, 0)
    for plane, values in zip(*planes, strict=True):
        plane[...] = values


def _fill_value(array: zarr.Array) -> np.generic | int:
    return 0 if array.fill_value is None else array.fill_value
