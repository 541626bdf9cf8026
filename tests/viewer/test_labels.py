"""OME-Zarr in napari: channels as they are to be shown, labels where they lie."""

import numpy as np
import pytest
from napari.layers import Image, Labels
from napari.settings import get_settings

import napari_wsigpu
from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import DisplayTimeoutError
from napari_wsigpu.viewer.contributions.slide_reader import get_reader
from napari_wsigpu.viewer.drawing.canvas import update_view
from napari_wsigpu.viewer.drawing.progressive import display_of
from napari_wsigpu.viewer.layers.slide_layers import slide_layers, slide_of
from tests.writers import slides
from tests.writers.zarrs import halved, write_group, write_image, write_label

CHANNELS = [
    {"label": "DAPI", "color": "0000FF", "window": {"start": 10, "end": 500}},
    {"label": "CD3", "color": "FF8800", "active": False},
]
SAID = {
    "colors": [{"label-value": 7, "rgba": [255, 0, 0, 255]}],
    "properties": [{"label-value": 7, "class": "tumour"}, {"label-value": 9, "area": 4}],
}


@pytest.fixture
def numbers():
    found = np.zeros((128, 200), np.int32)
    found[10:40, 20:100] = 7
    found[60:100, 20:60] = 9
    return found


@pytest.fixture
def path(tmp_path, numbers):
    pixels = np.moveaxis(slides.picture(256, 400, 2, "uint16"), -1, 0)
    folder = tmp_path / "slide.ome.zarr"
    write_image(folder, halved(pixels, "cyx", 1), more={"omero": {"channels": CHANNELS}})
    levels = halved(numbers, "yx", 1)
    write_label(folder, "cells", levels, pixel=1.0, more={"image-label": SAID})
    return folder


def edges(layer):
    """Return the outer corners of the first and the last pixel; extents go to their centres."""
    half = np.array(layer.scale) / 2
    return layer.extent.world + np.array([-half, half])


def test_channels_have_windows_and_are_hidden(path):
    with open_slide(path) as slide:
        [(_, first, _), (levels, second, _), _] = slide_layers(slide)
        assert first["name"] == "slide DAPI"
        assert (first["contrast_limits"], first["colormap"], first["visible"]) == (
            (10, 500),
            "blue",
            True,
        )
        low, high = second["contrast_limits"]
        assert (low, high) == (levels[-1][...].min(), levels[-1][...].max())
        assert (second["colormap"], second["visible"]) == ("#ff8800", False)
        for _, attributes, _ in slide_layers(slide)[:2]:
            Image([np.zeros((64, 64)), np.zeros((32, 32))], **attributes)


def test_labels_lie_on_their_slide(path, numbers):
    with open_slide(path) as slide:
        *images, (levels, attributes, kind) = slide_layers(slide)
        assert kind == "labels"
        layer = Labels(levels, **attributes)
        image = Image(images[0][0], **images[0][1])
        assert layer.name == "slide labels"
        np.testing.assert_allclose(edges(layer), edges(image))
        assert layer.units == image.units
        for found, expected in zip(layer.data, halved(numbers, "yx", 1), strict=True):
            np.testing.assert_array_equal(np.asarray(found), expected)


def test_labels_have_their_colors_and_properties(path):
    with open_slide(path) as slide:
        assert list(slide_layers(slide)[-1][1]["features"]) == ["index"]
        levels, attributes, _ = slide_layers(slide, private=True)[-1]
        assert attributes["name"] == "slide cells"
        layer = Labels(levels, **attributes)
        np.testing.assert_array_equal(layer.get_color(7), [1, 0, 0, 1])
        features = layer.features.set_index("index")
        assert features.loc[7, "class"] == "tumour"
        assert features.loc[9, "area"] == 4


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
def test_labels_without_a_color_differ_as_ever(path, dtype):
    """They have the colours that napari gives to all labels where no colour is said."""
    numbers = np.arange(128, dtype=dtype).repeat(2).reshape(1, 256).repeat(128, axis=0)
    write_label(path, "others", [numbers], pixel=1.0, more={"image-label": SAID})
    with open_slide(path) as slide:
        data, attributes, _ = slide_layers(slide)[-1]
    layer, usual = Labels(data, **attributes), Labels(data)
    others = numbers[numbers != 7]
    np.testing.assert_array_equal(layer.colormap.map(others), usual.colormap.map(others))
    np.testing.assert_array_equal(layer.colormap.map(7), [1, 0, 0, 1])


