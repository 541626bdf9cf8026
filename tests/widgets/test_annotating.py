"""Annotations belong to a slide: drawn, classified, undone and kept, by real clicks."""

import os
import stat
import subprocess
import sys
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from napari._qt.dialogs.confirm_close_dialog import ConfirmCloseDialog
from napari.layers import Labels, Points, Shapes
from napari.utils.colormaps.standardize_color import transform_color
from napari.utils.notifications import notification_manager
from qtpy.QtCore import QPoint, Qt, QTimer
from qtpy.QtGui import QCloseEvent, QColor
from qtpy.QtTest import QTest
from qtpy.QtWidgets import (
    QApplication,
    QColorDialog,
    QInputDialog,
    QMainWindow,
    QMessageBox,
    QProgressDialog,
)

import napari_wsigpu
from napari_wsigpu import Annotation, convert, read_geojson, write_geojson
from napari_wsigpu.annotations import recovery
from napari_wsigpu.annotations.rings import areas, joined
from napari_wsigpu.viewer.annotations import annotator
from napari_wsigpu.viewer.annotations.annotation_layers import (
    FOR_EXPORT,
    SLIDE,
    annotation_layers_of,
)
from napari_wsigpu.viewer.annotations.annotator import EDGE, SETTLED_MS, outline_width
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.layers.slide_layers import slide_name, slide_of
from napari_wsigpu.viewer.napari_internals import main_window
from napari_wsigpu.viewer.view.arrangement import show_side_by_side
from napari_wsigpu.viewer.view.navigation import screen_pixels, set_screen_pixels
from napari_wsigpu.viewer.window.docks import open_dock
from napari_wsigpu.viewer.window.settings import PLUGIN
from napari_wsigpu.widgets.annotations.annotation_dock import BEYOND, PATIENCE_MS
from napari_wsigpu.widgets.annotations.annotation_table import AnnotationTable
from napari_wsigpu.widgets.annotations.classes import (
    USUAL,
    keep_offered,
    new_color,
    offered_classes,
)
from tests.widgets.conftest import click, drag

pytestmark = pytest.mark.window

