"""tiffslide's interface on top of `Slide`: code for it changes only its import.

    from napari_wsigpu.compat import tiffslide    # was: import tiffslide

Names, arguments, pixels and kinds of errors are tiffslide's. Slides of formats that it doesn't know
are read too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
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
# The version of tiffslide whose behaviour this is.
__version__ = "3.0.1"
# What openslide-python calls these.
ALIASES = {
    "OpenSlide": TiffSlide,
    "ImageSlide": NotTiffSlide,
    "OpenSlideError": TiffFileError,
    "OpenSlideUnsupportedFormatError": TiffFileError,
}

__all__ = [
    "PROPERTY_NAME_BACKGROUND_COLOR",
    "PROPERTY_NAME_BOUNDS_HEIGHT",
    "PROPERTY_NAME_BOUNDS_WIDTH",
    "PROPERTY_NAME_BOUNDS_X",
    "PROPERTY_NAME_BOUNDS_Y",
    "PROPERTY_NAME_COMMENT",
    "PROPERTY_NAME_MPP_X",
    "PROPERTY_NAME_MPP_Y",
    "PROPERTY_NAME_OBJECTIVE_POWER",
    "PROPERTY_NAME_QUICKHASH1",
    "PROPERTY_NAME_VENDOR",
    "NotTiffSlide",
    "TiffFileError",
    "TiffSlide",
    "__version__",
    "open_slide",
]


def __getattr__(name: str) -> Any:
    if name in ALIASES:
        warn(f"{name!r} is {ALIASES[name].__name__} here", UserWarning, stacklevel=2)
        return ALIASES[name]
    if name in ("AbstractSlide", "__library_version__"):
        warn(f"there is no {name!r} here", UserWarning, stacklevel=2)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


def open_slide(filename: Filename) -> TiffSlide:
    """Open a slide, or a flat image as a slide of one level.

    Raises
    ------
    TiffFileError
        If it is neither.
    SlideError
        If the file is not there or can't be read.
    """
    try:
        return TiffSlide(filename)
    except TiffFileError as error:
        try:
            return NotTiffSlide(filename)
        except TiffFileError:
            raise error from None
