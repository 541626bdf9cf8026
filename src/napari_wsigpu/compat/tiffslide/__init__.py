"""A drop-in replacement for tiffslide on top of `Slide`: only the import changes.

    from napari_wsigpu.compat import tiffslide    # was: import tiffslide

Names, arguments, pixels and exception types match tiffslide. Formats that tiffslide does not
support work as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from warnings import warn

from napari_wsigpu.compat.tiffslide.files import TiffFileError
from napari_wsigpu.compat.tiffslide.slide import NotTiffSlide, TiffSlide

if TYPE_CHECKING:
    from napari_wsigpu.compat.tiffslide.files import Filename

PROPERTY_NAME_COMMENT = "tiffslide.comment"
PROPERTY_NAME_VENDOR = "tiffslide.vendor"
PROPERTY_NAME_QUICKHASH1 = "tiffslide.quickhash-1"
PROPERTY_NAME_BACKGROUND_COLOR = "tiffslide.background-color"
PROPERTY_NAME_OBJECTIVE_POWER = "tiffslide.objective-power"
PROPERTY_NAME_MPP_X = "tiffslide.mpp-x"
PROPERTY_NAME_MPP_Y = "tiffslide.mpp-y"
PROPERTY_NAME_BOUNDS_X = "tiffslide.bounds-x"
PROPERTY_NAME_BOUNDS_Y = "tiffslide.bounds-y"
PROPERTY_NAME_BOUNDS_WIDTH = "tiffslide.bounds-width"
PROPERTY_NAME_BOUNDS_HEIGHT = "tiffslide.bounds-height"
# The tiffslide version whose behavior this matches.
__version__ = "3.0.1"
# The names of these classes in openslide-python.
ALIASES = {
    "OpenSlide": TiffSlide,
    "ImageSlide": NotTiffSlide,
    "OpenSlideError": TiffFileError,
    "OpenSlideUnsupportedFormatError": TiffFileError,
}

__all__ = ["NotTiffSlide", "TiffFileError", "TiffSlide", "__version__", "open_slide"]
__all__ += [name for name in dir() if name.startswith("PROPERTY_NAME_")]


def __getattr__(name: str) -> type:
    if name in ALIASES:
        warn(f"{name!r} is an alias of {ALIASES[name].__name__!r}", UserWarning, stacklevel=2)
        return ALIASES[name]
    if name in ("AbstractSlide", "__library_version__"):
        warn(f"tiffslide does not provide {name!r}", UserWarning, stacklevel=2)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


def open_slide(filename: Filename) -> TiffSlide:
    """Open a slide, or a flat image as a slide with one level.

    Raises
    ------
    TiffFileError
        If the file is neither a slide nor an image.
    SlideError
        If the file does not exist or cannot be read.
    """
    try:
        return TiffSlide(filename)
    except TiffFileError as error:
        try:
            return NotTiffSlide(filename)
        except TiffFileError:
            raise error from None
