"""TIFF files, of any vendor and of none."""
