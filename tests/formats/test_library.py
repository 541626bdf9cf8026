"""Slides of formats that have no reader here but a library's."""

import sqlite3
import sys
import types

import numpy as np
import pytest

from napari_wsigpu import convert, open_slide
from napari_wsigpu.model.errors import (
    NotASlideError,
    SlideChangedError,
    SlideClosedError,
    TileError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.privacy import masked
from tests import oracles
from tests.writers import ndpi, slides

PIXELS = slides.picture(300, 528)
SIDE = 176


def write_vms(path, size=(2, 3), damaged=False):
    """Write a Hamamatsu VMS slide, after OpenSlide's page: a grid of JPEGs and a map of them."""
    rows, columns = size
    tiles = [
        [PIXELS[y : y + SIDE, x : x + SIDE] for x in range(0, columns * SIDE, SIDE)]
        for y in range(0, rows * SIDE, SIDE)
    ]
    lines = ["[Virtual Microscope Specimen]", "NoLayers=1", f"NoJpegColumns={columns}"]
    lines += [f"NoJpegRows={rows}", "SourceLens=20", "PhysicalWidth=132000"]
    lines += ["PhysicalHeight=75000", "LayerSpacing=0", "MapFile=map.jpg", "Reference=S-99887766"]
    for row in range(rows):
        for column in range(columns):
            key = "" if (row, column) == (0, 0) else f"({column},{row})"
            name = f"part{row}{column}.jpg"
            lines.append(f"ImageFile{key}={name}")
            data = bytearray(jpeg(tiles[row][column]))
            if damaged and (row, column) == (1, 1):
                data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
            (path.parent / name).write_bytes(data)
    (path.parent / "map.jpg").write_bytes(jpeg(PIXELS[::3, ::3].copy()))
    (path.parent / "macro.jpg").write_bytes(jpeg(slides.picture(30, 70)))
    lines.append("MacroImage=macro.jpg")
    path.write_text("\n".join(lines) + "\n")


def jpeg(pixels):
    """Encode with the restart markers by which OpenSlide cuts such JPEGs."""
    return ndpi.jpeg(pixels, 11)


@pytest.fixture
def path(tmp_path):
    write_vms(tmp_path / "slide.vms")
    return tmp_path / "slide.vms"


def test_pixels_and_facts_are_openslides(path):
    random = np.random.default_rng(3)
    with open_slide(path) as slide, oracles.openslide.OpenSlide(path) as other:
        assert slide.vendor == other.properties["openslide.vendor"] == "hamamatsu"
        assert slide.level_dimensions == other.level_dimensions
        assert slide.level_downsamples == other.level_downsamples
        assert slide.objective == 20
        assert slide.mpp == (0.25, 0.25)
        assert slide.metadata["hamamatsu"]["Reference"] == "S-99887766"
        assert "S-99887766" not in str(masked(slide.metadata))
        for index, level in enumerate(slide.levels):
            rgba = other.read_region((0, 0), index, other.level_dimensions[index])
            np.testing.assert_array_equal(level[...], oracles.opaque(rgba))
            for _ in range(10):
                x, y = (int(random.integers(0, side)) for side in slide.dimensions)
                x, y = (int(value * slide.level_downsamples[index]) for value in (x, y))
                rgba = other.read_region((x, y), index, (90, 70))
                found = slide.read_region((x, y), (90, 70), index)
                np.testing.assert_array_equal(found, oracles.opaque(rgba))
        assert set(slide.associated_images) == set(other.associated_images) == {"macro"}
        macro = np.asarray(other.associated_images["macro"])[..., :3]
        np.testing.assert_array_equal(slide.associated_images["macro"].read(), macro)


def test_reader_is_named(path):
    with open_slide(path) as slide:
        name, why = slide.decoder
        assert (name, why) == ("OpenSlide", "this plugin has no decoder for its format")


def test_a_converted_copy(path, tmp_path):
    with open_slide(path) as slide:
        convert(slide, tmp_path / "copy.tif", compression="deflate")
        with open_slide(tmp_path / "copy.tif") as copy:
            np.testing.assert_array_equal(copy.levels[0][...], slide.levels[0][...])
            assert "S-99887766" not in str(copy.metadata)


def test_closed_and_released(path, leaves_nothing):
    with open_slide(path) as slide:
        level = slide.levels[0]
        expected = level[...]
        slide.release()
        slide.clear_cache()
        np.testing.assert_array_equal(level[...], expected)
    with pytest.raises(SlideClosedError):
        level[...]


def test_a_changed_slide(path):
    with open_slide(path) as slide:
        path.write_text(path.read_text() + "\n")
        with pytest.raises(SlideChangedError):
            slide.levels[0][...]


def test_damaged_part_leaves_others_intact(tmp_path):
    write_vms(tmp_path / "slide.vms", damaged=True)
    with (
        open_slide(tmp_path / "slide.vms", threads=1) as slide,
        pytest.raises(TileError, match="OpenSlide can't decode it"),
    ):
        slide.levels[0][...]


HEADS = {
    "slide.vms": (b"[Virtual Microscope Specimen]\r\nNoLayers=1\r\n", "OpenSlide"),
    "slide.vmu": (b"[Uncompressed Virtual Microscope Specimen]\r\n", "OpenSlide"),
    "slide.isyntax": (b'<DataObject ObjectType="DPUfsImport">', "libisyntax"),
}


@pytest.mark.parametrize("name", HEADS)
def test_damaged_slides(tmp_path, name):
    head, library = HEADS[name]
    if library == "libisyntax":
        pytest.importorskip("isyntax")
    (tmp_path / name).write_bytes(head)
    with pytest.raises(UnsupportedSlideError, match=f"{library} can't open"):
        open_slide(tmp_path / name)


@pytest.mark.parametrize("name", HEADS)
def test_without_the_library(tmp_path, monkeypatch, name):
    head, library = HEADS[name]
    (tmp_path / name).write_bytes(head)
    monkeypatch.setitem(sys.modules, "openslide", None)
    monkeypatch.setitem(sys.modules, "isyntax", None)
    with pytest.raises(UnsupportedSlideError, match=rf"{library}.*napari-wsigpu\["):
        open_slide(tmp_path / name)


def test_sakura_slide_is_recognized_by_its_table(tmp_path):
    path = tmp_path / "slide.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE SVSlideDataXPO (OID INTEGER)")
    database.close()
    with pytest.raises(UnsupportedSlideError, match="OpenSlide can't open"):
        open_slide(path)


