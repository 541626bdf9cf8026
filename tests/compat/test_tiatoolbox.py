"""TIAToolbox gets the patches of its default reader; skipped if it is not installed."""

import warnings

import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("ignore")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about optional packages
    pytest.importorskip("tiatoolbox.tools.patchextraction", exc_type=ImportError)

from tiatoolbox.tools.patchextraction import get_patch_extractor  # noqa: E402
from tiatoolbox.wsicore.wsireader import WSIReader  # noqa: E402

from napari_wsigpu.compat.tiatoolbox import SlideReader  # noqa: E402


@pytest.fixture
def both(whole):
    readers = SlideReader(whole), WSIReader.open(whole)
    yield readers
    for reader in readers:
        reader.openslide_wsi.close()


def test_reader_is_accepted_instead_of_a_path(both):
    assert WSIReader.open(both[0]) is both[0]


@pytest.mark.parametrize(
    ("resolution", "units"), [(0, "level"), (1, "level"), (1.0, "mpp"), (2.5, "power")]
)
def test_patches(both, resolution, units):
    ours, theirs = (
        list(
            get_patch_extractor(
                "slidingwindow",
                input_img=reader,
                patch_size=(45, 35),
                stride=(50, 45),
                resolution=resolution,
                units=units,
                within_bound=False,
            )
        )
        for reader in both
    )
    assert len(ours) == len(theirs) > 1
    for patch, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(patch, expected)


def test_regions_and_metadata(both):
    ours, theirs = both
    for name in ("level_dimensions", "level_downsamples", "vendor", "objective_power"):
        assert getattr(ours.info, name) == getattr(theirs.info, name)
    np.testing.assert_allclose(ours.info.mpp, theirs.info.mpp)
    np.testing.assert_array_equal(
        ours.read_bounds((-30, -20, 300, 200), 1.0, "mpp"),
        theirs.read_bounds((-30, -20, 300, 200), 1.0, "mpp"),
    )
    np.testing.assert_array_equal(ours.slide_thumbnail(5, "mpp"), theirs.slide_thumbnail(5, "mpp"))
    given = SlideReader(ours.input_path, mpp=(1, 1), power=10)
    assert given.info.objective_power == 10
    given.openslide_wsi.close()
