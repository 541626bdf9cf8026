"""Generic TIFF pyramids, and functions that all vendor modules use to describe pages.

tifffile's `series` and `levels` identify the pyramid; this module turns them into layouts.
"""

from __future__ import annotations

import math
import re
from array import array
from dataclasses import replace
from itertools import chain, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from tifffile import TiffPage

from napari_wsigpu.codecs.compressions import is_of_images
from napari_wsigpu.codecs.jpeg import strip_metadata
from napari_wsigpu.formats.pictures import associated_name
from napari_wsigpu.formats.tiff import claims, imagej, pixel_size
from napari_wsigpu.formats.tiff.frames import pages_of, volume_error
from napari_wsigpu.formats.tiff.siblings import PageFiles, check_stack, stack_problem
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    NotASlideError,
    SlideError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.layout import (
    AssociatedLayout,
    Channel,
    Encoding,
    JpegColor,
    LevelLayout,
    Planes,
    SlideFile,
    SlideLayout,
    TileGrid,
)
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.tags import (
    COMPRESSION,
    FILETYPE,
    JPEG_2000,
    PHOTOMETRIC,
    PLANARCONFIG,
    PREDICTOR,
    RESUNIT,
    Tag,
)
from napari_wsigpu.model.units import byte_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tifffile import TiffFile, TiffFrame, TiffPageSeries

    from napari_wsigpu.formats.fields import Metadata
    from napari_wsigpu.model.arrays import Integers

# The value of `at` for which each format chooses its default plane.
DEFAULT_PLANE: Mapping[str, int] = MappingProxyType({})
LARGEST_SIDE = 1 << 31
# A tile whose planes are stored separately may take this many times `limits.tile_bytes`.
MOST_PLANES = 4
# Maximum length of a scanner's name; anything longer is other text in the wrong tag.
LONGEST_NAME = 80
# No codec makes a tile longer than twice its samples and this many bytes of headers.
SPARE_BYTES = 1 << 16
RAW_BLOCK = 4 << 20  # bytes of the blocks into which long uncompressed strips are divided
# A short axis without a name (I or Q) counts as channels, a longer one as planes.
UNNAMED_CHANNELS = 5
PLAIN_KINDS = "generic", "uniform", "shaped"  # of series, without a scanner's metadata
MOST_LISTED = 5  # images that are not shown
# Up to this many channels, each page is checked for a channel name.
MOST_NAMED = 1024
TEXT_TAGS = {
    "Make": Tag.MAKE,
    "Model": Tag.MODEL,
    "Software": Tag.SOFTWARE,
    "DateTime": Tag.DATE_TIME,
    "Artist": Tag.ARTIST,
    "HostComputer": Tag.HOST_COMPUTER,
    "Copyright": Tag.COPYRIGHT,
    "DocumentName": Tag.DOCUMENT_NAME,
}
RATIONAL_TAGS = {
    "XResolution": Tag.X_RESOLUTION,
    "YResolution": Tag.Y_RESOLUTION,
    "XPosition": Tag.X_POSITION,
    "YPosition": Tag.Y_POSITION,
}
RESOLUTION_UNITS = {
    RESUNIT.NONE: "none",
    RESUNIT.INCH: "inch",
    RESUNIT.CENTIMETER: "centimeter",
    RESUNIT.MILLIMETER: "millimeter",
    RESUNIT.MICROMETER: "micrometer",
}

# Bits per sample where several samples share a byte.
PACKED = (1, 2, 4)
EIGHT_BITS = (COMPRESSION.JPEG, COMPRESSION.WEBP)  # decode to 8 bits whatever the tags declare
REDUCED_ONLY = (
    "The largest image is marked as a reduced version of another one, which is damaged or "
    "missing; get a fresh copy of the file."
)
PALETTE_NOT_APPLIED = "The palette can't be applied; pixels show palette indices."
NOT_ORIENTED = (
    "The image should be shown rotated or mirrored (orientation {}); it is shown as stored."
)
UNCONVERTED = "Colors ({}) are not converted; channels show the stored values."
CONVERTED = (
    PHOTOMETRIC.MINISWHITE, PHOTOMETRIC.MINISBLACK, PHOTOMETRIC.RGB, PHOTOMETRIC.YCBCR
)  # fmt: skip
SHORTEST_PROFILE = 128  # bytes of the header of an ICC profile
SHORTEST_JFIF, JFIF_OFFSET, JFIF = 100, 6, b"JFIF"
# A conversion turns the names of associated images into file and folder names.
UNSAFE_NAME = re.compile(r"[/\\\0]|^\.")
KNOWN_COLORS = frozenset(PHOTOMETRIC)
LONGEST_TITLE = 256


def probe(file: TiffFile) -> bool:
    """Accept any file: this module comes last, after every vendor module has declined."""
    return True


def parse(file: TiffFile, source: SlideFile, at: Mapping[str, int] = DEFAULT_PLANE) -> SlideLayout:
    """Describe one plane of the file's largest image and its pyramid.

    `at` selects the plane along "z" and "t"; the default is the middle z and the first t.
    """
    layout = layout_of(file, source, at)
    return pixel_size.with_size(layout, file, keyframe(main_image(file, source.path)))