FIRST_TOOL = """
import sys, threading
import napari
from qtpy.QtTest import QTest
from napari_wsigpu.viewer.contributions.sample_slide import sample_path

viewer = napari.Viewer()
viewer.open(sample_path(), plugin="napari-wsigpu")
QTest.qWait(500)
_, dock = viewer.window.add_plugin_dock_widget("napari-wsigpu", "Annotate")
for _ in range(200):
    QTest.qWait(100)
    if not any(thread.name == "slide-preload" for thread in threading.enumerate()):
        break
before = set(sys.modules)
dock.tools["Rectangle"].native.click()
QTest.qWait(10)
print("IMPORTED", len(set(sys.modules) - before))
viewer.close()
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def dock(add_dock):
    return add_dock("Annotate")


@pytest.fixture
def slides(viewer, dock, slide_is_open, tmp_path, qtbot):
    """The layers of two slides, of which the second is shown alone."""
    viewer.window.resize(1000, 700)
    path = tmp_path / "dark.tif"
    convert(sample_path(), path, region=(1500, 1500, 1024, 1024))
    layers = slide_is_open(sample_path(), path)
    show(viewer, layers[1])
    return layers


def show(viewer, layer):
    """Switch to a slide by a click in the dock "Slides"."""
    _, dock = viewer.window.add_plugin_dock_widget(PLUGIN, "Slides")
    slides = [slide_of(each) for each in viewer.layers if slide_of(each) is not None]
    index = list(dict.fromkeys(slides)).index(slide_of(layer))
    table = dock.list.native
    middle = table.visualItemRect(table.item(index)).center()
    QTest.mouseClick(table.viewport(), Qt.LeftButton, pos=middle)
    QTest.qWait(100)
    napari_wsigpu.wait(layer)


def drag_and_wait(viewer, start, end):
    """Drag the mouse, and wait for what follows the drawing."""
    drag(viewer, start, end)
    QTest.qWait(250)


[MITOSIS] = transform_color(new_color("Mitosis", USUAL))


def press(button):
    widget = button.native
    assert widget.isEnabled()
    QTest.mouseClick(widget, Qt.LeftButton, pos=widget.rect().center())
    QTest.qWait(50)


def draw(viewer, dock, start=(0.4, 0.4), end=(0.6, 0.6), tool="Rectangle"):
    press(dock.tools[tool])
    drag_and_wait(viewer, start, end)
    return viewer.layers.selection.active


def keys(viewer, key, modifier):
    window = viewer.window._qt_window
    window.activateWindow()
    assert QTest.qWaitForWindowActive(window)
    QTest.keyClick(viewer.window._qt_viewer.canvas.native, key, modifier)
    QTest.qWait(50)


def classes(layer):
    return list(layer.features["class"])


@pytest.mark.parametrize("tool", ["Rectangle", "Point"])
def test_the_tool_is_kept_on_another_slide(viewer, dock, slides, tool):
    press(dock.chips["Tumor"])
    press(dock.tools[tool])
    show(viewer, slides[0])
    assert dock.slide is slide_of(slides[0])
    assert dock.tools[tool].native.isChecked()
    assert len(viewer.layers) == 4
    show(viewer, slides[1])  # nothing was drawn, so no layer is left
    assert dock.tools[tool].native.isChecked()
    assert len(viewer.layers) == 3
    show(viewer, slides[0])
    drag_and_wait(viewer, (0.4, 0.4), (0.4, 0.4) if tool == "Point" else (0.6, 0.6))
    layer = viewer.layers.selection.active
    assert layer.metadata[SLIDE] == slide_of(slides[0]).path
    assert classes(layer) == ["Tumor"]
    show(viewer, slides[1])
    assert layer in viewer.layers
    assert not layer.visible
    press(dock.tools["Select"])
    show(viewer, slides[0])
    assert not dock.tools[tool].native.isChecked()


@pytest.mark.parametrize("tool", ["Rectangle", "Point"])
@pytest.mark.parametrize("arrange", ["side_by_side", "all", None])
def test_the_tool_is_kept_when_the_slide_is_shown_alone(viewer, dock, slides, tool, arrange):
    _, switcher = viewer.window.add_plugin_dock_widget(PLUGIN, "Slides")
    press(dock.tools["Outline"])
    show(viewer, slides[0])
    drag_and_wait(viewer, (0.4, 0.4), (0.6, 0.6))
    show(viewer, slides[1])
    for layer in slides:
        if arrange:
            press(getattr(switcher, arrange))
        press(dock.tools[tool])
        show(viewer, layer)
        assert [name for name, each in dock.tools.items() if each.native.isChecked()] == [tool]
        assert viewer.layers.selection.active.metadata[SLIDE] == slide_of(layer).path


def test_each_slide_has_annotations_of_its_own(viewer, dock, slides, answer, tmp_path, settled):
    first, second = slides
    on_second = draw(viewer, dock)
    show(viewer, first)
    assert not on_second.visible
    assert dock.slide is slide_of(first)
    assert len(dock.rows) == 0
    on_first = draw(viewer, dock)
    drag_and_wait(viewer, (0.3, 0.3), (0.35, 0.35))
    assert on_first is not on_second
    assert len(dock.rows) == 2
    for layer, slide_layer in ((on_first, first), (on_second, second)):
        slide = slide_of(slide_layer)
        assert layer.metadata[SLIDE] == slide.path
        assert layer.name == f"{slide_layer.name} annotations"
        np.testing.assert_allclose(layer.scale, slide_layer.scale)
        np.testing.assert_allclose(layer.translate, slide_layer.translate)
        assert [*layer.units] == [*slide_layer.units]
    for count, layer in ((2, first), (1, second)):
        show(viewer, layer)
        assert (on_first.visible, on_second.visible) == (layer is first, layer is second)
        target = tmp_path / f"{count}.geojson"
        answer(target)
        press(dock.export)
        settled()
        assert len(read_geojson(target)) == count
    assert dock.rows.measurement(0).area == pytest.approx(
        read_areas(tmp_path / "1.geojson", second), rel=1e-3
    )


def read_areas(path, layer):
    [annotation] = read_geojson(path)
    width, height = np.ptp(annotation.rings[0], axis=0) * slide_of(layer).mpp
    return width * height


@pytest.mark.parametrize("on_screen", [0.15, 1.0, 2.0])
def test_outlines_are_thin_at_every_zoom(viewer, dock, slides, on_screen):
    layer = slides[1]
    press(dock.chips["Tumor"])
    shapes = draw(viewer, dock, (0.45, 0.45), (0.55, 0.55))
    assert shapes.face_color[0].tolist() == pytest.approx([200 / 255, 0, 0, 0x26 / 255], abs=0.01)
    set_screen_pixels(viewer, layer, on_screen)
    QTest.qWait(300)
    assert shapes.edge_width[0] * screen_pixels(viewer, shapes) == pytest.approx(EDGE)
    shapes.selected_data = set()
    layer.visible = False
    picture = viewer.screenshot(flash=False)[..., :3].astype(int)
    shapes.visible = False
    change = np.abs(picture - viewer.screenshot(flash=False)[..., :3]).max(axis=2)
    # Along a row through the middle there is an edge, the light fill, and an edge.
    inside = np.argwhere(change > 5)
    middle = int(np.median(inside[:, 0]))
    strong = np.flatnonzero(change[middle] > 120)
    assert 2 <= len(strong) <= 2 * (EDGE + 1)


def test_imported_outlines_are_thin_too(viewer, dock, slides, answer, tmp_path, settled):
    path = tmp_path / "cells.geojson"
    square = np.array([(100, 100), (160, 100), (160, 160), (100, 160)], float)
    write_geojson(path, [Annotation("polygon", (square + at,)) for at in range(0, 700, 100)])
    answer(path)
    press(dock.load)
    settled()
    QTest.qWait(300)
    shapes = viewer.layers[-1]
    assert set(shapes.edge_width) == {outline_width(viewer, shapes)}
    assert len(dock.rows) == 7


def test_classes_are_chips_with_keys(viewer, dock, slides):
    press(dock.chips["Stroma"])
    shapes = draw(viewer, dock)
    assert classes(shapes) == ["Stroma"]
    drag_and_wait(viewer, (0.2, 0.2), (0.3, 0.3))
    assert classes(shapes) == ["Stroma", "Stroma"]
    shapes.selected_data = {0}
    keys(viewer, Qt.Key_1, Qt.AltModifier)
    assert classes(shapes) == ["Tumor", "Stroma"]
    press(dock.tools["Point"])
    drag_and_wait(viewer, (0.7, 0.7), (0.7, 0.7))
    points = viewer.layers.selection.active
    assert isinstance(points, Points)
    assert classes(points) == ["Tumor"]
    assert [dock.rows.text(row, 0) for row in range(3)] == ["Tumor", "Stroma", "Tumor"]
    assert dock.rows.text(2, 4) == "point"
    press(dock.tools["Select"])
    # A selected point is given a class, and no shape that is selected in another layer.
    shapes.selected_data = {0, 1}
    points.selected_data = {0}
    viewer.layers.selection.active = points
    QTest.keyClicks(dock.own_class.native, "Mitosis")
    press(dock.classify)
    assert classes(points) == ["Mitosis"]
    assert classes(shapes) == ["Tumor", "Stroma"]
    assert "Mitosis" in dock.chips
    np.testing.assert_allclose(points.face_color[0], MITOSIS, atol=0.01)
    assert not dock.own_class.value
    assert not dock.classify.native.isEnabled()
    QTest.keyClick(dock.own_class.native, Qt.Key_Return)
    assert classes(points) == ["Mitosis"]
    press(dock.unclassify)
    assert classes(points) == [""]
    np.testing.assert_allclose(points.face_color[0], [1, 0, 0, 1], atol=0.01)


CLASS_COLORS = {"": (255, 0, 0), "Tumor": (200, 0, 0), "Stroma": (150, 200, 150)}


def assert_marked(dock, layer, index, name):
    """Check that button, table, color and exported object agree on the class of an object."""
    QTest.qWait(3 * PATIENCE_MS)
    marked = [each for each, chip in dock.chips.items() if chip.native.isChecked()]
    assert marked == ([name] if name else [])
    assert classes(layer)[index] == name
    [row] = dock.rows.rows_of(layer, [index])
    assert dock.rows.text(row, 0) == name
    colors = layer.face_color if isinstance(layer, Points) else layer.edge_color
    np.testing.assert_allclose(colors[index][:3] * 255, CLASS_COLORS[name], atol=1)
    exported = dock.keeper.annotations(dock.slide)
    assert Counter(each.classification for each in exported)[name] > 0


def test_undo_keeps_the_class_of_the_next_object(viewer, dock, slides):
    press(dock.chips["Tumor"])
    shapes = draw(viewer, dock, (0.2, 0.2), (0.3, 0.3))
    press(dock.tools["Rectangle"])
    press(dock.chips["Stroma"])
    drag_and_wait(viewer, (0.4, 0.4), (0.5, 0.5))
    assert_marked(dock, shapes, 1, "Stroma")
    keys(viewer, Qt.Key_Z, Qt.ControlModifier)
    drag_and_wait(viewer, (0.6, 0.6), (0.7, 0.7))
    assert_marked(dock, shapes, 1, "Stroma")
    press(dock.undo)
    press(dock.redo)
    press(dock.unclassify)
    press(dock.tools["Rectangle"])
    press(dock.undo)
    drag_and_wait(viewer, (0.8, 0.8), (0.9, 0.9))
    assert_marked(dock, shapes, len(shapes.data) - 1, "")


def test_undone_class_change_keeps_the_class_of_the_next_object(viewer, dock, slides):
    press(dock.chips["Tumor"])
    shapes = draw(viewer, dock, (0.2, 0.2), (0.3, 0.3))
    press(dock.tools["Select"])
    drag_and_wait(viewer, (0.25, 0.25), (0.25, 0.25))
    keys(viewer, Qt.Key_2, Qt.AltModifier)
    assert classes(shapes) == ["Stroma"]
    QTest.qWait(2 * SETTLED_MS)
    keys(viewer, Qt.Key_Z, Qt.ControlModifier)
    assert classes(shapes) == ["Tumor"]
    shapes.mode = "add_rectangle"  # as by napari's layer controls
    drag_and_wait(viewer, (0.5, 0.5), (0.6, 0.6))
    assert_marked(dock, shapes, 1, "Stroma")


@pytest.mark.parametrize("tool", ["Rectangle", "Point"])
def test_changed_objects_keep_the_class_of_the_next_object(viewer, dock, slides, tool):
    ends = [(0.3, 0.3), (0.5, 0.5), (0.7, 0.7)]
    press(dock.chips["Tumor"])
    layer = draw(viewer, dock, ends[0], ends[0] if tool == "Point" else (0.4, 0.4), tool)
    press(dock.tools[tool])
    press(dock.chips["Stroma"])
    drag_and_wait(viewer, ends[1], ends[1] if tool == "Point" else (0.6, 0.6))
    assert_marked(dock, layer, 1, "Stroma")
    keys(viewer, Qt.Key_Delete, Qt.NoModifier)
    dock._edit(0, 1, "gland")
    dock.table.native.selectRow(0)  # the Tumor
    QTest.qWait(3 * PATIENCE_MS)
    assert classes(layer) == ["Tumor"]
    drag_and_wait(viewer, ends[2], ends[2] if tool == "Point" else (0.8, 0.8))
    assert_marked(dock, layer, 1, "Stroma")
    assert list(layer.features["name"]) == ["gland", ""]


def test_other_layers_keep_the_class_of_the_next_object(
    viewer, dock, slides, answer, tmp_path, settled
):
    path = tmp_path / "tumors.geojson"
    square = np.array([(100, 100), (160, 100), (160, 160), (100, 160)], float)
    write_geojson(path, [Annotation("polygon", (square,), "old", "Tumor", (200, 0, 0))])
    press(dock.chips["Stroma"])
    answer(path)
    press(dock.load)
    settled()
    shapes = draw(viewer, dock, (0.6, 0.6), (0.7, 0.7))
    assert_marked(dock, shapes, 1, "Stroma")
    show(viewer, slides[0])
    assert_marked(dock, draw(viewer, dock), 0, "Stroma")
    show(viewer, slides[1])
    viewer.layers.selection.active = shapes
    keys(viewer, Qt.Key_Z, Qt.ControlModifier)
    drag_and_wait(viewer, (0.8, 0.8), (0.9, 0.9))
    assert_marked(dock, shapes, 1, "Stroma")


def test_layers_without_classes_are_drawn_in(viewer, dock, slides):
    viewer.layers.remove(slides[0])
    viewer.layers.selection.active = slides[1]
    press(dock.chips["Tumor"])
    free = viewer.add_shapes(scale=slides[1].scale, units=slides[1].units)
    assert draw(viewer, dock) is free
    assert_marked(dock, free, 0, "Tumor")


@pytest.mark.parametrize("tool", ["Rectangle", "Outline", "Line", "Point"])
def test_class_chosen_while_drawing_is_for_the_next_object(viewer, dock, slides, tool):
    ends = [(0.3, 0.3), (0.5, 0.5), (0.7, 0.7)]
    press(dock.tools[tool])
    layer = viewer.layers.selection.active
    chosen = ["Tumor", "Stroma", "Mitosis"]
    for name, (x, y) in zip(chosen, ends, strict=True):
        if name == "Stroma":
            keys(viewer, Qt.Key_2, Qt.AltModifier)
        elif name in dock.chips:
            press(dock.chips[name])
        else:
            QTest.keyClicks(dock.own_class.native, name)
            press(dock.classify)
        if tool == "Outline":
            circle(viewer, (x, y))
        else:
            drag_and_wait(viewer, (x, y), (x, y) if tool == "Point" else (x + 0.1, y + 0.1))
    press(dock.unclassify)
    assert "next objects will be 'None'. To change the 'Mitosis'" in dock.status.value
    QTest.qWait(3 * PATIENCE_MS)
    assert classes(layer) == chosen
    # Objects that the user selects are reclassified, also the last one, whose row is selected.
    assert dock.table.selection == [2]
    for row in (2, 0):
        click_row(dock, row)
        press(dock.chips["Necrosis"])
        QTest.qWait(3 * PATIENCE_MS)
    assert classes(layer) == ["Necrosis", "Stroma", "Necrosis"]
    press(dock.tools["Select"])
    layer.selected_data = {1, 2}
    press(dock.chips["Other"])
    assert classes(layer) == ["Necrosis", "Other", "Other"]


@pytest.mark.parametrize("tool", ["Rectangle", "Point"])
def test_class_chosen_after_drawing_is_also_for_an_object_without_one(viewer, dock, slides, tool):
    press(dock.tools[tool])
    layer = viewer.layers.selection.active
    for number, key in enumerate((Qt.Key_1, Qt.Key_2)):
        place = 0.2 + 0.2 * number
        drag_and_wait(viewer, (place, place), (place, place) if tool == "Point" else (0.7, 0.7))
        keys(viewer, key, Qt.AltModifier)
        QTest.qWait(3 * PATIENCE_MS)
    assert classes(layer) == ["Tumor", "Tumor"]
    drag_and_wait(viewer, (0.5, 0.3), (0.5, 0.3) if tool == "Point" else (0.8, 0.8))
    assert classes(layer) == ["Tumor", "Tumor", "Stroma"]
    QTest.qWait(3 * PATIENCE_MS)
    press(dock.undo)
    press(dock.undo)
    press(dock.undo)
    assert classes(layer) == [""]


def test_size_of_a_drawn_object_is_shown(viewer, dock, slides, qtbot):
    shapes = draw(viewer, dock, (0.1, 0.1), (0.2, 0.2))
    qtbot.waitUntil(lambda: dock.status.value.startswith("Area "))
    x, y = slide_of(slides[1]).mpp
    for place in (0.2, 0.3, 0.4, 0.5, 0.6):
        press(dock.tools["Line"])
        assert dock.status.value == "Draw lines on the slide."
        drag_and_wait(viewer, (0.1, place), (place, place))
        QTest.qWait(3 * PATIENCE_MS)
        length = np.hypot(*(np.diff(shapes.data[-1], axis=0)[0] * (y, x)))
        assert dock.status.value == f"Length {length:.4g} µm"
        assert dock.status.native.isVisible()
        last = len(shapes.data) - 1
        assert dock.table.selection == [last]
        table = dock.table.native
        shown = table.visualRect(table.model().index(last, 1))
        assert table.viewport().rect().contains(shown.center())
    keys(viewer, Qt.Key_Delete, Qt.NoModifier)
    QTest.qWait(3 * PATIENCE_MS)
    assert len(shapes.data) == last
    assert dock.status.value == "Draw lines on the slide."
    drag_and_wait(viewer, (0.1, 0.7), (0.3, 0.7))
    assert dock.status.value.startswith("Length ")
    press(dock.copy)
    QTest.qWait(3 * PATIENCE_MS)
    assert dock.status.value == "Copied 1 row."
    drag_and_wait(viewer, (0.1, 0.8), (0.3, 0.8))
    assert dock.status.value.startswith("Length ")
    shapes.mode = "pan_zoom"
    assert not dock.status.native.isVisible()
    press(dock.tools["Point"])
    assert dock.status.value == "Place points on the slide."
    drag_and_wait(viewer, (0.7, 0.7), (0.7, 0.7))
    QTest.qWait(3 * PATIENCE_MS)
    assert dock.status.value == ""


def circle(viewer, center):
    """Draw around a place with the mouse held down."""
    canvas = viewer.window._qt_viewer.canvas.native
    size, turn = (canvas.width(), canvas.height()), np.linspace(0, 2 * np.pi, 12)
    around = np.array(center) + 0.06 * np.stack([np.cos(turn), np.sin(turn)], axis=1)
    first, *others = [QPoint(*(size * each).astype(int).tolist()) for each in around]
    QTest.mouseMove(canvas, first)
    QTest.mousePress(canvas, Qt.LeftButton, Qt.NoModifier, first)
    for each in others:
        QTest.mouseMove(canvas, each)
        QTest.qWait(20)
    QTest.mouseRelease(canvas, Qt.LeftButton, Qt.NoModifier, others[-1])
    QTest.qWait(250)


def test_an_outline_ends_where_the_mouse_is_released(viewer, dock, slides):
    """Also if its last side is straight."""
    canvas = viewer.window._qt_viewer.canvas.native
    press(dock.tools["Outline"])
    middle = np.array([canvas.width() // 2, canvas.height() // 2])
    corners = middle + np.array([(0, 0), (80, 0), (80, 60), (0, 60)])
    points = [QPoint(*corners[0])]
    for first, last in pairwise(corners):
        points += [QPoint(*(first + (last - first) * k // 16)) for k in range(1, 17)]
    QTest.mouseMove(canvas, points[0])
    QTest.mousePress(canvas, Qt.LeftButton, Qt.NoModifier, points[0])
    for each in points[1:]:
        QTest.mouseMove(canvas, each)
        QTest.qWait(10)
    QTest.mouseRelease(canvas, Qt.LeftButton, Qt.NoModifier, points[-1])
    QTest.qWait(250)
    [outline] = viewer.layers.selection.active.data
    size = 1 / viewer.scene.camera.zoom / viewer.layers.selection.active.scale[-1]
    expected = abs(areas([outline])[0]) / (80 * 60 * size**2)
    assert expected == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(
    ("end", "modifier", "expected"),
    [
        ((80, 0), Qt.NoModifier, (80, 0)),
        ((0, -80), Qt.NoModifier, (0, -80)),
        ((80, 1), Qt.NoModifier, (80, 1)),
        ((-60, 80), Qt.NoModifier, (-60, 80)),
        ((80, 5), Qt.ShiftModifier, (np.hypot(80, 5), 0)),
        ((60, 50), Qt.ShiftModifier, np.hypot(60, 50) / np.sqrt(2) * np.ones(2)),
    ],
)
def test_a_line_ends_where_the_mouse_is_released(viewer, dock, slides, end, modifier, expected):
    """Also if it is horizontal or vertical; with Shift in steps of 45 degrees."""
    canvas = viewer.window._qt_viewer.canvas.native
    press(dock.tools["Line"])
    first = QPoint(canvas.width() // 2, canvas.height() // 2)
    last = first + QPoint(*end)
    QTest.mouseMove(canvas, first)
    QTest.mousePress(canvas, Qt.LeftButton, modifier, first)
    QTest.mouseMove(canvas, (first + last) / 2)
    QTest.qWait(30)
    QTest.mouseMove(canvas, last)
    QTest.qWait(30)
    QTest.mouseRelease(canvas, Qt.LeftButton, modifier, last)
    QTest.qWait(250)
    layer = viewer.layers.selection.active
    [(start, stop)] = layer.data
    found = (stop - start)[::-1] * layer.scale[-1] * viewer.scene.camera.zoom
    np.testing.assert_allclose(found, expected, atol=0.01)


def click_corners(viewer, count=4):
    """Click the corners of a polygon; return the canvas and the last corner."""
    canvas = viewer.window._qt_viewer.canvas.native
    middle = QPoint(canvas.width() // 2, canvas.height() // 2)
    for corner in ((0, 0), (90, 0), (90, 60), (0, 60))[:count]:
        place = middle + QPoint(*corner)
        QTest.mouseMove(canvas, place)
        QTest.qWait(500)  # two clicks in a shorter time are a double click
        QTest.mouseClick(canvas, Qt.LeftButton, Qt.NoModifier, place)
    return canvas, place


def test_ellipses_and_polygons_are_drawn(viewer, dock, slides, qtbot):
    shapes = draw(viewer, dock, (0.2, 0.2), (0.4, 0.5), "Ellipse")
    assert shapes.shape_type == ["ellipse"]
    [drawn] = dock.keeper.annotations(dock.slide)
    assert drawn.kind == "ellipse"
    qtbot.waitUntil(lambda: dock.status.value.startswith("Area "))
    press(dock.tools["Polygon"])
    assert dock.status.value == "Click the corners of an outline; a double click ends it."
    canvas, place = click_corners(viewer)
    QTest.mouseDClick(canvas, Qt.LeftButton, Qt.NoModifier, place)
    QTest.qWait(3 * PATIENCE_MS)
    assert shapes.shape_type == ["ellipse", "polygon"]
    size = 1 / viewer.scene.camera.zoom / shapes.scale[-1]
    assert abs(areas([shapes.data[1]])[0]) == pytest.approx(90 * 60 * size**2, rel=0.03)
    press(dock.undo)
    assert shapes.shape_type == ["ellipse"]


@pytest.mark.parametrize("tool", ["Rectangle", "Ellipse", "Line", "Outline"])
@pytest.mark.parametrize("moves_on", [False, True])
def test_escape_drops_the_object_that_is_dragged(viewer, dock, slides, tool, moves_on):
    shapes = draw(viewer, dock, (0.1, 0.1), (0.3, 0.3))
    press(dock.tools[tool])
    canvas = viewer.window._qt_viewer.canvas.native
    middle = QPoint(canvas.width() // 2, canvas.height() // 2)
    QTest.mousePress(canvas, Qt.LeftButton, Qt.NoModifier, middle)
    for step in range(8):
        QTest.mouseMove(canvas, middle + QPoint(10 * step, 4 * step * step))
        QTest.qWait(20)
        if step == 4:
            keys(viewer, Qt.Key_Escape, Qt.NoModifier)
            if not moves_on:
                break
    QTest.mouseRelease(canvas, Qt.LeftButton, Qt.NoModifier, middle + QPoint(50, 60))
    QTest.qWait(3 * PATIENCE_MS)
    assert shapes.shape_type == ["rectangle"]
    assert len(shapes.features) == len(dock.rows) == 1
    drag_and_wait(viewer, (0.6, 0.6), (0.8, 0.7))
    assert len(shapes.data) == (1 if tool == "Outline" else 2)  # a straight outline has no area


@pytest.mark.parametrize("count", [1, 2, 3])
def test_undo_removes_an_unfinished_polygon_only(viewer, dock, slides, count):
    shapes = draw(viewer, dock, (0.1, 0.1), (0.3, 0.3))
    press(dock.tools["Polygon"])
    click_corners(viewer, count)
    keys(viewer, Qt.Key_2, Qt.AltModifier)
    QTest.qWait(3 * PATIENCE_MS)
    press(dock.copy)
    keys(viewer, Qt.Key_Z, Qt.ControlModifier)
    QTest.qWait(3 * PATIENCE_MS)
    assert shapes.shape_type == ["rectangle"]
    assert len(shapes.features) == len(dock.rows) == 1
    canvas, place = click_corners(viewer)
    keys(viewer, Qt.Key_Z, Qt.ControlModifier | Qt.ShiftModifier)  # nothing to redo
    QTest.mouseDClick(canvas, Qt.LeftButton, Qt.NoModifier, place)
    QTest.qWait(3 * PATIENCE_MS)
    assert shapes.shape_type == ["rectangle", "polygon"]
    for left in (1, 0):
        press(dock.undo)
        assert len(shapes.data) == left


@pytest.mark.parametrize("then", ["Polygon", "Select", "Point", "other slide", "napari's button"])
def test_whatever_comes_next_ends_a_polygon_at_its_last_corner(viewer, dock, slides, then):
    press(dock.tools["Polygon"])
    shapes = viewer.layers.selection.active

    def go_on():
        if then == "other slide":
            show(viewer, slides[0])
            show(viewer, slides[1])
        elif then in dock.tools:
            press(dock.tools[then])
        else:
            viewer.window._qt_viewer.controls.widgets[shapes].select_button.click()
        QTest.qWait(3 * PATIENCE_MS)

    click_corners(viewer, 1)
    go_on()
    assert len(dock.rows) == 0
    press(dock.tools["Polygon"])
    canvas, place = click_corners(viewer, 3)
    QTest.mouseMove(canvas, place - QPoint(50, -20))
    go_on()
    assert shapes.shape_type == ["polygon"]
    assert len(shapes.data[0]) == 3
    press(dock.undo)
    assert len(dock.rows) == 0


@pytest.mark.parametrize("mode", ["direct", "vertex_remove"])
@pytest.mark.parametrize("vertex", [0, 5, 3])  # of the outer ring, where the hole starts, another
def test_holes_survive_changes_of_vertices(
    viewer, dock, slides, answer, tmp_path, settled, mode, vertex
):
    square = np.array([(0, 0), (0, 400), (400, 400), (400, 0)], float)
    rings = square + 300, square[::-1] / 4 + 450
    source = tmp_path / "hole.geojson"
    write_geojson(source, [Annotation("polygon", rings)])
    answer(source)
    click(dock.load)
    settled()
    shapes = viewer.layers[-1]
    viewer.layers.selection.active, shapes.mode, shapes.selected_data = shapes, mode, {0}
    QTest.qWait(50)
    canvas, camera = viewer.window._qt_viewer.canvas.native, viewer.scene.camera
    size = np.array([canvas.height(), canvas.width()])
    middle = np.array(shapes.data_to_world(shapes.data[0][vertex])[-2:])
    start = ((middle - camera.center[-2:]) * camera.zoom / size + 0.5)[::-1]
    drag(viewer, start, start + np.array([0.04, 0.03]) * (mode == "direct"))
    QTest.qWait(3 * PATIENCE_MS)
    [found] = dock.keeper.annotations(dock.slide)
    outer, hole = found.rings
    removed = mode == "vertex_remove"
    assert len(outer) + len(hole) == 8 - removed
    changed = joined(rings)[vertex]
    assert not (np.concatenate(found.rings).round() == changed).all(axis=1).any()


def click_row(dock, row):
    table = dock.table.native
    dock.details.native.ensureWidgetVisible(table)
    index = table.model().index(row, 0)
    table.scrollTo(index)
    QTest.mouseClick(table.viewport(), Qt.LeftButton, pos=table.visualRect(index).center())
    QTest.qWait(50)


def test_new_chips_take_the_place_of_the_old_ones(viewer, dock, slides):
    before = [chip.native.geometry() for chip in dock.chips.values()]
    QTest.keyClicks(dock.own_class.native, "Mitosis")
    press(dock.classify)
    assert [chip.native.geometry() for chip in dock.chips.values()][:-1] == before


def test_classifying_refreshes_the_table_once(viewer, dock, slides, monkeypatch):
    shapes = draw(viewer, dock)
    press(dock.tools["Select"])
    shapes.selected_data = {0}
    QTest.qWait(3 * PATIENCE_MS)
    made, shown = AnnotationTable.of, []

    def of(*arguments):
        shown.append(made(*arguments))
        return shown[-1]

    monkeypatch.setattr(AnnotationTable, "of", of)
    press(dock.chips["Stroma"])
    QTest.qWait(3 * PATIENCE_MS)
    assert [rows.text(0, 0) for rows in shown] == ["Stroma"]


def test_objects_that_are_drawn_fast_are_undone_one_by_one(viewer, dock, slides):
    press(dock.tools["Rectangle"])
    for place in (0.2, 0.4, 0.6):
        drag(viewer, (place, place), (place + 0.1, place + 0.1))
    shapes = viewer.layers.selection.active
    for left in (2, 1, 0):
        assert len(shapes.data) == left + 1
        press(dock.undo)
        assert len(shapes.data) == left


@pytest.mark.parametrize("tool", ["Rectangle", "Point"])
def test_what_is_drawn_after_an_import_is_an_object_of_its_own(
    viewer, dock, slides, answer, tmp_path, settled, tool
):
    square = np.array([[100.0, 100], [200, 100], [200, 200], [100, 200]])
    kind = "points" if tool == "Point" else "polygon"
    number = "0f0e0d0c-1111-4222-8333-444455556666"
    several = Annotation(
        kind, (square,), "counted", "Mitosis", id=number, measurements={"Area": 3.0}
    )
    write_geojson(tmp_path / "a.geojson", [several])
    answer(tmp_path / "a.geojson")
    press(dock.load)
    settled()
    for name, at in (("Immune cells", 0.3), ("Immune cells", 0.5), ("Mitosis", 0.7)):
        press(dock.chips[name])
        draw(viewer, dock, (at, at), (at, at) if tool == "Point" else (at + 0.1, at + 0.1), tool)
    imported, *drawn = dock.keeper.annotations(dock.slide)
    assert (imported.name, imported.id, imported.measurements) == ("counted", number, {"Area": 3.0})
    np.testing.assert_allclose(imported.rings[0], square)
    expected = {"Immune cells": 2, "Mitosis": 1}
    if tool == "Point":  # points of a class are one object
        assert {each.classification: len(each.rings[0]) for each in drawn} == expected
    else:
        assert Counter(each.classification for each in drawn) == expected
    assert all(each.name == "" and each.measurements == {} for each in drawn)
    # Other files, and those of other programs, recognize the objects by their ids.
    ids = [each.id for each in (imported, *drawn)]
    assert len({*ids} - {""}) == len(drawn) + 1
    assert [each.id for each in dock.keeper.annotations(dock.slide)] == ids


def test_annotations_that_are_opened_first_are_placed_on_their_slide(viewer, dock, tmp_path):
    square = np.array([[100.0, 100], [200, 100], [200, 200], [100, 200]])
    found = [Annotation(kind, (square,), "ours", "Tumor") for kind in ("polygon", "points")]
    path = tmp_path / "he_phantom.geojson"
    write_geojson(path, found)
    viewer.open([path, sample_path()], plugin=PLUGIN)
    [shapes, points, slide] = sorted(viewer.layers, key=lambda each: type(each).__name__)[::-1]
    shapes, points = points, shapes
    for layer in (shapes, points):
        np.testing.assert_allclose(layer.scale, slide.scale[-2:])
        assert layer.units == slide.units
    assert all(viewer.layers.index(each) > viewer.layers.index(slide) for each in (shapes, points))
    outline, spots = dock.keeper.annotations(dock.slide)
    np.testing.assert_allclose(outline.rings[0], square, atol=0.01)
    np.testing.assert_allclose(spots.rings[0], square, atol=0.01)
    QTest.qWait(2 * SETTLED_MS + PATIENCE_MS)
    assert len(dock.rows) == 5
    step = dock.slide.mpp[0]
    assert dock.rows.sizes(0).startswith(f"Area {round(100 * 100 * step * step):,}")


def test_changes_are_undone_and_made_again(viewer, dock, slides):
    first, second = slides
    steps = [dock.undo.native, dock.redo.native]
    assert [each.isEnabled() for each in steps] == [False, False]
    shapes = draw(viewer, dock)
    assert [each.isEnabled() for each in steps] == [True, False]
    drag_and_wait(viewer, (0.2, 0.2), (0.3, 0.3))
    before = [np.array(each) for each in shapes.data]
    shapes.selected_data = {0}
    press(dock.chips["Necrosis"])
    QTest.qWait(200)
    shapes.selected_data = {0}
    shapes.remove_selected()
    QTest.qWait(200)
    assert len(shapes.data) == 1
    keys(viewer, Qt.Key_Z, Qt.ControlModifier)
    assert classes(shapes) == ["Necrosis", ""]
    for each, was in zip(shapes.data, before, strict=True):
        np.testing.assert_allclose(each, was)
    press(dock.undo)
    assert classes(shapes) == ["", ""]
    np.testing.assert_allclose(shapes.edge_color[0], [1, 0, 0, 1], atol=0.01)
    show(viewer, first)
    assert [each.isEnabled() for each in steps] == [False, False]  # on this slide
    keys(viewer, Qt.Key_Z, Qt.ControlModifier)
    assert len(shapes.data) == 2
    show(viewer, second)
    assert [each.isEnabled() for each in steps] == [True, True]
    press(dock.undo)
    press(dock.undo)
    assert len(shapes.data) == 0
    assert [each.isEnabled() for each in steps] == [False, True]
    for count in (1, 2, 2, 1):
        press(dock.redo)
        assert len(shapes.data) == count
    np.testing.assert_allclose(shapes.data[0], before[1])


@pytest.mark.parametrize("tool", ["Rectangle", "Point"])
def test_objects_stay_selected_when_their_class_is_undone(viewer, dock, slides, tool):
    for place in (0.2, 0.5):
        end = place if tool == "Point" else place + 0.1
        layer = draw(viewer, dock, (place, place), (end, end), tool)
    press(dock.tools["Select"])
    layer.selected_data = {0}
    press(dock.chips["Necrosis"])
    QTest.qWait(3 * SETTLED_MS)
    for step, expected in ((dock.undo, ""), (dock.redo, "Necrosis"), (dock.undo, "")):
        press(step)
        assert classes(layer) == [expected, ""]
        assert (set(layer.selected_data), dock.table.selection) == ({0}, [0])
    press(dock.undo)  # of the second object
    assert set(layer.selected_data) == set()


@pytest.mark.parametrize("tool", ["Rectangle", "Point"])
def test_a_slow_drag_of_an_object_is_one_step(viewer, dock, slides, tool):
    start = (0.5, 0.5)
    layer = draw(viewer, dock, start, (0.6, 0.6) if tool == "Rectangle" else start, tool)
    before = np.array(layer.data[0])
    press(dock.tools["Select"])
    drag(viewer, start if tool == "Point" else (0.55, 0.55), (0.7, 0.7), pause=3 * SETTLED_MS)
    QTest.qWait(3 * SETTLED_MS)
    after = np.array(layer.data[0])
    assert not np.allclose(before, after)
    press(dock.undo)
    np.testing.assert_allclose(layer.data[0], before)
    press(dock.redo)
    np.testing.assert_allclose(layer.data[0], after)


def test_messages_move_no_button(viewer, dock, slides):
    draw(viewer, dock)
    QTest.qWait(3 * PATIENCE_MS)
    heights = set()
    for text in ("", "One line.", "Two lines " + 40 * "."):
        dock.status.say(text)
        QTest.qWait(50)
        heights.add(dock.undo.native.mapTo(viewer.window._qt_window, QPoint(0, 0)).y())
    assert len(heights) == 1


def test_hints_and_problems_go_when_they_no_longer_apply(viewer, dock, slides):
    press(dock.tools["Select"])
    assert dock.status.value == "There is nothing to select yet."
    assert dock.nothing.value.startswith("Nothing has been drawn yet")
    press(dock.export)
    assert dock.status.value.startswith("There is nothing to export")
    layer = draw(viewer, dock)
    for tool in ("Line", "Select"):
        press(dock.tools[tool])
        assert dock.status.value == f"{dock.tools[tool].tooltip}."
    drag_and_wait(viewer, (0.5, 0.5), (0.5, 0.5))
    assert dock.status.native.isVisible()  # the tool is still in use
    viewer.layers.selection.active.mode = "pan_zoom"
    assert not dock.status.native.isVisible()
    press(dock.tools["Select"])
    press(dock.copy)
    viewer.layers.selection.active = slides[1]
    assert dock.status.value == "Copied 1 row."  # which is still true
    layer.events.set_data()  # the dock reacts later, which must not erase the problem
    press(dock.save_labels)
    QTest.qWait(SETTLED_MS)
    assert dock.status.value.startswith("Select a labels layer")
    press(dock.add_labels)
    assert not dock.status.native.isVisible()


def test_rows_select_objects_in_their_layers(viewer, dock, slides):
    shapes = draw(viewer, dock)
    draw(viewer, dock, (0.2, 0.3), (0.3, 0.4))
    points = draw(viewer, dock, (0.8, 0.8), (0.8, 0.8), "Point")
    assert (str(shapes.mode), str(points.mode)) == ("add_rectangle", "add")
    QTest.qWait(3 * PATIENCE_MS)
    click_row(dock, 0)
    assert viewer.layers.selection.active is shapes
    assert str(shapes.mode) == "select"  # a drag does not draw with a tool that is not marked
    dock.table.native.selectAll()
    assert dock.table.selection == [0, 1, 2]
    assert dock.summary.value.startswith("3 objects selected")
    assert (set(shapes.selected_data), set(points.selected_data)) == ({0, 1}, {0})
    for layer in (shapes, points):  # both are highlighted, though one is active
        assert layer._highlight_visible
    points.selected_data = set()  # as by a click on the canvas
    assert dock.table.selection == [0, 1]


def test_rows_of_several_layers_are_classified_and_deleted_together(viewer, dock, slides):
    shapes = draw(viewer, dock)
    points = draw(viewer, dock, (0.8, 0.8), (0.8, 0.8), "Point")
    draw(viewer, dock, (0.7, 0.7), (0.7, 0.7), "Point")
    QTest.qWait(SETTLED_MS)
    table = dock.table.native
    click_row(dock, 0)
    place = table.visualRect(dock.table.model.index(1, 0)).center()
    QTest.mouseClick(table.viewport(), Qt.LeftButton, Qt.ControlModifier, place)
    press(dock.chips["Tumor"])
    QTest.qWait(SETTLED_MS)
    assert list(shapes.features["class"]) == ["Tumor"]
    assert list(points.features["class"]) == ["Tumor", ""]
    press(dock.undo)
    assert [*shapes.features["class"], *points.features["class"]] == ["", "", ""]
    for step, expected in ((dock.redo, "Tumor"), (dock.undo, "")):
        press(step)
        QTest.qWait(3 * PATIENCE_MS)
        assert dock.table.selection == [0, 1]
        assert [*shapes.features["class"], points.features["class"][0]] == [expected] * 2
    QTest.keyClick(table, Qt.Key_Delete)
    QTest.qWait(SETTLED_MS)
    assert (len(shapes.data), len(points.data)) == (0, 1)
    press(dock.undo)
    assert (len(shapes.data), len(points.data)) == (1, 2)
    click_row(dock, 0)
    QTest.mouseClick(table.viewport(), Qt.LeftButton, Qt.ControlModifier, place)
    viewer.layers.selection.active.remove_selected()  # as by the key on the canvas
    QTest.qWait(SETTLED_MS)
    assert (len(shapes.data), len(points.data)) == (0, 1)
    press(dock.undo)
    assert (len(shapes.data), len(points.data)) == (1, 2)


def test_the_active_layer_alone_counts_after_a_click_on_the_canvas(viewer, dock, slides):
    shapes = draw(viewer, dock)
    points = draw(viewer, dock, (0.8, 0.8), (0.8, 0.8), "Point")
    QTest.qWait(SETTLED_MS)
    dock.table.native.selectAll()
    shapes.selected_data = set()
    shapes.selected_data = {0}
    press(dock.chips["Stroma"])
    assert list(shapes.features["class"]) == ["Stroma"]
    assert list(points.features["class"]) == [""]
    assert set(points.selected_data) == set()
    dock.table.native.selectAll()
    viewer.layers.selection.active = points
    assert dock.table.selection == [1]
    assert (set(shapes.selected_data), set(points.selected_data)) == (set(), {0})


def click_title(dock, column):
    header = dock.table.native.horizontalHeader()
    place = QPoint(header.sectionViewportPosition(column) + 8, header.height() // 2)
    QTest.mouseClick(header.viewport(), Qt.LeftButton, Qt.NoModifier, place)


def test_areas_and_lengths_can_be_read_in_a_dock_of_the_default_width(viewer, dock, slides):
    draw(viewer, dock, (0.1, 0.1), (0.3, 0.3))
    QTest.qWait(SETTLED_MS)
    table, header = dock.table.native, dock.table.native.horizontalHeader()
    table.resize(318, table.height())  # as in napari's default window
    for column in (2, 3):
        end = header.sectionViewportPosition(column) + header.sectionSize(column)
        assert end <= table.viewport().width()
        assert header.sectionSize(column) >= table.sizeHintForColumn(column)
    click_title(dock, 2)
    assert header.sectionSize(2) >= header.sectionSizeHint(2)  # the arrow covers no text


def test_a_click_on_a_title_sorts_the_rows(viewer, dock, slides):
    for size in (0.2, 0.1, 0.3):
        draw(viewer, dock, (0.1, 0.1), (0.1 + size, 0.1 + size))
    draw(viewer, dock, (0.8, 0.8), (0.8, 0.8), "Point")
    QTest.qWait(SETTLED_MS)
    press(dock.chips["Tumor"])  # for new objects
    orders = {}
    for turn in ("ascending", "descending", "as drawn"):
        click_title(dock, 2)
        orders[turn] = list(dock.table.order)
    assert orders == {
        "ascending": [1, 0, 2, 3],
        "descending": [2, 0, 1, 3],
        "as drawn": [0, 1, 2, 3],
    }
    click_title(dock, 2)
    click_row(dock, 0)
    [shapes] = [layer for layer in viewer.layers if isinstance(layer, Shapes)]
    assert set(shapes.selected_data) == {1}
    dock.table.model.setData(dock.table.model.index(0, 1), "smallest")
    QTest.qWait(SETTLED_MS)
    assert list(shapes.features["name"]) == ["", "smallest", ""]
    assert dock.table.selection == [1]  # still sorted, and the same object
    dock.table.native.clearSelection()
    press(dock.copy)
    lines = QApplication.clipboard().text().splitlines()
    assert lines[1].split("\t")[1] == "smallest"


def test_opened_again_objects_are_not_doubled(viewer, dock, slides, tmp_path):
    draw(viewer, dock)
    draw(viewer, dock, (0.8, 0.8), (0.8, 0.8), "Point")
    path = tmp_path / f"{Path(dock.slide.path).stem}.geojson"
    write_geojson(path, [*dock.keeper.annotations(dock.slide)])
    layers = list(viewer.layers)
    assert viewer.open(path, plugin=PLUGIN) in ([], [None])
    assert list(viewer.layers) == layers
    said = notification_manager.records[-1].message
    assert said == f"'{path.name}': 2 objects are already there and were skipped."


def test_what_is_beyond_the_slide_is_said(viewer, dock, slides):
    draw(viewer, dock)
    QTest.qWait(SETTLED_MS)
    assert BEYOND not in dock.status.value
    for tool, end in (("Rectangle", (0.99, 0.5)), ("Point", (0.98, 0.5))):
        draw(viewer, dock, (0.5, 0.4) if tool == "Rectangle" else end, end, tool)
        QTest.qWait(SETTLED_MS)
        assert dock.status.value.endswith(BEYOND)


def test_new_classes_have_colors_of_their_own():
    known = dict(USUAL)
    for name in ("Nerve", "Gland", "Vessel", "Fat", "Muscle", "Mucin"):
        known[name] = new_color(name, known)
    assert len(set(known.values())) == len(known)
    assert new_color("Nerve", USUAL) == known["Nerve"]  # in every session
    assert new_color("Gland", USUAL) != known["Nerve"]


def test_a_click_selects_objects_of_any_layer(viewer, dock, slides):
    shapes = draw(viewer, dock)
    points = draw(viewer, dock, (0.8, 0.8), (0.8, 0.8), "Point")
    press(dock.tools["Select"])
    for layer, place in ((shapes, (0.5, 0.5)), (points, (0.8, 0.8))):
        drag_and_wait(viewer, place, place)
        assert viewer.layers.selection.active is layer
        assert set(layer.selected_data) == {0}
        [row] = dock.table.selection
        assert dock.rows.layers[dock.rows.position(row)[0]] is layer


def test_keys_change_the_slide_from_every_list(viewer, dock, slides):
    draw(viewer, dock)
    _, switcher = viewer.window.add_plugin_dock_widget(PLUGIN, "Slides")
    for widget in (dock.table, dock.details, switcher.list):
        shown = dock.slide
        QTest.keyClick(widget.native, Qt.Key_Left, Qt.ControlModifier)
        QTest.qWait(100)
        assert dock.slide is not shown


@pytest.mark.parametrize("tool", ["Select", "Line"])
def test_an_import_keeps_the_tool(viewer, dock, slides, answer, tmp_path, settled, tool):
    draw(viewer, dock)
    press(dock.tools[tool])
    source = tmp_path / "cells.geojson"
    square = np.array([(0, 0), (0, 400), (400, 400), (400, 0)], float)
    write_geojson(source, [Annotation("polygon", (square + 100,))])
    answer(source)
    click(dock.load)
    settled()
    assert dock.status.value == "'cells.geojson': 1 object."
    assert dock.tools[tool].native.isChecked()
    drag_and_wait(viewer, (0.7, 0.7), (0.8, 0.8))
    QTest.qWait(3 * PATIENCE_MS)
    assert len(dock.rows) == (3 if tool == "Line" else 2)


def test_a_layer_that_the_user_has_hidden_stays_hidden(viewer, dock, slides):
    first, second = slides
    drawn = draw(viewer, dock)
    drawn.visible = False
    for _ in range(2):
        show(viewer, first)
        assert not drawn.visible
        show(viewer, second)
        assert not drawn.visible
    show(viewer, first)
    show_side_by_side(viewer)
    assert (first.visible, second.visible, drawn.visible) == (True, True, False)
    show(viewer, second)
    drawn.visible = True
    show(viewer, first)
    assert not drawn.visible
    show(viewer, second)
    assert drawn.visible


@pytest.mark.parametrize("tool", ["Rectangle", "Point"])
def test_a_drawing_tool_is_kept_when_a_slide_is_opened(
    viewer, dock, slides, slide_is_open, tmp_path, tool
):
    draw(viewer, dock, (0.3, 0.3), (0.4, 0.4), tool)
    press(dock.chips["Tumor"])
    path = tmp_path / "third.tif"
    convert(sample_path(), path, region=(500, 500, 1024, 1024))
    [third] = slide_is_open(path)
    QTest.qWait(SETTLED_MS)
    assert dock.slide is slide_of(third)
    assert dock.tools[tool].native.isChecked()
    drag_and_wait(viewer, (0.6, 0.6), (0.6, 0.6) if tool == "Point" else (0.7, 0.7))
    QTest.qWait(3 * PATIENCE_MS)
    [drawn] = annotation_layers_of(viewer, slide_of(third).path)
    assert len(drawn.data) == len(dock.rows) == 1


def test_an_import_is_one_step(viewer, dock, slides, answer, tmp_path, settled):
    path = tmp_path / "both.geojson"
    square = np.array([(100, 100), (160, 100), (160, 160), (100, 160)], float)
    write_geojson(path, [Annotation("polygon", (square,)), Annotation("points", (square,))])
    drawn = draw(viewer, dock)
    answer(path)
    press(dock.load)
    settled()
    assert len(dock.rows) == 6
    imported = viewer.layers[-2:]
    for _ in range(2):
        press(dock.undo)
        assert viewer.layers[-1] is drawn
        assert len(dock.rows) == 1
        press(dock.redo)
        assert viewer.layers[-2:] == imported
        assert len(dock.rows) == 6
    imported[1].selected_data = {0}
    imported[1].remove_selected()
    QTest.qWait(200)
    press(dock.undo)
    assert len(imported[1].data) == 4


def test_imported_objects_beyond_the_slide_are_said(
    viewer, dock, slides, answer, tmp_path, settled
):
    """They probably belong to another slide."""
    square = np.array([(100, 100), (160, 100), (160, 160), (100, 160)], float)
    annotations = [Annotation("polygon", (square + shift,)) for shift in (0, 950, 9000)]
    write_geojson(tmp_path / "other.geojson", annotations)
    answer(tmp_path / "other.geojson")
    press(dock.load)
    settled()
    said = "'other.geojson': 3 objects. 2 not entirely on the slide: is it the right one?"
    assert dock.status.value == said


def test_a_file_for_a_hidden_slide_leaves_the_shown_one_active(viewer, dock, slides, tmp_path):
    hidden, shown = slides
    square = np.array([(100, 100), (160, 100), (160, 160), (100, 160)], float)
    for name in (slide_name(slide_of(hidden)), "other"):
        path = tmp_path / f"{name}.geojson"
        write_geojson(path, [Annotation("polygon", (square,))])
        [layer] = viewer.open(path, plugin=PLUGIN)
        QTest.qWait(50)
        of = hidden if layer.name.startswith(slide_name(slide_of(hidden))) else shown
        assert layer.metadata[SLIDE] == slide_of(of).path
        assert layer.visible == (of is shown)
        assert dock.slide is slide_of(shown)
    assert of is shown
    assert len(dock.rows) == 1


def test_objects_that_are_already_there_are_not_imported(
    viewer, dock, slides, answer, tmp_path, settled
):
    square = np.array([(100, 100), (160, 100), (160, 160), (100, 160)], float)
    turn = np.linspace(0, 2 * np.pi, 60, endpoint=False)
    circle = 300 + 50 * np.stack([np.cos(turn), np.sin(turn)], axis=1)
    path = tmp_path / "objects.geojson"
    found = [
        Annotation("polygon", (square, square / 4 + 90), "", "Tumor"),
        Annotation("ellipse", (circle,)),
        Annotation("line", (square, square[:2])),
        Annotation("points", (square,)),
        Annotation("polygon", (square[[0, 0, 0]],)),  # without extent
    ]
    write_geojson(path, found)
    answer(path)
    press(dock.load)
    settled()
    QTest.qWait(3 * PATIENCE_MS)
    layers, summary = list(viewer.layers), dock.summary.value
    assert summary.startswith("9 objects, ")
    press(dock.load)
    settled()
    QTest.qWait(3 * PATIENCE_MS)
    assert dock.status.value == "'objects.geojson': 9 objects are already there and were skipped."
    assert (list(viewer.layers), dock.summary.value) == (layers, summary)
    write_geojson(path, [*found[1:2], Annotation("polygon", (square + 300,))])
    press(dock.load)
    settled()
    said = "'objects.geojson': 1 object. 1 object is already there and was skipped."
    assert dock.status.value == said
    # Drawn objects are known after an export, too.
    draw(viewer, dock)
    draw(viewer, dock, (0.2, 0.5), (0.3, 0.6), "Line")
    answer(tmp_path / "all.geojson")
    press(dock.export)
    settled()
    press(dock.load)
    settled()
    said = "'all.geojson': 12 objects are already there and were skipped."
    assert dock.status.value == said


def test_a_removed_layer_comes_back(viewer, dock, slides):
    path = slide_of(slides[1]).path
    shapes = draw(viewer, dock)
    press(dock.tools["Select"])
    press(dock.chips["Stroma"])  # at once: this is not recorded yet
    viewer.layers.remove(shapes)
    QTest.qWait(50)
    [said] = [each.message for each in notification_manager.records if shapes.name in each.message]
    assert "unsaved annotations was removed" in said
    assert len(dock.rows) == 0
    press(dock.undo)
    assert shapes in viewer.layers
    assert [dock.rows.text(row, 0) for row in range(len(dock.rows))] == ["Stroma"]
    # It comes back to a slide that is opened again, too.
    viewer.layers.remove(shapes)
    viewer.layers.remove(slides[1])
    [again] = viewer.open(path, plugin=PLUGIN)
    napari_wsigpu.wait(again)
    viewer.layers.selection.active = again
    press(dock.undo)
    assert dock.keeper.unsaved() == [path]
    assert [dock.rows.text(row, 0) for row in range(len(dock.rows))] == ["Stroma"]
    press(dock.undo)
    assert classes(shapes) == [""]


def test_annotations_stay_above_a_slide_that_is_opened_again(viewer, dock, slides, qtbot):
    path = slide_of(slides[1]).path
    shapes = draw(viewer, dock)
    viewer.layers.remove(slides[1])
    [again] = viewer.open(path, plugin=PLUGIN)
    qtbot.waitUntil(lambda: list(viewer.layers) == [slides[0], again, shapes])
    assert shapes.visible


def test_new_images_lie_below_annotations(viewer, dock, slides, tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "scores.h5"
    corners = np.array([(x, y) for x in (0, 256, 512) for y in (0, 256, 512)])
    with h5py.File(path, "w") as file:
        file["coords"], file["attention_scores"] = corners, np.linspace(0, 1, len(corners))
    slide = slides[1]
    shapes = draw(viewer, dock)
    points = draw(viewer, dock, (0.5, 0.5), (0.5, 0.5), "Point")
    viewer.layers.selection.active = slide
    [heatmap] = viewer.open(str(path), plugin=PLUGIN)
    assert viewer.layers[-3:] == [heatmap, shapes, points]
    overlay = viewer.add_image(np.zeros((9, 9)), scale=slide.scale, units=slide.units)
    assert viewer.layers[-4:] == [heatmap, overlay, shapes, points]
    drag_and_wait(viewer, (0.2, 0.2), (0.3, 0.3))  # napari draws in the same order
    overlay.visible = heatmap.visible = slide.visible = False
    outline = np.argwhere(viewer.screenshot(flash=False)[..., 0] > 200)
    overlay.visible = True
    for y, x in outline[:: max(len(outline) // 20, 1)]:
        assert viewer.screenshot(flash=False)[y, x, 0] > 200


def test_classes_are_offered_on_every_slide(viewer, dock, slides):
    draw(viewer, dock)
    QTest.keyClicks(dock.own_class.native, "Mitosis")
    press(dock.classify)
    show(viewer, slides[0])
    assert "Mitosis" in dock.chips
    press(dock.chips["Mitosis"])
    shapes = draw(viewer, dock)
    np.testing.assert_allclose(shapes.edge_color[0], MITOSIS, atol=0.01)
    assert classes(shapes) == ["Mitosis"]


def test_own_classes_are_kept_for_other_sessions(viewer, dock, slides, monkeypatch):
    QTest.keyClicks(dock.own_class.native, "Mitosis")
    press(dock.classify)
    shapes = draw(viewer, dock)
    choose, _, forget = dock.chips["Mitosis"].native.actions()
    monkeypatch.setattr(QColorDialog, "getColor", lambda *_: QColor("#123456"))
    choose.trigger()
    np.testing.assert_allclose(shapes.edge_color[0], transform_color("#123456")[0], atol=0.01)
    np.testing.assert_allclose(shapes.face_color[0, :3], shapes.edge_color[0, :3], atol=0.01)
    assert list(shapes.features["class"]) == ["Mitosis"]
    assert offered_classes()["Mitosis"] == "#123456"
    assert stat.S_IMODE(recovery.folder().stat().st_mode) == 0o700
    forget.trigger()
    assert "Mitosis" in {**dock.chips, **offered_classes()}  # an object has it
    assert dock.status.value.startswith("Objects have the class 'Mitosis'")
    QTest.keyClicks(dock.own_class.native, "Salt & pepper")
    press(dock.classify)
    assert dock.chips["Salt & pepper"].native.text() == "Salt && pepper"  # an "&" on screen
    dock.chips["Salt & pepper"].native.actions()[2].trigger()
    press(dock.undo)
    press(dock.undo)
    QTest.qWait(PATIENCE_MS + 100)
    assert not len(shapes.data)
    dock.chips["Mitosis"].native.actions()[2].trigger()
    assert "Mitosis" not in {**dock.chips, **offered_classes()}
    monkeypatch.setattr(QColorDialog, "getColor", lambda *_: QColor())
    dock.chips["Tumor"].native.actions()[0].trigger()  # canceled
    assert offered_classes() == USUAL
    monkeypatch.setattr(QColorDialog, "getColor", lambda *_: QColor("#654321"))
    dock.chips["Tumor"].native.actions()[0].trigger()
    press(dock.chips["Tumor"])
    shapes = draw(viewer, dock)
    np.testing.assert_allclose(shapes.edge_color[-1], transform_color("#654321")[0], atol=0.01)


def test_classes_of_the_table_are_kept_for_other_sessions(viewer, dock, slides):
    shapes = draw(viewer, dock)
    dock._edit(0, 0, "Vessel")
    QTest.qWait(2 * SETTLED_MS)
    assert classes(shapes) == ["Vessel"]
    np.testing.assert_allclose(
        shapes.edge_color[0], transform_color(offered_classes()["Vessel"])[0]
    )


def test_classes_are_renamed_on_all_slides(viewer, dock, slides, monkeypatch):
    press(dock.chips["Tumor"])
    second = draw(viewer, dock)
    show(viewer, slides[0])
    first = draw(viewer, dock)
    press(dock.chips["Stroma"])
    draw(viewer, dock, (0.1, 0.1), (0.2, 0.2))
    QTest.qWait(2 * SETTLED_MS)

    questions = []

    def rename(name, text, accepted=True, merge=QMessageBox.Yes):
        monkeypatch.setattr(QInputDialog, "getText", lambda *_, **__: (text, accepted))
        monkeypatch.setattr(QMessageBox, "warning", lambda *asked: questions.append(asked) or merge)
        dock.chips[name].native.actions()[1].trigger()
        QTest.qWait(2 * SETTLED_MS)

    rename("Tumor", "Carcinoma", accepted=False)
    rename("Tumor", "  ")
    assert classes(first) == ["Tumor", "Stroma"]
    rename("Tumor", " Carcinoma ")
    assert (classes(first), classes(second)) == (["Carcinoma", "Stroma"], ["Carcinoma"])
    assert offered_classes()["Carcinoma"] == USUAL["Tumor"]
    np.testing.assert_allclose(second.edge_color, transform_color(USUAL["Tumor"]), atol=0.01)
    assert not questions
    rename("Stroma", "Carcinoma", merge=QMessageBox.Cancel)
    assert classes(first) == ["Carcinoma", "Stroma"]
    dock.set_class("Carcinoma")
    rename("Stroma", "Carcinoma")
    assert "one class" in questions[1][2]
    press(dock.undo)
    assert dock.chips["Carcinoma"].native.isChecked()
    dock.set_class("Stroma")
    rename("Stroma", "Carcinoma")
    assert classes(first) == ["Carcinoma", "Carcinoma"]
    np.testing.assert_allclose(first.edge_color[1], first.edge_color[0])
    assert dock.chips["Carcinoma"].native.isChecked()  # Stroma was marked
    press(dock.undo)
    assert classes(first) == ["Carcinoma", "Stroma"]
    assert dock.chips["Stroma"].native.isChecked()
    assert dock.status.value == ""
    dock.set_class("Gland")  # of new objects
    press(dock.undo)
    assert classes(first) == ["Tumor", "Stroma"]
    said = "Objects of 'Carcinoma' on other slides keep the change; undo it there, too."
    assert dock.status.value == said
    assert list(offered_classes()) == [*USUAL, "Gland"]
    for _ in range(2):
        press(dock.redo)
    assert classes(first) == ["Carcinoma", "Carcinoma"]
    _, _, *others = USUAL
    assert list(offered_classes()) == ["Carcinoma", *others, "Gland"]
    assert list(dock.chips) == ["Carcinoma", *others, "Gland"]


def test_own_classes_of_earlier_sessions_are_offered(add_dock, slide_is_open):
    keep_offered({**USUAL, "Mitosis": "#123456"})
    dock = add_dock("Annotate")
    slide_is_open(sample_path())
    assert list(dock.chips) == [*USUAL, "Mitosis"]
    assert dock.chips["Mitosis"].native.icon().pixmap(4, 4).toImage().pixelColor(1, 1) == QColor(
        "#123456"
    )


@pytest.mark.parametrize("text", ["", "[1]", "no JSON"])
def test_damaged_lists_of_classes_are_ignored(text):
    recovery.folder().mkdir(parents=True)
    (recovery.folder() / "offered.json").write_text(text)
    assert offered_classes() == USUAL


def test_classes_whose_color_is_damaged_are_ignored():
    recovery.folder().mkdir(parents=True)
    text = '{"Mitosis": "red", "Vessel": "#123456"}'
    (recovery.folder() / "offered.json").write_text(text)
    assert offered_classes() == {"Vessel": "#123456"}


def test_new_objects_are_unlocked_annotations(viewer, dock, slides, answer, tmp_path, settled):
    """Also in a layer that was imported with locked detections."""
    square = np.array([[100.0, 100], [200, 100], [200, 200], [100, 200]])
    locked = Annotation("polygon", (square,), object_type="detection", locked=True, name="first")
    write_geojson(tmp_path / "a.geojson", [locked])
    answer(tmp_path / "a.geojson")
    press(dock.load)
    settled()
    shapes = draw(viewer, dock)
    assert len(shapes.data) == 2
    first, second = dock.keeper.annotations(dock.slide)
    assert (first.object_type, first.locked, first.name) == ("detection", True, "first")
    assert (second.object_type, second.locked, second.name) == ("annotation", False, "")


def test_fifty_steps_can_be_undone(viewer, dock, slides):
    shapes = draw(viewer, dock)
    for step in range(60):
        shapes.add_rectangles([[[step, step], [step + 90, step + 90]]])
        dock.keeper._record()
    for _ in range(55):
        press(dock.undo)
    assert len(shapes.data) == 6


class _CloseByUser(QCloseEvent):
    """What the button of a window's frame sends."""

    def spontaneous(self):
        return True


