"""Leica SCN: the scanned regions of a collection form one mosaic."""

from __future__ import annotations

import base64
import binascii
import math
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from napari_wsigpu.formats import markup
from napari_wsigpu.formats.fields import LONGEST_TEXT, positive_number, texts, whole_number
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.model.errors import SlideError, UnsupportedSlideError
from napari_wsigpu.model.layout import Channel, LevelLayout, Part, Planes
from napari_wsigpu.model.tags import Tag

if TYPE_CHECKING:
    from collections.abc import Mapping
    from xml.etree.ElementTree import Element

    from tifffile import TiffFile, TiffPage

    from napari_wsigpu.model.layout import AssociatedLayout, SlideFile, SlideLayout

NAMESPACES = (
    "http://www.leica-microsystems.com/scn/2010/03/10",
    "http://www.leica-microsystems.com/scn/2010/10/01",
)
BRIGHTFIELD = "brightfield"
# Relative difference of pixel size up to which regions share a mosaic.
SPACING_TOLERANCE = 0.02
# Lowest ratio of pixel sizes at which an image is an overview of an image that it overlaps.
LEAST_RATIO = 5
FIELDS = {
    "aperture": "scanSettings/illuminationSettings/numericalAperture",
    "creation-date": "creationDate",
    "illumination-source": "scanSettings/illuminationSettings/illuminationSource",
    "objective": "scanSettings/objectiveSettings/objective",
}


class _Dimension(NamedTuple):
    """One resolution: its size in pixels, and the page of each channel."""

    width: int
    height: int
    pages: tuple[int, ...]


class _Image(NamedTuple):
    """One image: a scan or an overview; its position and size on the slide are in nanometers."""

    left: int
    top: int
    width: int
    height: int
    dimensions: tuple[_Dimension, ...]
    fields: dict[str, str]
    channels: tuple[Channel, ...]
    planes: int
    z_spacing: float | None

    @property
    def illumination(self) -> str:
        return self.fields.get("illumination-source", "unknown")

    def spacing(self, level: int) -> float:
        """Nanometers per pixel of a level."""
        return self.width / self.dimensions[level].width

    def shows(self, other: _Image) -> bool:
        """Whether it shows a part of another image at a much lower resolution."""
        across = self.left < other.left + other.width and other.left < self.left + self.width
        down = self.top < other.top + other.height and other.top < self.top + self.height
        return across and down and self.spacing(0) >= LEAST_RATIO * other.spacing(0)

    def fits(self, first: _Image) -> bool:
        """Whether it can share a mosaic with another image."""
        mine, other = (
            (image.fields.get("objective"), *(len(each.pages) for each in image.dimensions))
            for image in (self, first)
        )
        return mine == other and all(
            abs(self.spacing(level) / first.spacing(level) - 1) <= SPACING_TOLERANCE
            for level in range(len(self.dimensions))
        )


class _Collection(NamedTuple):
    """The contents of the XML; the slide's width and height are in nanometers.

    `labels` are pages with pictures of the slide's label.
    """

    width: int
    height: int
    images: tuple[_Image, ...]
    barcode: str | None
    labels: tuple[int, ...] = ()

    def is_overview(self, image: _Image, finest: _Image) -> bool:
        """Whether an image shows the whole slide or, from Aperio Versa scanners, most of it."""
        return image[:4] == (0, 0, self.width, self.height) or image.shows(finest)

    def frame(self, image: _Image, level: LevelLayout) -> tuple[float, float, float, float] | None:
        """Return the area of an image as in `AssociatedLayout`, for this level 0."""
        if min(self.width, self.height) < 1:
            return None
        found = (
            float(image.left) * level.width / self.width,
            float(image.top) * level.height / self.height,
            float(image.width) * level.width / self.width,
            float(image.height) * level.height / self.height,
        )
        return found if math.isfinite(sum(found)) else None


def probe(file: TiffFile) -> bool:
    """Whether Leica's software wrote the file, judging by the namespace in its description."""
    first = file.pages.first
    text = tiff.text_tag(first, Tag.DESCRIPTION)
    return first.is_tiled and any(name in text for name in NAMESPACES)


