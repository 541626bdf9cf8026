"""Choice of the CPU decoder for a slide."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from napari_wsigpu import native
from napari_wsigpu.codecs.cpu import CpuDecoder
from napari_wsigpu.model.errors import DeviceError, UnsupportedSlideError

if TYPE_CHECKING:
    from napari_wsigpu.model.layout import SlideLayout


def choose_decoder(
    layout: SlideLayout, threads: int | None = None, decoder: CpuDecoder | None = None
) -> CpuDecoder:
    """Return `decoder`, or a new one by default, if it supports all levels of a slide.

    Raises
    ------
    DeviceError
        If `threads` is not an integer of at least 1.
    UnsupportedSlideError
        If the decoder does not support the slide's tiles.
    """
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise DeviceError(f"threads is {threads!r}; it must be an integer >= 1.")
    native.warn_if_missing()
    decoder = decoder or CpuDecoder(None if threads is None else threads - 1)
    for image in chain.from_iterable(level.stored for level in layout.levels):
        reason = decoder.refusal(image)
        if reason is not None:
            raise UnsupportedSlideError(
                f"'{layout.path}' can't be decoded: {reason}; "
                "convert it to JPEG, deflate or zstd tiles."
            )
    return decoder
