"""Nothing that a person typed about a patient stands in the window before one asks for it."""

import pytest
from napari.settings import get_plugin_settings
from qtpy.QtWidgets import QApplication, QTableWidget, QTreeView, QWidget

from tests.test_privacy_outlets import MARK, check
from tests.writers import gallery

FORMATS = ("ome-zarr", "aperio", "dicom", "mirax")
TEXTS = (
    "text",
    "toolTip",
    "accessibleName",
    "windowTitle",
    "statusTip",
    "placeholderText",
)


@pytest.fixture
def paths(tmp_path):
    return gallery.write_all(tmp_path, MARK, FORMATS).values()


def cells(model, parent):
    for row in range(model.rowCount(parent)):
        for column in range(model.columnCount(parent)):
            index = model.index(row, column, parent)
            yield f"{index.data()} {index.data(3)}"  # what is shown, and its tooltip
        yield from cells(model, model.index(row, 0, parent))


def texts(window):
    """Return all that the widgets of a window say."""
    for widget in window.findChildren(QWidget):
        yield from (str(getattr(widget, name)()) for name in TEXTS if hasattr(widget, name))
        if isinstance(widget, QTreeView | QTableWidget):
            yield from cells(widget.model(), widget.rootIndex())


@pytest.mark.window
def test_docks_and_clipboard(viewer, inspector, slide_is_open, settled, paths):
    for layer in slide_is_open(*paths):
        viewer.layers.selection.active = layer
        settled()
        for tab in range(inspector.tabs.native.count()):
            inspector.tabs.native.setCurrentIndex(tab)
            settled()
            check(" ".join(texts(viewer.window._qt_window)))
        inspector.metadata.copy_json.native.click()
        check(QApplication.clipboard().text())
    for layer in viewer.layers:
        check(f"{layer.name} {layer.metadata} {getattr(layer, 'features', '')}")


def test_all_is_said_to_those_who_ask(viewer, inspector, slide_is_open, settled, paths):
    get_plugin_settings("napari-wsigpu").slides.show_private = True
    for layer in slide_is_open(*paths):
        viewer.layers.selection.active = layer
        settled()
        inspector.metadata.copy_json.native.click()
        assert MARK in QApplication.clipboard().text()
    channel, labels = (
        [
            layer
            for layer in viewer.layers[:3]
            if MARK in layer.name and hasattr(layer, "features") == has
        ]
        for has in (False, True)
    )
    assert channel
    assert any(MARK in f"{layer.features}" for layer in labels)
