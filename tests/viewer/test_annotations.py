"""Annotations as layers over a slide, and back."""

import json
import shutil
import time
from uuid import UUID

import numpy as np
import pytest
from napari.components import ViewerModel
from napari.layers import Labels, Layer, Points, Shapes
from napari.utils.notifications import notification_manager

from napari_wsigpu import Annotation, label_image, open_slide, read_geojson, write_geojson
from napari_wsigpu.model.errors import AnnotationError, SlideError
from napari_wsigpu.viewer.annotations.annotation_layers import (
    MANY,
    MOST_SHAPES,
    annotation_layers,
    annotations_of,
    slide_layer_for,
    to_pixels,
)
from napari_wsigpu.viewer.contributions.geojson_files import get_geojson_reader, read_annotations
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.layers.slide_layers import slide_layers

SQUARE = np.array([(100, 200), (400, 200), (400, 500), (100, 500)], float)
HOLE = np.array([(150, 250), (200, 250), (200, 300), (150, 300)], float)
TURN = np.linspace(0, 2 * np.pi, 64, endpoint=False)
CIRCLE = 300 + 50 * np.stack([np.cos(TURN), np.sin(TURN)], axis=1)
ALL = [
    Annotation("polygon", (SQUARE, HOLE), "gland", "Tumor", (200, 0, 0), locked=True,
               measurements={"Area": 7.5}, id="7b0dc4a6-9f0c-4ab5-93c0-0c6f4e6a8b11",
               extra={"properties": {"metadata": {"a": "b"}}}),
    Annotation("polygon", (SQUARE, SQUARE + 1000), "", "Stroma", (0, 255, 0)),
    Annotation("ellipse", (CIRCLE,), object_type="detection"),
    Annotation("line", (SQUARE[:2],)),
    Annotation("line", (SQUARE[:3],)),
    Annotation("points", (SQUARE,), "", "Mitosis", (0, 0, 255)),
]  # fmt: skip


@pytest.fixture
def model():
    """A viewer without a window, and a slide's layer in it."""
    with open_slide(sample_path(), "cpu") as slide:
        model = ViewerModel()
        yield model, model.add_layer(Layer.create(*slide_layers(slide)[0]))


def added(model, layer, annotations):
    return [model.add_layer(Layer.create(*each)) for each in
            annotation_layers(annotations, "of QuPath", layer)]  # fmt: skip


@pytest.mark.parametrize(
    ("outline", "kind"),
    [
        (SQUARE, "rectangle"),
        (SQUARE[::-1], "rectangle"),
        (np.roll(SQUARE, 1, axis=0), "rectangle"),
        (np.add(SQUARE, [(0, 0), (0, 0), (0, 9), (0, 0)]), "polygon"),
        (SQUARE[[0, 2, 1, 3]], "polygon"),
        (SQUARE[:3], "polygon"),
    ],
)
def test_upright_rectangles_stay_rectangles(model, outline, kind):
    [shapes] = added(*model, [Annotation("polygon", (np.array(outline, float),))])
    assert shapes.shape_type == [kind]
    [again] = back(model[0], shapes)
    np.testing.assert_allclose(again.rings[0], outline)


def back(model, *layers):
    found = []
    for layer in layers:
        data = layer.as_layer_data_tuple()
        slide_layer = slide_layer_for(model, data[1])
        found += annotations_of(data, to_pixels(model, data[1], layer.ndim, slide_layer))
    return found


def assert_alike(found, expected):
    for after, before in zip(found, expected, strict=True):
        names = ("kind", "name", "classification", "color", "object_type", "locked", "id",
                 "measurements", "extra")  # fmt: skip
        for name in names:
            if name != "id" or before.id:
                assert getattr(after, name) == getattr(before, name)
        if after.kind == "ellipse":
            for edge in ("min", "max"):
                ends = [getattr(each.rings[0], edge)(axis=0) for each in (after, before)]
                np.testing.assert_allclose(*ends, atol=0.01)
            continue
        for ring, other in zip(after.rings, before.rings, strict=True):
            np.testing.assert_allclose(ring, other, atol=0.01)


