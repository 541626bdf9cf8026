"""The inspector dock in a real napari window."""

import json

import numpy as np
import pytest
from qtpy.QtWidgets import QApplication

from napari_wsigpu.viewer.sample import sample_path


@pytest.fixture
def inspector(viewer):
    _, widget = viewer.window.add_plugin_dock_widget("napari-wsigpu", "Slide inspector")
    return widget


def labels(inspector):
    form = inspector.facts
    return {
        form.itemAt(row, form.ItemRole.LabelRole).widget().text(): form.itemAt(
            row, form.ItemRole.FieldRole
        )
        .widget()
        .text()
        for row in range(form.rowCount())
    }


def names(inspector, *, visible):
    table = inspector.fields
    return [
        table.item(row, 0).text()
        for row in range(table.rowCount())
        if not (visible and table.isRowHidden(row))
    ]


def test_is_empty_without_a_slide(viewer, inspector):
    assert inspector.slide is None
    assert not inspector.details.isVisible()
    viewer.add_image(np.zeros((8, 8)))
    assert inspector.slide is None


def test_follows_the_active_layer(viewer, inspector, write_channels):
    [first] = viewer.open(sample_path(), plugin="napari-wsigpu")
    assert "he_phantom.svs" in inspector.title.text()
    assert labels(inspector)["Objective"].startswith("20")
    assert inspector.levels.rowCount() == 4
    second = viewer.open(write_channels(2)[0], plugin="napari-wsigpu")
    assert "channels2.ome.tif" in inspector.title.text()
    viewer.layers.selection.active = first
    assert "he_phantom.svs" in inspector.title.text()
    viewer.layers.selection.active = second[1]
    assert labels(inspector)["Vendor"] == "generic-tiff"


def test_keeps_the_slide_under_other_layers_until_it_is_removed(viewer, inspector):
    [layer] = viewer.open(sample_path(), plugin="napari-wsigpu")
    shapes = viewer.add_shapes()
    viewer.layers.selection.active = shapes
    assert inspector.slide is layer.data[0].slide
    viewer.layers.remove(layer)
    assert inspector.slide is None


def test_search_filters_by_name_and_value(viewer, inspector):
    viewer.open(sample_path(), plugin="napari-wsigpu")
    everything = names(inspector, visible=True)
    assert "aperio.AppMag" in everything
    inspector.search.setText("appmag")
    assert "aperio.AppMag" in names(inspector, visible=True)
    assert "aperio.MPP" not in names(inspector, visible=True)
    inspector.search.setText("0.499")
    assert "aperio.MPP" in names(inspector, visible=True)
    inspector.search.clear()
    assert names(inspector, visible=True) == everything


def test_copies_all_metadata_as_json(viewer, inspector):
    [layer] = viewer.open(sample_path(), plugin="napari-wsigpu")
    inspector.copy.click()
    assert json.loads(QApplication.clipboard().text()) == layer.data[0].slide.metadata


def test_closed_dock_no_longer_follows(viewer, inspector, qtbot):
    viewer.window.remove_dock_widget(inspector)
    inspector.deleteLater()
    qtbot.wait(50)
    viewer.open(sample_path(), plugin="napari-wsigpu")
    viewer.layers.clear()
