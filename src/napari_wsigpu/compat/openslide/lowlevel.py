"""The errors under the path by which other packages import them: ``openslide.lowlevel``."""

from __future__ import annotations

from napari_wsigpu.compat.openslide.errors import (
    OpenSlideError,
    OpenSlideUnsupportedFormatError,
    OpenSlideVersionError,
)

__all__ = ["OpenSlideError", "OpenSlideUnsupportedFormatError", "OpenSlideVersionError"]
