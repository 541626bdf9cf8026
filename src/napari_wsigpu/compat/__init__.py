"""Interfaces of other libraries: drop-in replacements, and reader plugins for them.

Code written for OpenSlide, tiffslide or cuCIM runs once its import is changed. The readers for
bioio, MONAI, TIAToolbox and wsidata each require that package.
"""
