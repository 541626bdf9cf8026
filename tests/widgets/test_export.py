"""The dock "Export", used as people do."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tifffile
import zarr
from napari.layers import Shapes
from napari.utils.notifications import notification_manager
from PIL import Image
from qtpy.QtCore import QPoint, Qt
from qtpy.QtWidgets import QComboBox, QMessageBox

from napari_wsigpu import Annotation, convert, open_slide, write_geojson
from napari_wsigpu.model.errors import SlideError, SlideReadError
from napari_wsigpu.slide.facts import TIMES
from napari_wsigpu.viewer.annotations.annotation_layers import SLIDE
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.layers.slide_layers import show_composite, shown_composite, slide_of
from napari_wsigpu.viewer.view.arrangement import show_only
from napari_wsigpu.viewer.window.saving import saved
from napari_wsigpu.widgets.export.export_dock import CANCELLED, Export
from napari_wsigpu.widgets.export.export_plan import ENDINGS, Kind, Part, export_region
from tests.widgets.conftest import assert_text_grows, click, workers
from tests.writers import icc, slides

OME_TIFF, PNG, OME_ZARR = Kind
VIEW, WHOLE = Part
REGION = (300, 200, 700, 500)
SCRIPT = """
import sys, threading
import napari
from qtpy.QtCore import QTimer
from qtpy.QtTest import QTest
from napari_wsigpu.viewer.view.region import whole
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.widgets.export.export_dock import Export
from napari_wsigpu.widgets.export.export_plan import Kind, Plan
from pathlib import Path

started, go = threading.Event(), threading.Event()

def note(self, done, total):
    started.set()
    go.wait(20)

Export._note = note
viewer = napari.Viewer()
[layer] = viewer.open(sample_path(), plugin="napari-wsigpu")
_, dock = viewer.window.add_plugin_dock_widget("napari-wsigpu", "Export")
slide = layer.data[0].slide
plan = Plan(slide, whole(slide), 0, "stored", Kind.OME_TIFF)
dock.write([(plan, Path(sys.argv[1]) / "roi.ome.tif")], overwrite=False)
assert started.wait(20)

def leave():
    threading.Timer(4, go.set).start()  # long after the window has closed
    viewer.close()

QTimer.singleShot(100, leave)
napari.run()
"""


@pytest.fixture
def dock(add_dock):
    return add_dock("Export")


@pytest.fixture
def layer(dock, slide_is_open):
    [opened] = slide_is_open(sample_path())
    return opened


@pytest.fixture
def rectangle(viewer):
    """Draw a rectangle of a slide's pixels in a new layer of shapes."""

    def draw(layer, region=REGION):
        x, y, width, height = region
        top, left = y - 0.5, x - 0.5
        corners = [[top, left], [top + height, left + width]]
        return viewer.add_shapes(
            [corners], shape_type="rectangle", scale=layer.scale, units=layer.units
        )

    return draw


@pytest.fixture
def held(monkeypatch, gate):
    """Hold exports after their first pixels, until the test lets them go on."""
    begun = threading.Event()

    def note(self, done, total):
        begun.set()
        assert gate.wait(20)

    monkeypatch.setattr(Export, "_note", note)
    return begun


def choose(dock, **choices):
    for name, value in choices.items():
        getattr(dock, name).value = value


def names(choice):
    box = choice.native
    return [box.itemText(index) for index in range(box.count())]


def read(path):
    if path.suffix == ".png":
        with Image.open(path) as image:
            return np.array(image)
    if path.suffix == ".zarr":
        pixels = zarr.open_group(path, mode="r")["0"][...]
        return np.moveaxis(pixels.reshape(-1, *pixels.shape[-2:]), 0, -1)
    with tifffile.TiffFile(path) as file:
        pixels = file.series[0].levels[0].asarray()
        return np.moveaxis(pixels, 0, -1) if file.series[0].axes.startswith("C") else pixels


