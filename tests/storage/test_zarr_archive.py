"""OME-Zarr in a ZIP file, against zarr's own store; damaged and hostile archives."""

import json
import os
import pickle
import struct
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np
import pytest
import zarr
from zarr.storage import ZipStore

from napari_wsigpu import open_slide
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    NotASlideError,
    SlideChangedError,
    SlideClosedError,
    SlideError,
    TileError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.limits import limits
from tests.writers import slides
from tests.writers.zarrs import halved, write_image, write_label

HEIGHT, WIDTH, TILE = 140, 400, 128


def zipped(folder, path, *, top="", compression=ZIP_STORED):
    with ZipFile(path, "w", compression) as archive:
        for each in sorted(folder.rglob("*")):
            if each.is_file():
                archive.write(each, f"{top}{each.relative_to(folder).as_posix()}")
    return path


@pytest.fixture
def pixels():
    return np.moveaxis(slides.picture(HEIGHT, WIDTH, 3, "uint16"), -1, 0)


@pytest.fixture
def folder(tmp_path, pixels):
    levels = halved(pixels, "cyx", 1)
    write_image(tmp_path / "a.zarr", levels, chunks=(1, TILE, TILE))
    write_label(tmp_path / "a.zarr", "cells", halved(pixels[0], "yx", 1))
    return tmp_path / "a.zarr"


@pytest.fixture
def path(folder):
    return zipped(folder, folder.with_name("a.ozx"))


def by_zarr(path, name="0", top=""):
    with ZipStore(path, mode="r") as store:
        return np.moveaxis(zarr.open_array(store, path=f"{top}{name}", mode="r")[...], 0, -1)


