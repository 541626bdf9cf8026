"""Compose images for a screen while tiles are being decoded. Imports neither napari nor Qt."""
