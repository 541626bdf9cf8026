"""3DHISTECH MIRAX: camera photos at measured positions, in the data files of a folder.

A photo is divided into images, which the data files hold. An image of a coarser level combines
images of the level below, and may hold parts of several photos.
"""

from __future__ import annotations

import math
import zlib
from configparser import Error as ConfigError
from configparser import RawConfigParser
from contextlib import closing, suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.formats.fields import LONGEST_TEXT, gray, number, positive_number, whole_number
from napari_wsigpu.formats.mirax.mirax_index import DataFile, Index, read_positions
from napari_wsigpu.formats.pictures import (
    JPEG_HEAD,
    jpeg_color,
    jpeg_picture,
    plain_encoding,
    side_by_side,
)
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    SlideError,
    UnsupportedSlideError,
    shortened,
)
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
from napari_wsigpu.storage.files_source import FilesSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from napari_wsigpu.model.geometry import Integers
    from napari_wsigpu.model.layout import Encoding, JpegColor
    from napari_wsigpu.storage.source import ByteSource

    Sections = Mapping[str, Mapping[str, str]]
    Records = dict[tuple[str, str], tuple[int, str]]

INI, ENDING = "Slidedat.ini", ".mrxs"
LARGEST_INI = 1 << 20
MOST_POSITIONS = 1 << 24
MOST_FILES, MOST_NAMES, MOST_LEVELS = 4096, 1024, 30
FORMATS = {"JPEG": COMPRESSION.JPEG, "PNG": COMPRESSION.PNG, "BMP24": BMP}
UNSHOWN = {"Slide filter level": "filter levels", "Microscope focus level": "focal planes"}
POSITIONS, STITCHING = "VIMSLIDE_POSITION_BUFFER", "StitchingIntensityLayer"
ASSOCIATED = {
    "macro": ("ScanDataLayer_SlideThumbnail", "THUMBNAIL_IMAGE_TYPE"),
    "label": ("ScanDataLayer_SlideBarcode", "BARCODE_IMAGE_TYPE"),
    "thumbnail": ("ScanDataLayer_SlidePreview", "PREVIEW_IMAGE_TYPE"),
}


class _Zoom(NamedTuple):
    """A level in Slidedat.ini: its downsample, and the size and encoding of its images."""

    concat: int
    width: int
    height: int
    compression: int


class _Camera(NamedTuple):
    """The division of photos into images, and the positions of photos.

    Attributes
    ----------
    images : tuple of (int, int)
        Number of images on the slide, across and down.
    divisions : int
        Number of images per side of a photo.
    overlap : tuple of float
        Nominal overlap of photos, (x, y) in pixels of level 0.
    corners : ndarray of int64, shape (down, across, 2)
        Upper left corner of each photo, (x, y) in pixels of level 0.
    irregular : bool
        Whether photos deviate from a seamless grid, so that the parts of several photos in a
        coarser image must be placed separately.
    """

    images: tuple[int, int]
    divisions: int
    overlap: tuple[float, float]
    corners: Integers
    irregular: bool


def probe(path: Path, head: bytes) -> bool:
    """Whether a path is a slide's .mrxs file, its folder, or the Slidedat.ini in it."""
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
            "copy that folder next to the file."
        )
    try:
        return _parse(path, folder)
    except SlideError:
        raise
    except (KeyError, ValueError, ConfigError) as error:
        reason = shortened(str(error).split("\n")[0])
        if isinstance(error, KeyError):
            reason = f"{reason} is missing"
        raise CorruptSlideError(
            f"The MIRAX slide '{path}' can't be read: {reason}; get a fresh copy of it."
        ) from error


