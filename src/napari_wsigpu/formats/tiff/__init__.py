"""TIFF files: a module per vendor, and generic pyramids."""
