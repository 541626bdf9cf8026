"""Which decoder on the CPU decodes a slide."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from napari_wsigpu import native
from napari_wsigpu.codecs.cpu import CpuDecoder
from napari_wsigpu.model.errors import DeviceError, UnsupportedSlideError

if TYPE_CHECKING:
    from napari_wsigpu.model.layout import SlideLayout


def choose_decoder(
    layout: SlideLayout, threads: int | None = None, given: CpuDecoder | None = None
) -> CpuDecoder:
    """Return a decoder on the CPU for all levels of a slide: the one that is given, or a new one.

    Raises
    ------
    DeviceError
        If the number of threads is not a whole one of at least 1.
    UnsupportedSlideError
        If no decoder can read the slide's tiles.
    """
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise DeviceError(f"threads is {threads!r}; it has to be a whole number >= 1.")
    native.warn_if_missing()
    decoder = given or CpuDecoder(None if threads is None else threads - 1)
    for image in chain.from_iterable(level.stored for level in layout.levels):
        reason_against = decoder.refusal(image)
        if reason_against is not None:
            raise UnsupportedSlideError(
                f"'{layout.path}' can't be decoded: {reason_against}; "
                "convert it to JPEG, deflate or zstd tiles."
            )
    return decoder
