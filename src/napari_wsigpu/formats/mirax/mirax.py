"""3DHISTECH MIRAX: photos that lie where a camera took them, in files of a folder."""

from __future__ import annotations

import math
import zlib
from configparser import Error as ConfigError
from configparser import RawConfigParser
from contextlib import closing, suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.formats.fields import LONGEST_TEXT, number, positive_number, whole_number
from napari_wsigpu.formats.mirax.mirax_index import Index, Piece, read_positions
from napari_wsigpu.formats.pictures import (
    JPEG_HEAD,
    encoding,
    jpeg_color,
    jpeg_picture,
    side_by_side,
)
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.model.errors import CorruptSlideError, SlideError, UnsupportedSlideError
from napari_wsigpu.model.geometry import Rects, expand
from napari_wsigpu.model.layout import (
    AssociatedLayout,
    LevelLayout,
    Scattered,
    SlideFile,
    SlideLayout,
    TileGrid,
)
from napari_wsigpu.model.tags import BMP, COMPRESSION
from napari_wsigpu.storage.files import FilesSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from napari_wsigpu.model.geometry import Integers
    from napari_wsigpu.model.layout import Encoding, JpegColor
    from napari_wsigpu.storage.source import ByteSource

    Sections = Mapping[str, Mapping[str, str]]

INI, ENDING = "Slidedat.ini", ".mrxs"
LARGEST_INI = 1 << 20
LONGEST_REASON = 200
MOST_POSITIONS = 1 << 24
MOST_FILES, MOST_NAMES, MOST_LEVELS = 4096, 1024, 30
FORMATS = {"JPEG": COMPRESSION.JPEG, "PNG": COMPRESSION.PNG, "BMP24": BMP}
UNSHOWN = {"Slide filter level": "filter levels", "Microscope focus level": "focal planes"}
POSITIONS, STITCHING = "VIMSLIDE_POSITION_BUFFER", "StitchingIntensityLayer"
PICTURES = {
    "macro": ("ScanDataLayer_SlideThumbnail", "THUMBNAIL_IMAGE_TYPE"),
    "label": ("ScanDataLayer_SlideBarcode", "BARCODE_IMAGE_TYPE"),
    "thumbnail": ("ScanDataLayer_SlidePreview", "PREVIEW_IMAGE_TYPE"),
}


class _Zoom(NamedTuple):
    """What Slidedat.ini says of a level: its images are `concat` times reduced photos' parts."""

    concat: int
    width: int
    height: int
    compression: int


class _Camera(NamedTuple):
    """How photos are cut into images, and where they lie.

    Attributes
    ----------
    images : tuple of (int, int)
        How many images the slide has across and down.
    divisions : int
        Into how many images a photo is cut, across as down.
    overlap : tuple of float
        By how many pixels of level 0 photos overlap nominally, (x, y).
    corners : ndarray of int64, shape (down, across, 2)
        Where each photo lies, (x, y) in pixels of level 0.
    apart : bool
        Whether photos lie anywhere, so that coarser images hold parts of several that don't join.
    """

    images: tuple[int, int]
    divisions: int
    overlap: tuple[float, float]
    corners: Integers
    apart: bool


def probe(path: Path, head: bytes) -> bool:
    """Whether a path is a slide's .mrxs file, its folder, or the Slidedat.ini there."""
    if path.name == INI:
        return path.is_file()
    if not head:
        return (path / INI).is_file()
    is_jpeg = head.startswith(b"\xff\xd8")
    return is_jpeg and (path.suffix.lower() == ENDING or (path.with_suffix("") / INI).is_file())


