"""The "Navigator" and "Slides" docks."""