def layout_of(
    file: TiffFile, source: SlideFile, at: Mapping[str, int] = DEFAULT_PLANE
) -> SlideLayout:
    """Describe the plane as `parse` does, but leave the pixel size unknown."""
    claims.check_xml(file, source.path)
    contradiction = claims.distrust_shape(file)
    main = main_image(file, source.path)
    at = at or _default_plane(main)
    files = PageFiles(file, source, main)
    pyramid = _pyramid(file, main)
    levels = [series_level(series, source.path, files, at) for series in pyramid]
    page = keyframe(main)
    stated_wrongly = imagej.contradiction(file, main.kind, _image_count(main))
    found = contradiction, stated_wrongly, stack_problem(file, main)
    problems = [problem for problem in found if problem]
    if main.kind in PLAIN_KINDS:
        problems += images_not_shown(
            _size_and_planes(series) for series in images(file) if series not in pyramid
        )
    levels += _imagej_levels(file, main, at, levels[0], source.path, problems)
    held, stated = held_channels(main, at), len(_all_pages(main, at))
    if len(held) < stated:
        problems.append(f"{stated - len(held)} of {stated} channels are missing from the file.")
    if page.is_reduced:
        problems.append(REDUCED_ONLY)
    channels = imagej.channels(file, _image_count(main), stated, _shown_of(main, at))
    if not channels and main.kind in PLAIN_KINDS:
        channels = _page_names(_channel_pages(main, at))
    layout = slide_layout(
        files.whole, "generic-tiff", levels, page, channels=channels, problems=problems
    )

    scale = imagej.scale_of(file, page)
    return replace(
        layout,
        background=page.nodata,
        other_planes=_image_count(main) // stated - 1,
        planes=Planes.along(_shown_of(main, at), scale.z_spacing, scale.time_step),
        mpp=None,
        files=files.files,
        icc=layout.icc if page.parent is file else None,
    )


def slide_layout(
    source: SlideFile,
    vendor: str,
    levels: Sequence[LevelLayout],
    page: TiffPage,
    fields: Mapping[str, object] | None = None,
    *,
    with_description: bool = True,
    channels: Sequence[Channel] = (),
    associated: Iterable[AssociatedLayout] = (),
    problems: Iterable[str] = (),
) -> SlideLayout:
    """Describe a slide from a page's tags; vendor modules override values with better ones.

    Parameters
    ----------
    source : SlideFile
        The file.
    vendor : str
        Vendor of the slide.
    levels : sequence of LevelLayout
        Its levels, finest first.
    page : TiffPage
        The page whose tags are used.
    fields : Mapping, optional
        Further metadata, which is stored under the vendor's name.
    with_description : bool
        Whether to keep the page's ImageDescription in addition to `fields`.
    channels : sequence of Channel
        Channels that the file names; ignored unless their number matches level 0.
    associated, problems
        As in `SlideLayout`.

    Raises
    ------
    CorruptSlideError
        If the levels differ in channels or sample type, or the file holds none of their tiles.
    UnsupportedSlideError
        If there are more levels, or larger missing tiles, than the limits allow.
    """
    if len({(level.channels, level.dtype) for level in levels}) > 1:
        raise CorruptSlideError(
            f"The levels of '{source.path}' differ in channels or sample type; "
            "get a fresh copy of the file."
        )
    _check_averages(levels, source.path)
    check_tiles_present(levels, source.path, source.size)
    base = levels[0]
    rgb = is_rgb(base)
    tags = tiff_metadata(page)
    metadata: Metadata = {"tiff": tags} if fields is None else {vendor: fields, "tiff": tags}
    if not with_description:
        tags.pop("ImageDescription", None)
    return SlideLayout(
        path=source.path,
        vendor=vendor,
        levels=tuple(levels),
        associated=tuple(associated),
        rgb=rgb,
        channels=() if rgb else channel_names(base.channels, channels),
        background=background(base),
        mpp=pixel_size.from_tags(page),
        metadata=metadata,
        scanner=_make_and_model(tags),
        scan_date=tags.get("DateTime"),
        icc=icc_range(page),
        files=(source,),
        problems=(*problems, *_unconverted(page), *_emptied(levels)),
    )


def _unconverted(page: TiffPage) -> Iterator[str]:
    """Yield a problem for each conversion that the tags require but readers don't perform."""
    if page.photometric == PHOTOMETRIC.PALETTE:
        if _table(page) is None:
            yield PALETTE_NOT_APPLIED
    elif page.photometric not in CONVERTED:
        yield UNCONVERTED.format(getattr(page.photometric, "name", "unknown"))
    orientation = page.tags.valueof(Tag.ORIENTATION, 1)
    if orientation in range(2, 9):
        yield NOT_ORIENTED.format(int(orientation))


