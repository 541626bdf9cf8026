"""Decoding of single tiles on the CPU, and a check of whether their encoding is supported."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import imagecodecs
import numpy as np

from napari_wsigpu.codecs.compressions import BY_CODE, ByteCompression, compression_name
from napari_wsigpu.codecs.image_codecs import LERC_WRAPPINGS, decode_lerc
from napari_wsigpu.codecs.jpeg_tiles import decode_intervals
from napari_wsigpu.codecs.libraries import PILLOW, load
from napari_wsigpu.model.tags import FILLORDER, PHOTOMETRIC, PREDICTOR
from napari_wsigpu.storage.source import Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from napari_wsigpu.codecs.byte_codecs import Data
    from napari_wsigpu.codecs.compressions import Unpack
    from napari_wsigpu.codecs.decoder import EncodedBatch, EncodedTile
    from napari_wsigpu.model.arrays import Array, ByteArray
    from napari_wsigpu.model.layout import Encoding, LevelLayout

# Function of imagecodecs that undoes each supported predictor (TIFF 6.0, section 14).
PREDICTORS: dict[int, str | None] = {
    PREDICTOR.NONE: None,
    PREDICTOR.HORIZONTAL: "delta_decode",
    PREDICTOR.FLOATINGPOINT: "floatpred_decode",
}
# Conversions whose intermediate arrays are much larger than the pixels process this many at a time.
PIXELS_AT_ONCE = 1 << 17


def refusal(encoding: Encoding) -> str | None:
    """Return why tiles with an encoding can't be decoded; None if they can."""
    if encoding.lerc_wrapping and encoding.lerc_wrapping not in LERC_WRAPPINGS:
        return f"the compression of its LERC data, {encoding.lerc_wrapping}, is not supported"
    found = BY_CODE.get(encoding.compression)
    if found is None:
        return f"its compression, {compression_name(encoding.compression)}, is not supported"
    if isinstance(found, ByteCompression):
        if encoding.predictor not in PREDICTORS:
            return f"its predictor, {encoding.predictor}, is not supported"
        if encoding.predictor == PREDICTOR.FLOATINGPOINT and not encoding.dtype.startswith("float"):
            return f"its predictor is for floating-point samples, not for {encoding.dtype}"
    plain = isinstance(found, ByteCompression) or found.decode is decode_lerc
    if plain and encoding.photometric == PHOTOMETRIC.YCBCR:
        if found.name == "none":
            return "uncompressed YCbCr colors are not supported"
        return f"YCbCr colors with {found.name} compression are not supported"
    return None


def load_for(encoding: Encoding) -> None:
    """Load the libraries that decode tiles with an encoding; see `codecs.libraries`."""
    functions = (
        BY_CODE[encoding.compression].function,
        PREDICTORS.get(encoding.predictor),
        "bitorder_decode" if encoding.fill_order == FILLORDER.LSB2MSB else None,
        LERC_WRAPPINGS.get(encoding.lerc_wrapping),
        PILLOW if encoding.jpeg_scale > 1 else None,
    )
    load(list(filter(None, functions)))


