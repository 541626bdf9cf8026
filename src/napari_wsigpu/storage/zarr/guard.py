"""Checks of untrusted Zarr arrays: safe codecs, regular files, no decompression bombs."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import imagecodecs
import numpy as np

from napari_wsigpu.model.errors import UnsupportedSlideError
from napari_wsigpu.model.limits import limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sized

    from typing_extensions import Buffer
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer as ZarrBuffer
    from zarr.core.buffer import BufferPrototype
    from zarr.storage import LocalStore

    from napari_wsigpu.model.arrays import Array, ByteArray

    # JSON as `json.loads` returns it; each caller checks the values that it needs.
    Document: TypeAlias = Mapping[str, Any]

# Codecs that create Python objects or wrap other codecs; images don't need them.
DENIED = frozenset(
    {
        "pickle", "json", "json2", "msgpack", "msgpack2", "categorize", "n5_wrapper", "vlen-array",
        "vlen-bytes", "vlen-utf8", "variable_length_bytes", "variable_length_utf8",
    }
)  # fmt: skip
# The output of these codecs may be many times larger than their input, but can be limited to a
# number of bytes.
EXPANDING = frozenset({"zstd", "blosc", "gzip", "zlib", "bz2", "lzma", "lz4"})
CHECKSUM, CHECKSUM_BYTES = "crc32c", 4
SHARDING, PREFIX = "sharding_indexed", "numcodecs."
INDEX_LOCATIONS, MISSING = ("start", "end"), (1 << 64) - 1
OVERHEAD = 64 << 10  # bytes that filters may add to a chunk
# The last 4 bytes of the header hold the size of the data, including the header.
BLOSC_HEADER = 16


class ShardIndex(NamedTuple):
    """Location and encoding of the chunk index in a shard.

    Attributes
    ----------
    chunk_count : int
        Number of chunks in a shard.
    is_first : bool
        Whether the index is before the chunks, not after them.
    checksum_bytes : int
        Size of the checksum after the index.
    byte_order : {"<", ">"}
        Byte order of the numbers in the index.
    """

    chunk_count: int = 0
    is_first: bool = False
    checksum_bytes: int = 0
    byte_order: Literal["<", ">"] = "<"

    @property
    def size(self) -> int:
        """Size of the index and its checksum in bytes."""
        return 16 * self.chunk_count + self.checksum_bytes

    def chunks(self, data: memoryview) -> list[list[int]]:
        """Return (offset, length) of each chunk that exists, given the bytes of the index."""
        if len(data) < self.size:
            raise ValueError("the index of a shard is truncated")
        found = np.frombuffer(data[: 16 * self.chunk_count], f"{self.byte_order}u8").reshape(-1, 2)
        chunks: list[list[int]] = found[found[:, 0] != MISSING].tolist()
        return chunks


class Guard(NamedTuple):
    """Limits for the chunks of an array, checked before zarr decodes them.

    Attributes
    ----------
    codec : str or None
        The only codec that may expand the data.
    max_bytes : int
        Maximum size of the codec's output, before filters are undone.
    checksum_bytes : int
        Size of the checksum after the codec's input.
    shard_index : ShardIndex or None
        The index of each shard, if the array is sharded.
    """

    codec: str | None
    max_bytes: int
    checksum_bytes: int
    shard_index: ShardIndex | None = None

    def check_read(self, buffer: Buffer, byte_range: ByteRequest | None) -> None:
        """Check data that a store has read, before zarr decodes it.

        Parameters
        ----------
        buffer : buffer
            The data.
        byte_range : zarr.abc.store.ByteRequest or None
            The part of a file that was read; None for the whole file.

        Raises
        ------
        ValueError
            If a chunk is larger than the metadata states, or overlaps the index.
        RuntimeError
            If imagecodecs can't decode a chunk.
        """
        if self.codec is None:
            return
        data, index = memoryview(buffer), self.shard_index
        if index is None:
            self._check_chunk(data)
        elif byte_range is None:
            table = data[: index.size] if index.is_first else data[-index.size :]
            for offset, length in index.chunks(table):
                self._check_chunk(data[offset : offset + length])
        elif index.is_first and (byte_range.start, byte_range.end) == (0, index.size):
            # A chunk with the range of the index would be mistaken for it later, and not checked.
            if any(offset < index.size for offset, _ in index.chunks(data)):
                raise ValueError("a chunk overlaps the index of its shard")
        elif hasattr(byte_range, "end"):  # a suffix request, which has no end, reads an index
            self._check_chunk(data)

    def _check_chunk(self, data: memoryview) -> None:
        """Decode a chunk into memory one byte larger than allowed; see `check_read`."""
        memory = np.empty(self.max_bytes + 1, np.uint8)
        options = {"header": True} if self.codec == "lz4" else {}
        is_blosc = self.codec == "blosc"
        decode = decode_blosc if is_blosc else getattr(imagecodecs, f"{self.codec}_decode")
        encoded = data[: len(data) - self.checksum_bytes]
        if len(decode(encoded, out=memory, **options)) > self.max_bytes:
            raise ValueError("a chunk is larger than the metadata says")


def decode_blosc(data: memoryview | ByteArray, *, out: Array) -> Sized:
    """Decode Blosc data after checking its size: the library trusts the size in the header.

    Raises
    ------
    ValueError
        If the data is truncated.
    RuntimeError
        If imagecodecs can't decode the data.
    """
    if not BLOSC_HEADER <= int.from_bytes(bytes(data[12:16]), "little") <= len(data):
        raise ValueError("the data is truncated")
    decode: Callable[..., Sized] = imagecodecs.blosc_decode
    return decode(data, out=out)


def guard_of(document: Document, folder: Path | str) -> Guard:
    """Return the guard for an array with this metadata document.

    Raises
    ------
    UnsupportedSlideError
        If the array has unsafe codecs, or is compressed more than once.
    """
    chains = list(_chains(document))
    for chain in chains:
        found = next((name for name in chain if name in DENIED), None)
        if found is not None:
            raise UnsupportedSlideError(
                f"'{folder}' is encoded with {found!r}, which is unsafe and not used for images; "
                "save it with zstd."
            )
    chain = chains[-1] if chains else []
    expanding = [name for name in chain if name in EXPANDING]
    after = chain[chain.index(expanding[0]) + 1 :] if expanding else []
    around_shards = any(name in EXPANDING for outer in chains[:-1] for name in outer)
    if len(chains) > 2:
        raise UnsupportedSlideError(
            f"'{folder}' has nested shards, which are not supported; save it with one level of "
            "shards."
        )
    if len(expanding) > 1 or around_shards or after not in ([], [CHECKSUM]):
        raise UnsupportedSlideError(
            f"'{folder}' is compressed more than once, or its shards are compressed, which is not "
            "supported; save it with zstd."
        )
    codec = expanding[0] if expanding else None
    max_bytes, checksum_bytes = _max_bytes(document), CHECKSUM_BYTES * len(after)
    if len(chains) < 2:
        return Guard(codec, max_bytes, checksum_bytes)
    index = _shard_index(document)
    if index is None and codec is not None:
        raise UnsupportedSlideError(
            f"The encoding of the shard index of '{folder}' is not supported; save it with the "
            "index codecs 'bytes' and 'crc32c'."
        )
    return Guard(codec, max_bytes, checksum_bytes, index or ShardIndex())


def _shard_index(document: Document) -> ShardIndex | None:
    """Return how shards are indexed; None if the index is compressed, transposed or invalid."""
    try:
        (shards,) = (
            item["configuration"] for item in document["codecs"] if item["name"] == SHARDING
        )
        codecs = [
            item if isinstance(item, dict) else {"name": item} for item in shards["index_codecs"]
        ]
        names = [item["name"] for item in codecs]
        little = codecs[0].get("configuration", {}).get("endian", "little") == "little"
        location = shards.get("index_location", "end")
        if names not in (["bytes"], ["bytes", CHECKSUM]) or location not in INDEX_LOCATIONS:
            return None
        outer = document["chunk_grid"]["configuration"]["chunk_shape"]
        ratios = zip(outer, shards["chunk_shape"], strict=True)
        count = math.prod(whole // part for whole, part in ratios)
        checksum_bytes = CHECKSUM_BYTES * (len(names) - 1)
        return ShardIndex(count, location == "start", checksum_bytes, "<" if little else ">")
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _chains(document: Document) -> Iterator[list[str]]:
    """Yield lists of codec names in encoding order: for shards, then for the chunks in them."""
    if "codecs" not in document:
        filters, compressor = document.get("filters"), document.get("compressor")
        items = [*(filters if isinstance(filters, list) else []), compressor]
        yield [str(item.get("id")) for item in items if isinstance(item, dict)]
        return
    codecs = document["codecs"]
    items = [item for item in (codecs if isinstance(codecs, list) else []) if item]
    named = [item if isinstance(item, dict) else {"name": item} for item in items]
    yield [str(item.get("name")).removeprefix(PREFIX) for item in named]
    for item in named:
        inner = item.get("configuration")
        if item.get("name") == SHARDING and isinstance(inner, dict):
            yield from _chains({"codecs": inner.get("codecs")})


def _max_bytes(document: Document) -> int:
    """Return the maximum size of a chunk in bytes; a filter may have doubled it."""
    grid = document.get("chunk_grid")
    shape = document.get("chunks")
    if isinstance(grid, dict) and isinstance(grid.get("configuration"), dict):
        shape = grid["configuration"].get("chunk_shape")
    try:
        size = np.dtype(document.get("dtype", document.get("data_type"))).itemsize
        size *= math.prod(int(side) for side in shape or ())
    except (TypeError, ValueError):
        size = limits.tile_bytes
    return int(min(2 * size, limits.tile_bytes)) + OVERHEAD


def guarded_store(folder: Path | str, guard: Guard, documents: tuple[str, ...]) -> LocalStore:
    """Return a zarr store that reads only regular files, and checks all but the documents."""
    store = _store_class()(folder, read_only=True)
    store.guard, store.documents = guard, documents
    return store


@cache
def _store_class() -> type[LocalStore]:
    from zarr.storage import LocalStore  # zarr is an extra

    async def get(
        store: LocalStore,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> ZarrBuffer | None:
        path = Path(store.root) / key
        if path.exists() and not path.is_file():
            raise ValueError("a chunk is not in a regular file")
        found = await LocalStore.get(store, key, prototype, byte_range)
        if found is not None and path.name not in store.documents:
            store.guard.check_read(found.to_bytes(), byte_range)
        return found

    return type("GuardedStore", (LocalStore,), {"get": get})
