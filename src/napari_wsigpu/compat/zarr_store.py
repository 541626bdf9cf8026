"""`SlideStore`: a slide as a read-only store of Zarr, for all that reads Zarr.

group = zarr.open_group(SlideStore(slide), mode="r")            # OME-Zarr 0.5: c, y, x
array = zarr.open_array(SlideStore(slide.levels[0]), mode="r")  # as the level is: y, x, c
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.conversion.ngff import image_attributes
from napari_wsigpu.model.errors import MissingPackageError
from napari_wsigpu.reading.level import LevelArray

try:
    from zarr.abc.store import (
        OffsetByteRequest,
        RangeByteRequest,
        Store,
        SuffixByteRequest,
    )
except ImportError as error:
    raise MissingPackageError(
        "A slide as a Zarr store needs zarr, which can't be imported; pip install "
        "napari-wsigpu[zarr]."
    ) from error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from napari_wsigpu.slide.slide import Slide

DOCUMENT = "zarr.json"
# Chunks of strips and small tiles are several of them.
SMALLEST_CHUNK = 256


class SlideStore(Store):  # type: ignore[misc]
    """A slide, or one of its levels, as a read-only store.

    A slide is a group, whose levels are the arrays ``0``, ``1``, ...; a level is an array of its
    own shape. Chunks are stored tiles, uncompressed; each is decoded when it is asked for. The
    slide has to stay open.

    Parameters
    ----------
    source : Slide or LevelArray
        What to show.
    axes : str
        Of a slide's arrays: ``"cyx"``, which makes it an OME-Zarr 0.5 image, ``"yxc"``, or
        ``"yx"`` of the first channel alone.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, source: Slide | LevelArray, axes: str = "cyx") -> None:
        super().__init__(read_only=True)
        self._source, self._axes = source, axes
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
        return (
            isinstance(other, SlideStore)
            and other._source is self._source
            and other._axes == self._axes
        )

    def __hash__(self) -> int:
        return hash((id(self._source), self._axes))

    def __repr__(self) -> str:
        return f"<SlideStore of {self._source!r}>"

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Return a document's or a chunk's bytes; None if there is none of that name."""
        data = self._documents.get(key)
        if data is None:
            found = self._chunk_of(key)
            if found is None:
                return None
            array, place = found
            data = await asyncio.to_thread(array.chunk, place)
        return prototype.buffer.from_bytes(data[_part(byte_range, len(data))])

    async def get_partial_values(
        self, prototype: Any, key_ranges: Iterable[tuple[str, Any]]
    ) -> list[Any]:
        """Return bytes of several keys."""
        return list(
            await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges))
        )

    async def exists(self, key: str) -> bool:
        """Whether there is a document or chunk of that name."""
        return key in self._documents or self._chunk_of(key) is not None

    async def set(self, key: str, value: Any) -> None:
        """Refuse to write."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Refuse to write."""
        self._check_writable()

    async def list(self) -> AsyncIterator[str]:
        """Yield all keys."""
        for key in self._documents:
            yield key
        for prefix, array in self._arrays.items():
            for place in np.ndindex(array.counts):
                yield f"{prefix}c/{'/'.join(map(str, place))}"

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys that begin so."""
        async for key in self.list():
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield what lies in a folder, without what lies in its folders."""
        start = f"{prefix.rstrip('/')}/".lstrip("/")
        seen = set()
        async for key in self.list_prefix(start):
            name = key[len(start) :].partition("/")[0]
            if name not in seen:
                seen.add(name)
                yield name

    def _chunk_of(self, key: str) -> tuple[_Array, tuple[int, ...]] | None:
        prefix, found, place = key.rpartition("c/")
        array = self._arrays.get(prefix)
        if not found or array is None:
            return None
        try:
            numbers = tuple(map(int, place.split("/")))
        except ValueError:
            return None
        there = len(numbers) == len(array.counts) and all(
            0 <= number < count for number, count in zip(numbers, array.counts, strict=True)
        )
        return (array, numbers) if there else None


@dataclass(frozen=True)
class _Array:
    """A level as a Zarr array."""

    level: LevelArray
    axes: str

    def _in_order(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Return numbers of (y, x, c) in the order of the axes."""
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
        """How many chunks there are along each axis."""
        return tuple(-(-n // m) for n, m in zip(self.shape, self.chunk_shape, strict=True))

    def chunk(self, place: tuple[int, ...]) -> bytes:
        """Decode a chunk."""
        rows, columns = (
            slice(place[axis] * self.chunk_shape[axis], (place[axis] + 1) * self.chunk_shape[axis])
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
        return _json(
            {
                "node_type": "array",
                "shape": self.shape,
                "data_type": self.level.dtype.name,
                "chunk_grid": {
                    "name": "regular",
                    "configuration": {"chunk_shape": self.chunk_shape},
                },
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


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps({"zarr_format": 3, **document}).encode()


def _part(wanted: Any, size: int) -> slice:
    """Return which bytes of so many a request is for."""
    if isinstance(wanted, RangeByteRequest):
        return slice(wanted.start, wanted.end)
    if isinstance(wanted, OffsetByteRequest):
        return slice(wanted.offset, None)
    if isinstance(wanted, SuffixByteRequest):
        return slice(max(0, size - wanted.suffix), None)
    return slice(None)
