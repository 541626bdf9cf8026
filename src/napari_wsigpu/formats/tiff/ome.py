"""OME-TIFF: its XML names channels, says the size of pixels, and lists several images."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tifffile import TiffFile, TiffFileError

from napari_wsigpu.formats import markup, wsigpu
from napari_wsigpu.formats.fields import even_step, number, positive_number
from napari_wsigpu.formats.pictures import beside_name
from napari_wsigpu.formats.tiff import claims, companion, pixel_size, tiff
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.layout import AssociatedLayout, Channel, SlideFile, SlideLayout
from napari_wsigpu.model.limits import limits

if TYPE_CHECKING:
    from collections.abc import Mapping
    from xml.etree.ElementTree import Element

    from tifffile import TiffPageSeries

MICROMETRES = {
    "m": 1e6, "dm": 1e5, "cm": 1e4, "mm": 1e3, "µm": 1.0, "\N{GREEK SMALL LETTER MU}m": 1.0,
    "um": 1.0, "nm": 1e-3, "pm": 1e-6, "fm": 1e-9, "Å": 1e-4, "km": 1e9, "thou": 25.4,
    "in": 25400.0, "ft": 304800.0, "yd": 914400.0, "pt": 25400.0 / 72,
}  # fmt: skip
NO_LENGTHS = {"pixel", "reference frame"}
SECONDS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
CONTRADICTION = "The OME-XML contradicts itself, so that it is left aside."
TAKEN = "What this file holds is shown as channels in its order, which may be planes."
LONGEST_KEPT = 1 << 18
MOST_NAMED = 5
# Files of an image: a plane, channel or time each.
MOST_BESIDE = 1024
PLACES = ("IFD", "FirstC", "FirstZ", "FirstT", "PlaneCount", "NumPlanes")


class OmeDescription(NamedTuple):
    """What OME-XML says of an image."""

    mpp: tuple[float, float] | None
    channels: tuple[Channel, ...]
    metadata: dict[str, Any]
    objective: float | None = None
    scanner: str | None = None
    scan_date: str | None = None
    problems: tuple[str, ...] = ()
    z_spacing: float | None = None
    time_step: float | None = None


def probe(file: TiffFile) -> bool:
    """Whether the file has OME-XML, by how its first description ends."""
    return bool(file.is_ome)


def parse(file: TiffFile, source: SlideFile, at: Mapping[str, int] = tiff.MIDDLE) -> SlideLayout:
    """Describe a plane of the largest image of an OME-TIFF; see `tiff.parse`."""
    xml = file.ome_metadata or ""
    root = markup.parse(xml)
    elsewhere = companion.of_file(file, root)
    if elsewhere is not None:
        path = file.filehandle.path
        with TiffFile(path, omexml=elsewhere) as described_there:
            claims.check(described_there, source.path)
            return parse(described_there, source, at)
    distrust = _distrust(root, file)
    if distrust is not None:
        # tifffile would look for images where such XML says.
        setattr(file, "is_ome", False)  # noqa: B010
    layout = tiff.layout_of(file, source, at)
    main = tiff.main_image(file, source.path)
    page = tiff.keyframe(main)
    if distrust is not None and len(layout.files) == 1:
        unnamed = not layout.rgb and layout.levels[0].channels > 1
        said = (distrust, TAKEN) if unnamed else (distrust,)
        layout = replace(layout, problems=(*layout.problems, *said))
    if root is None or distrust == CONTRADICTION:
        return pixel_size.with_size(layout, file, page)
    index = _index_of(main, file, root) if main.kind == "ome" else _only_one_of(main, root)
    described = None if index is None else describe(root, index)
    if described is None:
        return pixel_size.with_size(layout, file, page)
    if distrust is None and main.kind != "ome":
        layout = replace(layout, problems=(*layout.problems, *_unplaced(described, layout)))
    count = layout.levels[0].channels
    stated = described.metadata["Pixels"]
    flat = stated.get("SizeZ") == stated.get("SizeT") == "1"
    known = not layout.rgb and (distrust is None or flat)  # else planes may stand for channels
    channels = described.channels
    if main.kind == "ome" and len(channels) > count:  # those of missing pages are left out
        held = tiff.held_channels(main, {"z": layout.planes.z, "t": layout.planes.t})
        channels = tuple(channels[index] for index in held if index < len(channels))
    named = known and len(channels) == count
    associated, problems = layout.associated, list[str]()
    if main.kind == "ome":
        associated, problems = _other_images(main, file, source.path)
    metadata = {"ome": described.metadata, **layout.metadata}
    record = _record(root)
    if record:
        metadata["wsigpu"] = wsigpu.origin(record)
    if len(xml) <= LONGEST_KEPT:
        described.metadata["OME"] = markup.nested(root)
        metadata["tiff"].pop("ImageDescription", None)
    layout = pixel_size.with_size(layout, file, page, described.mpp)
    return replace(
        layout,
        associated=associated,
        channels=channels if named else layout.channels,
        planes=replace(layout.planes, z_spacing=described.z_spacing, time_step=described.time_step),
        objective=described.objective,
        scanner=described.scanner or layout.scanner,
        scan_date=described.scan_date,
        metadata=metadata,
        problems=(*layout.problems, *described.problems, *problems),
    )


def describe(root: Element, index: int = 0) -> OmeDescription | None:
    """Return what OME-XML says of one of its images; None if it has no such image."""
    images = list(markup.children(root, "Image"))
    image = images[index] if index < len(images) else None
    pixels = markup.child(image, "Pixels")
    if image is None or pixels is None:
        return None
    sizes = [_micrometres(pixels, axis) for axis in "XY"]
    problems = [
        f"The size of a pixel along {axis} ({given!r}) is not possible."
        for axis, size in zip("XY", sizes, strict=True)
        if size is None
        and (given := pixels.get(f"PhysicalSize{axis}", "")[:40])
        and pixels.get(f"PhysicalSize{axis}Unit", "µm") in MICROMETRES
    ]
    units = {pixels.get(f"PhysicalSize{axis}Unit", "µm") for axis in "XY"}
    if not units <= MICROMETRES.keys() | NO_LENGTHS:
        problems.append("The size of a pixel has no known unit of length, so that none is given.")
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
        z_spacing=_micrometres(pixels, "Z"),
        time_step=_time_step(pixels),
    )


def _distrust(root: Element | None, file: TiffFile) -> str | None:
    """Say why the XML is no guide to the file's images; None if it is."""
    if root is None:
        return "The OME-XML can't be read, so that names of channels may be missing, or sizes."
    if markup.child(root, "BinaryOnly") is not None:
        return (
            "The OME-XML lies in another file, which is not read as it is not beside this one, "
            "damaged or does not name it: what it says of channels, and planes of other files, "
            "are missing."
        )
    areas = {root.get("UUID"): [directory.pixels for directory in claims.directories(file)]}
    others = _other_files(root, file.filename)
    beside = _beside(others, file)
    if beside is None:
        return (
            f"The OME-XML says that planes lie in {len(others)} other file(s), which are not "
            "shown; have all of them, undamaged, in the folder of this one."
        )
    try:
        sound = all(_is_sound(element) for element in root.iter()) and _fits(root, areas | beside)
    except (ValueError, KeyError):
        sound = False
    return None if sound else CONTRADICTION


