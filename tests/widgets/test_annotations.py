"""The dock "Annotate", used as people do."""

import csv
import io

import numpy as np
import pytest
from napari.layers import Labels, Points, Shapes
from napari.utils.notifications import notification_manager
from qtpy.QtCore import QPoint, QPointF, Qt
from qtpy.QtGui import QWheelEvent
from qtpy.QtTest import QTest
from qtpy.QtWidgets import QApplication, QLineEdit

import napari_wsigpu
from napari_wsigpu import Annotation, read_geojson, write_geojson
from napari_wsigpu.viewer.annotations.annotation_layers import MANY, MOST_SHAPES, annotation_layers
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.window.saving import saved
from napari_wsigpu.widgets.annotations.annotation_dock import TOOLS, Annotations
from tests.widgets.conftest import click, drag

SQUARE = np.array([(500, 600), (900, 600), (900, 1000), (500, 1000)], float)
NAME, SHAPE = 1, 4  # columns
DRAWN = [
    Annotation("polygon", (SQUARE, SQUARE / 4 + 500), "gland", "Tumor", (200, 0, 0)),
    Annotation("polygon", (SQUARE + 800,), "", "Stroma", (150, 200, 150)),
    Annotation("line", (SQUARE[:2],)),
]


@pytest.fixture
def dock(add_dock):
    return add_dock("Annotate")


@pytest.fixture
def layer(dock, slide_is_open):
    [opened] = slide_is_open(sample_path())
    return opened


@pytest.fixture
def shapes(viewer, layer, qtbot, dock):
    """Three shapes over the slide."""
    [(data, attributes, _)] = annotation_layers(DRAWN, "Annotations", layer)
    shapes = viewer.add_shapes(data, **attributes)
    qtbot.waitUntil(lambda: len(dock.rows) == 3)
    return shapes


def mpp(layer):
    return layer.data[0].slide.mpp


def cells(dock, row):
    model = dock.table.model
    return [model.index(row, column).data() for column in range(model.columnCount())]


def titles(dock):
    model = dock.table.model
    return [model.headerData(column, Qt.Horizontal) for column in range(model.columnCount())]


def click_row(dock, row, column=0, modifier=Qt.NoModifier):
    table = dock.table.native
    table.scrollTo(table.model().index(row, column))
    middle = table.visualRect(table.model().index(row, column)).center()
    QTest.mouseClick(table.viewport(), Qt.LeftButton, modifier, middle)


def test_says_that_there_is_no_slide(viewer, dock):
    assert dock.empty.visible
    viewer.add_shapes([[[0, 0], [4, 4]]])
    assert len(dock.rows) == 0


@pytest.mark.window
def test_drawn_objects_are_measured(viewer, dock, layer, qtbot):
    napari_wsigpu.wait(layer)
    assert dock.nothing.visible
    click(dock.tools["Rectangle"])
    drag(viewer, (0.4, 0.4), (0.6, 0.6))
    qtbot.waitUntil(lambda: len(dock.rows) == 1)
    assert not dock.nothing.visible
    [shapes] = [each for each in viewer.layers if isinstance(each, Shapes)]
    height, width = np.ptp(shapes.data[0], axis=0)
    x, y = mpp(layer)
    assert dock.rows.measurement(0).area == pytest.approx(width * x * height * y)
    assert dock.rows.measurement(0).perimeter == pytest.approx(2 * (width * x + height * y))
    canvas = viewer.window._qt_viewer.canvas.native
    on_glass = canvas.width() * 0.2 / viewer.scene.camera.zoom
    assert width * x == pytest.approx(on_glass, rel=0.05)
    click(dock.tools["Line"])
    drag(viewer, (0.2, 0.5), (0.3, 0.5))
    qtbot.waitUntil(lambda: len(dock.rows) == 2)
    assert dock.rows.measurement(1).length == pytest.approx(on_glass / 2, rel=0.1)
    assert sum(isinstance(each, Shapes) for each in viewer.layers) == 1


