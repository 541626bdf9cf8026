"""Label images in OME-Zarr, read with zarr and with this package."""

import numpy as np
import pytest

from napari_wsigpu import convert, open_slide
from napari_wsigpu.conversion.label_images import read_labels, save_labels
from napari_wsigpu.model.errors import ConversionError, LevelError, TargetExistsError
from napari_wsigpu.viewer.contributions.sample_slide import sample_path


@pytest.fixture
def coarse():
    """Return the sample slide and random labels of its level 1."""
    with open_slide(sample_path(), "cpu") as slide:
        shape = slide.levels[1].shape[:2]
        yield slide, np.random.default_rng(0).integers(0, 9, shape, np.uint16)


def test_labels_align_with_their_level(coarse, tmp_path):
    slide, labels = coarse
    target = tmp_path / "cells.zarr"
    save_labels(slide, target, labels, level=1, name="cells/1")
    save_labels(slide, target, labels // 2, level=1, name="halves")
    save_labels(slide, target, labels + 1, level=1, name="cells/1")
    with open_slide(target, "cpu") as found:
        assert found.dimensions == labels.shape[::-1]
        assert list(found.labels) == ["cells_1", "halves"]
        np.testing.assert_array_equal(found.labels["cells_1"].levels[0][..., 0], labels + 1)
        np.testing.assert_array_equal(found.labels["halves"].levels[0][..., 0], labels // 2)
        assert all(each.layout.mpp == found.layout.mpp for each in found.labels.values())
        assert all(label.step == (1, 1) and label.offset == (0, 0) for label in found.layout.labels)
        np.testing.assert_array_equal(found.levels[0][...], slide.levels[1][...])
        ratio = slide.level_downsamples[1]
        assert found.mpp == pytest.approx([size * ratio for size in slide.mpp])
        assert found.layout.problems == ()
    assert not list(target.rglob("*.part"))


@pytest.mark.parametrize(
    ("pixels", "sentence"),
    [(np.zeros((4, 4), int), "pass integers of shape"),
     (np.zeros((4, 4, 3), int), "do not match level"), (np.zeros((4, 4)), "do not match level")],
)  # fmt: skip
def test_invalid_labels_raise(coarse, tmp_path, pixels, sentence):
    with pytest.raises(ConversionError, match=sentence):
        save_labels(coarse[0], tmp_path / "a.zarr", pixels, level=1)
    with pytest.raises(ConversionError, match=r"name must end in \.zarr"):
        save_labels(coarse[0], tmp_path / "a.tif", pixels, level=1)
    with pytest.raises(LevelError, match="has no level 9"):
        save_labels(coarse[0], tmp_path / "a.zarr", pixels, level=9)
    assert list(tmp_path.iterdir()) == []


def test_labels_of_another_slide_are_refused(coarse, tmp_path):
    convert(sample_path(), tmp_path / "image.zarr", region=(0, 0, 300, 200))
    with pytest.raises(ConversionError, match="no label image of the size of a level"):
        read_labels(coarse[0], tmp_path / "image.zarr")


def test_foreign_targets_are_kept(coarse, tmp_path):
    slide, labels = coarse
    folder = tmp_path / "mine.zarr"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(TargetExistsError, match="choose another name"):
        save_labels(slide, folder, labels, level=1)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    other = tmp_path / "other.zarr"
    convert(slide, other, region=(0, 0, 512, 512))
    with pytest.raises(TargetExistsError, match="not an OME-Zarr image of"):
        save_labels(slide, other, labels, level=1)
    assert not (other / "labels").exists()