@pytest.fixture
def closing(viewer, monkeypatch):
    """Close a window by its menu or its button; return the questions, which `choose` answers."""
    closed = []  # without the window, which must not outlive the viewer
    monkeypatch.setattr(QMainWindow, "close", lambda window: closed.append(True) or True)

    def close(*choices, by_button=False):
        asked, left, window = [], list(choices), viewer.window._qt_window

        def ask(dialog):
            asked.append(dialog.text() if isinstance(dialog, QMessageBox) else "napari")
            return left.pop(0)

        for kind in (QMessageBox, ConfirmCloseDialog):
            for name in ("exec", "exec_"):  # napari 0.9 calls the latter
                monkeypatch.setattr(kind, name, ask)
        closed.clear()
        if by_button:
            QApplication.sendEvent(window, _CloseByUser())
            QTest.qWait(50)
        else:
            window.close(quit_app=False, confirm_need=True)
        assert not left
        return asked, bool(closed)

    return close


UNSAVED = "The annotations of 'dark.tif' are not saved."


@pytest.mark.parametrize("by_button", [False, True])
def test_window_with_unsaved_annotations_asks_once(viewer, dock, slides, closing, by_button):
    path = slide_of(slides[1]).path
    assert closing(0, by_button=by_button) == (["napari"], False)
    draw(viewer, dock)
    assert closing(QMessageBox.Cancel, by_button=by_button) == ([UNSAVED], False)
    assert dock.keeper.unsaved() == [path]
    assert closing(QMessageBox.Discard, by_button=by_button) == ([UNSAVED], True)
    assert dock.keeper.unsaved() == []