def pixel_size(path):
    """Micrometres of a pixel (x, y), as others than this package read them."""
    if path.suffix == ".png":
        with Image.open(path) as image:
            return [25400 / dots for dots in image.info["dpi"]]
    if path.suffix == ".zarr":
        [image] = zarr.open_group(path, mode="r").attrs["ome"]["multiscales"]
        scale, _ = image["datasets"][0]["coordinateTransformations"]
        return scale["scale"][:-3:-1]
    with tifffile.TiffFile(path) as file:
        pixels = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]["Pixels"]
        return pixels["PhysicalSizeX"], pixels["PhysicalSizeY"]


def test_says_that_there_is_no_slide(viewer, dock):
    assert dock.empty.visible
    assert not dock.details.visible
    viewer.add_image(np.zeros((8, 8)))
    viewer.add_shapes([[[0, 0], [4, 4]]], shape_type="rectangle")
    assert dock.slide is None


def test_writes_a_drawn_rectangle_exactly(dock, layer, rectangle, answer, tmp_path, settled):
    rectangle(layer)
    targets = []
    for kind, level in product((OME_TIFF, PNG, OME_ZARR), (0, 1)):
        choose(dock, level=level, kind=kind)
        target = tmp_path / f"level {level}{ENDINGS[kind][0]}"
        targets.append(target)
        answer(target)
        click(dock.export)
        settled()
        assert dock.status.value == saved(target)
        assert {*tmp_path.iterdir()} == {*targets}
        with open_slide(sample_path(), "cpu") as slide:
            down = slide.level_downsamples[level]
            size = round(REGION[2] / down), round(REGION[3] / down)
            expected = slide.read_region(REGION[:2], size, level)
            mpp = [value * down for value in slide.mpp]
        np.testing.assert_array_equal(read(target), expected)
        assert pixel_size(target) == pytest.approx(mpp, rel=1e-3)


@pytest.mark.window
def test_result_is_shown_below_the_button_and_moves_nothing(
    dock, layer, answer, tmp_path, settled, qtbot
):
    parts = [dock.export.native, dock.form.native]
    choose(dock, region=WHOLE, level=3)
    qtbot.wait(500)  # until the docks are laid out, and the summary is updated
    before = [part.mapTo(dock.native, QPoint(0, 0)) for part in parts]
    answer(tmp_path / "roi.ome.tif")
    click(dock.export)
    settled()
    assert [part.mapTo(dock.native, QPoint(0, 0)) for part in parts] == before
    status, export = dock.status.native, dock.export.native
    assert status.height() >= status.heightForWidth(status.width())
    assert 0 < status.y() - dock.buttons.native.geometry().bottom() < export.height()
    assert status.width() <= dock.native.width()


def test_says_what_stays_behind(dock, slide_is_open, answer, tmp_path, settled):
    zarrs = pytest.importorskip("tests.writers.zarrs", exc_type=ImportError)
    source, target = tmp_path / "slide.zarr", tmp_path / "roi.ome.tif"
    zarrs.write_image(source, [np.zeros((1, 64, 96), np.uint8)])
    zarrs.write_label(source, "nuclei", [np.ones((64, 96), np.uint16)])
    slide_is_open(source)
    choose(dock, region=WHOLE, kind=OME_TIFF)
    answer(target)
    click(dock.export)
    settled()
    assert dock.status.value == f"{saved(target)} Label images are not converted (1)."


def test_says_what_will_be_written_as_it_changes(viewer, dock, layer, rectangle, display):
    choose(dock, region=WHOLE, level=0)
    width, height = layer.data[0].slide.dimensions
    assert f"{width:,} {TIMES} {height:,} px" in dock.summary.value
    shapes = rectangle(layer)
    assert dock.region.value == shapes
    assert f"700 {TIMES} 500 px, 1.05 MB uncompressed" in dock.summary.value
    choose(dock, level=1)
    assert f"350 {TIMES} 250 px, 262.5 kB uncompressed" in dock.summary.value
    shapes.data = [2 * shapes.data[0]]
    display.waitUntil(lambda: f"700 {TIMES} 500 px" in dock.summary.value)
    choose(dock, region=VIEW)
    before = dock.summary.value
    viewer.scene.camera.zoom *= 4
    display.waitUntil(lambda: dock.summary.value != before)