def parse(path: Path) -> SlideLayout:
    """Describe a MIRAX slide."""
    folder = path if path.is_dir() else path.parent if path.name == INI else path.with_suffix("")
    if not (folder / INI).is_file():
        raise CorruptSlideError(
            f"'{path}' is a MIRAX slide whose folder '{folder.name}' with {INI} is missing; "
            "put it beside the file."
        )
    try:
        return _parse(path, folder)
    except SlideError:
        raise
    except (KeyError, ValueError, ConfigError) as error:
        reason = str(error).split("\n")[0]
        if len(reason) > LONGEST_REASON:
            reason = f"{reason[:LONGEST_REASON]} ..."
        if isinstance(error, KeyError):
            reason = f"{reason} is missing"
        raise CorruptSlideError(
            f"The MIRAX slide '{path}' can't be understood: {reason}; get a fresh copy of it."
        ) from error


def _parse(path: Path, folder: Path) -> SlideLayout:
    problems: list[str] = []
    sections = _sections(folder / INI)
    general, hierarchy = sections["GENERAL"], sections["HIERARCHICAL"]
    files, pieces = _files(folder, sections["DATAFILE"], problems)
    problems += _unshown(hierarchy)
    index = Index.read(folder / _plain(hierarchy["INDEXFILE"]), general["SLIDE_ID"], pieces)
    records = _records(hierarchy)
    zooms = _zooms(sections, hierarchy)
    with closing(FilesSource(files)) as source:
        camera = _camera(general, sections, zooms[0], index, records, source)
        levels = _levels(index, zooms, camera, source, problems)
        associated = tuple(_associated(sections, records, index, source, problems))
    size = sum(file.size for file in files)
    tiff.check_tiles_present(levels, str(path), size)
    first = _zoom_section(sections, hierarchy, 0)
    mpp = [positive_number(first.get(f"MICROMETER_PER_PIXEL_{axis}")) for axis in "XY"]
    barcodes = (section.get("BARCODE_VALUE") for section in sections.values())
    return SlideLayout(
        path=str(path),
        file_size=size,
        modified_ns=max(file.modified_ns for file in files),
        vendor="mirax",
        levels=tuple(levels),
        associated=associated,
        background=_background(first.get("IMAGE_FILL_COLOR_BGR")),
        mpp=(mpp[0], mpp[1]) if mpp[0] and mpp[1] else None,
        objective=positive_number(general.get("OBJECTIVE_MAGNIFICATION", "").rstrip("x")),
        metadata={"mirax": {name: dict(section) for name, section in sections.items()}},
        scan_date=general.get("SLIDE_CREATIONDATETIME"),
        barcode=next(filter(None, barcodes), None),
        problems=tuple(problems),
        files=tuple(files),
    )


# What Slidedat.ini says


def _sections(path: Path) -> Sections:
    with path.open("rb") as file:
        data = file.read(LARGEST_INI + 1)
    if len(data) > LARGEST_INI:
        raise ValueError(f"its {INI} is too long")
    parser = RawConfigParser(
        strict=False, delimiters=("=",), comment_prefixes=("#",), interpolation=None
    )
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(data.decode("utf-8-sig", "replace"))
    return {
        name: {key: value[:LONGEST_TEXT] for key, value in parser.items(name)}
        for name in parser.sections()
    }


def _unshown(hierarchy: Mapping[str, str]) -> Iterator[str]:
    """Say of which pictures of the same places only the first ones are shown."""
    for place in range(1, MOST_LEVELS):
        name = UNSHOWN.get(hierarchy.get(f"HIER_{place}_NAME", ""))
        count = positive_number(hierarchy.get(f"HIER_{place}_COUNT")) or 1
        if name is not None and count > 1:
            yield f"Of {count:g} {name} the first one is shown."


def _count(section: Mapping[str, str], key: str, most: int, least: int = 1) -> int:
    value = whole_number(section[key])
    if not least <= value <= most:
        raise ValueError(f"its {key} is {value}")
    return value


def _plain(name: str) -> str:
    """Return the name of a file that lies in the slide's folder."""
    if not name or name in (".", "..") or set(name) & set("/\\:\0"):
        raise ValueError("a file's name leads out of its folder")
    return name


