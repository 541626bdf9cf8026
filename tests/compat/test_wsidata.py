"""The wsidata reader; skipped if wsidata is not installed."""

import pickle

import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("wsidata", exc_type=ImportError)

from wsidata import open_wsi  # noqa: E402
from wsidata.reader import OpenSlideReader  # noqa: E402

from napari_wsigpu.compat.wsidata import NAME, SlideReader  # noqa: E402


def test_regions_match_the_openslide_reader(path):
    ours, theirs = SlideReader(path), OpenSlideReader(path)
    assert ours.properties.shape == theirs.properties.shape
    assert ours.properties.level_shape == theirs.properties.level_shape
    assert ours.properties.mpp == pytest.approx(theirs.properties.mpp)
    assert ours.properties.magnification == theirs.properties.magnification
    for place in ((0, 0, 200, 100, 0), (400, 200, 60, 50, 1), (760, 560, 100, 100, 0)):
        np.testing.assert_array_equal(ours.get_region(*place), theirs.get_region(*place))
    assert ours.get_thumbnail(200).shape == theirs.get_thumbnail(200).shape
    assert set(ours.associated_images) == set(theirs.associated_images)
    copy = pickle.loads(pickle.dumps(ours))
    np.testing.assert_array_equal(copy.get_region(0, 0, 9, 9), ours.get_region(0, 0, 9, 9))
    for reader in (ours, theirs, copy):
        reader.detach_reader()


def test_slides_are_opened_by_name(path):
    wsi = open_wsi(path, reader=NAME)
    assert isinstance(wsi.reader, SlideReader)
    assert wsi.read_region(300, 200, 64, 48).shape == (48, 64, 3)
    wsi.reader.detach_reader()


def test_lazyslide_tiles_match_the_default_reader(path):
    lazyslide = pytest.importorskip("lazyslide", exc_type=ImportError)
    images = []
    for reader in (NAME, "openslide"):
        wsi = open_wsi(path, reader=reader, store=None)
        lazyslide.pp.find_tissues(wsi)
        lazyslide.pp.tile_tissues(wsi, 64, mpp=1.0, background_filter=False)
        images.append([tile.image for tile in wsi.iter.tile_images("tiles")])
        wsi.reader.detach_reader()
    ours, theirs = images
    assert len(ours) == len(theirs) > 10
    for image, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(image, expected)