def test_what_cannot_be_written_is_said_in_one_sentence(viewer, dock, layer, rectangle, display):
    shapes = rectangle(layer, (-400, 0, 500, 100))
    choose(dock, level=0)
    assert dock.notes.value == "The part outside the slide is left out."
    assert f"100 {TIMES} 100 px" in dock.summary.value
    shapes.data = [shapes.data[0] - 10_000]
    display.waitUntil(lambda: not dock.export.enabled)
    assert dock.notes.value == "The region is outside the slide; move it onto the slide."
    assert not dock.summary.visible
    viewer.layers.remove(shapes)
    assert dock.region.value == VIEW
    assert dock.export.enabled


@pytest.fixture
def gap(dock, slide_is_open, tmp_path):
    """The layer of a slide whose second level is much smaller than its first."""
    path = tmp_path / "gap.svs"
    options = {"photometric": "rgb", "resolution": (20_000, 20_000), "resolutionunit": 3}
    slides.write_pyramid(path, slides.picture(2000, 2400), (8,), **options)
    [opened] = slide_is_open(path)
    return opened


def test_levels_are_named_by_number_scale_and_size(dock, gap):
    """And not as 8x: that is what objectives are called."""
    assert names(dock.level) == [
        f"0 · 0.5 µm/px · 2,400 {TIMES} 2,000",
        f"computed · 1 µm/px · 1,200 {TIMES} 1,000",
        f"computed · 2 µm/px · 600 {TIMES} 500",
        f"1 · 4 µm/px · 300 {TIMES} 250",
    ]


def test_levels_of_pixels_of_unknown_size_are_named_by_downsample(dock, slide_is_open, tmp_path):
    path = tmp_path / "sizes.tif"
    slides.write_pyramid(path, slides.picture(500, 600), (2,), photometric="rgb")
    slide_is_open(path)
    assert names(dock.level)[1] == f"1 · downsample 2 · 300 {TIMES} 250"


def test_a_computed_level_can_be_written(dock, gap, answer, tmp_path, settled):
    target = tmp_path / "roi.png"
    [computed, _] = [level.number for level in dock.slide.pyramid if level.layout.computed]
    choose(dock, region=WHOLE, level=computed, kind=PNG)
    answer(target)
    click(dock.export)
    settled()
    np.testing.assert_array_equal(read(target), slides.average(slides.picture(2000, 2400), 2))


def test_channels_all_go_to_tiff_and_none_to_png(
    dock, slide_is_open, write_channels, answer, tmp_path, settled
):
    path, pixels, channel_names = write_channels(3)
    slide_is_open(path)
    assert len(names(dock.source)) == 1
    choose(dock, region=WHOLE, level=0, kind=PNG)
    assert not dock.export.enabled
    assert "has 3 channels that are not RGB; choose OME-TIFF or OME-Zarr." in dock.notes.value
    choose(dock, kind=OME_TIFF)
    target = tmp_path / "out.ome.tif"
    answer(target)
    click(dock.export)
    settled()
    np.testing.assert_array_equal(read(target), np.moveaxis(pixels, 0, -1))
    with open_slide(target, "cpu") as written:
        assert [channel.name for channel in written.channels] == channel_names
        assert written.mpp == pytest.approx((0.5, 0.25))


def test_a_composite_is_written_as_it_is_shown(
    dock, viewer, slide_is_open, write_channels, answer, tmp_path, settled
):
    slide_is_open(write_channels(5)[0])
    layer = next(each for each in viewer.layers if shown_composite(each) is not None)
    show_composite(layer, replace(shown_composite(layer).showing([1, 4]), inverted=True))
    choose(dock, region=WHOLE, level=0, kind=PNG)
    assert "The channels are written as they are shown." in dock.notes.value
    target = tmp_path / "out.png"
    answer(target)
    click(dock.export)
    settled()
    with Image.open(target) as image:
        np.testing.assert_array_equal(image, layer.data[0][...])


