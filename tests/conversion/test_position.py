"""The position that an OME-Zarr states for its image survives a conversion to OME-Zarr."""

import numpy as np
import pytest

from napari_wsigpu import convert, open_slide
from napari_wsigpu.viewer.layers.slide_layers import slide_layers
from tests.writers import zarrs

AXES = [
    {"name": "t", "type": "time", "unit": "second"},
    {"name": "z", "type": "space", "unit": "micrometer"},
    {"name": "y", "type": "space", "unit": "micrometer"},
    {"name": "x", "type": "space", "unit": "micrometer"},
]
SCALE, POSITION = [10, 3, 0.5, 0.25], [60, 12, 100, 200]


@pytest.fixture(params=[True, False], ids=["micrometers", "pixels"])
def source(request, tmp_path):
    """Write a stack with a position; return its path and pixel size (y, x)."""
    path = tmp_path / "source.zarr"
    zarrs.write_array(path / "0", np.ones((2, 3, 60, 80), "uint8"))
    steps = [
        {"type": "scale", "scale": SCALE if request.param else [10, 3, 1, 1]},
        {"type": "translation", "translation": POSITION},
    ]
    axes = [
        axis if request.param or axis["name"] in "tz" else {"name": axis["name"], "type": "space"}
        for axis in AXES
    ]
    datasets = [{"path": "0", "coordinateTransformations": steps}]
    zarrs.write_group(path, {"multiscales": [{"axes": axes, "datasets": datasets}]})
    return path, SCALE[2:] if request.param else [1, 1]


def position_of(path):
    """Return where viewers place the first pixel."""
    with open_slide(path, "cpu") as slide:
        return slide_layers(slide)[0][1]["translate"]


def test_ome_zarr_keeps_the_position(source, tmp_path):
    path, _ = source
    assert position_of(path) == tuple(POSITION)
    assert convert(path, tmp_path / "out.zarr").notes == ()
    assert position_of(tmp_path / "out.zarr") == pytest.approx(POSITION)


def test_a_region_lies_within_the_image(source, tmp_path):
    path, size = source
    path_has_units = size != [1, 1]
    convert(path, tmp_path / "out.zarr", region=(16, 8, 32, 40))
    expected = [60, 12, 100 + 8 * size[0], 200 + 16 * size[1]]
    if path_has_units:
        assert position_of(tmp_path / "out.zarr") == pytest.approx(expected)
    with open_slide(tmp_path / "out.zarr", "cpu") as slide:
        first, starts = slide.layout.first, slide.planes.starts
    np.testing.assert_allclose([starts["t"], starts["z"], *first[::-1]], expected)


@pytest.mark.parametrize("name", ["out.tif", "out.ome.tif", "out.png"])
def test_other_formats_report_the_lost_position(source, tmp_path, name):
    notes = convert(source[0], tmp_path / name).notes
    assert "The position of the image is not converted; only OME-Zarr keeps it." in notes
