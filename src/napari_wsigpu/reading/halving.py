"""`Halving`: compute missing levels of a pyramid as averages of 2 x 2 pixels on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading.plan import Regions
from napari_wsigpu.reading.planning import plan_regions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from napari_wsigpu.gpu.device.interfaces import Stream
    from napari_wsigpu.model.arrays import AnyArray, DeviceArray
    from napari_wsigpu.reading.device import DeviceBackend
    from napari_wsigpu.reading.plan import ReadOptions

    Placed = tuple[int, Rect]  # first pixel in the result, and the rectangle to read

# Bytes of finer pixels that are read at once.
FINER_BYTES = 256 << 20
# Sample types whose averages the device's kernel rounds as `area_average` does.
EXACT_TYPES = ("uint8", "uint16", "int16")


@dataclass(frozen=True, eq=False)
class Halving:
    """Reads regions of a level that is an image halved one or more times.

    Parameters
    ----------
    backend : DeviceBackend
        Reads the finer pixels and averages them on its device.
    number : int
        Number of the image that is averaged.
    halvings : int
        Number of times that the image is halved.
    """

    _backend: DeviceBackend
    _number: int
    _halvings: int

    @property
    def _step(self) -> int:
        return 1 << self._halvings

    def read(
        self, regions: Regions, options: ReadOptions, *, to_host: bool = True
    ) -> AnyArray | None:
        """Read regions of the averaged level.

        Parameters
        ----------
        regions : Regions
            Regions inside the level.
        options : ReadOptions
            How to read.
        to_host : bool
            Return an ndarray in the colors of the options, not a device array in stored colors.

        Returns
        -------
        array, shape (pixels, channels), or (pixels,) for one channel
            Pixels of one region after another. None as in `DeviceBackend.read`, and if the regions
            are empty or have steps, or the samples are not of `EXACT_TYPES`.
        """
        image = self._backend.parts.images[self._number]
        if regions.step != (1, 1) or not regions.offsets[-1] or image.dtype.name not in EXACT_TYPES:
            return None
        # Stored colors are averaged; the table is applied to the result.
        stored = replace(options, table=None)
        samples = image.channels if options.channel is None else 1
        device = self._backend.device
        shape = int(regions.offsets[-1]), samples

        def average(stream: Stream) -> AnyArray | None:
            with stream:
                pixels = device.empty(shape, image.dtype)
            for group in self._groups(regions, samples * image.dtype.itemsize):
                finer = self._finer([rect for _, rect in group])
                plans = plan_regions(self._number, self._backend.parts.images, finer)
                found = self._backend.read(
                    self._number, plans, finer.offsets, stored, to_host=False
                )
                if found is None:
                    return None
                with stream:
                    self._put(found.reshape(-1, samples), finer, group, pixels, stream)
                # Other streams may reuse the memory of the finer pixels, so all work on it must be
                # done.
                stream.synchronize()
            if not to_host:
                return pixels
            host = device.download(pixels, stream)
            stream.synchronize()
            return host

        try:
            pixels = self._backend.work(average)
        except MemoryError:
            return None
        if pixels is None or options.table is None or not to_host:
            return pixels if pixels is None or options.channel is None else pixels[..., 0]
        return options.table.recolored(pixels[None])[0]

    def _groups(self, regions: Regions, pixel: int) -> Iterator[list[Placed]]:
        """Split regions into groups whose finer pixels fit into memory.

        Yields
        ------
        list of (int, Rect)
            For each part of a group, its first pixel in the buffer of all regions, and its
            rectangle.
        """
        group: list[Placed] = []
        size = 0
        places = zip(*(column.tolist() for column in (regions.tops, regions.lefts)), strict=True)
        for (top, left), offset, (height, width) in zip(
            places, regions.offsets.tolist(), regions.shapes, strict=False
        ):
            row = self._step**2 * width * pixel
            most = max(1, FINER_BYTES // max(1, row))
            for first in range(0, height, most):
                rect = Rect(top + first, left, min(most, height - first), width)
                if group and size + rect.height * row > FINER_BYTES:
                    yield group
                    group, size = [], 0
                group.append((offset + first * width, rect))
                size += rect.height * row
        if group:
            yield group

    def _finer(self, rects: Sequence[Rect]) -> Regions:
        """Return the regions of the finer image that lie under rectangles."""
        image, step = self._backend.parts.images[self._number], self._step
        finer = []
        for rect in rects:
            top, left = rect.top * step, rect.left * step
            height = min(rect.height * step, image.height - top)
            finer.append(Rect(top, left, height, min(rect.width * step, image.width - left)))
        return Regions.of(finer)

    def _put(
        self,
        found: DeviceArray,
        finer: Regions,
        group: Sequence[Placed],
        pixels: DeviceArray,
        stream: Stream,
    ) -> None:
        """Average parts of one size in one pass, unless a block would mix rows of two parts."""
        device, offsets = self._backend.device, finer.offsets.tolist()
        parts = list(enumerate(zip(finer.shapes, group, strict=True)))
        for (height, width), run in groupby(parts, lambda part: part[1][0]):
            members = list(run)
            alone = height % self._step > 0
            batches = [[member] for member in members] if alone else [members]
            for batch in batches:
                first, last = batch[0][0], batch[-1][0]
                average = found[offsets[first] : offsets[last + 1]]
                average = average.reshape(1, -1, width, found.shape[1])
                for _ in range(self._halvings):
                    _, rows, columns, samples = average.shape
                    shape = 1, -(-rows // 2), -(-columns // 2), samples
                    smaller = device.empty(shape, average.dtype)
                    device.average_area(average, smaller, (2.0, 2.0), (0, 0), stream)
                    average = smaller
                self._copy(average, [part[1] for _, part in batch], pixels, stream)

    def _copy(
        self, average: DeviceArray, group: Sequence[Placed], pixels: DeviceArray, stream: Stream
    ) -> None:
        """Copy averages of one size to their regions; copy adjacent ones together."""
        flat = average.reshape(-1, average.shape[-1])
        size, pixel = len(flat) // len(group), flat.shape[1] * flat.itemsize
        starts = np.array([offset for offset, _ in group], np.int64)
        ends = np.flatnonzero(np.diff(starts) != size) + 1
        edges = [0, *ends.tolist(), len(group)]
        device = self._backend.device
        for first, last in pairwise(edges):
            place = device.address(pixels) + int(starts[first]) * pixel
            device.copy(place, flat[first * size : last * size], stream)
