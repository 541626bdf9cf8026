"""JPEG, JPEG 2000 and PNG files: ordinary images of one tile, whose pyramid is computed.

A JPEG that is too large for one tile is divided at its restart markers, like those of Hamamatsu.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from tifffile.tifffile import ndpi_jpeg_tile

from napari_wsigpu.codecs.jpeg import (
    BITS,
    END_OF_IMAGE,
    RESTART_INTERVAL,
    RESTARTS,
    SEQUENTIAL,
    START_OF_SCAN,
    header_length,
    segments,
    strip_metadata,
)
from napari_wsigpu.codecs.jpeg2000 import CODESTREAM, CODESTREAM_HEAD, SIGNATURE_BOX, start_of
from napari_wsigpu.formats import foreign
from napari_wsigpu.formats.pictures import (
    DamagedPictureError,
    LargePictureError,
    jpeg_color,
    jpeg_picture,
    plain_encoding,
)
from napari_wsigpu.formats.tiff import hamamatsu, pixel_size, tiff
from napari_wsigpu.model.errors import CorruptSlideError, SlideError, UnsupportedSlideError
from napari_wsigpu.model.layout import LevelLayout, SlideFile, SlideLayout, TileGrid
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.tags import COMPRESSION, PHOTOMETRIC, Tag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from napari_wsigpu.model.arrays import Integers

VENDOR = "generic-image"
JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
JPEG_2000 = SIGNATURE_BOX, CODESTREAM
LONGEST_HEADER, READ_BYTES = 1 << 20, 1 << 24
ONE_BLOCK = 0x11  # sampling factors of 1 and 1
# Samples by PNG's color type (ISO/IEC 15948, 11.2.2): gray, RGB, palette, gray with alpha, RGBA.
PNG_SAMPLES = {0: 1, 2: 3, 3: 3, 4: 1, 6: 4}
GRAY_WITH_ALPHA = 4
# Application segments of a JPEG (Exif 2.3, 4.5; ICC.1:2022, annex B.4), and the orientation's tag.
EXIF, EXIF_HEAD = 0xE1, b"Exif\0\0"
PROFILE, PROFILE_HEAD = 0xE2, b"ICC_PROFILE\0"
SHORT = 3  # a 16-bit number in a TIFF directory
BYTE_ORDERS = {b"II": "<", b"MM": ">"}
LARGEST_PROFILE = 16 << 20
# Density of a JPEG (JFIF 1.02): the segment, and micrometers by its unit; unit 0 is a mere ratio.
JFIF, JFIF_HEAD = 0xE0, b"JFIF\0"
JFIF_UNITS = {1: pixel_size.INCH, 2: pixel_size.CENTIMETER}
PNG_UNITS = {1: pixel_size.METER}  # of the chunk pHYs; unit 0 is a mere ratio
# sYCC in the color specification box (ISO/IEC 15444-1, I.5.3.3), and the box of a palette.
SYCC, PALETTE = b"colr\1\0\0\0\0\0\x12", b"pclr"
RESTRICTED_ICC = 2  # method of the color specification box
# The resolutions at which the image was captured and should be displayed (I.5.3.7).
CAPTURED, DISPLAYED = b"resc", b"resd"


def probe(path: Path, head: bytes) -> bool:
    """Whether a file is an ordinary image, and its name doesn't indicate another format."""
    return head.startswith((JPEG, PNG, *JPEG_2000)) and not foreign.has_ending(path.name)


