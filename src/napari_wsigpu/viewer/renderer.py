"""What draws a viewer's canvas."""

from __future__ import annotations

import threading
from functools import cache

import napari

BY_SOFTWARE = ("llvmpipe", "softpipe", "swiftshader", "software", "basic render")


def is_drawn_by_software() -> bool:
    """Whether the processor draws the viewer; False where there is none."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or napari.current_viewer() is None:
        return False
    return any(word in _renderer().lower() for word in BY_SOFTWARE)


@cache
def _renderer() -> str:
    # Who has no viewer need not wait for what draws it to be imported.
    from napari._vispy.utils.gl import _opengl_context
    from vispy.gloo import gl

    with _opengl_context():
        return str(gl.glGetParameter(gl.GL_RENDERER))
