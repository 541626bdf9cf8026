"""OME-TIFF: OME-XML describes the channels, the pixel size and the file's other images."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from xml.etree import ElementTree  # writes only; `markup` parses

from tifffile import TiffFile, TiffFileError

from napari_wsigpu.formats import markup, units, wsigpu
from napari_wsigpu.formats.fields import even_step, number, positive_number
from napari_wsigpu.formats.pictures import associated_name
from napari_wsigpu.formats.tiff import claims, companion, pixel_size, tiff
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.layout import AssociatedLayout, Channel, SlideFile, SlideLayout
from napari_wsigpu.model.limits import limits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from xml.etree.ElementTree import Element

    from tifffile import TiffPageSeries

    from napari_wsigpu.formats.fields import Metadata

SAMPLES = (("red", "#ff0000"), ("green", "#00ff00"), ("blue", "#0000ff"))
NOT_LENGTHS = {"pixel", "reference frame"}
CONTRADICTION = "The OME-XML contradicts itself and is ignored."
OTHER_SIZES = "The OME-XML describes no image of {} x {} pixels and is ignored."
PAGES_AS_CHANNELS = (
    "The pages of this file are shown as channels, in file order; they may be planes."
)
RENAMED = (
    "The OME-XML places all planes in a file that is missing from this folder; this file is read "
    "as that file, renamed."
)
LONGEST_KEPT, XML_START = 1 << 18, 1024
# Files of one image, each of which holds a plane, a channel or a time point.
MOST_FILES = 1024
TIFF_DATA_NUMBERS = ("IFD", "FirstC", "FirstZ", "FirstT", "PlaneCount", "NumPlanes")


class OmeDescription(NamedTuple):
    """The contents of one Image element of OME-XML."""

    mpp: tuple[float, float] | None
    channels: tuple[Channel, ...]
    metadata: Metadata
    objective: float | None = None
    scanner: str | None = None
    scan_date: str | None = None
    problems: tuple[str, ...] = ()
    z_spacing: float | None = None
    time_step: float | None = None


def probe(file: TiffFile) -> bool:
    """Whether the first description of the file is OME-XML, perhaps damaged at its end."""
    start = file.pages.first.description[:XML_START]
    return bool(file.is_ome) or (start.startswith("<?xml") and "<OME " in start)


def parse(
    file: TiffFile, source: SlideFile, at: Mapping[str, int] = tiff.DEFAULT_PLANE
) -> SlideLayout:
    """Describe a plane of the largest image of an OME-TIFF; see `tiff.parse`."""
    xml = file.ome_metadata or ""
    root = markup.parse(xml)
    renamed = companion.of_renamed(file, root)
    external = renamed or companion.of_file(file, root) or _counted_from_zero(file, root)
    if external is not None:
        path = file.filehandle.path
        with TiffFile(path, omexml=external) as reopened:
            claims.check(reopened, source.path)
            layout = parse(reopened, source, at)
        return replace(layout, problems=(RENAMED, *layout.problems)) if renamed else layout
    distrust = _distrust(root, file)
    if distrust is not None:
        # Keep tifffile from looking for planes where this XML places them.
        setattr(file, "is_ome", False)  # noqa: B010
    layout = tiff.layout_of(file, source, at)
    main = tiff.main_image(file, source.path)
    page = tiff.keyframe(main)
    index: int | None = None
    if root is not None and distrust != CONTRADICTION:
        same_size = _of_size(main, root)
        if main.kind == "ome":
            index = _index_of(main, file, same_size)
        elif len(same_size) == 1:
            [index] = same_size
        elif not same_size and distrust is None:
            distrust = OTHER_SIZES.format(*tiff.size(main))
    if distrust is not None and len(layout.files) == 1:
        unnamed = not layout.rgb and layout.levels[0].channels > 1
        added = (distrust, PAGES_AS_CHANNELS) if unnamed else (distrust,)
        layout = replace(layout, problems=(*layout.problems, *added))
    description = None if root is None or index is None else describe(root, index)
    if root is None or index is None or description is None:
        return pixel_size.with_size(layout, file, page)
    if distrust is None and main.kind != "ome":
        layout = replace(layout, problems=(*layout.problems, *_unplaced(description, layout)))
    count = layout.levels[0].channels
    stated = description.metadata["Pixels"]
    flat = stated.get("SizeZ") == stated.get("SizeT") == "1"
    known = not layout.rgb and (distrust is None or flat)  # otherwise channels may be planes
    channels = description.channels
    if main.kind == "ome" and len(channels) > count:  # the pages of some channels are missing
        held = tiff.held_channels(main, {"z": layout.planes.z, "t": layout.planes.t})
        channels = tuple(channels[index] for index in held if index < len(channels))
    elif distrust is not None and flat and len(channels) > count:  # other files are missing
        held = _channels_of_file(root, index, file.filename)
        if len(held) == count and max(held) < len(channels):
            channels = tuple(channels[index] for index in held)
    channels = _of_samples(channels, description.metadata["Channels"], count)
    named = known and len(channels) == count
    associated, problems = layout.associated, list[str]()
    if main.kind == "ome":
        associated, problems = _other_images(main, file, source.path)
    metadata = {"ome": description.metadata, **layout.metadata}
    record = _record(root)
    if record:
        metadata["wsigpu"] = wsigpu.origin(record)
    if len(xml) <= LONGEST_KEPT:
        description.metadata["OME"] = markup.nested(root)
        metadata["tiff"].pop("ImageDescription", None)
    if known and distrust is None and 0 < len(channels) < count:
        problems.append(
            f"The OME-XML describes {len(channels)} channel(s), but the image has {count}; their "
            "names are ignored."
        )
    layout = pixel_size.with_size(layout, file, page, description.mpp)
    return replace(
        layout,
        associated=associated,
        channels=channels if named else layout.channels,
        planes=replace(
            layout.planes, z_spacing=description.z_spacing, time_step=description.time_step
        ),
        objective=description.objective,
        scanner=description.scanner or layout.scanner,
        scan_date=description.scan_date,
        metadata=metadata,
        problems=(*layout.problems, *description.problems, *problems),
    )


def describe(root: Element, index: int = 0) -> OmeDescription | None:
    """Describe the image with this index in OME-XML; None if there is no such image."""
    images = list(markup.children(root, "Image"))
    image = images[index] if index < len(images) else None
    pixels = markup.child(image, "Pixels")
    if image is None or pixels is None:
        return None
    sizes = [_micrometers(pixels, axis) for axis in "XY"]
    problems = [
        f"The pixel size along {axis} ({given!r}) is invalid."
        for axis, size in zip("XY", sizes, strict=True)
        if size is None
        and (given := pixels.get(f"PhysicalSize{axis}", "")[:40])
        and units.micrometers(_length_unit(pixels, axis)) is not None
    ]
    stated = [_length_unit(pixels, axis) for axis in "XY" if f"PhysicalSize{axis}" in pixels.attrib]
    unknown = [unit for unit in stated if units.micrometers(unit) is None]
    problems += [units.unknown_length(unit) for unit in unknown[:1] if unit not in NOT_LENGTHS]
    if len(stated) == 1:
        problems.append("The OME-XML states the pixel size along one axis only; it is ignored.")
    channels = list(markup.children(pixels, "Channel"))
    instrument = _instrument(root, image)
    return OmeDescription(
        mpp=None if sizes[0] is None or sizes[1] is None else (sizes[0], sizes[1]),
        channels=tuple(
            Channel(channel.get("Name") or f"channel {number}", _color(channel.get("Color")))
            for number, channel in enumerate(channels)
        ),
        metadata={
            "Image": dict(image.attrib),
            "Pixels": dict(pixels.attrib),
            "Channels": [dict(channel.attrib) for channel in channels],
        },
        objective=_objective(instrument, markup.child(image, "ObjectiveSettings")),
        scanner=_scanner(instrument),
        scan_date=markup.text(image, "AcquisitionDate"),
        problems=tuple(problems),
        z_spacing=_micrometers(pixels, "Z"),
        time_step=_time_step(pixels),
    )


def _counted_from_zero(file: TiffFile, root: Element | None) -> str | None:
    """Return the OME-XML with indices that count from 0; None if those of all images do so.

    Some writers count FirstC, FirstZ or FirstT from 1, which Bio-Formats accepts, too. With such
    indices, tifffile finds some planes in the wrong place and drops the others.
    """
    if root is None or not file.filehandle.is_file:
        return None
    wrong = [[axis for axis in "CZT" if _counts_from_one(p, axis)] for p in _all_pixels(root)]
    if not any(wrong) or markup.is_deep(root):  # ElementTree serializes by recursion
        return None
    copy = deepcopy(root)
    for pixels, axes in zip(_all_pixels(copy), wrong, strict=True):
        for data in markup.children(pixels, "TiffData"):
            for axis in axes:
                data.set(f"First{axis}", str(int(data.attrib[f"First{axis}"]) - 1))
    return ElementTree.tostring(copy, encoding="unicode")


def _all_pixels(root: Element) -> Iterator[Element]:
    return (p for image in markup.children(root, "Image") for p in markup.children(image, "Pixels"))


def _counts_from_one(pixels: Element, axis: str) -> bool:
    """Whether plane indices along an axis start at 1 and include the axis' length."""
    channel = markup.child(pixels, "Channel") if axis == "C" else None
    stated = [data.get(f"First{axis}", "0") for data in markup.children(pixels, "TiffData")]
    try:
        samples = 1 if channel is None else int(channel.get("SamplesPerPixel", 1))
        length = int(pixels.get(f"Size{axis}", 0))
        indices = set(map(int, stated))
    except ValueError:
        return False
    return min(indices, default=0) == 1 and max(indices) * samples == length