ARRAYS = {
    "zstd": {},
    "raw": {"compressors": None},
    "shards": {"shards": (1, 2 * TILE, 2 * TILE)},
    "raw shards": {"shards": (1, 2 * TILE, 2 * TILE), "compressors": None},
    "version 0.4": {"version": "0.4"},
    "read by zarr": {"compressors": zarr.codecs.ZstdCodec(checksum=True)},
    "read by zarr in shards": {
        "shards": (1, 2 * TILE, 2 * TILE),
        "filters": [zarr.codecs.TransposeCodec(order=(2, 1, 0))],
    },
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_pixels_are_those_of_zarr(tmp_path, pixels, kind):
    folder = tmp_path / "a.zarr"
    write_image(folder, halved(pixels, "cyx", 1), chunks=(1, TILE, TILE), **ARRAYS[kind])
    path = zipped(folder, tmp_path / "a.ome.zarr.zip")
    with open_slide(path, "cpu") as slide:
        for number, level in enumerate(slide.levels):
            expected = by_zarr(path, str(number))
            np.testing.assert_array_equal(level[...], expected)
            np.testing.assert_array_equal(level[9:99, 70:201], expected[9:99, 70:201])
        assert slide.layout.files[0].path == slide.path == str(path)
        assert len(slide.layout.files) == 1


def test_archive_of_a_folder(folder):
    path = zipped(folder, folder.with_name("B.ZARR.ZIP"), top="image.zarr/")
    with open_slide(path, "cpu") as slide:
        expected = by_zarr(path, "0", "image.zarr/")
        np.testing.assert_array_equal(slide.levels[0][...], expected)


def test_archive_that_zarr_wrote(tmp_path, pixels):
    path = tmp_path / "a.ozx"
    with ZipStore(path, mode="w") as store:
        array = zarr.create_array(store, shape=(HEIGHT, WIDTH), dtype="uint16", chunks=(TILE, TILE))
        array[...] = pixels[0]
    with open_slide(path, "cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][..., 0], pixels[0])


def test_metadata_and_labels_equal_those_of_the_folder(folder, path):
    with open_slide(path, "cpu") as slide, open_slide(folder, "cpu") as other:
        assert slide.mpp == other.mpp
        assert slide.metadata == other.metadata
        assert slide.channels == other.channels
        labels, expected = slide.labels["cells"], other.labels["cells"]
        np.testing.assert_array_equal(labels.levels[0][...], expected.levels[0][...])


def _corner(slide):
    return slide.levels[0][:99, :99]


def test_other_processes(path):
    with open_slide(path, "cpu") as slide:
        expected = _corner(slide)
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            np.testing.assert_array_equal(pool.submit(_corner, slide).result(60), expected)
        label = pickle.loads(pickle.dumps(slide.labels["cells"]))
        with label:
            np.testing.assert_array_equal(_corner(label), _corner(slide.labels["cells"]))


def test_threads_share_one_handle(path, handles_of):
    with open_slide(path, "cpu") as slide, ThreadPoolExecutor(4) as pool:
        expected = by_zarr(path)
        corners = [(y, x) for y in range(0, 120, 40) for x in range(0, 200, 40)]
        found = pool.map(
            lambda at: slide.levels[0][at[0] : at[0] + 90, at[1] : at[1] + 90], corners
        )
        for (y, x), region in zip(corners, found, strict=True):
            np.testing.assert_array_equal(region, expected[y : y + 90, x : x + 90])
        assert handles_of(path) == 1
    assert handles_of(path) == 0
    with pytest.raises(SlideClosedError):
        slide.levels[0][:9, :9]


def test_changed_archive(folder, path):
    with open_slide(path, "cpu") as slide:
        zipped(folder, path, top="other/")
        with pytest.raises(SlideChangedError):
            slide.levels[0][:9, :9]


def place_of(path, name):
    """Return the positions of an entry's header and of its record in the index."""
    with ZipFile(path) as archive:
        start = archive.getinfo(name).header_offset
    return start, path.read_bytes().rindex(name.encode()) - 46


def overwrite(path, position, data):
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


@pytest.mark.parametrize("what", ["signature", "name", "offset", "size"])
def test_wrong_entry_damages_its_tile_only(path, pixels, what):
    header, record = place_of(path, "0/c/0/1/1")
    far = struct.pack("<I", 1 << 30)
    position, data = {
        "signature": (header, b"X"),
        "name": (header + 26, b"\xff\xff\xff\xff"),
        "offset": (record + 42, struct.pack("<I", 7)),
        "size": (record + 20, far + far),
    }[what]
    overwrite(path, position, data)
    with open_slide(path, "cpu") as slide:
        said = "can't be read" if what == "name" else "an entry in the archive is wrong"
        with pytest.raises(TileError, match=said):
            slide.levels[0][TILE:, TILE:200]
        np.testing.assert_array_equal(slide.levels[0][-9:, -9:, 0], pixels[0, -9:, -9:])


def test_damaged_chunk(path, pixels):
    header, _ = place_of(path, "0/c/0/0/0")
    overwrite(path, header + 30 + len("0/c/0/0/0"), bytes(40))
    with open_slide(path, "cpu") as slide:
        with pytest.raises(TileError):
            slide.levels[0][:9, :9]
        np.testing.assert_array_equal(slide.levels[0][-9:, -9:, 0], pixels[0, -9:, -9:])


@pytest.mark.parametrize("share", [0.5, 0.999])
def test_truncated_archive(path, share):
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(
        CorruptSlideError, match=r"a\.ozx' is damaged or truncated; get a fresh copy"
    ):
        describe(path)


def test_compressed_entries_are_refused(folder):
    path = zipped(folder, folder.with_name("a.ozx"), compression=ZIP_DEFLATED)
    with pytest.raises(UnsupportedSlideError, match=r"zip it without compression \(zip -0\)"):
        describe(path)


def test_encrypted_entries_are_refused(path):
    _, record = place_of(path, "0/c/0/0/0")
    overwrite(path, record + 8, b"\1")
    with pytest.raises(UnsupportedSlideError, match="is encrypted; unpack it"):
        describe(path)


def test_long_index_is_refused(path, monkeypatch):
    monkeypatch.setattr(limits, "header_bytes", 8000)
    with pytest.raises(UnsupportedSlideError, match="The central directory of"):
        describe(path)


GROUP = {"zarr_format": 3, "node_type": "group"}
CONTENTS = {
    "nothing": {},
    "no metadata": {"a.txt": b"a"},
    "no JSON": {"zarr.json": b"{"},
    "a group": {"zarr.json": json.dumps(GROUP).encode()},
    "large metadata": {"zarr.json": bytes((16 << 20) + 1)},
    "folders above": {"../zarr.json": b"{}", "/zarr.json": b"{}"},
    "an array as folder": {"zarr.json/zarr.json": b"{}"},
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_hostile_content(tmp_path, content):
    path = tmp_path / "a.ozx"
    with ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    with pytest.raises(SlideError, match=r"a\.ozx") as caught:
        describe(path)
    assert str(caught.value).endswith(".")


def test_name_alone_makes_no_archive(tmp_path):
    (tmp_path / "a.ozx").write_bytes(bytes(100))
    with pytest.raises(NotASlideError):
        describe(tmp_path / "a.ozx")
