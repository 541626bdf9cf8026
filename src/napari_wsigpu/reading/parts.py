"""`SlideParts`: what every reader of an open slide has to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from napari_wsigpu.model.geometry import computed_once
from napari_wsigpu.reading.cache import TileKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napari_wsigpu.codecs.cpu import CpuDecoder
    from napari_wsigpu.model.layout import LevelLayout, PyramidLevel, SlideLayout
    from napari_wsigpu.reading.log import TileLog
    from napari_wsigpu.reading.plan import ReadPlan
    from napari_wsigpu.storage.source import ByteSource


@dataclass(frozen=True, eq=False)
class SlideParts:
    """An open slide, as its readers see it.

    Attributes
    ----------
    number : int
        Number of the open slide, for the keys of its tiles.
    layout : SlideLayout
        Its description.
    images : Mapping of int to LevelLayout
        Pyramid levels by number from 0 on, then the pictures that mosaics consist of; associated
        images by -1, -2, ...
    pyramid : sequence of PyramidLevel
        Which level is averaged from which.
    source : ByteSource
        Source of the encoded tiles.
    decoder : CpuDecoder
        Decodes them on the CPU.
    log : TileLog
        Counts tiles and reports failures.
    """

    number: int
    layout: SlideLayout
    images: Mapping[int, LevelLayout]
    pyramid: Sequence[PyramidLevel]
    source: ByteSource
    decoder: CpuDecoder
    log: TileLog

    @computed_once
    def finer(self) -> dict[int, int]:
        """Number of the finer level that each computed level is averaged from."""
        return {level.number: level.finer for level in self.pyramid if level.finer is not None}

    def key(self, plan: ReadPlan, tile: int) -> TileKey:
        """Return the key of a tile, given by its index in a plan."""
        return TileKey(self.number, plan.image, *plan.tiles[tile].tolist())
