"""Slides into other files: what to write, who writes it, and how a killed conversion goes on.

`planning` decides which planes, levels, tiles and encodings a file gets, and makes a `plan`;
`pixels` walks through the slide once; `tiff` and `zarr` write; `journal` remembers what is written.
"""

from napari_wsigpu.conversion.run import Conversion, convert

__all__ = ["Conversion", "convert"]
