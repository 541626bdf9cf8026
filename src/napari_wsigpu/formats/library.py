"""Slides that OpenSlide or libisyntax reads by region, described as grids of tiles.

The offsets of these tiles point into a virtual file that would hold them uncompressed; they only
identify the tiles.
"""

from __future__ import annotations

from contextlib import closing
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.formats.fields import Metadata, positive_number
from napari_wsigpu.formats.pictures import jpeg_picture, plain_encoding
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.model.errors import UnsupportedSlideError
from napari_wsigpu.model.layout import (
    AssociatedLayout,
    LevelLayout,
    LibraryImage,
    SlideFile,
    SlideLayout,
    TileGrid,
)
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.tags import COMPRESSION, TIFF_MAGIC
from napari_wsigpu.storage.library_source import LIBRARIES, open_library

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from isyntax import ISyntax
    from openslide import OpenSlide

HEAD = 1 << 16
OPENSLIDE, ISYNTAX = "OpenSlide", "libisyntax"
HAMAMATSU = b"[Virtual Microscope Specimen]", b"[Uncompressed Virtual Microscope Specimen]"
SQLITE, SAKURA, SAKURA_ENDING = b"SQLite format 3\0", b"SVSlideDataXPO", ".svslide"
PHILIPS = b'ObjectType="DPUfsImport"'
SMALLEST_TILE, USUAL_TILE, LARGEST_TILE = 128, 512, 2048


def probe(path: Path, head: bytes) -> bool:
    """Whether a library can read a file, or could if it were installed."""
    return _library_of(path, head) is not None


def parse(path: Path) -> SlideLayout:
    """Describe a slide that a library reads."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    return _by_isyntax(path) if _library_of(path, head) == ISYNTAX else _by_openslide(path)


def _library_of(path: Path, head: bytes) -> str | None:
    if not head or head.startswith(TIFF_MAGIC):
        return None
    if PHILIPS in head:
        return ISYNTAX
    is_sakura = path.suffix.lower() == SAKURA_ENDING or SAKURA in head
    if any(mark in head for mark in HAMAMATSU) or (head.startswith(SQLITE) and is_sakura):
        return OPENSLIDE
    if find_spec(LIBRARIES[OPENSLIDE].package) is None:
        return None
    try:
        import openslide
    except ImportError:  # the package is installed without the C library
        return None
    return None if openslide.OpenSlide.detect_format(path) is None else OPENSLIDE


def _by_openslide(path: Path) -> SlideLayout:
    with closing(open_library(OPENSLIDE, str(path))) as library:
        slide = library.handle
        properties = dict(slide.properties)
        vendor = properties.get("openslide.vendor", "openslide")
        hints = [
            _tile_side(properties.get(f"openslide.level[0].tile-{side}"))
            for side in ("height", "width")
        ]
        associated = {name: image.size for name, image in slide.associated_images.items()}
        levels, images = _images(OPENSLIDE, slide, hints, associated, path)
        sides = [positive_number(properties.get(f"openslide.mpp-{axis}")) for axis in "xy"]
        profile = slide.color_profile
        file = SlideFile.of(str(path), path.stat())
        return SlideLayout(
            path=file.path,
            files=(file,),
            vendor=vendor,
            levels=levels,
            associated=images,
            background=_background(properties.get("openslide.background-color")),
            mpp=(sides[0], sides[1]) if sides[0] and sides[1] else None,
            objective=positive_number(properties.get("openslide.objective-power")),
            metadata=_by_prefix(properties),
            icc=None if profile is None else profile.tobytes(),
        )


def _by_isyntax(path: Path) -> SlideLayout:
    with closing(open_library(ISYNTAX, str(path))) as library:
        slide = library.handle
        tile = [slide.tile_height, slide.tile_width]
        levels, _ = _images(ISYNTAX, slide, tile, {}, path)
        jpegs = {"label": slide.read_label_image_jpeg(), "macro": slide.read_macro_image_jpeg()}
        profile = slide.read_icc_profile()
        sides = positive_number(slide.mpp_x), positive_number(slide.mpp_y)
        problems: list[str] = []
        associated = []
        for name, data in jpegs.items():
            if data is None:
                continue
            try:
                image = jpeg_picture(bytes(data), 0, len(data))
                associated.append(AssociatedLayout(name, image, bytes(data)))
            except ValueError as error:
                problems.append(f"The {name} image is left out: {error}.")
        file = SlideFile.of(str(path), path.stat())
        return SlideLayout(
            path=file.path,
            files=(file,),
            vendor="philips-isyntax",
            levels=levels,
            associated=tuple(associated),
            background=255,
            mpp=(sides[0], sides[1]) if sides[0] and sides[1] else None,
            barcode=slide.barcode or None,
            icc=None if profile is None else bytes(profile),
            problems=tuple(problems),
        )


def _tile_side(text: str | None) -> int:
    side = int(positive_number(text) or 0)
    return side if SMALLEST_TILE <= side <= LARGEST_TILE else USUAL_TILE


def _images(
    library: str,
    slide: OpenSlide | ISyntax,
    tile: Sequence[int],
    associated: dict[str, tuple[int, int]],
    path: Path,
) -> tuple[tuple[LevelLayout, ...], tuple[AssociatedLayout, ...]]:
    """Divide levels into tiles; an associated image is one tile."""
    sizes, downsamples = slide.level_dimensions, slide.level_downsamples
    start = 0
    found = []
    images: list[tuple[int | str, tuple[int, int], Sequence[int]]] = [
        (number, size, tile) for number, size in enumerate(sizes)
    ]
    images += [(name, size, size[::-1]) for name, size in associated.items()]
    for image, (width, height), (tile_height, tile_width) in images:
        if not 0 < min(width, height) <= max(width, height) < tiff.LARGEST_SIDE:
            raise UnsupportedSlideError(
                f"'{path}' has an image of {width} x {height} pixels according to {library}; get "
                "a fresh copy of it."
            )
        rows, columns = -(-height // tile_height), -(-width // tile_width)
        if rows * columns > limits.tiles:
            raise UnsupportedSlideError(
                f"'{path}' has {width} x {height} pixels according to {library}, more than any "
                "slide has; get a fresh copy of it."
            )
        size = tile_height * tile_width * 3
        offsets = start + size * np.arange(rows * columns, dtype=np.int64)
        start += size * rows * columns
        shape = (1, rows, columns)
        grid = TileGrid(tile_height, tile_width, offsets.reshape(shape), np.full(shape, size))
        tile_encoding, source = plain_encoding(COMPRESSION.NONE, 3), LibraryImage(library, image)
        reduction = float(downsamples[image]) if isinstance(image, int) else None
        level = LevelLayout(
            width, height, 3, tile_encoding, grid, reduction=reduction, library=source
        )
        tiff.check_tile_size(level, str(path))
        found.append(level)
    named = map(AssociatedLayout, associated, found[len(sizes) :])
    return tuple(found[: len(sizes)]), tuple(named)


def _background(color: str | None) -> float:
    """Return the brightness of a color of six hexadecimal digits; 255 if it is not gray."""
    values = set(bytes.fromhex(color)) if color else {255}
    return values.pop() if len(values) == 1 else 255


def _by_prefix(properties: dict[str, str]) -> Metadata:
    """Nest properties by the part of their name before the first dot."""
    found: dict[str, dict[str, str]] = {}
    for name, value in properties.items():
        prefix, _, rest = name.partition(".")
        found.setdefault(prefix, {})[rest or prefix] = value
    return dict(found)
