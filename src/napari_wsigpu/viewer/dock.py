"""The slide inspector opens by itself with a viewer's first slide, if the settings say so."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

from npe2 import PluginManager

from napari_wsigpu.viewer.layers import slide_of
from napari_wsigpu.viewer.settings import PLUGIN, settings

if TYPE_CHECKING:
    from napari import Viewer

INSPECTOR = "Slide inspector"

_watched: WeakSet[Viewer] = WeakSet()


def open_inspector_with_a_slide(viewer: Viewer) -> None:
    """Open the inspector when the next layer of a slide is in the viewer, once for a viewer.

    Who closes it then will not be bothered again. Calling this again for the same viewer
    changes nothing.
    """
    if viewer in _watched:
        return
    _watched.add(viewer)
    weak = ref(viewer)

    def on_inserted(event: Any) -> None:
        shown_in = weak()
        if shown_in is not None and slide_of(event.value) is not None and _wanted():
            event.source.events.inserted.disconnect(on_inserted)
            shown_in.window.add_plugin_dock_widget(PLUGIN, INSPECTOR)

    viewer.layers.events.inserted.connect(on_inserted)


def _wanted() -> bool:
    in_main_thread = threading.current_thread() is threading.main_thread()
    widgets = PluginManager.instance().iter_widgets()  # none of a plugin that is switched off
    known = any(widget.plugin_name == PLUGIN for widget in widgets)
    return in_main_thread and known and settings().open_inspector
