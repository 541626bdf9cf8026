"""Zarr arrays, on disk and on servers: metadata, chunks, and checks of untrusted data."""
