"""The plugin as napari sees it: contributions, layers, drawing and the window."""
