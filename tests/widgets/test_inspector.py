"""The inspector dock, used as people do."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
from napari.settings import get_plugin_settings
from qtpy.QtCore import Qt
from qtpy.QtGui import QKeySequence
from qtpy.QtTest import QTest
from qtpy.QtWidgets import QAbstractButton, QApplication, QLabel

from napari_wsigpu.model.privacy import MASK
from napari_wsigpu.slide.associated import AssociatedImage
from napari_wsigpu.slide.facts import FileReport
from napari_wsigpu.storage.file_source import FileSource
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.layers import slide_layers as layer_module
from napari_wsigpu.viewer.window.settings import Settings
from napari_wsigpu.widgets.inspector import images_page, metadata_page
from napari_wsigpu.widgets.inspector import inspector as inspector_module
from tests.widgets.conftest import assert_text_grows, click, workers

MACRO = (432, 1280, 3)


def shown(inspector):
    """The inspector's name of the slide and of its first level."""
    first = inspector.levels.table.native.item(0, 1)
    return inspector.header.title.native.text(), first and first.text().replace(
        "\N{NO-BREAK SPACE}", " "
    )


def test_is_empty_without_a_slide(viewer, inspector):
    assert inspector.slide is None
    assert inspector.empty.visible
    assert not inspector.details.visible
    viewer.add_image(np.zeros((8, 8)))
    assert inspector.slide is None


def test_follows_the_active_layer(viewer, inspector, slide_is_open, write_channels, settled):
    path, *_ = write_channels(2)
    first, second = slide_is_open(sample_path(), path)
    assert shown(inspector)[0] == "channels2.ome.tif"
    viewer.layers.selection.active = first
    assert shown(inspector)[0] == "he_phantom.svs"
    assert "20" in inspector.header.facts.value
    assert inspector.levels.table.native.rowCount() == 4
    viewer.layers.selection.active = viewer.layers[-1]
    assert shown(inspector)[0] == "channels2.ome.tif"
    second.name = "renamed"
    first.name = "renamed too"
    viewer.layers.selection.active = first
    assert shown(inspector)[0] == "he_phantom.svs"
    settled()
    assert inspector.header.thumbnail.native.image is not None


def test_keeps_the_slide_under_other_layers_until_it_is_removed(viewer, inspector, slide_is_open):
    [layer] = slide_is_open(sample_path())
    viewer.layers.selection.active = viewer.add_shapes()
    assert inspector.slide is layer.data[0].slide
    viewer.layers.remove(layer)
    assert inspector.slide is None
    assert inspector.empty.visible


def test_another_slide_takes_the_place_of_a_removed_one(
    viewer, inspector, slide_is_open, write_channels
):
    first, _ = slide_is_open(sample_path(), write_channels(1)[0])
    viewer.layers.selection.active = viewer.add_shapes()
    viewer.layers.remove(viewer.layers[1])
    assert inspector.slide is first.data[0].slide


@pytest.mark.window
@pytest.mark.usefixtures("without_core")
def test_opening_a_slide_decodes_no_label_and_no_macro(
    viewer, inspector, slide_is_open, monkeypatch, settled
):
    with tifffile.TiffFile(sample_path()) as file:
        private = [
            range(offset, offset + count)
            for page in file.pages
            if "\nlabel" in page.description or "\nmacro" in page.description
            for offset, count in zip(page.dataoffsets, page.databytecounts, strict=True)
        ]
    assert private
    touched, decoded = [], []
    read_image, read_joined = AssociatedImage.read, FileSource.read_joined

    def noted(read_ranges):
        def noted_ranges(self, ranges):
            ranges = list(ranges)
            touched.extend(ranges)
            return read_ranges(self, ranges)

        return noted_ranges

    def noted_joined(self, offsets, lengths, *args):
        touched.extend(zip(offsets.tolist(), lengths.tolist(), strict=True))
        return read_joined(self, offsets, lengths, *args)

    def noted_image(self, *args, **options):
        decoded.append(self.name)
        return read_image(self, *args, **options)

    for name in ("read", "fills"):
        monkeypatch.setattr(FileSource, name, noted(getattr(FileSource, name)))
    monkeypatch.setattr(FileSource, "read_joined", noted_joined)
    monkeypatch.setattr(AssociatedImage, "read", noted_image)
    slide_is_open(sample_path())
    for index in range(inspector.tabs.native.count()):
        inspector.tabs.native.setCurrentIndex(index)
        settled()
    viewer.screenshot(canvas_only=False, flash=False)

    def private_bytes():
        return [
            (offset, count)
            for offset, count in touched
            if any(place.start < offset + count and offset < place.stop for place in private)
        ]

    assert touched
    assert private_bytes() == []
    assert decoded == ["thumbnail"]
    inspector.tabs.open(inspector.images)
    click(inspector.images.cards["label"].reveal)
    settled()
    assert decoded == ["thumbnail", "label"]
    assert private_bytes()