@pytest.mark.usefixtures("scanner_colours")
def test_colours_are_offered_where_there_is_a_profile(
    dock, layer, slide_is_open, answer, tmp_path, settled
):
    assert not dock.color.native.isVisible()
    path = tmp_path / "profile.svs"
    slides.write_pyramid(
        path, slides.picture(600, 500), photometric="rgb", iccprofile=icc.table_profile(icc.stain)
    )
    slide_is_open(path)
    assert dock.color.native.isVisible()
    choose(dock, region=WHOLE, level=0, color="srgb", kind=PNG)
    target = tmp_path / "roi.png"
    answer(target)
    click(dock.export)
    settled()
    with open_slide(path, "cpu") as slide:
        expected = slide.read_region((0, 0), (500, 600), color="srgb")
    np.testing.assert_array_equal(read(target), expected)


def test_several_slides(viewer, dock, layer, slide_is_open, write_channels, rectangle, tmp_path):
    path, *_ = write_channels(1)
    twin = tmp_path / "folder" / Path(sample_path()).name
    twin.parent.mkdir()
    twin.write_bytes(Path(sample_path()).read_bytes())
    other, same_name = slide_is_open(path, twin)
    assert names(dock.source) == ["he_phantom.svs (1)", path.name, "he_phantom.svs (2)"]
    viewer.layers.selection.active = other
    assert dock.source.value is other.data[0].slide
    choose(dock, source=layer.data[0].slide)
    assert dock.slide is layer.data[0].slide
    assert len(names(dock.level)) == len(dock.slide.pyramid)
    rectangle(layer)
    assert dock.slide is layer.data[0].slide
    viewer.layers.remove(layer)
    assert dock.slide in (other.data[0].slide, same_name.data[0].slide)
    assert names(dock.source) == [path.name, "he_phantom.svs"]
    viewer.layers.remove(other)
    assert dock.slide is same_name.data[0].slide
    viewer.layers.remove(same_name)
    assert dock.slide is None
    assert dock.source.value is None


def test_slide_of_the_active_annotations_is_exported(
    viewer, layer, slide_is_open, write_channels, tmp_path
):
    other, *_ = write_channels(1)
    slide_is_open(other)
    slide = slide_of(layer)
    annotations = Shapes([np.eye(2)], shape_type="line", metadata={SLIDE: slide.path})
    viewer.add_layer(annotations)
    assert viewer.layers.selection.active == annotations
    [path] = export_region(viewer, tmp_path / "slide.ome.tif", Part.WHOLE)
    with open_slide(path) as exported:
        assert exported.dimensions == slide.dimensions
    viewer.layers.clear()
    with pytest.raises(SlideError, match="No slide is open"):
        export_region(viewer, tmp_path / "none.png")


def test_shapes_of_other_slides_are_not_offered(
    viewer, dock, layer, slide_is_open, rectangle, tmp_path
):
    twin = tmp_path / Path(sample_path()).name
    twin.write_bytes(Path(sample_path()).read_bytes())
    [other] = slide_is_open(twin)
    viewer.layers.selection.active = layer
    own, free = rectangle(layer), rectangle(layer)
    own.metadata[SLIDE] = layer.data[0].slide.path
    viewer.layers.selection.active = own
    assert dock.region.value is own
    viewer.layers.selection.active = other
    assert dock.slide is other.data[0].slide
    assert dock.region.value == Part.VIEW
    assert [each for each in dock.region.choices if isinstance(each, Shapes)] == [free]
    viewer.layers.selection.active = own  # its slide is not the one to export
    assert dock.region.value == Part.VIEW


