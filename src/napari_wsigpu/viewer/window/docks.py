"""Functions that open, hide and find this plugin's docks."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from magicgui.widgets import Container
from npe2 import PluginManager
from qtpy.QtWidgets import QDockWidget

from napari_wsigpu.viewer.napari_internals import DOCKS
from napari_wsigpu.viewer.window.main_window import soon
from napari_wsigpu.viewer.window.settings import PLUGIN, settings

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from magicgui.widgets import Widget
    from napari import Viewer

ANNOTATE, CHANNELS, INSPECTOR, SLIDES = "Annotate", "Channels", "Inspector", "Slides"
RAISED_MS = 100  # until Qt has laid out a new dock
SETTLED_MS = 1000  # until docks that open with the first slide have come to the front
SHARE = 4  # a dock takes at most 1/4 of the window's width


def open_inspector(viewer: Viewer) -> bool:
    """Open the inspector if the settings and the plugin are enabled; return whether it is open.

    In a narrow window, it becomes a tab next to napari's own docks.
    """
    enabled = settings().open_inspector and is_known()
    if enabled:
        open_dock(viewer, INSPECTOR)
    return enabled


def open_dock(viewer: Viewer, name: str, *, behind: bool = False) -> Widget:
    """Open one of this plugin's docks, as its menu item does, unless it is open; return it.

    With `behind`, docks that are already open stay in front.
    """
    for title, widget in viewer.window.dock_widgets.items():
        if title in _names(name):
            return widget
    manifest = PluginManager.instance().get_manifest(PLUGIN)
    [found] = [each for each in manifest.contributions.widgets if each.display_name == name]
    before = list(viewer.window.dock_widgets.values()) if behind else []
    opened = found.get_callable()(viewer)
    viewer.window.add_dock_widget(opened, name=_names(name)[0])
    for each in before:
        if isinstance(each, Container) and isinstance(each.native.parent(), QDockWidget):
            soon(each.native, each.native.parent().raise_, RAISED_MS)
    return opened


def raise_dock(viewer: Viewer, name: str) -> None:
    """Bring a dock to the front, before docks that `open_dock` keeps in front."""
    dock = open_dock(viewer, name).native.parent()
    dock.show()
    soon(dock, dock.raise_, SETTLED_MS)


def toggle_dock(viewer: Viewer, name: str) -> None:
    """Bring a dock to the front, or hide it if it is already visible."""
    dock = open_dock(viewer, name).native.parent()
    if dock.widget().visibleRegion().isEmpty():  # new, hidden, or behind another tab
        dock.show()
        dock.raise_()
    else:
        dock.hide()


def share_names(viewer: Viewer, dock: QDockWidget, name: str) -> Callable[[], None]:
    """Let the menu and `Window.add_plugin_dock_widget` find the same dock.

    As the plugin has a display name, they look for different names and would open a second dock. A
    name that already belongs to another dock is not changed.

    Returns
    -------
    callable
        Removes the names. Call it once the dock is removed from the window.
    """
    names: list[str] = []
    docks: MutableMapping[str, QDockWidget] = {}

    def forget() -> None:
        # When a plugin is disabled, napari needs the names to remove its docks.
        for title in names if is_known() else ():
            docks.pop(title, None)

    with suppress(AttributeError, KeyError):
        docks = DOCKS.get(viewer.window)
        names = [title for title in _names(name) if docks.setdefault(title, dock) is dock]
    return forget


def _names(name: str) -> list[str]:
    """Return a dock's name in the menu, and its name for `Window.add_plugin_dock_widget`."""
    display_name = PluginManager.instance().get_manifest(PLUGIN).display_name
    return [f"{name} ({owner})" for owner in (display_name, PLUGIN)]


def is_known() -> bool:
    """Whether napari offers this plugin's docks; False if the plugin is disabled."""
    return any(widget.plugin_name == PLUGIN for widget in PluginManager.instance().iter_widgets())
