"""Encodings of TIFF tiles: copied from the source, or newly encoded."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import imagecodecs
import numpy as np
from tifffile import TIFF

from napari_wsigpu.codecs.decoder import EncodedTile
from napari_wsigpu.codecs.jpeg import FRAMES, segments
from napari_wsigpu.codecs.libraries import load
from napari_wsigpu.codecs.tile import decode_tile
from napari_wsigpu.conversion.options import DEFAULT_QUALITY, TILE_UNIT
from napari_wsigpu.conversion.redaction import redact
from napari_wsigpu.formats.pictures import jpeg_color
from napari_wsigpu.model.errors import ConversionError
from napari_wsigpu.model.tags import (
    COMPRESSION,
    DEFLATE,
    FILLORDER,
    JPEG_2000,
    PHOTOMETRIC,
    PREDICTOR,
    WEBP,
    ZSTD,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari_wsigpu.conversion.options import Options
    from napari_wsigpu.model.arrays import Array, DType
    from napari_wsigpu.model.layout import LevelLayout, SlideLayout
    from napari_wsigpu.slide.slide import Slide

    Encode = Callable[[Array], bytes]

BYTE_CODECS = {
    COMPRESSION.NONE,
    COMPRESSION.LZW,
    COMPRESSION.ADOBE_DEFLATE,
    COMPRESSION.PACKBITS,
    COMPRESSION.LZMA,
    COMPRESSION.ZSTD,
}
# Compressions whose tiles can be copied, mapped to the code to write: obsolete codes are replaced
# by current ones.
COPYABLE: dict[int, COMPRESSION] = {
    **{code: code for code in (*BYTE_CODECS, COMPRESSION.JPEG, *JPEG_2000, COMPRESSION.JPEGXL)},
    **{code: codes[0] for codes in (DEFLATE, WEBP, ZSTD) for code in codes},
}
COMPRESSION_TAGS = {
    "raw": COMPRESSION.NONE,
    "jpeg": COMPRESSION.JPEG,
    "deflate": COMPRESSION.ADOBE_DEFLATE,
    "zstd": COMPRESSION.ZSTD,
}
# Names of imagecodecs functions by the value of the Compression or Predictor tag.
ENCODED_BY: dict[int, str] = {
    COMPRESSION.JPEG: "jpeg8_encode",
    COMPRESSION.ADOBE_DEFLATE: "deflate_encode",
    COMPRESSION.ZSTD: "zstd_encode",
}
PREDICTED_BY: dict[int, str] = {
    PREDICTOR.HORIZONTAL: "delta_encode",
    PREDICTOR.FLOATINGPOINT: "floatpred_encode",
}
OME_TYPES = frozenset({"int8", "int16", "int32", "uint8", "uint16", "uint32", "float32", "float64"})
SUBSAMPLINGS = frozenset({(1, 1), (2, 1), (2, 2), (4, 1)})
LONGEST_JPEG_HEADER = 1 << 16
QUANTIZATION = 0xDB  # the marker DQT
LUMINANCE_SUM = 3688  # of the luminance table of ITU-T T.81, K.1


@dataclass(frozen=True, slots=True)
class Coding:
    """How a TIFF page stores its tiles.

    Attributes
    ----------
    compression, photometric, predictor : int
        Values of the TIFF tags of the same names.
    planes : int
        Number of segments per tile: one per channel, or 1.
    copied : bool
        Whether tiles are copied from the source without decoding.
    redacted : bool
        Whether text inside copied tiles is overwritten with zeros.
    jpeg_tables : bytes or None
        The JPEGTables tag: quantization and Huffman tables that all tiles share.
    subsampling : tuple of int
        Chroma subsampling of JPEG tiles, (horizontal, vertical).
    quality : int
        JPEG quality of newly encoded tiles, 1 to 100.
    """

    compression: int
    photometric: int
    predictor: int
    planes: int
    copied: bool = False
    redacted: bool = False
    jpeg_tables: bytes | None = None
    subsampling: tuple[int, int] = (1, 1)
    # Not compared: planes of different quality can still be written as one stack.
    quality: int = field(default=DEFAULT_QUALITY, compare=False)


def new_coding(layout: SlideLayout, options: Options) -> Coding:
    """Return the encoding of new tiles, which is lossless unless the options select JPEG.

    Raises
    ------
    ConversionError
        If JPEG cannot hold the samples.
    """
    first = layout.levels[0]
    compression = COMPRESSION_TAGS[options.compression or "deflate"]
    planes = 1 if layout.rgb else first.channels
    inverted = first.encoding.white_is_zero and first.channels == 1
    photometric = PHOTOMETRIC.MINISWHITE if inverted else PHOTOMETRIC.MINISBLACK
    if compression == COMPRESSION.JPEG:
        if first.dtype != np.uint8 or (layout.rgb and first.channels != 3):
            raise ConversionError(
                f"JPEG cannot hold {first.channels} x {first.dtype} samples per pixel, as in "
                f"'{layout.path}'; use deflate, zstd or raw."
            )
        return Coding(
            COMPRESSION.JPEG,
            PHOTOMETRIC.YCBCR if layout.rgb else photometric,
            PREDICTOR.NONE,
            planes,
            subsampling=(2, 2) if layout.rgb else (1, 1),
            quality=options.quality or DEFAULT_QUALITY,
        )
    predictor = PREDICTOR.NONE if compression == COMPRESSION.NONE else _predictor(first.dtype)
    return Coding(compression, PHOTOMETRIC.RGB if layout.rgb else photometric, predictor, planes)


def coding_above(
    slide: Slide, level: LevelLayout, coding: Coding, options: Options
) -> Coding | None:
    """Return an encoding for averages of tiles copied with `coding`; None if they are not JPEG.

    Averages of JPEG tiles become JPEG, with the same subsampling and about the same quality:
    lossless averages can take more space than the tiles themselves.
    """
    if coding.compression != COMPRESSION.JPEG or (slide.layout.rgb and level.channels != 3):
        return None
    tables = next((each for each in level.encoding.jpeg_tables if each), b"")
    return replace(
        new_coding(slide.layout, replace(options, compression="jpeg")),
        subsampling=coding.subsampling if slide.layout.rgb else (1, 1),
        quality=_quality(tables) or _quality(_first_bytes(slide, level)) or DEFAULT_QUALITY,
    )


def check_ome(slide: Slide) -> None:
    """Check that OME-TIFF can hold the pixels of a slide.

    Raises
    ------
    ConversionError
        If OME does not define the sample type.
    """
    dtype = slide.layout.levels[0].dtype
    if dtype.name not in OME_TYPES:
        raise ConversionError(
            f"OME-TIFF does not support the pixel type {dtype} of '{slide.path}'; choose "
            "plain TIFF (a name ending in .tif) or OME-Zarr."
        )


def copied_coding(slide: Slide, level: LevelLayout, options: Options) -> Coding | None:
    """Return the encoding of a level's tiles; None unless a TIFF can hold them unchanged."""
    encoding, grid = level.encoding, level.grid
    compression = COPYABLE.get(encoding.compression)
    requested = options.compression and COMPRESSION_TAGS[options.compression]
    if compression is None or requested not in (None, compression):
        return None
    if compression == COMPRESSION.JPEG and options.quality is not None:
        return None
    plain = (
        compression in {COMPRESSION.JPEG, *JPEG_2000} or encoding.photometric != PHOTOMETRIC.YCBCR
    ) and (
        not (level.parts or level.computed or encoding.jpeg_header or encoding.jpeg_scale != 1)
        and encoding.fill_order == FILLORDER.MSB2LSB
        and not encoding.blue_first
        and encoding.table is None
        and not (encoding.predictor == PREDICTOR.HORIZONTAL and level.dtype.kind == "f")
        and grid.tile_height % TILE_UNIT == grid.tile_width % TILE_UNIT == 0
        and (level.missing == "background" or bool(grid.byte_counts.all()))
    )
    if not plain:
        return None
    big_endian = encoding.byte_order == ">" and level.dtype.itemsize > 1
    if compression in BYTE_CODECS and big_endian and encoding.predictor != PREDICTOR.FLOATINGPOINT:
        return None
    longer = int(grid.byte_counts.max(initial=0)) > level.tile_bytes // grid.planes
    if compression == COMPRESSION.NONE and longer and not options.private:
        return None  # the bytes after the samples may identify a patient
    if options.kind == "ome-tiff" and (grid.planes > 1) != (
        level.channels > 1 and not slide.layout.rgb
    ):
        return None
    if not _edge_tiles_are_full(slide, level):
        return None
    pages_of_channels = options.kind == "ome-tiff" and grid.planes > 1
    coding = Coding(
        compression,
        _photometric(encoding.photometric, 1 if pages_of_channels else level.channels),
        encoding.predictor if compression in BYTE_CODECS - {COMPRESSION.NONE} else PREDICTOR.NONE,
        grid.planes,
        copied=True,
        redacted=not options.private,
    )
    return _with_jpeg(slide, level, coding) if compression == COMPRESSION.JPEG else coding


