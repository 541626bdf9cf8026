"""OpenSlide's Python interface on top of `Slide`: code for it changes only its import.

    from napari_wsigpu.compat import openslide    # was: import openslide

Names, arguments, pixels and errors are openslide-python's, and libopenslide is not needed. Slides
of formats that OpenSlide doesn't know are read too.
"""

from __future__ import annotations

from napari_wsigpu.compat.openslide.abstract import (
    PROPERTY_NAME_BACKGROUND_COLOR,
    AbstractSlide,
    ImageSlide,
    OpenSlideCache,
)
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
# The version of OpenSlide whose behaviour this is.
__library_version__ = "4.0.0"
__version__ = "1.4.0"

__all__ = [
    "PROPERTY_NAME_BACKGROUND_COLOR",
    "PROPERTY_NAME_BARCODE",
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
