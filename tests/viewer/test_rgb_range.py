"""RGB of more than 8 bits is shown as bright as it is."""

import numpy as np
import pytest
import tifffile

from napari_wsigpu.viewer.contributions.slide_reader import read_slides
from napari_wsigpu.viewer.layers.slide_layers import slide_of

pytestmark = pytest.mark.window
COLOR = (40, 50, 60)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (np.uint16, np.array(COLOR) * 257),
        (np.float32, np.array(COLOR) / 255),
    ],
)
def test_wide_rgb_is_shown_as_it_is(viewer, tmp_path, dtype, values):
    path = tmp_path / "wide.tif"
    pixels = np.tile(values.astype(dtype), (512, 512, 1))
    if dtype == np.float32:  # the range of the data is black to white
        pixels[:16], pixels[-16:] = 0, 1
    tifffile.imwrite(path, pixels, photometric="rgb", tile=(256, 256))
    [layer] = viewer.open(path, plugin="napari-wsigpu")
    picture = viewer.screenshot(flash=False, canvas_only=True)
    middle = picture[picture.shape[0] // 2, picture.shape[1] // 2, :3].astype(int)
    assert np.abs(middle - COLOR).max() <= 1
    assert slide_of(layer) is not None


def test_limits_of_floats_that_are_not_finite(tmp_path):
    path = tmp_path / "empty.tif"
    tifffile.imwrite(path, np.full((64, 64, 3), np.nan, np.float32), photometric="rgb")
    [(levels, attributes, _)] = read_slides(str(path))
    assert attributes["contrast_limits"] == (0, 1)
    levels[0].slide.close()