def _of_samples(
    channels: tuple[Channel, ...], stated: Sequence[Mapping[str, str]], count: int
) -> tuple[Channel, ...]:
    """Return one channel per sample if each of several channels is stored in color."""
    if count != 3 * len(channels) or any(each.get("SamplesPerPixel") != "3" for each in stated):
        return channels
    # On a bright background, the sum of several pictures would be white.
    return tuple(
        Channel(f"{channel.name} {name}", color, visible=number == 0)
        for number, channel in enumerate(channels)
        for name, color in SAMPLES
    )


def _distrust(root: Element | None, file: TiffFile) -> str | None:
    """Return the reason why the XML doesn't describe the file's pages; None if it does."""
    if root is None:
        return "The OME-XML can't be read; channel names and sizes may be missing."
    if markup.child(root, "BinaryOnly") is not None:
        return (
            "The OME-XML is in another file, which is missing from this folder, damaged or "
            "doesn't name this file: channel names and the planes of other files are missing."
        )
    areas = {root.get("UUID"): [directory.pixels for directory in claims.directories(file)]}
    others = _other_files(root, file.filename)
    other_areas = _page_areas(others, file)
    if other_areas is None:
        return (
            f"The OME-XML refers to planes in {len(others)} other file(s), which are not shown; "
            "copy all of them, undamaged, to this file's folder."
        )
    try:
        sound = all(map(_is_sound, root.iter())) and _fits(root, areas | other_areas)
    except (ValueError, KeyError):
        sound = False
    return None if sound else CONTRADICTION


