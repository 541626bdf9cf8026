"""Old name of the cache of decoded tiles, which ``napari_wsigpu.runtime.default().tiles`` is."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from napari_wsigpu.slide.runtime import default

if TYPE_CHECKING:
    from napari_wsigpu.reading.cache import TileCache


def __getattr__(name: str) -> TileCache:
    if name != "tile_cache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__}.tile_cache is now napari_wsigpu.runtime.default().tiles",
        DeprecationWarning,
        stacklevel=2,
    )
    return default().tiles
