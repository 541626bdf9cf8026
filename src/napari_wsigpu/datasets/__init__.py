"""Patches from many slides as datasets: a list of them, their order, and batches.

This package needs no framework; `napari_wsigpu.torch` provides PyTorch datasets based on it.
"""

from napari_wsigpu.datasets.batches import Batch, PatchBatches
from napari_wsigpu.datasets.order import Order
from napari_wsigpu.datasets.patches import Patches

__all__ = ["Batch", "Order", "PatchBatches", "Patches"]
