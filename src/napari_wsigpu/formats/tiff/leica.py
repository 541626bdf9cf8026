"""Leica SCN: scanned regions that make up the mosaic of one collection."""

from __future__ import annotations

import base64
import binascii
import math
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from napari_wsigpu.formats import markup
from napari_wsigpu.formats.fields import LONGEST_TEXT, positive_number, texts, whole_number
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.model.errors import SlideError, UnsupportedSlideError
from napari_wsigpu.model.layout import (
    AssociatedLayout,
    Channel,
    LevelLayout,
    Part,
    Planes,
    SlideFile,
    SlideLayout,
)
from napari_wsigpu.model.tags import Tag

if TYPE_CHECKING:
    from collections.abc import Mapping
    from xml.etree.ElementTree import Element

    from tifffile import TiffFile, TiffPage

NAMESPACES = (
    "http://www.leica-microsystems.com/scn/2010/03/10",
    "http://www.leica-microsystems.com/scn/2010/10/01",
)
BRIGHTFIELD = "brightfield"
MOST_DIFFERENT = 0.02
FIELDS = {
    "aperture": "scanSettings/illuminationSettings/numericalAperture",
    "creation-date": "creationDate",
    "illumination-source": "scanSettings/illuminationSettings/illuminationSource",
    "objective": "scanSettings/objectiveSettings/objective",
}


class _Dimension(NamedTuple):
    """One resolution: its size, and the page of each channel."""

    width: int
    height: int
    pages: tuple[int, ...]


class _Image(NamedTuple):
    """One scan; its place and extent on the slide in nanometres."""

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
        """Nanometres a pixel."""
        return self.width / self.dimensions[level].width

    def fits(self, first: _Image) -> bool:
        """Whether it can lie in one mosaic with another."""
        return (
            self.fields.get("objective") == first.fields.get("objective")
            and len(self.dimensions) == len(first.dimensions)
            and all(
                len(mine.pages) == len(other.pages)
                and abs(self.spacing(level) / first.spacing(level) - 1) <= MOST_DIFFERENT
                for level, (mine, other) in enumerate(
                    zip(self.dimensions, first.dimensions, strict=True)
                )
            )
        )


class _Collection(NamedTuple):
    """What the XML says; the slide's extent in nanometres."""

    width: int
    height: int
    images: tuple[_Image, ...]
    barcode: str | None

    def is_macro(self, image: _Image) -> bool:
        return image[:4] == (0, 0, self.width, self.height)


def probe(file: TiffFile) -> bool:
    """Whether Leica's software wrote the file, by the namespace in its description."""
    first = file.pages.first
    text = tiff.text_tag(first, Tag.DESCRIPTION)
    return first.is_tiled and any(name in text for name in NAMESPACES)


def parse(file: TiffFile, source: SlideFile, at: Mapping[str, int] = tiff.MIDDLE) -> SlideLayout:
    """Describe a Leica slide: all regions of one kind in one mosaic.

    Shown is the plane `at` "z", else the first one, as OpenSlide does.
    """
    path, pages = source.path, tiff.pages(file)
    problems: list[str] = []
    z = at.get("z", 0)
    collection = _collection(tiff.text_tag(pages[0], Tag.DESCRIPTION), len(pages), z, problems)
    macros = [image for image in collection.images if collection.is_macro(image)]
    scans = [image for image in collection.images if not collection.is_macro(image)]
    if collection.images and not scans:
        raise UnsupportedSlideError(
            f"'{path}' holds no scanned region, but only an overview of the slide, which may show "
            "its label; scan it, or open the overview as an ordinary picture."
        )
    regions = _alike(scans, problems)
    levels, regions = _levels(collection, regions, pages, path, problems)
    page = pages[regions[0].dimensions[0].pages[0]] if regions else _largest(pages)
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
        {**fields, "regions": levels[0].places},
        with_description=False,
        channels=first.channels if first is not None else (),
        associated=[
            replace(macro, frame=(0, 0, levels[0].width, levels[0].height) if regions else None)
            for macro in _macro(macros, pages, path, problems)
        ],
        problems=problems,
    )
    spacing = None if first is None else first.spacing(0) / 1000
    planes = max((region.planes for region in regions), default=1)
    return replace(
        layout,
        mpp=layout.mpp or (None if spacing is None else (spacing, spacing)),
        objective=positive_number(fields.get("objective")),
        hidden_planes=planes - 1,
        planes=Planes(z, size_z=planes, z_spacing=None if first is None else first.z_spacing),
        scanner=fields.get("device-model", "").split(";")[0] or None,
        scan_date=fields.get("creation-date"),
        barcode=fields.get("barcode"),
    )