def test_shapes_for_export_are_no_annotations(
    viewer, dock, add_dock, layer, answer, tmp_path, settled
):
    export = add_dock("Export")
    click(export.draw)
    regions = viewer.layers.selection.active
    regions.add_rectangles([[[0, 0], [99, 49]]])
    click(dock.tools["Rectangle"])
    drawn = viewer.layers.selection.active
    assert drawn is not regions
    drawn.add_rectangles([[[500, 500], [600, 700]]])
    viewer.layers.selection.active = regions
    click(dock.tools["Line"])
    assert viewer.layers.selection.active is drawn
    answer(tmp_path / "slide.geojson")
    click(dock.export)
    settled()
    assert len(read_geojson(tmp_path / "slide.geojson")) == 1
    viewer.layers.selection.active = regions
    click(dock.export)
    settled()
    assert len(read_geojson(tmp_path / "slide.geojson")) == 1


@pytest.mark.window
def test_points_come_into_a_layer_of_their_own(viewer, dock, layer):
    click(dock.tools["Point"])
    drag(viewer, (0.5, 0.5), (0.5, 0.5))
    [points] = [each for each in viewer.layers if isinstance(each, Points)]
    assert len(points.data) == 1
    assert tuple(points.scale) == tuple(layer.scale)


def current_tools(dock):
    return [name for name, tool in dock.tools.items() if tool.native.isChecked()]


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_are_napari_s(viewer, dock, layer, shapes, tool):
    assert current_tools(dock) == []
    click(dock.tools[tool])
    active = viewer.layers.selection.active
    assert active.mode == TOOLS[tool][0]
    assert dock.status.value == f"{dock.tools[tool].tooltip}."
    assert current_tools(dock) == [tool]
    click(dock.tools[tool])
    assert current_tools(dock) == [tool]
    active.mode = "pan_zoom"  # by napari's controls or keys
    assert current_tools(dock) == []
    active.mode = "select"
    assert current_tools(dock) == ["Select"]
    viewer.layers.selection.active = layer
    assert current_tools(dock) == []


def test_there_may_be_nothing_to_select(viewer, dock, layer):
    click(dock.tools["Select"])
    assert dock.status.value == "There is nothing to select yet."
    assert (list(viewer.layers), current_tools(dock)) == ([layer], [])


def test_drawing_moves_the_layer_above_later_slides(viewer, dock, shapes, layer):
    above = viewer.add_image(layer.data, multiscale=True, scale=layer.scale, units=layer.units)
    shapes.visible = False
    viewer.layers.selection.active = shapes
    click(dock.tools["Outline"])
    assert list(viewer.layers) == [layer, above, shapes]
    assert shapes.visible


@pytest.mark.window
def test_a_dock_that_is_shown_again_comes_before_the_others(viewer, dock, qtbot):
    viewer.window.add_plugin_dock_widget("napari-wsigpu", "Navigator")
    qtbot.waitUntil(lambda: dock.native.visibleRegion().isEmpty())
    dock.native.parent().hide()
    dock.native.parent().show()
    qtbot.waitUntil(lambda: not dock.native.visibleRegion().isEmpty())


@pytest.mark.window
def test_columns_are_wide_enough_when_the_dock_opens_later_than_shapes(viewer, shapes, qtbot):
    later = Annotations(viewer)
    place = viewer.window.add_dock_widget(later)
    table = later.table.native
    columns = range(table.model().columnCount())
    qtbot.waitUntil(
        lambda: all(table.columnWidth(each) >= table.sizeHintForColumn(each) for each in columns)
    )
    viewer.window.remove_dock_widget(place)


def test_the_table_says_how_large_each_is(dock, shapes, layer):
    x, y = mpp(layer)
    area = (400 * 400 - 100 * 100) * x * y
    assert dock.rows.measurement(0).area == pytest.approx(area, rel=1e-4)
    around = 2 * 500 * (x + y)
    assert cells(dock, 0) == ["Tumor", "gland", f"{area:,.0f}", f"{around:,.0f}", "polygon"]
    assert cells(dock, 2)[2:4] == ["", f"{400 * x:.4g}"]
    assert titles(dock) == ["Class", "Name", "Area µm²", "Length µm", "Shape"]


def test_the_areas_of_a_table_have_one_unit(viewer, dock, layer, qtbot):
    """Square millimeters if all are large."""
    large = [Annotation("polygon", (SQUARE * 3,)), Annotation("line", (SQUARE[:2],))]
    small = Annotation("polygon", (SQUARE / 8,))
    x, y = mpp(layer)
    for drawn, unit, scale in ((large, "mm²", 1e-6), ([*large, small], "µm²", 1)):
        [(data, attributes, _)] = annotation_layers(drawn, "Annotations", layer)
        shapes = viewer.add_shapes(data, **attributes)
        qtbot.waitUntil(lambda: len(dock.rows) == len(drawn))  # noqa: B023
        assert titles(dock)[2] == f"Area {unit}"
        shown = [float(cells(dock, row)[2].replace(",", "") or 0) for row in range(len(drawn))]
        expected = np.array([1200**2, 0, 50**2])[: len(drawn)] * x * y * scale
        np.testing.assert_allclose(shown, expected, rtol=1e-3)
        viewer.layers.remove(shapes)