def encoder(coding: Coding, dtype: DType) -> Encode:
    """Return a function that encodes a segment of shape (height, width, samples).

    The function takes samples in native byte order.
    """
    name = ENCODED_BY.get(coding.compression)
    load(frozenset(filter(None, (name, PREDICTED_BY.get(coding.predictor)))))
    if coding.compression == COMPRESSION.JPEG:
        return partial(_jpeg, coding)
    stored = dtype.newbyteorder("<")
    compress: Callable[[bytes], bytes] = bytes if name is None else getattr(imagecodecs, name)

    def encode(pixels: Array) -> bytes:
        if coding.predictor == PREDICTOR.HORIZONTAL:
            pixels = imagecodecs.delta_encode(pixels, axis=-2)
        elif coding.predictor == PREDICTOR.FLOATINGPOINT:
            # The floating-point predictor reorders bytes itself (Adobe TIFF Technical Note 3).
            return bytes(compress(imagecodecs.floatpred_encode(pixels, axis=-2).tobytes()))
        return bytes(compress(pixels.astype(stored, copy=False).tobytes()))

    return encode


def _jpeg(coding: Coding, pixels: Array) -> bytes:
    if pixels.shape[2] == 1:
        return bytes(imagecodecs.jpeg8_encode(pixels[..., 0], level=coding.quality))
    return bytes(
        imagecodecs.jpeg8_encode(
            pixels,
            level=coding.quality,
            colorspace="RGB",
            outcolorspace="YCBCR",
            subsampling=coding.subsampling,
        )
    )


