"""The resources that slides share, and those that they do not."""

import pickle

import numpy as np
import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import DeviceError
from napari_wsigpu.slide import runtime
from napari_wsigpu.slide.runtime import Runtime
from tests.writers import slides

HEIGHT, WIDTH = 100, 150


@pytest.fixture
def path(tmp_path):
    slides.write_aperio(tmp_path / "slide.svs", slides.picture(HEIGHT, WIDTH))
    return tmp_path / "slide.svs"


def test_slides_share_the_default_one(path):
    with open_slide(path) as first, open_slide(path) as second:
        assert first.runtime is second.runtime is runtime.default()


def test_explicit_runtime_is_used(path):
    own = Runtime()
    held = runtime.default().tiles.used
    with open_slide(path, runtime=own) as slide:
        pixels = slide.level_array(0, tolerant=True)[...]
        assert own.tiles.used
        assert runtime.default().tiles.used == held
        slide.clear_cache()
        assert own.tiles.used == 0
        np.testing.assert_array_equal(slide.levels[0][...], pixels)
    assert own.tiles.used == 0
    own.close()


@pytest.mark.parametrize("other", [3, "cpu", Runtime])
def test_other_objects_are_no_runtime(path, other):
    with pytest.raises(DeviceError, match=r"runtime is .*; it must be a Runtime or None"):
        open_slide(path, runtime=other)


def test_using_restores_the_default(path):
    before, other = runtime.default(), Runtime()
    with runtime.using(other) as used:
        assert used is runtime.default() is other
        slide = open_slide(path)
    assert runtime.default() is before
    assert slide.runtime is other
    slide.close()
    with pytest.raises(FileNotFoundError), runtime.using(other):
        open_slide(path.parent / "none.svs")
    assert runtime.default() is before


def test_unpickled_slide_uses_the_local_default(path):
    with open_slide(path, runtime=Runtime()) as slide:
        packed = pickle.dumps(slide)
    with runtime.using(Runtime()) as there, pickle.loads(packed) as copy:
        assert copy.runtime is there


def test_label_images_share_their_slides(tmp_path):
    zarrs = pytest.importorskip("tests.writers.zarrs", exc_type=ImportError)
    zarrs.write_image(tmp_path / "slide.zarr", [np.zeros((3, 64, 64), np.uint8)])
    zarrs.write_label(tmp_path / "slide.zarr", "cells", [np.ones((64, 64), np.uint16)])
    own = Runtime()
    with open_slide(tmp_path / "slide.zarr", runtime=own) as slide:
        assert [label.runtime for label in slide.labels.values()] == [own]


def test_closing_it_closes_slides_that_tasks_opened(path):
    with runtime.using(Runtime()) as shared:
        with open_slide(path) as slide:
            packed = pickle.loads(pickle.dumps(slide.packed("cpu")))
        with packed.use() as first, packed.use() as second:
            assert first is second
        assert len(shared.open_slides) == 1
        shared.close()
        assert len(shared.open_slides) == 0