def parse(
    file: TiffFile, source: SlideFile, at: Mapping[str, int] = tiff.DEFAULT_PLANE
) -> SlideLayout:
    """Describe a Leica slide as one mosaic of all regions with the same illumination.

    `at` "z" selects the plane; the default is the first one, as in OpenSlide.
    """
    path, pages = source.path, tiff.pages(file)
    problems: list[str] = []
    z = at.get("z", 0)
    collection = _collection(tiff.text_tag(pages[0], Tag.DESCRIPTION), len(pages), z, problems)
    macros: list[_Image] = []
    scans: list[_Image] = []
    finest = min(collection.images, key=lambda image: image.spacing(0), default=None)
    for image in collection.images:
        is_macro = finest is not None and collection.is_overview(image, finest)
        (macros if is_macro else scans).append(image)
    if collection.images and not scans:
        raise UnsupportedSlideError(
            f"'{path}' holds no scanned region, only an overview of the slide, which may show its "
            "label; scan the slide, or open the overview as an ordinary image."
        )
    regions = _shown_regions(scans, problems)
    levels, regions = _levels(collection, regions, pages, path, problems)
    largest = max(pages, key=lambda page: page.imagewidth * page.imagelength)
    page = pages[regions[0].dimensions[0].pages[0]] if regions else largest
    if not levels:
        levels = [tiff.page_level(page, path)]

    first = regions[0] if regions else None
    fields = dict(first.fields) if first is not None else {}
    if collection.barcode is not None:
        fields["barcode"] = collection.barcode
    layout = tiff.slide_layout(
        source,
        "leica",
        levels,
        page,
        {**fields, "regions": levels[0].part_bounds},
        with_description=False,
        channels=first.channels if first is not None else (),
        associated=[
            *(
                replace(macro, frame=collection.frame(image, levels[0]) if regions else None)
                for image, macro in _macro(macros, pages, path, problems)
            ),
            *tiff.associated_images(
                (("label", pages[number]) for number in collection.labels), path, problems
            ),
        ],
        problems=problems,
    )
    spacing = None if first is None else first.spacing(0) / 1000
    planes = max((region.planes for region in regions), default=1)
    return replace(
        layout,
        mpp=layout.mpp or (None if spacing is None else (spacing, spacing)),
        objective=positive_number(fields.get("objective")),
        other_planes=planes - 1,
        planes=Planes(z, size_z=planes, z_spacing=None if first is None else first.z_spacing),
        scanner=fields.get("device-model", "").split(";")[0] or None,
        scan_date=fields.get("creation-date"),
        barcode=fields.get("barcode"),
    )


# Parsing the XML


def _collection(text: str, pages: int, z: int, problems: list[str]) -> _Collection:
    try:
        element = markup.root(text).find("{*}collection")
        if element is None:
            raise ValueError("its XML has no collection of images")
    except ValueError as error:
        problems.append(f"Only the slide's largest image is shown: {error}.")
        return _Collection(0, 0, (), None)
    images = []
    reasons = []
    for child in element.iterfind("{*}image"):
        try:
            images.append(_image(child, pages, z))
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        problems.append(f"{len(reasons)} image(s) of the XML are left out: {reasons[0]}.")
    try:
        width, height = _size(element)
    except ValueError as error:
        problems.append(f"The collection's size is derived from its images: {error}.")
        width = max((image.left + image.width for image in images), default=0)
        height = max((image.top + image.height for image in images), default=0)
    labels = _labels(element, pages)
    return _Collection(width, height, tuple(images), _barcode(element, problems), labels)


def _labels(collection: Element, pages: int) -> tuple[int, ...]:
    """Return the pages with pictures of the label, which Aperio Versa scanners store."""
    found = []
    for child in collection.iterfind("{*}supplementalImage"):
        with suppress(ValueError):
            page = whole_number(child.get("ifd"))
            if child.get("type", "").lower() == "label" and 0 <= page < pages:
                found.append(page)
    return tuple(found)


def _size(element: Element) -> tuple[int, int]:
    width, height = (whole_number(element.get(name)) for name in ("sizeX", "sizeY"))
    if min(width, height) < 1:
        raise ValueError("its size is not positive")
    return width, height


def _image(element: Element, pages: int, z: int) -> _Image:
    """Describe plane `z` of an image, or its first plane if it has fewer."""
    view = element.find("{*}view")
    if view is None:
        raise ValueError("its position on the slide is missing")
    left, top = (whole_number(view.get(name)) for name in ("offsetX", "offsetY"))
    width, height = _size(view)
    found: dict[tuple[int, int], dict[int, int]] = {}
    children = list(element.iterfind("{*}pixels/{*}dimension"))
    planes = sorted({whole_number(child.get("z", "0")) for child in children})
    for child in children:
        if whole_number(child.get("z", "0")) != planes[z if z < len(planes) else 0]:
            continue
        channel, page = whole_number(child.get("c", "0")), whole_number(child.get("ifd"))
        if not 0 <= page < pages:
            raise ValueError(f"it refers to page {page}, which the file lacks")
        found.setdefault(_size(child), {}).setdefault(channel, page)
    if not found:
        raise ValueError("it has no pixels")
    dimensions = [
        _Dimension(*size, tuple(page for _, page in sorted(channels.items())))
        for size, channels in sorted(found.items(), reverse=True)
    ]
    fields = texts((name, element.findtext(_path(names))) for name, names in FIELDS.items())
    device = element.find("{*}device")
    if device is not None:
        fields |= texts((f"device-{name}", device.get(name)) for name in ("model", "version"))
    nanometers = positive_number(view.get("spacingZ"))
    return _Image(
        left,
        top,
        width,
        height,
        tuple(dimensions),
        fields,
        _channels(element),
        len(planes),
        None if nanometers is None else nanometers / 1000,
    )


