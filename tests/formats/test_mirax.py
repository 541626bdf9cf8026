import os
import re
import shutil
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import CorruptSlideError, SlideError, TileError
from napari_wsigpu.model.privacy import masked
from tests import oracles
from tests.writers import mirax
from tests.writers.mirax import Mirax

PLAIN = Mirax()
SLIDES = {
    "side by side": PLAIN,
    "one image a photo": Mirax(divisions=1),
    "overlap of its photos is larger": Mirax(overlap=(8, 16)),
    "four images a photo": Mirax(divisions=4, overlap=(16, 8)),
    "positions": Mirax(positions=mirax.scattered(PLAIN)),
    "compressed positions": Mirax(positions=mirax.scattered(PLAIN, seed=2), stitching=True),
    "sparse": Mirax(positions=mirax.scattered(PLAIN), photos={0, 3, 5, 6, 14}),
    "sparse, side by side": Mirax(photos={1, 2, 8}),
    "PNG and BMP": Mirax(formats=("PNG", "BMP24", "JPEG"), positions=mirax.scattered(PLAIN)),
    "fluorescence": Mirax(fill=0, positions=mirax.scattered(PLAIN), photos={0, 3, 9}),
    "not a whole number of images": Mirax(images=(6, 10), overlap=(8, 8)),
    "level 0 of joined images": Mirax(first_concat=1, levels=3, positions=mirax.scattered(PLAIN)),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "slide.mrxs"


@pytest.mark.parametrize("name", SLIDES)
def test_levels_and_regions_are_openslides(path, name):
    made = SLIDES[name]
    mirax.write(path, made)
    background = made.fill & 0xFF
    random = np.random.default_rng(5)
    with open_slide(path, "cpu") as slide, oracles.openslide.OpenSlide(path) as other:
        assert slide.vendor == other.properties["openslide.vendor"] == "mirax"
        assert slide.layout.problems == ()
        assert slide.level_dimensions == other.level_dimensions
        assert slide.level_downsamples == pytest.approx(other.level_downsamples, rel=1e-12)
        for index, level in enumerate(slide.levels):
            rgba = other.read_region((0, 0), index, other.level_dimensions[index])
            expected = oracles.opaque(rgba, background)
            np.testing.assert_array_equal(level[...], expected)
            part = np.s_[5:-9:3, 1::4]
            np.testing.assert_array_equal(level[part], expected[part])
            for _ in range(10):
                step = int(slide.level_downsamples[index])
                corner = [int(random.integers(-20, side)) * step for side in level.shape[1::-1]]
                size = tuple(random.integers(1, 70, 2).tolist())
                rgba = other.read_region(corner, index, size)
                expected_part = oracles.opaque(rgba, background)
                # OpenSlide shows what lies beyond the level, too.
                y = corner[1] // step + np.arange(size[1])
                x = corner[0] // step + np.arange(size[0])
                expected_part[(y < 0) | (y >= level.shape[0])] = background
                expected_part[:, (x < 0) | (x >= level.shape[1])] = background
                found = slide.read_region(corner, size, index)
                np.testing.assert_array_equal(found, expected_part)


def test_positions_between_pixels_are_rounded(path):
    """OpenSlide blends neighbours there; each of its pixels lies among those around ours."""
    mirax.write(path, Mirax(size=(64, 48), positions=mirax.scattered(Mirax(size=(64, 48)), 5)))
    with open_slide(path, "cpu") as slide, oracles.openslide.OpenSlide(path) as other:
        for index, size in enumerate(slide.level_dimensions[:3]):
            found = slide.levels[index][...]
            expected = oracles.opaque(other.read_region((0, 0), index, size))
            if index == 0:
                np.testing.assert_array_equal(found, expected)
                continue
            shifts = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]
            around = [np.roll(found.astype(int), shift, (0, 1)) for shift in shifts]
            fits = (expected >= np.min(around, 0) - 1) & (expected <= np.max(around, 0) + 1)
            assert fits.mean() > 0.95


def test_properties_equal_openslides(path):
    mirax.write(path)
    with open_slide(path, "cpu") as slide, oracles.openslide.OpenSlide(path) as other:
        said = {
            key.removeprefix("mirax."): value
            for key, value in other.properties.items()
            if key.startswith("mirax.")
        }
        found = {
            f"{group}.{key}": value
            for group, section in slide.metadata["mirax"].items()
            for key, value in section.items()
        }
        assert found == said
        assert slide.mpp == (0.25, 0.26)
        assert slide.objective == float(other.properties["openslide.objective-power"]) == 20
        assert slide.metadata["barcode"] == "S-1234567"
        assert set(slide.associated_images) == set(other.associated_images)
        for name, image in slide.associated_images.items():
            expected = np.asarray(other.associated_images[name])[..., :3]
            np.testing.assert_array_equal(image.read(), expected)
        shown = str(masked(slide.metadata))
        assert "A patient" not in shown
        assert "1234567" not in shown


def test_unshown_images_are_reported(path):
    mirax.write(path)
    ini = path.with_suffix("") / "Slidedat.ini"
    more = "HIER_COUNT = 3\nHIER_1_NAME = Slide filter level\nHIER_1_COUNT = 1\n"
    more += "HIER_2_NAME = Microscope focus level\nHIER_2_COUNT = 5"
    ini.write_text(ini.read_text("utf-8-sig").replace("HIER_COUNT = 1", more, 1), "utf-8-sig")
    with open_slide(path, "cpu") as slide:
        assert slide.layout.problems == ("Only the first of 5 focal planes is shown.",)


