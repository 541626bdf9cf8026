"""`DeviceExecutor`: carries read plans out in device memory."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.model.errors import RegionError, SlideError, device_error
from napari_wsigpu.reading.device_pipeline import DevicePipeline, Output
from napari_wsigpu.reading.plan import regions_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.device import Device, Stream
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.plan import ReadOptions, ReadPlan

    Integers = NDArray[np.int64]


class DeviceExecutor:
    """Carries plans of one slide's images out through a device.

    Parameters
    ----------
    pipeline : DevicePipeline
        What decodes and pastes tiles there.

    Attributes
    ----------
    pipeline
        As given.
    """

    def __init__(self, pipeline: DevicePipeline) -> None:
        self.pipeline = pipeline
        self._released = False

    @property
    def device(self) -> Device:
        """The device it works on."""
        return self.pipeline.decoder.worker.device

    def read(
        self,
        number: int,
        plans: Sequence[ReadPlan],
        offsets: Integers,
        options: ReadOptions,
        *,
        to_host: bool,
        share: float = 1.0,
        out: Any = None,
        stream: Any = None,
    ) -> Any | None:
        """Put the pixels of regions together.

        Parameters
        ----------
        number : int
            The image that the regions are of.
        plans : sequence of ReadPlan
            As `plan_regions` makes them.
        offsets : ndarray of int64
            The regions' own, `Regions.offsets`.
        options : ReadOptions
            How; tiles are kept without its colours.
        to_host : bool
            Return an ndarray instead of a device array.
        share : float
            Part of the tiles that the device decodes; the CPU decodes the rest meanwhile.
        out : device array, optional
            Where to put the pixels, of so many bytes.
        stream : int or object with ``ptr``, optional
            A CUDA stream of the caller to work on.

        Returns
        -------
        array, shape (pixels, channels), or (pixels,) for one channel
            Region after region. None if they need tiles that are computed, or device memory is
            short.

        Raises
        ------
        RegionError
            If `out` is not in the device's memory.
        TileError
            If tiles can't be decoded, with their names.
        SlideError
            If the file can't be read, or the device fails.
        """
        self._check(out)
        if any(plan.computed.any() for plan in plans):
            return None
        if any(len(plan.blanks) for plan in plans[1:]):
            return None  # in a picture above others, even the background hides what is below
        if any(plan.channels is not None for plan in plans):
            return None  # the device pastes all channels of a pixel
        image = self.pipeline.images[number]
        samples = () if options.channel is not None else (image.channels,)
        try:
            with self.device.active():
                shape = (int(offsets[-1]), *samples)
                output = Output(
                    self._empty(shape, image.dtype) if out is None else out.reshape(shape),
                    None if stream is None else self.device.as_stream(stream),
                    offsets,
                    options,
                    share,
                    to_host,
                    None if options.table is None else self.device.colors(options.table),
                )
                self._carry_out(image, plans, output)
        except MemoryError:
            return None
        except SlideError:
            raise
        except Exception as error:  # what CUDA and CuPy raise has no common base
            raise device_error(self.device.name, error) from error
        finally:
            if self._released:
                self.release()
        self.pipeline.log.note(output.failures, report=options.tolerant)
        if output.failures and not options.tolerant:
            failed = (key[1:] for key in output.failures)
            raise self.pipeline.log.error(output.failures, regions_with(plans, failed))
        return output.host if to_host else output.pixels

    def send(self, pixels: NDArray[Any], out: Any = None, stream: Any = None) -> Any:
        """Copy host pixels to a device array.

        Raises
        ------
        RegionError
            If the device has no memory for them.
        """
        self._check(out)
        try:
            with self.device.active():
                given = None if stream is None else self.device.as_stream(stream)
                with self._stream(given, decodes=False) as used:
                    target = self._empty(pixels.shape, pixels.dtype) if out is None else out
                    self.device.follow(used)
                    self.device.send(pixels, target, used)
                    used.synchronize()
        except MemoryError:
            raise _too_large(pixels.nbytes, self.device.name) from None
        return target

    def drop_tiles(self, level: int, tiles: NDArray[np.int64]) -> None:
        """Drop some of a level's tiles on the device; see `DeviceTiles.drop`."""
        self.pipeline.tiles.drop(self.pipeline.slide, level, tiles)

    def forget_tiles(self) -> None:
        """Drop the slide's tiles on the device."""
        self.pipeline.tiles.forget(self.pipeline.slide)

    def release(self) -> None:
        """Let go of the slide's tiles, and of memory that only these used."""
        self._released = True
        self.forget_tiles()
        self.pipeline.tiles.trim()
        self.pipeline.decoder.release()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a new device array.

        Raises
        ------
        RegionError
            If the device has no memory for it.
        """
        try:
            return self._empty(shape, dtype)
        except MemoryError:
            raise _too_large(int(np.prod(shape)) * dtype.itemsize, self.device.name) from None

    def work(self, task: Callable[[Stream], Any], stream: Any = None) -> Any:
        """Have work of the caller's done on a stream, or on that of the caller, and wait for it.

        Raises
        ------
        DeviceError
            If the device fails.
        """
        try:
            with self.device.active():
                given = None if stream is None else self.device.as_stream(stream)
                with self._stream(given, decodes=False) as used:
                    self.device.follow(used)
                    try:
                        return task(used)
                    finally:
                        # Other streams may be given memory that is let go now.
                        used.synchronize()
        except (MemoryError, SlideError):
            raise
        except Exception as error:  # what CUDA and CuPy raise has no common base
            raise device_error(self.device.name, error) from error

    def _check(self, out: Any) -> None:
        if out is not None and not self.device.is_own(out):
            raise RegionError(f"out has to be an array in the memory of '{self.device.name}'.")

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        try:
            return self.device.empty(shape, dtype)
        except ValueError:  # more bytes than a number can count
            raise MemoryError from None

    def _carry_out(self, image: LevelLayout, plans: Sequence[ReadPlan], output: Output) -> None:
        found = [
            self.pipeline.tiles.find(self.pipeline.slide, plan.image, plan.tiles) for plan in plans
        ]
        decodes = any(not here.all() for _, here in found)
        decodes = decodes and not any(map(self.pipeline.reads_raw, plans))
        try:
            with self._stream(output.given, decodes=decodes) as stream:
                output.stream = stream
                self.device.follow(stream)
                try:
                    if not plans or _shows_background(plans, output.options):
                        self._fill(image, output)
                    for plan, (reserved, here) in zip(plans, found, strict=True):
                        last = plan is plans[-1]
                        self.pipeline.read(plan, reserved, here, output, last=last)
                    if output.to_host and output.host is None:
                        output.settled = False
                        output.host = self.device.download(output.pixels, stream)
                finally:
                    if not output.settled:
                        stream.synchronize()
        finally:
            for reserved, _ in found:
                if reserved is not None:
                    self.pipeline.tiles.unpin(reserved)

    def _fill(self, image: LevelLayout, output: Output) -> None:
        """Show the background everywhere."""
        options = output.options
        if options.table is None:
            self.device.fill(output.pixels, self.pipeline.background, output.stream)
            return
        blank = options.table.background(self.pipeline.background, image.channels)
        for channel, value in enumerate(blank.tolist()):
            self.device.fill(output.pixels[..., channel], value, output.stream)

    @contextmanager
    def _stream(self, given: Stream | None, *, decodes: bool) -> Iterator[Stream]:
        """Give out the caller's stream, the worker's, or one that is idle."""
        if given is not None:
            yield given
        elif decodes:
            yield self.pipeline.decoder.worker.stream
        else:
            worker = self.pipeline.decoder.worker
            stream = worker.take_stream()
            yield stream
            worker.give_stream(stream)


def _too_large(size: int, device: str) -> RegionError:
    return RegionError(
        f"A region of {size >> 20} MiB doesn't fit into the memory of '{device}'; read it in parts."
    )


def _shows_background(plans: Sequence[ReadPlan], options: ReadOptions) -> bool:
    """Whether pixels may be left over when all tiles were pasted."""
    if options.tolerant or any(len(plan.blanks) for plan in plans):
        return True
    covered = plans[0].covered
    for plan in plans[1:]:
        covered = covered | plan.covered
    return not covered.all()
