"""What zarr may read of an array that nobody vouches for: known codecs, files, small chunks."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import imagecodecs
import numpy as np

from napari_wsigpu.model.errors import UnsupportedSlideError
from napari_wsigpu.model.limits import limits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sized

# They make Python objects of bytes, whatever zarr says of them.
DENIED = frozenset(
    {
        "pickle", "json", "json2", "msgpack", "msgpack2", "categorize", "n5_wrapper", "vlen-array",
        "vlen-bytes", "vlen-utf8", "variable_length_bytes", "variable_length_utf8",
    }
)  # fmt: skip
# What they give may be many times as large; each decodes at most as many bytes as it is asked for.
GROWING = frozenset({"zstd", "blosc", "gzip", "zlib", "bz2", "lzma", "lz4"})
CHECKSUM, CHECKSUM_BYTES = "crc32c", 4
SHARDS, PREFIX = "sharding_indexed", "numcodecs."
PLACES, EMPTY = ("start", "end"), (1 << 64) - 1
MOST_BESIDE = 64 << 10
BLOSC_HEADER = 16  # bytes; the last four say how many there are with the header


class Guard(NamedTuple):
    """What chunks of an array are compressed with.

    Attributes
    ----------
    codec : str or None
        The one codec that may make more bytes of them.
    most : int
        How many bytes that may give, before filters are undone.
    behind : int
        Bytes of a checksum behind its own.
    sharded : bool
        Whether a file holds several.
    held : int
        How many a file holds.
    index_first : bool
        Whether the index of these lies before them.
    index_behind : int
        Bytes of a checksum behind that index.
    index_order : {"<", ">"}
        Byte order of its numbers.
    """

    codec: str | None
    most: int
    behind: int
    sharded: bool
    held: int = 0
    index_first: bool = False
    index_behind: int = 0
    index_order: Literal["<", ">"] = "<"

    def check_read(self, data: Any, byte_range: Any) -> None:
        """Refuse what a store has read, if it is larger decoded than its array says.

        Parameters
        ----------
        data : buffer
            What was read.
        byte_range : zarr.abc.store.ByteRequest or None
            Which part of a file that is; None for the whole.

        Raises
        ------
        ValueError
            If a chunk is too large, can't be decoded, or lies in the index of others.
        """
        if self.codec is None:
            return
        if not self.sharded:
            self.check_inner(data)
        elif byte_range is None:
            index = data[: self.index_bytes] if self.index_first else data[-self.index_bytes :]
            for offset, length in self._chunks(index):
                self.check_inner(data[offset : offset + length])
        elif self.index_first and (byte_range.start, byte_range.end) == (0, self.index_bytes):
            if any(offset < self.index_bytes for offset, _ in self._chunks(data)):
                raise ValueError("their index says that one lies in it")
        elif hasattr(byte_range, "end"):  # others ask for the index behind chunks
            self.check_inner(data)

    @property
    def index_bytes(self) -> int:
        """How many bytes the index of several chunks has."""
        return 16 * self.held + self.index_behind

    def _chunks(self, index: Any) -> list[list[int]]:
        """Return (offset, length) of each chunk."""
        if len(index) < self.index_bytes:
            raise ValueError("they are cut off")
        found = np.frombuffer(index[: 16 * self.held], f"{self.index_order}u8").reshape(-1, 2)
        chunks: list[list[int]] = found[found[:, 0] != EMPTY].tolist()
        return chunks

    def check_inner(self, data: Any) -> None:
        """Refuse a chunk that is larger decoded than its array says; see `check_read`."""
        room = np.empty(self.most + 1, np.uint8)
        options = {"header": True} if self.codec == "lz4" else {}
        is_blosc = self.codec == "blosc"
        decode = decode_blosc if is_blosc else getattr(imagecodecs, f"{self.codec}_decode")
        if len(decode(data[: len(data) - self.behind], out=room, **options)) > self.most:
            raise ValueError("they are larger than their metadata say")


def decode_blosc(data: Any, *, out: Any) -> Sized:
    """Decode Blosc, which reads as many bytes as its header says, however few there are.

    Raises
    ------
    ValueError
        If it is cut off, or can't be decoded.
    """
    if not BLOSC_HEADER <= int.from_bytes(bytes(data[12:16]), "little") <= len(data):
        raise ValueError("they are cut off")
    decoded: Sized = imagecodecs.blosc_decode(data, out=out)
    return decoded


def guard_of(document: Mapping[str, Any], folder: Path | str) -> Guard:
    """Return what is to be checked of an array's chunks, by its metadata document.

    Raises
    ------
    UnsupportedSlideError
        If it has codecs that are never used, or several that compress.
    """
    chains = list(_chains(document))
    for chain in chains:
        found = next((name for name in chain if name in DENIED), None)
        if found is not None:
            raise UnsupportedSlideError(
                f"'{folder}' is encoded by {found!r}, which no image needs and which may harm; "
                "save it with zstd."
            )
    chain = chains[-1] if chains else []
    growing = [name for name in chain if name in GROWING]
    behind = [name for name in chain[chain.index(growing[0]) + 1 :] if growing] if growing else []
    around = any(name in GROWING for outer in chains[:-1] for name in outer)
    if len(chains) > 2:
        raise UnsupportedSlideError(
            f"'{folder}' has shards within shards, which is not supported; save it with shards of "
            "plain chunks."
        )
    if len(growing) > 1 or around or behind not in ([], [CHECKSUM]):
        raise UnsupportedSlideError(
            f"'{folder}' is compressed more than once, or around its shards, as no image is; "
            "save it with zstd."
        )
    codec = growing[0] if growing else None
    most, checksum = _most(document), CHECKSUM_BYTES * len(behind)
    if len(chains) < 2:
        return Guard(codec, most, checksum, sharded=False)
    held = _held(document)
    if held is None and codec is not None:
        raise UnsupportedSlideError(
            f"'{folder}' has shards whose index is encoded in a way that is not supported; save it "
            "with an index of bytes and crc32c."
        )
    return Guard(codec, most, checksum, True, *(held or ()))


def _held(
    document: Mapping[str, Any],
) -> tuple[int, bool, int, Literal["<", ">"]] | None:
    """Return how many chunks a shard holds, and where and how their index lies; see `Guard`.

    None if the index is compressed or transposed.
    """
    try:
        (shards,) = (item["configuration"] for item in document["codecs"] if item["name"] == SHARDS)
        index = [
            item if isinstance(item, dict) else {"name": item} for item in shards["index_codecs"]
        ]
        names = [item["name"] for item in index]
        little = index[0].get("configuration", {}).get("endian", "little") == "little"
        place = shards.get("index_location", "end")
        if names not in (["bytes"], ["bytes", CHECKSUM]) or place not in PLACES:
            return None
        outer = document["chunk_grid"]["configuration"]["chunk_shape"]
        ratios = zip(outer, shards["chunk_shape"], strict=True)
        held = math.prod(whole // part for whole, part in ratios)
        behind = CHECKSUM_BYTES * (len(names) - 1)
        return held, place == "start", behind, "<" if little else ">"
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _chains(document: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the names of codecs in the order in which they encode, of outer chunks first."""
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
        if item.get("name") == SHARDS and isinstance(inner, dict):
            yield from _chains({"codecs": inner.get("codecs")})


