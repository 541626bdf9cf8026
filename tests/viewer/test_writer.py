"""File > Save Selected Layers on slides."""

import numpy as np
import pytest
import tifffile
from napari._app_model import get_app_model
from npe2 import PluginManager
from PIL import Image
from qtpy.QtWidgets import QFileDialog

import napari_wsigpu
from napari_wsigpu import open_slide
from napari_wsigpu.conversion import convert
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.viewer.contributions.sample_slide import sample_path

REGION = (0, 0, 1024, 768)


@pytest.fixture
def small(tmp_path):
    """A slide of few tiles."""
    path = tmp_path / "small.tif"
    convert(sample_path(), path, region=REGION)
    return path


@pytest.mark.parametrize("name", ["a.tif", "a.ome.tif", "a.ome.zarr", "a.zarr", "a.png"])
def test_a_slide_is_saved_at_its_finest_level(viewer, small, tmp_path, name):
    viewer.open(small, plugin="napari-wsigpu")
    target = tmp_path / name
    assert viewer.layers.save(str(target), plugin="napari-wsigpu") == [str(target)]
    with open_slide(small) as slide:
        expected = slide.levels[0][...]
    if name.endswith(".png"):
        with Image.open(target) as image:
            np.testing.assert_array_equal(np.asarray(image), expected)
    else:
        with open_slide(target) as saved:
            np.testing.assert_array_equal(saved.levels[0][...], expected)
            assert saved.mpp == pytest.approx((0.499, 0.499))


def test_the_dialog_offers_it_and_saves(viewer, small, tmp_path, monkeypatch):
    """The menu's command, with the answer of the file dialog alone made up."""
    viewer.open(small, plugin="napari-wsigpu")
    target = tmp_path / "saved.tif"
    offered = []

    def choose(*args, **options):
        offered.extend(options["filter"].split(";;"))
        return str(target), next(item for item in offered if "Slide" in item)

    monkeypatch.setattr(QFileDialog, "getSaveFileName", choose)
    get_app_model().commands.execute_command(
        "napari.window.file.save_layers_dialog.selected"
    ).result()
    assert any(item.startswith("Slides by napari-wsigpu Slide (*.ome.tif") for item in offered)
    with open_slide(target) as saved:
        assert saved.dimensions == REGION[2:]
        assert saved.level_count == 1


def test_channels_are_saved_together(viewer, write_channels, tmp_path):
    path, pixels, _ = write_channels(3)
    viewer.open(path, plugin="napari-wsigpu")
    target = tmp_path / "out.ome.tif"
    viewer.layers.save(str(target), plugin="napari-wsigpu")
    np.testing.assert_array_equal(tifffile.imread(target), pixels)
    viewer.layers.selection = {viewer.layers[1]}
    viewer.layers.save(str(target), selected=True, plugin="napari-wsigpu")
    np.testing.assert_array_equal(tifffile.imread(target), pixels)


def test_layers_of_two_slides_are_refused(viewer, small, write_channels, tmp_path):
    viewer.open(small, plugin="napari-wsigpu")
    viewer.open(write_channels(1)[0], plugin="napari-wsigpu")
    with pytest.raises(SlideError, match="show several slides"):
        viewer.layers.save(str(tmp_path / "out.tif"), plugin="napari-wsigpu")
    assert not (tmp_path / "out.tif").exists()


def test_other_pictures_are_saved_as_napari_does(viewer, tmp_path):
    pixels = np.arange(48, dtype=np.uint8).reshape(6, 8)
    viewer.add_image(pixels)
    viewer.layers.save(str(tmp_path / "plain.tif"), plugin="napari-wsigpu")
    np.testing.assert_array_equal(tifffile.imread(tmp_path / "plain.tif"), pixels)
    viewer.add_image(pixels)
    with pytest.raises(SlideError, match="show no slide"):
        viewer.layers.save(str(tmp_path / "two.tif"), plugin="napari-wsigpu")


def test_the_writer_is_declared(viewer):
    writers = list(PluginManager.instance().iter_compatible_writers(["image"]))
    [ours] = [item for item in writers if item.command == "napari-wsigpu.write_slide"]
    assert {".tif", ".ome.tif", ".zarr", ".png"} <= set(ours.filename_extensions)


def test_split_rgb_decodes_no_pyramid(viewer, qtbot):
    [layer] = viewer.open(sample_path(), plugin="napari-wsigpu")
    napari_wsigpu.wait(layer, 30)
    qtbot.wait(300)
    slide = layer.data[0].slide
    zoom, asked = viewer.scene.camera.zoom, slide.stats()["tiles_asked"]
    viewer.layers.selection.active = layer
    get_app_model().commands.execute_command("napari.layer.split_rgb").result()
    assert slide.stats()["tiles_asked"] - asked < 100  # of 432 of level 0 alone, three times
    qtbot.wait(300)
    assert [item.colormap.name for item in viewer.layers] == ["red", "green", "blue"]
    # Fitted again: controls of other layers leave the canvas a few pixels more or less.
    assert viewer.scene.camera.zoom == pytest.approx(zoom, rel=0.02)
    for index, item in enumerate(viewer.layers):
        assert item.multiscale
        np.testing.assert_array_equal(
            item.data[0][600:700, 900:1000], slide.levels[0][600:700, 900:1000, index]
        )
