"""Zarr arrays: their chunks, read and written."""