def _channels(element: Element) -> tuple[Channel, ...]:
    settings = element.iterfind(_path("scanSettings/channelSettings/channel"))
    numbered = enumerate(settings)
    found = [(whole_number(child.get("index", str(n))), child) for n, child in numbered]
    return tuple(
        Channel((child.get("name") or f"channel {index}")[:LONGEST_TEXT], _color(child.get("rgb")))
        for index, child in sorted(found, key=lambda item: item[0])
    )


def _color(text: str | None) -> str | None:
    try:
        return f"#{int((text or '').lstrip('#')[:8], 16) & 0xFFFFFF:06x}"
    except ValueError:
        return None


def _barcode(collection: Element, problems: list[str]) -> str | None:
    text = collection.findtext("{*}barcode")
    if not text:
        return texts([("barcode", collection.get("barcode"))]).get("barcode")
    try:
        code = base64.b64decode(text[:LONGEST_TEXT]).decode(errors="replace")
    except (binascii.Error, ValueError):
        problems.append("The slide's barcode is not valid base64; it is shown as stored.")
        code = text[:LONGEST_TEXT]
    return code


def _path(names: str) -> str:
    """Return an ElementTree path of these names in any namespace."""
    return "/".join(f"{{*}}{name}" for name in names.split("/"))


# Composing the levels


def _shown_regions(scans: list[_Image], problems: list[str]) -> list[_Image]:
    """Choose the regions of the mosaic: brightfield, or else the first region's illumination."""
    if not scans:
        return []
    kinds = [image.illumination for image in scans]
    kind = BRIGHTFIELD if BRIGHTFIELD in kinds else kinds[0]
    others = len(scans) - kinds.count(kind)
    if others:
        problems.append(f"{others} region(s) with an illumination other than {kind} are not shown.")
    same = [image for image in scans if image.illumination == kind]
    regions = [image for image in same if image.fits(same[0])]
    if len(regions) < len(same):
        problems.append(
            f"{len(same) - len(regions)} region(s) with another objective, resolution or number "
            "of levels are not shown."
        )
    return regions


def _levels(
    collection: _Collection,
    regions: list[_Image],
    pages: list[TiffPage],
    path: str,
    problems: list[str],
) -> tuple[list[LevelLayout], list[_Image]]:
    """Return the mosaic of each level, and the regions in the mosaics."""

    @cache
    def picture(numbers: tuple[int, ...]) -> LevelLayout:
        return tiff.channels_level([pages[number] for number in numbers], path)

    pictures: list[list[LevelLayout]] = []
    used: list[_Image] = []
    reasons = []
    for region in regions:
        try:
            images = [picture(dimension.pages) for dimension in region.dimensions]
        except SlideError as error:
            reasons.append(str(error))
            continue
        first = pictures[0] if pictures else images
        if len({(image.channels, image.dtype) for image in (first[0], *images)}) > 1:
            reasons.append("Its channels or sample type differ from the first region's.")
            continue
        pictures.append(images)
        used.append(region)
    if reasons:
        problems.append(f"{len(reasons)} region(s) are left out: {reasons[0]}")
    levels = []
    for index in range(len(used[0].dimensions) if used else 0):
        spacing = min(region.spacing(index) for region in used)
        width = math.ceil(collection.width / spacing)
        height = math.ceil(collection.height / spacing)
        if not 0 < min(width, height) <= max(width, height) < tiff.LARGEST_SIDE:
            problems.append(
                "The slide's XML gives the collection an impossible size; only its first image "
                "is shown."
            )
            return [], used
        parts = [
            Part.at(int(region.left / spacing), int(region.top / spacing), images[index])
            for region, images in zip(used, pictures, strict=True)
        ]
        levels.append(LevelLayout.mosaic(width, height, parts))
    return levels, used


def _macro(
    macros: list[_Image], pages: list[TiffPage], path: str, problems: list[str]
) -> list[tuple[_Image, AssociatedLayout]]:
    macros = [image for image in macros if image.illumination == BRIGHTFIELD]
    if len(macros) > 1:
        problems.append(f"The slide has {len(macros)} overviews; the first one is shown.")
    shown = macros[:1]
    named = (("macro", pages[image.dimensions[0].pages[0]]) for image in shown)
    return list(zip(shown, tiff.associated_images(named, path, problems), strict=False))
