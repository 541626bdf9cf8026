"""Drawing of layers with very many shapes."""

import numpy as np
import pytest
from napari.layers import Layer, Shapes
from napari.settings import get_settings

from napari_wsigpu import Annotation
from napari_wsigpu.annotations.rings import joined
from napari_wsigpu.viewer.annotations.annotation_layers import annotation_layers
from napari_wsigpu.viewer.annotations.annotator import annotator_of
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.drawing.outlines import LEAST, Outlines, repair
from napari_wsigpu.viewer.layers.slide_layers import slide_of
from napari_wsigpu.viewer.napari_internals import SHAPE_LIST, SHAPES, layer_visual
from napari_wsigpu.widgets.annotations.classes import classify

SQUARE = np.array([(0, 0), (10, 0), (10, 10), (0, 10)], float)
BLUE = (0, 0, 255)


def squares(count):
    """Small squares in a grid at the slide's lower right, and one large one at its upper left."""
    at = np.stack(np.divmod(np.arange(count - 1), 40), axis=1) * 14 + (800, 900)
    small = [Annotation("polygon", (SQUARE + each,), "", "Tumor", BLUE) for each in at]
    return [Annotation("polygon", (SQUARE * 30 + 200,), "", "Tumor", BLUE), *small]


@pytest.fixture
def shown(viewer):
    """A slide, and more outlines on it than napari draws."""
    annotator_of(viewer)
    [image] = viewer.open(str(sample_path()), plugin="napari-wsigpu")
    [data] = annotation_layers(squares(LEAST), "cells", image)
    return image, viewer.add_layer(Layer.create(*data))


def napari_draws(viewer, layer):
    return layer_visual(viewer, layer).node.shape_faces.visible


def blue_pixels(viewer, image, zoom):
    """Return how many pixels of the middle row are blue when the large square fills the view."""
    viewer.scene.camera.zoom = zoom
    viewer.scene.camera.center = image.data_to_world((350, 350))
    pixels = viewer.screenshot(size=(200, 300), flash=False).astype(int)
    row = pixels[100]
    return np.count_nonzero((row[:, 2] > 150) & (row[:, 0] < 110)), pixels


@pytest.mark.window
def test_outlines_have_the_same_width_at_any_zoom(viewer, shown):
    image, layer = shown
    assert not napari_draws(viewer, layer)
    pixel = image.scale[0]
    for factor in (0.3, 0.6):
        count, pixels = blue_pixels(viewer, image, factor / pixel)
        assert count == 4
    layer.visible = False
    _, plain = blue_pixels(viewer, image, 0.6 / pixel)
    inside = np.abs(pixels - plain)[100, 120:180]
    assert 0 < inside.max() < 60


@pytest.mark.window
def test_few_shapes_are_napari_s(viewer, shown):
    _, layer = shown
    layer.remove([LEAST - 1])
    assert napari_draws(viewer, layer)
    layer.add(SQUARE, shape_type="polygon")
    assert not napari_draws(viewer, layer)
    viewer.screenshot(flash=False)


@pytest.mark.window
@pytest.mark.parametrize("count", [2, LEAST])
def test_pale_outlines_have_a_dark_rim(viewer, shown, count):
    image, layer = shown
    layer.remove(list(range(count, LEAST)))
    classify(layer, range(count), "Ignore*", "#f0f0f0")
    viewer.layers.selection.clear()
    zoom = 0.3 / image.scale[0]
    _, pixels = blue_pixels(viewer, image, zoom)
    layer.visible = False
    _, plain = blue_pixels(viewer, image, zoom)
    darker = (plain - pixels)[100].max(axis=1) > 60
    assert 2 <= np.count_nonzero(darker) <= 6  # on each side of two outlines
    assert np.count_nonzero(pixels[100].min(axis=1) > 225) >= 2
    found = annotator_of(viewer).annotations(slide_of(image))
    assert {each.color for each in found} == {(240, 240, 240)}


