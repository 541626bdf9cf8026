"""Patches and attention scores in the HDF5 files of CLAM and TRIDENT, drawn over a slide."""

import os
from typing import NamedTuple

import numpy as np
import pytest

from napari_wsigpu.annotations import overlay, read_patches
from napari_wsigpu.limits import limits
from napari_wsigpu.model.errors import AnnotationError, SlideError, SlideNotFoundError

h5py = pytest.importorskip("h5py")
GRID = np.array([(1024, 512), (1536, 512), (1024, 1024), (2048, 1536)])
SCORES = np.array([0.1, 0.2, 0.3, 0.4])


class Size(NamedTuple):
    dimensions: tuple = (4096, 3072)
    level_downsamples: tuple = (1.0, 4.0)


@pytest.fixture
def write(tmp_path):
    """Write datasets as CLAM's `save_hdf5` and TRIDENT's `save_h5` do: chunked and resizable."""

    def write(attributes=(), **datasets):
        path = tmp_path / "slide.h5"
        with h5py.File(path, "w") as file:
            for key, value in datasets.items():
                value = np.asarray(value)
                made = file.create_dataset(
                    key,
                    data=value,
                    maxshape=(None, *value.shape[1:]),
                    chunks=(1, *value.shape[1:]),
                )
                if key == "coords":
                    made.attrs.update(dict(attributes))
        return path

    return write


def drawn(values, coords, size, shape):
    """Draw patches pixel by pixel, as the reference."""
    sums, counts = np.zeros(shape), np.zeros(shape)
    for (x, y), value in zip(coords, values, strict=True):
        at = np.s_[max(y, 0) : max(y + size, 0), max(x, 0) : max(x + size, 0)]
        sums[at] += value
        counts[at] += 1
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def enlarged(found, shape):
    """Return the pixels of level 0 that an overlay covers."""
    (x, y), (width, height) = (np.array(each).astype(int) for each in found[:0:-1])
    whole = np.full(shape, np.nan)
    part = np.repeat(np.repeat(found.image, height, 0), width, 1)
    whole[y : y + part.shape[0], x : x + part.shape[1]] = part[: shape[0] - y, : shape[1] - x]
    return whole


def test_patches_of_one_grid_are_one_pixel_each():
    image, scale, translate = overlay(Size(), GRID, SCORES, 512)
    assert image.shape == (3, 3)
    assert scale == (512, 512)
    assert translate == (1024, 512)
    np.testing.assert_allclose(image[[0, 0, 1, 2], [0, 1, 0, 2]], SCORES, rtol=1e-6)
    assert np.isnan(image).sum() == 5


@pytest.mark.parametrize("step", [64, 96, 97])
def test_overlays_are_exact_for_overlapping_and_shifted_patches(step):
    rng = np.random.default_rng(step)
    coords = rng.integers(0, 5, (20, 2)) * step + (13, 7)
    values = rng.uniform(size=20)
    found = overlay(Size((1000, 900)), coords, values, 128)
    expected = drawn(values, coords, 128, (900, 1000))
    np.testing.assert_allclose(enlarged(found, expected.shape), expected, rtol=1e-6)


def test_very_many_positions_do_not_make_a_large_image():
    coords = np.random.default_rng(0).integers(0, 100_000, (1000, 2))
    image, scale, _ = overlay(Size((100_000, 100_000)), coords, np.ones(1000), 256)
    assert image.size <= 17_000_000
    assert scale[0] < 26
    assert np.nansum(image) * scale[0] * scale[1] == pytest.approx(1000 * 256**2, rel=0.03)


def test_patches_without_a_value_are_left_out():
    image, *_ = overlay(Size(), GRID[:2], [np.nan, 2.0], 512)
    np.testing.assert_array_equal(image, [[2.0]])