def _parse(path: Path, folder: Path) -> SlideLayout:
    problems: list[str] = []
    sections = _sections(folder / INI)
    general, hierarchy = sections["GENERAL"], sections["HIERARCHICAL"]
    files, data_files = _files(folder, sections["DATAFILE"], problems)
    problems += _unshown(hierarchy)
    index_path = folder / _checked_name(hierarchy["INDEXFILE"])
    index = Index.read(index_path, general["SLIDE_ID"], data_files)
    records = _records(hierarchy)
    zooms = _zooms(sections, path)
    with closing(FilesSource(files)) as source:
        camera = _camera(sections, zooms[0], index, records, source)
        levels = _levels(index, zooms, camera, source, problems)
        associated = tuple(_associated(sections, records, index, source, problems))
    size = sum(file.size for file in files)
    tiff.check_tiles_present(levels, str(path), size)
    first = _zoom_section(sections, 0)
    mpp = [positive_number(first.get(f"MICROMETER_PER_PIXEL_{axis}")) for axis in "XY"]
    barcodes = (section.get("BARCODE_VALUE") for section in sections.values())
    return SlideLayout(
        path=str(path),
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


# Slidedat.ini


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
    """Yield a problem for each hierarchy that is shown at its first level only."""
    for level in range(1, MOST_LEVELS):
        name = UNSHOWN.get(hierarchy.get(f"HIER_{level}_NAME", ""))
        count = positive_number(hierarchy.get(f"HIER_{level}_COUNT")) or 1
        if name is not None and count > 1:
            yield f"Only the first of {count:g} {name} is shown."


def _count(section: Mapping[str, str], key: str, most: int, least: int = 1) -> int:
    value = whole_number(section[key])
    if not least <= value <= most:
        raise ValueError(f"its {key} is {value}")
    return value


def _checked_name(name: str) -> str:
    """Return a file name after checking that it has no folder."""
    if not name or name in (".", "..") or set(name) & set("/\\:\0"):
        raise ValueError("a file name points outside its folder")
    return name


def _files(
    folder: Path, section: Mapping[str, str], problems: list[str]
) -> tuple[list[SlideFile], list[DataFile]]:
    """Return the existing data files, and the position of each data file when they are joined."""
    found: list[SlideFile] = []
    data_files: list[DataFile] = []
    missing = []
    for index in range(_count(section, "FILE_COUNT", MOST_FILES)):
        path = folder / _checked_name(section[f"FILE_{index}"])
        if path.is_file():
            status = path.stat()
            data_files.append(DataFile(sum(file.size for file in found), status.st_size))
            found.append(SlideFile.of(str(path), status))
        else:
            data_files.append(DataFile(None, 0))
            missing.append(path.name)
    if not found:
        raise ValueError("all of its data files are missing")
    if missing:
        problems.append(
            f"{len(missing)} of {len(data_files)} data files are missing, such as '{missing[0]}'; "
            "copy the slide's whole folder."
        )
    return found, data_files


def _records(hierarchy: Mapping[str, str]) -> Records:
    """Return the number and section of each record of the index that is not a level's image."""
    found: Records = {}
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


def _zoom_section(sections: Sections, number: int) -> Mapping[str, str]:
    return sections[sections["HIERARCHICAL"][f"HIER_0_VAL_{number}_SECTION"]]


def _zooms(sections: Sections, path: Path) -> list[_Zoom]:
    hierarchy = sections["HIERARCHICAL"]
    if hierarchy.get("HIER_0_NAME") != "Slide zoom level":
        raise ValueError("its first hierarchy does not hold the zoom levels")
    found: list[_Zoom] = []
    exponent = 0
    for index in range(_count(hierarchy, "HIER_0_COUNT", MOST_LEVELS)):
        section = _zoom_section(sections, index)
        exponent += _count(section, "IMAGE_CONCAT_FACTOR", MOST_LEVELS, int(index > 0))
        name = section["IMAGE_FORMAT"]
        if name not in FORMATS:
            raise UnsupportedSlideError(
                f"The images of the MIRAX slide '{path}' are stored as {name[:32]!r}, which is not "
                "supported; convert the slide with 3DHISTECH's software."
            )
        if exponent > MOST_LEVELS:
            raise ValueError("it has too many levels")
        width = _count(section, "DIGITIZER_WIDTH", 1 << 16)
        height = _count(section, "DIGITIZER_HEIGHT", 1 << 16)
        found.append(_Zoom(1 << exponent, width, height, FORMATS[name]))
    return found


def _background(text: str | None) -> float:
    """Return the brightness of the fill color; 255 if it is not gray."""
    try:
        return gray(whole_number(text), 255)
    except ValueError:
        return 255


def _camera(
    sections: Sections, zoom: _Zoom, index: Index, records: Records, source: ByteSource
) -> _Camera:
    general = sections["GENERAL"]
    across = _count(general, "IMAGENUMBER_X", MOST_POSITIONS)
    down = _count(general, "IMAGENUMBER_Y", MOST_POSITIONS)
    divisions = 1
    if "CameraImageDivisionsPerSide" in general:
        divisions = _count(general, "CameraImageDivisionsPerSide", min(across, down))
    if across * down > MOST_POSITIONS:
        raise ValueError(f"it claims {across} x {down} images")
    level = _zoom_section(sections, 0)
    overlap = (number(level["OVERLAP_X"]), number(level["OVERLAP_Y"]))
    steps = zoom.width * divisions - overlap[0], zoom.height * divisions - overlap[1]
    if min(*overlap, 0) < 0 or min(steps) <= 0:
        raise ValueError("the overlap of its photos is larger than the photos")
    photos = (down // divisions, across // divisions)
    for name in (POSITIONS, STITCHING):
        if (name, "") in records:
            data = bytes(source.read([index.record(records[name, ""][0])])[0])
            if name == STITCHING:
                data = _inflated(data, 9 * math.prod(photos))
            corners = read_positions(data, photos) * zoom.concat
            return _Camera((across, down), divisions, overlap, corners, irregular=True)
    rows, columns = (
        np.trunc(np.arange(count) * step) for count, step in zip(photos, steps[::-1], strict=True)
    )
    corners = np.stack(np.meshgrid(columns, rows), axis=-1).astype(np.int64)
    return _Camera((across, down), divisions, overlap, corners, irregular=any(overlap))


def _inflated(data: bytes, size: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError("the positions of its photos are damaged") from error


# Composing the levels


def _levels(
    index: Index, zooms: Sequence[_Zoom], camera: _Camera, source: ByteSource, problems: list[str]
) -> list[LevelLayout]:
    base = zooms[0]
    sides = []
    sizes = base.width, base.height
    for count, size, lap in zip(camera.images, sizes, camera.overlap, strict=True):
        overlapped = (count - 1) // camera.divisions
        sides.append((count - overlapped) * size + overlapped * math.floor(size - lap))
    active: NDArray[np.bool_] = np.zeros(camera.corners.shape[:2], np.bool_)
    levels: list[LevelLayout] = []
    for zoom in zooms:
        width, height = (side // zoom.concat for side in sides)
        if not 0 < min(width, height) <= max(width, height) < tiff.LARGEST_SIDE:
            raise ValueError(f"its level {len(levels)} claims {width} x {height} pixels")
        rows, columns, grid = _stored(index, len(levels), zoom, camera, problems)
        if not len(rows):
            problems.append(f"Level {len(levels)} has no images and is left out.")
            continue
        image = side_by_side(grid, _encoding(zoom, source, grid))
        part = _placed(image, rows, columns, zoom, base, camera, active, first=not levels)
        levels.append(LevelLayout.mosaic(width, height, [part], zoom.concat / base.concat))
    if not levels:
        raise ValueError("it has no images")
    return levels


def _stored(
    index: Index, number: int, zoom: _Zoom, camera: _Camera, problems: list[str]
) -> tuple[Integers, Integers, TileGrid]:
    """Return the row and column of each image of a level, and the grid of their byte ranges."""
    across, down = camera.images
    found = index.images(number, across * down)
    rows, columns = np.divmod(found.numbers, across)
    sound = (rows < down) & (rows % zoom.concat == 0) & (columns % zoom.concat == 0)
    if not sound.all():
        problems.append(
            f"{np.count_nonzero(~sound)} images of level {number} lie outside the slide or the "
            "grid and are left out."
        )
    if found.lost:
        problems.append(
            f"{found.lost} images of level {number} are missing or truncated; copy the slide's "
            "whole folder."
        )
    ranges = found.offsets[None, None, sound], found.lengths[None, None, sound]
    return rows[sound], columns[sound], TileGrid(zoom.height, zoom.width, *ranges)


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
    """Place the images of a level or, if photos are irregular, the part that shows each photo.

    At level 0 (`first`), photos that have an image are marked in `active`. A photo without one has
    no meaningful position and is left out of all levels.
    """
    divisions, (down, across) = camera.divisions, camera.corners.shape[:2]
    photos_per_side = max(1, zoom.concat // divisions)
    parts_per_side = photos_per_side if camera.irregular else 1
    inner_x, inner_y = (
        np.minimum(parts_per_side, -((start - end) // divisions))
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
        used = _any_active(active, photo_y, photo_x, 1 if camera.irregular else photos_per_side)
    owner, yi, xi = owner[used], yi[used], xi[used]
    columns, rows = columns[used], rows[used]
    x = corner[used, 0] + base.width * (columns % divisions)
    y = corner[used, 1] + base.height * (rows % divisions)
    order = np.lexsort((columns, rows))
    edges = []
    for position, size in ((y, zoom.height), (x, zoom.width)):
        start = position[order] / zoom.concat
        edges.append((_rounded(start), _rounded(start + size / parts_per_side)))
    corners = np.stack(
        [
            _rounded(yi * (zoom.height / parts_per_side)),
            _rounded(xi * (zoom.width / parts_per_side)),
        ],
        axis=1,
    )[order]
    (tops, bottoms), (lefts, rights) = edges
    rects = Rects(
        tops,
        lefts,
        np.minimum(bottoms, tops + zoom.height - corners[:, 0]),
        np.minimum(rights, lefts + zoom.width - corners[:, 1]),
    )
    tiles = np.stack([np.zeros_like(owner), owner], axis=1)[order]
    some = (rects.bottoms > rects.tops) & (rects.rights > rects.lefts)
    return Scattered.stacked(image, tiles[some], corners[some], rects[some])


def _any_active(
    active: NDArray[np.bool_], rows: Integers, columns: Integers, count: int
) -> NDArray[np.bool_]:
    """Whether any of the `count` x `count` photos that start at each (row, column) is active."""
    # A summed-area table gives the number of active photos in any rectangle.
    sums = np.pad(active.astype(np.int64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    ends = np.minimum(rows + count, active.shape[0]), np.minimum(columns + count, active.shape[1])
    found = sums[ends] - sums[rows, ends[1]] - sums[ends[0], columns] + sums[rows, columns]
    return np.asarray(found > 0)


def _rounded(values: NDArray[np.floating]) -> Integers:
    found: Integers = np.floor(values + 0.5).astype(np.int64)
    return found


# Encoding and associated images


def _encoding(zoom: _Zoom, source: ByteSource, grid: TileGrid) -> Encoding:
    """Return the encoding of images; the first JPEG gives the color space of all."""
    color: JpegColor = "auto"
    if zoom.compression == COMPRESSION.JPEG:
        color = "ycbcr"
        (head,) = source.read([(int(grid.offsets[0, 0, 0]), JPEG_HEAD)])
        with suppress(ValueError):
            found = jpeg_color(bytes(head))
            color = color if found == "gray" else found
    return plain_encoding(zoom.compression, 3, jpeg_color=color)


def _associated(
    sections: Sections, records: Records, index: Index, source: ByteSource, problems: list[str]
) -> Iterator[AssociatedLayout]:
    for name, (layer, key) in ASSOCIATED.items():
        number, section = records.get(("Scan data layer", layer), (None, ""))
        if number is None:
            continue
        try:
            if sections.get(section, {}).get(key) != "JPEG":
                raise ValueError("it is not a JPEG")
            offset, length = index.record(number)
            (head,) = source.read([(offset, min(JPEG_HEAD, length))])
            yield AssociatedLayout(name, jpeg_picture(bytes(head), offset, length))
        except ValueError as error:
            problems.append(f"The {name} image is left out: {error}.")
