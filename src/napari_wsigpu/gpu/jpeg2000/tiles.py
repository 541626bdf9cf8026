"""JPEG 2000 tiles of a batch: which our kernels decode, and which nvImageCodec."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.gpu.codestream import Jpeg2000Streams
from napari_wsigpu.gpu.jpeg2000.engine import EXACT, KERNELS, form_of_stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.codecs.decoder import EncodedBatch
    from napari_wsigpu.gpu.codestream import Prepared, Recipe
    from napari_wsigpu.gpu.device import Device, Slots, Stream
    from napari_wsigpu.gpu.jpeg2000.decoder import Form
    from napari_wsigpu.gpu.jpeg2000.engine import Jpeg2000Engine
    from napari_wsigpu.gpu.worker import DecodeWorker
    from napari_wsigpu.gpu.workspace import Workspace
    from napari_wsigpu.layout import LevelLayout


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
        self._shape = (level.grid.tile_height, level.grid.tile_width, level.channels)
        self._dtype, self._convert = level.dtype, how.convert
        self._library = Jpeg2000Streams(level, how)
        self._engine = engine

    def prepare(self, batch: EncodedBatch, count: int, work: Workspace) -> Prepared:
        """Sort the first `count` tiles of a batch by who decodes them."""
        forms: defaultdict[Form, list[int]] = defaultdict(list)
        rest, places = [], zip(batch.starts[0].tolist(), batch.lengths[0].tolist(), strict=True)
        for index, (start, length) in zip(range(count), places, strict=False):
            form = form_of_stream(batch.view[start : start + length])
            if isinstance(form, str) or (form.shape, form.dtype) != (self._shape, self._dtype):
                rest.append(index)
            else:
                forms[form].append(index)
        others = self._library.prepare_these(batch, rest, work)
        if not forms:
            return others
        work.make_room(0, 0, count)
        return _Tiles(batch, forms, others, self._engine, convert=self._convert)


class _Tiles:
    kind, joins = "jpeg2000", False

    def __init__(
        self,
        batch: EncodedBatch,
        forms: dict[Form, list[int]],
        others: Prepared,
        engine: Jpeg2000Engine,
        *,
        convert: bool,
    ) -> None:
        self._batch, self._forms, self._others, self._engine = batch, forms, others, engine
        self._convert = convert
        self._own = [index for indices in forms.values() for index in indices]
        self.work = others.work
        self.groups = [*([index] for index in self._own), *others.groups]

    def describe(self, addresses: Sequence[int], stream: Stream) -> None:
        self._addresses, self._stream = np.array(addresses, np.int64), stream
        self._others.describe(addresses, stream)

    def decode(self, worker: DecodeWorker) -> list[bool]:
        batch, status = self._batch, self.work.doubts
        encoded = np.frombuffer(batch.view, np.uint8)
        worked: list[bool] = []
        for form, indices in self._forms.items():
            flags = status[len(worked) : len(worked) + len(indices)]
            flags[:] = 1
            places = batch.starts[0, indices], batch.lengths[0, indices], self._addresses[indices]
            try:
                self._engine.decode(form, encoded, *places, flags, self._stream)
            except MemoryError:
                worked += [False] * len(indices)
            else:
                worked += [True] * len(indices)
        return worked + self._others.decode(worker)

    def engine(self, worker: DecodeWorker) -> str:
        codings = [coding for form in self._forms for coding in form.header.coding]
        exact = all(coding.reversible for coding in codings) and not self._others.groups
        return EXACT if exact else KERNELS

    def finish(self, worked: list[bool], slots: Slots, device: Device, stream: Stream) -> None:
        if self._convert:
            good = {index for index, good in zip(self._own, worked, strict=False) if good}
            whole = [tiles for form, tiles in self._forms.items() if not form.ycbcr]
            indices = [index for tiles in whole for index in tiles if index in good]
            device.ycbcr_to_rgb(slots.addresses[indices], slots.tile, stream)
        self._others.finish(worked[len(self._own) :], slots, device, stream)

    def doubtful(self, decoded: Sequence[int]) -> list[int]:
        wrong = np.flatnonzero(self.work.doubts[: len(self._own)]).tolist()
        return sorted({self._own[place] for place in wrong} & {*decoded})
