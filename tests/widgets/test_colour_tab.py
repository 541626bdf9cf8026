"""The page "Color": description and application of ICC profiles."""

from dataclasses import replace

import pytest
from napari.utils.notifications import notification_manager
from PIL import ImageCms

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.slide.slide import Slide
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.widgets.inspector.color_page import ColorPage
from tests.widgets.conftest import click

PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


@pytest.fixture
def slide_with(tmp_path):
    """Open the sample with bytes behind it that its description takes for the profile."""
    slides = []

    def open_with(profile):
        path = tmp_path / f"profile{len(slides)}.svs"
        start = sample_path().stat().st_size
        path.write_bytes(sample_path().read_bytes() + profile)
        with open_slide(path, "cpu") as slide:
            layout = replace(slide.layout, icc=(start, len(profile)))
        slides.append(Slide(layout, "cpu"))
        return slides[-1]

    yield open_with
    for slide in slides:
        slide.close()


@pytest.fixture
def tab(jobs, display):
    made = ColorPage(jobs, lambda: made.recolored.append(made.apply.value))
    made.recolored = []
    display.addWidget(made.native)
    made.show()
    return made


def test_a_slide_without_a_profile(tab):
    with open_slide(sample_path(), "cpu") as slide:
        tab.show_slide(slide)
    assert "no ICC profile" in tab.profile.value
    assert not tab.apply.enabled
    assert not tab.apply.value


def test_says_what_the_profile_is(tab, slide_with, settled):
    tab.show_slide(slide_with(PROFILE))
    settled()
    assert "sRGB" in tab.profile.value
    assert tab.apply.enabled


def test_applies_the_profile_and_takes_it_back(tab, slide_with, settled, display):
    slide = slide_with(PROFILE)
    tab.show_slide(slide)
    settled()
    click(tab.apply)
    display.waitUntil(lambda: tab.recolored == [True])
    assert slide.display_color == "srgb"
    tab.show_slide(slide)
    assert tab.apply.value
    click(tab.apply)
    display.waitUntil(lambda: tab.recolored == [True, False])
    assert slide.display_color == "stored"


def test_another_slide_meanwhile_is_not_changed(tab, slide_with, settled):
    first, second = slide_with(PROFILE), slide_with(PROFILE)
    tab.show_slide(first)
    click(tab.apply)
    tab.show_slide(second)
    settled()
    assert (first.display_color, second.display_color) == ("stored", "stored")
    assert not tab.apply.value


def test_a_damaged_profile_is_said_in_one_sentence(tab, slide_with, settled):
    notification_manager.records.clear()
    tab.show_slide(slide_with(b"no profile" * 20))
    settled()
    assert "is damaged" in tab.profile.value
    assert notification_manager.records == []
    click(tab.apply)
    settled()
    [record] = notification_manager.records
    assert record.message == SlideError(tab.profile.value).message
    assert "can't be converted to sRGB" in record.message
    assert "color=" not in record.message
    assert not tab.apply.value


def test_a_failure_gives_way_to_the_profile(tab, slide_with, settled, monkeypatch):
    def fail(*_, **__):
        raise SlideError("The server is gone.")

    tab.show_slide(slide_with(PROFILE))
    settled()
    with monkeypatch.context() as patch:
        patch.setattr(Slide, "read_region", fail)
        click(tab.apply)
        settled()
    assert tab.profile.value == "The server is gone."
    click(tab.apply)
    settled()
    assert "sRGB" in tab.profile.value
    assert tab.apply.value
