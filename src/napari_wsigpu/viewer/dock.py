"""The slide inspector opens by itself with a viewer's first slide, or is offered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from npe2 import PluginManager

from napari_wsigpu.viewer.notifications import show_info
from napari_wsigpu.viewer.settings import PLUGIN, never_open_inspector, settings
from napari_wsigpu.viewer.window import canvas_width_on_screen, close_toasts, keep_toasts_on_canvas

if TYPE_CHECKING:
    from napari import Viewer
    from qtpy.QtWidgets import QMainWindow, QWidget

INSPECTOR = "Slide inspector"
LEAST_CANVAS = 500  # pixels of width that the slide keeps
LEAST_SHARE = 0.45  # of the window's width
SHARE = 4  # a dock takes one part in so many of the window
SEPARATOR = 10  # pixels
OFFER = "Open the slide inspector?"


def offer_inspector(viewer: Viewer, window: QMainWindow) -> bool:
    """Open the inspector if the settings say so; ask first where it leaves little room.

    Parameters
    ----------
    viewer : Viewer
        The viewer.
    window : QMainWindow
        Its window.

    Returns
    -------
    bool
        Whether it is open, or was offered.
    """
    if not _is_wanted():
        return False
    if _is_open(viewer):
        return True
    room = canvas_width_on_screen(viewer, window) - window.width() // SHARE - SEPARATOR
    if room >= max(LEAST_CANVAS, LEAST_SHARE * window.width()):
        viewer.window.add_plugin_dock_widget(PLUGIN, INSPECTOR)
        return True

    weak = ref(viewer)  # napari keeps all notifications

    def show(toast: Any) -> None:
        shown_in = weak()
        if shown_in is not None:
            shown_in.window.add_plugin_dock_widget(PLUGIN, INSPECTOR)

    def decline(toast: Any) -> None:
        never_open_inspector()

    show_info(OFFER, [("Open it", show), ("Don't ask again", decline)])
    keep_toasts_on_canvas(window)
    return True


def withdraw_offer(window: QWidget) -> None:
    """Ask no more in a window whether to open the inspector: it was opened from the menu."""
    close_toasts(window, OFFER)


def _is_open(viewer: Viewer) -> bool:
    return any(name.startswith(INSPECTOR) for name in viewer.window.dock_widgets)


def _is_wanted() -> bool:
    widgets = PluginManager.instance().iter_widgets()  # none of a plugin that is switched off
    known = any(widget.plugin_name == PLUGIN for widget in widgets)
    return known and settings().open_inspector
