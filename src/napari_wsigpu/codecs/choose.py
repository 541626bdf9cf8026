"""Which decoder decodes a slide, and why."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from napari_wsigpu.codecs.cpu import CpuDecoder
from napari_wsigpu.errors import DeviceError, UnsupportedSlideError

if TYPE_CHECKING:
    from napari_wsigpu.codecs.decoder import TileDecoder
    from napari_wsigpu.formats.layout import SlideLayout


def choose_decoder(layout: SlideLayout, device: str) -> TileDecoder:
    """Return a decoder for all levels of a slide.

    Parameters
    ----------
    layout : SlideLayout
        The slide.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.

    Raises
    ------
    DeviceError
        If the device is unknown or can't decode.
    UnsupportedSlideError
        If no decoder can read the slide's tiles.
    """
    if device not in ("auto", "cpu"):
        known = re.fullmatch(r"cuda(:\d+)?", str(device)) is not None
        reason = "is not available yet" if known else "is no device"
        raise DeviceError(f"Device '{device}' {reason}; use device='auto' or 'cpu'.")
    decoder = CpuDecoder()
    for level in layout.levels:
        reason_against = decoder.refusal(level.encoding)
        if reason_against is not None:
            raise UnsupportedSlideError(
                f"'{layout.path}' can't be decoded: {reason_against}; "
                "convert it to JPEG, deflate or zstd tiles."
            )
    return decoder
