"""Decoding of JPEG tiles, and of tiles that consist of restart intervals of one large JPEG.

This module decodes with libjpeg only. `imagecodecs.jpeg_decode` is not used: if libjpeg fails, it
tries another library, which crashes on some damaged streams.
"""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, TypedDict

import imagecodecs
import numpy as np

from napari_wsigpu import native
from napari_wsigpu.codecs import jpeg
from napari_wsigpu.model.limits import limits
from napari_wsigpu.native import tables as records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.codecs.byte_codecs import Data
    from napari_wsigpu.model.arrays import Array, ByteArray
    from napari_wsigpu.model.layout import Encoding, JpegColor

MAX_HEIGHT = 0xFFFF
RUNS_OUT = "its JPEG data ends within a row"  # the message in native/core.cpp
NO_PARTS = np.zeros(0, records.PART)
SCAN = bytes((0xFF, jpeg.START_OF_SCAN))
PROGRESSIVE = b"\xff\xc2", b"\xff\xca"  # SOF2 and SOF10


class ColorOptions(TypedDict, total=False):
    """Color spaces for `imagecodecs.jpeg8_decode`."""

    colorspace: str
    outcolorspace: str


COLORS: dict[str, ColorOptions] = {
    "gray": {"outcolorspace": "GRAYSCALE"},
    "stored": {"colorspace": "RGB", "outcolorspace": "RGB"},
    "ycbcr": {"outcolorspace": "RGB"},
    "auto": {},
    "cmyk": {"outcolorspace": "CMYK"},
}


# JPEGs below this size, in bytes times samples, are decoded quickly however many scans they have,
# so their scans are not counted.
UNCHECKED_SIZE = 1 << 36


def check_scans(data: Data, samples: int) -> None:
    """Check the number of scans in a JPEG: a scan of a few bytes can take a long time to decode.

    Raises
    ------
    ValueError
        If a progressive JPEG has more scans than the limits allow.
    """
    if len(data) * samples < UNCHECKED_SIZE:
        return
    data = bytes(data)
    scans = data.count(SCAN)
    if scans * samples > limits.scanned_samples and any(frame in data for frame in PROGRESSIVE):
        raise ValueError(f"its JPEG has {scans} scans; {limits.advice('scanned_samples')}")


def decode_jpeg(data: Data, encoding: Encoding, plane: int, out: Array) -> None:
    """Decode a JPEG; see `codecs.compressions.Decode`.

    The native core is preferred: it reports if libjpeg ran out of data and filled in gray.
    """
    check_scans(data, out.size)
    tables = encoding.jpeg_tables[plane]
    if not _decode_natively(data, tables, encoding.jpeg_color, out):
        data = memoryview(data)[: jpeg.end_of_image(data, tables)]
        # Lossless JPEG (T.81, annex H) has no color conversion, whatever the metadata says.
        color = "stored" if out.shape[2] == 3 and jpeg.is_lossless(data) else encoding.jpeg_color
        imagecodecs.jpeg8_decode(data, tables=tables, out=out, **COLORS[color])


def _decode_natively(data: Data, tables: bytes | None, color: JpegColor, out: Array) -> bool:
    """Decode with the native core; return False if it does not support the JPEG.

    Raises
    ------
    ValueError
        If the data ends early.
    """
    if native.core is None or out.dtype != np.uint8 or not out.flags.c_contiguous:
        return False
    if color not in records.COLORS or not len(data):
        return False
    tile_format, _ = _format_record(tables, color, out.shape)
    height, width = out.shape[:2]
    encoded = np.frombuffer(data, np.uint8)
    whole = (0, len(encoded), out.ctypes.data, 0, 0, height, width, records.DONE, 0)
    tile = np.array([whole], records.TILE)
    address = encoded.ctypes.data
    failures = native.core.read_tiles(tile_format.ctypes.data, tile, NO_PARTS, memory=address)
    if failures.get(0) == RUNS_OUT:
        raise ValueError(RUNS_OUT)
    return not failures and (tile["height"][0], tile["width"][0]) == (height, width)


