"""Find the chunks of Zarr arrays in local files, and the part of a selection that each fills."""

from __future__ import annotations

import math
import operator
import os
import stat
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from io import FileIO
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from napari_wsigpu.model.errors import RegionError, UnsupportedArrayError
from napari_wsigpu.storage.file_reads import PAGE, FileReads
from napari_wsigpu.storage.file_source import Run, join_ranges
from napari_wsigpu.storage.zarr.guard import CHECKSUM, CHECKSUM_BYTES, MISSING, SHARDING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import EllipsisType

    import zarr
    from numpy.typing import NDArray

    from napari_wsigpu.model.arrays import DType
    from napari_wsigpu.storage.zarr.guard import Document

    Item = int | slice | EllipsisType
    Selection = Item | tuple[Item, ...]

NUMERIC_KINDS = "biufc"  # of NumPy
# A process may have 1024 files open by default. kvikio opens each file twice, and two batches are
# read at the same time.
MAX_CHUNKS = 128
INDEX_CODECS = ["bytes", CHECKSUM]
# Codec names in the metadata, and their names in nvCOMP.
NVCOMP = {"zstd": "Zstd", "lz4": "LZ4", "numcodecs.zstd": "Zstd", "numcodecs.lz4": "LZ4"}


class Axis(NamedTuple):
    """The selected positions along one axis of an array.

    Attributes
    ----------
    start, step, length : int
        The positions are ``start``, ``start + step``, ...; the step is positive.
    kept : bool
        Whether the result has this axis; an integer index removes it.
    """

    start: int
    step: int
    length: int
    kept: bool


class ChunkEncoding(NamedTuple):
    """How the chunks of an array are encoded and stored.

    Attributes
    ----------
    chunk : tuple of int
        Shape of a chunk: the unit of compression.
    dtype : numpy.dtype
        Type of the samples, in native byte order.
    algorithm : str or None
        The reader's name for the codec; None for uncompressed chunks.
    shard : tuple of int or None
        Shape of a shard, if a file contains several chunks.
    index_first : bool
        Whether the index of a shard is at the start of the file, rather than at the end.
    """

    chunk: tuple[int, ...]
    dtype: DType
    algorithm: str | None
    shard: tuple[int, ...] | None = None
    index_first: bool = False

    @property
    def size(self) -> int:
        """Size of a decoded chunk in bytes."""
        return math.prod(self.chunk) * self.dtype.itemsize


class Chunk(NamedTuple):
    """A chunk that intersects a selection.

    Attributes
    ----------
    path : str
        The file that contains it.
    offset, size : int
        Position of the chunk in that file, and its encoded size in bytes.
    inside : tuple of slice
        The selected part of the chunk.
    target : tuple of slice
        Position of that part in the result, before axes are removed.
    """

    path: str
    offset: int
    size: int
    inside: tuple[slice, ...]
    target: tuple[slice, ...]


class Location(NamedTuple):
    """Byte range of a chunk file: the file on disk that holds it, its offset and its size."""

    path: str
    start: int
    size: int


class ChunkFiles(NamedTuple):
    """The files of an array's chunks.

    Attributes
    ----------
    locate : callable
        ``locate(key)`` returns the `Location` of the file with this name in the array's folder;
        None if there is none.
    open_reader : callable
        ``open_reader(path)`` returns a context manager that yields ``read(view, offset)``, which
        fills a view with the bytes of the file at a path.
    """

    locate: Callable[[str], Location | None]
    open_reader: Callable[[str], AbstractContextManager[Callable[[memoryview, int], None]]]


def local_files(array: zarr.Array) -> ChunkFiles:
    """Return the files of an array in a local folder.

    Raises
    ------
    UnsupportedArrayError
        If it is not in a local folder.
    """
    if not isinstance(array.store, import_module("zarr.storage").LocalStore):
        raise UnsupportedArrayError("the array is not in a local folder")
    root = os.path.join(array.store.root, array.path)  # noqa: PTH118 - there may be many chunks
    return ChunkFiles(partial(_local_file, root), lambda path: ChunkFile(path).open_reader())


