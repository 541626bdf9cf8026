"""What travels with the pixels: a record of the slide, and its associated images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu.errors import SlideError
from napari_wsigpu.formats.tiff import is_rgb
from napari_wsigpu.formats.wsigpu import VERSION
from napari_wsigpu.privacy import MASK, PRIVATE_IMAGES, masked

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.conversion.plan import Plan
    from napari_wsigpu.slide import Slide

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
        dropped that `privacy.masked` hides.
    """
    metadata = slide.metadata
    if not private:
        metadata = _without_hidden(masked(metadata))
    own = metadata.pop("wsigpu", {})
    scale = plan.levels[0].source.layout.downsample(slide.layout.levels[0])
    objective = metadata.get("objective")
    common = ("vendor", "scanner", "scan_date", "barcode")
    channels = [{"name": channel.name, "color": channel.color} for channel in slide.channels]
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
        "background": slide.layout.background,
        "channels": channels,
        "downsamples": [level.downsample for level in plan.levels],
        "metadata": sections,
    }


def pictures(slide: Slide, *, private: bool) -> tuple[list[Picture], list[str]]:
    """Return the associated images that travel, and a sentence for each that can't.

    Label and macro can show a patient's name, and travel only if `private` is true.
    """
    found: list[Picture] = []
    problems: list[str] = []
    for item in slide.layout.associated:
        image = slide.associated_images[item.name]
        if item.name in PRIVATE_IMAGES and not private:
            continue
        try:
            pixels = image.read()
            icc = None if item.icc is None else bytes(slide.read_bytes([item.icc])[0])
        except SlideError as error:
            problems.append(f"The {item.name} image is left out: {error}")
        else:
            found.append(Picture(item.name, pixels, is_rgb(item.image), icc))
    return found, problems


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