def _page_areas(others: Mapping[str, str], file: TiffFile) -> dict[str | None, list[int]] | None:
    """Return the pixel count of each page of other files, by UUID; None if a file can't be read."""
    if len(others) > MOST_FILES or (others and not file.filehandle.is_file):
        return None
    found: dict[str | None, list[int]] = {}
    for uuid, name in others.items():
        if not name or Path(name).name != name:
            return None
        path = Path(file.filehandle.path).with_name(name)
        try:
            if not path.is_file():  # opening a pipe would block
                return None
            with TiffFile(path) as other:
                if not claims.check(other, str(path)):
                    return None
                found[uuid] = [directory.pixels for directory in claims.directories(other)]
        except (OSError, TiffFileError, SlideError):
            return None
        if not found[uuid]:
            return None
    return found


def _fits(root: Element, files: Mapping[str | None, list[int]]) -> bool:
    """Whether images have at most as many planes as the limits allow.

    tifffile allocates a list of planes from the declared sizes, whatever the files hold. The number
    of planes is estimated by dividing an image's samples by the pixels of its smallest page.
    """
    own = files[root.get("UUID")]
    named = 0
    for pixels in (part for image in root for part in markup.children(image, "Pixels")):
        samples = math.prod(int(pixels.attrib[f"Size{axis}"]) for axis in "XYCZT")
        held: list[int] = []
        for data in markup.children(pixels, "TiffData"):
            uuid = markup.child(data, "UUID")
            areas = own if uuid is None else files.get(uuid.text, own)
            first = int(data.get("IFD", 0))
            count = int(data.get("PlaneCount", data.get("NumPlanes", "IFD" in data.attrib)))
            held += areas[first : first + (count or len(areas))]
            named += count or len(areas)
        smallest = min(filter(None, held), default=samples)
        if samples // smallest > limits.planes or named > 4 * limits.planes:
            return False
    return True


