"""hs2p's cuCIM backend on top of this package returns the same tiles as its other backends."""

import sys

import numpy as np
import pytest

from napari_wsigpu.compat import cucim

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("hs2p", exc_type=ImportError)

import hs2p  # noqa: E402
from hs2p.wsi.reader import open_slide  # noqa: E402
from hs2p.wsi.streaming.stream import iter_tile_arrays_from_result  # noqa: E402


@pytest.fixture(autouse=True)
def ours_is_cucim(monkeypatch):
    monkeypatch.setitem(sys.modules, "cucim", cucim)


def test_regions(whole):
    with open_slide(whole, "cucim") as ours, open_slide(whole, "openslide") as theirs:
        assert ours.level_dimensions == list(theirs.level_dimensions)
        assert ours.spacing == pytest.approx(theirs.spacing)
        for place in (((0, 0), 0, (200, 100)), ((300, 160), 1, (60, 50))):
            np.testing.assert_array_equal(ours.read_region(*place), theirs.read_region(*place))


@pytest.mark.parametrize("spacing", [0.499, 1.0])
def test_tiles(whole, spacing):
    tiles = []
    for backend in ("cucim", "openslide"):
        result = hs2p.tile_slide(
            hs2p.SlideSpec(sample_id="slide", image_path=whole),
            tiling=hs2p.TilingConfig(
                backend=backend,
                requested_tile_size_px=64,
                requested_spacing_um=spacing,
                tolerance=0.1,
                overlap=0.25,
            ),
            segmentation=hs2p.SegmentationConfig(method="otsu", downsample=4),
        )
        tiles.append(list(iter_tile_arrays_from_result(result=result, num_workers=2)))
    ours, theirs = tiles
    assert len(ours) == len(theirs) > 3
    for tile, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(tile, expected)
