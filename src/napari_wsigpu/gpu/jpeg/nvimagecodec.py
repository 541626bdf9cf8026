"""`NvImageCodecDecoder`: decodes the tiles of one slide on a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from napari_wsigpu.gpu.compressed.compressed_tiles import CompressedTiles
from napari_wsigpu.gpu.jpeg.codestream import Jpeg2000Streams, recipe_for
from napari_wsigpu.gpu.jpeg.gpu_batch import GpuBatch
from napari_wsigpu.gpu.jpeg.jpeg_intervals import IntervalStreams
from napari_wsigpu.gpu.jpeg.jpeg_stacks import JpegStreams
from napari_wsigpu.gpu.jpeg2000.jpeg2000_tiles import Jpeg2000Tiles

if TYPE_CHECKING:
    from napari_wsigpu.codecs.cpu import CpuDecoder
    from napari_wsigpu.codecs.decoder import Deliver, EncodedBatch
    from napari_wsigpu.gpu.device.interfaces import Slots, Stream
    from napari_wsigpu.gpu.device.verify import Verifier
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.gpu.jpeg.codestream import Recipe
    from napari_wsigpu.gpu.jpeg.joining import StackedBatch
    from napari_wsigpu.model.arrays import Integers
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.storage.source import ByteSource

    Preparer = JpegStreams | Jpeg2000Streams | Jpeg2000Tiles | CompressedTiles

NOT_JOINED = "the restart intervals of its JPEG cannot be joined"
NO_KERNELS = "the kernels for this compression cannot be compiled here"


@dataclass(frozen=True, eq=False)
class NvImageCodecDecoder:
    """Decodes the tiles of one slide on a device, or on the CPU if the device cannot decode them.

    Parameters
    ----------
    worker : DecodeWorker
        Worker of the device, shared by all slides.
    cpu : CpuDecoder
        Decoder for the other tiles.
    verifier : Verifier
        Compares the first tiles of the slide with the CPU's.
    """

    worker: DecodeWorker
    cpu: CpuDecoder
    verifier: Verifier
    _preparers: dict[LevelLayout, Preparer | str] = field(default_factory=dict, init=False)

    def schedule(
        self,
        batch: EncodedBatch,
        slots: Slots,
        deliver: Deliver,
        stream: Stream,
        *,
        at_once: bool = True,
    ) -> GpuBatch:
        """Start decoding a batch of tiles of one level.

        Parameters
        ----------
        batch : EncodedBatch
            Encoded tiles; the decoder releases the batch when it is done.
        slots : Slots
            Device memory for the decoded tiles, which the caller keeps pinned.
        deliver : callable
            Called with the indices of decoded tiles, to submit work on them to `stream`. It is
            called again for tiles that the CPU had to decode afterwards.
        stream : Stream
            Stream for all work on the batch; `GpuBatch.wait` synchronizes it.
        at_once : bool
            Start now, in the worker's thread. Otherwise the thread that waits for the batch decodes
            it, which saves a switch of threads if the caller waits immediately.
        """
        pending = GpuBatch(self, batch, slots, deliver, stream)
        pending.prepare()
        if at_once:
            self.worker.submit(pending.run)
        return pending

    def read_stacked(
        self, source: ByteSource, level: LevelLayout, tiles: Integers, background: float
    ) -> StackedBatch | None:
        """Read tiles of a level, joined for `schedule`; see `JpegStreams.read_stacked`."""
        preparer = self.preparer(level)
        if not isinstance(preparer, JpegStreams):
            return None
        return preparer.read_stacked(source, level, tiles, background, self.worker)

    def preparer(self, level: LevelLayout) -> Preparer | str:
        """Return the preparer of a level's tiles, or the reason why the CPU decodes them."""
        if self.verifier.reason is not None:
            return self.verifier.reason
        preparer = self._preparers.get(level)
        if preparer is None:
            recipe = recipe_for(level)
            preparer = recipe if isinstance(recipe, str) else self._new_preparer(level, recipe)
            self._preparers[level] = preparer
        return preparer

    def _new_preparer(self, level: LevelLayout, recipe: Recipe) -> Preparer | str:
        if recipe.kind == "jpeg":
            if not self.worker.start(recipe.kind):
                return NO_KERNELS
            if level.encoding.jpeg_header is None:
                return JpegStreams(level, recipe, self.worker)
            intervals = IntervalStreams(level, recipe, self.worker)
            return intervals if intervals.works else NOT_JOINED
        if recipe.kind != "jpeg2000":
            compressed = self.worker.compressed
            return (
                CompressedTiles(level, recipe.kind, compressed)
                if compressed.ready()
                else NO_KERNELS
            )
        engine = self.worker.jpeg2000
        if engine.ready():
            return Jpeg2000Tiles(level, recipe, engine)
        return Jpeg2000Streams(level, recipe) if recipe.by_library else NO_KERNELS
