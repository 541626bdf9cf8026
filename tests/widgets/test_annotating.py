"""Annotations belong to a slide: drawn, classified, undone and kept, by real clicks."""

import os
import stat
import subprocess
import sys

import numpy as np
import pytest
from napari._qt import qt_main_window
from napari._qt.dialogs.confirm_close_dialog import ConfirmCloseDialog
from napari.layers import Points, Shapes
from qtpy.QtCore import Qt
from qtpy.QtTest import QTest
from qtpy.QtWidgets import QApplication, QMessageBox

import napari_wsigpu
from napari_wsigpu import Annotation, convert, read_geojson, write_geojson
from napari_wsigpu.annotations import recovery
from napari_wsigpu.viewer import annotating
from napari_wsigpu.viewer.annotating import EDGE, outline_width
from napari_wsigpu.viewer.annotations import SLIDE
from napari_wsigpu.viewer.layers import slide_of
from napari_wsigpu.viewer.navigation import screen_pixels, set_screen_pixels
from napari_wsigpu.viewer.sample import sample_path
from napari_wsigpu.viewer.settings import PLUGIN
from tests.widgets.conftest import drag

pytestmark = pytest.mark.window

FIRST_TOOL = """
import sys, threading
import napari
from qtpy.QtTest import QTest
from napari_wsigpu.viewer.sample import sample_path

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
    shapes = draw(viewer, dock, (0.45, 0.45), (0.55, 0.55))
    press(dock.chips["Tumor"])
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
    shapes = draw(viewer, dock)
    press(dock.chips["Stroma"])
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
    # A selected point is given a class, and no shape that is selected in another layer.
    shapes.selected_data = {0, 1}
    points.selected_data = {0}
    viewer.layers.selection.active = points
    QTest.keyClicks(dock.own_class.native, "Mitosis")
    press(dock.classify)
    assert classes(points) == ["Mitosis"]
    assert classes(shapes) == ["Tumor", "Stroma"]
    assert "Mitosis" in dock.chips
    np.testing.assert_allclose(points.face_color[0], [0, 1, 1, 1], atol=0.01)


def test_changes_are_undone_and_made_again(viewer, dock, slides):
    first, second = slides
    shapes = draw(viewer, dock)
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
    press(dock.undo)
    assert dock.status.value == "There is nothing to be undone."  # on this slide
    assert len(shapes.data) == 2
    show(viewer, second)
    press(dock.undo)
    press(dock.undo)
    assert len(shapes.data) == 0
    for count in (1, 2, 2, 1):
        press(dock.redo)
        assert len(shapes.data) == count
    np.testing.assert_allclose(shapes.data[0], before[1])


def test_fifty_steps_can_be_undone(viewer, dock, slides):
    shapes = draw(viewer, dock)
    for step in range(60):
        shapes.add_rectangles([[[step, step], [step + 90, step + 90]]])
        dock.keeper._note()
    for _ in range(55):
        press(dock.undo)
    assert len(shapes.data) == 6


@pytest.mark.parametrize("answered", [QMessageBox.Cancel, QMessageBox.Discard])
def test_a_window_with_unsaved_annotations_asks(viewer, dock, slides, monkeypatch, answered):
    asked = []
    monkeypatch.setattr(QMessageBox, "warning", lambda *args: asked.append(args[2]) or answered)
    closed = []  # napari's own question comes after ours

    class Confirmed(ConfirmCloseDialog):
        def exec_(self):
            closed.append(self)

    monkeypatch.setattr(qt_main_window, "ConfirmCloseDialog", Confirmed)
    window = viewer.window._qt_window
    window.close(quit_app=False, confirm_need=True)
    assert (asked, len(closed)) == ([], 1)
    draw(viewer, dock)
    window.close(quit_app=False, confirm_need=True)
    assert asked == ["The annotations of one slide are not saved. Close the window without them?"]
    assert len(closed) == (2 if answered == QMessageBox.Discard else 1)


def test_nothing_is_asked_of_those_who_saved(
    viewer, dock, slides, monkeypatch, answer, tmp_path, settled
):
    draw(viewer, dock)
    keeper = annotating.annotating(viewer)
    assert keeper.unsaved() == [slide_of(slides[1])]
    answer(tmp_path / "saved.geojson")
    press(dock.export)
    settled()
    assert keeper.unsaved() == []


def test_annotations_survive_a_crash(viewer, dock, slides, monkeypatch, qtbot, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    slide = slide_of(slides[1])
    shapes = draw(viewer, dock)
    press(dock.chips["Stroma"])
    QTest.qWait(200)
    annotating.annotating(viewer).keep()
    qtbot.waitUntil(lambda: bool(list(recovery.folder().glob("*.geojson"))))
    QTest.qWait(100)
    [kept] = recovery.folder().glob(f"{recovery._digest(slide.path)}-*.geojson")
    assert stat.S_IMODE(recovery.folder().stat().st_mode) == 0o700
    assert "dark" not in kept.name
    assert recovery.lost(slide.path) == []  # this process still runs
    # Another process left it, and is no more.
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    kept.rename(kept.with_name(kept.name.replace(str(os.getpid()), dead.stdout.strip())))
    viewer.layers.remove(shapes)
    show(viewer, slides[0])
    assert not dock.lost.visible
    show(viewer, slides[1])
    assert dock.lost.visible
    press(dock.recover)
    assert not dock.lost.visible
    assert [dock.rows.text(row, 0) for row in range(len(dock.rows))] == ["Stroma"]
    assert recovery.lost(slide.path) == []
    assert not kept.exists()


@pytest.mark.parametrize("tool", ["Rectangle", "Line", "Outline"])
def test_a_slipped_click_draws_nothing(viewer, dock, slides, tool):
    shapes = draw(viewer, dock, (0.5, 0.5), (0.502, 0.502), tool)
    assert isinstance(shapes, Shapes)
    assert len(shapes.data) == 0
    drag_and_wait(viewer, (0.4, 0.4), (0.6, 0.6))
    assert len(shapes.data) == (0 if tool == "Outline" else 1)  # that is a line


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


def test_ctrl_z_in_labels_is_napari_s(viewer, dock, slides):
    press(dock.add_labels)
    labels = viewer.layers.selection.active
    drag_and_wait(viewer, (0.4, 0.5), (0.6, 0.5))
    assert labels.data.any()
    keys(viewer, Qt.Key_Z, Qt.ControlModifier)
    assert not labels.data.any()
    QApplication.processEvents()