def test_pictures_that_are_no_levels_are_not_offered(viewer, dock, layer):
    slide = layer.data[0].slide
    viewer.add_image(slide.associated_images["thumbnail"].read(), rgb=True)
    assert names(dock.source) == ["he_phantom.svs"]
    assert dock.slide is slide


def test_lets_one_draw_what_is_to_be_exported(viewer, dock, layer):
    click(dock.draw)
    shapes = viewer.layers.selection.active
    assert str(shapes.mode) == "add_rectangle"
    assert dock.region.value == shapes
    assert "has no shape yet" in dock.notes.value
    shapes.add_rectangles([[[-0.5, -0.5], [99.5, 49.5]]])
    dock._update()
    choose(dock, level=0)
    assert f"50 {TIMES} 100 px" in dock.summary.value
    choose(dock, region=VIEW)
    click(dock.draw)
    assert dock.region.value == shapes
    assert len(viewer.layers) == 2


def test_what_is_annotated_and_what_is_exported_are_drawn_apart(viewer, dock, add_dock, layer):
    annotations = add_dock("Annotate")
    for _ in range(2):
        click(annotations.tools["Rectangle"])
        drawn = viewer.layers.selection.active
        assert drawn.name == "he_phantom annotations"
        assert dock.region.value == drawn
        click(dock.draw)
        assert viewer.layers.selection.active.name == "Regions"
        assert dock.region.value.name == "Regions"
    assert len(viewer.layers) == 3


def test_regions_are_shown_with_their_slide(viewer, dock, layer, slide_is_open, tmp_path):
    click(dock.draw)
    regions = viewer.layers.selection.active
    path = tmp_path / "other.tif"
    convert(sample_path(), path, region=(1500, 1500, 512, 512))
    [other] = slide_is_open(path)
    viewer.layers.selection.active = other
    click(dock.draw)
    assert viewer.layers.selection.active is not regions
    assert dock.region.value == viewer.layers.selection.active
    show_only(viewer, slide_of(other))
    assert (regions.visible, viewer.layers[-1].visible) == (False, True)


def test_annotations_of_a_file_are_not_drawn_in(viewer, dock, layer, tmp_path):
    path = tmp_path / "a.geojson"
    write_geojson(path, [Annotation("polygon", (np.array([(0, 0), (9, 0), (9, 9)], float),))])
    [annotations] = viewer.open(path, plugin="napari-wsigpu")
    for _ in range(2):
        viewer.layers.selection.active = annotations
        assert dock.region.value == annotations
        click(dock.draw)
        regions = viewer.layers.selection.active
        assert regions is not annotations
        assert str(regions.mode) == "add_rectangle"
        assert dock.region.value == regions
    assert len(viewer.layers) == 3


def test_a_cancelled_export_leaves_nothing(dock, layer, answer, held, gate, tmp_path, settled):
    old = tmp_path / "roi.ome.tif"
    old.write_bytes(b"mine")
    choose(dock, region=WHOLE, level=0)
    answer(old)
    click(dock.export)
    assert held.wait(10)
    dock._update()
    assert dock.progress.visible
    for part in (dock.progress, dock.status):  # in sight in a small window too
        assert not dock.details.native.isAncestorOf(part.native)
    assert dock.status.value.startswith("Writing 'roi.ome.tif': ")
    assert not dock.export.enabled
    click(dock.cancel)
    gate.set()
    settled()
    assert dock.status.value == CANCELLED
    assert not dock.progress.visible
    assert dock.export.enabled
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == {old: b"mine"}


