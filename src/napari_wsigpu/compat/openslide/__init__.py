"""A drop-in replacement for openslide-python on top of `Slide`: only the import changes.

    from napari_wsigpu.compat import openslide    # was: import openslide

Names, arguments, pixels and errors match openslide-python; libopenslide is not needed. Formats that
OpenSlide does not support work as well.
"""

from __future__ import annotations

from napari_wsigpu.compat.openslide.abstract import (
    PROPERTY_NAME_BACKGROUND_COLOR as PROPERTY_NAME_BACKGROUND_COLOR,
)
from napari_wsigpu.compat.openslide.abstract import AbstractSlide, ImageSlide, OpenSlideCache
from napari_wsigpu.compat.openslide.deepzoom import DeepZoomGenerator
from napari_wsigpu.compat.openslide.lowlevel import (
    OpenSlideError,
    OpenSlideUnsupportedFormatError,
    OpenSlideVersionError,
)
from napari_wsigpu.compat.openslide.slide import OpenSlide, open_slide

PROPERTY_NAME_BARCODE = "openslide.barcode"
PROPERTY_NAME_BOUNDS_HEIGHT = "openslide.bounds-height"
PROPERTY_NAME_BOUNDS_WIDTH = "openslide.bounds-width"
PROPERTY_NAME_BOUNDS_X = "openslide.bounds-x"
PROPERTY_NAME_BOUNDS_Y = "openslide.bounds-y"
PROPERTY_NAME_COMMENT = "openslide.comment"
PROPERTY_NAME_MPP_X = "openslide.mpp-x"
PROPERTY_NAME_MPP_Y = "openslide.mpp-y"
PROPERTY_NAME_OBJECTIVE_POWER = "openslide.objective-power"
PROPERTY_NAME_QUICKHASH1 = "openslide.quickhash-1"
PROPERTY_NAME_VENDOR = "openslide.vendor"
# The OpenSlide version whose behavior this matches.
__library_version__ = "4.0.0"
__version__ = "1.4.0"

__all__ = [
    "AbstractSlide",
    "DeepZoomGenerator",
    "ImageSlide",
    "OpenSlide",
    "OpenSlideCache",
    "OpenSlideError",
    "OpenSlideUnsupportedFormatError",
    "OpenSlideVersionError",
    "__library_version__",
    "__version__",
    "open_slide",
]
__all__ += [name for name in dir() if name.startswith("PROPERTY_NAME_")]