@lru_cache(maxsize=256)
def _format_record(
    tables: bytes | None, color: JpegColor, shape: tuple[int, ...]
) -> tuple[Array, ByteArray]:
    """Return a `FORMAT` record, and the tables to which it points; keep both alive together."""
    shared = np.frombuffer(tables or b"", np.uint8)
    address = shared.ctypes.data if len(shared) else 0
    sizes = (*shape, 1, shape[2], 0)
    record = (address, len(shared), records.JPEG, records.COLORS[color], *sizes)
    return np.array([record], records.FORMAT), shared


def decode_intervals(
    header: bytes, intervals: Sequence[memoryview], encoding: Encoding, out: Array
) -> None:
    """Decode a column of restart intervals.

    Parameters
    ----------
    header : bytes
        Header for a JPEG that consists of one interval.
    intervals : sequence of memoryview
        Scan data of each interval, from top to bottom, with the marker after it.
    encoding : Encoding
        The encoding, with the scale at which to decode.
    out : ndarray, shape (height, width, samples)
        Receives the pixels.

    Raises
    ------
    RuntimeError, ValueError
        If the data is damaged.
    """
    data = join_intervals(header, intervals)
    if encoding.jpeg_scale > 1:
        _decode_scaled(data, encoding.jpeg_scale, out)
    elif not _decode_natively(data, None, encoding.jpeg_color, out):
        imagecodecs.jpeg8_decode(data, out=out, **COLORS[encoding.jpeg_color])


def join_intervals(header: bytes, intervals: Sequence[memoryview]) -> bytes:
    """Join a column of restart intervals into one JPEG.

    Parameters
    ----------
    header, intervals
        See `decode_intervals`.

    Raises
    ------
    ValueError
        If an interval has no end marker, the header has no frame, or the image is too tall.
    """
    parts: list[memoryview | bytes] = [_taller_header(header, len(intervals))]
    for number, interval in enumerate(intervals):
        # Restart markers count modulo 8 (T.81, table B.1).
        parts += [_scan(interval), bytes((0xFF, 0xD0 + number % 8))]
    parts[-1] = jpeg.END_OF_IMAGE
    return b"".join(parts)


def _scan(interval: memoryview) -> memoryview | bytes:
    """Return an interval without the marker at its end."""
    if bytes(interval[-2:]) in jpeg.RESTART_MARKERS:
        return interval[:-2]
    data = bytes(interval).rstrip(b"\0")
    if not data.endswith(jpeg.END_OF_IMAGE):
        # libjpeg would silently fill the missing part with gray.
        raise ValueError(jpeg.TRUNCATED)
    return data[:-2]


@lru_cache(maxsize=64)
def _taller_header(header: bytes, factor: int) -> bytes:
    """Return the header of a JPEG that is `factor` times as tall."""
    for marker, start, _ in jpeg.segments(header):
        if marker in jpeg.FRAMES:
            offset = start + 5
            height = factor * int.from_bytes(header[offset : offset + 2], "big")
            if height > MAX_HEIGHT:
                raise ValueError(f"its JPEG is too tall ({height} pixels)")
            return header[:offset] + height.to_bytes(2, "big") + header[offset + 2 :]
    raise ValueError("its JPEG header has no frame")


def _decode_scaled(data: bytes, scale: int, pixels: Array) -> None:
    """Decode at a fraction of the size with Pillow, because imagecodecs does not support it."""
    from PIL import Image, UnidentifiedImageError  # few slides need it

    try:
        with Image.open(BytesIO(data), formats=("JPEG",)) as image:
            image.draft(None, (image.width // scale, image.height // scale))
            smaller = np.asarray(image)
    except UnidentifiedImageError as error:
        raise ValueError("it is not a JPEG") from error
    except (OSError, SyntaxError) as error:
        raise ValueError(f"it can't be decoded at 1/{scale} ({error})") from error
    if smaller.size != pixels.size:
        raise ValueError(f"at 1/{scale} its image has the shape {smaller.shape}")
    pixels[...] = smaller.reshape(pixels.shape)
