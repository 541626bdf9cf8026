"""The dock "Navigator", used as people do."""

import re

import numpy as np
import pytest
import tifffile
from qtpy.QtCore import QPoint, Qt
from qtpy.QtTest import QTest

from napari_wsigpu.slide.facts import TIMES
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.layers.slide_layers import show_composite, shown_composite, slide_of
from napari_wsigpu.viewer.view.navigation import (
    center_on,
    center_on_box,
    magnifications_of,
    objective_of,
)
from napari_wsigpu.widgets.kit.picture import overview_image
from tests.viewer.shared import wait_for_layout
from tests.widgets.conftest import assert_text_grows, click


@pytest.fixture
def dock(add_dock):
    return add_dock("Navigator")


@pytest.fixture
def layer(dock, slide_is_open, settled):
    [opened] = slide_is_open(sample_path())
    settled()
    return opened


def middle(viewer, layer):
    """Where the middle of the view is, (x, y) in pixels of level 0."""
    y, x = layer.world_to_data(viewer.scene.camera.center[-2:])
    return np.array([x, y]) + 0.5


def shown(dock, qtbot):
    """The frame on the overview, once it follows the view."""
    qtbot.wait(80)
    return dock.map.native.view


def at(dock, x, y):
    return dock.map.native.widget_position(x, y).toPoint()


def write(dock, text, unit="px"):
    dock.unit.value = unit
    dock.goal.value = ""
    QTest.keyClicks(dock.goal.native, text)
    QTest.keyClick(dock.goal.native, Qt.Key_Return)


def test_says_that_there_is_no_slide(viewer, dock):
    assert dock.empty.visible
    viewer.add_image(np.zeros((8, 8)))
    assert not dock.details.visible


@pytest.mark.window
def test_the_frame_is_what_the_view_shows(viewer, dock, layer, qtbot):
    assert dock.map.native.image is not None
    wait_for_layout(viewer)
    viewer.scene.camera.zoom *= 4
    viewer.scene.camera.center = (0, 400, 300)
    frame = shown(dock, qtbot)
    corners = viewer.window._qt_viewer.canvas._viewbox_corners_in_world[:, -2:] / layer.scale
    np.testing.assert_allclose(frame.min(axis=0), corners.min(axis=0)[::-1] + 0.5, atol=1)
    np.testing.assert_allclose(frame.max(axis=0), corners.max(axis=0)[::-1] + 0.5, atol=1)


def test_a_click_and_a_drag_move_the_view(viewer, dock, layer, qtbot):
    viewer.scene.camera.zoom *= 4
    a_pixel = layer.data[0].shape[1] / dock.map.width  # of the screen
    QTest.mouseClick(dock.map.native, Qt.LeftButton, Qt.NoModifier, at(dock, 1000, 800))
    np.testing.assert_allclose(middle(viewer, layer), (1000, 800), atol=2 * a_pixel)
    QTest.mousePress(dock.map.native, Qt.LeftButton, Qt.NoModifier, at(dock, 1000, 800))
    QTest.mouseMove(dock.map.native, at(dock, 1500, 1200))
    qtbot.wait(20)
    QTest.mouseRelease(dock.map.native, Qt.LeftButton, Qt.NoModifier, at(dock, 1500, 1200))
    np.testing.assert_allclose(middle(viewer, layer), (1500, 1200), atol=2 * a_pixel)
    QTest.mouseClick(dock.map.native, Qt.RightButton, Qt.NoModifier, at(dock, 100, 100))
    np.testing.assert_allclose(middle(viewer, layer), (1500, 1200), atol=2 * a_pixel)


def test_buttons_magnify_as_objectives_do(viewer, dock, layer, qtbot):
    slide = layer.data[0].slide
    before = middle(viewer, layer)
    for number in magnifications_of(slide):
        click(dock.buttons[number])
        on_screen = viewer.scene.camera.zoom * layer.scale[-1]  # of a pixel of level 0
        assert on_screen == pytest.approx(number / slide.objective)
        qtbot.waitUntil(
            lambda number=number: dock.magnification.value == f"Shown at {number}{TIMES}"
        )
    np.testing.assert_allclose(middle(viewer, layer), before)


@pytest.mark.parametrize("text", ["1200, 900", "1200 900", "(1200;900)", "x 1200.0, y 900 px"])
def test_goes_to_a_position(viewer, dock, layer, text):
    write(dock, text)
    np.testing.assert_allclose(middle(viewer, layer), (1200, 900))


def test_goes_to_a_position_in_micrometres(viewer, dock, layer):
    write(dock, "300, 200", "µm")
    x, y = layer.data[0].slide.mpp
    np.testing.assert_allclose(middle(viewer, layer), (300 / x, 200 / y))


@pytest.mark.parametrize(
    ("text", "said"),
    [("here", "two numbers"), ("1.2.3, 4", "two numbers"), ("", "two numbers"),
     ("-5, 3", "outside"), ("1, 9999999", "outside")],
)  # fmt: skip
def test_says_what_is_no_position(viewer, dock, layer, text, said):
    before = middle(viewer, layer)
    write(dock, text)
    assert said in dock.position.value
    np.testing.assert_array_equal(middle(viewer, layer), before)