def test_closing_window_saves_annotations_of_every_slide(
    viewer, dock, slides, closing, answer, tmp_path
):
    draw(viewer, dock)
    answer("")
    assert closing(QMessageBox.Save) == ([UNSAVED], False)  # the dialog was canceled
    answer(tmp_path / "missing" / "dark.geojson")
    asked, closed = closing(QMessageBox.Save, QMessageBox.Ok)
    assert "can't be written" in asked[1]
    assert not closed
    viewer.layers.remove(slides[1])  # its annotations are still there
    answer(tmp_path / "dark.geojson")
    assert closing(QMessageBox.Save) == ([UNSAVED], True)
    assert len(read_geojson(tmp_path / "dark.geojson")) == 1
    assert dock.keeper.unsaved() == []


def test_closing_window_shows_slow_saving(
    viewer, dock, slides, closing, answer, tmp_path, monkeypatch, gate
):
    draw(viewer, dock)
    answer(tmp_path / "dark.geojson")
    shown = []

    def write(target, annotations):
        assert gate.wait(10)
        write_geojson(target, annotations)

    def look():
        dialog = QApplication.activeModalWidget()
        shown.append(dialog.labelText())
        dialog.reject()  # as Escape does
        if len(shown) == 2:
            gate.set()
        else:
            QTimer.singleShot(200, look)

    monkeypatch.setattr(annotator, "write_geojson", write)
    QTimer.singleShot(600, look)
    assert closing(QMessageBox.Save) == ([UNSAVED], True)
    assert shown == ["Saving the annotations of dark.tif…"] * 2
    assert len(read_geojson(tmp_path / "dark.geojson")) == 1


