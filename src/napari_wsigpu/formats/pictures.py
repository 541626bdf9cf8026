"""Describe tiles and images that have no TIFF tags, from their own headers."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import IO, TYPE_CHECKING

import numpy as np

from napari_wsigpu.codecs.jpeg import ADOBE, BITS, FRAMES, segments
from napari_wsigpu.model.layout import Encoding, LevelLayout, TileGrid
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.tags import COMPRESSION, FILLORDER, PHOTOMETRIC, PREDICTOR

if TYPE_CHECKING:
    from napari_wsigpu.model.layout import JpegColor

# Words in the titles of associated images, and the names given to these images.
ASSOCIATED_NAMES = {
    "label": "label",
    "macro": "macro",
    "overview": "macro",
    "thumbnail": "thumbnail",
}
WORD = re.compile(rf"(?<![a-z0-9])({'|'.join(ASSOCIATED_NAMES)})(?![a-z0-9])")
JPEG_HEAD = 1 << 16
JFIF = 0xE0
JPEG_LS = 0xF7  # SOF55 (ITU-T T.87, C.2.2)


class DamagedPictureError(ValueError):
    """The structure of a picture is damaged."""


class LargePictureError(ValueError):
    """A picture is larger than a tile may be."""


def associated_name(title: str) -> str | None:
    """Return the name of the associated image that a title mentions; None if there is none."""
    found = WORD.search(title.lower())
    return ASSOCIATED_NAMES[found[1]] if found else None


def plain_encoding(
    compression: int,
    samples: int,
    dtype: str = "uint8",
    jpeg_color: JpegColor = "auto",
    photometric: int | None = None,
) -> Encoding:
    """Return an encoding without anything specific to TIFF, such as a predictor.

    Without `photometric`, three samples or more are RGB, fewer are gray.
    """
    if photometric is None:
        photometric = PHOTOMETRIC.RGB if samples > 2 else PHOTOMETRIC.MINISBLACK
    return Encoding(
        compression=compression,
        photometric=photometric,
        predictor=PREDICTOR.NONE,
        fill_order=FILLORDER.MSB2LSB,
        byte_order="<",
        dtype=dtype,
        samples=samples,
        jpeg_color=jpeg_color,
    )


def jpeg_color(head: bytes) -> JpegColor:
    """Return the color space of a JPEG, by the rules of libjpeg.

    The JFIF and Adobe markers decide, then the component identifiers of the frame header (ITU-T
    T.81, section B.2.2).

    Parameters
    ----------
    head : bytes
        The start of the JPEG, including the frame header.

    Raises
    ------
    DamagedPictureError
        If there is no frame header.
    """
    is_jfif, transform = False, None
    for marker, start, end in segments(head):
        if marker == JFIF and head[start + 4 : start + 8] == b"JFIF":
            is_jfif = True
        elif marker == ADOBE and end - start > 15:
            transform = head[start + 15]
        elif marker in FRAMES:
            ids = head[start + 10 : end : 3]
            if len(ids) == 1:
                return "gray"
            if len(ids) != 3:
                return "auto"
            if is_jfif or transform is None:
                return "stored" if ids == b"RGB" and not is_jfif else "ycbcr"
            return "ycbcr" if transform else "stored"
    raise DamagedPictureError("it has no JPEG frame")


def read_encoding(
    file: IO[bytes], offset: int, compression: int, samples: int, dtype: str
) -> Encoding:
    """Return the encoding of tiles; JPEG tiles have the color space of the tile at `offset`."""
    color: JpegColor = "auto"
    if compression == COMPRESSION.JPEG:
        file.seek(offset)
        with suppress(ValueError):
            color = jpeg_color(file.read(JPEG_HEAD))
    return plain_encoding(compression, samples, dtype, color)


def jpeg_picture(head: bytes, offset: int, length: int) -> LevelLayout:
    """Describe an 8-bit JPEG at an offset in the slide's bytes as an image of one tile.

    Raises
    ------
    DamagedPictureError
        If there is no frame header.
    LargePictureError
        If the image is larger than a tile may be.
    ValueError
        If it is not a supported kind of JPEG.
    """
    for marker, start, _ in segments(head):
        if marker == JPEG_LS:
            raise ValueError("it is a JPEG-LS image, which is not supported")
        if marker in FRAMES:
            frame = head[start + 4 :]
            height = int.from_bytes(frame[1:3], "big")
            width = int.from_bytes(frame[3:5], "big")
            bits, samples = frame[0], frame[5]
            if samples == 4:
                raise ValueError("it is a CMYK JPEG, which is not supported")
            if bits != BITS or samples not in (1, 3):
                raise ValueError(
                    f"it is a JPEG of {samples} x {bits} bits per pixel, which is not supported"
                )
            if not (height and width):
                raise ValueError("its header does not state its size")
            if height * width * samples > limits.tile_bytes:
                raise LargePictureError(f"it claims {width} x {height} pixels")
            ranges = (np.full((1, 1, 1), value, np.int64) for value in (offset, length))
            grid, color = TileGrid(height, width, *ranges), jpeg_color(head)
            return side_by_side(grid, plain_encoding(COMPRESSION.JPEG, samples, "uint8", color))
    raise DamagedPictureError("it has no JPEG frame")


def side_by_side(grid: TileGrid, tile_encoding: Encoding) -> LevelLayout:
    """Describe the tiles of a mosaic as an image in which they are side by side."""
    width, height = grid.tile_width * grid.columns, grid.tile_height * grid.rows
    return LevelLayout(width, height, tile_encoding.samples * grid.planes, tile_encoding, grid)
