"""What magicgui and superqt lack, each wrapped once as a magicgui widget."""