def test_quick_saving_is_not_shown_over_the_next_question(viewer, monkeypatch, qtbot):
    class Hasty(QProgressDialog):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            for timer in self.findChildren(QTimer):
                timer.start(50)  # instead of four seconds

    monkeypatch.setattr(annotator, "QProgressDialog", Hasty)
    window, top = main_window(viewer), []

    def look():
        top.append(QApplication.activeModalWidget())
        for widget in QApplication.topLevelWidgets():
            if isinstance(widget, QMessageBox | QProgressDialog):
                widget.close()

    def save_and_ask():
        annotator.run_modally(window, "Saving…", lambda: None)
        QTimer.singleShot(400, look)
        box = QMessageBox(QMessageBox.Warning, UNSAVED, "", QMessageBox.Ok, window)
        box.exec()
        top.append(box)

    QTimer.singleShot(0, save_and_ask)  # in an event, as when a window closes
    qtbot.waitUntil(lambda: len(top) == 2)
    assert top[0] is top[1]


def test_a_slide_is_removed_with_its_annotations(
    viewer, dock, slides, answer, tmp_path, monkeypatch
):
    """After the question that closing the window would ask for it."""
    first, second = slides
    drawn = draw(viewer, dock)
    show(viewer, first)
    kept = draw(viewer, dock)
    show(viewer, second)
    _, switcher = viewer.window.add_plugin_dock_widget(PLUGIN, "Slides")
    path, target = slide_of(second).path, tmp_path / "dark.geojson"
    asked, answers = [], [QMessageBox.Cancel, QMessageBox.Save]

    def ask(box):
        asked.append(box.text())
        return answers.pop(0)

    monkeypatch.setattr(QMessageBox, "exec", ask)
    press(switcher.remove)
    assert second in viewer.layers
    assert drawn in viewer.layers
    answer(target)
    press(switcher.remove)
    assert asked == [UNSAVED, UNSAVED]
    assert list(viewer.layers) == [first, kept]
    assert first.visible
    assert kept.visible
    assert len(read_geojson(target)) == 1
    assert path not in dock.keeper.unsaved()
    QTest.qWait(100)
    assert not notification_manager.records
    draw(viewer, dock)
    assert len(kept.data) == 2


