"""Samples compressed as mere bytes, of which imagecodecs decodes as many as a tile has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import imagecodecs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Bytes = bytes | bytearray | memoryview


def unpack_none(data: Bytes, sizes: Sequence[int]) -> Bytes:
    """Return uncompressed bytes without what lies behind the tile's; see `codecs.table.Unpack`."""
    return memoryview(data)[: sizes[0]]


def _unpack_by(decode: Callable[..., bytes | bytearray]) -> Callable[[Bytes, Sequence[int]], Bytes]:
    return lambda data, sizes: decode(data, out=sizes[0])


unpack_deflate = _unpack_by(imagecodecs.deflate_decode)
unpack_lzma = _unpack_by(imagecodecs.lzma_decode)
unpack_packbits = _unpack_by(imagecodecs.packbits_decode)
unpack_zstd = _unpack_by(imagecodecs.zstd_decode)