def parse(path: Path) -> SlideLayout:
    """Describe an image as a slide with one level of one tile; a large JPEG has several tiles.

    Raises
    ------
    CorruptSlideError
        If its header or the order of its restart markers is damaged.
    UnsupportedSlideError
        If the image is larger than a tile may be, or of an unsupported kind.
    """
    file = SlideFile.of(str(path), path.stat())
    with path.open("rb") as stream:
        head = stream.read(LONGEST_HEADER)
    problems: list[str] = []
    try:
        if head.startswith(JPEG):
            levels = _jpeg(path, head, file.size)
            problems += _orientation_problems(head)
        elif head.startswith(PNG):
            levels = (_png(head, file.size, problems),)
        else:
            levels = (_jpeg2000(head, file.size),)
    except SlideError:
        raise
    except DamagedPictureError as error:
        raise CorruptSlideError(
            f"The image '{path}' is damaged ({error}); get a fresh copy of it."
        ) from error
    except ValueError as error:
        raise UnsupportedSlideError(
            f"The image '{path}' can't be opened ({error}); convert it to a tiled TIFF, for "
            "example with 'vips tiffsave IN OUT --tile --pyramid'."
        ) from error
    resolution = _resolution(head)
    default = pixel_size.default_of(*resolution)
    if default is not None:
        problems.append(pixel_size.DEFAULT.format(default))
    level = levels[0]
    rgb = tiff.is_rgb(level)
    return SlideLayout(
        path=file.path,
        files=(file,),
        vendor=VENDOR,
        levels=levels,
        rgb=rgb,
        channels=() if rgb else tiff.channel_names(level.channels),
        background=tiff.background(level),
        mpp=pixel_size.from_resolution(*resolution),
        icc=_profile(head),
        problems=tuple(problems),
    )


def _jpeg(path: Path, head: bytes, size: int) -> tuple[LevelLayout, ...]:
    """Describe a JPEG as one tile or, if that would be too large, by its restart intervals."""
    try:
        return (jpeg_picture(head, 0, size),)
    except LargePictureError as error:
        found = _of_intervals(path, head)
        if found is None:
            raise ValueError(f"{error}, and no restart markers divide each row evenly") from None
    tiff.check_tile_size(found, str(path))
    return hamamatsu.with_scaled([found])