@pytest.mark.parametrize("name", ["slide.mrxs", "slide", "slide/Slidedat.ini"])
def test_whatever_of_it_is_opened(path, name):
    mirax.write(path)
    with open_slide(path.parent / name, "cpu") as slide:
        assert slide.vendor == "mirax"
        assert slide.levels[0][...].any()


def test_a_folder_left_behind(path):
    mirax.write(path)
    path.with_suffix("").rename(path.parent / "another")
    with pytest.raises(CorruptSlideError, match=r"whose folder 'slide' with Slidedat.ini"):
        open_slide(path)


def test_a_data_file_left_behind(path):
    mirax.write(path)
    (path.with_suffix("") / "Data0001.dat").unlink()
    with open_slide(path, "cpu") as slide:
        assert "1 of 2 data files are missing, such as 'Data0001.dat'" in slide.layout.problems[0]
        with pytest.raises(TileError):
            slide.levels[0][...]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_no_index(path):
    mirax.write(path)
    index = path.with_suffix("") / "Index.dat"
    index.unlink()
    os.mkfifo(index)
    holder = os.open(index, os.O_RDWR | os.O_NONBLOCK)  # so that none waits to open it
    os.write(holder, b"another")
    try:
        with pytest.raises(CorruptSlideError, match="its index is missing"):
            open_slide(path)
    finally:
        os.close(holder)


def test_images_on_top_of_each_other(path):
    """What would take memory without end is refused."""
    places = [(0, 0), *[(1, 1)] * 4095]
    mirax.write(path, Mirax((64, 64), 1, (8, 8), 1, positions=places, page=5000))
    with pytest.raises(CorruptSlideError, match="images overlap"):
        open_slide(path)


def test_loop_of_pages(path):
    mirax.write(path, Mirax(levels=1, associated=False))
    index = path.with_suffix("") / "Index.dat"
    data = bytearray(index.read_bytes())
    root = 5 + len(mirax.SLIDE_ID)
    at = int.from_bytes(data[root : root + 4], "little")
    page = data.index((7).to_bytes(4, "little"))
    assert page < at
    data[page + 4 : page + 8] = page.to_bytes(4, "little")
    index.write_bytes(data)
    with pytest.raises(CorruptSlideError, match="loop"):
        open_slide(path)


@given(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=6))
def test_a_damaged_index(tmp_path_factory, place, data):
    path = tmp_path_factory.getbasetemp() / "damaged" / "slide.mrxs"
    if not path.exists():
        path.parent.mkdir()
        mirax.write(path, Mirax(positions=mirax.scattered(PLAIN), levels=2))
        shutil.copy(path.with_suffix("") / "Index.dat", path.parent / "sound")
    content = bytearray((path.parent / "sound").read_bytes())
    place %= len(content)
    content[place : place + len(data)] = data
    (path.with_suffix("") / "Index.dat").write_bytes(content)
    with suppress(SlideError), open_slide(path, "cpu") as slide:
        for level in slide.levels:
            with suppress(TileError):
                level[...]


NUMBERS = ("-1", "0", "1", "3", "1e300", "nan", "99999999", "x", "")
KEYS = (
    "IMAGENUMBER_X", "IMAGENUMBER_Y", "CameraImageDivisionsPerSide", "HIER_0_COUNT", "OVERLAP_X",
    "NONHIER_COUNT", "NONHIER_0_COUNT", "DIGITIZER_WIDTH", "IMAGE_CONCAT_FACTOR", "FILE_COUNT",
    "OVERLAP_Y", "IMAGE_FORMAT", "FILE_1", "INDEXFILE", "SLIDE_ID", "IMAGE_FILL_COLOR_BGR",
)  # fmt: skip


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Return the path of a slide, and the sound text of the file whose numbers are damaged."""
    path = tmp_path_factory.mktemp("numbered") / "slide.mrxs"
    mirax.write(path, Mirax(levels=2))
    return path, (path.with_suffix("") / "Slidedat.ini").read_text("utf-8-sig")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", NUMBERS)
def test_damaged_numbers(numbered, key, value):
    path, text = numbered
    ini = path.with_suffix("") / "Slidedat.ini"
    ini.write_text(re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", text), "utf-8")
    with suppress(SlideError), open_slide(path, "cpu") as slide, suppress(TileError):
        slide.read_region((0, 0), (100, 100))


def test_names_that_lead_out_of_the_folder(path):
    mirax.write(path)
    ini = path.with_suffix("") / "Slidedat.ini"
    text = ini.read_text("utf-8-sig").replace("Data0000.dat", "../secret.dat")
    ini.write_text(text, "utf-8")
    with pytest.raises(CorruptSlideError, match="points outside its folder"):
        open_slide(path)


def test_gpu_uses_the_same_plans(path, host_gpu):
    mirax.write(path, Mirax(positions=mirax.scattered(PLAIN)))
    with open_slide(path, "cpu") as slide, open_slide(path, "cuda") as by_gpu:
        for index, level in enumerate(slide.levels):
            difference = level[...].astype(int) - by_gpu.levels[index][...]
            assert np.abs(difference).max() <= 2
        assert by_gpu.stats()["decoded"].get("nvimagecodec")
