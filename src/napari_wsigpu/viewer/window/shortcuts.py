"""Registration of the key bindings in `napari.yaml`, which napari ignores."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from app_model.types import KeyBinding
from napari import Viewer
from napari.settings import get_settings
from napari.utils.action_manager import action_manager
from npe2 import PluginManager

from napari_wsigpu.viewer.window.settings import PLUGIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from npe2.manifest.contributions._keybindings import KeyBindingContribution


def register_keys() -> None:
    """Bind the keys of this plugin's commands, and list them in napari's Preferences.

    Keys that the user chose in the Preferences take precedence. Calling this again changes nothing.
    """
    try:
        contributed = PluginManager.instance().get_manifest(PLUGIN).contributions
    except KeyError:  # the plugin is disabled
        return
    commands = {command.id: command for command in contributed.commands or ()}
    chosen = get_settings().shortcuts.shortcuts
    for each in contributed.keybindings or ():
        command = commands[each.command]
        name = each.command.replace(".", ":")  # as napari names actions
        action_manager.register_action(name, _command(each), command.title, Viewer)
        if name not in chosen:
            action_manager.bind_shortcut(name, _key_of(each))


def _command(binding: KeyBindingContribution) -> Callable[[Viewer], None]:
    """Return a function that imports and runs a command when its key is pressed."""

    def run(viewer: Viewer) -> None:
        binding.exec((viewer,))

    return run


def _key_of(binding: KeyBindingContribution) -> KeyBinding:
    key = (binding.mac if sys.platform == "darwin" else None) or binding.key
    return KeyBinding.from_str(key)