def test_long_texts_leave_room_for_other_columns(viewer, dock, layer, qtbot):
    name = "a very long name " * 5
    [(data, attributes, _)] = annotation_layers(
        [Annotation("polygon", (SQUARE,), name, "Tumor")], "Annotations", layer
    )
    viewer.add_shapes(data, **attributes)
    qtbot.waitUntil(lambda: len(dock.rows) == 1)
    table = dock.table.native
    table.setFixedWidth(300)
    bounds = [table.columnViewportPosition(column) for column in range(5)]
    assert table.columnWidth(NAME) < 150
    assert bounds[3] < 300  # class, name and area are visible
    assert table.model().index(0, NAME).data(Qt.ToolTipRole) == name
    table.setFixedWidth(600)
    QTest.qWait(20)
    assert bounds[SHAPE] + table.columnWidth(SHAPE) == table.viewport().width()


def test_sizes_are_in_pixels_where_the_file_names_none(viewer, dock, slide_is_open, tmp_path):
    tifffile = pytest.importorskip("tifffile")
    path = tmp_path / "plain.tif"
    tifffile.imwrite(path, np.zeros((5000, 300), np.uint8), tile=(256, 256))
    [plain] = slide_is_open(path)
    [(data, attributes, _)] = annotation_layers(DRAWN[1:2], "Annotations", plain)
    viewer.add_shapes(data, **attributes)
    assert dock.rows.measurement(0).area == pytest.approx(160_000)
    assert (titles(dock)[2], cells(dock, 0)[2]) == ("Area px²", "160,000")
    assert dock.summary.value == "1 object, area 160,000 px²"


def test_rows_and_shapes_are_selected_together(dock, shapes):
    click_row(dock, 1)
    assert set(shapes.selected_data) == {1}
    assert dock.summary.value.startswith("1 object selected, area ")
    click_row(dock, 2, modifier=Qt.ControlModifier)
    assert set(shapes.selected_data) == {1, 2}
    shapes.selected_data = {0}
    assert dock.table.selection == [0]


def test_a_click_on_a_row_shows_the_shape(viewer, dock, shapes, layer):
    before = viewer.scene.camera.center
    click_row(dock, 1)
    assert viewer.scene.camera.center == before  # all of it is visible
    viewer.scene.camera.zoom *= 6
    for row in (1, 0):
        click_row(dock, row)
        centre = DRAWN[row].rings[0].mean(axis=0) * mpp(layer)
        np.testing.assert_allclose(viewer.scene.camera.center[:-3:-1], centre, rtol=0.01)


@pytest.mark.window
def test_classes_are_given_to_shapes_and_to_the_next(viewer, dock, shapes, layer, qtbot):
    click_row(dock, 2)
    QTest.keyClicks(dock.own_class.native, "Necrosis")
    QTest.keyClick(dock.own_class.native, Qt.Key_Return)
    assert list(shapes.features["class"]) == ["Tumor", "Stroma", "Necrosis"]
    np.testing.assert_allclose(shapes.edge_color[2][:3], np.array([50, 50, 50]) / 255, atol=1e-3)
    np.testing.assert_allclose(shapes.edge_color[0][:3], np.array([200, 0, 0]) / 255, atol=1e-3)
    shapes.selected_data = set()
    click(dock.chips["Immune cells"])
    click(dock.tools["Rectangle"])
    drag(viewer, (0.4, 0.4), (0.6, 0.6))
    qtbot.waitUntil(lambda: len(dock.rows) == 4)
    assert cells(dock, 3)[0] == "Immune cells"
    np.testing.assert_allclose(shapes.edge_color[3][:3], np.array([160, 90, 160]) / 255, atol=1e-3)