def _beside(others: Mapping[str, str], file: TiffFile) -> dict[str | None, list[int]] | None:
    """Return the areas of the pages of other files, by their UUIDs; None if one can't be read."""
    if len(others) > MOST_BESIDE or (others and not file.filehandle.is_file):
        return None
    found: dict[str | None, list[int]] = {}
    for uuid, name in others.items():
        if not name or Path(name).name != name:
            return None
        path = Path(file.filehandle.path).with_name(name)
        try:
            if not path.is_file():  # to open a pipe would wait
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
    """Whether images have no more planes, each as large as those of the files, than any slide has.

    tifffile makes a list of as many as fit the sizes, whatever the files hold.
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
    """Return the names of other files that planes are said to lie in, by their UUIDs."""
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
    """Whether the numbers that say where planes lie are possible.

    Raises
    ------
    ValueError, KeyError
        If a number is none, or is missing.
    """
    name = markup.name(element)
    if name == "Pixels":
        axes = element.attrib["DimensionOrder"]
        sizes = {axis: int(element.attrib[f"Size{axis}"]) for axis in "XYCZT"}
        samples = {
            int(channel.get("SamplesPerPixel", 1))
            for channel in markup.children(element, "Channel")
        }
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
            if key in PLACES
        )
    if name.startswith("ModuloAlong") and "Start" in element.attrib:
        start, end, step = (
            float(element.get(key, missing))
            for key, missing in (("Start", ""), ("End", ""), ("Step", "1"))
        )
        return step != 0 and 0 <= (end - start) / step <= limits.planes
    return True


def _index_of(main: TiffPageSeries, file: TiffFile, root: Element) -> int:
    """Return which image of the XML a series is: of those of its size, by their order."""
    size = tiff.size(main)
    alike = [series for series in tiff.images(file) if tiff.size(series) == size]
    indices = []
    for index, image in enumerate(markup.children(root, "Image")):
        pixels = markup.child(image, "Pixels")
        if pixels is not None and size == (
            int(pixels.attrib["SizeX"]),
            int(pixels.attrib["SizeY"]),
        ):
            indices.append(index)
    index = alike.index(main)
    return indices[index] if index < len(indices) else 0


def _only_one_of(main: TiffPageSeries, root: Element) -> int | None:
    """Return which image of the XML alone is of a series' size, though it does not lay it out."""
    size = tuple(map(str, tiff.size(main)))
    found = [
        index
        for index, image in enumerate(markup.children(root, "Image"))
        if (pixels := markup.child(image, "Pixels")) is not None
        and (pixels.get("SizeX"), pixels.get("SizeY")) == size
    ]
    return found[0] if len(found) == 1 else None


