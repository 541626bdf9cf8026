"""How the tiles of a TIFF are encoded: as they are in the source, or anew."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np
from tifffile import TIFF

from napari_wsigpu.codecs.decoder import EncodedTile
from napari_wsigpu.codecs.jpeg import FRAMES, segments
from napari_wsigpu.codecs.libraries import load
from napari_wsigpu.codecs.tile import decode_tile
from napari_wsigpu.conversion.options import DEFAULT_QUALITY, TILE_UNIT
from napari_wsigpu.conversion.stripped import stripped
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

    from numpy.typing import NDArray

    from napari_wsigpu.conversion.options import Options
    from napari_wsigpu.model.layout import LevelLayout, SlideLayout
    from napari_wsigpu.slide.slide import Slide

    Encode = Callable[[NDArray[Any]], bytes]

BYTE_CODECS = {
    COMPRESSION.NONE,
    COMPRESSION.LZW,
    COMPRESSION.ADOBE_DEFLATE,
    COMPRESSION.PACKBITS,
    COMPRESSION.LZMA,
    COMPRESSION.ZSTD,
}
# What is copied, by the number that it gets: some have old numbers too.
COPIED: dict[int, COMPRESSION] = {
    **{code: code for code in (*BYTE_CODECS, COMPRESSION.JPEG, *JPEG_2000, COMPRESSION.JPEGXL)},
    **{code: codes[0] for codes in (DEFLATE, WEBP, ZSTD) for code in codes},
}
NAMED = {
    "raw": COMPRESSION.NONE,
    "jpeg": COMPRESSION.JPEG,
    "deflate": COMPRESSION.ADOBE_DEFLATE,
    "zstd": COMPRESSION.ZSTD,
}
# Functions of imagecodecs, by the tags' values.
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


@dataclass(frozen=True, slots=True)
class Coding:
    """How a TIFF page stores its tiles.

    Attributes
    ----------
    compression, photometric, predictor : int
        Values of the tags of those names.
    planes : int
        How many segments a tile has: one for each channel, or one.
    copied : bool
        Whether the tiles are the source's.
    stripped : bool
        Whether these lose the text that they carry.
    jpeg_tables : bytes or None
        What all JPEG tiles share.
    subsampling : tuple of int
        Of the chroma of JPEG tiles, (across, down).
    quality : int
        Of JPEG tiles that are encoded anew.
    """

    compression: int
    photometric: int
    predictor: int
    planes: int
    copied: bool = False
    stripped: bool = False
    jpeg_tables: bytes | None = None
    subsampling: tuple[int, int] = (1, 1)
    quality: int = DEFAULT_QUALITY


def new_coding(layout: SlideLayout, options: Options) -> Coding:
    """Return how tiles are encoded anew: without loss, unless JPEG is asked for.

    Raises
    ------
    ConversionError
        If JPEG can't hold the samples.
    """
    first = layout.levels[0]
    compression = NAMED[options.compression or "deflate"]
    planes = 1 if layout.rgb else first.channels
    inverted = first.encoding.white_is_zero and first.channels == 1
    photometric = PHOTOMETRIC.MINISWHITE if inverted else PHOTOMETRIC.MINISBLACK
    if compression == COMPRESSION.JPEG:
        if first.dtype != np.uint8 or (layout.rgb and first.channels != 3):
            raise ConversionError(
                f"JPEG can't hold the {first.channels} x {first.dtype} samples of "
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


def check_ome(slide: Slide) -> None:
    """Refuse a slide whose pixels OME-TIFF can't hold.

    Raises
    ------
    ConversionError
        If OME has no such type.
    """
    dtype = slide.layout.levels[0].dtype
    if dtype.name not in OME_TYPES:
        raise ConversionError(
            f"OME-TIFF has no pixels of type {dtype}, as '{slide.path}' has; choose plain TIFF, by "
            "a name in '.tif', or OME-Zarr."
        )


def copied_coding(slide: Slide, level: LevelLayout, options: Options) -> Coding | None:
    """Return how a level's tiles are encoded if a TIFF can hold them as they are, else None."""
    encoding, grid = level.encoding, level.grid
    compression = COPIED.get(encoding.compression)
    wanted = options.compression and NAMED[options.compression]
    if compression is None or wanted not in (None, compression):
        return None
    if compression == COMPRESSION.JPEG and options.quality is not None:
        return None
    usual = (
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
    if not usual:
        return None
    turned = encoding.byte_order == ">" and level.dtype.itemsize > 1
    if compression in BYTE_CODECS and turned and encoding.predictor != PREDICTOR.FLOATINGPOINT:
        return None
    longer = int(grid.byte_counts.max(initial=0)) > level.tile_bytes // grid.planes
    if compression == COMPRESSION.NONE and longer and not options.private:
        return None  # who knows what lies behind the samples
    if options.kind == "ome-tiff" and (grid.planes > 1) != (
        level.channels > 1 and not slide.layout.rgb
    ):
        return None
    if not _edges_are_whole(slide, level):
        return None
    pages_of_channels = options.kind == "ome-tiff" and grid.planes > 1
    coding = Coding(
        compression,
        _photometric(encoding.photometric, 1 if pages_of_channels else level.channels),
        encoding.predictor if compression in BYTE_CODECS - {COMPRESSION.NONE} else PREDICTOR.NONE,
        grid.planes,
        copied=True,
        stripped=not options.private,
    )
    return _with_jpeg(slide, level, coding) if compression == COMPRESSION.JPEG else coding


def encoder(coding: Coding, dtype: np.dtype[Any]) -> Encode:
    """Return what encodes a segment, shape (height, width, samples) in native byte order."""
    name = ENCODED_BY.get(coding.compression)
    load(frozenset(filter(None, (name, PREDICTED_BY.get(coding.predictor)))))
    if coding.compression == COMPRESSION.JPEG:
        return partial(_jpeg, coding)
    stored = dtype.newbyteorder("<")
    compress: Callable[[bytes], Any] = bytes if name is None else getattr(imagecodecs, name)

    def encode(pixels: NDArray[Any]) -> bytes:
        if coding.predictor == PREDICTOR.HORIZONTAL:
            pixels = imagecodecs.delta_encode(pixels, axis=-2)
        elif coding.predictor == PREDICTOR.FLOATINGPOINT:
            # It orders bytes itself.
            return bytes(compress(imagecodecs.floatpred_encode(pixels, axis=-2).tobytes()))
        return bytes(compress(pixels.astype(stored, copy=False).tobytes()))

    return encode


def _jpeg(coding: Coding, pixels: NDArray[Any]) -> bytes:
    colors: dict[str, Any] = {"colorspace": "RGB", "outcolorspace": "YCBCR", "subsampling": "420"}
    if pixels.shape[2] == 1:
        pixels, colors = pixels[..., 0], {}
    return bytes(imagecodecs.jpeg8_encode(pixels, level=coding.quality, **colors))


def _photometric(stated: int, channels: int) -> int:
    """Return what is to be said of the colours of a page's tiles, as they are shown."""
    if stated not in tuple(PHOTOMETRIC) or stated in (PHOTOMETRIC.PALETTE, PHOTOMETRIC.CFA):
        return PHOTOMETRIC.MINISBLACK
    return stated if channels >= TIFF.PHOTOMETRIC_SAMPLES.get(stated, 1) else PHOTOMETRIC.MINISBLACK


def _predictor(dtype: np.dtype[Any]) -> int:
    if dtype.kind == "f":
        return PREDICTOR.FLOATINGPOINT if dtype.itemsize in (4, 8) else PREDICTOR.NONE
    return PREDICTOR.HORIZONTAL if dtype.itemsize <= 4 else PREDICTOR.NONE


def _with_jpeg(slide: Slide, level: LevelLayout, coding: Coding) -> Coding | None:
    """Add what a TIFF says of JPEG tiles, if it can say it."""
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
        first = np.argmax(level.grid.byte_counts > 0)
        offset = int(level.grid.offsets.flat[first])
        count = min(int(level.grid.byte_counts.flat[first]), LONGEST_JPEG_HEADER)
        head = bytes(slide.read_bytes([(offset, count)])[0])
        subsampling = _subsampling(head)
        if subsampling and level.encoding.jpeg_color != "stored" and jpeg_color(head) == "ycbcr":
            # DICOM's and Olympus' slides show RGB: TIFF's readers do not look into the JPEGs.
            coding = replace(coding, photometric=PHOTOMETRIC.YCBCR)
    if subsampling not in SUBSAMPLINGS:
        return None
    unit = 8 * max(subsampling)
    if level.grid.tile_height % unit or level.grid.tile_width % unit:
        return None
    [shared] = tables
    if shared is not None and coding.stripped:
        shared = bytes(stripped(memoryview(shared), COMPRESSION.JPEG))
    return replace(coding, jpeg_tables=shared, subsampling=subsampling)


def _subsampling(data: bytes) -> tuple[int, int] | None:
    """Return how many pixels share a chroma sample in a JPEG, (across, down)."""
    for marker, start, end in segments(data):
        frame = data[start + 4 : end]
        if marker in FRAMES and len(frame) >= 15:
            luma, chroma = frame[7], frame[10]
            if min(chroma >> 4, chroma & 15) > 0:
                return (luma >> 4) // (chroma >> 4), (luma & 15) // (chroma & 15)
    return None


def _edges_are_whole(slide: Slide, level: LevelLayout) -> bool:
    """Whether tiles at the lower and right edge are as large as others.

    Some writers cut them; other readers than ours would not read these in a TIFF. It is asked of
    the last tile of the last row and column that are stored, as a writer cuts all or none.
    """
    stored = np.argwhere((level.grid.byte_counts > 0).all(axis=0))
    for axis in (0, 1):
        edge = stored[stored[:, axis] == stored[:, axis].max(initial=0)]
        if len(edge) and not _is_whole(slide, level, *edge[-1].tolist()):
            return False
    return True


def _is_whole(slide: Slide, level: LevelLayout, row: int, column: int) -> bool:
    """Whether a tile can be decoded, and has the full size."""
    grid = level.grid
    [ranges] = grid.segments([row], [column])
    tile = EncodedTile(level, row, column, tuple(slide.read_bytes(ranges)), 0)
    try:
        pixels = decode_tile(tile, np.empty(level.tile_bytes, np.uint8))
    except (RuntimeError, ValueError):
        return False
    return pixels.shape[:2] == (grid.tile_height, grid.tile_width)