class StandIn:
    """What pyisyntax gives of a slide, as its documentation has it."""

    tile_height = tile_width = 256
    level_downsamples = (1.0, 2.0)
    mpp_x, mpp_y = 0.25, 0.26
    barcode = "S-1"

    def __init__(self):
        self.levels = [PIXELS, PIXELS[::2, ::2]]
        self.level_dimensions = [level.shape[1::-1] for level in self.levels]

    @classmethod
    def open(cls, path):
        return cls()

    def read_region(self, x, y, width, height, level=0):
        part = self.levels[level][y : y + height, x : x + width]
        return np.dstack([part, np.full(part.shape[:2], 255, np.uint8)])

    def read_label_image_jpeg(self):
        return memoryview(jpeg(slides.picture(20, 30)))

    def read_macro_image_jpeg(self):
        return None

    def read_icc_profile(self):
        return None

    def close(self):
        self.levels = []


def test_isyntax_by_a_stand_in(tmp_path, monkeypatch):
    """No iSyntax slide is public: this is what is done with what the library gives."""
    module = types.ModuleType("isyntax")
    module.ISyntax = StandIn
    monkeypatch.setitem(sys.modules, "isyntax", module)
    path = tmp_path / "slide.isyntax"
    path.write_bytes(b'<DataObject ObjectType="DPUfsImport">')
    with open_slide(path) as slide:
        assert slide.vendor == "philips-isyntax"
        assert slide.decoder[0] == "libisyntax"
        assert not slide._reader.offload.uses_gpu()
        assert slide.mpp == (0.25, 0.26)
        np.testing.assert_array_equal(slide.levels[0][...], PIXELS)
        np.testing.assert_array_equal(slide.levels[1][3:99], PIXELS[::2, ::2][3:99])
        assert slide.associated_images["label"].read().shape == (20, 30, 3)


@pytest.mark.parametrize("data", [b"", b"SQLite format 3\0", b"GIF8", bytes(128)])
def test_no_slide(tmp_path, data):
    path = tmp_path / "file.bin"
    path.write_bytes(data)
    assert not oracles.openslide_reads(path)
    with pytest.raises(NotASlideError):
        open_slide(path)
