"""What draws a viewer's canvas."""

from __future__ import annotations

import threading
from functools import cache

from napari._vispy.utils.gl import _opengl_context
from qtpy.QtWidgets import QApplication
from vispy.gloo import gl

BY_SOFTWARE = ("llvmpipe", "softpipe", "swiftshader", "software", "basic render")


def is_drawn_by_software() -> bool:
    """Whether the processor draws, as far as can be told without a viewer."""
    in_main = threading.current_thread() is threading.main_thread()
    if QApplication.instance() is None or not in_main:
        return False
    return any(word in _renderer().lower() for word in BY_SOFTWARE)


@cache
def _renderer() -> str:
    with _opengl_context():
        return str(gl.glGetParameter(gl.GL_RENDERER))
