"""Faces of other libraries, for code that moves to this one, and readers that they plug in.

Each reader (bioio, MONAI, tiatoolbox, wsidata) needs the package of its name.
"""
