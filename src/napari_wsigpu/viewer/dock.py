"""The inspector opens by itself with a viewer's first slide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magicgui.widgets import Container
from npe2 import PluginManager
from qtpy.QtWidgets import QDockWidget

from napari_wsigpu.viewer.settings import PLUGIN, settings
from napari_wsigpu.viewer.window import soon

if TYPE_CHECKING:
    from napari import Viewer

INSPECTOR, SLIDES = "Inspector", "Slides"
RAISED_MS = 100  # after which a new dock has found its place
SHARE = 4  # a dock takes one part in so many of the window


def open_inspector(viewer: Viewer) -> bool:
    """Open the inspector if the settings say so; whether it is open.

    Where it leaves little room, it comes as a tab next to napari's own docks.
    """
    wanted = settings().open_inspector and is_known()
    if wanted:
        open_dock(viewer, INSPECTOR)
    return wanted


def open_dock(viewer: Viewer, name: str, *, behind: bool = False) -> None:
    """Open one of this plugin's docks, unless it is open, as its item in the menu does.

    It may come `behind` those of this plugin that are open.

    The name that napari's own method gives to docks is another one where a plugin has a display
    name, so that the menu would open a second dock.
    """
    if any(each.startswith(f"{name} (") for each in viewer.window.dock_widgets):
        return
    manifest = PluginManager.instance().get_manifest(PLUGIN)
    [found] = [each for each in manifest.contributions.widgets if each.display_name == name]
    title = f"{name} ({manifest.display_name})"
    before = list(viewer.window.dock_widgets.values()) if behind else []
    viewer.window.add_dock_widget(found.get_callable()(viewer), name=title)
    for each in before:
        if isinstance(each, Container) and isinstance(each.native.parent(), QDockWidget):
            soon(each.native, each.native.parent().raise_, RAISED_MS)


def is_known() -> bool:
    """Whether napari knows this plugin's docks: none of a plugin that is switched off."""
    return any(widget.plugin_name == PLUGIN for widget in PluginManager.instance().iter_widgets())
