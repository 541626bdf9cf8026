"""Old name of what `napari_wsigpu.runtime` holds; see `napari_wsigpu.engine.cache`."""

from napari_wsigpu.engine import cache

__all__ = ["cache"]