def _emptied(levels: Sequence[LevelLayout]) -> Iterator[str]:
    """Yield a problem if tiles have a position, but no bytes.

    OpenSlide and tifffile treat them as tiles that were never written, whose position is 0.
    """
    grids = [level.grid for level in levels if level.missing == "background"]
    empty = sum(
        int(((grid.byte_counts == 0) & (grid.offsets > 0)).any(axis=0).sum())
        for grid in grids
        if not grid.byte_counts.all()
    )
    if empty:
        tiles = "1 tile has" if empty == 1 else f"{empty} tiles have"
        yield (
            f"{tiles} a position in the file, but a size of 0 bytes; background is shown instead, "
            "which may hide damage."
        )


def pages(file: TiffFile) -> list[TiffPage]:
    """Return all pages of a scanner's file, each with its own tags.

    Raises
    ------
    UnsupportedSlideError
        If there are more than the limits allow.
    """
    if len(file.pages) > limits.pages:
        raise UnsupportedSlideError(
            f"'{file.filename}' claims {len(file.pages)} images, more than any scanner writes: "
            f"{limits.advice('pages')}."
        )
    claims.check_each(file)
    return [page.aspage() for page in file.pages]


def keyframe(series: TiffPageSeries) -> TiffPage:
    """Return the page whose tags apply to all pages of a series."""
    return series.keyframe


def is_rgb(level: LevelLayout) -> bool:
    """Whether decoded samples are red, green, blue (and alpha)."""
    colors = PHOTOMETRIC.RGB, PHOTOMETRIC.YCBCR
    return level.encoding.photometric in colors and level.channels in (3, 4)


def background(level: LevelLayout) -> int:
    """Return the value of pixels that were not scanned: white for unsigned RGB, else 0."""
    return int(np.iinfo(level.dtype).max) if is_rgb(level) and level.dtype.kind == "u" else 0


def number_tag(page: TiffPage, code: int) -> float | None:
    """Return a numeric tag as a float, a rational as its quotient; None for other values."""
    value = page.tags.valueof(code)
    if isinstance(value, tuple) and len(value) > 1 and value[1]:
        value = value[0] / value[1]
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def tiff_metadata(page: TiffPage) -> Metadata:
    """Return a page's descriptive tags: strings, and the numbers of resolution and position."""
    texts = {name: page.tags.valueof(code) for name, code in TEXT_TAGS.items()}
    found = {"ImageDescription": page.description, **texts}
    numbers = {name: number_tag(page, code) for name, code in RATIONAL_TAGS.items()}
    metadata: Metadata = {n: text for n, text in found.items() if isinstance(text, str) and text}
    metadata |= {name: number for name, number in numbers.items() if number is not None}
    unit = page.tags.valueof(Tag.RESOLUTION_UNIT, RESUNIT.INCH)
    metadata["ResolutionUnit"] = RESOLUTION_UNITS.get(unit, "unknown")
    return metadata


def _make_and_model(metadata: Metadata) -> str | None:
    """Return the scanner's name from `tiff_metadata`; None if the tags hold some other text."""
    make, model = (" ".join(metadata.get(key, "").split()) for key in ("Make", "Model"))
    name = model if model.startswith(make) else f"{make} {model}".strip()
    return name if 0 < len(name) <= LONGEST_NAME and "=" not in name else None


def text_tag(page: TiffPage, code: int) -> str:
    """Return the text of a tag, with bytes decoded as UTF-8; an empty string if it is missing."""
    value = page.tags.valueof(code)
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return text.rstrip("\0") if isinstance(text, str) else ""


def icc_range(page: TiffPage) -> tuple[int, int] | None:
    """Return the offset and length of a page's ICC profile in the file, in bytes."""
    tag = page.tags.get(Tag.ICC_PROFILE)
    if tag is None or tag.count < SHORTEST_PROFILE:
        return None
    return int(tag.valueoffset), int(tag.count)


def page_level(
    page: TiffPage,
    path: str,
    *,
    missing: Literal["background", "finer"] = "background",
    size: tuple[int, int] | None = None,
    layer: int | None = None,
) -> LevelLayout:
    """Describe one page as one level.

    Parameters
    ----------
    page : TiffPage
        The page.
    path : str
        Path of the file, for messages.
    missing : {"background", "finer"}
        As in `LevelLayout`.
    size : tuple of int, optional
        (width, height) without padding, where the stored image is padded.
    layer : int, optional
        The layer to describe if the page has several (ImageDepth); by default, such a page is
        refused.
    """
    return channels_level([page], path, missing=missing, size=size, layer=layer)


def associated_images(
    named: Iterable[tuple[str | None, TiffPage]], path: str, problems: list[str]
) -> list[AssociatedLayout]:
    """Describe the first readable page of each name, and skip pages without a name."""
    found: dict[str, AssociatedLayout] = {}
    for name, page in named:
        if name and not UNSAFE_NAME.search(name) and name not in found:
            try:
                found[name] = AssociatedLayout(name, page_level(page, path), icc=icc_range(page))
            except SlideError as error:
                problems.append(f"The {name} image is left out: {error}")
    return list(found.values())