def test_disclosure_lasts_while_the_slide_is_open(
    viewer, inspector, slide_is_open, write_channels, settled
):
    first, second = slide_is_open(sample_path(), write_channels(1)[0])
    viewer.layers.selection.active = first
    inspector.tabs.open(inspector.images)
    click(inspector.images.cards["macro"].reveal)
    viewer.layers.selection.active = second
    viewer.layers.selection.active = first
    settled()
    assert inspector.images.cards["macro"].picture.native.image is not None
    assert inspector.images.cards["label"].picture.native.veiled


def test_opens_an_associated_image_next_to_the_slide(viewer, inspector, slide_is_open, settled):
    [layer] = slide_is_open(sample_path())
    inspector.tabs.open(inspector.images)
    card = inspector.images.cards["macro"]
    click(card.reveal)
    click(card.open)
    settled()
    macro = viewer.layers["he_phantom macro"]
    assert macro.rgb
    assert not macro.multiscale
    assert macro.data.shape == MACRO
    # Without a position on the slide, its pixels have no size in micrometers.
    assert {str(unit) for unit in macro.units} == {"pixel"}
    assert macro.extent.world[0, 1] > layer.extent.world[1, 1]
    assert macro.extent.world[0, 0] == pytest.approx(layer.extent.world[0, 0], abs=5)
    tall, wide = (macro.extent.world[1] - macro.extent.world[0]) / (
        layer.extent.world[1] - layer.extent.world[0]
    )
    assert max(tall, wide) == pytest.approx(1, abs=0.01)
    assert inspector.slide is layer.data[0].slide
    click(inspector.images.cards["thumbnail"].open)
    settled()
    thumbnail = viewer.layers["he_phantom thumbnail"]
    assert thumbnail.extent.world[0, 1] > macro.extent.world[1, 1]


@pytest.mark.window
@pytest.mark.parametrize("closing", ["layer", "viewer", "dock"])
def test_removal_during_a_decode_leaves_nothing(
    viewer, inspector, slide_is_open, monkeypatch, gate, settled, handles_of, closing, display
):
    real = images_page.read_associated

    def slow(slide, name):
        gate.wait()
        return real(slide, name)

    monkeypatch.setattr(images_page, "read_associated", slow)
    [layer] = slide_is_open(sample_path())
    inspector.tabs.open(inspector.images)
    click(inspector.images.cards["label"].reveal)
    click(inspector.images.cards["label"].open)
    display.waitUntil(lambda: inspector.progress.visible)
    assert workers()
    if closing == "layer":
        viewer.layers.remove(layer)
    elif closing == "viewer":
        viewer.close()
    else:
        viewer.window.remove_dock_widget(inspector.native)
        inspector.native.deleteLater()
        display.wait(50)
        viewer.layers.clear()
    gate.set()
    settled()
    assert handles_of(sample_path()) == 0
    if closing == "layer":
        assert len(viewer.layers) == 0
        assert not inspector.progress.visible


@pytest.mark.window
def test_two_viewers_have_two_inspectors(viewer, inspector, slide_is_open, write_channels, another):
    slide_is_open(sample_path())
    other = another()
    _, second = other.window.add_plugin_dock_widget("napari-wsigpu", "Inspector")
    other.open(write_channels(1)[0], plugin="napari-wsigpu")
    assert shown(inspector)[0] == "he_phantom.svs"
    assert shown(second)[0] == "channels1.ome.tif"
    other.close()
    viewer.layers.clear()
    assert inspector.slide is None


