"""`Jpeg2000Tiles`: JPEG 2000 tiles of a batch, split between our kernels and nvImageCodec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.gpu.jpeg.codestream import Jpeg2000Streams, PreparedBatch
from napari_wsigpu.gpu.jpeg2000.jpeg2000_engine import (
    EXACT,
    KERNELS,
    LONGEST_HEADER,
    form_of_stream,
)
from napari_wsigpu.gpu.jpeg2000.jpeg2000_header import decisive_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.decoder import EncodedBatch
    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.interfaces import Slots, Stream
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.gpu.device.workspace import Workspace
    from napari_wsigpu.gpu.jpeg.codestream import Recipe
    from napari_wsigpu.gpu.jpeg2000.form_decoder import Form
    from napari_wsigpu.gpu.jpeg2000.jpeg2000_engine import Jpeg2000Engine
    from napari_wsigpu.model.layout import LevelLayout


class Jpeg2000Tiles:
    """Prepares JPEG 2000 tiles for our kernels, or for nvImageCodec if the kernels refuse them.

    Parameters
    ----------
    level : LevelLayout
        Level of the tiles.
    recipe : Recipe
        How its tiles are decoded.
    engine : Jpeg2000Engine
        Decoder with our kernels.
    """

    def __init__(self, level: LevelLayout, recipe: Recipe, engine: Jpeg2000Engine) -> None:
        grid = level.grid
        self._shape = (grid.tile_height, grid.tile_width, level.encoding.samples)
        self._dtype, self._recipe = level.dtype, recipe
        self._library = Jpeg2000Streams(level, recipe)
        self._engine = engine

    def prepare(self, batch: EncodedBatch, count: int, work: Workspace) -> PreparedBatch:
        """Assign each of the first `count` tiles to the kernels, nvImageCodec or the CPU."""
        # Forms are cached and compared by identity: hashing a form would take longer than the rest.
        planes = [self._forms(batch, plane, count) for plane in range(len(batch.starts))]
        refused = {index for forms in planes for index, form in enumerate(forms) if form is None}
        own = [index for index in range(count) if index not in refused]
        parts = []
        for plane, forms in enumerate(planes):
            for form in {id(form): form for form in forms}.values():
                tiles = [index for index in own if forms[index] is form]
                if form is not None and tiles:
                    parts.append(_Part(form, plane, tiles))
        others = self._library.prepare_these(
            batch, sorted(refused) if self._recipe.by_library else (), work
        )
        if not own:
            return others
        work.make_room(0, 0, len(own) * batch.starts.shape[0])
        convert = self._recipe.convert
        return _Tiles(batch, own, parts, others, self._engine, convert)

    def _forms(self, batch: EncodedBatch, plane: int, count: int) -> list[Form | None]:
        """Return the forms of the code streams of a plane, which are mostly equal."""
        starts, lengths = batch.starts[plane, :count], batch.lengths[plane, :count]
        if not count:
            return []
        first = batch.view[int(starts[0]) :][: int(lengths[0])]
        positions = decisive_bytes(bytes(first[:LONGEST_HEADER]))
        encoded = np.frombuffer(batch.view, np.uint8)
        alike = lengths > positions[-1]
        alike &= alike[0]
        if alike[0]:
            places = starts[alike, None] + positions
            alike[alike] = (encoded[places] == encoded[places[0]]).all(axis=1)
        forms = [self._form(first)] * count
        for index in np.flatnonzero(~alike).tolist():
            start, length = int(starts[index]), int(lengths[index])
            forms[index] = self._form(batch.view[start : start + length])
        return forms

    def _form(self, stream: memoryview) -> Form | None:
        """Return the form of a code stream if it decodes to a whole tile of the level."""
        form = form_of_stream(stream)
        if isinstance(form, str) or (form.shape, form.dtype) != (self._shape, self._dtype):
            return None
        return form


class _Part(NamedTuple):
    """Tiles whose code streams of one plane have the same form."""

    form: Form
    plane: int
    tiles: list[int]


@dataclass(eq=False, repr=False)
class _Tiles(PreparedBatch):
    """Tiles of a batch: first the tiles that our kernels decode, then nvImageCodec's."""

    kind = "jpeg2000"

    _batch: EncodedBatch
    _own: list[int]
    _parts: list[_Part]
    _others: PreparedBatch
    _engine: Jpeg2000Engine
    _convert: bool

    def __post_init__(self) -> None:
        self.work = self._others.work
        self.groups = [*([index] for index in self._own), *self._others.groups]

    def set_targets(self, addresses: Sequence[int], stream: Stream) -> None:
        self._addresses, self._stream = np.array(addresses, np.int64), stream
        self._others.set_targets(addresses, stream)

    def decode(self, worker: DecodeWorker) -> list[bool]:
        batch, encoded = self._batch, np.frombuffer(self._batch.view, np.uint8)
        pixel_bytes = batch.level.channels * batch.level.dtype.itemsize
        without_memory: set[int] = set()
        for (form, plane, tiles), flags in self._flags():
            flags[:] = 1  # the kernels set 0 for success
            targets = self._addresses[tiles] + plane * form.pixel_bytes
            streams = batch.starts[plane, tiles], batch.lengths[plane, tiles], targets
            try:
                self._engine.decode(form, encoded, *streams, pixel_bytes, flags, self._stream)
            except MemoryError:
                without_memory |= {*tiles}
        return [index not in without_memory for index in self._own] + self._others.decode(worker)

    def engine(self, worker: DecodeWorker) -> str:
        codings = [coding for part in self._parts for coding in part.form.header.coding]
        exact = all(coding.reversible for coding in codings) and not self._others.groups
        return EXACT if exact else KERNELS

    def finish(self, worked: list[bool], slots: Slots, device: CudaDevice, stream: Stream) -> None:
        if self._convert:
            good = {index for index, good in zip(self._own, worked, strict=False) if good}
            stored = [
                part.tiles
                for part in self._parts
                if not part.form.ycbcr and not part.form.header.transform
            ]
            indices = [index for tiles in stored for index in tiles if index in good]
            device.ycbcr_to_rgb(slots.addresses[indices], slots.tile, stream)
        self._others.finish(worked[len(self._own) :], slots, device, stream)

    def doubtful(self, decoded: Sequence[int]) -> list[int]:
        wrong: set[int] = set()
        for part, flags in self._flags():
            wrong.update(part.tiles[row] for row in np.flatnonzero(flags).tolist())
        return sorted(wrong & {*decoded})

    def _flags(self) -> Iterator[tuple[_Part, NDArray[np.int32]]]:
        """Yield each part with the flags of its code streams."""
        first = 0
        for part in self._parts:
            yield part, self.work.doubts[first : first + len(part.tiles)]
            first += len(part.tiles)
