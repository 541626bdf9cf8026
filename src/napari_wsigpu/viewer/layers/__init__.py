"""Slides, label images and associated images as napari layer data."""