@pytest.mark.window
@pytest.mark.parametrize(
    ("closing", "kind"),
    [("layer", OME_TIFF), ("layer", OME_ZARR), ("viewer", PNG), ("dock", OME_TIFF)],
)
def test_what_is_closed_during_an_export_leaves_nothing(
    viewer, dock, layer, answer, held, gate, tmp_path, settled, handles_of, closing, kind, caplog
):
    choose(dock, region=WHOLE, level=0, kind=kind)
    answer(tmp_path / f"roi{ENDINGS[kind][0]}")
    click(dock.export)
    assert held.wait(10)
    if closing == "layer":
        viewer.layers.remove(layer)
        assert not dock.status.visible
        assert not dock.progress.visible
    elif closing == "viewer":
        viewer.close()
    else:
        viewer.window._wrapped_dock_widgets["Export (napari-wsigpu)"].destroyOnClose()
    gate.set()
    settled()
    assert list(tmp_path.iterdir()) == []
    records = notification_manager.records
    said = [record.message for record in records if record.severity == "warning"]
    said += [record.getMessage() for record in caplog.records if "Export" in record.getMessage()]
    closed = "dock" if closing == "dock" else "slide"
    assert said == [
        f"Export of 'roi{ENDINGS[kind][0]}' (its {closed} was closed): nothing was written.",
    ]
    assert bool(caplog.records) == (closing == "viewer")  # there is no window to say it in
    if closing == "dock":
        viewer.layers.clear()
    assert handles_of(Path(sample_path())) == 0


def test_leaving_napari_during_an_export_leaves_nothing(display, tmp_path):
    environment = os.environ | {"NAPARI_CONFIG": str(tmp_path / "settings.yaml")}
    target = tmp_path / "target"
    target.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(target)], env=environment, timeout=120, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(target.iterdir()) == []
    sentence = "Export of 'roi.ome.tif' (its slide was closed): nothing was written."
    assert (done.stdout + done.stderr).count(sentence) == 1


def test_a_failure_is_shown_in_the_dock(dock, layer, answer, tmp_path, settled):
    notification_manager.records.clear()
    choose(dock, region=WHOLE, level=3)
    answer(tmp_path / "nowhere" / "roi.ome.tif")
    click(dock.export)
    settled()
    sentence = dock.status.value
    assert "nowhere" in sentence
    assert sentence.endswith(".")
    said = [record.message for record in notification_manager.records if record.severity == "error"]
    assert said == [SlideError(sentence).message]
    assert dock.export.enabled


def test_a_failure_in_the_middle_leaves_nothing(
    dock, layer, answer, tmp_path, settled, monkeypatch
):
    def fail(self, done, total):
        if done:
            raise SlideReadError("The server is gone.")

    monkeypatch.setattr(Export, "_note", fail)
    choose(dock, region=WHOLE, level=0)
    answer(tmp_path / "roi.ome.tif")
    click(dock.export)
    settled()
    assert dock.status.value == "The server is gone."
    assert list(tmp_path.iterdir()) == []


def test_a_name_without_an_ending_gets_one_and_replaces_nothing(
    dock, layer, answer, tmp_path, settled, monkeypatch
):
    asked = []
    monkeypatch.setattr(QMessageBox, "warning", lambda *given: asked.append(given[2]))
    (tmp_path / "roi.v2.png").write_bytes(b"mine")
    choose(dock, region=WHOLE, level=3, kind=PNG)
    answer(tmp_path / "roi.v2")
    click(dock.export)
    settled()
    assert asked == [f"'roi.v2.png' already exists in '{tmp_path}'. Replace it?"]
    assert (tmp_path / "roi.v2.png").read_bytes() == b"mine"
    answer(tmp_path / "roi.v2.png")
    click(dock.export)
    settled()
    assert read(tmp_path / "roi.v2.png").ndim == 3
    assert len(list(tmp_path.iterdir())) == 1


def test_the_dialog_can_be_cancelled(dock, layer, answer, tmp_path):
    answer("")
    click(dock.export)
    assert not workers()
    assert not dock.status.visible


def test_looks_only_when_something_changes(viewer, dock, layer, display):
    display.waitUntil(lambda: not dock.timer.isActive())
    display.wait(500)
    assert not dock.timer.isActive()
    viewer.scene.camera.zoom *= 2
    assert dock.timer.isActive()
    dock.hide()
    assert not dock.timer.isActive()
    viewer.scene.camera.zoom *= 2
    assert not dock.timer.isActive()
    choose(dock, region=VIEW)
    before = dock.summary.value
    viewer.scene.camera.zoom *= 2
    dock.show()
    assert dock.summary.value != before


