"""The inspector opens by itself with a viewer's first slide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npe2 import PluginManager

from napari_wsigpu.viewer.settings import PLUGIN, settings

if TYPE_CHECKING:
    from napari import Viewer

INSPECTOR = "Inspector"
SHARE = 4  # a dock takes one part in so many of the window


def open_inspector(viewer: Viewer) -> bool:
    """Open the inspector if the settings say so; whether it is open.

    Where it leaves little room, it comes as a tab next to napari's own docks.
    """
    wanted = settings().open_inspector and _is_known()
    if wanted:
        open_dock(viewer, INSPECTOR)
    return wanted


def open_dock(viewer: Viewer, name: str) -> None:
    """Open one of this plugin's docks, unless it is open, as its item in the menu does.

    The name that napari's own method gives to docks is another one where a plugin has a display
    name, so that the menu would open a second dock.
    """
    if any(each.startswith(f"{name} (") for each in viewer.window.dock_widgets):
        return
    manifest = PluginManager.instance().get_manifest(PLUGIN)
    [found] = [each for each in manifest.contributions.widgets if each.display_name == name]
    title = f"{name} ({manifest.display_name})"
    viewer.window.add_dock_widget(found.get_callable()(viewer), name=title)


def _is_known() -> bool:
    """Whether napari knows this plugin's docks: none of a plugin that is switched off."""
    return any(widget.plugin_name == PLUGIN for widget in PluginManager.instance().iter_widgets())