def _other_files(root: Element, filename: str) -> dict[str, str]:
    """Return the names, by UUID, of the other files in which the XML places planes."""
    own = root.get("UUID")
    others = dict[str, str]()
    for element in root.iter():
        if markup.name(element) == "UUID" and element.text not in (None, own):
            name = element.get("FileName", "")
            if own is None and name.lower() == filename.lower():
                own = element.text
            else:
                others[element.text] = name
    return others


def _is_sound(element: Element) -> bool:
    """Whether the sizes and plane indices of an element are valid.

    Raises
    ------
    ValueError, KeyError
        If one of them is missing or is not a number.
    """
    name = markup.name(element)
    if name == "Pixels":
        axes = element.attrib["DimensionOrder"]
        sizes = {axis: int(element.attrib[f"Size{axis}"]) for axis in "XYCZT"}
        channels = markup.children(element, "Channel")
        samples = {int(channel.get("SamplesPerPixel", 1)) for channel in channels}
        return (
            sorted(axes) == sorted(sizes)
            and axes[:2] == "XY"
            and min(sizes.values()) > 0
            and math.prod(sizes[axis] for axis in "CZT") <= limits.planes
            and len(samples) < 2
            and min(samples, default=1) > 0
        )
    if name == "TiffData":
        return all(
            0 <= int(value) <= limits.planes
            for key, value in element.attrib.items()
            if key in TIFF_DATA_NUMBERS
        )
    if name.startswith("ModuloAlong") and "Start" in element.attrib:
        defaults = {"Start": "", "End": "", "Step": "1"}
        start, end, step = (float(element.get(key, text)) for key, text in defaults.items())
        return step != 0 and 0 <= (end - start) / step <= limits.planes
    return True


def _of_size(main: TiffPageSeries, root: Element) -> list[int]:
    """Return the indices of the XML's images that are as large as a series."""
    size = tiff.size(main)
    return [
        index
        for index, image in enumerate(markup.children(root, "Image"))
        if (pixels := markup.child(image, "Pixels")) is not None
        and tuple(positive_number(pixels.get(f"Size{axis}")) for axis in "XY") == size
    ]


def _index_of(main: TiffPageSeries, file: TiffFile, same_size: Sequence[int]) -> int:
    """Return the index of a series' image in the XML; images of one size are matched in order."""
    size = tiff.size(main)
    series = [each for each in tiff.images(file) if tiff.size(each) == size]
    number = series.index(main)
    return same_size[number] if number < len(same_size) else 0


def _channels_of_file(root: Element, index: int, filename: str) -> list[int]:
    """Return the channels of an image that the XML places in this file, in the order of its pages.

    Used for images of one plane per channel whose other files are missing.
    """
    pixels = markup.child(list(markup.children(root, "Image"))[index], "Pixels")
    assert pixels is not None
    held: dict[int, int] = {}
    for data in markup.children(pixels, "TiffData"):
        uuid = markup.child(data, "UUID")
        if (
            uuid is not None
            and uuid.text != root.get("UUID")
            and uuid.get("FileName", "").lower() != filename.lower()
        ):
            continue
        try:
            names = {"IFD": 0, "FirstC": 0, "PlaneCount": 1}
            page, first, planes = (int(data.get(name, least)) for name, least in names.items())
        except ValueError:
            return []
        held |= {page + plane: first + plane for plane in range(min(planes, limits.planes))}
    found = [held[page] for page in sorted(held)]
    return found if len(set(found)) == len(found) and min(found, default=-1) >= 0 else []


def _unplaced(description: OmeDescription, layout: SlideLayout) -> list[str]:
    """Return a problem if the XML declares more planes than are shown, without their pages."""
    stated = math.prod(int(description.metadata["Pixels"][f"Size{axis}"]) for axis in "CZT")
    shown = layout.planes.size_z * layout.planes.size_t * layout.levels[0].channels
    if stated <= shown:
        return []
    return [
        f"The OME-XML declares {stated} planes without their positions in the file; "
        f"{stated - shown} of them can't be selected."
    ]


