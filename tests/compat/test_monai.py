"""MONAI datasets get the pixels of its OpenSlide reader; skipped if MONAI is not installed."""

import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("monai", exc_type=ImportError)

from monai.data.wsi_datasets import PatchWSIDataset, SlidingPatchWSIDataset  # noqa: E402
from monai.data.wsi_reader import OpenSlideWSIReader  # noqa: E402

from napari_wsigpu.compat.monai import SlideReader  # noqa: E402


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("level", [0, 1])
def test_patches_of_datasets(path, level, mode):
    data = [{"image": path, "location": place, "label": 0} for place in ((300, 200), (560, 400))]
    options = {"patch_size": (64, 48), "patch_level": level, "center_location": False}
    ours, theirs = (
        PatchWSIDataset(data, reader=reader(level=level, mode=mode), **options)
        for reader in (SlideReader, OpenSlideWSIReader)
    )
    for sample, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(sample["image"]), np.asarray(expected["image"]))
        for name in ("path", "location", "spatial_shape"):
            assert str(sample["image"].meta.get(name)) == str(expected["image"].meta.get(name))


def test_sliding_windows(path):
    counts = [
        len(SlidingPatchWSIDataset([{"image": path}], reader=reader, patch_size=(100, 100)))
        for reader in (SlideReader, OpenSlideWSIReader)
    ]
    assert counts == [48, 48]


def test_resolutions(path):
    ours, theirs = SlideReader(), OpenSlideWSIReader()
    slide, other = ours.read(path), theirs.read(path)
    for level in range(ours.get_level_count(slide)):
        assert ours.get_size(slide, level) == theirs.get_size(other, level)
        assert ours.get_mpp(slide, level) == pytest.approx(theirs.get_mpp(other, level))
        assert ours.get_power(slide, level) == pytest.approx(theirs.get_power(other, level))
    slide.close()
