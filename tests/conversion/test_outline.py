"""Conversions with an outline."""

import numpy as np
import pytest

from napari_wsigpu import convert, open_slide
from napari_wsigpu.model.errors import ConversionError
from napari_wsigpu.viewer.contributions.sample_slide import sample_path


@pytest.mark.parametrize("outline", [[], [[(0, 0), (1, 1)]], [[(0, 0, 0)] * 3], 7, [["a"] * 3]])
def test_invalid_outline_raises(tmp_path, outline):
    with pytest.raises(ConversionError, match="not a sequence of rings"):
        convert(sample_path(), tmp_path / "roi.png", region=(0, 0, 9, 9), outline=outline)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", [".tif", ".zarr"])
def test_all_levels_are_masked(tmp_path, ending):
    ring = np.array([(1000, 1000), (2200, 1000), (2200, 1800), (1000, 1800)])
    target = tmp_path / f"masked{ending}"
    done = convert(sample_path(), target, outline=[ring], region=(512, 512, 2048, 2048))
    assert done.tiles_copied == 0
    with open_slide(sample_path(), "cpu") as slide, open_slide(target, "cpu") as masked:
        expected = slide.read_region((512, 512), (2048, 2048))
        background = slide.layout.background
        for level in masked.levels:
            found = level[...]
            down = 2048 / found.shape[0]
            rows, columns = np.indices(found.shape[:2])
            y, x = ((each + 0.5) * down + 512 for each in (rows, columns))
            # A coarser pixel on the edge may average both sides.
            outside = (x < 1000 - down) | (x > 2200 + down) | (y < 1000 - down) | (y > 1800 + down)
            assert (found[outside] == background).all()
            if down == 1:
                within = (x > 1000) & (x < 2200) & (y > 1000) & (y < 1800)
                np.testing.assert_array_equal(found[within], expected[within])
                assert (found[~within] == background).all()
        assert "thumbnail" not in masked.associated_images
