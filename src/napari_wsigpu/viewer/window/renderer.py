"""The OpenGL renderer that draws a viewer's canvas."""

from __future__ import annotations

import threading
from functools import cache

import napari

BY_SOFTWARE = ("llvmpipe", "softpipe", "swiftshader", "software", "basic render")


def is_drawn_by_software() -> bool:
    """Whether the CPU draws the current viewer; False without one, or outside the main thread."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or napari.current_viewer() is None:
        return False
    return any(word in _renderer().lower() for word in BY_SOFTWARE)


@cache
def _renderer() -> str:
    # Imported late: scripts that read slides without a viewer don't need vispy.
    from vispy.app import Canvas
    from vispy.gloo import get_current_canvas, gl

    canvas = Canvas(show=False) if get_current_canvas() is None else None
    try:
        return str(gl.glGetParameter(gl.GL_RENDERER))
    finally:
        if canvas is not None:
            canvas.close()
