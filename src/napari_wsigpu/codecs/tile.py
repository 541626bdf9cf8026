"""How a tile is decoded on the CPU, and which ones can't be."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np

from napari_wsigpu.codecs.images import LERC_WRAPPINGS, decode_lerc
from napari_wsigpu.codecs.jpeg_tiles import decode_intervals
from napari_wsigpu.codecs.libraries import PILLOW, load
from napari_wsigpu.codecs.table import BY_CODE, ByteCompression, compression_name
from napari_wsigpu.model.tags import FILLORDER, PHOTOMETRIC, PREDICTOR
from napari_wsigpu.storage.source import Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.decoder import EncodedBatch, EncodedTile
    from napari_wsigpu.codecs.table import Unpack
    from napari_wsigpu.model.layout import Encoding, LevelLayout

# Of each predictor that can be undone, the function that does.
PREDICTORS: dict[int, str | None] = {
    PREDICTOR.NONE: None,
    PREDICTOR.HORIZONTAL: "delta_decode",
    PREDICTOR.FLOATINGPOINT: "floatpred_decode",
}
# What takes many times the memory of its pixels on the way is made of some at a time.
PIXELS_AT_ONCE = 1 << 17


def refusal(encoding: Encoding) -> str | None:
    """Say why tiles of an encoding can't be decoded; None if they can."""
    if encoding.lerc_wrapping and encoding.lerc_wrapping not in LERC_WRAPPINGS:
        return f"the compression around its LERC, {encoding.lerc_wrapping}, is not supported"
    found = BY_CODE.get(encoding.compression)
    if found is None:
        return f"its compression, {compression_name(encoding.compression)}, is not supported"
    if isinstance(found, ByteCompression):
        if encoding.predictor not in PREDICTORS:
            return f"its predictor, {encoding.predictor}, is not supported"
        if encoding.predictor == PREDICTOR.FLOATINGPOINT and not encoding.dtype.startswith("float"):
            return f"its predictor is for floating-point numbers, not for {encoding.dtype}"
    plain = isinstance(found, ByteCompression) or found.decode is decode_lerc
    if plain and encoding.photometric == PHOTOMETRIC.YCBCR:
        return f"its colours, YCbCr stored by {found.name}, are not supported"
    return None


def load_for(encoding: Encoding) -> None:
    """Load the libraries that decode tiles of an encoding; see `codecs.libraries`."""
    load(
        _functions(
            encoding.compression,
            encoding.predictor,
            encoding.fill_order,
            encoding.lerc_wrapping,
            encoding.jpeg_scale,
        )
    )


@cache
def _functions(
    compression: int, predictor: int, fill_order: int, lerc_wrapping: int, jpeg_scale: int
) -> frozenset[str]:
    """Name the functions of imagecodecs that decode tiles, and Pillow if that does."""
    found = (
        BY_CODE[compression].function,
        PREDICTORS.get(predictor),
        "bitorder_decode" if fill_order == FILLORDER.LSB2MSB else None,
        LERC_WRAPPINGS.get(lerc_wrapping),
        PILLOW if jpeg_scale > 1 else None,
    )
    return frozenset(filter(None, found))


def decode_tile(tile: EncodedTile, memory: NDArray[np.uint8]) -> NDArray[Any]:
    """Decode one tile.

    Parameters
    ----------
    tile : EncodedTile
        Its encoded bytes.
    memory : ndarray of uint8
        As many bytes as the full tile has, to decode into.

    Returns
    -------
    ndarray, shape (height, width, channels)
        In native byte order, in `memory`. Tiles at the lower and right edge may be cut to
        their level.

    Raises
    ------
    RuntimeError, ValueError
        If the bytes are damaged; the codec says how.
    SlideError
        If the source they are read from right into memory can't be read.
    """
    level = tile.level
    if tile.fill is not None:
        views = list(_possible_views(level, tile.row, tile.column, memory))
        return _view_of(tile.fill(memory.data), views)
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


def whole_tiles(
    batch: EncodedBatch,
) -> tuple[Callable[[Any, NDArray[Any]], Any], Callable[[int], Any]] | None:
    """Return what reads and decodes those tiles of a batch that are one sound picture of full size.

    It does nothing else, to take as little of the interpreter's time as can be. What it refuses,
    and other tiles, are for `decode_tile`.

    Returns
    -------
    callable
        Takes the bytes of a tile, and an array to decode into.
    callable
        Gives the bytes of a tile by its number, None if it may not be decoded so. It may raise
        `SlideError` if they can't be read.
    """
    level = batch.level
    encoding = level.encoding
    compression = BY_CODE[encoding.compression]
    if not batch.single or encoding.jpeg_header is not None or encoding.table is not None:
        return None
    if isinstance(compression, ByteCompression):
        return None
    decode = compression.decode
    return (lambda data, out: decode(data, encoding, 0, out)), batch.fetcher()


def _decode_intervals(header: bytes, tile: EncodedTile, memory: NDArray[np.uint8]) -> NDArray[Any]:
    """Decode a tile that is made up of restart intervals of a large JPEG."""
    grid, encoding = tile.level.grid, tile.level.encoding
    intervals = [interval for interval in tile.segments if interval is not None]
    if None in tile.segments[: len(intervals)]:
        raise ValueError("a part of it is missing")
    height = len(intervals) * grid.tile_height // grid.planes
    shape = height, grid.tile_width, encoding.samples
    pixels = memory.view(tile.level.dtype)[: math.prod(shape)].reshape(shape)
    decode_intervals(header, intervals, encoding, pixels)
    return pixels


