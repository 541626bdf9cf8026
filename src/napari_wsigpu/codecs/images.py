"""Tiles of WebP, JPEG XL and JPEG XR, for which imagecodecs does all; see `codecs.table.Decode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import imagecodecs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.layout import Encoding


def decode_webp(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    """Decode WebP."""
    imagecodecs.webp_decode(data, hasalpha=out.shape[2] == 4, out=out)


def decode_jpegxl(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    """Decode JPEG XL."""
    imagecodecs.jpegxl_decode(data, out=out)


def decode_jpegxr(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    """Decode JPEG XR."""
    imagecodecs.jpegxr_decode(data, out=out)
