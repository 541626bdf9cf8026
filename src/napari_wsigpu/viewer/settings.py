"""What the user chose in napari's Preferences, and which reader napari prefers for slides."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from napari.plugins.utils import get_filename_patterns_for_reader
from napari.settings import get_plugin_settings, get_settings

from napari_wsigpu.formats.registry import SLIDE_ENDINGS

PLUGIN = "napari-wsigpu"


@dataclass(frozen=True, slots=True)
class Settings:
    """The page of this plugin in File > Preferences; `napari.yaml` declares it.

    Attributes
    ----------
    show_private : bool
        Show label, macro and the metadata that can name a patient.
    open_inspector : bool
        Open the slide inspector with the first slide.
    apply_icc : bool
        Show colours by the slide's ICC profile.
    """

    show_private: bool = False
    open_inspector: bool = True
    apply_icc: bool = False


def settings() -> Settings:
    """Return what is set now; the defaults where napari doesn't know it or can't read it."""
    try:
        stored = get_plugin_settings(PLUGIN).slides
    except (KeyError, AssertionError):  # no such plugin; its file holds no mapping
        return Settings()
    return Settings(*(getattr(stored, field.name) for field in fields(Settings)))


def show_private_changed() -> Any:
    """Return the event of a change of `show_private`; None where napari doesn't know it."""
    try:
        return get_plugin_settings(PLUGIN).slides.events.show_private
    except (KeyError, AssertionError):
        return None


def prefer_this_reader() -> None:
    """Make napari open files whose names are those of slides by this plugin, and keep it so.

    Patterns that the user gave for a folder or a single file still count more.
    """
    preferences = get_settings().plugins
    ours = dict.fromkeys(_slide_patterns(), PLUGIN)
    # Of patterns that are equally specific ("*", "*.svs") napari takes the first.
    preferences.extension2reader = ours | {
        pattern: reader
        for pattern, reader in preferences.extension2reader.items()
        if pattern not in ours
    }


def is_preferred_reader() -> bool:
    """Whether napari opens all files whose names are those of slides by this plugin."""
    readers = get_settings().plugins.extension2reader
    patterns = _slide_patterns()
    return bool(patterns) and all(readers.get(pattern) == PLUGIN for pattern in patterns)


def _slide_patterns() -> list[str]:
    """Return the reader's patterns that are slides' alone, in both cases: napari tells them."""
    patterns: set[str] = get_filename_patterns_for_reader(PLUGIN)
    endings = {pattern.removeprefix("*").lower() for pattern in patterns} & SLIDE_ENDINGS
    return sorted(f"*{case(ending)}" for ending in endings for case in (str.lower, str.upper))
