"""Annotations as napari layers, with undo and recovery."""
