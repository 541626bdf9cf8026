"""What the slides of a process share: caches, devices and threads."""

from napari_wsigpu.slide.runtime import Runtime, default, using

__all__ = ["Runtime", "default", "using"]