@pytest.mark.window
@pytest.mark.parametrize("count", [2, LEAST])
def test_selected_outlines_have_napari_s_color_and_a_rim(viewer, shown, count):
    image, layer = shown
    layer.remove(list(range(count, LEAST)))
    layer.mode, layer.selected_data = "select", {0}
    zoom = 0.3 / image.scale[0]

    def row():
        return blue_pixels(viewer, image, zoom)[1][140, :, :3]  # below the handles

    selected = row()
    layer.selected_data = set()
    plain = row()
    highlight = np.array(get_settings().appearance.highlight.highlight_color[:3]) * 255
    found = np.abs(selected - highlight).max(axis=1) < 40
    assert np.count_nonzero(found) == 4  # two outlines
    assert np.count_nonzero(np.abs(plain - highlight).max(axis=1) < 40) == 0
    beside = (np.roll(found, 1) | np.roll(found, -1)) & ~found
    assert selected[beside].max() < 140  # a dark rim
    layer.selected_data = {0}
    viewer.layers.selection.active = image
    np.testing.assert_array_equal(row(), plain)


@pytest.mark.window
def test_selected_shapes_can_be_removed(viewer, shown):
    _, layer = shown
    layer.remove(list(range(2, LEAST)))
    layer.mode, layer.selected_data = "select", {1}
    layer._value = (1, None)  # under the mouse
    layer.remove_selected()
    assert len(layer.data) == 1
    viewer.screenshot(flash=False)


@pytest.mark.parametrize("seed", range(20))
def test_changed_shapes_leave_the_triangles_of_others(seed):
    chance = np.random.default_rng(seed)

    def polygon():
        corner = chance.uniform(20, 400, 2)
        if chance.random() < 0.5:
            turn = np.linspace(0, 2 * np.pi, chance.integers(3, 9), endpoint=False)[:, None]
            return np.hstack([np.cos(turn), np.sin(turn)]) * 20 + corner
        holes = [SQUARE[::-1] / 4 + corner + 3 + 6 * each for each in range(chance.integers(1, 4))]
        return joined([SQUARE * 3 + corner, *holes])

    layer = Shapes([polygon() for _ in range(4)], shape_type="polygon")
    shapes = SHAPES.get(layer)
    repair(shapes)
    for _ in range(12):
        index = int(chance.integers(4))
        change = chance.integers(3)
        if change == 0:
            shapes.edit(index, polygon())
        else:
            name, value = [("rotate", chance.uniform(5, 90)), ("scale", chance.uniform(0.5, 1.5))][
                change - 1
            ]
            getattr(shapes, name)(index, value, center=(50, 50))
        mesh = SHAPE_LIST.get(shapes)
        for first, shape in zip(mesh.triangles_index, shapes.shapes, strict=False):
            found = mesh.vertices[mesh.triangles[first : first + shape.triangles_count]]
            edges = shape._edge_vertices + shape.edge_width * shape._edge_offsets
            fill, outline = (
                shape._face_vertices[shape._face_triangles],
                edges[shape._edge_triangles],
            )
            np.testing.assert_allclose(found, np.concatenate([fill, outline]), atol=1e-3)


@pytest.mark.window
def test_rotated_holes_leave_other_fills_where_they_are(viewer, shown):
    image, layer = shown
    hole = SQUARE * 30 + 200, SQUARE[::-1] * 10 + 300
    lower = SQUARE * 20 + (200, 550)
    found = [Annotation("polygon", rings, "", "Tumor", BLUE) for rings in (hole, (lower,))]
    holed = Layer.create(*annotation_layers(found, "holes", image)[0])
    layer.data = [*zip(holed.data, holed.shape_type, strict=True)]
    layer.face_color = "blue"
    viewer.layers.selection.clear()

    def lower_half():
        return blue_pixels(viewer, image, 0.3 / image.scale[0])[1][165:]

    before = lower_half()
    for angle in range(10, 60, 10):
        SHAPES.get(layer).rotate(0, angle, center=(350, 350))
        layer.events.data(
            value=layer.data, action="changed", data_indices=(0,), vertex_indices=((),)
        )
        layer.refresh()
        viewer.layers.selection.clear()
    np.testing.assert_array_equal(lower_half(), before)


@pytest.mark.window
def test_napari_draws_few_shapes_in_their_new_colors(viewer, shown):
    image, layer = shown
    classify(layer, range(LEAST), "Stroma", "#00ff00")
    layer.remove([LEAST - 1])
    assert napari_draws(viewer, layer)
    viewer.layers.selection.clear()
    annotator_of(viewer).fit_outlines()
    _, pixels = blue_pixels(viewer, image, 0.3 / image.scale[0])
    row = pixels[100]
    assert np.count_nonzero((row[:, 1] > 150) & (row[:, 0] < 110)) >= 2


