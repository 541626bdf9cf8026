"""Cards of associated images: what is decoded when, and where it goes."""

import shutil

import imagecodecs
import numpy as np
import pytest
import tifffile
from napari.utils.notifications import notification_manager

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.slide.facts import damage
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.widgets.inspector.disclosure import Disclosure, by_default
from napari_wsigpu.widgets.inspector.images_page import ImagesPage
from tests.widgets.conftest import click


def page_of(path, name):
    """Pixels of an associated image of an Aperio slide."""
    with tifffile.TiffFile(path) as file:
        [page] = [page for page in file.pages if f"\n{name}" in page.description]
        return page.asarray()


@pytest.fixture
def slide():
    with open_slide(sample_path(), "cpu") as opened:
        yield opened


@pytest.fixture
def tab(jobs, display, slide):
    made = ImagesPage(jobs, print)
    display.addWidget(made.native)
    made.show_slide(slide, Disclosure())
    return made


@pytest.fixture
def read(slide, monkeypatch):
    """Names of the images that were decoded."""
    names = []
    for name, image in slide.associated_images.items():

        def noted(*args, name=name, image=image, **options):
            names.append(name)
            return type(image).read(image, *args, **options)

        monkeypatch.setattr(image, "read", noted)
    return names


def test_images_are_decoded_only_when_visible(tab, read, settled):
    settled()
    assert read == []
    assert list(tab.cards) == ["thumbnail", "label", "macro"]


def test_private_images_are_decoded_on_click(tab, read, settled):
    tab.show()
    settled()
    assert read == ["thumbnail"]
    for name in ("label", "macro"):
        card = tab.cards[name]
        assert card.picture.native.veiled
        assert card.picture.native.image is None
        assert not card.open.enabled
        assert not card.save.enabled
    click(tab.cards["macro"].reveal)
    settled()
    assert read == ["thumbnail", "macro"]
    assert tab.cards["macro"].picture.native.image is not None
    assert tab.cards["label"].picture.native.veiled


def test_placeholders_tell_nothing_of_the_picture(tab, settled):
    tab.show()
    label, macro = (tab.cards[name].picture.native for name in ("label", "macro"))
    label.resize(300, 100)
    macro.resize(300, 100)
    assert label.grab().toImage() == macro.grab().toImage()


def test_hides_again(tab, read, settled):
    tab.show()
    card = tab.cards["label"]
    click(card.reveal)
    assert (card.reveal.text, card.reveal.tooltip) == ("Hide", "Hide the label image")
    click(card.reveal)
    settled()
    assert (card.reveal.text, card.reveal.tooltip) == ("Show", "Show the label image")
    assert card.picture.native.veiled
    assert card.picture.native.image is None


def test_the_setting_shows_private_images(tab, slide, read, settled):
    tab.show_slide(slide, by_default(show_private=True))
    tab.show()
    settled()
    assert sorted(read) == ["label", "macro", "thumbnail"]


def test_shows_the_whole_picture(tab, settled):
    tab.show()
    click(tab.cards["label"].reveal)
    settled()
    image = tab.cards["label"].picture.native.image
    expected = page_of(sample_path(), "label")
    assert (image.height(), image.width()) == expected.shape[:2]
    for y, x in [(0, 0), (200, 100), (399, 367), (50, 300)]:
        color = image.pixelColor(x, y)
        assert (color.red(), color.green(), color.blue()) == tuple(expected[y, x])


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_saves_the_files_pixels(tab, tmp_path, answer, settled, suffix):
    notification_manager.records.clear()
    path = tmp_path / f"macro.{suffix}"
    answer(path)
    tab.show()
    click(tab.cards["macro"].reveal)
    click(tab.cards["macro"].save)
    settled()
    found = tifffile.imread(path) if suffix == "tif" else decoded_png(path)
    np.testing.assert_array_equal(found, page_of(sample_path(), "macro"))
    assert [r.message for r in notification_manager.records] == [f"Saved '{path.name}'."]


def decoded_png(path):
    return imagecodecs.png_decode(path.read_bytes())


def test_a_name_without_suffix_gets_the_chosen_one(tab, tmp_path, answer, settled):
    tab.show()
    answer(tmp_path / "one", "TIFF (*.tif *.tiff)")
    click(tab.cards["thumbnail"].save)
    answer(tmp_path / "two", "PNG (*.png)")
    click(tab.cards["thumbnail"].save)
    answer("")
    click(tab.cards["thumbnail"].save)
    settled()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.tif", "two.png"]


def test_a_damaged_image_is_said_in_its_card(jobs, display, tmp_path, settled):
    path = tmp_path / "damaged.svs"
    shutil.copy(sample_path(), path)
    with tifffile.TiffFile(path) as file:
        [page] = [page for page in file.pages if "\nmacro" in page.description]
        places = list(zip(page.dataoffsets, page.databytecounts, strict=True))
    with path.open("r+b") as file:
        for offset, count in places:
            file.seek(offset)
            file.write(bytes(count))
    tab = ImagesPage(jobs, print)
    display.addWidget(tab.native)
    notification_manager.records.clear()
    with open_slide(path, "cpu") as slide:
        tab.show_slide(slide, Disclosure())
        tab.show()
        click(tab.cards["macro"].reveal)
        settled()
        assert damage(slide) == []  # of what is no level
    card = tab.cards["macro"]
    assert not card.open.enabled
    assert not card.save.enabled
    assert tab.cards["thumbnail"].save.enabled
    assert "could not be decoded" in card.picture.native.text()
    said = SlideError(card.picture.native.text()).message
    assert [record.message for record in notification_manager.records] == [said]
    assert tab.cards["thumbnail"].picture.native.image is not None


def test_a_slide_that_was_closed_is_said(tab, slide, settled):
    slide.close()
    tab.show()
    settled()
    assert "was closed" in tab.cards["thumbnail"].picture.native.text()


def test_shown_colours_are_decoded_again(tab, read, settled):
    tab.show()
    settled()
    tab.reload()
    settled()
    assert read == ["thumbnail", "thumbnail"]


def test_says_that_there_are_none(jobs, display, write_channels):
    tab = ImagesPage(jobs, print)
    display.addWidget(tab.native)
    tab.show()
    with open_slide(write_channels(1)[0], "cpu") as slide:
        tab.show_slide(slide, Disclosure())
    assert tab.none.visible
    assert tab.cards == {}
