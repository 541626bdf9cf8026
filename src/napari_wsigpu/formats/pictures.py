"""Encodings of tiles that no TIFF tags describe, but the pictures themselves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import numpy as np

from napari_wsigpu.codecs.jpeg import ADOBE, FRAMES, segments
from napari_wsigpu.model.layout import Encoding, LevelLayout, TileGrid
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.tags import COMPRESSION, FILLORDER, PHOTOMETRIC, PREDICTOR

if TYPE_CHECKING:
    from napari_wsigpu.model.layout import JpegColor

# What pictures beside a slide are called by others, as whole words.
BESIDE = {"label": "label", "macro": "macro", "overview": "macro", "thumbnail": "thumbnail"}
WORD = re.compile(rf"(?<![a-z0-9])({'|'.join(BESIDE)})(?![a-z0-9])")
JPEG_HEAD = 1 << 16
JFIF = 0xE0


def beside_name(title: str) -> str | None:
    """Return which picture beside a slide a title names; None if it names none."""
    found = WORD.search(title.lower())
    return BESIDE[found[1]] if found else None


def encoding(
    compression: int,
    samples: int,
    dtype: str = "uint8",
    jpeg_color: JpegColor = "auto",
    byte_order: Literal["<", ">"] = "<",
) -> Encoding:
    """Return how tiles are encoded that have nothing of what only TIFF has."""
    rgb = samples > 2
    return Encoding(
        compression=compression,
        photometric=PHOTOMETRIC.RGB if rgb else PHOTOMETRIC.MINISBLACK,
        predictor=PREDICTOR.NONE,
        fill_order=FILLORDER.MSB2LSB,
        byte_order=byte_order,
        dtype=dtype,
        samples=samples,
        jpeg_color=jpeg_color,
    )


def jpeg_color(head: bytes) -> JpegColor:
    """Return which colours a JPEG stores, as libjpeg guesses it.

    Parameters
    ----------
    head : bytes
        Its begin, with the frame.

    Raises
    ------
    ValueError
        If it has no frame.
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
    raise ValueError("it has no JPEG frame")


def jpeg_picture(head: bytes, offset: int, length: int) -> LevelLayout:
    """Describe a JPEG of 8 bits that lies in the slide's bytes as an image of one tile.

    Raises
    ------
    ValueError
        If it begins as no JPEG does that can be shown.
    """
    color = jpeg_color(head)
    for marker, start, _ in segments(head):
        if marker in FRAMES:
            frame = head[start + 4 :]
            height = int.from_bytes(frame[1:3], "big")
            width = int.from_bytes(frame[3:5], "big")
            if height * width * frame[5] > limits.tile_bytes:
                raise ValueError(f"it claims {width} x {height} pixels")
            if frame[0] == 8 and height and width and frame[5] in (1, 3):
                return one_tile(
                    width,
                    height,
                    encoding(COMPRESSION.JPEG, frame[5], "uint8", color),
                    offset,
                    length,
                )
    raise ValueError("it is a JPEG of another kind than pictures of slides are")


def one_tile(width: int, height: int, how: Encoding, offset: int, length: int) -> LevelLayout:
    """Describe an image of one tile."""
    places = (np.full((1, 1, 1), value, np.int64) for value in (offset, length))
    return LevelLayout(width, height, how.samples, how, TileGrid(height, width, *places))


def side_by_side(grid: TileGrid, how: Encoding) -> LevelLayout:
    """Describe tiles that lie anywhere as if they lay side by side."""
    width, height = grid.tile_width * grid.columns, grid.tile_height * grid.rows
    return LevelLayout(width, height, how.samples * grid.planes, how, grid)