def channels_level(
    pages: Sequence[TiffPage],
    path: str,
    *,
    missing: Literal["background", "finer"] = "background",
    size: tuple[int, int] | None = None,
    layer: int | None = None,
) -> LevelLayout:
    """Describe pages of one size and type as the channels of one level; see `page_level`."""
    first = pages[0]
    if any(page.hash != first.hash for page in pages):
        raise CorruptSlideError(
            f"The channels of '{path}' are stored in different ways; get a fresh copy of the file."
        )
    _, _, page_height, page_width, _ = first.shaped
    width, height = size or (page_width, page_height)
    if width > page_width or height > page_height:
        raise CorruptSlideError(
            f"'{path}' declares a level of {width} x {height} pixels, but stores "
            f"{page_width} x {page_height}; get a fresh copy of the file."
        )
    return _build_level(pages, first, width, height, path, missing=missing, layer=layer)


def _check_averages(levels: Sequence[LevelLayout], path: str) -> None:
    """Refuse too many levels, and levels whose missing tiles cost too much memory to average.

    Averaging a missing tile keeps the finer tiles that it covers in memory, and each of these tiles
    may require averaging too.
    """
    if len(levels) > limits.levels:
        raise UnsupportedSlideError(
            f"'{path}' claims {len(levels)} levels, more than any slide has: "
            f"{limits.advice('levels')}."
        )
    held = 0
    for finer, level in pairwise(levels):
        if level.missing == "finer" and not (level.grid.byte_counts > 0).all():
            area = (finer.width / level.width) * (finer.height / level.height)
            held += round(area * level.tile_bytes)
    if held > limits.averaged_bytes:
        raise UnsupportedSlideError(
            f"Averaging the missing tiles of '{path}' would take {byte_size(held)}: "
            f"{limits.advice('averaged_bytes')}."
        )


def check_tile_size(level: LevelLayout, path: str) -> None:
    """Refuse a level whose tiles are too large to decode.

    Planes that are stored separately are decoded one at a time, so each counts separately.
    """
    separate = level.channels if level.array is not None or level.parts else level.grid.planes
    most = limits.tile_bytes * min(MOST_PLANES, separate)
    if level.tile_bytes > most or level.tile_bytes // separate > limits.tile_bytes:
        raise UnsupportedSlideError(
            f"'{path}' claims tiles of {level.grid.tile_width} x {level.grid.tile_height} pixels "
            f"({byte_size(level.tile_bytes)} each), too large to decode: "
            f"{limits.advice('tile_bytes')}; 'wsigpu convert' can then write a copy that opens "
            "with the default limit."
        )


def check_tiles_present(levels: Sequence[LevelLayout], path: str, file_size: int) -> None:
    """Refuse a file whose stored tiles all lie beyond its end."""
    for image in chain.from_iterable(level.stored for level in levels):
        ends = image.grid.offsets + image.grid.byte_counts
        stored = image.grid.byte_counts > 0
        if (stored & (ends <= file_size)).any() or not stored.any():
            return
    raise CorruptSlideError(
        f"'{path}' is truncated: all of its tiles lie beyond the end of the file; "
        "get a fresh copy of it."
    )


def images(file: TiffFile) -> list[TiffPageSeries]:
    """Return the image series of a file, without masks and series that are not images."""
    check_stack(file)
    return [
        series
        for series in file.series
        if series.dtype is not None
        and not _is_mask(keyframe(series))
        and {"Y", "X"} <= set(series.axes)
    ]


def _size_and_planes(series: TiffPageSeries) -> str:
    (width, height), planes = size(series), _image_count(series)
    return f"{width} x {height}{f' ({planes} planes)' if planes > 1 else ''}"


def images_not_shown(names: Iterable[str]) -> list[str]:
    """Return a problem that lists images which are not shown; an empty list if there are none."""
    found = list(names)
    if not found:
        return []
    more = ", ..." if len(found) > MOST_LISTED else ""
    return [
        f"{len(found)} more image(s) of the file are not shown: "
        f"{', '.join(found[:MOST_LISTED])}{more}."
    ]


def main_image(file: TiffFile, path: str) -> TiffPageSeries:
    """Return the largest image of a file; a label or macro image only if there is no other.

    If the file is one of several, its own images are preferred to images in the other files.

    Raises
    ------
    NotASlideError
        If there is none.
    """
    found = images(file)
    if not found:
        raise NotASlideError(
            f"'{path}' holds no image with 8-, 16- or 32-bit samples; convert it to a TIFF with "
            "such samples."
        )
    own = [s for s in found if any(page is not None and page.parent is file for page in s)]
    found = own or found
    return max([series for series in found if not _is_associated(series)] or found, key=_area)


def _is_associated(series: TiffPageSeries) -> bool:
    """Whether an image is named label or macro, and can be an associated image."""
    lines = keyframe(series).description[:LONGEST_TITLE].splitlines()[:2]
    first_words = {line.split()[0].lower() for line in lines if line.split()}
    named = associated_name(series.name) in ("label", "macro") or first_words & {"label", "macro"}
    return bool(named) and can_be_associated(series)