@pytest.mark.parametrize(
    "colors", [{0: "#0000ff80", 7: "#ff0000ff"}, {7: "#ff0000ff", 7 + 49 * 1337: "#0000ffff"}]
)
def test_colors_that_are_said_come_first(path, colors):
    said = [
        {"label-value": label, "rgba": [*bytes.fromhex(color[1:])]}
        for label, color in colors.items()
    ]
    write_label(
        path, "others", [np.ones((128, 200), np.int32)], more={"image-label": {"colors": said}}
    )
    with open_slide(path) as slide:
        data, attributes, _ = slide_layers(slide)[-1]
    layer = Labels(data, **attributes)
    for label, color in colors.items():
        expected = np.array([*bytes.fromhex(color[1:])]) / 255
        np.testing.assert_allclose(layer.colormap.map(label), expected, atol=1e-6)
    np.testing.assert_allclose(layer.colormap.map(9), [0.5, 0.5, 0.5, 1], atol=0.01)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_labels_can_be_waited_for(path, viewer, monkeypatch, asynchronous):
    get_settings().experimental.async_ = asynchronous
    *_, layer = viewer.open(str(path), plugin="napari-wsigpu")
    viewer.scene.camera.zoom = 8
    napari_wsigpu.wait(layer, 30)
    (top, left), (bottom, right) = layer.corner_pixels
    exact = layer.data[layer.data_level][top : bottom + 1, left : right + 1]
    np.testing.assert_array_equal(np.asarray(layer._slice.image.raw), exact)
    monkeypatch.setattr(Labels, "loaded", False)
    with pytest.raises(DisplayTimeoutError, match="'slide labels' was not drawn exactly"):
        napari_wsigpu.wait(layer, 0.1)


def test_labels_are_not_waited_for(tmp_path, viewer, chunk_gate):
    folder = tmp_path / "slide.ome.zarr"
    numbers = np.kron(np.indices((64, 64)).sum(axis=0) % 2, np.ones((32, 32))).astype(np.uint8)
    write_image(folder, halved(200 * numbers, "yx", 3), "yx")
    write_label(folder, "cells", halved(200 * numbers, "yx", 3))
    *_, layer = viewer.open(str(folder), plugin="napari-wsigpu")
    napari_wsigpu.wait(layer)
    chunk_gate.clear()
    viewer.scene.camera.zoom = 8
    update_view(viewer)
    assert not display_of(layer).exact
    assert set(np.unique(layer._slice.image.raw)) == {0, 200}
    chunk_gate.set()
    napari_wsigpu.wait(layer)
    assert layer.data_level == 0
    (top, left), (bottom, right) = layer.corner_pixels
    exact = 200 * numbers[top : bottom + 1, left : right + 1]
    np.testing.assert_array_equal(np.asarray(layer._slice.image.raw), exact)


def test_labels_without_metadata(path):
    write_label(path, "others", [np.ones((256, 400), np.uint8)], units={}, more={})
    with open_slide(path) as slide:
        levels, attributes, _ = slide_layers(slide)[-1]
        layer = Labels(levels, **attributes)
        np.testing.assert_allclose(layer.extent.data, [[0, 0], [255, 399]])
        assert tuple(layer.scale) == (0.5, 0.5)


def test_labels_that_are_moved(path, numbers):
    ome = write_image(path / "labels/moved", [numbers], "yx", pixel=1.0)
    step = {"type": "translation", "translation": [20, 30]}
    ome["multiscales"][0]["datasets"][0]["coordinateTransformations"].append(step)
    write_group(path / "labels/moved", ome)
    write_group(path / "labels", {"labels": ["moved"]})
    with open_slide(path) as slide:
        _, attributes, _ = slide_layers(slide)[-1]
    # Its pixels are twice as large as the slide's, and corners lie on corners.
    assert attributes["translate"] == (20.25, 30.25)


def test_labels_are_no_slides_of_their_own(path):
    with open_slide(path) as slide:
        *_, (levels, attributes, _) = slide_layers(slide)
        assert slide_of(Labels(levels, **attributes)) is None


@pytest.mark.parametrize("name", ["", "zarr.json"])
def test_the_reader_takes_a_folder_and_its_metadata(path, name):
    layers = get_reader(str(path / name))(str(path / name))
    assert [kind for _, _, kind in layers] == ["image", "image", "labels"]
    layers[0][0][0].slide.close()


def test_reader_explains_plates(tmp_path):
    write_group(tmp_path / "plate.zarr", {"plate": {}})
    with pytest.raises(ValueError, match="a plate with many images"):
        get_reader(str(tmp_path / "plate.zarr"))(str(tmp_path / "plate.zarr"))


def test_the_reader_leaves_other_zarr_groups_to_others(tmp_path):
    write_group(tmp_path / "group.zarr", {})
    assert get_reader(str(tmp_path / "group.zarr")) is None


def test_a_viewer_shows_them(path, viewer):
    viewer.open(str(path), plugin="napari-wsigpu")
    assert [type(layer) for layer in viewer.layers] == [Image, Image, Labels]
    assert viewer.layers[2].get_value((30, 40), world=True)
    slide = slide_of(viewer.layers[0])
    viewer.layers.clear()
    slide.close()
