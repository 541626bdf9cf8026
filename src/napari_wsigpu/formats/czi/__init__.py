"""Zeiss CZI files."""
