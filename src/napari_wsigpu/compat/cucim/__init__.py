"""cuCIM's `CuImage` on top of `Slide`: code written for cuCIM changes only its import.

    from napari_wsigpu.compat.cucim import CuImage    # was: from cucim import CuImage

Names, defaults, locations, batches, errors and pixels are cuCIM's: gray ones of 8 bit are RGBA.
Those of 16 bit, which cuCIM turns into 8 bit RGBA, are what the file says.
"""

from __future__ import annotations

from napari_wsigpu.compat.cucim.cache import CacheType, ImageCache, preferred_memory_capacity
from napari_wsigpu.compat.cucim.file import CuImageError, CuImageOpenError
from napari_wsigpu.compat.cucim.image import (
    CuImage,
    CuImageIterator,
    DLDataType,
    DLDataTypeCode,
)

__all__ = [
    "CacheType",
    "CuImage",
    "CuImageError",
    "CuImageIterator",
    "CuImageOpenError",
    "DLDataType",
    "DLDataTypeCode",
    "ImageCache",
    "preferred_memory_capacity",
]
