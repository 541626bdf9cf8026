"""Writes MIRAX slides, after OpenSlide's page of the format."""

from __future__ import annotations

import struct
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import imagecodecs
import numpy as np

from tests.writers import slides

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

SLIDE_ID = "00112233445566778899AABBCCDDEEFF"


def jpeg(pixels: NDArray[np.uint8]) -> bytes:
    return bytes(imagecodecs.jpeg8_encode(pixels, level=90, subsampling="420"))


def png(pixels: NDArray[np.uint8]) -> bytes:
    return bytes(imagecodecs.png_encode(pixels))


def bmp(pixels: NDArray[np.uint8]) -> bytes:
    """Write rows from the lowest one up, padded to 4 bytes, as BMP24."""
    height, width, _ = pixels.shape
    rows = np.pad(pixels[::-1, :, ::-1].reshape(height, -1), ((0, 0), (0, -width * 3 % 4)))
    size = 54 + rows.size
    head = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", size, 0, 0, 54, 40, width, height, 1, 24, 0,
                       rows.size, 2835, 2835, 0, 0)  # fmt: skip
    return head + rows.tobytes()


ENCODERS: dict[str, Callable[[NDArray[np.uint8]], bytes]] = {"JPEG": jpeg, "PNG": png, "BMP24": bmp}


class Mirax(NamedTuple):
    """A slide to be written.

    Attributes
    ----------
    images : tuple of (int, int)
        How many images across and down, in level 0.
    divisions : int
        Into how many images a photo is cut, across as down.
    size : tuple of (int, int)
        Width and height of each image.
    levels : int
        How many there are; each holds 2 x 2 images of the one before.
    overlap : tuple of (float, float)
        Said of photos, (x, y).
    positions : sequence of (int, int), optional
        Where each photo lies, row by row.
    stitching : bool
        Whether the positions are compressed, as newer scanners do.
    photos : collection of int, optional
        Those that are there; all of them by default.
    formats : sequence of str
        How the images of each level are encoded, the last one further levels too.
    fill : int
        The colour of what was not scanned.
    mixed : bool
        Whether a level's images lie in both data files in turn, not in one after the other.
    encode : callable, optional
        Encodes images of all levels, in place of that of their format.
    """

    images: tuple[int, int] = (8, 8)
    divisions: int = 2
    size: tuple[int, int] = (32, 24)
    levels: int = 4
    overlap: tuple[float, float] = (0, 0)
    positions: Sequence[tuple[int, int]] | None = None
    stitching: bool = False
    photos: Collection[int] | None = None
    formats: Sequence[str] = ("JPEG",)
    fill: int = 0xFFFFFF
    encode: Callable[[NDArray[np.uint8]], bytes] | None = None
    mixed: bool = True
    first_concat: int = 0
    page: int = 7
    associated: bool = True


def write(path: Path, slide: Mirax = Mirax(), pixels: NDArray[np.uint8] | None = None) -> None:  # noqa: B008
    """Write a slide to a .mrxs file and the folder beside it."""
    folder = path.with_suffix("")
    folder.mkdir()
    path.write_bytes(jpeg(slides.picture(8, 8)))
    index = bytearray(b"01.02" + SLIDE_ID.encode() + bytes(8))
    root = len(index) - 8
    data = [bytearray(b"head of a data file"), bytearray(b"another")]

    def number(*values: int) -> int:
        """Append to the index."""
        begin = len(index)
        index.extend(struct.pack(f"<{len(values)}i", *values))
        return begin

    def store(content: bytes, file: int) -> tuple[int, int, int]:
        data[file].extend(content)
        return len(data[file]) - len(content), len(content), file

    def point(where: int, to: int) -> None:
        index[where : where + 4] = struct.pack("<i", to)

    pages = []
    for level in range(slide.levels):
        records = _images(slide, level, pixels)
        owners = [
            image % 2 if slide.mixed else int(2 * place >= len(records))
            for place, (image, _) in enumerate(records)
        ]
        entries = [
            (image, *store(content, owner))
            for owner, (image, content) in zip(owners, records, strict=True)
        ]
        first = before = None
        for begin in range(0, len(entries), slide.page):
            part = entries[begin : begin + slide.page]
            page = number(len(part), 0)
            number(*(value for entry in part for value in entry))
            if before is not None:
                point(before + 4, page)
            first, before = first if first is not None else page, page
        pages.append(number(0, number(0, 0) if first is None else first))
    point(root, number(*pages))

    others: list[tuple[str, str, str, bytes]] = []
    if slide.associated:
        for name, key, size in (
            ("ScanDataLayer_SlideThumbnail", "THUMBNAIL_IMAGE_TYPE", (30, 50)),
            ("ScanDataLayer_SlideBarcode", "BARCODE_IMAGE_TYPE", (20, 25)),
            ("ScanDataLayer_SlidePreview", "PREVIEW_IMAGE_TYPE", (16, 40)),
        ):
            others.append(("Scan data layer", name, key, jpeg(slides.picture(*size))))
    if slide.positions is not None:
        buffer = b"".join(struct.pack("<Bii", 1, *place) for place in slide.positions)
        if slide.stitching:
            others.append(("StitchingIntensityLayer", "whatever", "", zlib.compress(buffer)))
        else:
            others.append(("VIMSLIDE_POSITION_BUFFER", "default", "", buffer))
    pointers = []
    for _, _, _, content in others:
        page = number(1, 0, 0, 0, *store(content, 1), 0)
        pointers.append(number(0, page))
    point(root + 4, number(*pointers))

    (folder / "Index.dat").write_bytes(index)
    for file, stored in enumerate(data):
        (folder / f"Data{file:04}.dat").write_bytes(stored)
    (folder / "Slidedat.ini").write_bytes(_ini(slide, others).encode("utf-8-sig"))


