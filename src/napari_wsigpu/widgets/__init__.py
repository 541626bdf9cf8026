"""Dock widgets."""
