"""The parts of a conversion other than pixels: the slide's record and associated images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu.formats.tiff.tiff import is_rgb
from napari_wsigpu.formats.wsigpu import VERSION, region_of
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.privacy import MASK, PRIVATE_IMAGES, Screen
from napari_wsigpu.slide.facts import masked_problems

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from napari_wsigpu.conversion.conversion_plan import Plan, PlaneNumber
    from napari_wsigpu.conversion.journal import Journal
    from napari_wsigpu.conversion.options import Options, Region
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.slide.slide import Slide

# Metadata sections that are not copied: fields of the record replace them, or they describe only
# the source file.
OWN_SECTIONS = frozenset({"wsigpu", "tiff", "problems"})


class AssociatedPixels(NamedTuple):
    """A decoded associated image."""

    name: str
    pixels: Array
    rgb: bool
    icc: bytes | None


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Everything that a target writes, and the path to write to.

    Attributes
    ----------
    path : Path
        File or folder to write.
    plan : Plan
        The levels.
    journal : Journal
        Records the written tiles.
    record : dict
        The record of the slide; see `make_record`.
    associated : list of AssociatedPixels
        Associated images.
    icc : bytes or None
        ICC profile.
    """

    path: Path
    plan: Plan
    journal: Journal
    record: dict[str, Any]
    associated: list[AssociatedPixels]
    icc: bytes | None


def make_record(slide: Slide, plan: Plan, *, private: bool) -> dict[str, Any]:
    """Return the record of a slide that `formats.wsigpu` reads back; JSON-serializable.

    Parameters
    ----------
    slide, plan
        The slide, and the plan of its conversion.
    private : bool
        Whether to keep dates, the barcode and other fields that may identify a patient. By
        default everything that `privacy.Screen` hides is dropped.
    """
    metadata = slide.metadata
    names = [channel.name for channel in slide.channels]
    if not private:
        screen = Screen(metadata)
        metadata = _without_hidden(screen.metadata)
        names = [screen.text(name) for name in names]
    region = _region(slide, plan)
    own = metadata.pop("wsigpu", {})
    scale = plan.levels[0].source.layout.downsample(slide.layout.levels[0])
    objective = metadata.get("objective")
    common = ("vendor", "scanner", "scan_date", "barcode")
    named = zip(names, slide.channels, strict=True)
    channels = [{"name": name, "color": channel.color} for name, channel in named]
    fields = {key: value for key, value in metadata.items() if key not in OWN_SECTIONS}
    sections = {key: value for key, value in fields.items() if isinstance(value, Mapping)}
    return {
        "wsigpu": VERSION,
        **{key: metadata[key] for key in common if metadata.get(key)},
        "vendor": own.get("vendor", slide.vendor),
        # The effective magnification of the result's finest level.
        "objective": objective and objective / scale,
        "mpp": plan.mpp and list(plan.mpp),
        **({"region": list(region)} if region else {}),
        "background": slide.layout.background,
        "channels": channels,
        "downsamples": [level.downsample for level in plan.pyramid],
        "metadata": sections,
    }


def associated_pixels(
    slide: Slide, plan: Plan, *, private: bool
) -> tuple[list[AssociatedPixels], list[str]]:
    """Return the associated images to write, and a message for each one that cannot be read.

    The label and macro images may show a patient's name and are written only if `private` is true.
    They show the glass slide, so a region keeps them too. Other images, such as the thumbnail,
    show the whole scan and are left out if only a region is converted.
    """
    found: list[AssociatedPixels] = []
    problems: list[str] = []
    for item in slide.layout.associated:
        if not private if item.name in PRIVATE_IMAGES else plan.is_part:
            continue
        image = slide.associated_images[item.name]
        try:
            pixels = image.read()
            found.append(AssociatedPixels(item.name, pixels, is_rgb(item.image), image.icc_profile))
        except SlideError as error:
            problems.append(f"The {item.name} image is left out: {error}")
    return found, problems


def conversion_notes(
    slide: Slide, options: Options, planes: Sequence[PlaneNumber], missing: int = 0
) -> list[str]:
    """Return messages about parts that are not converted and about problems with the slide.

    Parameters
    ----------
    slide, options
        The slide, and the options of its conversion. Without `options.private`, the messages
        contain nothing that may identify a patient.
    planes : sequence of PlaneNumber
        The planes of the result.
    missing : int
        Number of these planes that the slide lacks.
    """
    notes = []
    if slide.labels:
        names = ", ".join(f"'{name}'" for name in slide.labels)
        left_out = names if options.private else str(len(slide.labels))
        notes.append(f"Label images are not converted ({left_out}).")
    positioned = any(slide.layout.first) or slide.planes.starts
    if positioned and options.kind != "ome-zarr" and region_of(slide.metadata) is None:
        notes.append("The position of the image is not converted; only OME-Zarr keeps it.")
    total = slide.planes.size_z * slide.planes.size_t
    if len(planes) < total:
        along = {axis: {plane._asdict()[axis] for plane in planes} for axis in slide.planes.names}
        which = ", ".join(f"{axis} = {min(at)}" for axis, at in along.items() if len(at) == 1)
        verb = "is" if len(planes) == 1 else "are"
        notes.append(f"{len(planes)} of {total} planes {verb} converted: {which}.")
    if missing:
        which = f"{missing} of {len(planes)} planes"
        notes.append(f"{which} are missing from the slide and become background.")
    others = slide.layout.other_planes + 1 - (total - missing)
    if others > 0:
        notes.append(f"{others} further plane(s) cannot be read and are not converted.")
    problems = list(slide.layout.problems) if options.private else masked_problems(slide)
    return notes + problems


def _region(slide: Slide, plan: Plan) -> Region | None:
    """Return the written region in pixels of level 0 of the original slide.

    If the slide is itself a region, the original is the slide that it was cut from. Returns None if
    the whole of an original slide is written.
    """
    outer = region_of(slide.metadata)
    if not plan.is_part:
        return outer
    left, top, across, down = outer or (0, 0, *slide.dimensions)
    window, level = plan.levels[0].window, plan.levels[0].source.layout
    x, width = across / level.width, window.width
    y, height = down / level.height, window.height
    corner = left + round(window.left * x), top + round(window.top * y)
    return *corner, max(1, round(width * x)), max(1, round(height * y))


def _without_hidden(value: Any) -> Any:
    """Return metadata without masked values, and without keys that contain nothing else."""
    if isinstance(value, Mapping):
        kept = {key: _without_hidden(item) for key, item in value.items()}
        pairs = kept.items()
        return {key: item for key, item in pairs if item != MASK and (item or not value[key])}
    if isinstance(value, list | tuple):
        return [item for item in map(_without_hidden, value) if item != MASK]
    return value