def _decode_by_table(
    table: bytes, data: memoryview, tile: EncodedTile, memory: NDArray[np.uint8]
) -> NDArray[Any]:
    """Decode numbers, and look up what each is shown as."""
    level = tile.level
    shades = np.frombuffer(table, np.uint8).reshape(-1, level.channels)
    stored = np.empty(memory.size // level.channels, np.uint8)
    numbers = _decode_segment(data, tile, 0, stored)[..., 0]
    height, width = numbers.shape
    pixels = memory[: numbers.size * level.channels].reshape(height, width, level.channels)
    for rows in _some_rows(height, width):
        np.take(shades, numbers[rows], axis=0, out=pixels[rows], mode="clip")
    return pixels


def _decode_segment(
    data: memoryview, tile: EncodedTile, plane: int, memory: NDArray[np.uint8]
) -> NDArray[Any]:
    """Decode one plane's bytes to the one of the possible shapes that they have."""
    if isinstance(data.obj, Unreadable):
        raise ValueError(data.obj.reason)
    encoding = tile.level.encoding
    views = _possible_views(tile.level, tile.row, tile.column, memory)
    compression = BY_CODE[encoding.compression]
    if isinstance(compression, ByteCompression):
        return _decode_bytes(compression.unpack, data, encoding, list(views))
    # A codec checks its own header against `pixels` before it allocates anything, so a tile
    # that claims to be huge costs nothing.
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
        del first_error  # an error that its own traceback leads to would keep a batch's pixels


def _possible_views(
    level: LevelLayout, row: int, column: int, memory: NDArray[np.uint8]
) -> Iterator[NDArray[Any]]:
    """Yield memory in the shapes that a tile's pixels may have, full size first.

    Some writers cut the tiles at the right and lower edge to the level's extent.
    """
    grid, samples, dtype = level.grid, level.encoding.samples, level.dtype
    if grid.sizes is not None:
        sizes = [tuple(grid.sizes[:, row, column].tolist())]
    else:
        height = min(grid.tile_height, level.height - row * grid.tile_height)
        width = min(grid.tile_width, level.width - column * grid.tile_width)
        sizes = [(grid.tile_height, grid.tile_width), (height, grid.tile_width), (height, width)]
    for high, wide in dict.fromkeys(sizes):
        size = high * wide * samples * dtype.itemsize
        yield memory[:size].view(dtype).reshape(high, wide, samples)


def _decode_bytes(
    unpack: Unpack, data: Any, encoding: Encoding, views: Sequence[NDArray[Any]]
) -> NDArray[Any]:
    if encoding.fill_order == FILLORDER.LSB2MSB:
        data = imagecodecs.bitorder_decode(bytes(data))
    if encoding.bits < 8:
        return _decode_bits(unpack, data, encoding.bits, views)
    raw = memoryview(unpack(data, [view.nbytes for view in views]))
    pixels = _view_of(len(raw), views)
    raw = raw[: pixels.nbytes]
    if encoding.predictor == PREDICTOR.FLOATINGPOINT:
        # This predictor works on the stored order of bytes and restores the native one.
        values = np.frombuffer(raw, pixels.dtype).reshape(pixels.shape)
        imagecodecs.floatpred_decode(values, axis=-2, out=pixels)
        return pixels
    stored = pixels.dtype.newbyteorder(encoding.byte_order)
    values = np.frombuffer(raw, stored).reshape(pixels.shape)
    pixels[...] = values[..., ::-1] if encoding.blue_first else values
    if encoding.predictor == PREDICTOR.HORIZONTAL:
        imagecodecs.delta_decode(pixels, axis=-2, out=pixels)
    return pixels


def _decode_bits(
    unpack: Unpack, data: Any, bits: int, views: Sequence[NDArray[Any]]
) -> NDArray[Any]:
    """Decode samples of which several share a byte; each row begins with a byte of its own."""
    rows = [-(-view.shape[1] * bits // 8) for view in views]
    raw = unpack(data, [len(view) * row for view, row in zip(views, rows, strict=True)])
    for pixels, row in zip(views, rows, strict=True):
        if len(pixels) * row == len(raw):
            packed = np.frombuffer(raw, np.uint8).reshape(-1, row)
            weights = 1 << np.arange(bits - 1, -1, -1, dtype=np.uint8)
            for some in _some_rows(len(pixels), 8 * row):
                parts = np.unpackbits(packed[some], axis=1)
                parts = parts.reshape(len(parts), -1, bits)[:, : pixels.shape[1]]
                pixels[some, :, 0] = parts @ weights
            return pixels
    raise ValueError(f"it holds {len(raw)} bytes of {len(views[0]) * rows[0]}")


def _some_rows(height: int, width: int) -> Iterator[slice]:
    """Yield the rows of a picture, some at a time."""
    step = max(1, PIXELS_AT_ONCE // max(1, width))
    yield from (slice(first, first + step) for first in range(0, height, step))


def _view_of(size: int, views: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the one of possible views that so many bytes are of.

    There may be more rows than their level has, and a part of one.
    """
    for pixels in views:
        if pixels.nbytes == size or (pixels.nbytes < size and pixels.shape[1] == views[0].shape[1]):
            return pixels
    raise ValueError(f"it holds {size} bytes of {views[0].nbytes}")
