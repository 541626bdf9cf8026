"""Widgets that magicgui and superqt lack, and helpers for the docks."""