def decode_tile(tile: EncodedTile, memory: ByteArray) -> Array:
    """Decode one tile.

    Parameters
    ----------
    tile : EncodedTile
        The encoded tile.
    memory : ndarray of uint8
        Memory to decode into, as large as a full tile.

    Returns
    -------
    ndarray, shape (height, width, channels)
        View of `memory`, in native byte order. Tiles at the bottom and right edges may be cropped
        to their level.

    Raises
    ------
    RuntimeError, ValueError
        If the data is damaged; the message is the codec's.
    SlideError
        If the tile has a `fill` function, and its source can't be read.
    """
    level = tile.level
    if tile.fill is not None:
        views = list(_tile_views(level, tile.row, tile.column, memory))
        return _view_of(tile.fill(memory.data), views)
    if level.encoding.kept_sample is not None:
        return _decode_one_sample(level.encoding.kept_sample, tile, memory)
    if level.encoding.jpeg_header is not None:
        return _decode_intervals(level.encoding.jpeg_header, tile, memory)
    if level.encoding.table is not None and tile.segments[0] is not None:
        return _decode_by_table(level.encoding.table, tile.segments[0], tile, memory)
    if len(tile.segments) == 1 and tile.segments[0] is not None:
        return _decode_segment(tile.segments[0], tile, 0, memory)
    samples = level.encoding.samples
    grid = level.grid
    pixels = memory.view(level.dtype).reshape(grid.tile_height, grid.tile_width, level.channels)
    pixels[...] = tile.background
    plane_memory = np.empty(memory.size // len(tile.segments), np.uint8)
    height, width = 1, 1
    for plane, segment in enumerate(tile.segments):
        if segment is not None:
            part = _decode_segment(segment, tile, plane, plane_memory)
            height, width = max(height, part.shape[0]), max(width, part.shape[1])
            target = pixels[: part.shape[0], : part.shape[1]]
            target[..., plane * samples : (plane + 1) * samples] = part
    return pixels[:height, :width]


def whole_tile_decoder(
    batch: EncodedBatch,
) -> tuple[Callable[[Data, Array], None], Callable[[int], Data | None]] | None:
    """Return functions that decode and read the tiles of a batch if each is one full-size image.

    Both hold the GIL as little as possible. Use `decode_tile` if this returns None, and for tiles
    that are missing or that the first function can't decode.

    Returns
    -------
    callable
        Decodes the bytes of a tile into an array.
    callable
        Returns the bytes of a tile by its index; None if the tile is missing. It may raise
        `SlideError`.
    """
    level = batch.level
    encoding = level.encoding
    compression = BY_CODE[encoding.compression]
    if not batch.single or encoding.jpeg_header is not None or encoding.table is not None:
        return None
    if isinstance(compression, ByteCompression) or encoding.kept_sample is not None:
        return None
    decode = compression.decode
    return (lambda data, out: decode(data, encoding, 0, out)), batch.segment_reader()


def _decode_intervals(header: bytes, tile: EncodedTile, memory: ByteArray) -> Array:
    """Decode a tile that consists of restart intervals of a large JPEG."""
    grid, encoding = tile.level.grid, tile.level.encoding
    intervals = [interval for interval in tile.segments if interval is not None]
    if None in tile.segments[: len(intervals)]:
        raise ValueError("one of its restart intervals is missing")
    height = len(intervals) * grid.tile_height // grid.planes
    shape = height, grid.tile_width, encoding.samples
    pixels = memory.view(tile.level.dtype)[: math.prod(shape)].reshape(shape)
    decode_intervals(header, intervals, encoding, pixels)
    return pixels


def _decode_one_sample(sample: int, tile: EncodedTile, memory: ByteArray) -> Array:
    """Decode all samples of a tile, and keep one."""
    level, samples = tile.level, tile.level.encoding.samples
    whole = replace(level, channels=samples, encoding=replace(level.encoding, kept_sample=None))
    decoded = decode_tile(tile._replace(level=whole), np.empty(samples * memory.size, np.uint8))
    kept = decoded[..., sample : sample + 1]
    pixels = memory[: kept.nbytes].view(level.dtype).reshape(kept.shape)
    pixels[...] = kept
    return pixels


def _decode_by_table(table: bytes, data: memoryview, tile: EncodedTile, memory: ByteArray) -> Array:
    """Decode palette indices, and look up their colors."""
    level = tile.level
    colors = np.frombuffer(table, np.uint8).reshape(-1, level.channels)
    stored = np.empty(memory.size // level.channels, np.uint8)
    indices = _decode_segment(data, tile, 0, stored)[..., 0]
    height, width = indices.shape
    pixels = memory[: indices.size * level.channels].reshape(height, width, level.channels)
    for rows in _bands(height, width):
        np.take(colors, indices[rows], axis=0, out=pixels[rows], mode="clip")
    return pixels


def _decode_segment(data: memoryview, tile: EncodedTile, plane: int, memory: ByteArray) -> Array:
    """Decode the segment of one plane, trying all shapes that the tile may have."""
    if isinstance(data.obj, Unreadable):
        raise ValueError(data.obj.reason)
    encoding = tile.level.encoding
    views = _tile_views(tile.level, tile.row, tile.column, memory)
    compression = BY_CODE[encoding.compression]
    if isinstance(compression, ByteCompression):
        return _decode_bytes(compression, data, encoding, list(views))
    # Each codec compares the size in the header with `pixels` before it allocates anything, so a
    # tile that claims to be huge costs nothing.
    first_error: Exception | None = None
    for pixels in views:
        try:
            compression.decode(data, encoding, plane, pixels)
        except (RuntimeError, ValueError) as error:
            first_error = first_error or error
        else:
            return pixels
    assert first_error is not None
    try:
        raise first_error
    finally:
        del first_error  # its traceback refers to this frame: the cycle would keep the pixels alive


def _tile_views(level: LevelLayout, row: int, column: int, memory: ByteArray) -> Iterator[Array]:
    """Yield views of memory in the shapes that a tile may have, the full size first.

    Some writers crop the tiles at the right and bottom edges to the level.
    """
    grid, samples, dtype = level.grid, level.encoding.samples, level.dtype
    if grid.sizes is not None:
        sizes = [tuple(grid.sizes[:, row, column].tolist())]
    else:
        height, width = level.tile_rect(row, column)[2:]
        sizes = [(grid.tile_height, grid.tile_width), (height, grid.tile_width), (height, width)]
    for high, wide in dict.fromkeys(sizes):
        size = high * wide * samples * dtype.itemsize
        yield memory[:size].view(dtype).reshape(high, wide, samples)


def _decode_bytes(
    compression: ByteCompression, data: Data, encoding: Encoding, views: Sequence[Array]
) -> Array:
    if encoding.fill_order == FILLORDER.LSB2MSB:
        data = imagecodecs.bitorder_decode(bytes(data))
    if encoding.bits < 8:
        return _decode_bits(compression.unpack, data, encoding.bits, views)
    floats = encoding.predictor == PREDICTOR.FLOATINGPOINT
    raw = _unpacked(compression, data, views, in_place=not floats)
    pixels = _view_of(len(raw), views)
    raw = raw[: pixels.nbytes]
    if floats:
        # This predictor reads the stored byte order and writes the native one.
        values = np.frombuffer(raw, pixels.dtype).reshape(pixels.shape)
        imagecodecs.floatpred_decode(values, axis=-2, out=pixels)
        return pixels
    stored = pixels.dtype.newbyteorder(encoding.byte_order)
    values = np.frombuffer(raw, stored).reshape(pixels.shape)
    if encoding.blue_first or not stored.isnative or values.ctypes.data != pixels.ctypes.data:
        pixels[...] = values[..., ::-1] if encoding.blue_first else values
    if encoding.predictor == PREDICTOR.HORIZONTAL:
        imagecodecs.delta_decode(pixels, axis=-2, out=pixels)
    return pixels


def _unpacked(
    compression: ByteCompression, data: Data, views: Sequence[Array], *, in_place: bool
) -> memoryview:
    """Decompress a tile, in place if possible: into the memory of the views, the largest first."""
    if in_place and compression.in_place and compression.function is not None:
        decode: Callable[..., Data] = getattr(imagecodecs, compression.function)
        with suppress(RuntimeError):  # the result is longer than the pixels, or damaged
            return memoryview(decode(data, out=views[0].reshape(-1).view(np.uint8)))
    return memoryview(compression.unpack(data, [view.nbytes for view in views]))


def _decode_bits(unpack: Unpack, data: Data, bits: int, views: Sequence[Array]) -> Array:
    """Decode samples of fewer than 8 bits; each row starts at a byte boundary."""
    rows = [-(-view.shape[1] * bits // 8) for view in views]
    raw = unpack(data, [len(view) * row for view, row in zip(views, rows, strict=True)])
    for pixels, row in zip(views, rows, strict=True):
        if len(pixels) * row == len(raw):
            packed = np.frombuffer(raw, np.uint8).reshape(-1, row)
            weights = 1 << np.arange(bits - 1, -1, -1, dtype=np.uint8)
            for band in _bands(len(pixels), 8 * row):
                unpacked = np.unpackbits(packed[band], axis=1)
                unpacked = unpacked.reshape(len(unpacked), -1, bits)[:, : pixels.shape[1]]
                pixels[band, :, 0] = unpacked @ weights
            return pixels
    raise ValueError(f"it decodes to {len(raw)} instead of {len(views[0]) * rows[0]} bytes")


def _bands(height: int, width: int) -> Iterator[slice]:
    """Yield slices of rows with about `PIXELS_AT_ONCE` pixels each."""
    step = max(1, PIXELS_AT_ONCE // max(1, width))
    yield from (slice(first, first + step) for first in range(0, height, step))


def _view_of(size: int, views: Sequence[Array]) -> Array:
    """Return the view that matches a number of bytes.

    There may be more rows of bytes than the view has, and the last one may be incomplete.
    """
    for pixels in views:
        if pixels.nbytes == size or (pixels.nbytes < size and pixels.shape[1] == views[0].shape[1]):
            return pixels
    raise ValueError(f"it decodes to {size} instead of {views[0].nbytes} bytes")