def test_begins_with_the_finest_level_and_says_the_size_of_its_pixels(dock, layer):
    assert dock.level.value == 0
    choose(dock, region=WHOLE)
    assert f"6,144 {TIMES} 4,608 px" in dock.summary.value
    assert "0.499 µm/px" in dock.summary.value
    choose(dock, level=1)
    assert "0.998 µm/px" in dock.summary.value


def test_what_became_of_one_slide_is_not_said_of_the_next(
    dock, layer, slide_is_open, answer, held, gate, tmp_path, settled, write_channels
):
    choose(dock, region=WHOLE)
    answer(tmp_path / "roi.ome.tif")
    click(dock.export)
    assert held.wait(10)
    click(dock.cancel)
    gate.set()
    settled()
    assert dock.status.value == CANCELLED
    slide_is_open(write_channels(1)[0])
    assert dock.status.value == ""
    assert not dock.status.visible


def test_a_name_gets_the_ending_of_its_kind_once(dock, layer, answer, tmp_path, settled):
    for number, (typed, kind, written) in enumerate(
        [
            ("roi.tif", OME_TIFF, "roi.ome.tif"),
            ("roi.TIFF", OME_TIFF, "roi.ome.tif"),
            ("roi.png", OME_TIFF, "roi.ome.tif"),
            ("roi.OME.TIFF", OME_TIFF, "roi.OME.TIFF"),
            ("a.b", OME_TIFF, "a.b.ome.tif"),
            ("roi.ome.tif", PNG, "roi.png"),
            ("roi.zarr", OME_ZARR, "roi.zarr"),
            ("roi.tif", OME_ZARR, "roi.ome.zarr"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        choose(dock, region=WHOLE, level=3, kind=kind)
        answer(folder / typed)
        click(dock.export)
        settled()
        assert dock.status.value == saved(folder / written)
        assert [path.name for path in folder.iterdir()] == [written]


@pytest.mark.window
def test_can_be_narrow_and_its_text_grows(dock, layer, display):
    boxes = dock.native.findChildren(QComboBox)
    assert len(boxes) == 6
    assert all(box.accessibleName() for box in boxes)
    assert dock.native.minimumSizeHint().width() < 24 * dock.native.fontMetrics().lineSpacing()
    assert_text_grows([*boxes, dock.export, dock.summary], display)


@pytest.fixture
def two_shapes(viewer, layer):
    """A triangle and an ellipse on the slide, and a line, all selected."""
    place = {name: getattr(layer, name) for name in ("scale", "units")}
    shapes = viewer.add_shapes(
        [
            # Coordinates are those of centres, half a pixel from the pixels' corners.
            np.array([[200, 300], [200, 900], [700, 300]]) - 0.5,
            np.array([[1000, 1000], [1000, 1400], [1300, 1400], [1300, 1000]]) - 0.5,
            [[0, 0], [500, 500]],
        ],
        shape_type=["polygon", "ellipse", "line"],
        **place,
    )
    shapes.selected_data = {0, 1, 2}
    return shapes


def choose_files(dock, text, qtbot):
    """Choose by the keyboard, as people without a mouse do."""
    box = dock.files.native
    assert box.isVisible()
    for _ in range(box.count()):
        if box.currentText() != text:
            qtbot.keyClick(box, Qt.Key_Down)
    assert box.currentText() == text


def test_files_are_offered_for_shapes_alone(dock, layer, two_shapes):
    assert dock.files.native.isVisible()
    choose(dock, region=WHOLE)
    assert not dock.files.native.isVisible()


@pytest.mark.parametrize("kind", [OME_TIFF, PNG, OME_ZARR])
def test_each_selected_shape_becomes_a_file(
    dock, layer, two_shapes, answer, tmp_path, settled, kind, qtbot
):
    choose(dock, kind=kind)
    choose_files(dock, "One per shape", qtbot)
    assert dock.summary.value.startswith("2 files, ")
    ending = ENDINGS[kind][0]
    answer(tmp_path / f"roi{ending}")
    click(dock.export)
    settled()
    assert dock.status.value == saved(*(tmp_path / f"roi {number}{ending}" for number in (1, 2)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"roi 1{ending}", f"roi 2{ending}"]
    with open_slide(sample_path(), "cpu") as slide:
        regions = (300, 200, 600, 500), (1000, 1000, 400, 300)
        for number, (x, y, width, height) in enumerate(regions, 1):
            expected = slide.read_region((x, y), (width, height))
            np.testing.assert_array_equal(read(tmp_path / f"roi {number}{ending}"), expected)


@pytest.mark.parametrize(("kind", "level"), [(PNG, 0), (PNG, 1), (OME_TIFF, 0), (OME_ZARR, 1)])
def test_a_shape_masks_its_file(
    dock, layer, two_shapes, answer, tmp_path, settled, qtbot, kind, level
):
    two_shapes.selected_data = {0}
    choose(dock, kind=kind, level=level)
    choose_files(dock, "One per shape, masked by it", qtbot)
    target = tmp_path / f"roi{ENDINGS[kind][0]}"
    answer(target)
    click(dock.export)
    settled()
    assert dock.status.value == saved(target)
    found = read(target)
    with open_slide(sample_path(), "cpu") as slide:
        down = slide.level_downsamples[level]
        size = round(600 / down), round(500 / down)
        expected = slide.read_region((300, 200), size, level)
        background = slide.layout.background
    rows, columns = np.indices(found.shape[:2])
    # 1 on the edge from the upper right to the lower left corner, less within.
    place = (columns + 0.5) * down / 600 + (rows + 0.5) * down / 500
    inner, outer = place < 1 - 0.01, place > 1 + 0.01
    np.testing.assert_array_equal(found[inner], expected[inner])
    assert (found[outer] == background).all()
    assert (expected[outer] != background).any()


@pytest.mark.parametrize("there", [1, 2])
def test_asks_before_it_replaces_files(
    dock, layer, two_shapes, answer, tmp_path, settled, qtbot, monkeypatch, there
):
    paths = [tmp_path / f"roi {number}.png" for number in (2, 1)]
    for path in paths[:there]:
        path.write_bytes(b"mine")
    choose(dock, kind=PNG)
    choose_files(dock, "One per shape", qtbot)
    answer(tmp_path / "roi.png")
    asked, given = [], QMessageBox.Cancel

    def ask(parent, title, text, buttons, default):
        assert default == QMessageBox.Cancel
        asked.append(text)
        return given

    monkeypatch.setattr(QMessageBox, "warning", ask)
    click(dock.export)
    settled()
    assert [path.read_bytes() for path in paths[:there]] == [b"mine"] * there
    assert len([*tmp_path.iterdir()]) == there
    given = QMessageBox.Yes
    click(dock.export)
    settled()
    one = f"'roi 2.png' already exists in '{tmp_path}'. Replace it?"
    two = f"2 files, such as 'roi 1.png', already exist in '{tmp_path}'. Replace them?"
    assert asked == [one if there == 1 else two] * 2
    assert dock.status.value == saved(*reversed(paths))
    assert all(read(path).shape for path in paths)


def test_a_shape_outside_of_the_slide_is_named(dock, layer, two_shapes, qtbot):
    two_shapes.add_rectangles([[[-500, -500], [-400, -400]]])
    choose_files(dock, "One per shape", qtbot)
    two_shapes.selected_data = {0, 3}
    two_shapes.mode = "select"
    qtbot.waitUntil(lambda: "Shape 4 can't be exported" in dock.notes.value)
    assert not dock.export.enabled
