"""Hides everything in metadata that may identify a patient."""

from napari_wsigpu.model.privacy import masked

__all__ = ["masked"]