def test_names_are_written_into_the_table(dock, shapes, qtbot, caplog):
    table = dock.table.native
    table.window().activateWindow()
    assert QTest.qWaitForWindowActive(table.window())
    click_row(dock, 1)
    click_row(dock, 1, NAME)
    middle = table.visualRect(table.model().index(1, NAME)).center()
    QTest.mouseDClick(table.viewport(), Qt.LeftButton, Qt.NoModifier, middle)
    editor = table.viewport().findChild(QLineEdit)
    QTest.qWait(50)
    QTest.keyClicks(editor, "nest")
    QTest.keyClick(editor, Qt.Key_Return)
    qtbot.waitUntil(lambda: list(shapes.features["name"]) == ["gland", "nest", ""])
    assert cells(dock, 1)[NAME] == "nest"
    assert not caplog.records  # Qt warns if the row is replaced while it is edited


def test_a_click_on_a_row_does_not_scroll_sideways(dock, shapes):
    table = dock.table.native
    table.setFixedWidth(150)
    click_row(dock, 0, SHAPE)
    place = table.horizontalScrollBar().value()
    assert place > 0
    click_row(dock, 2, SHAPE)
    assert dock.table.selection == [2]
    assert table.horizontalScrollBar().value() == place


def turn_wheel(widget):
    spot = widget.rect().center()
    wheel = QWheelEvent(
        QPointF(spot),
        QPointF(widget.mapToGlobal(spot)),
        QPoint(),
        QPoint(0, -120),
        Qt.NoButton,
        Qt.NoModifier,
        Qt.NoScrollPhase,
        False,
    )
    QApplication.sendEvent(widget, wheel)


def test_scrolling_the_dock_keeps_the_level(dock, layer):
    box = dock.level.native
    box.setCurrentIndex(1)
    turn_wheel(box)
    assert box.currentIndex() == 1


def test_scrolling_the_dock_keeps_the_columns(dock, shapes):
    dock.table.native.setFixedWidth(150)
    bar = dock.table.native.horizontalScrollBar()
    assert bar.maximum() > 0
    turn_wheel(bar)
    assert bar.value() == 0


def test_messages_stay_visible_while_the_dock_scrolls(dock, layer):
    assert not dock.details.native.isAncestorOf(dock.status.native)


def test_the_table_is_copied_and_saved(dock, shapes, answer, tmp_path, settled, layer):
    click_row(dock, 0)
    click(dock.copy)
    rows = list(csv.reader(io.StringIO(QApplication.clipboard().text()), delimiter="\t"))
    assert len(rows) == 2
    texts, sizes = ["Image", "Name", "Class", "Shape"], ["Area µm²", "Length µm", "Perimeter µm"]
    assert rows[0] == [*texts, *sizes, "Centroid X µm", "Centroid Y µm"]
    x, y = mpp(layer)
    assert float(rows[1][4]) == pytest.approx(150_000 * x * y, rel=1e-4)
    target = tmp_path / "table.csv"
    answer(target)
    click(dock.save)
    settled()
    with target.open(encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["Class"] for row in read] == ["Tumor", "Stroma", ""]
    assert {row["Image"] for row in read} == {"he_phantom.svs"}
    low, high = SQUARE.min(axis=0), SQUARE.max(axis=0)
    center = [float(read[1][f"Centroid {each} µm"]) for each in "XY"]
    np.testing.assert_allclose(center, ((low + high) / 2 + 800) * mpp(layer), rtol=1e-4)
    assert float(read[2]["Length µm"]) == pytest.approx(400 * x, rel=1e-4)
    assert dock.status.value == saved(target)


def test_to_qupath_and_back(viewer, dock, shapes, answer, tmp_path, settled):
    target = tmp_path / "slide.geojson"
    answer(target)
    click(dock.export)
    settled()
    found = read_geojson(target)
    assert [each.classification for each in found] == ["Tumor", "Stroma", ""]
    np.testing.assert_allclose(found[1].rings[0], SQUARE + 800, atol=0.01)
    viewer.layers.remove(shapes)
    write_geojson(target, [*found, Annotation("points", (SQUARE,))])
    click(dock.load)
    settled()
    assert dock.status.value == "'slide.geojson': 7 objects."
    assert dock.summary.value.startswith("7 objects, ")  # points, too
    assert len(dock.rows) == 7
    assert [type(each) for each in viewer.layers][1:] == [Shapes, Points]


