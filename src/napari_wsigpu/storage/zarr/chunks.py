"""Where the chunks of a Zarr array lie in local files, and where they go in a selection of it."""

from __future__ import annotations

import math
import operator
import os
import stat
from contextlib import contextmanager
from importlib import import_module
from io import FileIO
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.model.errors import RegionError, UnsupportedArrayError
from napari_wsigpu.storage.batch import PAGE, Batch
from napari_wsigpu.storage.file import Run, join_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

NUMBERS = "biufc"
MISSING = 2**64 - 1
CHECKSUM = 4
# A process may open 1024 files; kvikio opens each twice, for one batch and the next.
MOST_CHUNKS = 128
SHARDS = "sharding_indexed"
INDEX_CODECS = ["bytes", "crc32c"]
# What a chunk is compressed with by its metadata, and what nvCOMP calls it.
NVCOMP = {"zstd": "Zstd", "lz4": "LZ4", "numcodecs.zstd": "Zstd", "numcodecs.lz4": "LZ4"}


class Axis(NamedTuple):
    """Positions along one axis of an array.

    Attributes
    ----------
    start, step, length : int
        They are ``start``, ``start + step``, ...; the step is positive.
    kept : bool
        Whether the selection has this axis.
    """

    start: int
    step: int
    length: int
    kept: bool


class Encoded(NamedTuple):
    """How the chunks of an array are stored.

    Attributes
    ----------
    chunk : tuple of int
        Shape of what is encoded at once.
    dtype : numpy.dtype
        Of its samples, in native byte order.
    algorithm : str or None
        What it is compressed with, as its reader calls it.
    shard : tuple of int or None
        Shape of what is one file, if that holds several.
    index_first : bool
        Whether the index of a shard is at its begin.
    """

    chunk: tuple[int, ...]
    dtype: np.dtype[Any]
    algorithm: str | None
    shard: tuple[int, ...] | None = None
    index_first: bool = False

    @property
    def size(self) -> int:
        """Bytes of a decoded chunk."""
        return math.prod(self.chunk) * self.dtype.itemsize


class Chunk(NamedTuple):
    """A chunk that a selection needs.

    Attributes
    ----------
    path : str
        The file that holds it.
    offset, size : int
        Where in that file.
    inside : tuple of slice
        What is wanted of it.
    target : tuple of slice
        Where that goes in the selection, which has all axes of the array.
    """

    path: str
    offset: int
    size: int
    inside: tuple[slice, ...]
    target: tuple[slice, ...]


