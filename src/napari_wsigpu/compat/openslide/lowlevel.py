"""OpenSlide's kinds of errors, under the path by which other packages import them.

Each is a `SlideError` too.
"""

from __future__ import annotations

from ctypes import ArgumentError

from napari_wsigpu.model.errors import SlideClosedError, SlideError

__all__ = ["OpenSlideError", "OpenSlideUnsupportedFormatError", "OpenSlideVersionError"]


class OpenSlideError(SlideError):
    """The slide can't be read; it can't be used any more, but closed."""


class OpenSlideUnsupportedFormatError(OpenSlideError):
    """The file is no slide, or is not there."""


class OpenSlideVersionError(OpenSlideError):
    """Something needs a newer version; never raised here."""


class OpenSlideArgumentError(SlideError, ArgumentError):
    """A value was given that OpenSlide's library would not take."""


class OpenSlideClosedError(SlideClosedError, ArgumentError):
    """The slide was closed before."""
