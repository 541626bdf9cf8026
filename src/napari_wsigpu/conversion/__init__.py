"""Convert slides to TIFF, OME-TIFF, OME-Zarr and PNG, resuming interrupted conversions.

`make_plan` chooses planes, levels, tiles and encodings and returns a `conversion_plan.Plan`.
`pixels` reads each stored pixel once, `tiff_target` and `zarr_target` write the result, and
`journal` records the tiles that have been written.
"""

from napari_wsigpu.conversion.convert_slide import Conversion, convert

__all__ = ["Conversion", "convert"]