def _local_file(root: str, key: str) -> Location | None:
    path = f"{root}/{key}"
    try:
        status = os.stat(path)  # noqa: PTH116 - there may be many
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its other end
        raise ValueError(f"'{path}' is not a regular file")
    return Location(path, 0, status.st_size)


class ChunkFile:
    """A file of chunks, opened for each read; see `Readable`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def checked_path(self) -> str:
        """Return the path; a chunk file has no recorded version to check it against."""
        return self._path

    @contextmanager
    def open_reader(self) -> Iterator[Callable[[memoryview, int], None]]:
        """Open the file; yield ``read(view, offset)``, which fills the view."""
        with FileIO(self._path) as file:

            def read(view: memoryview, offset: int) -> None:
                file.seek(offset)
                while view:
                    count = file.readinto(view)
                    if not count:
                        raise EOFError(f"'{self._path}' ends early")
                    view = view[count:]

            yield read


def axes_of(selection: Selection, shape: Sequence[int]) -> tuple[Axis, ...]:
    """Return the positions along each axis of an array that a basic selection contains.

    Raises
    ------
    RegionError
        If the selection is out of bounds, or contains anything but integers, slices with positive
        steps, and one ellipsis.
    """
    items = selection if isinstance(selection, tuple) else (selection,)
    ellipses = [number for number, item in enumerate(items) if item is Ellipsis]
    if not ellipses:
        items, ellipses = (*items, Ellipsis), [len(items)]
    missing = len(shape) - len(items) + 1
    if len(ellipses) > 1 or missing < 0:
        raise RegionError(f"The selection {selection!r} does not fit an array of shape {shape}.")
    whole = (slice(None),) * missing
    items = (*items[: ellipses[0]], *whole, *items[ellipses[0] + 1 :])
    return tuple(_axis(item, size) for item, size in zip(items, shape, strict=True))


def _axis(item: Item, size: int) -> Axis:
    try:
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step < 0:
                raise RegionError(f"Slices with negative steps, such as {item!r}, can't be read.")
            return Axis(start, step, len(range(start, stop, step)), kept=True)
        index = operator.index(cast("int", item))
    except (TypeError, ValueError):
        raise RegionError(
            f"{item!r} can't be part of a selection; use integers, slices and one ellipsis."
        ) from None
    if not -size <= index < size:
        raise RegionError(f"Index {index} is out of range for an axis of size {size}.")
    return Axis(index % size, 1, 1, kept=False)


def chunk_encoding(array: zarr.Array, algorithms: Mapping[str, str] = NVCOMP) -> ChunkEncoding:
    """Return how the chunks of an array are stored in files.

    Parameters
    ----------
    array : zarr.Array
        The array.
    algorithms : Mapping of str to str
        Codecs that the reader supports: the reader's name for each, by its name in the metadata.

    Raises
    ------
    UnsupportedArrayError
        If the chunks are stored in a way that only zarr can read.
    """
    dtype = np.dtype(array.dtype)
    if dtype.kind not in NUMERIC_KINDS:
        raise UnsupportedArrayError(f"its samples are of type {dtype}")
    metadata = array.metadata.to_dict()
    if array.metadata.zarr_format == 2:
        return _chunk_encoding_v2(metadata, dtype, algorithms)
    grid = metadata["chunk_grid"]
    if grid["name"] != "regular":
        raise UnsupportedArrayError(f"its chunk grid is {grid['name']}")
    outer = tuple(grid["configuration"]["chunk_shape"])
    codecs = list(metadata["codecs"])
    if [codec["name"] for codec in codecs] == [SHARDING]:
        sharding = codecs[0]["configuration"]
        index = [codec["name"] for codec in sharding["index_codecs"]]
        if index != INDEX_CODECS or not _is_little(sharding["index_codecs"][0], "big"):
            raise UnsupportedArrayError("the encoding of its shards' index is not supported")
        algorithm = _algorithm(sharding["codecs"], dtype, algorithms)
        inner = tuple(sharding["chunk_shape"])
        index_first = sharding["index_location"] == "start"
        return ChunkEncoding(inner, dtype.newbyteorder("="), algorithm, outer, index_first)
    return ChunkEncoding(outer, dtype.newbyteorder("="), _algorithm(codecs, dtype, algorithms))


def _chunk_encoding_v2(
    metadata: Document, dtype: DType, algorithms: Mapping[str, str]
) -> ChunkEncoding:
    compressor = metadata["compressor"]
    name = compressor["id"] if compressor else None
    if metadata["filters"]:
        raise UnsupportedArrayError("it has filters")
    if metadata["order"] != "C":
        raise UnsupportedArrayError("its chunks are in Fortran order")
    if not dtype.isnative:
        raise UnsupportedArrayError("its samples are not in native byte order")
    if name is not None and name not in algorithms:
        raise UnsupportedArrayError(f"its chunks are compressed with {name}")
    return ChunkEncoding(tuple(metadata["chunks"]), dtype, algorithms[name] if name else None)


def _algorithm(
    codecs: Sequence[Document], dtype: DType, algorithms: Mapping[str, str]
) -> str | None:
    names = [codec["name"] for codec in codecs]
    if not names or names[0] != "bytes" or len(names) > 2:
        raise UnsupportedArrayError(f"its codecs are {', '.join(names) or 'missing'}")
    if dtype.itemsize > 1 and not _is_little(codecs[0], "little"):
        raise UnsupportedArrayError("its samples are not in native byte order")
    if len(names) == 1:
        return None
    if names[1] not in algorithms:
        raise UnsupportedArrayError(f"its chunks are compressed with {names[1]}")
    return algorithms[names[1]]


def _is_little(codec: Document, default: str) -> bool:
    endian: str = codec.get("configuration", {}).get("endian", default)
    return endian == "little"


def find_chunks(
    array: zarr.Array, encoding: ChunkEncoding, axes: Sequence[Axis], files: ChunkFiles
) -> tuple[list[Chunk], bool]:
    """Find the chunks of an array that intersect a selection.

    Parameters
    ----------
    array : zarr.Array
        The array.
    encoding : ChunkEncoding
        The result of `chunk_encoding` for it.
    axes : sequence of Axis
        The selection.
    files : ChunkFiles
        The array's files.

    Returns
    -------
    list of Chunk
        The chunks that exist.
    bool
        Whether all exist; missing ones have the array's fill value.

    Raises
    ------
    UnsupportedArrayError
        If the size of a file is wrong, or the index of a shard is damaged. Let zarr read the file:
        its error is more precise.
    """
    outer = encoding.shard or encoding.chunk
    chunks: list[Chunk] = []
    complete = True
    splits = [split(axis, size) for axis, size in zip(axes, encoding.chunk, strict=True)]
    indices: dict[tuple[int, ...], ChunkIndex | None] = {}
    for parts in product(*splits):
        position = tuple(part[0] for part in parts)
        file = tuple(
            number * inner // size
            for number, inner, size in zip(position, encoding.chunk, outer, strict=True)
        )
        if file not in indices:
            key = array.metadata.encode_chunk_key(file)
            indices[file] = _read_index(files, key, encoding)
        index = indices[file]
        found = None if index is None else index.find(position)
        if index is None or found is None:
            complete = False
            continue
        inside = tuple(part[1] for part in parts)
        target = tuple(part[2] for part in parts)
        chunks.append(Chunk(index.file.path, *found, inside, target))
    return chunks, complete


def split(axis: Axis, size: int) -> list[tuple[int, slice, slice]]:
    """Split an axis at chunk boundaries.

    Returns
    -------
    list of (int, slice, slice)
        Number of each chunk, its selected part, and the position of that part in the result.
    """
    if not axis.length:
        return []
    last = axis.start + axis.step * (axis.length - 1)
    parts = []
    for number in range(axis.start // size, last // size + 1):
        first = max(0, -(-(number * size - axis.start) // axis.step))
        past = min(axis.length, -(-((number + 1) * size - axis.start) // axis.step))
        if first < past:
            start = axis.start + axis.step * first - number * size
            stop = start + axis.step * (past - first - 1) + 1
            parts.append((number, slice(start, stop, axis.step), slice(first, past)))
    return parts


class ChunkIndex(NamedTuple):
    """The positions of chunks in one file.

    Attributes
    ----------
    file : Location
        The file.
    table : ndarray of uint64, shape (chunks along each axis ..., 2), or None
        Offset and size of each chunk of a shard; None if the whole file is one chunk.
    """

    file: Location
    table: NDArray[np.uint64] | None = None

    def find(self, chunk: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the offset and size of a chunk; None if it is missing."""
        if self.table is None:
            return self.file.start, self.file.size
        counts = self.table.shape
        inside = tuple(number % count for number, count in zip(chunk, counts, strict=False))
        offset, size = self.table[inside].tolist()
        return None if offset == size == MISSING else (self.file.start + offset, size)


