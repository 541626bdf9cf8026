"""`SlideStore`: a slide as a read-only Zarr store.

group = zarr.open_group(SlideStore(slide), mode="r")            # OME-Zarr 0.5, axes c, y, x
array = zarr.open_array(SlideStore(slide.levels[0]), mode="r")  # axes of the level: y, x, c
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.conversion.ome_zarr_attributes import image_attributes
from napari_wsigpu.model.errors import MissingPackageError
from napari_wsigpu.reading.level import LevelArray

try:
    from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
except ImportError as error:
    raise MissingPackageError(
        'SlideStore requires zarr, which cannot be imported; run pip install "napari-wsigpu[zarr]".'
    ) from error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

    from napari_wsigpu.slide.slide import Slide

DOCUMENT = "zarr.json"
# Smaller tiles and strips are combined into chunks of at least this side.
SMALLEST_CHUNK = 256


class SlideStore(Store):  # type: ignore[misc]
    """A slide, or one of its levels, as a read-only store.

    A slide is a group whose levels are the arrays ``0``, ``1``, ...; a level is a single array.
    Each chunk is a tile, or several if they are small, and is decoded when it is read. The slide
    must stay open.

    Parameters
    ----------
    source : Slide or LevelArray
        The slide or level to expose.
    axes : str
        Axes of a slide's arrays: ``"cyx"``, which makes it an OME-Zarr 0.5 image, ``"yxc"``, or
        ``"yx"`` for the first channel only.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, source: Slide | LevelArray, axes: str = "cyx") -> None:
        super().__init__(read_only=True)
        self._source, self._key = source, (id(source), axes)
        if isinstance(source, LevelArray):
            self._arrays = {"": _Array(source, "yxc"[: source.ndim])}
            self._documents = {DOCUMENT: self._arrays[""].document()}
            return
        levels = enumerate(source.levels)
        self._arrays = {f"{number}/": _Array(level, axes) for number, level in levels}
        self._documents = {DOCUMENT: _group(source, ome=axes == "cyx")}
        for prefix, array in self._arrays.items():
            self._documents[prefix + DOCUMENT] = array.document()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SlideStore) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"<SlideStore of {self._source!r}>"

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return the bytes of a metadata document or chunk, or None if the key does not exist."""
        data = self._documents.get(key)
        if data is None:
            found = self._chunk_of(key)
            if found is None:
                return None
            array, index = found
            # Decoding blocks, so it runs outside the event loop.
            data = await asyncio.to_thread(array.chunk, index)
        buffer: Buffer = prototype.buffer.from_bytes(data[_slice_of(byte_range, len(data))])
        return buffer

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return the bytes of several keys."""
        reads = (self.get(key, prototype, part) for key, part in key_ranges)
        return list(await asyncio.gather(*reads))

    async def exists(self, key: str) -> bool:
        """Whether a metadata document or chunk has this key."""
        return key in self._documents or self._chunk_of(key) is not None

    async def set(self, key: str, value: Buffer) -> None:
        """Raise an error: the store is read-only."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Raise an error: the store is read-only."""
        self._check_writable()

    async def list(self) -> AsyncIterator[str]:
        """Yield all keys."""
        for key in self._documents:
            yield key
        for prefix, array in self._arrays.items():
            for index in np.ndindex(array.counts):
                yield f"{prefix}c/{'/'.join(map(str, index))}"

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys that start with a prefix."""
        async for key in self.list():
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names of the direct entries of a folder."""
        start = f"{prefix.rstrip('/')}/".lstrip("/")
        seen = set()
        async for key in self.list_prefix(start):
            name = key[len(start) :].partition("/")[0]
            if name not in seen:
                seen.add(name)
                yield name

    def _chunk_of(self, key: str) -> tuple[_Array, tuple[int, ...]] | None:
        prefix, found, path = key.rpartition("c/")
        array = self._arrays.get(prefix)
        if not found or array is None:
            return None
        try:
            numbers = tuple(map(int, path.split("/")))
        except ValueError:
            return None
        exists = len(numbers) == len(array.counts) and all(
            0 <= number < count for number, count in zip(numbers, array.counts, strict=True)
        )
        return (array, numbers) if exists else None


@dataclass(frozen=True)
class _Array:
    """A level as a Zarr array."""

    level: LevelArray
    axes: str

    def _in_order(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Reorder values of the axes (y, x, c) to the order of `axes`."""
        return tuple(values["yxc".index(axis)] for axis in self.axes)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        grid = self.level.layout.grid
        sides = (
            -(-SMALLEST_CHUNK // side) * side if side < SMALLEST_CHUNK else side
            for side in (grid.tile_height, grid.tile_width)
        )
        return self._in_order((*sides, *self.level.shape[2:]))

    @property
    def shape(self) -> tuple[int, ...]:
        return self._in_order(self.level.shape)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-n // m) for n, m in zip(self.shape, self.chunk_shape, strict=True))

    def chunk(self, index: tuple[int, ...]) -> bytes:
        """Return the little-endian bytes of a chunk, padded with zeros at the edges."""
        rows, columns = (
            slice(index[axis] * self.chunk_shape[axis], (index[axis] + 1) * self.chunk_shape[axis])
            for axis in map(self.axes.index, "yx")
        )
        pixels = self.level[rows, columns]
        if self.axes == "cyx":
            pixels = np.moveaxis(pixels, -1, 0)
        elif pixels.ndim > len(self.axes):
            pixels = pixels[..., 0]
        if pixels.shape != self.chunk_shape:
            whole = np.zeros(self.chunk_shape, pixels.dtype)
            whole[tuple(map(slice, pixels.shape))] = pixels
            pixels = whole
        return pixels.astype(pixels.dtype.newbyteorder("<"), copy=False).tobytes()

    def document(self) -> bytes:
        chunks = {"chunk_shape": self.chunk_shape}
        return _json(
            {
                "node_type": "array",
                "shape": self.shape,
                "data_type": self.level.dtype.name,
                "chunk_grid": {"name": "regular", "configuration": chunks},
                "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
                "fill_value": 0,
                "dimension_names": list(self.axes),
                "attributes": {},
            }
        )


def _group(slide: Slide, *, ome: bool) -> bytes:
    if not ome:
        return _json({"node_type": "group", "attributes": {}})
    x, y = slide.mpp or (1.0, 1.0)
    scales = [[y * step, x * step] for step in slide.level_downsamples]
    known = "yx" if slide.mpp else ""
    attributes = {"ome": image_attributes("slide", "cyx", scales, known=known)}
    return _json({"node_type": "group", "attributes": attributes})


def _json(document: dict[str, object]) -> bytes:
    return json.dumps({"zarr_format": 3, **document}).encode()


def _slice_of(request: ByteRequest | None, size: int) -> slice:
    """Return the slice of `size` bytes that a request selects."""
    if isinstance(request, RangeByteRequest):
        return slice(request.start, request.end)
    if isinstance(request, OffsetByteRequest):
        return slice(request.offset, None)
    if isinstance(request, SuffixByteRequest):
        return slice(max(0, size - request.suffix), None)
    return slice(None)
