"""PyTorch datasets over patches of slides."""

from napari_wsigpu.datasets.torch import PatchDataset, PatchStream

__all__ = ["PatchDataset", "PatchStream"]
