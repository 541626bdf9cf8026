"""How the native core is found, and what is said when it is missing."""

import ctypes
import logging
from types import SimpleNamespace

import pytest

from napari_wsigpu import native


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Make the package look for the library in two empty folders."""
    monkeypatch.delenv(native.SWITCH, raising=False)
    found = tmp_path / "first", tmp_path / "second"
    for folder in found:
        folder.mkdir()
    monkeypatch.setattr(native, "__path__", [*map(str, found)])
    return found


def test_it_may_be_missing(folders):
    core, reason = native._load()
    assert core is None
    assert reason.startswith("the package was installed without a C++ compiler")


def test_it_may_be_switched_off(folders, monkeypatch):
    monkeypatch.setenv(native.SWITCH, "off")
    assert native._load() == (None, "WSIGPU_NATIVE is off")


def test_broken_library_is_named(folders):
    path = folders[0] / native.FILE
    path.write_bytes(b"no library")
    core, reason = native._load()
    assert core is None
    assert reason.startswith(f"'{path}' can't be loaded (")


def test_broken_library_does_not_hide_a_good_one(folders, monkeypatch):
    for folder in folders:
        (folder / native.FILE).touch()

    def load(path):
        if path.startswith(str(folders[0])):
            raise OSError("file too short")
        return path

    def make(library):
        return SimpleNamespace(library=library, jpeg_version="3.1.0")

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(native, "Core", make)
    core, reason = native._load()
    assert (core.library, reason) == (str(folders[1] / native.FILE), "libjpeg-turbo 3.1.0")


@pytest.mark.parametrize(
    ("available", "switch", "count"), [(False, None, 1), (False, "off", 0), (True, None, 0)]
)
def test_missing_core_is_logged_once(monkeypatch, caplog, available, switch, count):
    monkeypatch.setattr(native, "available", available)
    monkeypatch.setattr(native, "reason", "no compiler is installed")
    if switch is None:
        monkeypatch.delenv(native.SWITCH, raising=False)
    else:
        monkeypatch.setenv(native.SWITCH, switch)
    native.warn_if_missing.cache_clear()
    with caplog.at_level(logging.WARNING):
        native.warn_if_missing()
        native.warn_if_missing()
    native.warn_if_missing.cache_clear()
    said = [record.getMessage() for record in caplog.records]
    assert (
        said
        == [
            "imagecodecs decodes tiles in Python threads, which is slower, because no compiler is "
            "installed."
        ]
        * count
    )
