"""A drop-in replacement for cuCIM's `CuImage` on top of `Slide`: only the import changes.

    from napari_wsigpu.compat.cucim import CuImage    # was: from cucim import CuImage

Names, defaults, locations, batches, errors and pixels match cuCIM, which returns 8-bit gray as
RGBA. Unlike in cuCIM, 16-bit pixels are returned as stored instead of as 8-bit RGBA.
"""

from __future__ import annotations

from napari_wsigpu.compat.cucim.cache import CacheType, ImageCache, preferred_memory_capacity
from napari_wsigpu.compat.cucim.file import CuImageError, CuImageOpenError
from napari_wsigpu.compat.cucim.image import CuImage, CuImageIterator, DLDataType, DLDataTypeCode

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