def _files(
    folder: Path, section: Mapping[str, str], problems: list[str]
) -> tuple[list[SlideFile], list[Piece]]:
    """Return the data files that are there, and all, as parts of one."""
    found: list[SlideFile] = []
    pieces: list[Piece] = []
    missing = []
    for index in range(_count(section, "FILE_COUNT", MOST_FILES)):
        path = folder / _plain(section[f"FILE_{index}"])
        if path.is_file():
            status = path.stat()
            pieces.append(Piece(sum(file.size for file in found), status.st_size))
            found.append(SlideFile.of(str(path), status))
        else:
            pieces.append(Piece(None, 0))
            missing.append(path.name)
    if not found:
        raise ValueError("all of its data files are missing")
    if missing:
        problems.append(
            f"{len(missing)} of {len(pieces)} data files are missing, '{missing[0]}' first; copy "
            "the slide's whole folder."
        )
    return found, pieces


def _records(hierarchy: Mapping[str, str]) -> dict[tuple[str, str], tuple[int, str]]:
    """Return number and section of each record of the index that belongs to no level."""
    found: dict[tuple[str, str], tuple[int, str]] = {}
    count = 0
    for layer in range(_count(hierarchy, "NONHIER_COUNT", MOST_NAMES, 0)):
        name = hierarchy[f"NONHIER_{layer}_NAME"]
        for value in range(_count(hierarchy, f"NONHIER_{layer}_COUNT", MOST_NAMES)):
            key = f"NONHIER_{layer}_VAL_{value}"
            section = hierarchy.get(f"{key}_SECTION", "")
            found.setdefault((name, hierarchy.get(key, "")), (count, section))
            found.setdefault((name, ""), (count, section))
            count += 1
    return found


def _zoom_section(
    sections: Sections, hierarchy: Mapping[str, str], number: int
) -> Mapping[str, str]:
    return sections[hierarchy[f"HIER_0_VAL_{number}_SECTION"]]


def _zooms(sections: Sections, hierarchy: Mapping[str, str]) -> list[_Zoom]:
    if hierarchy.get("HIER_0_NAME") != "Slide zoom level":
        raise ValueError("its first hierarchy is not that of zoom levels")
    found: list[_Zoom] = []
    exponent = 0
    for index in range(_count(hierarchy, "HIER_0_COUNT", MOST_LEVELS)):
        section = _zoom_section(sections, hierarchy, index)
        exponent += _count(section, "IMAGE_CONCAT_FACTOR", MOST_LEVELS, int(index > 0))
        name = section["IMAGE_FORMAT"]
        if name not in FORMATS:
            raise UnsupportedSlideError(
                f"The images of a MIRAX slide are stored as {name[:32]!r}, which is not supported; "
                "convert it by 3DHISTECH's software."
            )
        if exponent > MOST_LEVELS:
            raise ValueError("its levels are too many")
        width, height = (
            _count(section, f"DIGITIZER_{side}", 1 << 16) for side in ("WIDTH", "HEIGHT")
        )
        found.append(_Zoom(1 << exponent, width, height, FORMATS[name]))
    return found


def _background(text: str | None) -> float:
    """Return the brightness of the fill colour, if it is a gray one."""
    try:
        color = whole_number(text)
    except ValueError:
        return 255
    blue, green, red = (color >> shift & 0xFF for shift in (16, 8, 0))
    return red if red == green == blue else 255


