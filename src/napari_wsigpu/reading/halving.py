"""Levels that a pyramid lacks, by 2 x 2 averages on the device that decodes the finer one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading.average import area_average
from napari_wsigpu.reading.plan import Regions
from napari_wsigpu.reading.planning import plan_regions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.device import Stream
    from napari_wsigpu.reading.device import DeviceBackend
    from napari_wsigpu.reading.plan import ReadOptions

FINER_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class Halving:
    """Averages regions of one image again and again.

    Parameters
    ----------
    backend : DeviceBackend
        What reads the finer pixels, and where they are averaged.
    number : int
        The image that is averaged.
    halvings : int
        How many times.
    """

    _backend: DeviceBackend
    _number: int
    _halvings: int

    @property
    def _step(self) -> int:
        return 1 << self._halvings

    def read(
        self, regions: Regions, options: ReadOptions, share: float, *, to_host: bool = True
    ) -> Any | None:
        """Read regions of the averaged level.

        Parameters
        ----------
        regions : Regions
            Within the level's extent.
        options : ReadOptions
            How.
        share : float
            Part of the tiles that the device decodes.
        to_host : bool
            Return an ndarray instead of a device array, which has no colours.

        Returns
        -------
        array, shape (pixels, channels), or (pixels,) for one channel
            Region after region. None as in `DeviceBackend.read`, and if there are none.
        """
        if regions.step != (1, 1) or not regions.offsets[-1]:
            return None
        stored = replace(options, table=None)
        image = self._backend.parts.images[self._number]
        samples = image.channels if options.channel is None else 1
        device = self._backend.device
        shape = int(regions.offsets[-1]), samples

        def average(stream: Stream) -> Any | None:
            with stream:
                pixels = device.empty(shape, image.dtype)
            for group in self._groups(regions, samples * image.dtype.itemsize):
                finer = self._finer([rect for _, rect in group])
                plans = plan_regions(self._number, self._backend.parts.images, finer)
                found = self._backend.read(
                    self._number, plans, finer.offsets, stored, to_host=False, share=share
                )
                if found is None:
                    return None
                with stream:
                    self._put(found.reshape(-1, samples), finer, group, pixels)
                # Other streams may be given the memory of the finer pixels once these are let go.
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
        coloured: NDArray[Any] = options.table.recolored(pixels[None])[0]
        return coloured

    def _groups(self, regions: Regions, pixel: int) -> Iterator[list[tuple[int, Rect]]]:
        """Cut regions into rows of so many finer pixels as fit into memory.

        Yields
        ------
        list of (int, Rect)
            Where each goes in the pixels of all, and what it is.
        """
        group: list[tuple[int, Rect]] = []
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
        image, step = self._backend.parts.images[self._number], self._step
        finer = []
        for rect in rects:
            top, left = rect.top * step, rect.left * step
            height = min(rect.height * step, image.height - top)
            finer.append(Rect(top, left, height, min(rect.width * step, image.width - left)))
        return Regions.of(finer)

    def _put(
        self, found: Any, finer: Regions, group: Sequence[tuple[int, Rect]], pixels: Any
    ) -> None:
        """Average those of one size together, if no average would take rows of two."""
        offsets = finer.offsets.tolist()
        parts = list(enumerate(zip(finer.shapes, group, strict=True)))
        for (height, width), run in groupby(parts, lambda part: part[1][0]):
            members = list(run)
            alone = height % self._step > 0
            batches = [[member] for member in members] if alone else [members]
            for batch in batches:
                first, last = batch[0][0], batch[-1][0]
                average = found[offsets[first] : offsets[last + 1]].reshape(
                    -1, width, found.shape[1]
                )
                for _ in range(self._halvings):
                    average = area_average(average, 2, 2)
                self._lay(average, [part[1] for _, part in batch], pixels)

    def _lay(self, average: Any, group: Sequence[tuple[int, Rect]], pixels: Any) -> None:
        """Put averages of one size to their places, all at once where these adjoin."""
        flat = average.reshape(-1, average.shape[-1])
        size = len(flat) // len(group)
        begins = np.array([offset for offset, _ in group], np.int64)
        ends = np.flatnonzero(np.diff(begins) != size) + 1
        edges = [0, *ends.tolist(), len(group)]
        for first, last in pairwise(edges):
            place = int(begins[first])
            pixels[place : place + (last - first) * size] = flat[first * size : last * size]