def test_annotations_that_went_with_a_slide_come_back_visible(
    viewer, dock, slides, slide_is_open, monkeypatch
):
    path, drawn = slide_of(slides[1]).path, draw(viewer, dock)
    QTest.qWait(2 * SETTLED_MS)
    _, switcher = viewer.window.add_plugin_dock_widget(PLUGIN, "Slides")
    monkeypatch.setattr(QMessageBox, "exec", lambda _: QMessageBox.Discard)
    press(switcher.remove)
    assert drawn not in viewer.layers
    [again] = slide_is_open(path)
    show(viewer, again)
    press(dock.undo)
    assert drawn in viewer.layers
    assert drawn.visible


def test_long_names_of_classes_are_cut_on_their_chips(viewer, dock, slides):
    name = 30 * "mitosis "
    dock.set_class(name)
    chip = dock.chips[name].native
    assert chip.accessibleName() == name
    assert name in chip.toolTip()
    assert chip.sizeHint().width() < 272


def test_copies_of_a_slide_share_annotations(viewer, dock, slide_is_open):
    first, second = slide_is_open(sample_path(), sample_path())
    show(viewer, second)
    drawn = draw(viewer, dock)
    show(viewer, first)
    assert drawn.visible
    assert draw(viewer, dock, (0.2, 0.2), (0.3, 0.3)) is drawn
    assert len(dock.rows) == len(drawn.data) == 2
    press(dock.undo)
    assert len(drawn.data) == 1
    _, switcher = viewer.window.add_plugin_dock_widget(PLUGIN, "Slides")
    press(switcher.remove)  # asks nothing, since the annotations remain
    assert list(viewer.layers) == [second, drawn]
    assert drawn.visible
    assert len(dock.keeper.annotations(dock.slide)) == 1