def _camera(
    general: Mapping[str, str],
    sections: Sections,
    zoom: _Zoom,
    index: Index,
    records: Mapping[tuple[str, str], tuple[int, str]],
    source: ByteSource,
) -> _Camera:
    across = _count(general, "IMAGENUMBER_X", MOST_POSITIONS)
    down = _count(general, "IMAGENUMBER_Y", MOST_POSITIONS)
    divisions = 1
    if "CameraImageDivisionsPerSide" in general:
        divisions = _count(general, "CameraImageDivisionsPerSide", min(across, down))
    if across * down > MOST_POSITIONS:
        raise ValueError(f"it claims {across} x {down} images")
    level = _zoom_section(sections, sections["HIERARCHICAL"], 0)
    overlap = (number(level["OVERLAP_X"]), number(level["OVERLAP_Y"]))
    steps = zoom.width * divisions - overlap[0], zoom.height * divisions - overlap[1]
    if min(*overlap, 0) < 0 or min(steps) <= 0:
        raise ValueError("its photos are said to overlap by more than their size")
    photos = (down // divisions, across // divisions)
    for name in (POSITIONS, STITCHING):
        if (name, "") in records:
            data = bytes(source.read([index.record(records[name, ""][0])])[0])
            if name == STITCHING:
                data = _inflated(data, 9 * math.prod(photos))
            corners = read_positions(data, photos) * zoom.concat
            return _Camera((across, down), divisions, overlap, corners, apart=True)
    rows, columns = (
        np.trunc(np.arange(count) * step) for count, step in zip(photos, steps[::-1], strict=True)
    )
    corners = np.stack(np.meshgrid(columns, rows), axis=-1).astype(np.int64)
    return _Camera((across, down), divisions, overlap, corners, apart=any(overlap))


def _inflated(data: bytes, size: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError("the positions of its photos are damaged") from error


# Where the tiles lie


def _levels(
    index: Index,
    zooms: Sequence[_Zoom],
    camera: _Camera,
    source: ByteSource,
    problems: list[str],
) -> list[LevelLayout]:
    base = zooms[0]
    sides = []
    for count, size, lap in zip(
        camera.images, (base.width, base.height), camera.overlap, strict=True
    ):
        overlapped = (count - 1) // camera.divisions
        sides.append((count - overlapped) * size + overlapped * math.floor(size - lap))
    active: NDArray[np.bool_] = np.zeros(camera.corners.shape[:2], np.bool_)
    levels: list[LevelLayout] = []
    for zoom in zooms:
        width, height = (side // zoom.concat for side in sides)
        if not 0 < min(width, height) <= max(width, height) < tiff.LARGEST_SIDE:
            raise ValueError(f"its level {len(levels)} is said to be of {width} x {height} pixels")
        rows, columns, grid = _stored(index, len(levels), zoom, camera, problems)
        if not len(rows):
            problems.append(f"Level {len(levels)} has no image; it is left out.")
            continue
        image = side_by_side(grid, _encoding(zoom, source, grid))
        part = _placed(image, rows, columns, zoom, base, camera, active, first=not levels)
        levels.append(LevelLayout.mosaic(width, height, [part], zoom.concat / base.concat))
    if not levels:
        raise ValueError("it has no image")
    return levels


def _stored(
    index: Index, number: int, zoom: _Zoom, camera: _Camera, problems: list[str]
) -> tuple[Integers, Integers, TileGrid]:
    """Return row and column of the images of a level, and where they are stored."""
    across, down = camera.images
    found = index.images(number, across * down)
    rows, columns = np.divmod(found.numbers, across)
    sound = (rows < down) & (rows % zoom.concat == 0) & (columns % zoom.concat == 0)
    if not sound.all():
        problems.append(
            f"{np.count_nonzero(~sound)} images of level {number} are said to lie where the slide "
            "has none; they are left out."
        )
    if found.lost:
        problems.append(
            f"{found.lost} images of level {number} are missing or cut off; copy the slide's whole "
            "folder."
        )
    places = found.offsets[None, None, sound], found.lengths[None, None, sound]
    return rows[sound], columns[sound], TileGrid(zoom.height, zoom.width, *places)


def _placed(
    image: LevelLayout,
    rows: Integers,
    columns: Integers,
    zoom: _Zoom,
    base: _Zoom,
    camera: _Camera,
    active: NDArray[np.bool_],
    *,
    first: bool,
) -> Scattered:
    """Lay down the images of a level, or the parts of them that come from one photo each.

    Photos of which level 0 has no image are `active` at no level: their positions say nothing.
    """
    divisions, (down, across) = camera.divisions, camera.corners.shape[:2]
    per_image = max(1, zoom.concat // divisions)
    parts = per_image if camera.apart else 1
    inner_x, inner_y = (
        np.minimum(parts, -((start - end) // divisions))
        for start, end in zip((columns, rows), camera.images, strict=True)
    )
    owner, cell = expand(np.zeros(len(inner_x), np.int64), inner_x * inner_y)
    yi, xi = np.divmod(cell, inner_x[owner])
    columns, rows = columns[owner] + xi * divisions, rows[owner] + yi * divisions
    photo_x, photo_y = columns // divisions, rows // divisions
    inside = (photo_x < across) & (photo_y < down)
    owner, yi, xi, columns, rows, photo_x, photo_y = (
        values[inside] for values in (owner, yi, xi, columns, rows, photo_x, photo_y)
    )
    corner = camera.corners[photo_y, photo_x]
    if first:
        used = corner.any(axis=1) | ((photo_x == 0) & (photo_y == 0))
        active[photo_y[used], photo_x[used]] = True
    else:
        used = _any_active(active, photo_y, photo_x, 1 if camera.apart else per_image)
    owner, yi, xi = owner[used], yi[used], xi[used]
    columns, rows = columns[used], rows[used]
    x = corner[used, 0] + base.width * (columns % divisions)
    y = corner[used, 1] + base.height * (rows % divisions)
    order = np.lexsort((columns, rows))
    edges = []
    for place, size in ((y, zoom.height), (x, zoom.width)):
        start = place[order] / zoom.concat
        edges.append((_rounded(start), _rounded(start + size / parts)))
    corners = np.stack(
        [_rounded(yi * (zoom.height / parts)), _rounded(xi * (zoom.width / parts))], axis=1
    )[order]
    (tops, bottoms), (lefts, rights) = edges
    rects = Rects(
        tops,
        lefts,
        np.minimum(bottoms, tops + zoom.height - corners[:, 0]),
        np.minimum(rights, lefts + zoom.width - corners[:, 1]),
    )
    places = np.stack([np.zeros_like(owner), owner], axis=1)[order]
    some = (rects.bottoms > rects.tops) & (rects.rights > rects.lefts)
    return Scattered.stacked(image, places[some], corners[some], rects[some])


def _any_active(
    active: NDArray[np.bool_], rows: Integers, columns: Integers, count: int
) -> NDArray[np.bool_]:
    """Return whether any of `count` x `count` photos from each on is active."""
    sums = np.pad(active.astype(np.int64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    ends = np.minimum(rows + count, active.shape[0]), np.minimum(columns + count, active.shape[1])
    found = sums[ends] - sums[rows, ends[1]] - sums[ends[0], columns] + sums[rows, columns]
    return np.asarray(found > 0)


def _rounded(values: NDArray[np.floating]) -> Integers:
    found: Integers = np.floor(values + 0.5).astype(np.int64)
    return found


# How they are encoded


def _encoding(zoom: _Zoom, source: ByteSource, grid: TileGrid) -> Encoding:
    """Return how images are encoded; of JPEGs the first one that can be read tells it."""
    color: JpegColor = "auto"
    if zoom.compression == COMPRESSION.JPEG:
        color = "ycbcr"
        (head,) = source.read([(int(grid.offsets[0, 0, 0]), JPEG_HEAD)])
        with suppress(ValueError):
            found = jpeg_color(bytes(head))
            color = color if found == "gray" else found
    return encoding(zoom.compression, 3, jpeg_color=color)


def _associated(
    sections: Sections,
    records: Mapping[tuple[str, str], tuple[int, str]],
    index: Index,
    source: ByteSource,
    problems: list[str],
) -> Iterator[AssociatedLayout]:
    for name, (layer, key) in PICTURES.items():
        number, section = records.get(("Scan data layer", layer), (None, ""))
        if number is None:
            continue
        try:
            if sections.get(section, {}).get(key) != "JPEG":
                raise ValueError("it is said to be no JPEG")
            offset, length = index.record(number)
            (head,) = source.read([(offset, min(JPEG_HEAD, length))])
            yield AssociatedLayout(name, jpeg_picture(bytes(head), offset, length))
        except ValueError as error:
            problems.append(f"The {name} image is left out: {error}.")
