"""Plans of exports: region, level, format and size of each file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from napari.layers import Shapes

from napari_wsigpu.conversion import convert
from napari_wsigpu.conversion.coding import check_ome
from napari_wsigpu.conversion.conversion_plan import window_of
from napari_wsigpu.conversion.png import check_png
from napari_wsigpu.display.composite_source import RGB
from napari_wsigpu.model.errors import RegionError, SlideError
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.slide.facts import TIMES, extent, pixel_size
from napari_wsigpu.viewer.annotations.annotation_layers import SLIDE
from napari_wsigpu.viewer.annotations.shape_regions import shape_regions
from napari_wsigpu.viewer.layers.slide_layers import shown_composite
from napari_wsigpu.viewer.layers.stack_axes import shown_plane
from napari_wsigpu.viewer.view.arrangement import active_slide, layers_of, slides_of
from napari_wsigpu.viewer.view.region import drawn, seen, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from threading import Event

    import numpy as np
    from napari import Viewer
    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.conversion import Conversion
    from napari_wsigpu.model.composite import Composite
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.view.region import Region

NO_PLANE: Mapping[str, int] = MappingProxyType({})


class Kind(StrEnum):
    """The format of the file."""

    OME_TIFF = "OME-TIFF"
    PNG = "PNG"
    OME_ZARR = "OME-Zarr"


class Part(StrEnum):
    """A part of a slide that can be exported without drawing shapes."""

    VIEW = "Current view"
    WHOLE = "Whole slide"


class Files(StrEnum):
    """How the selected shapes become files: one for all, or one per shape, optionally masked."""

    ONE = "One"
    EACH = "One per shape"
    MASKED = "One per shape, masked by it"


ENDINGS = {
    Kind.OME_TIFF: (".ome.tif", ".ome.tiff"),
    Kind.PNG: (".png",),
    Kind.OME_ZARR: (".ome.zarr", ".zarr"),
}

# Suffixes that are replaced when the user chooses another format.
OTHER_ENDINGS = (*(ending for endings in ENDINGS.values() for ending in endings), ".tif", ".tiff")


def named(path: str, kind: Kind) -> str:
    """Return the path if its suffix matches the format, or else with the format's first suffix."""
    lower = path.lower()
    if lower.endswith(ENDINGS[kind]):
        return path
    # Replace the longest suffix: ".ome.tif" also ends in ".tif".
    foreign = max((end for end in OTHER_ENDINGS if lower.endswith(end)), key=len, default="")
    return path[: len(path) - len(foreign)] + ENDINGS[kind][0]


class Plan(NamedTuple):
    """A region of a slide at one level, and the format of its file.

    Attributes
    ----------
    slide : Slide
        The slide.
    region : Region
        The region, in pixels of level 0.
    level : int
        Number of the level in the slide's pyramid.
    color : {"stored", "srgb"}
        Colors of the file: as stored, or sRGB.
    kind : Kind
        The format.
    number : int
        Number of the shape, counted from 1; 0 if the region is not a single shape.
    outline : tuple of ndarray, optional
        Rings; pixels outside become background.
    plane : Mapping of str to int
        Indices "z" and "t" if the slide has several planes.
    composite : Composite, optional
        How channels become the RGB image of a PNG.
    """

    slide: Slide
    region: Region
    level: int
    color: Color
    kind: Kind
    number: int = 0
    outline: tuple[NDArray[np.float64], ...] | None = None
    plane: Mapping[str, int] = NO_PLANE
    composite: Composite | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels of the level."""
        level = next(level for level in self.slide.pyramid if level.number == self.level)
        window = window_of(self.slide, level, self.region[:4])
        return window.width, window.height

    @property
    def bytes(self) -> int:
        """Size of the region's pixels at the level, without compression."""
        image = self.slide.layout.levels[0]
        width, height = self.size
        pixel = RGB if self.composite is not None else image.channels * image.dtype.itemsize
        return width * height * pixel

    def check(self) -> None:
        """Check that the format can hold the region.

        Raises
        ------
        SlideError
            If it cannot.
        """
        if self.kind == Kind.PNG:
            check_png(self.slide, self.size, self.composite)
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
        """Write the file; see `convert`."""
        return convert(
            self.slide,
            path,
            region=self.region[:4],
            level=self.level,
            color=self.color,
            outline=self.outline,
            z=self.plane.get("z"),
            t=self.plane.get("t"),
            composite=self.composite,
            overwrite=overwrite,
            keep=False,
            progress=progress,
            cancelled=cancelled,
        )

    def summary(self) -> str:
        """Describe the size in pixels and bytes, and on the glass if the pixel size is known."""
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
    """Describe the size of one or more files."""
    if len(plans) == 1:
        return plans[0].summary()
    return f"{len(plans):,} files, {byte_size(sum(plan.bytes for plan in plans))} uncompressed"


