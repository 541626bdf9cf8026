"""OpenSlide's kinds of errors; each is a `SlideError` too."""

from __future__ import annotations

from ctypes import ArgumentError
from typing import TYPE_CHECKING

from napari_wsigpu.model.errors import SlideClosedError, SlideError

if TYPE_CHECKING:
    from typing import Any


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


def check_capacity(capacity: Any) -> int:
    """Return the capacity of a cache in bytes.

    Raises
    ------
    OpenSlideArgumentError
        If it is no whole number of at least 0.
    """
    if not isinstance(capacity, int) or capacity < 0:
        raise OpenSlideArgumentError(
            f"A cache can't hold {capacity!r} bytes; give a whole number >= 0."
        )
    return capacity