def test_very_many_outlines_come_as_labels_and_go_as_they_came(
    viewer, dock, layer, answer, tmp_path, settled
):
    source, target = tmp_path / "cells.geojson", tmp_path / "again.geojson"
    write_geojson(source, [Annotation("polygon", (SQUARE[:3],))] * (MOST_SHAPES + 1))
    answer(source)
    click(dock.load)
    settled()
    assert dock.status.value == f"'cells.geojson': {MOST_SHAPES + 1:,} objects. {MANY}"
    assert isinstance(viewer.layers[-1], Labels)
    viewer.layers.selection.active = layer
    answer(target)
    click(dock.export)
    settled()
    assert len(read_geojson(target)) == MOST_SHAPES + 1


def test_failures_are_said(dock, layer, answer, tmp_path, settled):
    click(dock.export)
    assert "nothing to export" in dock.status.value
    path = tmp_path / "no.geojson"
    path.write_text("{}")
    answer(path)
    click(dock.load)
    settled()
    assert "has no features" in dock.status.value
    assert "has no features" in notification_manager.records[-1].message


@pytest.mark.window
def test_nothing_is_kept_of_a_closed_dock(viewer, dock, shapes, qtbot):
    count = len(shapes.events.data.callbacks)
    viewer.window.remove_dock_widget(dock.native.parent())
    dock.native.deleteLater()
    qtbot.wait(50)
    assert len(shapes.events.data.callbacks) < count
    shapes.add_rectangles([[[0, 0], [10, 10]]])


@pytest.mark.window
def test_labels_of_a_level_are_painted_and_saved(
    viewer, dock, layer, answer, tmp_path, settled, slide_is_open
):
    slide = layer.data[0].slide
    napari_wsigpu.wait(layer)
    level = next(each for each in slide.pyramid if each.number == 1)
    dock.level.value = 1
    click(dock.add_labels)
    labels = viewer.layers.selection.active
    assert labels.data.shape == (level.layout.height, level.layout.width)
    np.testing.assert_allclose(
        labels.extent.world,
        layer.extent.world,
        atol=level.layout.downsample(slide.levels[0].layout),
    )
    labels.brush_size = 30
    drag(viewer, (0.4, 0.5), (0.6, 0.5))
    painted = np.argwhere(labels.data)
    assert len(painted)
    world = labels.data_to_world(painted.mean(axis=0))
    np.testing.assert_allclose(world, viewer.scene.camera.center[-2:], atol=100)
    target = tmp_path / "labels.zarr"
    answer(target)
    for value in (1, 7):  # saved again, as people do
        labels.data[:4, :4] = value
        viewer.layers.selection.active = labels if value == 1 else layer
        click(dock.save_labels)
        settled()
        assert dock.status.value == saved(target)
        answer(tmp_path / "not asked again.zarr")
    zarr = pytest.importorskip("zarr")
    own = zarr.open_group(target, mode="r")["labels/labels"]
    np.testing.assert_array_equal(own["0"][...], labels.data)
    [multiscale] = own.attrs["ome"]["multiscales"]
    [scale, *_] = multiscale["datasets"][0]["coordinateTransformations"]
    np.testing.assert_allclose(scale["scale"], labels.scale)
    assert {axis["unit"] for axis in multiscale["axes"]} == {"micrometer"}
    # The labels can be painted on after they are opened from the dock.
    viewer.layers.remove(labels)
    viewer.layers.selection.active = layer
    answer(target)
    click(dock.open_labels)
    settled()
    continued = viewer.layers.selection.active
    assert (continued.name, dock.status.value) == ("he_phantom labels", "'labels.zarr': labels")
    np.testing.assert_array_equal(continued.data, labels.data)
    np.testing.assert_allclose(continued.scale, labels.scale)
    np.testing.assert_allclose(continued.translate, labels.translate)
    continued.data[-4:, -4:] = 9
    answer(tmp_path / "not asked again.zarr")
    click(dock.save_labels)
    settled()
    np.testing.assert_array_equal(own["0"][...], continued.data)
    labels = continued
    _, *again = viewer.open(target, plugin="napari-wsigpu")
    np.testing.assert_allclose(again[0].scale, labels.scale)
    np.testing.assert_array_equal(np.asarray(again[0].data[0]).squeeze(), labels.data)
    near = np.abs(np.array(again[0].translate) - labels.translate)
    assert (near <= labels.scale).all()


def test_only_labels_of_the_slide_are_saved(viewer, dock, layer):
    viewer.add_labels(np.zeros((8, 8), int))
    click(dock.save_labels)
    assert "Select a labels layer" in dock.status.value
