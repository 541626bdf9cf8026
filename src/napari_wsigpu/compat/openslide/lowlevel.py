"""OpenSlide's exceptions, at the path from which other packages import them.

Each one is also a `SlideError`.
"""

from __future__ import annotations

from ctypes import ArgumentError

from napari_wsigpu.model.errors import SlideClosedError, SlideError

__all__ = ["OpenSlideError", "OpenSlideUnsupportedFormatError", "OpenSlideVersionError"]


class OpenSlideError(SlideError):
    """An argument is not valid, or a read failed; after a failed read, only `close` works."""


class OpenSlideUnsupportedFormatError(OpenSlideError):
    """The file does not exist, is not a slide, or has pixels that do not fit in an RGBA image."""


class OpenSlideVersionError(OpenSlideError):
    """A newer version of OpenSlide is required; never raised here."""


class OpenSlideArgumentError(SlideError, ArgumentError):
    """An argument that the OpenSlide library would not accept."""


class OpenSlideClosedError(SlideClosedError, ArgumentError):
    """The slide is closed."""