@pytest.mark.window
def test_says_what_is_under_the_mouse(viewer, dock, layer, qtbot):
    QTest.qWait(300)
    assert dock.position.value == ""  # the mouse has not moved
    canvas = viewer.window._qt_viewer.canvas.native
    QTest.mouseMove(canvas, QPoint(5, 5))  # it may rest in the middle
    QTest.qWait(100)
    QTest.mouseMove(canvas, QPoint(canvas.width() // 2, canvas.height() // 2))
    a_pixel = 1 / (viewer.scene.camera.zoom * layer.scale[-1])  # of the screen
    expected = middle(viewer, layer)

    def said():
        lines = dock.position.value.splitlines() or ["", ""]
        return [[float(each) for each in re.findall(r"[\d.]+", line)] for line in lines]

    qtbot.waitUntil(lambda: np.allclose(said()[1] or 0, expected, atol=2 * a_pixel))
    in_micrometres, in_pixels = said()
    np.testing.assert_allclose(in_micrometres, in_pixels * layer.scale[::-1], atol=1)
    viewer.cursor.position = (-500, -500)
    qtbot.waitUntil(lambda: dock.position.value == "")


def test_a_slide_of_unknown_scale(viewer, dock, slide_is_open, tmp_path, qtbot):
    path = tmp_path / "plain.tif"
    tifffile.imwrite(path, np.zeros((5000, 300), np.uint8), tile=(256, 256))
    [plain] = slide_is_open(path)
    assert objective_of(plain.data[0].slide) is None
    assert not any(button.enabled for button in dock.buttons.values())
    assert list(dock.unit.choices) == ["px"]
    viewer.scene.camera.zoom = 0.5
    qtbot.waitUntil(lambda: dock.magnification.value == "Shown at 50.0%")


def test_magnifications_end_at_the_scan_s(dock, slide_is_open):
    [layer] = slide_is_open(sample_path())
    assert objective_of(layer.data[0].slide) == 20
    enabled = {number: each.enabled for number, each in dock.buttons.items()}
    assert enabled == {1: True, 2: True, 5: True, 10: True, 20: True, 40: False}
    assert "20" in dock.buttons[40].tooltip


def test_pixel_size_stands_for_the_objective(write_channels, slide_is_open, dock):
    path, *_ = write_channels(1)
    [channel] = slide_is_open(path)
    assert objective_of(channel.data[0].slide) == pytest.approx(10 / 0.375)


def test_the_map_shows_the_channels_of_the_layer(write_channels, slide_is_open, dock, qtbot):
    [layer] = slide_is_open(write_channels(5)[0])
    slide, expected = slide_of(layer), shown_composite(layer)
    for channels in ([0, 1, 2, 3], [4], [2, 3]):
        expected = slide.composite(channels, expected)
        show_composite(layer, expected)
        image = overview_image(slide, expected)
        qtbot.waitUntil(lambda image=image: dock.map.native.image == image)


@pytest.mark.parametrize("size", [4, 300, 3000])
def test_all_of_an_object_is_shown(viewer, layer, size, qtbot):
    viewer.scene.camera.zoom = 2 / layer.scale[-1]
    box = np.array([(500, 400), (500 + size, 400 + size)], float)
    center_on(viewer, layer, 3000, 3000)
    center_on_box(viewer, layer, box)
    np.testing.assert_allclose(middle(viewer, layer), box.mean(axis=0))
    room = np.array(viewer.canvas.size) / (viewer.scene.camera.zoom * layer.scale[-1])
    assert (room >= size).all()
    before = viewer.scene.camera.center
    center_on_box(viewer, layer, box + 0.1)  # all of it is visible already
    assert viewer.scene.camera.center == before


@pytest.mark.window
def test_text_grows(dock, layer, qtbot):
    assert_text_grows([dock.goal, dock.position, dock.buttons[1]], qtbot)


def test_a_hidden_dock_follows_nothing(viewer, dock, layer, qtbot):
    dock.native.parent().hide()
    before = shown(dock, qtbot).copy()
    viewer.scene.camera.zoom *= 3
    np.testing.assert_array_equal(shown(dock, qtbot), before)
    dock.native.parent().show()
    assert not np.array_equal(shown(dock, qtbot), before)


def test_pixels_that_are_not_square(viewer, dock, slide_is_open, add_dock, settled, tmp_path):
    path = tmp_path / "slide.ome.tif"
    pixels = np.zeros((120, 200, 3), np.uint8)
    sizes = {"PhysicalSizeX": 0.5, "PhysicalSizeY": 2.0}
    tifffile.imwrite(path, pixels, photometric="rgb", metadata={"axes": "YXS", **sizes}, ome=True)
    inspector = add_dock("Inspector")
    slide_is_open(path)
    settled()
    for image in (dock.map.native.image, inspector.header.thumbnail.native.image):
        assert image.height() / image.width() == pytest.approx(120 * 2.0 / (200 * 0.5), rel=0.01)
    corner, opposite = (
        dock.map.native.widget_position(0, 0),
        dock.map.native.widget_position(200, 120),
    )
    across, down = opposite.x() - corner.x(), opposite.y() - corner.y()
    assert down / across == pytest.approx(2.4, rel=0.01)
    assert down <= dock.map.height