@pytest.mark.parametrize(
    ("attributes", "side"),
    [
        # CLAM: a size in pixels of its level, and the level's downsample along x and y.
        ({"patch_size": 256, "patch_level": 1, "downsample": (4.0, 4.0), "name": "a"}, 1024),
        ({"patch_size": 256, "patch_level": 1}, 1024),
        ({"patch_size": 256, "patch_level": 0}, 256),
        # TRIDENT: 256 pixels at 20x on a slide of 40x.
        ({"patch_size": 256, "patch_size_level0": 512, "target_magnification": 20}, 512),
        # CLAM's attention scores have no attributes: the spacing of the grid.
        ({}, 512),
    ],
)
def test_patch_sizes_follow_from_attributes_or_the_grid(write, attributes, side):
    path = write(attributes, coords=GRID, features=np.zeros((4, 8), np.float32))
    coords, values, size = read_patches(path, Size())
    np.testing.assert_array_equal(coords, GRID)
    np.testing.assert_array_equal(values, 1)
    assert size == (side, side)


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 4)])
def test_attention_scores_are_read(write, shape):
    path = write(coords=GRID, attention_scores=SCORES.astype(np.float32).reshape(shape))
    np.testing.assert_allclose(read_patches(path, Size()).values, SCORES, rtol=1e-6)


@pytest.mark.parametrize(
    ("datasets", "attributes", "problem"),
    [
        ({"features": np.zeros((4, 8))}, {}, "no dataset 'coords'"),
        ({"coords": GRID, "attention_scores": SCORES[:3]}, {}, "3 values for 4 patches"),
        ({"coords": np.zeros((4, 3))}, {}, r"shape \(4, 3\)"),
        ({"coords": np.zeros((0, 2))}, {}, r"shape \(0, 2\)"),
        ({"coords": np.full((4, 2), np.nan)}, {}, "is not finite"),
        ({"coords": GRID.astype("S8")}, {}, "is not numeric"),
        ({"coords": GRID[:1]}, {}, "doesn't state the patch size"),
        ({"coords": GRID}, {"patch_size_level0": -1}, "patch size of -1 x -1"),
        ({"coords": GRID}, {"patch_size": 256, "patch_level": 9}, "patch size of nan x nan"),
    ],
)
def test_problems_of_files_are_one_sentence(write, datasets, attributes, problem):
    path = write(attributes, **datasets)
    with pytest.raises(AnnotationError, match=problem) as caught:
        read_patches(path, Size())
    assert path.name in caught.value.message
    assert "; " in caught.value.message


def test_files_with_too_many_patches_are_refused(write, monkeypatch):
    monkeypatch.setattr(limits, "objects", 3)
    with pytest.raises(AnnotationError, match="raise the limit 'objects'"):
        read_patches(write(coords=GRID), Size())


def test_claimed_counts_take_no_memory(tmp_path):
    path = tmp_path / "slide.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("coords", (1 << 40, 2), "i8", chunks=(1 << 10, 2))
    with pytest.raises(AnnotationError, match="raise the limit"):
        read_patches(path, Size())


def test_damaged_files_are_refused(write, tmp_path):
    path = write(coords=np.arange(4000).reshape(-1, 2))
    whole = path.read_bytes()
    for cut in (0, 10, 600, len(whole) // 2):
        path.write_bytes(whole[:cut])
        with pytest.raises(AnnotationError, match="can't be read as HDF5"):
            read_patches(path, Size())
    with pytest.raises(SlideError, match="no file"):
        read_patches(tmp_path / "none.h5", Size())
    os.mkfifo(tmp_path / "pipe.h5")
    with pytest.raises(AnnotationError, match="not a regular file"):
        read_patches(tmp_path / "pipe.h5", Size())


def test_an_empty_path_is_not_the_current_folder():
    with pytest.raises(SlideNotFoundError, match=r"^The path is empty"):
        read_patches("", Size())


def test_files_open_no_other_files(write, tmp_path):
    other = write(coords=GRID).rename(tmp_path / "other.h5")
    for number in range(3):
        path = tmp_path / f"{number}.h5"
        with h5py.File(path, "w") as file:
            if number == 0:
                file["coords"] = h5py.ExternalLink(other, "coords")
            elif number == 1:
                layout = h5py.VirtualLayout((4, 2), "i8")
                layout[:] = h5py.VirtualSource(other, "coords", (4, 2))
                file.create_virtual_dataset("coords", layout)
            else:
                file.create_dataset("coords", (4, 2), "i8", external=[(str(other), 0, 64)])
        with pytest.raises(AnnotationError, match="not a dataset stored in this file"):
            read_patches(path, Size())


def test_patches_of_another_slide_are_refused():
    with pytest.raises(AnnotationError, match="None of the 4 patches overlap the slide"):
        overlay(Size(), GRID + 10_000, SCORES, 512)
