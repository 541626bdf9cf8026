"""What all parts together do with the slides of each vendor."""

import os
import pickle
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.model.errors import SlideChangedError, SlideClosedError
from napari_wsigpu.slide.slide import Slide
from tests.writers import dicomslides, icc, leica, mirax, ndpi, philips, slides, trestle, ventana

PIXELS = slides.picture(96, 160)


def write_ndpi(path):
    macro = ndpi.level(slides.picture(16, 40), lens=-1.0)
    ndpi.write(path, [ndpi.level(PIXELS, 4), ndpi.level(PIXELS[::4, ::4].copy()), macro])


def write_philips(path):
    label = philips.picture_object("LABELIMAGE", philips.base64_jpeg(slides.picture(20, 30)))
    philips.write(path, PIXELS, (1, 2), tile=64, images=[label])


def write_leica(path):
    scans = [leica.scan(PIXELS, 1000, 2000), leica.scan(PIXELS[:50, :70], 60_000, 40_000)]
    leica.write(path, scans, (100_000, 75_000), encode=slides.jpeg, compression=7)


def write_ventana(path):
    area = ventana.Area((3, 2), overlap=(5, 4))
    ventana.write(path, [slides.picture(64, 144)], ventana.stitching([area]))


WRITERS = {
    "hamamatsu": write_ndpi,
    "philips": write_philips,
    "leica": write_leica,
    "ventana": write_ventana,
    "trestle": lambda path: trestle.write(path, [PIXELS, PIXELS[::2, ::2]], "4 4 2 2"),
    "mirax": lambda path: mirax.write(path.with_suffix(".mrxs")),
    "dicom": lambda path: dicomslides.write_slide(path, PIXELS, (2,)),
}


@pytest.fixture(params=WRITERS)
def path(request, tmp_path):
    WRITERS[request.param](tmp_path / "slide")
    assert describe(tmp_path / "slide").vendor == request.param
    return tmp_path / "slide"


def test_a_pickled_copy(path):
    with open_slide(path, "cpu") as slide, pickle.loads(pickle.dumps(slide)) as copy:
        for level, same in zip(slide.levels, copy.levels, strict=True):
            np.testing.assert_array_equal(level[...], same[...])
            np.testing.assert_array_equal(level[3::5, ::-2, 1], same[...][3::5, ::-2, 1])
        copy.release()
        for name, image in slide.associated_images.items():
            np.testing.assert_array_equal(image.read(), copy.associated_images[name].read())
    for image in copy.associated_images.values():
        with pytest.raises(SlideClosedError):
            image.read()


def test_opening_a_small_file_takes_little_memory(path):
    """Also for a moment: Python makes room for what is asked for before it reads."""
    describe(path)
    tracemalloc.start()
    try:
        describe(path)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def touch(file):
    os.utime(file, ns=(1, 1))


def rewrite(file):
    """Write the same number of other bytes, and hide it."""
    status = file.stat()
    data = file.read_bytes()
    with file.open("r+b") as opened:
        opened.write(data[::-1])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def exchange(file):
    """Put another file of the same size and age in its place."""
    status = file.stat()
    other = file.with_name("other")
    other.write_bytes(file.read_bytes()[::-1])
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(file)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("change", [touch, rewrite, exchange])
def test_a_changed_file_is_noticed(path, change, held):
    if change is rewrite and os.name == "nt":
        pytest.skip("this system does not say when a file was written, but for what can be set")
    with open_slide(path, "cpu") as slide:
        if held:
            slide.levels[-1][:1, :1]
        change(Path(slide.layout.files[-1].path))
        with pytest.raises(SlideChangedError):
            list(map(np.asarray, slide.levels))


@pytest.fixture
def profile(scanner_colours):
    """An ICC profile whose table of colours is made once for all tests."""
    return icc.PROFILES["table"]


@pytest.mark.parametrize("color", ["stored", "srgb"])
def test_devices_show_the_same(path, host_gpu, profile, color):
    layout = replace(describe(path), icc=profile)
    with Slide(layout, "cpu") as slide, Slide(layout, "cuda") as other:
        for level, (width, height) in enumerate(slide.level_dimensions):
            region = (-9, -7), (width + 20, height + 15), level
            expected = slide.read_region(*region, color=color)
            found = other.read_region(*region, "cuda", color=color)
            np.testing.assert_array_equal(found, other.read_region(*region, color=color))
            # nvImageCodec's decoder on the CPU may be off by one, which the table may enlarge.
            difference = np.abs(found.astype(int) - expected)
            assert difference.mean() < 0.5
