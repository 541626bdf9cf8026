"""Whole-slide images in napari and in scripts.

Public face: `open_slide`, `Slide`, and the errors in `napari_wsigpu.errors`.
"""

from importlib.metadata import version

from napari_wsigpu.errors import SlideError
from napari_wsigpu.slide import Slide, open_slide

__all__ = ["Slide", "SlideError", "__version__", "open_slide"]
__version__ = version("napari-wsigpu")