def test_layers_are_named_after_their_slide(model):
    names = [layer.name for layer in added(*model, ALL)]
    assert names == ["he_phantom of QuPath annotations", "he_phantom of QuPath points"]
    [(_, attributes, _)] = annotation_layers(ALL[:1], "without a slide")
    assert attributes["name"] == "without a slide annotations"
    for title, name in (
        ("he_phantom.svs", "he_phantom annotations"),
        ("1.2.840.5 (2)", "he_phantom 1.2.840.5 (2) annotations"),
    ):
        [(_, attributes, _)] = annotation_layers(ALL[:1], title, model[1])
        assert attributes["name"] == name


def test_layers_are_named_after_the_whole_name_of_a_file(tmp_path):
    path = tmp_path / "TCGA-A1.02.v3.geojson.gz"
    write_geojson(path, ALL[:1])
    [(_, attributes, _)] = read_annotations(str(path))
    assert attributes["name"] == "TCGA-A1.02.v3 annotations"


def test_layers_keep_all_that_objects_say(model):
    model, layer = model
    shapes, points = added(model, layer, ALL)
    assert isinstance(shapes, Shapes)
    assert isinstance(points, Points)
    assert list(shapes.features["class"]) == ["Tumor", "Stroma", "", "", ""]
    assert shapes.shape_type == ["polygon", "polygon", "ellipse", "line", "path"]
    assert_alike(back(model, shapes, points), ALL)


def test_an_object_lies_on_its_pixels(model):
    model, layer = model
    [shapes] = added(model, layer, [ALL[0]])
    top, left = np.array(shapes.data_to_world(shapes.data[0].min(axis=0)))
    x, y = slide_mpp = layer.data[0].slide.mpp
    # The corner of the pixel, half a pixel from the centre at which napari has its coordinates.
    np.testing.assert_allclose((left, top), (99.5 * x, 199.5 * y), rtol=1e-5)
    assert slide_mpp


def test_holes_are_empty_and_parts_are_filled(model):
    model, layer = model
    [shapes] = added(model, layer, [ALL[0], ALL[1]])
    masks = shapes.to_masks((1600, 1600))
    assert masks[0, 350, 350]
    assert not masks[0, 275, 175]
    assert masks[1, 350, 350]
    assert masks[1, 1350, 1350]
    assert not masks[1, 700, 700]


@pytest.fixture(scope="module")
def cells():
    """More objects than napari makes shapes of within seconds: circles of two classes."""
    turn = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    circle = 9 * np.stack([np.cos(turn), np.sin(turn)], axis=1)
    places = np.random.default_rng(0).uniform(20, 4_000, (MOST_SHAPES + 1, 2))
    classes = [("Tumor", (200, 0, 0)), ("Stroma", (0, 200, 0))]
    return [
        Annotation("polygon", (circle + place,), "", *classes[number % 2], "detection")
        for number, place in enumerate(places)
    ]


def test_very_many_outlines_are_labels_and_come_back_exactly(model, cells):
    model, layer = model
    labels, points = added(model, layer, [*cells, ALL[-1]])
    assert isinstance(labels, Labels)
    assert isinstance(points, Points)
    assert tuple(labels.scale) == tuple(layer.scale)
    assert labels.data[0].shape == layer.data[0].shape[:2]
    number = int(labels.data[0][tuple(np.round(cells[-1].rings[0].mean(axis=0)).astype(int))[::-1]])
    row = labels.features.set_index("index").loc[number]
    assert row["class"] == "Tumor"
    np.testing.assert_allclose(labels.colormap.map(number), (200 / 255, 0, 0, 1), atol=0.01)
    found = back(model, labels)
    assert_alike(found, cells)
    labels.translate = np.array(labels.translate) + 10 * np.array(layer.scale)[-2:]
    [first, *_] = back(model, labels)
    np.testing.assert_allclose(first.rings[0], cells[0].rings[0] + 10, atol=0.01)


