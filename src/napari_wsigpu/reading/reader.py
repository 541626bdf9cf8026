"""`RegionReader`: pixels of one slide, by the way that is asked for or proves fastest."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.display.blocks import blocks, extent
from napari_wsigpu.errors import DeviceError, RegionError
from napari_wsigpu.gpu.choose import background_start, cuda_index, device_index, gpu_worker, pace
from napari_wsigpu.gpu.codestream import recipe
from napari_wsigpu.gpu.device import Window
from napari_wsigpu.gpu.nvimagecodec import NvImageCodecDecoder
from napari_wsigpu.gpu.tiles import device_tiles
from napari_wsigpu.gpu.verify import Verifier
from napari_wsigpu.memory import TileMemory
from napari_wsigpu.reading.cache import TileKey, tile_cache
from napari_wsigpu.reading.device_reader import DeviceReader
from napari_wsigpu.reading.in_use import decoder_in_use
from napari_wsigpu.reading.mosaic import compose
from napari_wsigpu.reading.scheduler import TileScheduler
from napari_wsigpu.reading.span import Span

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.codecs.cpu import CpuDecoder
    from napari_wsigpu.display.blocks import Block
    from napari_wsigpu.gpu.worker import DecodeWorker
    from napari_wsigpu.layout import LevelLayout, PyramidLevel, SlideLayout
    from napari_wsigpu.reading.log import TileLog
    from napari_wsigpu.storage.source import ByteSource

logger = logging.getLogger(__name__)


class RegionReader:
    """Reads regions of one slide's levels and associated images, to the host or a device.

    Parameters
    ----------
    slide : int
        Number of the open slide, for the keys of its tiles.
    layout : SlideLayout
        The slide.
    images : Mapping of int to LevelLayout
        Pyramid levels by number from 0 on, then the pictures that lie on those that are
        canvases; associated images by -1, -2, ...
    pyramid : sequence of PyramidLevel
        Which level is averaged from which.
    source, cpu, log
        Where bytes come from, what decodes them on the CPU, and what counts tiles.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``: what shall decode.
    keeps_whole : bool
        Whether tiles stay in caches that a region takes whole.
    """

    def __init__(
        self,
        slide: int,
        layout: SlideLayout,
        images: Mapping[int, LevelLayout],
        pyramid: Sequence[PyramidLevel],
        source: ByteSource,
        cpu: CpuDecoder,
        log: TileLog,
        device: str,
        *,
        keeps_whole: bool = True,
    ) -> None:
        self._slide = slide
        self._path = layout.path
        self._background = layout.background
        self._images = images
        self._numbers = {image: number for number, image in images.items()}
        self._halved = {level.number: level.finer for level in pyramid if level.inserted}
        self._source = source
        self._cpu = cpu
        self._log = log
        self._choice = device, device_index(device)
        self._keeps_whole = keeps_whole
        self._tile_memory = TileMemory()
        self._lock = threading.Lock()
        self._readers: dict[int, DeviceReader] = {}
        self._verifier = Verifier(layout.path)
        self._gpu_failure: str | None = None
        self._colored: tuple[ColorTable, TileScheduler] | None = None
        self._scheduler = TileScheduler(
            slide,
            images,
            pyramid,
            layout.background,
            source,
            cpu,
            tile_cache,
            log,
            lambda image, tiles, seconds: pace.note(_key(image), "cpu", tiles, seconds),
            keeps_whole=keeps_whole,
        )
        if self._choice[1] is not None:
            gpu_worker(self._choice[1])

    @property
    def device(self) -> str:
        """What shall decode; from the next read on, if it is set.

        A GPU that failed is tried again then.

        Raises
        ------
        DeviceError
            If it can't be used; nothing has changed then.
        """
        return self._choice[0]

    @device.setter
    def device(self, device: str) -> None:
        index = device_index(device)
        if index is not None:
            gpu_worker(index)
        self._choice, self._gpu_failure = (device, index), None

    @property
    def decoder(self) -> tuple[str, str]:
        """What decodes level 0 now, and why; see `decoder_in_use`."""
        image = self._images[0].stored[0]
        against = self._verifier.reason or self._gpu_failure
        return decoder_in_use(image, *self._choice, against, _key(image))

    def read(
        self,
        level: int,
        rows: Span,
        columns: Span,
        channel: int | None = None,
        *,
        tolerant: bool = False,
        table: ColorTable | None = None,
    ) -> NDArray[Any]:
        """Read positions that lie within one image, to the host.

        Parameters
        ----------
        level : int
            Index of the image.
        rows, columns : Span
            Positions in its own pixels, all within its extent.
        channel : int, optional
            One channel instead of all; not with a table.
        tolerant : bool
            Show the background for tiles that can't be decoded, instead of raising.
        table : ColorTable, optional
            The colours that the pixels of a level get.

        Returns
        -------
        ndarray, shape (rows, columns, channels), or (rows, columns) for one channel
            A new array.

        Raises
        ------
        TileError
            If tiles can't be decoded, with their names.
        SlideError
            If the file can't be read.
        """
        image = self._images[level]
        if image.parts:

            def read(picture: LevelLayout, rows: Span, columns: Span) -> NDArray[Any]:
                number = self._numbers[picture]
                return self.read(number, rows, columns, channel, tolerant=tolerant, table=table)

            return compose(image, rows, columns, channel, self._blank(image, table), read)
        if rows.step == columns.step == 1:
            window = Window(rows.start, columns.start, rows.length, columns.length, channel)
            pixels = self._by_gpu(level, window, table, tolerant=tolerant)
            if pixels is not None:
                return pixels
        return self._scheduler_of(table).read(level, rows, columns, channel, tolerant=tolerant)

    def read_window(
        self, level: int, window: Window, table: ColorTable | None = None
    ) -> NDArray[Any]:
        """Read a window that may reach outside of its level, to the host; errors as in `read`."""
        pixels = self._by_gpu(level, window, table, tolerant=False)
        if pixels is not None:
            return pixels
        image = self._images[level]
        top, bottom = _clipped(window.top, window.height, image.height)
        left, right = _clipped(window.left, window.width, image.width)
        rows, columns = Span(top, 1, bottom - top), Span(left, 1, right - left)
        if image.parts:
            inside = self.read(level, rows, columns, window.channel, table=table)
        else:
            inside = self._scheduler_of(table).read(level, rows, columns, window.channel)
        if inside.shape[:2] == (window.height, window.width):
            return inside
        shape = (window.height, window.width, *inside.shape[2:])
        try:
            region = np.full(shape, self._blank(image, table), image.dtype)
        except (MemoryError, ValueError):
            raise RegionError(
                f"A region of {window.width} x {window.height} pixels doesn't fit into memory; "
                "read it in parts."
            ) from None
        y, x = top - window.top, left - window.left
        region[y : y + inside.shape[0], x : x + inside.shape[1]] = inside
        return region

    def read_tiles(
        self,
        level: int,
        tiles: Collection[tuple[int, int]],
        table: ColorTable | None = None,
    ) -> dict[tuple[int, int], NDArray[Any]]:
        """Read whole tiles, for a display: those that fail show the background.

        Parameters
        ----------
        level : int
            Index of the image.
        tiles : collection of (int, int)
            Row and column of each.
        table : ColorTable, optional
            The colours that the pixels get.

        Returns
        -------
        dict of (int, int) to ndarray, shape (height, width, channels)
            Cut to the image. All but failed ones are in the host's cache now.

        Raises
        ------
        SlideClosedError
            If the slide was closed.
        SlideReadError, SlideChangedError
            If the file can't be read now, or is another one.
        DeviceError
            If the device that was chosen fails.
        """
        image = self._images[level]
        found: dict[tuple[int, int], NDArray[Any]] = {}
        for block in blocks(tiles):
            rows, columns = extent(image, block)
            window = Window(rows.start, columns.start, rows.length, columns.length)
            pixels = self._by_gpu(level, window, table, tolerant=True)
            if image.parts:
                pixels = self.read(level, rows, columns, tolerant=True, table=table)
            if pixels is not None:
                found |= self._kept(level, block, pixels, table)
        rest = [tile for tile in tiles if tile not in found]
        read = self._scheduler_of(table).read_tiles(level, rest)
        return found | dict(zip(rest, read, strict=True))

    def _kept(
        self, level: int, block: Block, pixels: NDArray[Any], table: ColorTable | None
    ) -> dict[tuple[int, int], NDArray[Any]]:
        """Cut a block's pixels into tiles, and keep these in the host's cache."""
        image = self._images[level]
        grid = image.grid
        found: dict[tuple[int, int], NDArray[Any]] = {}
        for row, column in block.tiles():
            top, left = (
                (row - block.top) * grid.tile_height,
                (column - block.left) * grid.tile_width,
            )
            part = pixels[top : top + grid.tile_height, left : left + grid.tile_width]
            tile = self._tile_memory.copy(part)
            key = TileKey(self._slide, level, row, column)
            if not self._log.has_failed(None if image.computed else key):
                tile_cache.put(key if table is None else key.in_srgb(), tile)
            found[row, column] = tile
        return found

    def worker(self, device: str) -> DecodeWorker:
        """Return what reads to a device, named as in `read_to_device`.

        Raises
        ------
        DeviceError
            If the device can't be used.
        """
        own = self._choice[1]
        return gpu_worker(own if device == "cuda" and own is not None else cuda_index(device))

    def read_to_device(
        self,
        level: int,
        window: Window,
        device: str,
        out: Any = None,
        stream: Any = None,
        table: ColorTable | None = None,
    ) -> Any:
        """Read a window that may reach outside of its level, to a device.

        Parameters
        ----------
        level : int
            Index of the image.
        window : Window
            The region, of one channel or all; of all where `out` is given.
        device : str
            ``"cuda"``, which is the slide's own device or the first one, or ``"cuda:N"``.
        out : cupy.ndarray, optional
            Where to put the pixels.
        stream : int or object with ``ptr``, optional
            The CUDA stream to work on.
        table : ColorTable, optional
            The colours that the pixels get.

        Returns
        -------
        cupy.ndarray, shape (height, width, channels), or (height, width) for one channel

        Raises
        ------
        DeviceError
            If the device can't be used.
        SlideError
            As in `read`.
        """
        reader = self._reader(self.worker(device))
        wanted, own = self._choice
        image = self._images[level]
        way = "gpu" if own is not None else "cpu"
        if wanted == "auto" and not isinstance(recipe(image), str):
            way = pace.choose(_key(image))
        share = _share(image, way)
        pixels, all_channels = None, window._replace(channel=None)
        if not image.parts:
            pixels = reader.read(
                level,
                all_channels,
                to_host=False,
                share=share,
                keeps_whole=self._keeps(window),
                out=out,
                stream=stream,
                table=table,
            )
        if pixels is None:
            return reader.send(self.read_window(level, window, table), out, stream)
        return pixels if window.channel is None else pixels[..., window.channel]

    def release(self) -> None:
        """Let go of threads and tiles; the next read takes them again."""
        self._cpu.release()
        self._scheduler.release()
        self._tile_memory.clear()
        with self._lock:
            readers, self._readers = self._readers, {}
            self._colored = None
        for reader in readers.values():
            reader.release()

    def clear_cache(self) -> None:
        """Drop the slide's decoded tiles, on the host and on devices."""
        tile_cache.forget(self._slide)
        with self._lock:
            readers = list(self._readers.values())
        for reader in readers:
            reader.forget_tiles()

    def _keeps(self, window: Window) -> bool:
        """Whether tiles stay on the device that a window takes whole, as for other channels."""
        return self._keeps_whole or window.channel is not None

    def _scheduler_of(self, table: ColorTable | None) -> TileScheduler:
        if table is None:
            return self._scheduler
        with self._lock:
            if self._colored is None or self._colored[0] is not table:
                self._colored = table, self._scheduler.recolored(table)
            return self._colored[1]

    def _blank(self, image: LevelLayout, table: ColorTable | None) -> Any:
        """Return what pixels show that the file does not hold."""
        if table is None:
            return self._background
        return table.background(self._background, image.channels)

    def _by_gpu(
        self, level: int, window: Window, table: ColorTable | None, *, tolerant: bool
    ) -> NDArray[Any] | None:
        """Read by the GPU if it is there, ready and the fastest; else return None."""
        halvings = 0
        while (finer := self._halved.get(level)) is not None:
            level, halvings = finer, halvings + 1
        image = self._images[level]
        stored = level >= 0 and not image.computed and not image.parts
        device, index = self._choice
        if device == "cpu" or not stored or self._gpu_failure is not None:
            return None
        how = recipe(image)
        if isinstance(how, str) or self._verifier.reason is not None:
            return None
        if index is not None:
            return self._reader(gpu_worker(index)).read_to_host(
                level,
                window,
                halvings,
                tolerant=tolerant,
                keeps_whole=self._keeps(window),
                table=table,
            )
        worker = background_start.worker(how.kind)
        way = "cpu" if worker is None else pace.choose(_key(image))
        if worker is None or way == "cpu":
            return None
        try:
            return self._reader(worker).read_to_host(
                level,
                window,
                halvings,
                tolerant=tolerant,
                share=_share(image, way),
                keeps_whole=self._keeps(window),
                table=table,
            )
        except DeviceError as error:
            with self._lock:
                first = self._gpu_failure is None
                self._gpu_failure = str(error).removesuffix(".")
            if first:
                logger.warning("'%s' is decoded on the CPU from now on: %s", self._path, error)
            return None

    def _reader(self, worker: DecodeWorker) -> DeviceReader:
        with self._lock:
            reader = self._readers.get(id(worker))
            if reader is None:
                reader = DeviceReader(
                    self._slide,
                    self._images,
                    self._background,
                    self._source,
                    NvImageCodecDecoder(worker, self._cpu, self._verifier),
                    device_tiles(worker.device),
                    self._log,
                    _note,
                )
                self._readers[id(worker)] = reader
            return reader


def _note(image: LevelLayout, tiles: int, seconds: float, share: float) -> None:
    pace.note(_key(image), "gpu" if share == 1 else "both", tiles, seconds)


def _share(image: LevelLayout, way: str) -> float:
    """Return the part of the tiles that the device decodes."""
    return pace.share(_key(image)) if way == "both" else float(way == "gpu")


def _key(image: LevelLayout) -> Hashable:
    """Name what takes equally long to decode."""
    grid, encoding = image.grid, image.encoding
    return (grid.tile_height, grid.tile_width, image.channels, encoding.compression, encoding.dtype)


def _clipped(start: int, length: int, extent: int) -> tuple[int, int]:
    return max(0, min(start, extent)), max(0, min(start + length, extent))
