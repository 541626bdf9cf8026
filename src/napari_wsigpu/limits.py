"""Named limits on the memory and time that a file or server may take; users can raise them."""

from napari_wsigpu.model.limits import Limits, limits

__all__ = ["Limits", "limits"]
