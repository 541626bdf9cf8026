"""Samples compressed as mere bytes, of which imagecodecs decodes as many as a tile has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import imagecodecs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Bytes = bytes | bytearray | memoryview


MOST_BEHIND = 64 << 10


def unpack_none(data: Bytes, sizes: Sequence[int]) -> Bytes:
    """Return uncompressed bytes without what lies behind the tile's; see `codecs.table.Unpack`."""
    return memoryview(data)[: sizes[0]]


def _unpack_by(name: str) -> Callable[[Bytes, Sequence[int]], Bytes]:
    def unpack(data: Bytes, sizes: Sequence[int]) -> Bytes:
        decode: Callable[..., bytes] = getattr(imagecodecs, name)  # loads a library
        try:
            return decode(data, out=sizes[0])
        except RuntimeError:
            # Most codecs refuse what does not fit; there may be some bytes that are no pixels.
            return memoryview(decode(data, out=sizes[0] + MOST_BEHIND))[: sizes[0]]

    return unpack


unpack_deflate = _unpack_by("deflate_decode")
unpack_lzma = _unpack_by("lzma_decode")
unpack_packbits = _unpack_by("packbits_decode")
unpack_zstd = _unpack_by("zstd_decode")


def unpack_czi_zstd(data: Bytes, sizes: Sequence[int]) -> Bytes:
    """Decode what Zeiss calls zstd1: a header, which says whether bytes of samples lie apart."""
    view = memoryview(data)
    length = view[0] if len(view) else 0
    # The header's length, and the number of what precedes a flag.
    if length not in (1, 3) or (length == 3 and view[1] != 1):
        raise ValueError("its header is of a kind that is not known")
    found = imagecodecs.zstd_decode(bytes(view[length:]), out=sizes[0])
    if length == 1 or not view[2] & 1:
        return found
    halves = np.frombuffer(found, np.uint8)
    if halves.size % 2:
        raise ValueError("it holds half a sample")
    return np.ascontiguousarray(halves.reshape(2, -1).T).data.cast("B")
