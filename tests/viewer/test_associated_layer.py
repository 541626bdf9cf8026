"""Where pictures of unknown scale are laid."""

import numpy as np
import pytest
from napari.components import ViewerModel

from napari_wsigpu import open_slide
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.layers.associated_layer import add_associated_image
from napari_wsigpu.viewer.layers.slide_layers import slide_layers
from tests.writers import leica, slides


@pytest.fixture
def slide():
    with open_slide(sample_path(), "cpu") as opened:
        yield opened


@pytest.fixture
def viewer(slide):
    model = ViewerModel()
    [(levels, attributes, _)] = slide_layers(slide)
    model.add_image(levels, **attributes)
    return model


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_is_as_large_as_fits_the_slides_frame(viewer, slide, channels):
    pixels = np.zeros((100, 400, channels), np.uint8)
    layer = add_associated_image(viewer, slide, "macro", pixels)
    assert layer.name == "he_phantom macro"
    assert layer.rgb == (channels > 1)
    assert layer.data.shape[:2] == (100, 400)
    frame = viewer.layers[0].extent.world
    assert layer.scale[0] == layer.scale[1]
    assert layer.scale[1] * 400 == pytest.approx(frame[1, 1] - frame[0, 1])
    assert layer.extent.world[0, 1] > frame[1, 1]
    assert {str(unit) for unit in layer.units} == {"pixel"}  # its size on the glass is unknown
    viewer.layers.remove(layer)
    assert {str(unit) for unit in viewer.layers.extent.units} == {"micrometer"}


def test_lies_right_of_everything_in_a_viewer_of_stacks(viewer, slide):
    viewer.add_image(np.zeros((5, 10, 10)), scale=(1, 2000, 2000))
    layer = add_associated_image(viewer, slide, "label", np.zeros((10, 10, 3), np.uint8))
    others = [other.extent.world[1, -1] for other in viewer.layers if other is not layer]
    assert layer.extent.world[0, -1] > max(others)


def test_associated_images_do_not_overlap(viewer, slide):
    first = add_associated_image(viewer, slide, "label", np.zeros((10, 10, 3), np.uint8))
    second = add_associated_image(viewer, slide, "macro", np.zeros((10, 30, 3), np.uint8))
    assert second.extent.world[0, -1] > first.extent.world[1, -1]


def test_a_macro_lies_where_the_file_says(tmp_path):
    pixels = slides.picture(128, 192)
    item = leica.scan(pixels, 100_000, 60_000)
    macro = leica.scan(slides.picture(30, 50), 0, 0, (), spacing=10_000, objective="0.6")
    path = leica.write(tmp_path / "slide.scn", [macro, item], (500_000, 300_000))
    with open_slide(path, "cpu") as slide:
        model = ViewerModel()
        [(levels, attributes, _)] = slide_layers(slide)
        shown = model.add_image(levels, **attributes)
        layer = add_associated_image(model, slide, "macro", slide.associated_images["macro"].read())
        assert list(model.layers) == [layer, shown]
        # The slide's frame is the glass that the macro shows; extents count from pixels' centres.
        assert layer.units == shown.units
        low, high = layer.extent.world
        half = np.array(layer.scale) / 2
        np.testing.assert_allclose(low - half, [-0.25, -0.25])
        np.testing.assert_allclose(high + half, [299.75, 499.75])
