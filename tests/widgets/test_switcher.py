"""The dock "Slides", used as people do."""

import shutil

import numpy as np
import pytest
from napari.utils.notifications import notification_manager
from qtpy.QtCore import QSize, Qt
from qtpy.QtGui import QIcon
from qtpy.QtTest import QTest

from napari_wsigpu.conversion import convert
from napari_wsigpu.viewer.annotations.annotation_layers import is_padding
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.layers.associated_layer import add_associated_image
from napari_wsigpu.viewer.layers.slide_layers import slide_of
from napari_wsigpu.viewer.napari_internals import qt_viewer
from napari_wsigpu.viewer.view.arrangement import fit_slide
from tests.viewer.shared import wait_for_layout
from tests.widgets.conftest import drag


@pytest.fixture
def dock(add_dock):
    return add_dock("Slides")


@pytest.fixture
def dark(tmp_path):
    """A second slide, smaller than the first."""
    path = tmp_path / "dark.tif"
    convert(sample_path(), path, region=(1500, 1500, 1024, 1024))
    return path


def click(widget, pos=None):
    widget = getattr(widget, "native", widget)
    QTest.mouseClick(widget, Qt.LeftButton, pos=pos or widget.rect().center())
    QTest.qWait(200)


def choose(dock, name):
    [item] = dock.list.native.findItems(name, Qt.MatchExactly)
    click(dock.list.native.viewport(), dock.list.native.visualItemRect(item).center())


def listed(dock):
    return [dock.list.native.item(row).text() for row in range(dock.list.native.count())]


def test_is_empty_without_slides(viewer, dock):
    assert dock.empty.visible
    assert not dock.list.visible
    viewer.add_image(np.zeros((8, 8)))
    assert listed(dock) == []


@pytest.mark.window
def test_shows_one_alone_and_fits_it(viewer, dock, slide_is_open, dark):
    first, second = slide_is_open(sample_path(), dark)
    wait_for_layout(viewer)
    assert listed(dock) == ["he_phantom.svs", "dark.tif"]
    assert dock.list.native.currentItem().text() == "dark.tif"
    small = viewer.scene.camera.zoom
    choose(dock, "he_phantom.svs")
    assert (first.visible, second.visible) == (True, False)
    assert viewer.layers.selection.active is first
    assert viewer.scene.camera.zoom < small / 3
    choose(dock, "dark.tif")
    assert (first.visible, second.visible) == (False, True)
    assert viewer.scene.camera.zoom == pytest.approx(small, rel=0.02)
    click(dock.all)
    assert (first.visible, second.visible) == (True, True)


@pytest.mark.window
def test_each_slide_is_shown_where_the_user_left_it(viewer, dock, slide_is_open, dark, tmp_path):
    third = shutil.copy(dark, tmp_path / "third.tif")
    slide_is_open(sample_path(), dark)
    wait_for_layout(viewer)
    camera = viewer.scene.camera
    fitted = camera.zoom
    choose(dock, "he_phantom.svs")
    camera.zoom, camera.center = 4 * camera.zoom, (0, *np.array(camera.center[1:]) * 1.1)
    left = camera.zoom, camera.center
    choose(dock, "dark.tif")
    assert camera.zoom == pytest.approx(fitted, rel=0.02)
    choose(dock, "he_phantom.svs")
    assert (camera.zoom, camera.center) == left
    choose(dock, "he_phantom.svs")  # again, although it is shown
    assert (camera.zoom, camera.center) == left
    click(dock.side_by_side)
    assert camera.zoom < left[0] / 2
    choose(dock, "he_phantom.svs")
    assert (camera.zoom, camera.center) == left
    # Also if it was left for a slide that is opened.
    slide_is_open(third)
    assert listed(dock)[-1] == "third.tif"
    assert camera.zoom != left[0]
    choose(dock, "he_phantom.svs")
    assert (camera.zoom, camera.center) == left
    viewer.window.resize(1500, 900)
    QTest.qWait(300)
    choose(dock, "dark.tif")
    assert camera.zoom > 1.1 * fitted  # it was not moved, so it fits the larger canvas