def test_window_with_saved_annotations_closes_without_question(
    viewer, dock, slides, monkeypatch, answer, tmp_path, settled
):
    draw(viewer, dock)
    keeper = annotator.annotator_of(viewer)
    assert keeper.unsaved() == [slide_of(slides[1]).path]
    answer(tmp_path / "saved.geojson")
    press(dock.export)
    settled()
    assert keeper.unsaved() == []


def test_annotations_survive_a_crash(viewer, dock, slides, monkeypatch, qtbot, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    slide = slide_of(slides[1])
    press(dock.chips["Stroma"])
    shapes = draw(viewer, dock)
    QTest.qWait(200)
    annotator.annotator_of(viewer).keep()
    qtbot.waitUntil(lambda: bool(list(recovery.folder().glob("*.geojson"))))
    QTest.qWait(100)
    [kept] = recovery.folder().glob(f"{recovery._digest(slide.path)}-*.geojson")
    assert stat.S_IMODE(recovery.folder().stat().st_mode) == 0o700
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert "dark" not in kept.name
    assert recovery.orphans(slide.path) == []  # this process still runs
    # Another process left it, and is no more.
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    lost = kept.rename(kept.with_name(kept.name.replace(str(os.getpid()), dead.stdout.strip())))
    viewer.layers.remove(shapes)
    show(viewer, slides[0])
    assert not dock.lost.visible
    show(viewer, slides[1])
    assert dock.lost.visible
    assert "annotations of 'dark.tif'" in dock.loss.value
    press(dock.recover)
    assert not dock.lost.visible
    assert [dock.rows.text(row, 0) for row in range(len(dock.rows))] == ["Stroma"]
    # It is still unsaved, so it is kept again before the copy is deleted.
    qtbot.waitUntil(lambda: not lost.exists())
    assert len(read_geojson(kept)) == 1
    assert recovery.orphans(slide.path) == []
    [layer] = dock.layers()
    viewer.layers.remove(layer)
    dock.keeper.keep()
    qtbot.waitUntil(lambda: not kept.exists())


def test_undo_by_key_takes_back_a_region_to_export_not_annotations(viewer, dock, slides):
    shapes = draw(viewer, dock)
    QTest.qWait(2 * SETTLED_MS)
    path = dock.slide.path
    square = np.array([(0, 0), (0, 9), (9, 9), (9, 0)])
    regions = viewer.add_shapes([square, square + 20], metadata={FOR_EXPORT: True, SLIDE: path})
    for left in (1, 0, 0):
        keys(viewer, Qt.Key_Z, Qt.ControlModifier)
        assert (len(regions.data), len(shapes.data)) == (left, 1)
    viewer.layers.selection.active = shapes
    keys(viewer, Qt.Key_Z, Qt.ControlModifier)
    assert len(shapes.data) == 0


def test_a_failed_automatic_save_is_reported_once(viewer, dock, slides, monkeypatch, qtbot):
    said = []
    monkeypatch.setattr(annotator, "show_warning", said.append)
    monkeypatch.setattr(recovery, "write_geojson", mock.Mock(side_effect=OSError("disk full")))
    for _ in range(2):
        draw(viewer, dock)
        dock.keeper.unsaved()
        dock.keeper.keep()
        qtbot.waitUntil(lambda: not saving())
    [warning] = said
    assert "export them. disk full" in warning


def saving():
    return [each for each in threading.enumerate() if each.name == "slide-annotations"]


def lose(path, annotations):
    """Leave annotations of a slide as another process does that crashes."""
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert recovery.save(path, annotations) == ""
    [kept] = recovery.folder().glob("*.geojson")
    kept.rename(kept.with_name(kept.name.replace(str(os.getpid()), dead.stdout.strip())))


def test_lost_annotations_are_offered_in_a_small_window(viewer, dock, slide_is_open, qtbot):
    viewer.window.resize(1089, 630)
    square = np.array([(100, 100), (160, 100), (160, 160), (100, 160)], float)
    path = str(sample_path())
    lose(path, [Annotation("polygon", (square,)), Annotation("points", (square,))])
    slide_is_open(path)
    bar = dock.details.native.verticalScrollBar()
    qtbot.waitUntil(lambda: bar.maximum() > 0)
    bar.setValue(bar.maximum())
    QTest.qWait(50)
    assert dock.recover.native.visibleRegion().boundingRect() == dock.recover.native.rect()
    press(dock.recover)
    assert dock.status.value == "'Recovered': 5 objects."
    assert dock.summary.value.startswith("5 objects, ")
    assert not dock.lost.native.isVisible()


@pytest.mark.window
def test_messages_take_no_room_in_a_low_dock(viewer, dock, slide_is_open, qtbot):
    path = str(sample_path())
    lose(path, [Annotation("points", (np.ones((1, 2)),))])
    slide_is_open(path)
    window, text, message = main_window(viewer), dock.loss.native, dock.status.native
    for height in (450, 900, 450):
        window.resize(700, height)
        kept = height > 450
        qtbot.waitUntil(lambda kept=kept: (message.minimumHeight() > 0) == kept)
        qtbot.waitUntil(lambda: text.height() >= text.heightForWidth(text.width()) > 0)


def test_lost_annotations_are_deleted_only_after_a_question(
    viewer, dock, slide_is_open, monkeypatch
):
    asked, answers = [], [QMessageBox.Cancel, QMessageBox.Discard]
    monkeypatch.setattr(
        QMessageBox, "warning", lambda *args: asked.append(args[2:]) or answers.pop(0)
    )
    path = str(sample_path())
    lose(path, [Annotation("points", (np.ones((1, 2)),))])
    slide_is_open(path)
    QTest.qWait(100)
    for is_kept in (True, False):
        press(dock.forget)
        assert dock.lost.native.isVisible() is is_kept
        assert len(recovery.orphans(path)) == is_kept
    text, _, default = asked[0]
    assert text == "The lost annotations cannot be restored afterwards. Delete them?"
    assert default == QMessageBox.Cancel  # Enter deletes nothing


def test_lost_annotations_are_announced(viewer, qtbot):
    path = str(sample_path())
    lose(path, [Annotation("points", (np.ones((1, 2)),))])
    [layer] = viewer.open(path, plugin=PLUGIN)
    napari_wsigpu.wait(layer)
    [said] = [each.message for each in notification_manager.records if "Annotate" in each.message]
    assert said == "Annotate can restore unsaved annotations of 'he_phantom.svs'."
    dock = open_dock(viewer, "Annotate")
    qtbot.waitUntil(lambda: not dock.recover.native.visibleRegion().isEmpty())


def test_only_objects_of_the_active_layer_are_selected(viewer, dock, slides):
    shapes = draw(viewer, dock)
    shapes.selected_data = {0}
    press(dock.tools["Point"])
    points = viewer.layers.selection.active
    points.add(shapes.data[0][:2])
    points.selected_data = {0}
    QTest.qWait(200)
    [row] = dock.table.selection
    assert dock.rows.text(row, 4) == "point"
    press(dock.chips["Tumor"])
    QTest.qWait(200)
    viewer.layers.selection.active = slides[1]
    assert dock.table.selection == []


def test_the_shown_slide_stays_current_when_a_layer_is_removed(viewer, dock, slides):
    """Although napari activates the next layer, which may be that of a hidden slide."""
    show(viewer, slides[0])
    hidden = draw(viewer, dock)
    show(viewer, slides[1])
    shapes = draw(viewer, dock)
    viewer.layers.move(viewer.layers.index(shapes), viewer.layers.index(slides[0]) + 1)
    viewer.layers.selection.active = shapes
    viewer.layers.remove_selected()
    QTest.qWait(100)
    assert dock.slide is slide_of(slides[1])
    keys(viewer, Qt.Key_Z, Qt.ControlModifier)
    assert shapes in viewer.layers
    assert len(hidden.data) == 1


@pytest.mark.parametrize("tool", ["Rectangle", "Line", "Outline"])
def test_a_slipped_click_draws_nothing(viewer, dock, slides, tool):
    shapes = draw(viewer, dock, (0.5, 0.5), (0.502, 0.502), tool)
    assert isinstance(shapes, Shapes)
    assert len(shapes.data) == 0
    drag_and_wait(viewer, (0.4, 0.4), (0.6, 0.6))
    assert len(shapes.data) == (0 if tool == "Outline" else 1)  # that is a line


@pytest.mark.parametrize("tool", ["Rectangle", "Line"])
def test_drag_whose_moves_are_lost_draws_the_whole_shape(viewer, dock, slides, tool):
    press(dock.tools[tool])
    shapes = viewer.layers.selection.active
    canvas = viewer.window._qt_viewer.canvas.native
    start, end = canvas.rect().center(), canvas.rect().center() + QPoint(120, 60)
    QTest.mousePress(canvas, Qt.LeftButton, pos=start)
    QTest.mouseRelease(canvas, Qt.LeftButton, pos=end)  # napari was too busy for moves
    size = np.ptp(shapes.data[0], axis=0) * screen_pixels(viewer, shapes)
    np.testing.assert_allclose(size, (60, 120), atol=1)
    QTest.mouseClick(canvas, Qt.LeftButton, pos=start)
    QTest.qWait(100)
    assert len(shapes.data) == 1


def test_an_outline_without_area_leaves_no_class(viewer, dock, slides):
    press(dock.chips["Tumor"])
    shapes = draw(viewer, dock)
    draw(viewer, dock, (0.2, 0.2), (0.3, 0.3), "Outline")  # a straight line
    drag_and_wait(viewer, (0.2, 0.2), (0.3, 0.3))
    press(dock.chips["Stroma"])
    draw(viewer, dock, (0.7, 0.7), (0.8, 0.8))
    assert classes(shapes) == ["Tumor", "Stroma"]
    expected = np.array([(200, 0, 0), (150, 200, 150)]) / 255
    np.testing.assert_allclose(shapes.edge_color[:, :3], expected, atol=0.01)


def test_the_first_tool_imports_nothing(tmp_path, display):
    environment = os.environ | {
        "NAPARI_CONFIG": str(tmp_path / "settings.yaml"),
        "XDG_STATE_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", FIRST_TOOL], env=environment, timeout=150, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    imported = int(done.stdout.split("IMPORTED")[1].split()[0])
    assert imported < 150  # and not the hundreds of pandas, which take seconds


def test_window_with_unsaved_labels_asks(viewer, dock, slides, closing, answer, tmp_path, settled):
    only = "The labels 'dark labels' are not saved. Save labels in the Annotate dock."
    both = only.replace("The", "The annotations of 'dark.tif' and the")
    press(dock.add_labels)
    assert closing(0) == (["napari"], False)  # nothing is painted
    drag_and_wait(viewer, (0.4, 0.5), (0.6, 0.5))
    assert closing(QMessageBox.Cancel) == ([only], False)
    labels = viewer.layers.selection.active
    draw(viewer, dock)
    assert closing(QMessageBox.Cancel) == ([both], False)
    viewer.layers.selection.active = labels
    answer(tmp_path / "painted.zarr")
    press(dock.save_labels)
    settled()
    assert closing(QMessageBox.Cancel) == ([UNSAVED], False)
    drag_and_wait(viewer, (0.4, 0.6), (0.6, 0.6))
    answer(tmp_path / "dark.geojson")
    assert closing(QMessageBox.Save, QMessageBox.Cancel) == ([both, only], False)


def test_classes_do_not_apply_to_labels(viewer, dock, slides):
    press(dock.add_labels)
    press(dock.chips["Tumor"])
    assert dock.status.value.startswith("Labels have no classes")
    shapes = draw(viewer, dock)
    assert classes(shapes) == ["Tumor"]
    assert not dock.status.value.startswith("Labels")


def test_ctrl_z_in_labels_is_napari_s(viewer, dock, slides):
    press(dock.add_labels)
    labels = viewer.layers.selection.active
    drag_and_wait(viewer, (0.4, 0.5), (0.6, 0.5))
    assert labels.data.any()
    keys(viewer, Qt.Key_Z, Qt.ControlModifier)
    assert not labels.data.any()
    QApplication.processEvents()


def test_ctrl_z_undoes_an_import_as_labels(
    viewer, dock, slides, answer, tmp_path, settled, monkeypatch
):
    monkeypatch.setattr("napari_wsigpu.viewer.annotations.annotation_layers.MOST_SHAPES", 1)
    source = tmp_path / "cells.geojson"
    square = np.array([(0, 0), (0, 40), (40, 40), (40, 0)], float)
    write_geojson(source, [Annotation("polygon", (square + each,)) for each in (100, 300)])
    answer(source)
    click(dock.load)
    settled()
    QTest.qWait(3 * PATIENCE_MS)
    labels = viewer.layers[-1]
    assert viewer.layers.selection.active == labels
    assert isinstance(labels, Labels)
    keys(viewer, Qt.Key_Z, Qt.ControlModifier)
    assert labels not in viewer.layers
    keys(viewer, Qt.Key_Z, Qt.ControlModifier | Qt.ShiftModifier)
    assert labels in viewer.layers


def test_rows_are_visible_in_the_first_window_of_napari(viewer, qtbot):
    viewer.window.resize(1089, 630)
    [layer] = viewer.open(str(sample_path()), plugin=PLUGIN)
    napari_wsigpu.wait(layer)
    dock = open_dock(viewer, "Annotate")
    for edge in (0.2, 0.3, 0.4, 0.5):
        draw(viewer, dock, (0.1, 0.1), (edge, edge))
    table = dock.table.native

    def are_visible():
        cells = [table.visualRect(dock.table.model.index(row, 0)) for row in range(3)]
        region = table.viewport().visibleRegion()
        return all(region.contains(cell.bottomLeft()) for cell in cells)

    qtbot.waitUntil(are_visible)
