"""Requirements on every dock in the manifest."""

from pathlib import Path

import numpy as np
import pytest
from magicgui.widgets import Container
from npe2 import PluginManager
from qtpy.QtWidgets import (
    QAbstractButton,
    QAbstractItemView,
    QAbstractSlider,
    QComboBox,
    QLineEdit,
    QProgressBar,
    QScrollBar,
    QTabBar,
)

import napari_wsigpu
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.window.settings import PLUGIN

NAMES = ["Inspector", "Navigator", "Annotate", "Export", "Slides", "Channels"]
NARROWEST = 272  # pixels: as wide as napari's own docks are
USED = (QAbstractButton, QAbstractItemView, QAbstractSlider, QComboBox, QLineEdit, QProgressBar)


def docks():
    return PluginManager.instance().get_manifest(PLUGIN).contributions.widgets


def test_the_menu_lists_them_in_the_order_of_use(viewer):
    assert [dock.display_name for dock in docks()] == NAMES


def test_resources_lie_at_the_top_and_in_the_package():
    package = Path(napari_wsigpu.__file__).parent
    root = package.parent.parent
    if not (root / "pyproject.toml").exists():
        pytest.skip("this is no checkout")
    assert (root / "resources" / "he_phantom.svs").samefile(sample_path())
    assert sample_path().parent == package / "resources"


@pytest.mark.parametrize("name", NAMES)
def test_each_is_a_magicgui_container_that_may_be_narrow(
    viewer, add_dock, slide_is_open, settled, name
):
    dock = add_dock(name)
    slide_is_open(sample_path())
    settled()
    assert isinstance(dock, Container)
    assert dock.native._magic_widget is dock
    assert dock.native.minimumSizeHint().width() <= NARROWEST


@pytest.mark.window
def test_docks_and_layer_controls_fit_a_small_window(viewer, add_dock, slide_is_open, qtbot):
    slide_is_open(sample_path())
    for name in NAMES:
        add_dock(name)
    viewer.add_labels(np.zeros((8, 8), int))  # napari's tallest controls
    window = viewer.window._qt_window
    qtbot.waitUntil(lambda: window.minimumSizeHint().height() <= 450)
    window.resize(700, 450)
    qtbot.waitUntil(lambda: (window.width(), window.height()) == (700, 450))


@pytest.mark.parametrize("name", NAMES)
def test_what_can_be_used_has_a_name_for_screen_readers(
    viewer, add_dock, slide_is_open, settled, name
):
    dock = add_dock(name)
    slide_is_open(sample_path())
    settled()
    found = [part for kind in USED for part in dock.native.findChildren(kind)]
    inner = (QScrollBar, QTabBar)
    found = [part for part in found if not isinstance(part, inner) and not is_inner(part)]
    assert found
    assert [part for part in found if not (part.accessibleName() or part.toolTip())] == []


def is_inner(part):
    """Whether a part belongs to another one: the list of a combo box, the buttons of tabs."""
    parents, parent = [], part.parent()
    while parent is not None:
        parents.append(parent)
        parent = parent.parent()
    owners = (QAbstractItemView, QComboBox, QLineEdit, QTabBar)
    return any(isinstance(parent, owners) for parent in parents)
