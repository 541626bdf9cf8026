"""Shapes and views as rectangles of a slide's pixels."""

import math

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from napari.components import ViewerModel
from napari.layers import Layer

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import RegionError
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.layers.slide_layers import slide_layers
from napari_wsigpu.viewer.view.region import ROUNDING, Region, drawn, seen, whole

MICROMETRES = {"micrometer": 1.0, "millimeter": 1e3, "nanometer": 1e-3}
EDGE = 0.5  # from a pixel's centre


@pytest.fixture(scope="module")
def slide():
    with open_slide(sample_path(), "cpu") as opened:
        yield opened


@pytest.fixture
def model(slide):
    """A viewer without a window, and the slide's layer in it."""
    model = ViewerModel()
    return model, model.add_layer(Layer.create(*slide_layers(slide)[0]))


def corners(x, y, width, height):
    """The rectangle around pixels, as (y, x) of its corners in data coordinates."""
    top, left, bottom, right = y - EDGE, x - EDGE, y + height - EDGE, x + width - EDGE
    return np.array([[top, left], [top, right], [bottom, right], [bottom, left]])


def draw(model, layer, points, **options):
    """Draw points of the slide in a new layer of shapes, wherever that lies."""
    shapes = model.add_shapes(**({"ndim": 2} | options))
    per_unit = MICROMETRES[str(layer.units[0])] / MICROMETRES.get(str(shapes.units[0]), 1.0)
    world = [np.array(layer.data_to_world(point)) * per_unit for point in points]
    shapes.add_rectangles([shapes.world_to_data(point) for point in world])
    shapes.selected_data = set()
    return shapes


sides = st.integers(1, 500)
placements = st.fixed_dictionaries(
    {
        "scale": st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)),
        "translate": st.tuples(st.floats(-100, 100), st.floats(-100, 100)),
        "rotate": st.floats(-180, 180),
        "units": st.sampled_from(sorted(MICROMETRES)),
    }
)


@settings(max_examples=20, phases=[Phase.generate])
@given(x=st.integers(0, 1500), y=st.integers(0, 1500), width=sides, height=sides, place=placements)
def test_a_rectangle_is_found_wherever_its_layer_lies(model, slide, x, y, width, height, place):
    model, layer = model
    units = place.pop("units")
    shapes = draw(model, layer, corners(x, y, width, height), **place, units=(units, units))
    found = drawn(model, shapes, layer, slide)
    model.layers.remove(shapes)
    assert found == Region(x, y, width, height)


@settings(max_examples=20, phases=[Phase.generate])
@given(angle=st.floats(1, 89), width=st.integers(50, 300), height=st.integers(50, 300))
def test_a_rotated_rectangle_gives_its_bounding_box(model, slide, angle, width, height):
    model, layer = model
    middle = np.array([1000.0, 900.0])
    turn = np.deg2rad(angle)
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    box = (corners(0, 0, width, height) + EDGE) @ rotation.T + middle
    shapes = draw(model, layer, box)
    region = drawn(model, shapes, layer, slide)
    model.layers.remove(shapes)
    centres = [
        [i for i in range(3000) if box[:, axis].min() <= i + ROUNDING < box[:, axis].max()]
        for axis in (1, 0)
    ]
    assert region[:4] == (centres[0][0], centres[1][0], len(centres[0]), len(centres[1]))
    assert region.notes == ("This is the bounding box of the shape.",)


def test_adjacent_rectangles_share_no_pixel(model, slide):
    model, layer = model
    left = draw(model, layer, [[10, 10], [10, 20.3], [30, 20.3], [30, 10]])
    right = draw(model, layer, [[10, 20.3], [10, 40], [30, 40], [30, 20.3]])
    first, second = (drawn(model, shapes, layer, slide) for shapes in (left, right))
    assert first == Region(10, 10, 11, 20)
    assert second == Region(21, 10, 19, 20)


def test_a_moved_slide_takes_its_pixels_with_it(model, slide):
    model, layer = model
    layer.rotate, layer.translate, layer.scale = 30, (500, -700), (2, 3)
    assert drawn(model, draw(model, layer, corners(5, 6, 70, 80)), layer, slide) == (
        Region(5, 6, 70, 80)
    )


def test_units_that_cannot_be_converted_are_ignored_as_napari_does(model, slide):
    model, layer = model
    shapes = model.add_shapes([[[0, 0], [0, 100], [50, 100], [50, 0]]], units=("pixel", "pixel"))
    region = drawn(model, shapes, layer, slide)
    x, y = slide.mpp
    assert (region.width, region.height) == (math.ceil(100 / x), math.ceil(50 / y))