def _orientation_problems(head: bytes) -> Iterator[str]:
    """Yield a problem if a JPEG's Exif data say that it should be shown rotated or mirrored."""
    blocks = (head[start + 4 : end] for marker, start, end in segments(head) if marker == EXIF)
    exif = next((block[6:] for block in blocks if block.startswith(EXIF_HEAD)), b"")
    order = BYTE_ORDERS.get(exif[:2])
    if order is None or len(exif) < 8:
        return
    (start,) = struct.unpack_from(f"{order}I", exif, 4)
    (count,) = struct.unpack(f"{order}H", exif[start : start + 2].ljust(2, b"\0"))
    entries = exif[start + 2 :][: 12 * count]
    whole = entries[: len(entries) // 12 * 12]
    for code, kind, _, value in struct.iter_unpack(f"{order}HHIH2x", whole):
        if (code, kind) == (Tag.ORIENTATION, SHORT):
            if value in range(2, 9):
                yield tiff.NOT_ORIENTED.format(value)
            return


def _profile(head: bytes) -> bytes | None:
    """Return a picture's ICC profile, joined or inflated; None if it has none or it is damaged."""
    if head.startswith(JPEG):
        parts = sorted(
            head[start + 4 + len(PROFILE_HEAD) : end]  # its number, the number of parts, and data
            for marker, start, end in segments(head)
            if marker == PROFILE and head.startswith(PROFILE_HEAD, start + 4)
        )
        return b"".join(part[2:] for part in parts) or None
    if head.startswith(PNG):
        _, _, deflated = _png_chunk(head, b"iCCP").partition(b"\0")
        try:
            return zlib.decompressobj().decompress(deflated[1:], LARGEST_PROFILE) or None
        except zlib.error:
            return None
    # Readers must ignore all color specification boxes after the first one (I.5.3.3).
    color = next((content for kind, content in _jp2_header(head) if kind == b"colr"), b"")
    return (color[3:] or None) if color[:1] == bytes([RESTRICTED_ICC]) else None


def _resolution(head: bytes) -> tuple[float, float, float | None]:
    """Return pixels per unit (x, y) and the unit in micrometers; (0, 0, None) if unknown."""
    if head.startswith(JPEG):
        for marker, start, end in segments(head):
            data = head[start + 4 : end]
            if marker == JFIF and data.startswith(JFIF_HEAD) and len(data) >= 12:
                unit, x, y = struct.unpack_from(">BHH", data, 7)
                return x, y, JFIF_UNITS.get(unit)
    elif head.startswith(PNG):
        size = _png_chunk(head, b"pHYs")
        if len(size) == 9:
            x, y, unit = struct.unpack(">IIB", size)
            return x, y, PNG_UNITS.get(unit)
    else:
        inner = (content for kind, content in _jp2_header(head) if kind == b"res ")
        stated = dict(_boxes(next(inner, b"")))
        for kind in (CAPTURED, DISPLAYED):
            if len(box := stated.get(kind, b"")) == 10:
                y, y_divisor, x, x_divisor, *exponents = struct.unpack(">4H2b", box)
                if min(x, y, x_divisor, y_divisor) > 0:
                    y_power, x_power = (10.0**exponent for exponent in exponents)
                    return x / x_divisor * x_power, y / y_divisor * y_power, pixel_size.METER
    return 0, 0, None


def _png_chunk(head: bytes, wanted: bytes) -> bytes:
    """Return a chunk before the pixels of a PNG (ISO/IEC 15948, 5.3); empty if it is missing."""
    at = len(PNG)
    while (kind := head[at + 4 : at + 8]) not in (b"IDAT", b""):
        size = int.from_bytes(head[at : at + 4], "big")
        if kind == wanted:
            return head[at + 8 : at + 8 + size]
        at += 12 + size  # with its length, type and checksum
    return b""


def _jp2_header(head: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Return the boxes in the header box of a JP2 file; a code stream without boxes has none."""
    found = _boxes(head) if head.startswith(SIGNATURE_BOX) else ()
    return _boxes(next((content for kind, content in found if kind == b"jp2h"), b""))


def _boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the type and content of each box (ISO/IEC 15444-1, I.4)."""
    at = 0
    while len(head := data[at : at + 16]) >= 8:
        length, start = int.from_bytes(head[:4], "big"), 8
        if length == 1:
            length, start = int.from_bytes(head[8:], "big"), 16
        if 0 < length < start:
            return
        end = at + length if length else len(data)  # the last box may state 0
        yield head[4:8], data[at + start : end]
        at = end


def _of_intervals(path: Path, head: bytes) -> LevelLayout | None:
    """Describe a JPEG as tiles of restart intervals (ITU-T T.81, E.2.4); None if impossible.

    It needs one sequential scan, and a whole number of intervals in each row of units.
    """
    found = {marker: head[start + 4 : end] for marker, start, end in segments(head)}
    frame, scan = found.get(SEQUENTIAL[0], b""), found.get(START_OF_SCAN, b"")
    interval = int.from_bytes(found.get(RESTART_INTERVAL, b"")[:2], "big")
    start = header_length(head)
    if len(frame) < 9 or scan[:1] != frame[5:6] or not interval:
        return None
    bits, height, width, samples = struct.unpack_from(">BHHB", frame)
    # In a single component, the units are blocks, whatever the sampling factors are.
    if bits != BITS or samples not in (1, 3) or (samples == 1 and frame[7] != ONE_BLOCK):
        return None
    tile_height, tile_width, header = ndpi_jpeg_tile(head[:start])
    rows, columns = -(-height // tile_height), -(-width // tile_width)
    ends = _interval_ends(path, start)
    excess = columns * tile_width - width
    missing = rows * columns - len(ends)
    if excess >= tile_width // interval or missing < 0:
        return None
    if missing:
        total = rows * columns
        raise DamagedPictureError(f"{missing} of its {total} restart intervals are missing")
    starts = np.array([start, *ends[:-1]], np.int64)
    shape = 1, rows, columns
    grid = TileGrid(tile_height, tile_width, starts.reshape(shape), (ends - starts).reshape(shape))
    encoding = plain_encoding(COMPRESSION.JPEG, samples, "uint8", jpeg_color(head))
    encoding = replace(encoding, jpeg_header=strip_metadata(header))
    return LevelLayout(width, height, samples, encoding, hamamatsu.joined(grid))


def _interval_ends(path: Path, start: int) -> Integers:
    """Return the offset after each restart marker of a scan, and after the end of the image."""
    found: list[Integers] = []
    with path.open("rb") as file:
        file.seek(start)
        block = b""
        while more := file.read(READ_BYTES):
            block = block[-1:] + more  # a marker may be cut in two
            data = np.frombuffer(block, np.uint8)
            markers = np.flatnonzero(data[:-1] == 0xFF)
            kinds = data[markers + 1]
            [finished] = (kinds == END_OF_IMAGE[1]).nonzero()
            last = finished[0] if len(finished) else len(kinds)
            chosen = np.flatnonzero(np.isin(kinds[:last], RESTARTS))
            expected = RESTARTS[0] + (np.arange(len(chosen)) + sum(map(len, found))) % len(RESTARTS)
            if (kinds[chosen] != expected).any():
                raise DamagedPictureError("its restart markers are out of order")
            if len(finished):
                chosen = np.append(chosen, last)
            found.append(markers[chosen] + 2 + file.tell() - len(block))
            if len(finished) or sum(map(len, found)) > limits.tiles:
                break
    return np.concatenate(found, dtype=np.int64) if found else np.zeros(0, np.int64)


def _png(head: bytes, size: int, problems: list[str]) -> LevelLayout:
    try:
        width, height, bits, color = struct.unpack_from(">IIBB", head, 16)
        samples = PNG_SAMPLES[color]
    except (struct.error, KeyError):
        raise DamagedPictureError("its PNG header is damaged") from None
    if color == GRAY_WITH_ALPHA or _png_chunk(head, b"tRNS"):
        problems.append("The image's transparency is not shown.")
    dtype = "uint16" if bits > 8 else "uint8"
    return _picture(0, size, (height, width, samples), dtype, COMPRESSION.PNG)


def _jpeg2000(head: bytes, size: int) -> LevelLayout:
    """Describe the code stream in a file (ISO/IEC 15444-1, A.5.1)."""
    try:
        start = start_of(memoryview(head))
    except ValueError as error:
        raise DamagedPictureError(str(error)) from None
    boxes, stream = head[:start], head[start:]
    if len(stream) < CODESTREAM_HEAD or not stream.startswith(CODESTREAM):
        raise DamagedPictureError("its JPEG 2000 header is truncated or too long")
    right, lower, left, upper = struct.unpack_from(">4I", stream, 8)
    (samples,) = struct.unpack_from(">H", stream, 40)
    components = stream[42 : 42 + 3 * samples]
    depths = {*components[::3]}
    if PALETTE in boxes or len(depths) != 1 or components[1:3] != b"\1\1":
        raise ValueError("it has a palette, or components of several kinds")
    [depth] = depths
    bits, signed = (depth & 127) + 1, depth > 127
    if bits > 16:
        raise ValueError(f"its samples have {bits} bits")
    dtype = f"{'' if signed else 'u'}int{8 if bits <= 8 else 16}"
    shape = lower - upper, right - left, samples
    photometric = PHOTOMETRIC.MINISBLACK
    if samples in (3, 4):
        ycbcr = samples == 3 and SYCC in boxes
        photometric = PHOTOMETRIC.YCBCR if ycbcr else PHOTOMETRIC.RGB
    return _picture(start, size - start, shape, dtype, COMPRESSION.JPEG2000, photometric)


def _picture(
    start: int,
    length: int,
    shape: tuple[int, int, int],
    dtype: str,
    compression: int,
    photometric: int | None = None,
) -> LevelLayout:
    height, width, samples = shape
    if min(shape) < 1:
        raise DamagedPictureError("it has no pixels")
    if math.prod(shape) * np.dtype(dtype).itemsize > limits.tile_bytes:
        raise ValueError(f"it claims {width} x {height} pixels")
    encoding = plain_encoding(compression, samples, dtype, photometric=photometric)
    offsets, counts = (np.full((1, 1, 1), value, np.int64) for value in (start, length))
    return LevelLayout(width, height, samples, encoding, TileGrid(height, width, offsets, counts))