class ChunkFile:
    """A file of chunks, opened for each read; see `gds.Readable`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def checked_path(self) -> str:
        """Return the path."""
        return self._path

    @contextmanager
    def reading(self) -> Iterator[Callable[[memoryview, int], None]]:
        """Open it, and give out what fills a view with the bytes from a position on."""
        with FileIO(self._path) as file:

            def read(view: memoryview, offset: int) -> None:
                file.seek(offset)
                while view:
                    count = file.readinto(view)
                    if not count:
                        raise EOFError(f"'{self._path}' ends early")
                    view = view[count:]

            yield read


def axes_of(selection: Any, shape: Sequence[int]) -> tuple[Axis, ...]:
    """Return what a basic selection is on each axis.

    Raises
    ------
    RegionError
        If it is no selection of whole numbers, slices forward and an ellipsis, or out of bounds.
    """
    items = selection if isinstance(selection, tuple) else (selection,)
    places = [place for place, item in enumerate(items) if item is Ellipsis]
    if not places:
        items, places = (*items, Ellipsis), [len(items)]
    missing = len(shape) - len(items) + 1
    if len(places) > 1 or missing < 0:
        raise RegionError(f"The selection {selection!r} does not fit an array of shape {shape}.")
    whole = (slice(None),) * missing
    items = (*items[: places[0]], *whole, *items[places[0] + 1 :])
    return tuple(_axis(item, size) for item, size in zip(items, shape, strict=True))


def _axis(item: Any, size: int) -> Axis:
    try:
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step < 0:
                raise RegionError(f"A selection can't go backwards, as {item!r} does.")
            return Axis(start, step, len(range(start, stop, step)), kept=True)
        index = operator.index(item)
    except (TypeError, ValueError):
        raise RegionError(
            f"A selection is made of whole numbers, slices and an ellipsis, not of {item!r}."
        ) from None
    if not -size <= index < size:
        raise RegionError(f"There is no place {index} on an axis of {size}.")
    return Axis(index % size, 1, 1, kept=False)


def encoded(array: Any, algorithms: Mapping[str, str] = NVCOMP) -> Encoded:
    """Return how the chunks of a zarr.Array are stored, in local files.

    Parameters
    ----------
    array : zarr.Array
        The array.
    algorithms : Mapping of str to str
        What its reader calls each compression that it knows, by their names in metadata.

    Raises
    ------
    UnsupportedArrayError
        If they are not in local files, or stored in a way that is read by zarr alone.
    """
    if not isinstance(array.store, import_module("zarr.storage").LocalStore):
        raise UnsupportedArrayError("the array is not in a local folder")
    dtype = np.dtype(array.dtype)
    if dtype.kind not in NUMBERS:
        raise UnsupportedArrayError(f"its samples are of type {dtype}")
    metadata = array.metadata.to_dict()
    if array.metadata.zarr_format == 2:
        return _encoded_v2(metadata, dtype, algorithms)
    grid = metadata["chunk_grid"]
    if grid["name"] != "regular":
        raise UnsupportedArrayError(f"its chunk grid is {grid['name']}")
    outer = tuple(grid["configuration"]["chunk_shape"])
    codecs = list(metadata["codecs"])
    if [codec["name"] for codec in codecs] == [SHARDS]:
        sharding = codecs[0]["configuration"]
        index = [codec["name"] for codec in sharding["index_codecs"]]
        if index != INDEX_CODECS or not _is_little(sharding["index_codecs"][0], "big"):
            raise UnsupportedArrayError("the index of its shards is encoded in an unusual way")
        algorithm = _algorithm(sharding["codecs"], dtype, algorithms)
        inner = tuple(sharding["chunk_shape"])
        at_begin = sharding["index_location"] == "start"
        return Encoded(inner, dtype.newbyteorder("="), algorithm, outer, at_begin)
    return Encoded(outer, dtype.newbyteorder("="), _algorithm(codecs, dtype, algorithms))


def _encoded_v2(
    metadata: Mapping[str, Any], dtype: np.dtype[Any], algorithms: Mapping[str, str]
) -> Encoded:
    compressor = metadata["compressor"]
    name = compressor["id"] if compressor else None
    if metadata["filters"]:
        raise UnsupportedArrayError("it has filters")
    if metadata["order"] != "C":
        raise UnsupportedArrayError("its chunks are in Fortran order")
    if not dtype.isnative:
        raise UnsupportedArrayError("its samples are in the other byte order")
    if name is not None and name not in algorithms:
        raise UnsupportedArrayError(f"its chunks are compressed by {name}")
    return Encoded(tuple(metadata["chunks"]), dtype, algorithms[name] if name else None)


def _algorithm(
    codecs: Sequence[Mapping[str, Any]], dtype: np.dtype[Any], algorithms: Mapping[str, str]
) -> str | None:
    names = [codec["name"] for codec in codecs]
    if not names or names[0] != "bytes" or len(names) > 2:
        raise UnsupportedArrayError(f"its chunks are encoded by {', '.join(names) or 'nothing'}")
    if dtype.itemsize > 1 and not _is_little(codecs[0], "little"):
        raise UnsupportedArrayError("its samples are in the other byte order")
    if len(names) == 1:
        return None
    if names[1] not in algorithms:
        raise UnsupportedArrayError(f"its chunks are compressed by {names[1]}")
    return algorithms[names[1]]


def _is_little(codec: Mapping[str, Any], otherwise: str) -> bool:
    endian: str = codec.get("configuration", {}).get("endian", otherwise)
    return endian == "little"


def find_chunks(array: Any, stored: Encoded, axes: Sequence[Axis]) -> tuple[list[Chunk], bool]:
    """Find the chunks of a zarr.Array that a selection needs.

    Parameters
    ----------
    array : zarr.Array
        In a local folder.
    stored : Encoded
        How it is stored.
    axes : sequence of Axis
        The selection.

    Returns
    -------
    list of Chunk
        Those that there are.
    bool
        Whether others are missing: they hold the fill value.

    Raises
    ------
    UnsupportedArrayError
        If a file is not as long as it should be, which zarr has words for.
    """
    root = os.path.join(array.store.root, array.path)  # noqa: PTH118 - there may be many chunks
    outer = stored.shard or stored.chunk
    chunks: list[Chunk] = []
    complete = True
    pieces = [_pieces(axis, size) for axis, size in zip(axes, stored.chunk, strict=True)]
    indices: dict[tuple[int, ...], ChunkIndex | None] = {}
    for parts in product(*pieces):
        position = tuple(part[0] for part in parts)
        file = tuple(
            number * inner // size
            for number, inner, size in zip(position, stored.chunk, outer, strict=True)
        )
        if file not in indices:
            path = f"{root}/{array.metadata.encode_chunk_key(file)}"
            indices[file] = _index_of(path, stored)
        index = indices[file]
        found = None if index is None else index.find(position)
        if index is None or found is None:
            complete = False
            continue
        inside = tuple(part[1] for part in parts)
        target = tuple(part[2] for part in parts)
        chunks.append(Chunk(index.path, *found, inside, target))
    return chunks, complete


def _pieces(axis: Axis, size: int) -> list[tuple[int, slice, slice]]:
    """Cut an axis at the ends of chunks: number of the chunk, what of it, and where that goes."""
    if not axis.length:
        return []
    last = axis.start + axis.step * (axis.length - 1)
    pieces = []
    for number in range(axis.start // size, last // size + 1):
        first = max(0, -(-(number * size - axis.start) // axis.step))
        past = min(axis.length, -(-((number + 1) * size - axis.start) // axis.step))
        if first < past:
            begin = axis.start + axis.step * first - number * size
            end = begin + axis.step * (past - first - 1) + 1
            pieces.append((number, slice(begin, end, axis.step), slice(first, past)))
    return pieces


class ChunkIndex(NamedTuple):
    """Where chunks lie in one file.

    Attributes
    ----------
    path : str
        The file.
    size : int
        Its size, which is that of the only chunk, if there is no table.
    table : ndarray of uint64, or None
        Offset and size of the chunks of a shard, by their position in it.
    """

    path: str
    size: int
    table: np.ndarray[Any, Any] | None = None

    def find(self, chunk: tuple[int, ...]) -> tuple[int, int] | None:
        """Return offset and size of a chunk, None if it is missing."""
        if self.table is None:
            return 0, self.size
        counts = self.table.shape
        inside = tuple(number % count for number, count in zip(chunk, counts, strict=False))
        offset, size = self.table[inside].tolist()
        return None if offset == size == MISSING else (offset, size)


def _index_of(path: str, stored: Encoded) -> ChunkIndex | None:
    """Return what a file holds, None if there is no file."""
    try:
        status = os.stat(path)  # noqa: PTH116 - there may be many
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for its other end
        raise ValueError(f"'{path}' is no regular file")
    length = status.st_size
    table, used = None, [[0, length]]
    if stored.shard is not None:
        counts = [n // m for n, m in zip(stored.shard, stored.chunk, strict=True)]
        table = _read_index(path, length, (*counts, 2), first=stored.index_first)
        used = table[table[..., 0] != MISSING].tolist()
    raw = stored.algorithm is None
    if any(
        offset + size > length or (size != stored.size if raw else not size)
        for offset, size in used
    ):
        raise UnsupportedArrayError(f"'{path}' is not as long as its chunks are")
    return ChunkIndex(path, length, table)


def _read_index(
    path: str, length: int, shape: tuple[int, ...], *, first: bool
) -> np.ndarray[Any, Any]:
    size = math.prod(shape) * np.dtype(np.uint64).itemsize
    if length < size + CHECKSUM:
        raise UnsupportedArrayError(f"'{path}' is shorter than the index of a shard")
    with Path(path).open("rb") as file:
        file.seek(0 if first else length - size - CHECKSUM)
        data = file.read(size + CHECKSUM)
    checksum = import_module("google_crc32c").value(data[:size])
    if checksum != int.from_bytes(data[size:], "little"):
        raise UnsupportedArrayError(f"the index of '{path}' is damaged")
    return np.frombuffer(data, "<u8", size // 8).reshape(shape)


def plan(chunks: Sequence[Chunk]) -> tuple[Batch, list[int]]:
    """Plan to read chunks into one buffer; return that, and where each chunk comes to lie."""
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
    return Batch(end, reads), starts


def batches_of(chunks: Sequence[Chunk], most: int) -> Iterator[Sequence[Chunk]]:
    """Cut chunks into batches of at most so many bytes, or one chunk, and few files."""
    batch: list[Chunk] = []
    size = 0
    for chunk in chunks:
        if batch and (size + chunk.size > most or len(batch) == MOST_CHUNKS):
            yield batch
            batch, size = [], 0
        batch.append(chunk)
        size += chunk.size
    if batch:
        yield batch