def _most(document: Mapping[str, Any]) -> int:
    """Return how many bytes a chunk may have; a filter may have made it larger."""
    grid = document.get("chunk_grid")
    shape = document.get("chunks")
    if isinstance(grid, dict) and isinstance(grid.get("configuration"), dict):
        shape = grid["configuration"].get("chunk_shape")
    try:
        size = np.dtype(document.get("dtype", document.get("data_type"))).itemsize
        size *= math.prod(int(side) for side in shape or ())
    except (TypeError, ValueError):
        size = limits.tile_bytes
    return int(min(2 * size, limits.tile_bytes)) + MOST_BESIDE


def guarded_store(folder: Path | str, guard: Guard, documents: tuple[str, ...]) -> Any:
    """Return a store of zarr that reads regular files alone, and checks chunks."""
    store = _kind()(folder, read_only=True)
    store.guard, store.documents = guard, documents
    return store


@cache
def _kind() -> Any:
    from zarr.storage import LocalStore  # an extra

    async def get(store: Any, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        path = Path(store.root) / key
        if path.exists() and not path.is_file():
            raise ValueError("they are no regular files")
        found = await LocalStore.get(store, key, prototype, byte_range)
        if found is not None and path.name not in store.documents:
            store.guard.check_read(found.to_bytes(), byte_range)
        return found

    return type("GuardedStore", (LocalStore,), {"get": get})