def _other_images(
    main: TiffPageSeries, file: TiffFile, path: str
) -> tuple[tuple[AssociatedLayout, ...], list[str]]:
    """Return the images named label, macro or thumbnail, and problems that list the others."""
    associated: dict[str, AssociatedLayout] = {}
    unshown: list[str] = []
    problems: list[str] = []
    for series in tiff.images(file):
        if series is main:
            continue
        name = associated_name(series.name) if tiff.can_be_associated(series) else None
        if name is None or name in associated:
            width, height = tiff.size(series)
            unshown.append(f"{series.name[:60]!r} ({width} x {height})")
            continue
        try:
            level = tiff.series_level(series, path)
            associated[name] = AssociatedLayout(name, level, icc=tiff.icc_range(series.keyframe))
        except SlideError as error:
            problems.append(f"The {name} image is left out: {error}")
    return tuple(associated.values()), problems + tiff.images_not_shown(unshown)


def _record(root: Element) -> Metadata:
    """Return the record that this package's conversion wrote; an empty one if there is none."""
    annotations = markup.child(root, "StructuredAnnotations")
    for annotation in markup.children(annotations, "CommentAnnotation"):
        if annotation.get("Namespace") == wsigpu.RECORD_NAMESPACE:
            return wsigpu.read_record(markup.text(annotation, "Value") or "")
    return {}


def _instrument(root: Element, image: Element) -> Element | None:
    """Return the instrument that an image refers to, else the only one of the file."""
    instruments = list(markup.children(root, "Instrument"))
    reference = markup.child(image, "InstrumentRef")
    if reference is not None:
        return next((item for item in instruments if item.get("ID") == reference.get("ID")), None)
    return instruments[0] if len(instruments) == 1 else None


def _objective(instrument: Element | None, settings: Element | None) -> float | None:
    """Return the magnification of the objective that an image refers to, else of the only one."""
    objectives = list(markup.children(instrument, "Objective"))
    if settings is not None:
        objectives = [item for item in objectives if item.get("ID") == settings.get("ID")]
    if len(objectives) != 1:
        return None
    return positive_number(objectives[0].get("NominalMagnification"))


def _scanner(instrument: Element | None) -> str | None:
    """Return the make and model of the microscope."""
    microscope = markup.child(instrument, "Microscope")
    if microscope is None:
        return None
    parts = (microscope.get("Manufacturer"), microscope.get("Model"))
    return " ".join(filter(None, parts)) or None


def _length_unit(pixels: Element, axis: str) -> str:
    """Return the stated unit of a pixel size; OME-XML defaults to micrometers."""
    return pixels.get(f"PhysicalSize{axis}Unit", "µm")


def _micrometers(pixels: Element, axis: str) -> float | None:
    unit = units.micrometers(_length_unit(pixels, axis))
    size = positive_number(pixels.get(f"PhysicalSize{axis}"))
    return None if unit is None or size is None else size * unit


def _time_step(pixels: Element) -> float | None:
    """Return the seconds between planes along t, from TimeIncrement, else from each DeltaT."""
    stated = _seconds(pixels, "TimeIncrement")
    if stated is not None and stated > 0:
        return stated
    acquired: dict[str | None, float | None] = {}
    for plane in markup.children(pixels, "Plane"):
        if plane.get("TheZ") == plane.get("TheC") == "0":
            acquired.setdefault(plane.get("TheT"), _seconds(plane, "DeltaT"))
    times = [acquired.get(str(index)) for index in range(len(acquired))]
    known = [time for time in times if time is not None]
    return even_step(known) if len(known) == len(times) else None


def _seconds(element: Element, name: str) -> float | None:
    unit = units.seconds(element.get(f"{name}Unit", "s"))
    try:
        return None if unit is None else number(element.get(name)) * unit
    except ValueError:
        return None


def _color(value: str | None) -> str | None:
    """Convert OME's signed RGBA integer to "#rrggbb"; None for black, which shows nothing."""
    try:
        rgb = (int(value or "") & 0xFFFFFFFF) >> 8
    except ValueError:
        return None
    return f"#{rgb:06x}" if rgb else None
