"""napari's window around the canvas: docks, notifications and settings."""
