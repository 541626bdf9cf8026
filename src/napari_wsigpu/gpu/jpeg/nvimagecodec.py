"""Tiles of one slide, decoded by nvImageCodec."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from napari_wsigpu.gpu.jpeg.batch import GpuBatch
from napari_wsigpu.gpu.jpeg.codestream import Jpeg2000Streams, recipe
from napari_wsigpu.gpu.jpeg.stack import JpegStreams
from napari_wsigpu.gpu.jpeg2000.tiles import Jpeg2000Tiles

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from napari_wsigpu.codecs.cpu import HostSlots
    from napari_wsigpu.codecs.decoder import Decoder, Deliver, EncodedBatch
    from napari_wsigpu.gpu.device.device import Slots, Stream
    from napari_wsigpu.gpu.device.verify import Verifier
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.gpu.jpeg.codestream import Recipe
    from napari_wsigpu.gpu.jpeg.joining import StackedBatch
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.storage.source import ByteSource

    Maker = JpegStreams | Jpeg2000Streams | Jpeg2000Tiles

NO_KERNELS = "the kernels that decode such JPEG 2000 can't be compiled here"


@dataclass(frozen=True, eq=False)
class NvImageCodecDecoder:
    """Decodes the tiles of one slide on a device, and what the device can't on the CPU.

    Parameters
    ----------
    worker : DecodeWorker
        Runs the batches; shared by all slides on the device.
    cpu : Decoder
        Decodes what the device can't.
    verifier : Verifier
        Proves that the device's pixels are right.
    """

    worker: DecodeWorker
    cpu: Decoder[HostSlots]
    verifier: Verifier
    _makers: dict[LevelLayout, Maker | str] = field(default_factory=dict, init=False)

    def schedule(
        self,
        batch: EncodedBatch,
        slots: Slots,
        deliver: Deliver,
        stream: Stream,
        *,
        share: float = 1.0,
        at_once: bool = True,
    ) -> GpuBatch:
        """Start decoding a batch of tiles of one level.

        Parameters
        ----------
        batch : EncodedBatch
            The tiles.
        slots : Slots
            Where each is decoded to.
        deliver : callable
            Called with the indices of tiles; submits work on them to `stream`. It is called again
            for tiles that had to be decoded another way.
        stream : Stream
            The order of all work on the batch.
        share : float
            Part of the tiles that the device decodes; the CPU decodes the others.
        at_once : bool
            Decode in the worker's thread, starting now. Otherwise the caller is about to wait and
            decodes in its own thread, which saves a change of threads.
        """
        pending = GpuBatch(self, batch, slots, deliver, stream)
        pending.prepare(share)
        if at_once:
            self.worker.submit(pending.run)
        return pending

    def read(
        self, source: ByteSource, level: LevelLayout, tiles: NDArray[np.int64], background: float
    ) -> StackedBatch | None:
        """Read tiles of a level as `schedule` has them decoded; see `JpegStreams.read`."""
        made = self.maker(level)
        if not isinstance(made, JpegStreams):
            return None
        return made.read(source, level, tiles, background, self.worker)

    def maker(self, level: LevelLayout) -> Maker | str:
        """Return what makes a level's code streams, or why the CPU decodes it."""
        if self.verifier.reason is not None:
            return self.verifier.reason
        made = self._makers.get(level)
        if made is None:
            how = recipe(level)
            made = how if isinstance(how, str) else self._made(level, how)
            self._makers[level] = made
        return made

    def _made(self, level: LevelLayout, how: Recipe) -> Maker | str:
        if how.kind == "jpeg":
            return JpegStreams(level, how)
        engine = self.worker.jpeg2000
        if engine.ready():
            return Jpeg2000Tiles(level, how, engine)
        return Jpeg2000Streams(level, how) if how.by_library else NO_KERNELS
