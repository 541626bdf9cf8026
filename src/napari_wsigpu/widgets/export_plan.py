"""What is to be exported, and how much that is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from napari.layers import Shapes

from napari_wsigpu.conversion import convert
from napari_wsigpu.conversion.coding import check_ome
from napari_wsigpu.conversion.plan import window_of
from napari_wsigpu.conversion.png import check_png
from napari_wsigpu.model.errors import RegionError, SlideError
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.slide.facts import TIMES, extent, pixel_size
from napari_wsigpu.viewer.layers import slide_of
from napari_wsigpu.viewer.pieces import pieces
from napari_wsigpu.viewer.planes import shown_plane
from napari_wsigpu.viewer.region import drawn, seen, whole
from napari_wsigpu.viewer.together import layers_of, slides_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from threading import Event

    import numpy as np
    from napari import Viewer
    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.conversion import Conversion
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.region import Region

NO_PLANE: Mapping[str, int] = MappingProxyType({})


class Kind(StrEnum):
    """The kind of file that is written."""

    OME_TIFF = "OME-TIFF"
    PNG = "PNG"
    OME_ZARR = "OME-Zarr"


class Part(StrEnum):
    """The part of a slide that is exported, other than shapes."""

    VIEW = "Current view"
    WHOLE = "Whole slide"


class Files(StrEnum):
    """What becomes a file: the box around all shapes, or each of them, perhaps masked by it."""

    ONE = "One"
    EACH = "One a shape"
    MASKED = "One a shape, masked by it"


ENDINGS = {
    Kind.OME_TIFF: (".ome.tif", ".ome.tiff"),
    Kind.PNG: (".png",),
    Kind.OME_ZARR: (".ome.zarr", ".zarr"),
}

# What names may end in that were meant for another kind of file.
OTHER_ENDINGS = (*(ending for endings in ENDINGS.values() for ending in endings), ".tif", ".tiff")


def named(path: str, kind: Kind) -> str:
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
    kind : Kind
        The kind of file.
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
    kind: Kind
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
        if self.kind == Kind.PNG:
            check_png(self.slide, self.size)
        elif self.kind == Kind.OME_TIFF:
            check_ome(self.slide)

    def write(
        self,
        path: Path,
        *,
        overwrite: bool = False,
        progress: Callable[[int, int], None] | None = None,
        cancelled: Event | None = None,
    ) -> Conversion:
        """Write it; see `convert`."""
        return convert(
            self.slide,
            path,
            region=self.region[:4],
            level=self.level,
            color=self.color,
            outline=self.outline,
            z=self.plane.get("z"),
            t=self.plane.get("t"),
            overwrite=overwrite,
            keep=False,
            progress=progress,
            cancelled=cancelled,
        )

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


@dataclass(frozen=True)
class Choices:
    """What shall be exported of a slide, and how.

    Attributes
    ----------
    region : Part or Shapes
        The region, or a layer of shapes around it.
    files : Files
        Of shapes: what becomes a file.
    level : int
        Number of the level of `Slide.pyramid` that becomes the finest one of the file.
    color : {"stored", "srgb"}
        As stored, or in sRGB.
    kind : Kind
        The kind of file.
    """

    region: Part | Shapes = Part.VIEW
    files: Files = Files.ONE
    level: int = 0
    color: Literal["stored", "srgb"] = "stored"
    kind: Kind = Kind.OME_TIFF

    def plans(self, viewer: Viewer, slide: Slide) -> list[Plan]:
        """Return what the choices stand for in a viewer now: at least one file.

        Raises
        ------
        SlideError
            If there is nothing to be exported, or such a file can't hold it.
        """
        active, layers = viewer.layers.selection.active, layers_of(viewer, slide)
        layer = active if active in layers else layers[0]
        choices = self.level, self.color, self.kind
        plane = shown_plane(viewer, layer, slide)
        if isinstance(self.region, Shapes) and self.files != Files.ONE:
            masked = self.files == Files.MASKED
            found = [
                Plan(
                    slide,
                    piece.region,
                    *choices,
                    piece.number,
                    piece.outline if masked else None,
                    plane,
                )
                for piece in pieces(viewer, self.region, layer, slide)
            ]
        else:
            if isinstance(self.region, Shapes):
                region = drawn(viewer, self.region, layer, slide)
            elif self.region == Part.WHOLE:
                region = whole(slide)
            else:
                region = seen(viewer, layer, slide)
            found = [Plan(slide, region, *choices, plane=plane)]
        for plan in found:
            plan.check()
        return found


class Announcement(NamedTuple):
    """What will be written: its size, and what there is to know; no size if it can't be."""

    size: str
    notes: str


def announce(choices: Choices, viewer: Viewer, slide: Slide) -> Announcement:
    """Say what choices stand for in a viewer now."""
    try:
        plans = choices.plans(viewer, slide)
    except SlideError as error:
        return Announcement("", str(error))
    said = dict.fromkeys(note for plan in plans for note in plan.region.notes)
    plane = ", ".join(f"{axis} = {at}" for axis, at in plans[0].plane.items())
    notes = [*([f"It is the plane {plane}."] if plane else []), *said]
    return Announcement(summary(plans), " ".join(notes))


def export_region(
    viewer: Viewer,
    path: Path | str,
    region: Part | Shapes = Part.VIEW,
    files: Files = Files.ONE,
    level: int = 0,
    color: Literal["stored", "srgb"] = "stored",
    *,
    overwrite: bool = False,
) -> list[Path]:
    """Write a region of the slide that a viewer shows, as the dock "Export" does.

    Parameters
    ----------
    viewer : Viewer
        The slide is that of the active layer, or the only one.
    path : Path or str
        The file; its ending says of which `Kind` it is.
    region, files, level, color
        See `Choices`.
    overwrite : bool
        Whether files may be replaced.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    SlideError
        If there is no such region, or a file can't hold it or be written.
    """
    slides = slides_of(viewer)
    active = slide_of(viewer.layers.selection.active)
    if active is None and len(slides) != 1:
        raise RegionError("It is unclear which slide to export; select its layer.")
    kinds = [kind for kind, endings in ENDINGS.items() if str(path).lower().endswith(endings)]
    if not kinds:
        raise RegionError(f"'{path}' is no name of an export; end it with .ome.tif, .png or .zarr.")
    plans = Choices(region, files, level, color, kinds[0]).plans(viewer, active or slides[0])
    paths = paths_of(plans, Path(path))
    for plan, target in zip(plans, paths, strict=True):
        plan.write(target, overwrite=overwrite)
    return paths
