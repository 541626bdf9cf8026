"""What travels with the pixels: a record of the slide, and its associated images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu.formats.tiff.tiff import is_rgb
from napari_wsigpu.formats.wsigpu import VERSION, region_of
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.privacy import MASK, PRIVATE_IMAGES, Screen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.conversion.options import Region
    from napari_wsigpu.conversion.plan import Plan, PlaneNumber
    from napari_wsigpu.slide.slide import Slide

# What all vendors have is told by fields of the record, and these are of the file that was read.
OWN_SECTIONS = frozenset({"wsigpu", "tiff", "problems"})


class Picture(NamedTuple):
    """An associated image that travels."""

    name: str
    pixels: NDArray[Any]
    rgb: bool
    icc: bytes | None


def make_record(slide: Slide, plan: Plan, *, private: bool) -> dict[str, Any]:
    """Return what `formats.wsigpu` reads of a slide, JSON-serialisable.

    Parameters
    ----------
    slide, plan
        What is converted, and to what.
    private : bool
        Whether fields that can name a patient, dates and the barcode are kept; else all is
        dropped that `privacy.Screen` hides.
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
    channels = [
        {"name": name, "color": channel.color}
        for name, channel in zip(names, slide.channels, strict=True)
    ]
    sections = {
        key: value
        for key, value in metadata.items()
        if isinstance(value, Mapping) and key not in OWN_SECTIONS
    }
    return {
        "wsigpu": VERSION,
        **{key: metadata[key] for key in common if metadata.get(key)},
        "vendor": own.get("vendor", slide.vendor),
        # What it was when the slide was scanned, over the scale at which it is kept.
        "objective": objective and objective / scale,
        "mpp": plan.mpp and list(plan.mpp),
        **({"region": list(region)} if region else {}),
        "background": slide.layout.background,
        "channels": channels,
        "downsamples": [level.downsample for level in plan.pyramid],
        "metadata": sections,
    }


def pictures(slide: Slide, plan: Plan, *, private: bool) -> tuple[list[Picture], list[str]]:
    """Return the associated images that travel, and a sentence for each that can't.

    Label and macro can show a patient's name, and travel only if `private` is true. They show the
    glass, of which a part of the slide is one as well; what else there is, as a thumbnail, shows
    all of the slide, and travels only with that.
    """
    found: list[Picture] = []
    problems: list[str] = []
    for item in slide.layout.associated:
        if not private if item.name in PRIVATE_IMAGES else plan.is_part:
            continue
        image = slide.associated_images[item.name]
        try:
            pixels = image.read()
            icc = None if item.icc is None else bytes(slide.read_bytes([item.icc])[0])
        except SlideError as error:
            problems.append(f"The {item.name} image is left out: {error}")
        else:
            found.append(Picture(item.name, pixels, is_rgb(item.image), icc))
    return found, problems


def notes_on(
    slide: Slide, planes: Sequence[PlaneNumber], missing: int = 0, *, private: bool
) -> list[str]:
    """Return a sentence for what does not travel, and for all that is wrong with the slide.

    `planes` are those that are written, of which the slide lacks so many; what can name a patient
    is left out unless `private`.
    """
    notes = []
    if slide.labels:
        names = ", ".join(f"'{name}'" for name in slide.labels)
        left = names if private else str(len(slide.labels))
        notes.append(f"Label images are not converted; {left} stayed behind.")
    total = slide.planes.size_z * slide.planes.size_t
    if len(planes) < total:
        along = {axis: {plane._asdict()[axis] for plane in planes} for axis in slide.planes.names}
        which = ", ".join(f"{axis} = {min(at)}" for axis, at in along.items() if len(at) == 1)
        many = "One plane is" if len(planes) == 1 else f"{len(planes)} planes are"
        notes.append(f"{many} converted of {total}: {which}.")
    if missing:
        notes.append(f"{missing} of {len(planes)} planes are background, as the slide lacks them.")
    others = slide.layout.hidden_planes + 1 - (total - missing)
    if others > 0:
        notes.append(f"{others} further plane(s), which are not read, are not converted.")
    problems = list(slide.layout.problems)
    if not private and problems:
        problems = Screen(slide.metadata, slide.path).sentences(problems)
    return notes + problems


def _region(slide: Slide, plan: Plan) -> Region | None:
    """Return what is written, in pixels of level 0 of the slide that it was cut from first."""
    outer = region_of(slide.metadata)
    if not plan.is_part:
        return outer
    left, top, across, down = outer or (0, 0, *slide.dimensions)
    window, level = plan.levels[0].window, plan.levels[0].source.layout
    x, width = across / level.width, window.width
    y, height = down / level.height, window.height
    return (
        left + round(window.left * x),
        top + round(window.top * y),
        max(1, round(width * x)),
        max(1, round(height * y)),
    )


def _without_hidden(value: Any) -> Any:
    """Drop what is hidden, and the keys that hold nothing else."""
    if isinstance(value, Mapping):
        kept = {key: _without_hidden(item) for key, item in value.items()}
        return {
            key: item for key, item in kept.items() if item != MASK and (item or not value[key])
        }
    if isinstance(value, list | tuple):
        return [item for item in map(_without_hidden, value) if item != MASK]
    return value
