"""What is to be exported, and how much that is."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from napari_wsigpu.conversion.coding import check_ome
from napari_wsigpu.conversion.plan import window_of
from napari_wsigpu.conversion.png import check_png
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.widgets.facts import TIMES, extent, pixel_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.region import Region

NO_PLANE: Mapping[str, int] = MappingProxyType({})
OME_TIFF, PNG, OME_ZARR = "OME-TIFF", "PNG", "OME-Zarr"
ENDINGS = {
    OME_TIFF: (".ome.tif", ".ome.tiff"),
    PNG: (".png",),
    OME_ZARR: (".ome.zarr", ".zarr"),
}

# What names may end in that were meant for another kind of file.
OTHER_ENDINGS = (*(ending for endings in ENDINGS.values() for ending in endings), ".tif", ".tiff")


def named(path: str, kind: str) -> str:
    """Return the path with an ending of a kind of file: its own one, or else the kind's first."""
    lower = path.lower()
    if lower.endswith(ENDINGS[kind]):
        return path
    foreign = max((end for end in OTHER_ENDINGS if lower.endswith(end)), key=len, default="")
    return path[: len(path) - len(foreign)] + ENDINGS[kind][0]


class Plan(NamedTuple):
    """A region of a slide at one level, and the kind of file that it shall be.

    Attributes
    ----------
    slide : Slide
        The slide.
    region : Region
        The region, in pixels of level 0.
    level : int
        Number of the level in the slide's pyramid.
    color : {"stored", "srgb"}
        As stored, or in sRGB.
    kind : str
        One of the keys of `ENDINGS`.
    number : int
        Of the shape, counted from 1; 0 if it is no single shape.
    outline : tuple of ndarray, optional
        Rings outside of which pixels become background.
    plane : Mapping of str to int
        Its "z" and "t", where the slide has several.
    """

    slide: Slide
    region: Region
    level: int
    color: Color
    kind: str
    number: int = 0
    outline: tuple[NDArray[np.float64], ...] | None = None
    plane: Mapping[str, int] = NO_PLANE

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels of the level."""
        level = next(level for level in self.slide.pyramid if level.number == self.level)
        window = window_of(self.slide, level, self.region[:4])
        return window.width, window.height

    @property
    def bytes(self) -> int:
        """Size of the pixels of that level."""
        image = self.slide.layout.levels[0]
        width, height = self.size
        return width * height * image.channels * image.dtype.itemsize

    def check(self) -> None:
        """Check that the kind of file can hold it.

        Raises
        ------
        SlideError
            If it can't.
        """
        if self.kind == PNG:
            check_png(self.slide, self.size)
        elif self.kind == OME_TIFF:
            check_ome(self.slide)

    def summary(self) -> str:
        """Return its size in pixels and bytes, and that of a pixel and on the glass where known."""
        width, height = self.size
        parts = [f"{width:,} {TIMES} {height:,} px", f"{byte_size(self.bytes)} uncompressed"]
        mpp = self.slide.mpp
        if mpp is not None:
            level = next(level for level in self.slide.pyramid if level.number == self.level)
            downsample = level.layout.downsample(self.slide.layout.levels[0])
            parts.append(pixel_size(mpp, downsample))
            parts.append(extent(self.region.width * mpp[0], self.region.height * mpp[1]))
        return ", ".join(parts)


def summary(plans: Sequence[Plan]) -> str:
    """Return the size of one or more files."""
    if len(plans) == 1:
        return plans[0].summary()
    return f"{len(plans):,} files, {byte_size(sum(plan.bytes for plan in plans))} uncompressed"


def paths_of(plans: Sequence[Plan], path: Path) -> list[Path]:
    """Return where each is written: numbered by its shape, if there are several."""
    if len(plans) == 1:
        return [path]
    ending = next(end for end in ENDINGS[plans[0].kind] if path.name.lower().endswith(end))
    stem = path.name[: -len(ending)]
    digits = len(str(max(plan.number for plan in plans)))
    return [path.with_name(f"{stem} {plan.number:0{digits}}{ending}") for plan in plans]