def _photometric(stated: int, channels: int) -> int:
    """Return the PhotometricInterpretation of a page; gray if the stated one does not fit."""
    if stated not in tuple(PHOTOMETRIC) or stated in (PHOTOMETRIC.PALETTE, PHOTOMETRIC.CFA):
        return PHOTOMETRIC.MINISBLACK
    return stated if channels >= TIFF.PHOTOMETRIC_SAMPLES.get(stated, 1) else PHOTOMETRIC.MINISBLACK


def _predictor(dtype: DType) -> int:
    if dtype.kind == "f":
        return PREDICTOR.FLOATINGPOINT if dtype.itemsize in (4, 8) else PREDICTOR.NONE
    return PREDICTOR.HORIZONTAL if dtype.itemsize <= 4 else PREDICTOR.NONE


def _with_jpeg(slide: Slide, level: LevelLayout, coding: Coding) -> Coding | None:
    """Add the JPEG tags of a page; return None if a TIFF cannot describe the source's tiles."""
    tables = set(level.encoding.jpeg_tables)
    kinds = {
        (1, PHOTOMETRIC.MINISWHITE),
        (1, PHOTOMETRIC.MINISBLACK),
        (3, PHOTOMETRIC.RGB),
        (3, PHOTOMETRIC.YCBCR),
        (4, PHOTOMETRIC.SEPARATED),
    }
    kind = level.encoding.samples, coding.photometric
    planar = coding.planes > 1 and level.encoding.samples == 1
    if len(tables) > 1 or level.dtype != np.uint8 or not (planar or kind in kinds):
        return None
    subsampling: tuple[int, int] | None = (1, 1)
    if level.encoding.samples == 3:
        head = _first_bytes(slide, level)
        subsampling = _subsampling(head)
        if subsampling and level.encoding.jpeg_color != "stored" and jpeg_color(head) == "ycbcr":
            # DICOM and Olympus slides are described as RGB although the JPEGs hold YCbCr. TIFF
            # readers trust the tag instead of the markers inside the tiles.
            coding = replace(coding, photometric=PHOTOMETRIC.YCBCR)
    if subsampling not in SUBSAMPLINGS:
        return None
    unit = 8 * max(subsampling)
    if level.grid.tile_height % unit or level.grid.tile_width % unit:
        return None
    [shared] = tables
    if shared is not None and coding.redacted:
        shared = bytes(redact(memoryview(shared), COMPRESSION.JPEG))
    return replace(coding, jpeg_tables=shared, subsampling=subsampling)


