"""What a file or a server may cost: named limits, which a user can raise."""

from napari_wsigpu.model.limits import Limits, limits

__all__ = ["Limits", "limits"]
