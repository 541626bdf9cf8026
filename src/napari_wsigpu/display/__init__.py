"""What a screen shows while tiles are still being decoded. No napari, no Qt."""
