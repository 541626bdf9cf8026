"""The caches, devices and threads that the slides of a process share."""

from napari_wsigpu.slide.runtime import Runtime, default, using

__all__ = ["Runtime", "default", "using"]
