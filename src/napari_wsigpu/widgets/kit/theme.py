"""Colors of napari's theme that Qt's palette lacks."""

from __future__ import annotations

from napari.settings import get_settings
from napari.utils.theme import get_theme
from qtpy.QtGui import QColor


def accent() -> QColor:
    """Return the color that napari's theme uses for selections."""
    return QColor(get_theme(get_settings().appearance.theme).current.as_hex())
