"""OME-Zarr on servers has the same pixels, planes, labels and facts as on disk."""

import pickle
import shutil

import numpy as np
import pytest

pytest.importorskip("zarr")
pytest.importorskip("obstore")

import zarr

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import (
    NotASlideError,
    SlideClosedError,
    SlideNotFoundError,
    SlidePermissionError,
    SlideReadError,
    TileError,
    UnsupportedSlideError,
)
from tests.fakes.rangeserver import RangeServer, status
from tests.test_remote_slides import bucket as bucket
from tests.test_remote_slides import folder as folder
from tests.writers import slides, stacks, zarrs

PIXELS = np.moveaxis(slides.picture(300, 420, 3, "uint16"), -1, 0)


def write_kinds(folder):
    """Write images whose arrays use each kind of storage."""
    levels = zarrs.halved(PIXELS, "cyx", 3)
    zarrs.write_image(folder / "v4.zarr", levels, version="0.4")
    zarrs.write_label(folder / "v4.zarr", "cells", [PIXELS[0].astype("uint32")], version="0.4")
    zarrs.write_image(folder / "v5.zarr", levels, chunks=(1, 64, 64))
    zarrs.write_image(folder / "shards.zarr", levels[:2], chunks=(1, 32, 32), shards=(1, 128, 128))
    first = {"shape": (1, 128, 128), "index_location": "start"}
    zarrs.write_image(folder / "index first.zarr", levels[:2], chunks=(1, 32, 32), shards=first)
    stacks.save(folder, "zarr", stacks.stack())
    (folder / "a.zarr").rename(folder / "stack.zarr")
    shutil.copytree(folder / "v5.zarr", folder / "without an ending")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zarrs")
    write_kinds(folder)
    return folder


@pytest.fixture
def server(images):
    with RangeServer(images) as server:
        yield server


@pytest.mark.parametrize(
    "name",
    ["v4.zarr", "v5.zarr", "shards.zarr", "index first.zarr", "stack.zarr", "without an ending"],
)
def test_pixels_and_facts_are_those_on_disk(server, images, name):
    with (
        open_slide(server.url(name), device="cpu") as slide,
        open_slide(images / name, device="cpu") as local,
    ):
        assert slide.path == server.url(name)
        assert slide.layout.problems == local.layout.problems == ()
        assert slide.level_dimensions == local.level_dimensions
        assert (slide.mpp, slide.channels, slide.planes) == (
            local.mpp, local.channels, local.planes
        )  # fmt: skip
        for found, expected in zip(slide.levels, local.levels, strict=True):
            np.testing.assert_array_equal(found[...], expected[...])
        for label, own in local.labels.items():
            np.testing.assert_array_equal(slide.labels[label].levels[0][...], own.levels[0][...])
        for z in range(local.planes.size_z):
            region = (30, 20), (50, 40)
            np.testing.assert_array_equal(
                slide.read_region(*region, z=z), local.read_region(*region, z=z)
            )


def test_planes_of_a_label_image(tmp_path):
    numbers = np.arange(3, dtype=np.uint16)[:, None, None] * np.ones((64, 64), np.uint16)
    zarrs.write_image(tmp_path / "a.zarr", [np.zeros((6, 64, 64), np.uint16)], axes="zyx")
    zarrs.write_label(tmp_path / "a.zarr", "cells", [numbers], axes="zyx")
    with RangeServer(tmp_path) as server, open_slide(server.url("a.zarr")) as slide:
        for z in range(3):
            plane = slide.labels["cells"].plane(z)
            with pickle.loads(pickle.dumps(plane)) as copy:
                for label in (plane, copy):
                    assert np.unique(label.levels[0][...]).tolist() == [z]
                    assert label.path == f"{slide.path} (label image 1)"


def test_a_document_of_it_and_copies(server, images):
    with open_slide(server.url("v5.zarr/zarr.json"), device="cpu") as slide:
        again = pickle.loads(pickle.dumps(slide))
        np.testing.assert_array_equal(again.levels[0][...], np.moveaxis(PIXELS, 0, -1))
        again.close()
        with pytest.raises(SlideClosedError):
            again.levels[0][...]


def test_servers_without_ranges(server):
    server.ranges = False
    with open_slide(server.url("v5.zarr"), device="cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], np.moveaxis(PIXELS, 0, -1))


def test_chunks_that_are_not_there_are_background(server, images, tmp_path):
    shutil.copytree(images / "v4.zarr", tmp_path / "v4.zarr")
    (tmp_path / "v4.zarr/0/0.2.3").unlink()
    expected = zarr.open_array(tmp_path / "v4.zarr/0", mode="r")[...]
    assert not expected[:, 128:192, 192:256].any()
    server.folder = tmp_path
    with open_slide(server.url("v4.zarr"), device="cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], np.moveaxis(expected, 0, -1))


def test_a_server_that_fails_gives_no_background(server):
    with open_slide(server.url("v5.zarr"), device="cpu") as slide:
        server.always = status(403)
        with pytest.raises(SlidePermissionError, match="permission to read"):
            slide.levels[0][...]
        server.always = status(500)
        with pytest.raises(SlideReadError, match="internal error"):
            slide.levels[0][...]
        server.always = None
        np.testing.assert_array_equal(slide.levels[0][...], np.moveaxis(PIXELS, 0, -1))


@pytest.mark.parametrize("location", ["start", "end"])
def test_chunk_larger_than_its_metadata_says(server, images, tmp_path, location):
    """A decompression bomb is refused before zarr decodes it."""
    name = {"start": "index first.zarr", "end": "shards.zarr"}[location]
    shutil.copytree(images / name, tmp_path / "shards.zarr")
    larger, shards = np.ones((1, 4096, 4096), "uint16"), {"shape": (1, 4096, 4096)}
    shards["index_location"] = location
    zarrs.write_array(tmp_path / "bomb", larger, chunks=(1, 2048, 2048), shards=shards)
    shutil.copy(tmp_path / "bomb/c/0/0/0", tmp_path / "shards.zarr/0/c/0/0/0")
    server.folder = tmp_path
    with (
        open_slide(server.url("shards.zarr"), device="cpu") as slide,
        pytest.raises(TileError, match=r"its chunks? .*can't be read"),
    ):
        slide.read_region((0, 0), (300, 300))


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("none.zarr", NotASlideError, "is not a Zarr hierarchy"),
        ("none", SlideNotFoundError, "There is no file at"),
        ("v4.zarr?X-Amz-Signature=SECRET", UnsupportedSlideError, "can't have a query"),
    ],
)
def test_unreadable_folders_are_refused(server, name, kind, words):
    with pytest.raises(kind, match=words) as caught:
        open_slide(server.url(name))
    assert "SECRET" not in str(caught.value)


def test_a_server_that_refuses(server):
    server.always = status(403)
    with pytest.raises(SlidePermissionError):
        open_slide(server.url("v4.zarr"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_image_in_a_bucket(bucket, images):
    for path in (images / "v4.zarr").rglob("*"):
        if path.is_file():
            bucket.upload_file(str(path), "slides", f"zarrs/{path.relative_to(images)}")
    with open_slide("s3://slides/zarrs/v4.zarr", device="cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], np.moveaxis(PIXELS, 0, -1))
        assert set(slide.labels) == {"cells"}
