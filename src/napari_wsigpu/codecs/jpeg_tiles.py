"""JPEG tiles, and those made up of restart intervals of one large JPEG.

All by libjpeg: where that refuses one, imagecodecs' `jpeg_decode` would try another library, which
ends the whole process on some damaged streams.
"""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np

from napari_wsigpu import native
from napari_wsigpu.codecs.jpeg import (
    END_OF_IMAGE,
    FRAMES,
    START_OF_SCAN,
    end_of_image,
    is_lossless,
    segments,
)
from napari_wsigpu.model.limits import limits
from napari_wsigpu.native import tables as records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import Encoding, JpegColor

RESTARTS = frozenset(bytes((0xFF, 0xD0 + number)) for number in range(8))
TALLEST = 0xFFFF
RUNS_OUT = "its JPEG data run out within a row"  # as native/core.cpp says
NO_PARTS = np.zeros(0, records.PART)
SCAN = bytes((0xFF, START_OF_SCAN))
PROGRESSIVE = b"\xff\xc2", b"\xff\xca"
COLORS: dict[str, dict[str, Any]] = {
    "gray": {"outcolorspace": "GRAYSCALE"},
    "stored": {"colorspace": "RGB", "outcolorspace": "RGB"},
    "ycbcr": {"outcolorspace": "RGB"},
    "auto": {},
    "cmyk": {"outcolorspace": "CMYK"},
}


# So small JPEGs decode in no time, however many scans they have: most are not searched for these.
CHECKED = 1 << 36  # bytes times samples


def check_scans(data: Any, samples: int) -> None:
    """Refuse a JPEG whose scans go through its samples again and again, as few bytes can say.

    Raises
    ------
    ValueError
        If it is a progressive one of more scans than the limits say.
    """
    if len(data) * samples < CHECKED:
        return
    data = bytes(data)
    scans = data.count(SCAN)
    if scans * samples > limits.scanned_samples and any(frame in data for frame in PROGRESSIVE):
        raise ValueError(f"its JPEG has {scans} scans; {limits.advice('scanned_samples')}")


def decode_jpeg(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    """Decode a JPEG; see `codecs.table.Decode`.

    By the native core if it can, which tells whether libjpeg ran out of data and filled in gray.
    """
    check_scans(data, out.size)
    tables = encoding.jpeg_tables[plane]
    if not _decode_by_core(data, tables, encoding.jpeg_color, out):
        data = memoryview(data)[: end_of_image(data, tables)]
        # Lossless JPEG is never converted (T.81, H): what it is said to store makes no difference.
        color = "stored" if out.shape[2] == 3 and is_lossless(data) else encoding.jpeg_color
        imagecodecs.jpeg8_decode(data, tables=tables, out=out, **COLORS[color])


def _decode_by_core(data: Any, tables: bytes | None, color: JpegColor, out: NDArray[Any]) -> bool:
    """Decode by the native core; False if it leaves the JPEG to other decoders.

    Raises
    ------
    ValueError
        If the data run out.
    """
    if native.core is None or out.dtype != np.uint8 or not out.flags.c_contiguous:
        return False
    if color not in records.COLORS or not len(data):
        return False
    form, _ = _form(tables, color, out.shape)
    height, width = out.shape[:2]
    encoded = np.frombuffer(data, np.uint8)
    whole = (0, len(encoded), out.ctypes.data, 0, 0, height, width, records.DONE, 0)
    tile = np.array([whole], records.TILE)
    found = native.core.read_tiles(form.ctypes.data, tile, NO_PARTS, memory=encoded.ctypes.data)
    if found.get(0) == RUNS_OUT:
        raise ValueError(RUNS_OUT)
    return not found and (tile["height"][0], tile["width"][0]) == (height, width)


@lru_cache(maxsize=256)
def _form(
    tables: bytes | None, color: JpegColor, shape: tuple[int, int, int]
) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Describe JPEGs to the core: a `FORMAT` record, and the tables whose address it holds."""
    shared = np.frombuffer(tables or b"", np.uint8)
    address = shared.ctypes.data if len(shared) else 0
    sizes = (*shape, 1, shape[2], 0)
    record = (address, len(shared), records.JPEG, records.COLORS[color], *sizes)
    return np.array([record], records.FORMAT), shared


def decode_intervals(
    header: bytes, intervals: Sequence[memoryview], encoding: Encoding, out: NDArray[Any]
) -> None:
    """Decode restart intervals that lie one below the other.

    Parameters
    ----------
    header : bytes
        Header of a JPEG that one interval alone would be.
    intervals : sequence of memoryview
        Each one's scan with the marker behind it.
    encoding : Encoding
        How they are encoded, and how much smaller they are to be decoded.
    out : ndarray, shape (height, width, samples)
        What they are decoded into.

    Raises
    ------
    RuntimeError, ValueError
        If they are damaged.
    """
    data = join_intervals(header, intervals)
    if encoding.jpeg_scale > 1:
        _decode_smaller(data, encoding.jpeg_scale, out)
    else:
        imagecodecs.jpeg8_decode(data, out=out, **COLORS[encoding.jpeg_color])


def join_intervals(header: bytes, intervals: Sequence[memoryview]) -> bytes:
    """Make one JPEG of restart intervals that lie one below the other.

    Parameters
    ----------
    header : bytes
        Header of a JPEG that one interval alone would be.
    intervals : sequence of memoryview
        Each one's scan with the marker behind it.

    Raises
    ------
    ValueError
        If no marker ends an interval, or the header has no frame, or one too high.
    """
    parts: list[memoryview | bytes] = [_stretched(header, len(intervals))]
    for number, interval in enumerate(intervals):
        parts += [_scan(interval), bytes((0xFF, 0xD0 + number % 8))]
    parts[-1] = END_OF_IMAGE
    return b"".join(parts)


def _scan(interval: memoryview) -> memoryview | bytes:
    """Return an interval without the marker at its end."""
    if bytes(interval[-2:]) in RESTARTS:
        return interval[:-2]
    data = bytes(interval).rstrip(b"\0")
    if not data.endswith(END_OF_IMAGE):
        # libjpeg would fill what is missing with gray and say nothing.
        raise ValueError("its JPEG data end early")
    return data[:-2]


@lru_cache(maxsize=64)
def _stretched(header: bytes, times: int) -> bytes:
    """Return the header of a JPEG that is so many times as high."""
    for marker, start, _ in segments(header):
        if marker in FRAMES:
            offset = start + 5
            height = times * int.from_bytes(header[offset : offset + 2], "big")
            if height > TALLEST:
                raise ValueError(f"its JPEG header makes it {height} pixels high")
            return header[:offset] + height.to_bytes(2, "big") + header[offset + 2 :]
    raise ValueError("its JPEG header has no frame")


def _decode_smaller(data: bytes, scale: int, pixels: NDArray[Any]) -> None:
    """Have libjpeg decode fewer pixels, which imagecodecs can't."""
    from PIL import Image, UnidentifiedImageError  # for few slides

    try:
        with Image.open(BytesIO(data), formats=("JPEG",)) as image:
            image.draft(None, (image.width // scale, image.height // scale))
            smaller = np.asarray(image)
    except UnidentifiedImageError as error:
        raise ValueError("it is no JPEG picture") from error
    except (OSError, SyntaxError) as error:
        raise ValueError(f"it can't be decoded at 1/{scale} ({error})") from error
    if smaller.size != pixels.size:
        raise ValueError(f"at 1/{scale} it has {smaller.shape} samples")
    pixels[...] = smaller.reshape(pixels.shape)