def _read_index(files: ChunkFiles, key: str, encoding: ChunkEncoding) -> ChunkIndex | None:
    """Return the positions of chunks in a file; None if there is no file."""
    file = files.locate(key)
    if file is None:
        return None
    table, present = None, [[0, file.size]]
    if encoding.shard is not None:
        counts = [n // m for n, m in zip(encoding.shard, encoding.chunk, strict=True)]
        table = _read_table(files, file, (*counts, 2), first=encoding.index_first)
        present = table[table[..., 0] != MISSING].tolist()
    raw = encoding.algorithm is None
    if any(
        offset + size > file.size or (size != encoding.size if raw else not size)
        for offset, size in present
    ):
        raise UnsupportedArrayError(f"the size of '{file.path}' does not match its chunks")
    return ChunkIndex(file, table)


def _read_table(
    files: ChunkFiles, file: Location, shape: tuple[int, ...], *, first: bool
) -> NDArray[np.uint64]:
    size = math.prod(shape) * np.dtype(np.uint64).itemsize
    if file.size < size + CHECKSUM_BYTES:
        raise UnsupportedArrayError(f"'{file.path}' is shorter than the index of a shard")
    data = bytearray(size + CHECKSUM_BYTES)
    with files.open_reader(file.path) as read:
        read(memoryview(data), file.start + (0 if first else file.size - len(data)))
    checksum = import_module("google_crc32c").value(bytes(data[:size]))
    if checksum != int.from_bytes(data[size:], "little"):
        raise UnsupportedArrayError(f"the index of '{file.path}' is damaged")
    return np.frombuffer(data, "<u8", size // 8).reshape(shape)


def plan_reads(chunks: Sequence[Chunk]) -> tuple[FileReads, list[int]]:
    """Plan to read chunks into one buffer.

    Returns
    -------
    FileReads
        The plan, aligned to pages.
    list of int
        Position of each chunk in the buffer.
    """
    files: dict[str, list[int]] = {}
    for number, chunk in enumerate(chunks):
        files.setdefault(chunk.path, []).append(number)
    reads: list[tuple[ChunkFile, list[Run]]] = []
    starts = [0] * len(chunks)
    end = 0
    for path, members in files.items():
        source = ChunkFile(path)
        if len(members) == 1:
            offset, size = chunks[members[0]][1:3]
            reads.append((source, [Run(offset, end, size)]))
            starts[members[0]] = end
            end += -(-size // PAGE) * PAGE
            continue
        offsets = np.array([chunks[number].offset for number in members], np.int64)
        sizes = np.array([chunks[number].size for number in members], np.int64)
        joined = join_ranges(offsets, sizes, int((offsets + sizes).max()), PAGE)
        runs = [Run(offset, end + inside, size) for offset, inside, size in joined.runs]
        reads.append((source, runs))
        for number, start in zip(members, joined.starts.tolist(), strict=True):
            starts[number] = end + start
        end += -(-joined.size // PAGE) * PAGE
    return FileReads(end, reads), starts


def batches_of(chunks: Sequence[Chunk], max_bytes: int) -> Iterator[Sequence[Chunk]]:
    """Split chunks into batches of at most `max_bytes` (or one chunk) and `MAX_CHUNKS` chunks."""
    batch: list[Chunk] = []
    size = 0
    for chunk in chunks:
        if batch and (size + chunk.size > max_bytes or len(batch) == MAX_CHUNKS):
            yield batch
            batch, size = [], 0
        batch.append(chunk)
        size += chunk.size
    if batch:
        yield batch