@pytest.mark.window
def test_closed_dock_no_longer_follows(viewer, inspector, slide_is_open, display):
    get_plugin_settings("napari-wsigpu").slides.open_inspector = False
    slide_is_open(sample_path())
    watch = inspector.header.watch
    assert watch.isActive()
    events = (
        viewer.layers.events.removed,
        viewer.layers.selection.events.active,
        get_plugin_settings("napari-wsigpu").slides.events.show_private,
    )
    before = [len(event.callbacks) for event in events]
    viewer.window.remove_dock_widget(inspector.native)
    assert not watch.isActive()
    inspector.native.deleteLater()
    display.wait(50)
    removed, *others = before  # napari, too, has connected the dock to that
    assert [len(event.callbacks) for event in events] == [removed - 2, *(n - 1 for n in others)]
    slide_is_open(sample_path())
    viewer.layers.clear()


@pytest.mark.window
def test_removed_slides_are_forgotten(viewer, inspector, slide_is_open, settled):
    # No local variable holds the layer: pytest keeps the locals of frames on the stack.
    slide = weakref.ref(slide_is_open(sample_path())[0].data[0].slide)
    for index in range(inspector.tabs.native.count()):
        inspector.tabs.native.setCurrentIndex(index)
        settled()
    viewer.layers.clear()
    settled()
    for _ in range(3):
        gc.collect()
    assert slide() is None


def test_damaged_tiles_are_said_when_they_turn_up(inspector, slide_is_open, damaged_slide, display):
    inspector.header.watch.setInterval(20)
    [layer] = slide_is_open(damaged_slide)
    assert not inspector.header.warnings.visible
    layer.data[0][6 * 256 : 7 * 256, 8 * 256 : 9 * 256]
    display.waitUntil(lambda: inspector.header.warnings.visible)
    assert "1 damaged tile can't be shown" in inspector.header.warnings.value


def test_problems_are_said_and_cut_short(viewer, inspector, slide_is_open, monkeypatch):
    def file_report(slide, private):
        who = "Jane Doe" if private else MASK
        return FileReport({}, [f"Problem <b>{i}</b> of {who}." for i in range(50)])

    monkeypatch.setattr(metadata_page, "file_report", file_report)
    slide_is_open(sample_path())
    text = inspector.header.warnings.value
    assert f"Problem <b>2</b> of {MASK}." in text
    assert "Problem <b>3</b>" not in text
    assert "And 47 more." in text
    click(inspector.metadata.private)
    assert "Problem <b>2</b> of Jane Doe." in inspector.header.warnings.value
    click(inspector.metadata.private)
    assert "Jane" not in inspector.header.warnings.value
    assert "Jane" not in inspector.header.warnings.tooltip


def test_the_header_is_as_high_as_its_slide_needs(inspector, slide_is_open):
    slide_is_open(sample_path())
    inspector.header.warn(["Something is wrong."])
    labels = inspector.header.facts, inspector.header.warnings
    before = [label.native.minimumHeight() for label in labels]
    text = inspector.header.facts.value
    inspector.header.facts.value = text + "<br>line" * 20
    inspector.header.warn(["Something is wrong."] * 50)
    assert all(
        label.native.minimumHeight() > 20 + was for label, was in zip(labels, before, strict=True)
    )
    inspector.header.facts.value = text
    inspector.header.warn(["Something is wrong."])
    assert [label.native.minimumHeight() for label in labels] == before


@pytest.mark.window
def test_search_has_a_key(viewer, inspector, slide_is_open):
    slide_is_open(sample_path())
    inspector.tabs.open(inspector.levels)
    viewer.window._qt_window.activateWindow()
    inspector.levels.table.native.setFocus()
    QApplication.processEvents()
    QTest.keyClick(inspector.levels.table.native, Qt.Key_F, Qt.ControlModifier)
    assert inspector.tabs.native.currentIndex() == 0
    assert inspector.metadata.search.native.hasFocus()


