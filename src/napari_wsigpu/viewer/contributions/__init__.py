"""The contributions that napari's manifest lists: readers, writers, commands and sample data."""
