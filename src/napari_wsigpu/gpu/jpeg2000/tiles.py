"""JPEG 2000 tiles of a batch: which our kernels decode, and which nvImageCodec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.gpu.jpeg.codestream import Jpeg2000Streams, Prepared
from napari_wsigpu.gpu.jpeg2000.engine import EXACT, KERNELS, form_of_stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.decoder import EncodedBatch
    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.device import Slots, Stream
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.gpu.device.workspace import Workspace
    from napari_wsigpu.gpu.jpeg.codestream import Recipe
    from napari_wsigpu.gpu.jpeg2000.decoder import Form
    from napari_wsigpu.gpu.jpeg2000.engine import Jpeg2000Engine
    from napari_wsigpu.model.layout import LevelLayout


class Jpeg2000Tiles:
    """Has JPEG 2000 tiles decoded: by our kernels if they take their form, or by nvImageCodec.

    Parameters
    ----------
    level : LevelLayout
        The level.
    how : Recipe
        Its recipe.
    engine : Jpeg2000Engine
        Our kernels.
    """

    def __init__(self, level: LevelLayout, how: Recipe, engine: Jpeg2000Engine) -> None:
        grid = level.grid
        self._shape = (grid.tile_height, grid.tile_width, level.encoding.samples)
        self._dtype, self._how = level.dtype, how
        self._library = Jpeg2000Streams(level, how)
        self._engine = engine

    def prepare(self, batch: EncodedBatch, count: int, work: Workspace) -> Prepared:
        """Sort the first `count` tiles of a batch by who decodes them."""
        # Forms are told apart by their identity, since to hash one takes longer than all else.
        parts: dict[tuple[int, int], _Part] = {}
        own, rest = [], []
        starts, lengths = batch.starts.T[:count].tolist(), batch.lengths.T[:count].tolist()
        for index, places in enumerate(map(zip, starts, lengths)):
            forms = [self._form(batch.view[start : start + length]) for start, length in places]
            if None in forms:
                rest.append(index)
                continue
            own.append(index)
            for plane, form in enumerate(forms):
                assert form is not None
                key = id(form), plane
                if key not in parts:
                    parts[key] = _Part(form, plane, [])
                parts[key].tiles.append(index)
        others = self._library.prepare_these(batch, rest if self._how.by_library else (), work)
        if not own:
            return others
        work.make_room(0, 0, len(own) * batch.starts.shape[0])
        convert = self._how.convert
        return _Tiles(batch, own, list(parts.values()), others, self._engine, convert)

    def _form(self, stream: memoryview) -> Form | None:
        """Return the form of a code stream if our kernels make what the level wants of it."""
        form = form_of_stream(stream)
        if isinstance(form, str) or (form.shape, form.dtype) != (self._shape, self._dtype):
            return None
        return form


class _Part(NamedTuple):
    """Code streams of one form, each of which is one plane of a tile."""

    form: Form
    plane: int
    tiles: list[int]


@dataclass(eq=False, repr=False)
class _Tiles(Prepared):
    kind = "jpeg2000"

    _batch: EncodedBatch
    _own: list[int]
    _parts: list[_Part]
    _others: Prepared
    _engine: Jpeg2000Engine
    _convert: bool

    def __post_init__(self) -> None:
        self.work = self._others.work
        self.groups = [*([index] for index in self._own), *self._others.groups]

    def describe(self, addresses: Sequence[int], stream: Stream) -> None:
        self._addresses, self._stream = np.array(addresses, np.int64), stream
        self._others.describe(addresses, stream)

    def decode(self, worker: DecodeWorker) -> list[bool]:
        batch, encoded = self._batch, np.frombuffer(self._batch.view, np.uint8)
        pixel_bytes = batch.level.channels * batch.level.dtype.itemsize
        without_memory: set[int] = set()
        for (form, plane, tiles), flags in self._flags():
            flags[:] = 1
            targets = self._addresses[tiles] + plane * form.pixel_bytes
            places = batch.starts[plane, tiles], batch.lengths[plane, tiles], targets
            try:
                self._engine.decode(form, encoded, *places, pixel_bytes, flags, self._stream)
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
            whole = [part.tiles for part in self._parts if not part.form.ycbcr]
            indices = [index for tiles in whole for index in tiles if index in good]
            device.ycbcr_to_rgb(slots.addresses[indices], slots.tile, stream)
        self._others.finish(worked[len(self._own) :], slots, device, stream)

    def doubtful(self, decoded: Sequence[int]) -> list[int]:
        wrong: set[int] = set()
        for part, flags in self._flags():
            wrong.update(part.tiles[place] for place in np.flatnonzero(flags).tolist())
        return sorted(wrong & {*decoded})

    def _flags(self) -> Iterator[tuple[_Part, NDArray[np.int32]]]:
        """Return each part, and the flags of its code streams."""
        first = 0
        for part in self._parts:
            yield part, self.work.doubts[first : first + len(part.tiles)]
            first += len(part.tiles)