def test_very_many_outlines_are_added_within_seconds(model, cells):
    """napari needs some 0.2 ms for each of that many shapes."""
    model, layer = model
    begin = time.process_time()
    added(model, layer, cells)
    assert time.process_time() - begin < 1.5


def test_parts_of_levels_of_objects_are_those_of_label_images(model, cells):
    model, layer = model
    [labels] = added(model, layer, cells)
    numbers = np.array([0, *labels.features["index"]])
    for level, array in enumerate(labels.data):
        whole = numbers[label_image(cells, array.shape, 2**level)]
        rows, columns = slice(101, 333), slice(57, 250, 2)
        np.testing.assert_array_equal(array[rows, columns], whole[rows, columns])
        assert array[5, 7] == whole[5, 7]


def test_objects_smaller_than_a_pixel_are_seen(model):
    model, layer = model
    turn = np.array([(0, 0), (1.5, 0), (1.5, 1.5)])
    places = np.stack(np.divmod(np.arange(MOST_SHAPES + 1), 40), axis=1) * (8, 100) + 3
    [labels] = added(model, layer, [Annotation("polygon", (turn + place,)) for place in places])
    coarsest = np.asarray(labels.data[-1])
    step = 2 ** (len(labels.data) - 1)
    seen = np.unique((places + 0.75)[:, ::-1] // step, axis=0).astype(int)
    inside = np.all(seen < coarsest.shape, axis=1)
    assert inside.sum() > 5_000
    assert coarsest[tuple(seen[inside].T)].all()


def test_shapes_lie_where_their_layer_lies(model):
    model, layer = model
    half = model.add_shapes([SQUARE[:, ::-1] / 2], scale=2 * np.array(layer.scale),
                            units=layer.units)  # fmt: skip
    [found] = back(model, half)
    np.testing.assert_allclose(found.rings[0], SQUARE + 0.5, atol=0.01)
    assert (found.object_type, found.classification, found.id) == ("annotation", "", "")


def test_a_rotated_slide_takes_its_objects_with_it(model):
    model, layer = model
    layer.rotate, layer.translate = 30, (500, -700)
    assert_alike(back(model, *added(model, layer, ALL)), ALL)


def test_a_shape_that_is_drawn_after_another_is_selected_is_an_object_of_its_own(model):
    model, layer = model
    [shapes] = added(model, layer, [ALL[0]])
    shapes.selected_data = {0}
    shapes.add_polygons([SQUARE[:, ::-1] + 700])
    first, second = back(model, shapes)
    assert (first.id, first.measurements) == (ALL[0].id, {"Area": 7.5})
    assert (second.measurements, second.classification) == ({}, "Tumor")
    assert second.id not in ("", first.id)
    assert [each.id for each in back(model, shapes)] == [first.id, second.id]


def test_points_of_a_class_are_one_object(model):
    model, layer = model
    points = model.add_points(
        [[1, 2], [3, 4], [5, 6]], scale=layer.scale, units=layer.units,
        features={"class": ["Mitosis", "Apoptosis", "Mitosis"]},
    )  # fmt: skip
    mitoses, apoptosis = back(model, points)
    np.testing.assert_allclose(mitoses.rings[0], [(2.5, 1.5), (6.5, 5.5)], atol=0.01)
    assert apoptosis.classification == "Apoptosis"


@pytest.mark.parametrize("stated_id", ["", ALL[0].id])
@pytest.mark.parametrize("kind", ["polygon", "points"])
def test_objects_without_an_id_of_their_own_keep_what_they_say(model, kind, stated_id):
    """As QuPath wrote them up to version 0.3, and other programs with one id for all."""
    stated = [
        Annotation(kind, (SQUARE + 50 * number,), "", "Tumor", (1, 2, 3), nucleus=(SQUARE[:3],),
                   extra={"number": number}, id=stated_id)
        for number in range(2)
    ]  # fmt: skip
    [layer] = added(*model, stated)
    found = back(model[0], layer)
    assert [each.extra for each in found] == [{"number": 0}, {"number": 1}]
    np.testing.assert_allclose([each.nucleus[0] for each in found], [SQUARE[:3]] * 2)
    assert [each.id for each in back(model[0], layer)] == [each.id for each in found]
    assert len({each.id for each in found} - {""}) == 2


def test_lines_of_several_parts_stay_together(model):
    parts = SQUARE[:2] * 1.0, SQUARE[1:] * 1.0 + 30, SQUARE[:3] * 1.0 + 60
    both = [Annotation("line", parts, "a", id=str(UUID(int=1))), Annotation("line", parts[:1])]
    [shapes] = added(*model, both)
    assert_alike(back(model[0], shapes), both)
    shapes.features["name"] = ["a", "other", "a", ""]
    shapes.add(SQUARE[:2] + 90.0, shape_type="line")
    found = back(model[0], shapes)
    assert [(each.name, len(each.rings)) for each in found[:3]] == [("a", 2), ("other", 1), ("", 1)]
    assert len({each.id for each in found}) == 4


def test_a_nucleus_follows_its_cell(model):
    model, layer = model
    cell = Annotation("polygon", (SQUARE,), nucleus=(SQUARE / 2 + 60,), id=ALL[0].id)
    [shapes] = added(model, layer, [cell])
    np.testing.assert_array_equal(back(model, shapes)[0].nucleus[0], cell.nucleus[0])
    low = SQUARE.min(axis=0)
    shapes.data = [(2 * (SQUARE - low) + low + (30, 70))[:, ::-1] - 0.5]
    shapes.features = {"id": [cell.id]}
    [found] = back(model, shapes)
    moved = 2 * (cell.nucleus[0] - low) + low + (30, 70)
    np.testing.assert_allclose(found.nucleus[0], moved, atol=0.01)


@pytest.mark.parametrize("changed", [0, 3])
def test_a_changed_point_of_several_is_an_object_of_its_own(model, changed):
    model, layer = model
    several = Annotation(
        "points", (SQUARE,), "first", "Mitosis", (0, 0, 255), id=ALL[0].id,
        measurements={"Area": 7.5}, extra={"a": 1},
    )  # fmt: skip
    [points] = added(model, layer, [several])
    features = points.features.copy()
    features.loc[changed, ["class", "name"]] = "Tumor", "other"
    points.features = features
    rest, own = sorted(back(model, points), key=lambda each: each.name)
    np.testing.assert_allclose(rest.rings[0], np.delete(SQUARE, changed, axis=0))
    np.testing.assert_allclose(own.rings[0], SQUARE[[changed]])
    assert (rest.id, rest.measurements, rest.extra) == (several.id, {"Area": 7.5}, {"a": 1})
    assert (own.classification, own.measurements, own.extra) == ("Tumor", {}, {})
    assert own.id not in ("", rest.id)


def test_labels_of_a_level_are_objects_of_the_slide(model):
    model, layer = model
    pixels = np.zeros((100, 100), np.uint16)
    pixels[10:20, 30:50] = 3
    scale = 8 * np.array(layer.scale)
    labels = model.add_labels(
        pixels, scale=scale, translate=3.5 * np.array(layer.scale), units=layer.units,
        features={"index": [3], "class": ["Tumor"]},
    )  # fmt: skip
    [found] = back(model, labels)
    assert (found.name, found.classification, found.object_type) == ("3", "Tumor", "detection")
    np.testing.assert_allclose(found.rings[0].min(axis=0), (240, 80), atol=0.01)
    np.testing.assert_allclose(found.rings[0].max(axis=0), (400, 160), atol=0.01)


def test_refuses_other_layers(model):
    model, layer = model
    with pytest.raises(AnnotationError, match="holds no shapes"):
        back(model, model.add_image(np.zeros((4, 4)), units=layer.units))


def test_which_slide_is_meant(model, tmp_path):
    model, layer = model
    [shapes] = added(model, layer, [ALL[0]])
    of_any = model.add_shapes([SQUARE]).as_layer_data_tuple()[1]
    assert slide_layer_for(model, of_any) is layer
    copy = shutil.copy(sample_path(), tmp_path / "other.svs")
    with open_slide(copy, "cpu") as slide:
        other = model.add_layer(Layer.create(*slide_layers(slide)[0]))
        assert slide_layer_for(model, of_any) is other  # the active one
        assert slide_layer_for(model, shapes.as_layer_data_tuple()[1]) is layer
        model.layers.selection.active = shapes
        assert slide_layer_for(model, of_any) is layer
        model.layers.selection.active = None
        other.visible = False
        assert slide_layer_for(model, of_any) is layer
        other.visible = True
        with pytest.raises(AnnotationError, match="any of several open slides"):
            slide_layer_for(model, of_any)
    assert slide_layer_for(ViewerModel(), of_any) is None
    assert slide_layer_for(None, {}) is None


def test_the_viewer_opens_and_saves_geojson(viewer, tmp_path):
    [layer] = viewer.open(sample_path(), plugin="napari-wsigpu")
    source, target = tmp_path / "slide.geojson", tmp_path / "again.geojson"
    write_geojson(source, ALL)
    shapes, points = viewer.open(source, plugin="napari-wsigpu")
    assert tuple(shapes.scale) == tuple(layer.scale)
    viewer.layers.selection = {shapes, points}
    assert viewer.layers.save(str(target), selected=True, plugin="napari-wsigpu") == [str(target)]
    again = read_geojson(target)
    assert_alike([each for each in again if each.id == ALL[0].id], ALL[:1])
    kept = [json.loads(path.read_text("utf-8"))["features"] for path in (source, target)]
    for before, after in zip(*kept, strict=True):
        assert after["properties"] == before["properties"]


def test_the_viewer_says_that_very_many_outlines_are_labels(viewer, cells, tmp_path):
    viewer.open(sample_path(), plugin="napari-wsigpu")
    source = tmp_path / "cells.geojson"
    write_geojson(source, cells)
    before = len(notification_manager.records)
    [labels] = viewer.open(source, plugin="napari-wsigpu")
    assert isinstance(labels, Labels)
    # The inspector may be opened in between.
    assert MANY in [each.message for each in notification_manager.records[before:]]


def test_geojson_without_a_slide_lies_on_pixels(viewer, tmp_path):
    path = tmp_path / "alone.geojson"
    write_geojson(path, ALL[:1])
    [shapes] = viewer.open(path, plugin="napari-wsigpu")
    np.testing.assert_allclose(shapes.data[0].min(axis=0), (199.5, 99.5))
    write_geojson(path, [])
    assert viewer.open(path, plugin="napari-wsigpu") == []


def test_reader_accepts_geojson_names():
    assert get_geojson_reader(["a.geojson", "B.GEOJSON"]) is not None
    assert get_geojson_reader(["a.geojson", "b.svs"]) is None
    assert get_geojson_reader("a.json") is None


def test_refusals_of_the_writer_are_said(viewer, tmp_path):
    viewer.open(sample_path(), plugin="napari-wsigpu")
    shapes = viewer.add_shapes([SQUARE])
    with pytest.raises(SlideError, match="is not a DICOM slide"):
        shapes.save(str(tmp_path / "slide.dcm"), plugin="napari-wsigpu")
    assert list(tmp_path.iterdir()) == []