@pytest.mark.window
def test_mnemonics_are_no_menus_and_each_has_one_use(viewer, inspector):
    parts = (
        *inspector.native.findChildren(QAbstractButton),
        *inspector.native.findChildren(QLabel),
    )
    own = [QKeySequence.mnemonic(part.text()).toString() for part in parts if "&" in part.text()]
    menus = viewer.window._qt_window.menuBar().actions()
    taken = {QKeySequence.mnemonic(menu.text()).toString() for menu in menus}
    assert len(own) >= 6
    assert len({*own}) == len(own)
    assert taken.isdisjoint(own)


@pytest.mark.window
def test_everything_grows_with_naparis_font(viewer, inspector, slide_is_open, display):
    slide_is_open(sample_path())
    parts = [
        inspector.metadata.tree,
        inspector.levels.table,
        inspector.levels.pyramid,
        inspector.header.thumbnail,
        inspector.metadata.search,
        inspector.images.cards["label"].picture,
    ]
    for tab in (inspector.images, inspector.levels, inspector.metadata):
        inspector.tabs.open(tab)
    assert_text_grows(parts, display)


@pytest.mark.window
def test_offers_to_become_the_reader_once(viewer, monkeypatch):
    preferred = []
    monkeypatch.setattr(inspector_module, "is_preferred_reader", lambda: bool(preferred))
    monkeypatch.setattr(inspector_module, "prefer_this_reader", lambda: preferred.append(True))
    made = inspector_module.SlideInspector(viewer)
    viewer.window.add_dock_widget(made)
    assert not made.prefer.native.isHidden()
    click(made.prefer)
    assert preferred == [True]
    assert made.prefer.native.isHidden()


def test_the_setting_shows_private_parts(viewer, inspector, slide_is_open, monkeypatch):
    monkeypatch.setattr(inspector_module, "settings", lambda: Settings(show_private=True))
    slide_is_open(sample_path())
    assert inspector.metadata.private.value
    assert inspector.images.cards["label"].reveal.text == "Hide"
    assert not inspector.images.cards["label"].reveal.native.isHidden()
    assert inspector.images.cards["label"].open.enabled
    assert inspector.images.cards["thumbnail"].reveal.native.isHidden()


def test_the_setting_holds_at_once(viewer, inspector, slide_is_open, settled):
    page = get_plugin_settings("napari-wsigpu").slides
    first, second = slide_is_open(sample_path(), sample_path())
    inspector.tabs.open(inspector.images)
    page.show_private = True
    settled()
    assert inspector.metadata.private.value
    assert inspector.images.cards["label"].picture.native.image is not None
    viewer.layers.selection.active = first
    assert inspector.metadata.private.value
    page.show_private = False
    for layer in (first, second):
        viewer.layers.selection.active = layer
        settled()
        assert not inspector.metadata.private.value
        card = inspector.images.cards["label"]
        assert card.picture.native.veiled
        assert card.picture.native.image is None
        assert not card.save.enabled


def test_changed_colors_are_drawn(viewer, inspector, slide_is_open, settled):
    [layer] = slide_is_open(sample_path())
    viewer.add_image(np.zeros((8, 8)))
    settled()
    drawn = []
    layer.events.set_data.connect(lambda event: drawn.append(layer))
    viewer.layers.selection.active = layer
    drawn.clear()
    before = inspector.header.thumbnail.native.image
    inspector._recolor()
    settled()
    assert drawn
    assert inspector.header.thumbnail.native.image is not before


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/a/slide.ome.tif", "slide"),
        ("/a/p.1.svs", "p.1"),
        ("/a/x.h5", "x"),
        ("https://host/studies/1.2/series/1.2.840.3", "1.2.840.3"),
    ],
)
def test_names_of_layers_are_slides_names(slide_is_open, path, name):
    [layer] = slide_is_open(sample_path())
    assert layer_module.slide_name(layer.data[0].slide) == "he_phantom" == layer.name
    assert layer_module.slide_name(SimpleNamespace(path=path)) == name