def _images(slide: Mirax, level: int, pixels: NDArray[np.uint8] | None) -> list[tuple[int, bytes]]:
    """Return number and bytes of each image of a level; each looks otherwise."""
    across, down = slide.images
    width, height = slide.size
    concat = 1 << level + slide.first_concat
    encode = slide.encode or ENCODERS[slide.formats[min(level, len(slide.formats) - 1)]]
    photos_across = across // slide.divisions
    found = []
    for y in range(0, down, concat):
        for x in range(0, across, concat):
            photos = {
                row // slide.divisions * photos_across + column // slide.divisions
                for row in range(y, min(y + concat, down))
                for column in range(x, min(x + concat, across))
            }
            if slide.photos is not None and not photos & set(slide.photos):
                continue
            shift = 5 * level + y * across + x
            if pixels is None:
                content = _shifted(encode, height, width, shift)
            else:
                part = pixels[:: 1 << level, :: 1 << level]
                top, left = y // concat * height, x // concat * width
                content = encode(
                    np.ascontiguousarray(part[top : top + height, left : left + width])
                )
            found.append((y * across + x, content))
    return found


@lru_cache(1000)  # most slides are of the same images
def _shifted(
    encode: Callable[[NDArray[np.uint8]], bytes], height: int, width: int, shift: int
) -> bytes:
    return encode(np.roll(slides.picture(height, width), (shift, 3 * shift), (0, 1)))


def _ini(slide: Mirax, others: Sequence[tuple[str, str, str, bytes]]) -> str:
    hierarchy = [
        "INDEXFILE = Index.dat",
        "HIER_COUNT = 1",
        "HIER_0_NAME = Slide zoom level",
        f"HIER_0_COUNT = {slide.levels}",
    ]
    sections = []
    for level in range(slide.levels):
        name = f"LAYER_0_LEVEL_{level}_SECTION"
        hierarchy += [f"HIER_0_VAL_{level} = ZoomLevel_{level}"]
        hierarchy += [f"HIER_0_VAL_{level}_SECTION = {name}"]
        concat = 1 << level
        kind = slide.formats[min(level, len(slide.formats) - 1)]
        sections.append(
            f"[{name}]\nOVERLAP_X = {slide.overlap[0] / concat}\n"
            f"OVERLAP_Y = {slide.overlap[1] / concat}\n"
            f"MICROMETER_PER_PIXEL_X = {0.25 * concat}\n"
            f"MICROMETER_PER_PIXEL_Y = {0.26 * concat}\n"
            f"IMAGE_FORMAT = {kind}\nIMAGE_FILL_COLOR_BGR = {slide.fill}\n"
            f"DIGITIZER_WIDTH = {slide.size[0]}\nDIGITIZER_HEIGHT = {slide.size[1]}\n"
            f"IMAGE_CONCAT_FACTOR = {1 if level else slide.first_concat}\n"
        )
    layers: dict[str, list[tuple[str, str]]] = {}
    for layer, value, key, _ in others:
        layers.setdefault(layer, []).append((value, key))
    hierarchy.append(f"NONHIER_COUNT = {len(layers)}")
    for number, (layer, values) in enumerate(layers.items()):
        hierarchy += [f"NONHIER_{number}_NAME = {layer}", f"NONHIER_{number}_COUNT = {len(values)}"]
        for count, (value, key) in enumerate(values):
            name = f"NONHIERLAYER_{number}_LEVEL_{count}_SECTION"
            hierarchy.append(f"NONHIER_{number}_VAL_{count} = {value}")
            hierarchy.append(f"NONHIER_{number}_VAL_{count}_SECTION = {name}")
            barcode = "BARCODE_VALUE = S-1234567\n" if key.startswith("BARCODE") else ""
            sections.append(f"[{name}]\n" + (f"{key} = JPEG\n{barcode}" if key else "A = B\n"))
    general = (
        f"[GENERAL]\nSLIDE_VERSION = 01.02\nSLIDE_ID = {SLIDE_ID}\nSLIDE_NAME = A patient\n"
        f"IMAGENUMBER_X = {slide.images[0]}\nIMAGENUMBER_Y = {slide.images[1]}\n"
        "OBJECTIVE_MAGNIFICATION = 20\nSLIDE_CREATIONDATETIME = 20/02/2009 13:33:07\n"
        f"CameraImageDivisionsPerSide = {slide.divisions}\n"
    )
    files = "[DATAFILE]\nFILE_COUNT = 2\nFILE_0 = Data0000.dat\nFILE_1 = Data0001.dat\n"
    return "\n".join([general, "[HIERARCHICAL]\n" + "\n".join(hierarchy) + "\n", files, *sections])


def scattered(slide: Mirax, step: int = 8, seed: int = 1) -> list[tuple[int, int]]:
    """Return positions of photos that overlap by amounts of their own, multiples of `step`."""
    random = np.random.default_rng(seed)
    across, down = (count // slide.divisions for count in slide.images)
    width, height = (side * slide.divisions for side in slide.size)
    places = []
    for row in range(down):
        for column in range(across):
            shift = random.integers(0, 3, 2) * step
            x, y = column * (width - 2 * step) + shift[0], row * (height - 2 * step) + shift[1]
            places.append((int(x), int(y)) if row or column else (0, 0))
    return places
