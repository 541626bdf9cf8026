"""Metadata without what can name a patient."""

from napari_wsigpu.model.privacy import masked

__all__ = ["masked"]
