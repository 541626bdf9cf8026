"""Patches of many slides as a data set: which there are, in what order, batch by batch.

No framework is needed; `napari_wsigpu.torch` makes data sets of PyTorch of it.
"""

from napari_wsigpu.datasets.batches import Batch, PatchBatches
from napari_wsigpu.datasets.order import Order
from napari_wsigpu.datasets.patches import Patches

__all__ = ["Batch", "Order", "PatchBatches", "Patches"]
