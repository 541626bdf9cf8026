"""Olympus VSI files, and their ETS files."""