def _unplaced(described: OmeDescription, layout: SlideLayout) -> list[str]:
    """Say that the XML tells of more planes than are shown, but not where these lie."""
    stated = math.prod(int(described.metadata["Pixels"][f"Size{axis}"]) for axis in "CZT")
    shown = layout.planes.size_z * layout.planes.size_t * layout.levels[0].channels
    if stated <= shown:
        return []
    return [
        f"The OME-XML tells of {stated} planes, but not where in the file they lie: {shown} of "
        "them can be shown."
    ]


def _other_images(
    main: TiffPageSeries, file: TiffFile, path: str
) -> tuple[tuple[AssociatedLayout, ...], list[str]]:
    """Return pictures that are called label, macro or thumbnail, and what is said of others."""
    associated: dict[str, AssociatedLayout] = {}
    unshown: list[str] = []
    problems: list[str] = []
    for series in tiff.images(file):
        if series is main:
            continue
        name = beside_name(series.name) if tiff.can_be_beside(series) else None
        if name is None or name in associated:
            width, height = tiff.size(series)
            unshown.append(f"{series.name[:60]!r} ({width} x {height})")
            continue
        try:
            level = tiff.series_level(series, path)
            associated[name] = AssociatedLayout(name, level, icc=tiff.icc_range(series.keyframe))
        except SlideError as error:
            problems.append(f"The {name} image is left out: {error}")
    if unshown:
        more = ", ..." if len(unshown) > MOST_NAMED else ""
        problems.append(
            f"{len(unshown)} further image(s) of the file are not shown: "
            f"{', '.join(unshown[:MOST_NAMED])}{more}."
        )
    return tuple(associated.values()), problems


def _record(root: Element) -> dict[str, Any]:
    """Return the record of a slide that was converted; an empty one if there is none."""
    annotations = markup.child(root, "StructuredAnnotations")
    for annotation in markup.children(annotations, "CommentAnnotation"):
        if annotation.get("Namespace") == wsigpu.RECORD_NAMESPACE:
            return wsigpu.read_record(markup.text(annotation, "Value") or "")
    return {}


def _instrument(root: Element, image: Element) -> Element | None:
    """Return the instrument that an image refers to, or the only one."""
    instruments = list(markup.children(root, "Instrument"))
    reference = markup.child(image, "InstrumentRef")
    if reference is not None:
        return next((item for item in instruments if item.get("ID") == reference.get("ID")), None)
    return instruments[0] if len(instruments) == 1 else None


def _objective(instrument: Element | None, settings: Element | None) -> float | None:
    """Return the magnification of the objective that an image refers to, or of the only one."""
    objectives = list(markup.children(instrument, "Objective"))
    if settings is not None:
        objectives = [item for item in objectives if item.get("ID") == settings.get("ID")]
    if len(objectives) != 1:
        return None
    return positive_number(objectives[0].get("NominalMagnification"))


def _scanner(instrument: Element | None) -> str | None:
    """Return make and model of the microscope."""
    microscope = markup.child(instrument, "Microscope")
    if microscope is None:
        return None
    parts = (microscope.get("Manufacturer"), microscope.get("Model"))
    return " ".join(part for part in parts if part) or None


def _micrometres(pixels: Element, axis: str) -> float | None:
    unit = MICROMETRES.get(pixels.get(f"PhysicalSize{axis}Unit", "µm"))
    size = positive_number(pixels.get(f"PhysicalSize{axis}"))
    return None if unit is None or size is None else size * unit


def _time_step(pixels: Element) -> float | None:
    """Return seconds between planes along t: as stated, or by when the first of each was taken."""
    stated = _seconds(pixels, "TimeIncrement")
    if stated is not None and stated > 0:
        return stated
    taken: dict[str | None, float | None] = {}
    for plane in markup.children(pixels, "Plane"):
        if plane.get("TheZ") == plane.get("TheC") == "0":
            taken.setdefault(plane.get("TheT"), _seconds(plane, "DeltaT"))
    times = [taken.get(str(index)) for index in range(len(taken))]
    known = [time for time in times if time is not None]
    return even_step(known) if len(known) == len(times) else None


def _seconds(element: Element, name: str) -> float | None:
    unit = SECONDS.get(element.get(f"{name}Unit", "s"))
    try:
        return None if unit is None else number(element.get(name)) * unit
    except ValueError:
        return None


def _color(value: str | None) -> str | None:
    """Turn OME's signed RGBA integer into "#rrggbb"; black is no display colour."""
    try:
        rgb = (int(value or "") & 0xFFFFFFFF) >> 8
    except ValueError:
        return None
    return f"#{rgb:06x}" if rgb else None
