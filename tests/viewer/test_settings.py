"""The page in napari's Preferences, and which reader napari prefers."""

import shutil
from pathlib import Path

import pytest
import yaml
from napari.settings import get_plugin_settings, get_settings
from npe2 import PluginManager, PluginManifest

import napari_wsigpu
from napari_wsigpu.formats.registry import patterns
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.window.settings import (
    Settings,
    is_preferred_reader,
    prefer_this_reader,
    settings,
)

MANIFEST = Path(napari_wsigpu.__file__).parent / "napari.yaml"


@pytest.fixture
def plugin(plugin_settings, npe2pm):
    """napari knows this plugin alone, and nothing is read from or written to its user's files."""
    manifest = PluginManifest.from_file(MANIFEST)
    npe2pm.register(manifest)
    return manifest


def test_manifest_matches_the_settings_class(plugin):
    [page] = plugin.contributions.configurations.values()
    defaults = {key: item.default for key, item in page.properties.items()}
    assert Settings(**defaults) == Settings()
    assert all(item.title and item.description for item in page.properties.values())
    assert plugin.name == "napari-wsigpu"


def test_the_manifest_has_the_patterns_of_all_formats_and_urls(plugin):
    named = plugin.contributions.readers[0].filename_patterns
    assert sorted(item for item in named if "://" not in item) == sorted(patterns())


def test_defaults(plugin):
    assert settings() == Settings(show_private=False, open_inspector=True, apply_icc=False)


@pytest.mark.parametrize("name", ["show_private", "open_inspector", "apply_icc"])
def test_values_are_read_live_and_kept(plugin, name):
    default = getattr(settings(), name)
    stored = get_plugin_settings("napari-wsigpu")
    setattr(stored.slides, name, not default)
    assert getattr(settings(), name) is not default
    assert settings() != Settings()
    saved = yaml.safe_load(stored.config_path.read_text())
    assert saved["slides"] == {name: not default}
    again = type(stored)(config_path=stored.config_path)
    assert getattr(again.slides, name) is not default


def test_defaults_where_napari_does_not_know_the_plugin(plugin_settings):
    assert settings() == Settings()


@pytest.mark.parametrize(
    "text", ["slides: {show_private: [1, 2", "no mapping", "slides: 7", "slides: {show_private: 7}"]
)
def test_defaults_where_the_file_is_damaged(plugin, tmp_path, text):
    (tmp_path / "napari-wsigpu.yaml").write_text(text)
    assert settings() == Settings()


@pytest.fixture
def preferences():
    return get_settings().plugins


def test_slides_alone_are_preferred(plugin, preferences):
    preferences.extension2reader = {"*": "other", "*.svs": "other", "*.tif": "napari"}
    assert not is_preferred_reader()
    prefer_this_reader()
    assert is_preferred_reader()
    readers = preferences.extension2reader
    assert readers["*.svs"] == readers["*.SVS"] == readers["*.ndpi"] == "napari-wsigpu"
    assert (readers["*"], readers["*.tif"]) == ("other", "napari")
    ours = {pattern.lower() for pattern, name in readers.items() if name == "napari-wsigpu"}
    assert ours.isdisjoint({"*.tif", "*.tiff", "*.ome.tif", "*.ome.tiff", "*.btf"})
    patterns = {item.lower() for item in plugin.contributions.readers[0].filename_patterns}
    assert {key.lower() for key, name in readers.items() if name == "napari-wsigpu"} <= patterns


def test_another_choice_later_counts(plugin, preferences):
    prefer_this_reader()
    preferences.extension2reader = preferences.extension2reader | {"*.svs": "other"}
    assert not is_preferred_reader()
    prefer_this_reader()
    assert is_preferred_reader()


def test_nothing_is_preferred_where_napari_does_not_know_the_plugin(plugin_settings, preferences):
    assert not is_preferred_reader()
    prefer_this_reader()
    assert preferences.extension2reader == {}
    assert not is_preferred_reader()


@pytest.mark.parametrize("name", ["slide.svs", "slide.SVS"])
def test_slides_open_by_this_plugin_though_others_claim_them(viewer, tmp_path, preferences, name):
    path = tmp_path / name
    shutil.copy(sample_path(), path)
    claimed_by = {
        item.plugin_name for item in PluginManager.instance().iter_compatible_readers([path])
    }
    assert {"napari", "napari-wsigpu"} <= claimed_by
    preferences.extension2reader = {"*": "napari"}
    prefer_this_reader()
    [layer] = viewer.open(path, plugin=None)
    assert layer.source.reader_plugin == "napari-wsigpu"