@pytest.mark.window
def test_side_by_side_each_has_its_part_of_the_canvas(viewer, dock, slide_is_open):
    viewer.window.resize(1500, 900)
    first, second = slide_is_open(sample_path(), sample_path())
    for layer in (first, second):
        layer.interpolation2d = "linear"  # the nearest pixels differ between halves of odd widths
    click(dock.side_by_side)
    assert viewer.canvas.grid.enabled
    assert viewer.canvas.grid.actual_shape(viewer.layers) == (1, 2)
    QTest.qWait(800)
    picture = viewer.screenshot(flash=False)[..., :3].astype(int)
    left, right = np.array_split(picture[:, : picture.shape[1] // 2 * 2], 2, axis=1)
    assert (left.min(axis=2) > 200).mean() > 0.1
    assert np.abs(left - right).mean() < 3
    assert not dock.note.visible
    click(dock.all)
    assert not viewer.canvas.grid.enabled
    assert {slide_of(first), slide_of(second)} == set(dock.slides())


@pytest.mark.window
def test_every_frame_side_by_side_shows_all_that_was_fitted(
    viewer, dock, slide_is_open, dark, monkeypatch
):
    viewer.window.resize(1500, 900)
    slide_is_open(sample_path(), dark)
    QTest.qWait(800)  # until the window and its docks keep their sizes
    canvas, zooms = qt_viewer(viewer).canvas, []
    scene, draw = canvas._scene_canvas, canvas._scene_canvas._draw_scene

    def noted(*arguments, **options):
        draw(*arguments, **options)  # which may change the sizes of the cells
        zooms.append((viewer.scene.camera.zoom, *(each.zoom for each in canvas.grid_cameras)))

    monkeypatch.setattr(scene, "_draw_scene", noted)
    click(dock.side_by_side)
    QTest.qWait(500)
    in_cells = [frame for frame in zooms if len(frame) > 1]
    assert in_cells
    for fitted, *cells in in_cells:
        np.testing.assert_allclose(cells, [fitted] * 2)


@pytest.mark.window
def test_annotations_stay_with_their_slides_side_by_side(
    viewer, dock, add_dock, slide_is_open, dark, qtbot
):
    viewer.window.resize(1500, 900)
    slides = slide_is_open(sample_path(), dark)
    annotate = add_dock("Annotate")
    QTest.qWait(200)
    choose(dock, "dark.tif")
    click(annotate.tools["Rectangle"])
    drawn = viewer.layers.selection.active
    for place in (0.3, 0.5):
        drag(viewer, (place, place), (place + 0.1, place + 0.1))
    choose(dock, "he_phantom.svs")
    assert not drawn.visible
    click(dock.side_by_side)
    viewer.screenshot(flash=False)  # fails if outlines can't be drawn
    assert not dock.note.visible
    assert viewer.canvas.grid.actual_shape(viewer.layers) == (1, 2)

    def cells():
        stride, layers = viewer.canvas.grid.stride, list(viewer.layers)
        return [layers[at : at + stride] for at in range(0, len(layers), stride)]

    first, second = cells()
    assert (first[0], second) == (slides[0], [slides[1], drawn])
    assert all(layer.visible for layer in first + second)
    # A layer that is added now joins the cell of its slide.
    viewer.layers.selection.active = slides[0]
    click(annotate.tools["Point"])
    points = viewer.layers.selection.active
    qtbot.waitUntil(lambda: [len(each) for each in cells()] == [3, 3])
    assert points in cells()[0]
    drag(viewer, (0.2, 0.5), (0.2, 0.5))
    assert len(points.data) == 1
    assert slides[0].get_value(points.data_to_world(points.data[0]), world=True) is not None
    # Layers that only filled cells go with the cells.
    click(annotate.tools["Select"])
    assert any(map(is_padding, viewer.layers))
    choose(dock, "dark.tif")
    assert set(viewer.layers) == {*slides, drawn, points}


@pytest.mark.window
def test_annotations_leave_the_screen_with_their_slide(
    viewer, dock, add_dock, slide_is_open, dark, qtbot
):
    first, second = slide_is_open(sample_path(), dark)
    annotate = add_dock("Annotate")
    drawn = {}
    for name, layer in (("he_phantom.svs", first), ("dark.tif", second)):
        choose(dock, name)
        click(annotate.tools["Rectangle"])
        drawn[layer] = viewer.layers.selection.active
        drawn[layer].add_rectangles(np.array([[10, 10], [90, 90]]))
    assert second.visible
    path = slide_of(second).path
    viewer.layers.selection.active = second
    viewer.layers.remove_selected()
    assert not drawn[second].visible
    qtbot.waitUntil(lambda: first.visible)
    assert drawn[first].visible
    assert annotate.slide is slide_of(first)
    assert len(annotate.rows) == 1
    choose(dock, "he_phantom.svs")
    assert not drawn[second].visible
    [again] = slide_is_open(path)
    qtbot.waitUntil(lambda: again.visible and not first.visible)
    assert drawn[second].visible
    assert not drawn[first].visible


@pytest.mark.window
def test_a_tool_shows_a_hidden_slide(viewer, dock, add_dock, slide_is_open):
    [layer] = slide_is_open(sample_path())
    annotate = add_dock("Annotate")
    layer.visible = False
    click(annotate.tools["Rectangle"])
    assert layer.visible
    assert viewer.layers.selection.active.mode == "add_rectangle"


@pytest.mark.window
@pytest.mark.parametrize("tool", ["Rectangle", "Point"])
def test_tools_draw_on_the_slide_under_the_mouse(viewer, dock, add_dock, slide_is_open, dark, tool):
    viewer.window.resize(1500, 900)
    slides = slide_is_open(sample_path(), dark)
    annotate = add_dock("Annotate")
    QTest.qWait(200)
    choose(dock, "he_phantom.svs")
    click(dock.side_by_side)
    click(annotate.tools[tool])
    annotate.set_class("Tumor")
    drawn = viewer.layers.selection.active
    assert drawn.metadata["slide"] == slide_of(slides[0]).path
    QTest.qWait(300)
    drag(viewer, (0.55, 0.3), (0.55, 0.3) if tool == "Point" else (0.6, 0.4))
    QTest.qWait(300)
    other = viewer.layers.selection.active
    assert len(drawn.data) == 0
    assert len(other.data) == 1
    assert other.metadata["slide"] == slide_of(slides[1]).path
    assert list(other.features["class"]) == ["Tumor"]
    assert annotate.slide is slide_of(slides[1])
    assert annotate.tools[tool].native.isChecked()
    QTest.qWait(300)
    assert len(annotate.rows) == 1
    assert viewer.canvas.grid.actual_shape(viewer.layers) == (1, 2)
    drag(viewer, (0.1, 0.3), (0.1, 0.3) if tool == "Point" else (0.15, 0.4))
    QTest.qWait(300)
    assert (len(drawn.data), len(other.data)) == (1, 1)
    assert viewer.layers.selection.active is drawn


@pytest.mark.window
def test_opened_images_are_in_view(viewer, dock, slide_is_open, dark):
    first, _ = slide_is_open(sample_path(), dark)
    QTest.qWait(400)
    choose(dock, "he_phantom.svs")
    label = add_associated_image(viewer, slide_of(first), "label", np.zeros((40, 30, 3), np.uint8))
    QTest.qWait(200)

    def is_seen():
        middle, width = viewer.scene.camera.center[-1], viewer.canvas.size[1]
        return label.extent.world[1, 1] < middle + width / viewer.scene.camera.zoom / 2

    assert is_seen()
    viewer.scene.camera.zoom *= 4
    fit_slide(viewer, slide_of(first))
    assert is_seen()
    choose(dock, "dark.tif")
    assert not label.visible


@pytest.mark.window
def test_tools_stop_on_a_hidden_slide(viewer, add_dock, slide_is_open):
    [layer] = slide_is_open(sample_path())
    annotate = add_dock("Annotate")
    click(annotate.tools["Rectangle"])
    drawn = viewer.layers.selection.active
    layer.visible = False
    drag(viewer, (0.4, 0.4), (0.6, 0.6))
    QTest.qWait(100)
    assert len(drawn.data) == 0
    assert drawn.mode == "pan_zoom"
    assert "is not visible; show it" in notification_manager.records[-1].message


def test_channels_of_a_slide_stay_together(viewer, dock, slide_is_open, write_channels, tmp_path):
    path, *_ = write_channels(2)
    twin = tmp_path / "twin.ome.tif"
    twin.write_bytes(path.read_bytes())
    slide_is_open(path, twin)
    viewer.layers.move(0, 3)
    click(dock.side_by_side)
    assert viewer.canvas.grid.actual_shape(viewer.layers) == (1, 2)
    slides = [slide_of(layer) for layer in viewer.layers]
    assert slides[0] is slides[1] is not slides[2]
    assert slides[2] is slides[3]


def test_says_why_it_cannot_be_side_by_side(viewer, dock, slide_is_open, write_channels):
    slide_is_open(sample_path(), write_channels(2)[0])
    click(dock.side_by_side)
    assert "different numbers of channels" in dock.note.value
    assert not viewer.canvas.grid.enabled
    shapes = viewer.add_shapes()
    click(dock.side_by_side)
    assert f"'{shapes.name}' belongs to no slide" in dock.note.value
    viewer.layers.remove(shapes)
    assert not dock.note.visible


@pytest.mark.window
def test_a_slide_stays_fitted_after_it_was_chosen(viewer, dock, slide_is_open, dark, qtbot):
    """As a new slide does, until the user moves the view."""
    slide_is_open(sample_path(), dark)
    camera = viewer.scene.camera

    def refitted():
        zoom = camera.zoom
        width, height = viewer.window._qt_window.width(), viewer.window._qt_window.height()
        viewer.window.resize(width - 200, height - 150)
        QTest.qWait(300)
        return camera.zoom < 0.95 * zoom

    viewer.window.resize(1500, 1000)
    QTest.qWait(300)
    for name in ("dark.tif", "he_phantom.svs"):
        choose(dock, name)
        assert refitted()
    click(dock.side_by_side)
    QTest.qWait(100)
    assert refitted()
    camera.zoom *= 1.5
    assert not refitted()


def test_each_slide_has_a_thumbnail(viewer, dock, slide_is_open, settled):
    slide_is_open(sample_path())
    settled()
    icon = dock.list.native.item(0).icon()
    assert not icon.isNull()
    picture = icon.pixmap(48, 48).toImage()
    # Qt would tint the icon of the current slide.
    assert icon.pixmap(QSize(48, 48), QIcon.Selected).toImage() == picture
    assert picture.width() == 48
    middle = picture.pixelColor(20, picture.height() // 2)
    assert middle.red() > middle.green() + 20  # stained, and no placeholder


def test_buttons_need_two_slides(viewer, dock, slide_is_open):
    slide_is_open(sample_path())
    assert not dock.side_by_side.enabled
    slide_is_open(sample_path())
    assert dock.side_by_side.enabled
    viewer.layers.pop()
    assert not dock.side_by_side.enabled
    assert dock.list.native.count() == 1