@pytest.mark.window
def test_many_outlines_are_selected_classified_and_exported(viewer, shown):
    image, layer = shown
    layer.mode = "select"
    layer.selected_data = set(range(LEAST))
    _, selected = blue_pixels(viewer, image, 0.3 / image.scale[0])
    classify(layer, layer.selected_data, "Stroma", "#00ff00")
    layer.selected_data = set()
    _, green = blue_pixels(viewer, image, 0.3 / image.scale[0])
    assert np.any(selected != green)
    row = green[100].astype(int)
    assert np.count_nonzero((row[:, 1] > 150) & (row[:, 0] < 110)) == 4
    found = annotator_of(viewer).annotations(slide_of(image))
    for one, other in zip(found, squares(LEAST), strict=True):
        assert (one.classification, one.color) == ("Stroma", (0, 255, 0))
        np.testing.assert_allclose(one.rings[0], other.rings[0], atol=0.01)


@pytest.mark.window
def test_removed_layers_are_napari_s(viewer, shown):
    _, layer = shown
    assert "_outline_shapes" in vars(layer)
    viewer.layers.remove(layer)
    assert "_outline_shapes" not in vars(layer)


def lines_of(outlines, zoom=100.0):
    _, lines, dots = outlines.seen(np.array([-100, -100]), np.array([100, 100]), zoom)
    assert not dots.size
    return sorted(
        tuple(sorted(map(tuple, outlines.vertices[pair].astype(int).tolist()))) for pair in lines
    )


def test_lines_follow_rings_and_leave_paths_open():
    hole = SQUARE[::-1] / 2 + 2
    joined = np.concatenate([SQUARE, SQUARE[:1], hole, hole[:1]])
    layer = Shapes([joined, SQUARE], shape_type=["polygon", "path"])
    lines = lines_of(Outlines(layer))
    assert len(lines) == len(SQUARE) + len(hole) + 3
    assert ((0, 0), (0, 10)) in lines


def test_views_need_only_what_they_show():
    layer = Shapes([SQUARE, SQUARE + 1000], shape_type="polygon")
    outlines = Outlines(layer)
    for zoom, count in ((1.0, 4), (0.1, 0)):
        faces, lines, dots = outlines.seen(np.array([-5, -5]), np.array([50, 50]), zoom)
        assert len(lines) == count
        assert len(faces) == count / 2
        assert len(dots) == (count == 0)
    area = 0.0
    faces, *_ = outlines.seen(np.array([-5, -5]), np.array([2000, 2000]), 1.0)
    for a, b, c in outlines.fill_vertices[faces].astype(float):
        area += abs(np.linalg.det([b - a, c - a])) / 2
    assert area == pytest.approx(200)


def test_far_outlines_skip_vertices():
    turn = np.linspace(0, 2 * np.pi, 200, endpoint=False)
    layer = Shapes([100 * np.stack([np.sin(turn), np.cos(turn)], 1)], shape_type="polygon")
    outlines = Outlines(layer)
    for zoom, count in ((0.1, 20), (10.0, 200)):
        _, lines, _ = outlines.seen(np.array([-200, -200]), np.array([200, 200]), zoom)
        assert len(lines) == pytest.approx(count, abs=1)
        np.testing.assert_array_equal(lines[:, 1], np.roll(lines[:, 0], -1))


@pytest.mark.window
@pytest.mark.parametrize("count", [2, LEAST])
def test_outlines_follow_a_shape_that_is_dragged(viewer, shown, count):
    image, layer = shown
    layer.remove(list(range(count, LEAST)))
    layer.mode = "select"
    layer.selected_data = {0}
    zoom = 0.3 / image.scale[0]
    for _ in range(2):
        layer._data_view.shift(0, np.array([0, 250]))  # as napari moves it with the mouse
        layer.refresh()
    layer.selected_data = set()
    viewer.layers.selection.active = image

    def is_outlined(x):
        viewer.scene.camera.zoom = zoom
        viewer.scene.camera.center = image.data_to_world((350, x))
        pixels = viewer.screenshot(size=(200, 300), flash=False).astype(int)[100, 140:161]
        return np.count_nonzero((pixels[:, 2] > 150) & (pixels[:, 0] < 110)) >= 2

    assert [is_outlined(x) for x in (200, 500, 700, 1000)] == [False, False, True, True]