def test_shapes_of_more_axes_are_taken_by_the_last_two(model, slide):
    model, layer = model
    box = np.array([[7, *layer.data_to_world(point)] for point in corners(10, 20, 30, 40)])
    shapes = model.add_shapes([box], units=("pixel", "micrometer", "micrometer"))
    assert drawn(model, shapes, layer, slide)[:4] == (10, 20, 30, 40)


def test_several_shapes(model, slide):
    model, layer = model
    shapes = draw(model, layer, corners(10, 20, 30, 40))
    shapes.add_rectangles([shapes.world_to_data(layer.data_to_world(point))
                           for point in corners(100, 200, 30, 40)])  # fmt: skip
    shapes.selected_data = {0}
    assert drawn(model, shapes, layer, slide) == Region(
        10, 20, 30, 40, ("Selected: 1 of 2 shapes.",)
    )
    shapes.selected_data = {0, 1}
    assert drawn(model, shapes, layer, slide) == Region(
        10, 20, 120, 220, ("This is the bounding box of the 2 selected shapes.",)
    )
    shapes.selected_data = set()
    assert drawn(model, shapes, layer, slide) == Region(
        100, 200, 30, 40, ("No shape is selected, so this is the last one drawn.",)
    )


def test_an_ellipse_is_said_to_be_taken_by_its_box(model, slide):
    model, layer = model
    shapes = draw(model, layer, corners(10, 20, 30, 40))
    shapes.shape_type = ["ellipse"]
    assert drawn(model, shapes, layer, slide) == Region(
        10, 20, 30, 40, ("This is the bounding box of the shape.",)
    )


def test_regions_are_clipped_to_the_slide(model, slide):
    model, layer = model
    width, height = slide.dimensions
    shapes = draw(model, layer, corners(-100, height - 50, width + 1000, 1000))
    region = drawn(model, shapes, layer, slide)
    assert region[:4] == (0, height - 50, width, 50)
    assert region.notes == ("The part outside the slide is left out.",)


@pytest.mark.parametrize(
    ("box", "sentence"),
    [
        ((-100, 0, 100, 100), "outside the slide"),
        ((0, -1e9, 100, 100), "outside the slide"),
        ((1e12, 0, 1e12, 100), "outside the slide"),
        ((100.2, 100, 0.1, 100), "contains no pixel"),
        ((100, 100, 0, 0), "contains no pixel"),
    ],
)
def test_refuses_empty_regions(model, slide, box, sentence):
    model, layer = model
    shapes = draw(model, layer, corners(*box))
    with pytest.raises(RegionError, match=sentence):
        drawn(model, shapes, layer, slide)


def test_refuses_a_layer_without_shapes(model, slide):
    model, layer = model
    with pytest.raises(RegionError, match="has no shape yet"):
        drawn(model, model.add_shapes(ndim=2), layer, slide)


def test_view_equals_the_visible_part_of_the_canvas(viewer, slide):
    layer = viewer.add_layer(Layer.create(*slide_layers(slide)[0]))
    viewer.add_image(np.zeros((4, 4)), units=("nanometer", "nanometer"))  # the world's unit now
    for center, zoom in [((0, 4e5, 3e5), 2.5e-3), ((0, 0, 0), 3.7e-3), ((0, 9e5, 9e5), 1e-4)]:
        viewer.scene.camera.center, viewer.scene.camera.zoom = center, zoom
        canvas = viewer.window._qt_viewer.canvas
        edges = canvas._viewbox_corners_in_world[:, -2:] / 1000 / layer.scale
        edges = np.clip(edges, 0, slide.dimensions[::-1])
        region = seen(viewer, layer, slide)
        assert region.notes == ()
        found = [[region.y, region.x], [region.y + region.height, region.x + region.width]]
        np.testing.assert_allclose(found, edges, atol=1)


def test_the_view_has_to_be_flat_and_of_the_slide(model, slide):
    model, layer = model
    model.dims.ndisplay = 3
    with pytest.raises(RegionError, match="switch it to 2D"):
        seen(model, layer, slide)
    model.dims.ndisplay = 2
    model.scene.camera.center = (-1e6, -1e6)
    with pytest.raises(RegionError, match="outside the slide"):
        seen(model, layer, slide)


def test_the_whole_slide(slide):
    assert whole(slide) == Region(0, 0, *slide.dimensions)