def _first_bytes(slide: Slide, level: LevelLayout) -> bytes:
    """Return the start of a level's first stored tile, enough for all headers of a JPEG."""
    first = np.argmax(level.grid.byte_counts > 0)
    offset = int(level.grid.offsets.flat[first])
    count = min(int(level.grid.byte_counts.flat[first]), LONGEST_JPEG_HEADER)
    return bytes(slide.read_bytes([(offset, count)])[0])


def _quality(data: bytes) -> int | None:
    """Estimate the quality of a JPEG on libjpeg's scale; None without quantization tables.

    libjpeg scales the luminance table of ITU-T T.81, K.1 by a percentage that depends on the
    quality.
    """
    for marker, start, end in segments(data):
        table = data[start + 5 : end]  # after marker, length, precision and number: B.2.4.1
        if marker == QUANTIZATION and data[start + 4] >> 4 == 0 and len(table) >= 64:
            scale = 100 * sum(table[:64]) / LUMINANCE_SUM
            return max(1, min(100, round(5000 / scale if scale > 100 else 100 - scale / 2)))
    return None


def _subsampling(data: bytes) -> tuple[int, int] | None:
    """Return the chroma subsampling of a JPEG, (horizontal, vertical); None if it has none."""
    # Sampling factors: ITU-T T.81, B.2.2.
    for marker, start, end in segments(data):
        frame = data[start + 4 : end]
        if marker in FRAMES and len(frame) >= 15:
            luma, chroma = frame[7], frame[10]
            if min(chroma >> 4, chroma & 15) > 0:
                return (luma >> 4) // (chroma >> 4), (luma & 15) // (chroma & 15)
    return None


def _edge_tiles_are_full(slide: Slide, level: LevelLayout) -> bool:
    """Whether tiles at the lower and right edges are as large as the others.

    Some writers crop them, which a TIFF does not allow. A writer crops all of them or none, so
    only the last stored tile of the last row and of the last column is decoded.
    """
    stored = np.argwhere((level.grid.byte_counts > 0).all(axis=0))
    for axis in (0, 1):
        edge = stored[stored[:, axis] == stored[:, axis].max(initial=0)]
        if len(edge) and not _is_full(slide, level, *edge[-1].tolist()):
            return False
    return True


def _is_full(slide: Slide, level: LevelLayout, row: int, column: int) -> bool:
    """Whether a tile can be decoded and has the full size."""
    grid = level.grid
    [ranges] = grid.segments([row], [column])
    tile = EncodedTile(level, row, column, tuple(slide.read_bytes(ranges)), 0)
    try:
        pixels = decode_tile(tile, np.empty(level.tile_bytes, np.uint8))
    except (RuntimeError, ValueError):
        return False
    return pixels.shape[:2] == (grid.tile_height, grid.tile_width)
