"""LERC tiles, which may be compressed once more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import imagecodecs

from napari_wsigpu.codecs.images import decode_of_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import Encoding

# By the second of the tag's LERC parameters, names of decoders, each of which is a library.
WRAPPINGS = {1: "deflate_decode", 2: "zstd_decode"}
BEGINNINGS = b"Lerc2 ", b"CntZImage "


def decode_lerc(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    """Decode LERC; see `codecs.table.Decode`."""
    if encoding.lerc_wrapping:
        unwrap = getattr(imagecodecs, WRAPPINGS[encoding.lerc_wrapping])
        data = unwrap(data, out=2 * out.nbytes + 4096)
    if not bytes(data[:10]).startswith(BEGINNINGS):
        # imagecodecs would take it for compressed once more, and inflate it to whatever it holds.
        raise ValueError("it is no LERC")
    decode_of_type(imagecodecs.lerc_decode, data, out)
