"""Progressive drawing: slices composed of the tiles that are decoded so far."""
