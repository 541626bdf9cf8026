"""What napari sees: layers, reader, sample data."""