# What the XML says


def _collection(text: str, pages: int, z: int, problems: list[str]) -> _Collection:
    try:
        element = markup.root(text).find("{*}collection")
        if element is None:
            raise ValueError("its XML names no collection of images")
    except ValueError as error:
        problems.append(f"The slide's largest image is shown alone: {error}.")
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
        problems.append(f"The collection is as large as its images reach: {error}.")
        width = max((image.left + image.width for image in images), default=0)
        height = max((image.top + image.height for image in images), default=0)
    return _Collection(width, height, tuple(images), _barcode(element, problems))


def _size(element: Element) -> tuple[int, int]:
    width, height = (whole_number(element.get(name)) for name in ("sizeX", "sizeY"))
    if min(width, height) < 1:
        raise ValueError("its size is not above 0")
    return width, height


def _image(element: Element, pages: int, z: int) -> _Image:
    """Describe an image: its plane of that number, or its only one."""
    view = element.find("{*}view")
    if view is None:
        raise ValueError("its place on the slide is not given")
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
            raise ValueError(f"it is said to be in page {page}, which the file lacks")
        found.setdefault(_size(child), {}).setdefault(channel, page)
    if not found:
        raise ValueError("it has no pixels")
    dimensions = [
        _Dimension(*size, tuple(page for _, page in sorted(channels.items())))
        for size, channels in sorted(found.items(), reverse=True)
    ]
    fields = texts((name, element.findtext(_path(way))) for name, way in FIELDS.items())
    device = element.find("{*}device")
    if device is not None:
        fields |= texts((f"device-{name}", device.get(name)) for name in ("model", "version"))
    nanometres = positive_number(view.get("spacingZ"))
    return _Image(
        left,
        top,
        width,
        height,
        tuple(dimensions),
        fields,
        _channels(element),
        len(planes),
        None if nanometres is None else nanometres / 1000,
    )


def _channels(element: Element) -> tuple[Channel, ...]:
    settings = element.iterfind(_path("scanSettings/channelSettings/channel"))
    found = [
        (whole_number(child.get("index", str(place))), child)
        for place, child in enumerate(settings)
    ]
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
        problems.append("The slide's barcode is no valid base64; it is given as it is stored.")
        code = text[:LONGEST_TEXT]
    return code


def _path(way: str) -> str:
    return "/".join(f"{{*}}{name}" for name in way.split("/"))


# What is shown


def _alike(scans: list[_Image], problems: list[str]) -> list[_Image]:
    """Choose the brightfield regions, else those of the first kind, that fit in one mosaic."""
    if not scans:
        return []
    kinds = [image.illumination for image in scans]
    kind = BRIGHTFIELD if BRIGHTFIELD in kinds else kinds[0]
    others = len(scans) - kinds.count(kind)
    if others:
        problems.append(f"{others} region(s) of another illumination than {kind} are not shown.")
    same = [image for image in scans if image.illumination == kind]
    regions = [image for image in same if image.fits(same[0])]
    if len(regions) < len(same):
        problems.append(
            f"{len(same) - len(regions)} region(s) of another objective, resolution or number of "
            "levels are not shown."
        )
    return regions


def _levels(
    collection: _Collection,
    regions: list[_Image],
    pages: list[TiffPage],
    path: str,
    problems: list[str],
) -> tuple[list[LevelLayout], list[_Image]]:
    """Make a mosaic of the regions for each level."""

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
            reasons.append("Its channels or sample type are others than the first one's.")
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
                "The slide's XML gives the collection a size that no slide has; its first image "
                "is shown alone."
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
) -> list[AssociatedLayout]:
    macros = [image for image in macros if image.illumination == BRIGHTFIELD]
    if len(macros) > 1:
        problems.append(f"The slide has {len(macros)} overviews; the first one is shown.")
    named = (("macro", pages[image.dimensions[0].pages[0]]) for image in macros[:1])
    return tiff.associated_images(named, path, problems)


def _largest(pages: list[TiffPage]) -> TiffPage:
    return max(pages, key=lambda page: page.imagewidth * page.imagelength)