def can_be_associated(series: TiffPageSeries) -> bool:
    """Whether an image can be an associated one: a single plane of 8 bits, gray or in color."""
    return series.dtype == np.uint8 and _image_count(series) == 1


def _is_mask(page: TiffPage) -> bool:
    return bool(page.subfiletype & FILETYPE.MASK) or page.photometric == PHOTOMETRIC.MASK


def _area(series: TiffPageSeries) -> int:
    width, height = size(series)
    return width * height


def size(series: TiffPageSeries) -> tuple[int, int]:
    """Return the width and height of a series."""
    width, height = (int(series.shape[series.axes.index(axis)]) for axis in "XY")
    return width, height


def _pyramid(file: TiffFile, main: TiffPageSeries) -> list[TiffPageSeries]:
    """Return the levels that tifffile found, and reduced images that it lists separately."""
    levels = list(main.levels)
    if main.kind in PLAIN_KINDS:
        known = {size(level) for level in levels}
        others = [level for series in file.series if series is not main for level in series.levels]
        for series in others:
            page = keyframe(series)
            if _is_mask(page) or not page.is_reduced:
                continue
            same_kind = series.axes == main.axes and series.dtype == main.dtype
            if same_kind and _is_smaller(size(series), size(main)) and size(series) not in known:
                levels.append(series)
                known.add(size(series))
    return sorted(levels, key=_area, reverse=True)


