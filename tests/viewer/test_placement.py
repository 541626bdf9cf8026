"""An exported region lands where it was cut out, here and in other programs."""

import numpy as np
import pytest
import tifffile
import zarr
from qtpy.QtTest import QTest

from napari_wsigpu import open_slide, wait
from napari_wsigpu.conversion import convert
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.layers.slide_layers import slide_layers

MPP = 0.499
REGION = (1200, 800, 1536, 1024)


@pytest.fixture(params=[0, 1], ids=["level 0", "level 1"])
def export(request, tmp_path):
    """Export a region at a level; return the path, and what one pixel spans."""

    def write(name):
        path = tmp_path / name
        convert(sample_path(), path, region=REGION, level=request.param)
        return path, 2**request.param

    return write


def expected_first(step):
    """Where the first pixel's centre lies, (y, x) in micrometres."""
    return [(REGION[axis] + (step - 1) / 2) * MPP for axis in (1, 0)]


@pytest.mark.parametrize("name", ["roi.tif", "roi.ome.tif", "roi.ome.zarr"])
def test_the_layer_lies_in_its_place(export, name):
    path, step = export(name)
    with open_slide(path) as slide:
        [(_, attributes, _)] = slide_layers(slide)
    np.testing.assert_allclose(attributes["translate"], expected_first(step))
    np.testing.assert_allclose(attributes["scale"], [MPP * step] * 2)


def test_a_region_of_a_region_lies_in_the_first_slide(tmp_path):
    convert(sample_path(), tmp_path / "outer.tif", region=REGION)
    convert(tmp_path / "outer.tif", tmp_path / "inner.tif", region=(256, 128, 512, 512))
    with open_slide(tmp_path / "inner.tif") as slide:
        [(_, attributes, _)] = slide_layers(slide)
    np.testing.assert_allclose(attributes["translate"], [(800 + 128) * MPP, (1200 + 256) * MPP])


def test_other_programs_find_it_in_ome_tiff(export):
    path, step = export("roi.ome.tif")
    with tifffile.TiffFile(path) as file:
        plane = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]["Pixels"]["Plane"]
    found = [plane["PositionY"], plane["PositionX"]]
    np.testing.assert_allclose(found, expected_first(step))
    assert plane["PositionXUnit"] == plane["PositionYUnit"] == "µm"


def test_other_programs_find_it_in_ome_zarr(export):
    path, step = export("roi.ome.zarr")
    [image] = zarr.open_group(path, mode="r").attrs["ome"]["multiscales"]
    for level in image["datasets"]:
        scale, translation = level["coordinateTransformations"]
        assert scale["type"] == "scale"
        np.testing.assert_allclose(translation["translation"], [0, *expected_first(step)])


def test_whole_slides_have_no_position(tmp_path):
    convert(sample_path(), tmp_path / "whole.ome.zarr", level=2)
    [image] = zarr.open_group(tmp_path / "whole.ome.zarr", mode="r").attrs["ome"]["multiscales"]
    [steps] = {len(level["coordinateTransformations"]) for level in image["datasets"]}
    assert steps == 1


def test_exported_region_covers_its_origin_on_screen(viewer, tmp_path, qtbot):
    convert(sample_path(), tmp_path / "roi.tif", region=REGION)
    [slide] = viewer.open(sample_path(), plugin="napari-wsigpu")
    wait(slide, 30)
    QTest.qWait(100)  # the inspector is open, and the slide is fitted next to it
    x, y, width, height = REGION
    viewer.scene.camera.center = (0, (y + height / 2) * MPP, (x + width / 2) * MPP)
    viewer.scene.camera.zoom = 0.6
    wait(slide, 30)
    before = viewer.screenshot(flash=False).astype(int)
    view = viewer.scene.camera.center, viewer.scene.camera.zoom
    [region] = viewer.open(tmp_path / "roi.tif", plugin="napari-wsigpu")
    wait(region, 30)
    QTest.qWait(100)
    assert not slide.visible  # the second one is shown alone
    slide.visible = True
    viewer.scene.camera.center, viewer.scene.camera.zoom = view
    wait(slide, 30)
    wait(region, 30)
    after = viewer.screenshot(flash=False).astype(int)
    inside = np.abs(after - before)[..., :3].mean(axis=2)
    assert inside.mean() < 4
    region.translate = region.translate + 10
    wait(region, 30)
    moved = np.abs(viewer.screenshot(flash=False).astype(int) - before)[..., :3].mean()
    assert moved > 3 * inside.mean()
