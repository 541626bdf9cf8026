"""The plugin's page in napari's Preferences, and the reader that napari prefers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from napari.plugins.utils import get_filename_patterns_for_reader
from napari.settings import get_plugin_settings, get_settings

from napari_wsigpu.formats.registry import SLIDE_ENDINGS

if TYPE_CHECKING:
    from napari.utils.events import EventEmitter

PLUGIN = "napari-wsigpu"


@dataclass(frozen=True, slots=True)
class Settings:
    """The page of this plugin in File > Preferences; `napari.yaml` declares it.

    Attributes
    ----------
    show_private : bool
        Show label, macro and metadata that may identify a patient.
    open_inspector : bool
        Open the inspector with the first slide.
    apply_icc : bool
        Convert colors with the slide's ICC profile.
    """

    show_private: bool = False
    open_inspector: bool = True
    apply_icc: bool = False


def settings() -> Settings:
    """Return the current settings; the defaults if napari has none or cannot read them."""
    try:
        stored = get_plugin_settings(PLUGIN).slides
    except (KeyError, AssertionError):  # the plugin is unknown, or the settings file is malformed
        return Settings()
    return Settings(*(getattr(stored, field.name) for field in fields(Settings)))


def show_private_changed() -> EventEmitter | None:
    """Return the event that reports changes of `show_private`; None if napari lacks it."""
    try:
        return get_plugin_settings(PLUGIN).slides.events.show_private
    except (KeyError, AssertionError):
        return None


def prefer_this_reader() -> None:
    """Make this plugin napari's permanent default reader for the file names of slides.

    Patterns that the user set for a folder or a single file still take precedence.
    """
    preferences = get_settings().plugins
    ours = dict.fromkeys(_slide_patterns(), PLUGIN)
    # napari takes the first of several equally specific patterns ("*", "*.svs").
    preferences.extension2reader = ours | {
        pattern: reader
        for pattern, reader in preferences.extension2reader.items()
        if pattern not in ours
    }


def is_preferred_reader() -> bool:
    """Whether this plugin is napari's default reader for the file names of all slides."""
    readers = get_settings().plugins.extension2reader
    patterns = _slide_patterns()
    return bool(patterns) and all(readers.get(pattern) == PLUGIN for pattern in patterns)


def _slide_patterns() -> list[str]:
    """Return the reader's patterns that match only slides, in lower and upper case."""
    patterns: set[str] = get_filename_patterns_for_reader(PLUGIN)
    endings = {pattern.removeprefix("*").lower() for pattern in patterns}
    endings &= {*SLIDE_ENDINGS}
    return sorted(f"*{case(ending)}" for ending in endings for case in (str.lower, str.upper))