def _is_smaller(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    """Whether a size is smaller than another one, and has the same aspect ratio."""
    (w, h), (width, height) = inner, outer
    return w < width and h < height and abs(w * height - h * width) <= max(width, height) * 2


def _imagej_levels(
    file: TiffFile,
    main: TiffPageSeries,
    at: Mapping[str, int],
    base: LevelLayout,
    path: str,
    problems: list[str],
) -> list[LevelLayout]:
    """Describe the levels that libvips writes into the SubIFDs of each page of an ImageJ stack.

    tifffile doesn't list them for series of this kind. There are none unless all pages of the file
    have the same number of SubIFDs.
    """
    if main.kind != "imagej" or len(main.pages) != _image_count(main):
        return []
    counts = {directory.subimages for directory in claims.directories(file)}
    planes = _channel_pages(main, at)
    if len(counts) != 1 or counts != {len(plane.subifds or ()) for plane in planes}:
        return []
    found = [base]
    for number in range(max(counts)):
        reduced = []
        for plane in planes:
            file.filehandle.seek((plane.subifds or ())[number])
            reduced.append(TiffPage(file, (plane.index, number + 1)))
        if not reduced[0].is_reduced or _is_mask(reduced[0]):
            continue
        try:
            level = channels_level(reduced, path)
        except SlideError as error:
            problems.append(f"A level is left out. {error}")
            continue
        same_kind = (level.channels, level.dtype) == (base.channels, base.dtype)
        last = found[-1]
        if same_kind and _is_smaller((level.width, level.height), (last.width, last.height)):
            found.append(level)
    return found[1:]


def _image_count(series: TiffPageSeries) -> int:
    return math.prod(length for _, length in _axes_of_pages(series))


def _axes_of_pages(series: TiffPageSeries) -> list[tuple[str, int]]:
    """Return the name and length of each axis along which the pages are arranged."""
    sizes = zip(series.axes, series.shape, strict=True)
    axes = [(axis, length) for axis, length in sizes if axis not in "YXS"]
    samples = keyframe(series).samplesperpixel
    if math.prod(length for _, length in axes) != len(series.pages) and ("C", samples) in axes:
        # Some writers call the samples of a pixel C.
        axes.remove(("C", samples))
    return axes


def _default_plane(series: TiffPageSeries) -> Mapping[str, int]:
    """Return the middle plane along z, or the first one if the middle one lacks channels."""
    first = {"z": 0, "t": 0}
    held = {each: len(held_channels(series, at)) for each, at in enumerate((DEFAULT_PLANE, first))}
    return DEFAULT_PLANE if held[0] >= held[1] else first


def _shown_of(series: TiffPageSeries, at: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the index of the shown plane and the number of planes along each of "z" and "t"."""
    sizes = {axis.lower(): length for axis, length in _axes_of_pages(series) if axis in "ZT"}
    middle = {axis: length // 2 if axis == "z" else 0 for axis, length in sizes.items()}
    return {axis: (at.get(axis, middle[axis]), length) for axis, length in sizes.items()}


def held_channels(series: TiffPageSeries, at: Mapping[str, int] = DEFAULT_PLANE) -> list[int]:
    """Return the indices of a plane's channels that the file holds; its XML may list more."""
    return [index for index, page in enumerate(_all_pages(series, at)) if page is not None]


def _channel_pages(series: TiffPageSeries, at: Mapping[str, int]) -> list[TiffPage | TiffFrame]:
    """Return the pages of a plane, one for each channel that the file holds.

    Raises
    ------
    CorruptSlideError
        If the file holds none of them.
    """
    found = [page for page in _all_pages(series, at) if page is not None]
    if not found:
        raise CorruptSlideError(
            f"A plane of '{keyframe(series).parent.filename}' is missing; get a fresh copy of all "
            "files."
        )
    return found


def _all_pages(series: TiffPageSeries, at: Mapping[str, int]) -> list[TiffPage | TiffFrame | None]:
    """Return one page per channel, at plane `at` of z and t and at the start of any other axis."""
    count = _image_count(series)
    if count == 1 == len(series.pages):
        return [series.pages[0]]
    leading = _axes_of_pages(series)
    claims.check_planes(keyframe(series).parent.filename, max(count, len(series.pages)))
    pages = np.arange(count).reshape([length for _, length in leading])
    shown = _shown_of(series, at)
    single_sample = _page_of(series, pages_of(series, count, [0])).samplesperpixel == 1
    for axis, length in leading[::-1]:
        unnamed = axis in "IQ" and single_sample and length <= UNNAMED_CHANNELS
        position = [a for a, _ in leading].index(axis)
        if not (axis == "C" or unnamed):
            plane, _ = shown.get(axis.lower(), (0, 1))
            pages = np.take(pages, [plane], axis=position)
    return pages_of(series, count, pages.ravel().tolist())


def _page_names(pages: Sequence[TiffPage | TiffFrame]) -> tuple[Channel, ...]:
    """Name channels by the PageName tags of their pages, if every page has a different one.

    The software of mass cytometers (MCD) names channels in this way.
    """
    if not 1 < len(pages) <= MOST_NAMED:
        return ()
    names = [text_tag(page.aspage(), Tag.PAGE_NAME)[:LONGEST_NAME] for page in pages]
    return tuple(map(Channel, names)) if all(names) and len({*names}) == len(names) else ()


def _page_of(series: TiffPageSeries, pages: Sequence[TiffPage | TiffFrame | None]) -> TiffPage:
    """Return the page whose tags describe `pages`.

    That is the series' keyframe, except where `frames.pages_of` cut its samples into pages.
    """
    first, whole = pages[0], keyframe(series)
    is_sample = isinstance(first, TiffPage) and first.samplesperpixel < whole.samplesperpixel
    return cast("TiffPage", first) if is_sample else whole


def series_level(
    series: TiffPageSeries,
    path: str,
    files: PageFiles | None = None,
    at: Mapping[str, int] = DEFAULT_PLANE,
) -> LevelLayout:
    """Describe one plane of a series as one level; `at` selects it as in `parse`.

    Pages may be in other files only if `files` is given, which collects them.
    """
    width, height = size(series)
    pages = _channel_pages(series, at)
    if files is None and any(page.parent is not series.parent for page in pages):
        raise UnsupportedSlideError(
            f"The image is stored in files other than '{path}'; open one of them."
        )
    level = _build_level(pages, _page_of(series, pages), width, height, path)
    return level if files is None else replace(level, grid=files.joined(level.grid, pages))


def _build_level(
    pages: Sequence[TiffPage | TiffFrame],
    page: TiffPage,
    width: int,
    height: int,
    path: str,
    *,
    missing: Literal["background", "finer"] = "background",
    layer: int | None = None,
) -> LevelLayout:
    separate = page.planarconfig == PLANARCONFIG.SEPARATE and page.samplesperpixel > 1
    samples = 1 if separate else page.samplesperpixel
    if samples > limits.samples:
        raise UnsupportedSlideError(
            f"'{path}' claims {samples} samples per pixel, more than any slide has: "
            f"{limits.advice('samples')}."
        )
    table = _table(page) if len(pages) == 1 else None
    colors = table is not None and page.photometric == PHOTOMETRIC.PALETTE
    channels = 3 if colors else page.samplesperpixel * len(pages)
    if (layer is None or page.tiledepth != 1) and page.imagedepth != 1:
        raise volume_error(page)
    _check_size(page, width, height, channels, path)
    tiled = page.is_tiled
    tile_height = page.tilelength if tiled else page.rowsperstrip
    tile_width = page.tilewidth if tiled else width
    dtype = np.dtype(np.uint8 if page.bitspersample in PACKED else page.dtype)
    _, _, page_height, page_width, _ = page.shaped
    if min(tile_width, tile_height, page_width, page_height) < 1:
        raise CorruptSlideError(f"'{path}' holds tiles without pixels; get a fresh copy of it.")
    rows = math.ceil(page_height / tile_height)
    columns = math.ceil(page_width / tile_width)
    planes = page.samplesperpixel if separate else 1

    # Offsets run by layer (ImageDepth), then by sample plane, row, column (TIFF 6.0, section 15).
    own = slice((layer or 0) * planes * rows * columns, None)
    offsets = [_segments(p.dataoffsets[own], planes, rows, columns, path) for p in pages]
    byte_counts = [_segments(p.databytecounts[own], planes, rows, columns, path) for p in pages]
    needed_rows, needed_columns = math.ceil(height / tile_height), math.ceil(width / tile_width)
    if needed_rows > rows or needed_columns > columns:
        raise CorruptSlideError(
            f"'{path}' claims {width} x {height} pixels, but holds {page_width} x {page_height}; "
            "get a fresh copy of the file."
        )
    starts = np.concatenate(offsets)[:, :needed_rows, :needed_columns]
    lengths = np.concatenate(byte_counts)[:, :needed_rows, :needed_columns]
    # Offset 0, where every TIFF has its header, marks a missing tile.
    lengths[starts == 0] = 0
    grid = TileGrid(tile_height, tile_width, starts, lengths)
    if page.compression == COMPRESSION.NONE:
        row_bytes = -(-tile_width * samples * int(page.bitspersample) // 8)
        # Some writers state the size of a whole strip for the last one, or a size that overflowed.
        tops = np.arange(needed_rows, dtype=np.int64) * tile_height
        stored_rows = tile_height if tiled else np.minimum(tile_height, page_height - tops)
        sizes = np.broadcast_to(stored_rows * row_bytes, needed_rows)[:, np.newaxis]
        grid = replace(grid, byte_counts=np.minimum(lengths, sizes))
        if not tiled:
            grid = _split_raw_strips(grid, height, row_bytes)
    else:
        stored_height = min(tile_height, page_height)
        most = 2 * stored_height * tile_width * samples * dtype.itemsize + SPARE_BYTES
        if lengths.max() > most:
            for number, each in enumerate(pages):
                own = slice(number * planes, (number + 1) * planes)
                _limit(lengths[own], starts[own], most, each.parent.filehandle.size)
    # JPEGTables (TIFF Technical Note 2); some files have a malformed tag.
    stated = [getattr(p, "jpegtables", None) for p in pages for _ in range(planes)]
    tables = (strip_metadata(each) if isinstance(each, bytes) else None for each in stated)
    lerc = page.tags.valueof(Tag.LERC_PARAMETERS)
    encoding = Encoding(
        compression=int(page.compression),
        photometric=int(PHOTOMETRIC.RGB if colors else _photometric(page, channels)),
        # It belongs to compressions (TIFF 6.0, section 14), so libtiff ignores it for raw samples.
        predictor=1 if page.compression == COMPRESSION.NONE else int(page.predictor),
        fill_order=int(page.fillorder),
        byte_order=page.parent.byteorder,
        dtype=dtype.name,
        samples=samples,
        jpeg_color=_jpeg_color(page, separate) if page.compression == COMPRESSION.JPEG else "auto",
        jpeg_tables=tuple(tables),
        jpeg_header=None if page.jpegheader is None else strip_metadata(page.jpegheader),
        lerc_wrapping=int(lerc[1]) if lerc is not None and len(lerc) > 1 else 0,
        bits=int(page.bitspersample),
        table=table,
    )
    level = LevelLayout(width, height, channels, encoding, grid, missing)
    check_tile_size(level, path)
    return level


def _photometric(page: TiffPage, channels: int) -> int:
    """Return the photometric interpretation; MINISBLACK if the tag can't be right.

    Aperio's tag is wrong for JPEG 2000 tiles, where the compression code tells whether they are
    YCbCr (https://openslide.org/formats/aperio). Other writers use the same compression codes with
    a correct tag.
    """
    stated = page.photometric
    if page.compression in JPEG_2000 and page.parent.is_svs:
        ycbcr = page.compression == COMPRESSION.APERIO_JP2000_YCBC
        stated = PHOTOMETRIC.YCBCR if ycbcr and channels == 3 else stated
        stated = PHOTOMETRIC.RGB if stated == PHOTOMETRIC.YCBCR and not ycbcr else stated
    colors = stated in (PHOTOMETRIC.RGB, PHOTOMETRIC.YCBCR)
    several = stated == PHOTOMETRIC.RGB and channels > 4
    if stated not in KNOWN_COLORS or (colors and channels < 3) or several:
        return PHOTOMETRIC.MINISBLACK
    return stated


def _table(page: TiffPage) -> bytes | None:
    """Return the lookup table from stored to shown values, or None if they are the same.

    Palette images get RGB triples; gray of 1, 2 or 4 bits is spread over 8 bits.
    """
    bits = page.bitspersample
    if page.samplesperpixel != 1 or page.dtype is None or page.dtype.kind not in "ub":
        return None
    if page.photometric == PHOTOMETRIC.PALETTE and bits <= 8:
        palette = page.colormap
        if palette is None or palette.shape != (3, 1 << bits):
            return None
        # ColorMap values have 16 bits (TIFF 6.0, section 5); some writers fill only 8 of them.
        shades = palette if palette.max() < 256 else palette >> 8
        return shades.T.astype(np.uint8).tobytes()
    if bits in PACKED and page.compression not in EIGHT_BITS:
        most = (1 << bits) - 1
        return bytes(255 * value // most for value in range(most + 1))
    return None


def _check_size(page: TiffPage, width: int, height: int, channels: int, path: str) -> None:
    sides = page.tilelength, page.tilewidth, page.rowsperstrip
    if not all(isinstance(number, int) for number in (width, height, channels, *sides)):
        raise CorruptSlideError(
            f"'{path}' has image sizes that are not whole numbers; get a fresh copy of it."
        )
    if min(width, height, channels) < 1:
        raise CorruptSlideError(f"'{path}' holds an image without pixels; get a fresh copy of it.")
    if max(width, height) >= LARGEST_SIDE:
        raise UnsupportedSlideError(
            f"'{path}' claims {width} x {height} pixels, more than a slide can have; get a fresh "
            "copy of the file."
        )
    bits, dtype = page.bitspersample, page.dtype
    if bits in PACKED and _table(page) is not None and page.predictor == PREDICTOR.NONE:
        return
    if (
        dtype is None
        or dtype.kind not in "iuf"
        or (bits != 8 * dtype.itemsize and not is_of_images(page.compression))
    ):
        known = isinstance(bits, int) and isinstance(page.samplesperpixel, int)
        pixels = f"{page.samplesperpixel} x {bits} bits per pixel" if known else "unequal samples"
        kind = "complex numbers" if dtype is not None and dtype.kind == "c" else pixels
        raise NotASlideError(
            f"'{path}' has {kind} (sample format {int(page.sampleformat)}), which can't be decoded;"
            " convert it to integers or floats of 8, 16 or 32 bits."
        )


def _segments(values: Sequence[int], planes: int, rows: int, columns: int, path: str) -> Integers:
    expected = planes * rows * columns
    if len(values) < expected:
        raise CorruptSlideError(
            f"'{path}' claims {expected} tiles but lists {len(values)}; "
            "get a fresh copy of the file."
        )
    # `array` converts a tuple in less than half the time that NumPy takes.
    segments = np.frombuffer(array("Q", values[:expected]), np.uint64)
    if segments.max() >> np.uint64(62):  # so that the sum of an offset and a length fits int64
        raise CorruptSlideError(
            f"A tile offset of '{path}' lies beyond the end of any file; get a fresh copy of it."
        )
    return segments.view(np.int64).reshape(planes, rows, columns)


def _limit(lengths: Integers, starts: Integers, most: int, file_size: int) -> None:
    """End tiles of more than `most` bytes at the next tile of their page or the end of the file.

    Some writers state sizes that overflowed.
    """
    excessive = (lengths > most) & (starts < file_size)
    bounds = np.unique(np.append(starts, file_size))
    own = starts[excessive]
    following = bounds[np.searchsorted(bounds, own, "right")]
    lengths[excessive] = np.minimum(lengths[excessive], following - own)


def _split_raw_strips(grid: TileGrid, height: int, row_bytes: int) -> TileGrid:
    """Cut uncompressed strips that are contiguous in the file into blocks of `RAW_BLOCK` bytes."""
    offsets, counts = grid.offsets[..., 0], grid.byte_counts[..., 0]
    contiguous = (offsets[:, 1:] == offsets[:, :-1] + counts[:, :-1]).all()
    tile_height = max(1, min(height, RAW_BLOCK // row_bytes))
    if not contiguous or not counts.all() or grid.tile_height <= tile_height:
        return grid
    rows = math.ceil(height / tile_height)
    first = np.arange(rows, dtype=np.int64) * tile_height
    lengths = np.minimum(tile_height, height - first) * row_bytes
    return TileGrid(
        tile_height,
        grid.tile_width,
        (offsets[:, :1] + first * row_bytes)[..., np.newaxis],
        np.broadcast_to(lengths, (grid.planes, rows))[..., np.newaxis],
    )


def _jpeg_color(page: TiffPage, separate: bool) -> JpegColor:
    """Return the color space of a page's JPEGs, from the tags where they can be trusted."""
    if separate or page.samplesperpixel == 1:
        return "gray"
    if page.extrasamples:
        return "auto"
    if page.photometric == PHOTOMETRIC.YCBCR:
        return "ycbcr"
    # Some writers tag the YCbCr of a JFIF file as RGB.
    if page.photometric == PHOTOMETRIC.RGB:
        return "auto" if _is_jfif(page) else "stored"
    return "cmyk" if page.samplesperpixel == 4 else "auto"


def _is_jfif(page: TiffPage) -> bool:
    """Whether the page's JPEGs are JFIF and thus YCbCr, judging by the first tile in the file.

    tifffile's `is_jfif` reads the first tile even if it is missing.
    """
    segments = zip(page.dataoffsets, page.databytecounts, strict=False)
    offset = next((offset for offset, count in segments if offset and count > SHORTEST_JFIF), None)
    if offset is None:
        return False
    handle = page.parent.filehandle
    # Read no more than the marker: the picture may be a label, which names a patient.
    handle.seek(offset + JFIF_OFFSET)
    return bool(handle.read(len(JFIF)) == JFIF)


def channel_names(count: int, names: Sequence[Channel] = ()) -> tuple[Channel, ...]:
    """Return `names` if there is one for each of `count` channels, else generic names."""
    if len(names) == count:
        return tuple(names)
    if count == 1:
        return (Channel("gray"),)
    return tuple(Channel(f"channel {index}") for index in range(count))
