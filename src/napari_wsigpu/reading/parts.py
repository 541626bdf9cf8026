"""`SlideParts`: the parts of an open slide that every reader shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from napari_wsigpu.model.geometry import computed_once
from napari_wsigpu.reading.cache import TileKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.codecs.cpu import CpuDecoder
    from napari_wsigpu.model.layout import LevelLayout, PyramidLevel, SlideLayout
    from napari_wsigpu.reading.log import TileLog
    from napari_wsigpu.reading.plan import ReadPlan
    from napari_wsigpu.storage.source import ByteSource


@dataclass(frozen=True, eq=False)
class SlideParts:
    """The parts of an open slide that every reader shares.

    Attributes
    ----------
    number : int
        Number of the open slide in the keys of its tiles.
    layout : SlideLayout
        Description of the slide.
    images : Mapping of int to LevelLayout
        All images by number: the levels of the pyramid from 0, then the images in mosaics, then the
        associated images, then the levels of single channels (see `channel_levels`).
    associated : frozenset of int
        Numbers of the associated images.
    pyramid : sequence of PyramidLevel
        Levels with the number of the finer level that each computed one is averaged from.
    source : ByteSource
        Source of the encoded tiles.
    decoder : CpuDecoder
        Decodes tiles on the CPU.
    log : TileLog
        Counts tiles and reports failures.
    """

    number: int
    layout: SlideLayout
    images: Mapping[int, LevelLayout]
    associated: frozenset[int]
    pyramid: Sequence[PyramidLevel]
    source: ByteSource
    decoder: CpuDecoder
    log: TileLog

    @computed_once
    def finer(self) -> dict[int, int]:
        """Number of the finer level that each computed level is averaged from."""
        return {level.number: level.finer for level in self.pyramid if level.finer is not None}

    def key(self, plan: ReadPlan, tile: int, color: Color = "stored") -> TileKey:
        """Return the key of the tile at an index in a plan."""
        row, column = plan.tiles[tile].tolist()
        return TileKey(self.number, plan.image, row, column, color)