def paths_of(plans: Sequence[Plan], path: Path) -> list[Path]:
    """Return the path of each file; several files are numbered by their shapes."""
    if len(plans) == 1:
        return [path]
    ending = next(end for end in ENDINGS[plans[0].kind] if path.name.lower().endswith(end))
    stem = path.name[: -len(ending)]
    digits = len(str(max(plan.number for plan in plans)))
    return [path.with_name(f"{stem} {plan.number:0{digits}}{ending}") for plan in plans]


@dataclass(frozen=True)
class Choices:
    """The user's choices for an export.

    Attributes
    ----------
    region : Part or Shapes
        The part to export, or a shapes layer.
    files : Files
        How shapes become files.
    level : int
        Number of the level in `Slide.pyramid` that becomes the file's finest level.
    color : {"stored", "srgb"}
        Colors of the file: as stored, or sRGB.
    kind : Kind
        The format.
    """

    region: Part | Shapes = Part.VIEW
    files: Files = Files.ONE
    level: int = 0
    color: Color = "stored"
    kind: Kind = Kind.OME_TIFF

    def plans(self, viewer: Viewer, slide: Slide) -> list[Plan]:
        """Return the plans for a viewer's current state, at least one.

        Raises
        ------
        SlideError
            If there is nothing to export, or the format cannot hold it.
        """
        active, layers = viewer.layers.selection.active, layers_of(viewer, slide)
        layer = active if active in layers else layers[0]
        choices = self.level, self.color, self.kind
        plane = shown_plane(viewer, layer, slide)
        composite = shown_composite(layer) if self.kind == Kind.PNG else None
        if isinstance(self.region, Shapes) and self.files != Files.ONE:
            masked = self.files == Files.MASKED
            found = []
            for number, region, outline in shape_regions(viewer, self.region, layer, slide):
                mask = outline if masked else None
                found.append(Plan(slide, region, *choices, number, mask, plane, composite))
        else:
            if isinstance(self.region, Shapes):
                region = drawn(viewer, self.region, layer, slide)
            elif self.region == Part.WHOLE:
                region = whole(slide)
            else:
                region = seen(viewer, layer, slide)
            found = [Plan(slide, region, *choices, plane=plane, composite=composite)]
        for plan in found:
            plan.check()
        return found


class Announcement(NamedTuple):
    """Size of an export, and notes; if it isn't possible, no size, and the reason as notes."""

    size: str
    notes: str


def announce(choices: Choices, viewer: Viewer, slide: Slide) -> Announcement:
    """Describe the export for a viewer's current state."""
    try:
        plans = choices.plans(viewer, slide)
    except SlideError as error:
        return Announcement("", str(error))
    region_notes = dict.fromkeys(note for plan in plans for note in plan.region.notes)
    plane = ", ".join(f"{axis} = {at}" for axis, at in plans[0].plane.items())
    notes = [
        *(["The channels are written as they are shown."] if plans[0].composite else []),
        *([f"Only the plane {plane} is exported."] if plane else []),
        *region_notes,
    ]
    return Announcement(summary(plans), " ".join(notes))


def export_region(
    viewer: Viewer,
    path: Path | str,
    region: Part | Shapes = Part.VIEW,
    files: Files = Files.ONE,
    level: int = 0,
    color: Color = "stored",
    *,
    overwrite: bool = False,
) -> list[Path]:
    """Write a region of the slide that a viewer shows, as the "Export" dock does.

    Parameters
    ----------
    viewer : Viewer
        A viewer; the slide that its active layer shows or belongs to is exported.
    path : Path or str
        The file; its suffix selects the `Kind`.
    region, files, level, color
        See `Choices`.
    overwrite : bool
        Whether existing files may be replaced.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    SlideError
        If the region is empty, or the file cannot hold it or cannot be written.
    """
    active, slides = viewer.layers.selection.active, slides_of(viewer)
    path_of_owner = None if active is None else active.metadata.get(SLIDE)
    owner = next((each for each in slides if each.path == path_of_owner), None)
    slide = active_slide(viewer, owner)
    if slide is None:
        raise RegionError("No slide is open; open the slide to export.")
    kinds = [kind for kind, endings in ENDINGS.items() if str(path).lower().endswith(endings)]
    if not kinds:
        raise RegionError(
            f"The suffix of '{path}' does not select a format; use a name that ends in .ome.tif, "
            ".png or .zarr."
        )
    plans = Choices(region, files, level, color, kinds[0]).plans(viewer, slide)
    paths = paths_of(plans, Path(path))
    for plan, target in zip(plans, paths, strict=True):
        plan.write(target, overwrite=overwrite)
    return paths
