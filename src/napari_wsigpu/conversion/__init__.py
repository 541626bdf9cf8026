"""Slides into other files: what to write, who writes it, and how a killed conversion goes on.

`plan` decides which levels, tiles and encodings a file gets; `pixels` walks through the slide once;
`tiff` and `zarr` write; `journal` remembers what is written.
"""

from napari_wsigpu.conversion.run import Conversion, convert

__all__ = ["Conversion", "convert"]
