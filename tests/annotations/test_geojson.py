"""GeoJSON as in QuPath's documentation and in files that it exported."""

import gzip
import json
import math
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu import Annotation, measure, read_geojson, write_geojson
from napari_wsigpu.annotations.geojson import read_features
from napari_wsigpu.model.errors import AnnotationError, SlideNotFoundError, TargetWriteError
from napari_wsigpu.model.limits import limits

SQUARE = np.array([(10, 20), (110, 20), (110, 120), (10, 120)], float)
HOLE = np.array([(30, 40), (50, 40), (50, 60), (30, 60)], float)
FAR = SQUARE + 500
ID = "7b0dc4a6-9f0c-4ab5-93c0-0c6f4e6a8b11"
# As QuPath 0.5 exports an annotation with a hole, and a cell.
OF_QUPATH = {
    "type": "FeatureCollection",
    "features": [
        {
            "type": "Feature",
            "id": ID,
            "geometry": {
                "type": "Polygon",
                "coordinates": [
                    [[10, 20], [110, 20], [110, 120], [10, 120], [10, 20]],
                    [[30, 40], [30, 60], [50, 60], [50, 40], [30, 40]],
                ],
            },
            "properties": {
                "objectType": "annotation",
                "name": "Biopsy 1",
                "color": [0, 128, 255],
                "classification": {"name": "Tumor", "color": [200, 0, 0]},
                "isLocked": True,
                "measurements": {"Area µm^2": 2400.5, "Ratio": math.nan},
                "metadata": {"ANNOTATION_DESCRIPTION": "invasive front"},
            },
        },
        {
            "type": "Feature",
            "id": str(uuid.UUID(int=5)),
            "geometry": {"type": "Polygon", "coordinates": [[[0, 0], [9, 0], [9, 9], [0, 0]]]},
            "nucleusGeometry": {
                "type": "Polygon",
                "coordinates": [[[2, 1], [6, 1], [6, 4], [2, 1]]],
            },
            "properties": {"objectType": "cell", "classification": {"names": ["A", "Positive"]}},
        },
    ],
}


def written(tmp_path, *annotations):
    path = tmp_path / "out.geojson"
    write_geojson(path, annotations)
    return json.loads(path.read_text("utf-8"))


def read(tmp_path, content):
    path = tmp_path / "in.geojson"
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return read_geojson(path)


def test_reads_what_qupath_exports(tmp_path):
    tumor, cell = read(tmp_path, OF_QUPATH)
    assert (tumor.kind, tumor.name, tumor.classification) == ("polygon", "Biopsy 1", "Tumor")
    assert (tumor.color, tumor.locked, tumor.id) == ((200, 0, 0), True, ID)
    assert tumor.measurements["Area µm^2"] == 2400.5
    np.testing.assert_array_equal(tumor.rings[0], SQUARE)
    assert measure(tumor, (1, 1)).area == 100 * 100 - 20 * 20
    assert (cell.object_type, cell.classification) == ("cell", "A: Positive")
    np.testing.assert_array_equal(cell.nucleus[0], [(2, 1), (6, 1), (6, 4)])


def test_writes_what_qupath_exported(tmp_path):
    found = written(tmp_path, *read(tmp_path, OF_QUPATH))
    tumor, cell = found["features"]
    expected = json.loads(json.dumps(OF_QUPATH))["features"]
    del expected[0]["properties"]["measurements"]["Ratio"]  # JSON has no NaN
    expected[1]["properties"]["classification"] = {"name": "A: Positive"}
    assert found["type"] == "FeatureCollection"
    assert [tumor, cell] == expected


def test_the_structure_that_qupath_documents(tmp_path):
    plain = Annotation("polygon", (SQUARE,), color=(1, 2, 3))
    stroma = Annotation("polygon", (SQUARE, HOLE, FAR), "left", "Stroma", (0, 255, 0))
    found = written(tmp_path, plain, stroma)["features"]
    for feature in found:
        assert feature["type"] == "Feature"
        assert uuid.UUID(feature["id"])
        assert feature["properties"]["objectType"] == "annotation"
    assert found[0]["id"] != found[1]["id"]
    # An object's own colour is next to its class, the colour of a class is inside it.
    assert found[0]["properties"] == {"objectType": "annotation", "color": [1, 2, 3]}
    assert found[1]["properties"] == {
        "objectType": "annotation",
        "name": "left",
        "classification": {"name": "Stroma", "color": [0, 255, 0]},
    }
    # (x, y), closed rings, each followed by its holes.
    assert found[0]["geometry"]["coordinates"] == [
        [[10, 20], [110, 20], [110, 120], [10, 120], [10, 20]]
    ]
    assert found[1]["geometry"]["type"] == "MultiPolygon"
    assert sorted(map(len, found[1]["geometry"]["coordinates"])) == [1, 2]


def test_lines_points_and_ellipses(tmp_path):
    turn = np.linspace(0, 2 * np.pi, 64, endpoint=False)
    outline = np.stack([50 + 20 * np.cos(turn), 40 + 10 * np.sin(turn)], axis=1)
    drawn = [
        Annotation("line", (SQUARE[:2],)),
        Annotation("line", (SQUARE[:2], HOLE)),
        Annotation("points", (SQUARE[:1],)),
        Annotation("points", (SQUARE,)),
        Annotation("ellipse", (outline,)),
    ]
    found = [feature["geometry"] for feature in written(tmp_path, *drawn)["features"]]
    kinds = ["LineString", "MultiLineString", "Point", "MultiPoint", "Polygon"]
    assert [geometry["type"] for geometry in found] == kinds
    assert found[2]["coordinates"] == [10, 20]
    assert found[4]["isEllipse"] is True
    again = read_geojson(tmp_path / "out.geojson")
    assert [each.kind for each in again] == [each.kind for each in drawn]
    for before, after in zip(drawn, again, strict=True):
        for ring, other in zip(before.rings, after.rings, strict=True):
            np.testing.assert_allclose(other, ring, atol=0.005)


def test_old_and_nested_objects(tmp_path):
    child = {
        "type": "Feature",
        "geometry": {"type": "Point", "coordinates": [3, 4, 0]},
        "properties": {"object_type": "detection"},
    }
    old = {
        "type": "Feature",
        "id": "PathAnnotationObject",
        "geometry": {"type": "LineString", "coordinates": [[0, 0], [3, 4]], "plane": {"z": 2}},
        "properties": {
            "classification": {"name": "Tumor", "colorRGB": -3670016},
            "measurements": [{"name": "Length", "value": 5}],
            "childObjects": [child],
        },
    }
    line, spot = read(tmp_path, [old])
    assert (line.object_type, line.id, line.color) == ("annotation", "", (200, 0, 0))
    assert line.measurements == {"Length": 5.0}
    assert (spot.kind, spot.object_type) == ("points", "detection")
    assert written(tmp_path, line)["features"][0]["geometry"]["plane"] == {"z": 2}


SQUARES = [[[[0, 0], [9, 0], [9, 9], [0, 0]]], [[[20, 0], [29, 0], [29, 9], [20, 0]]]]


@pytest.mark.parametrize(
    ("kind", "coordinates"),
    [
        ("Point", [1, 2]),
        ("MultiPoint", [[1, 2], [3, 4]]),
        ("LineString", [[1, 2], [3, 4]]),
        ("MultiLineString", [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
        ("Polygon", SQUARES[0]),
        ("MultiPolygon", SQUARES),
        ("Polygon", []),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_geometries_in_properties_survive(tmp_path, kind, coordinates, nested):
    shape = {"type": kind, "coordinates": coordinates}
    feature = {
        "type": "Feature",
        "geometry": {"type": "Point", "coordinates": [3, 4]},
        "properties": {"roi": {"all": [shape]} if nested else shape, "name": "\N{GRINNING FACE}"},
    }
    [found] = read(tmp_path, feature)
    properties = written(tmp_path, found)["features"][0]["properties"]
    assert properties["roi"] == feature["properties"]["roi"]


def test_values_that_json_cannot_express(tmp_path):
    target = tmp_path / "out.geojson"
    scored = replace(Annotation("points", (SQUARE,)), extra={"properties": {"x": np.float32(2)}})
    write_geojson(target, [scored])
    assert read_geojson(target)[0].extra == {"properties": {"x": 2}}
    before = target.read_bytes()
    with pytest.raises(TargetWriteError, match=r"out\.geojson' can't be written.*complex"):
        write_geojson(target, [replace(scored, extra={"properties": {"x": 1j}})])
    assert target.read_bytes() == before


def test_features_without_an_object_are_counted(tmp_path):
    feature = {"type": "Feature", "geometry": None, "properties": {}}
    line = {"type": "LineString", "coordinates": [[0, 0]]}
    path = tmp_path / "slide.geojson"
    path.write_text(json.dumps([feature, {**feature, "geometry": line}]), "utf-8")
    assert read_features(path) == ([], 2)


def test_a_bare_geometry_and_a_collection(tmp_path):
    point = {"type": "Point", "coordinates": [1, 2]}
    assert [each.kind for each in read(tmp_path, point)] == ["points"]
    both = {"type": "GeometryCollection", "geometries": [point, {**point, "type": "Point"}]}
    assert len(read(tmp_path, {"type": "Feature", "geometry": both})) == 2
    assert read(tmp_path, {"type": "FeatureCollection", "features": []}) == []


def test_compressed_files(tmp_path):
    path = tmp_path / "slide.geojson.gz"
    write_geojson(path, [Annotation("polygon", (SQUARE,), "Größe")])
    assert json.loads(gzip.decompress(path.read_bytes()))["features"]
    assert read_geojson(path)[0].name == "Größe"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(AnnotationError, match="is damaged"):
        read_geojson(path)


@pytest.mark.parametrize("ending", ["geojson", "JSON"])
def test_archives(tmp_path, ending):
    plain, path = tmp_path / "slide.geojson", tmp_path / "slide.zip"
    write_geojson(plain, [Annotation("polygon", (SQUARE,), "Größe")])
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        archive.write(plain, f"objects.{ending}")
        archive.writestr("readme.txt", "exported")
    [found], [expected] = read_geojson(path), read_geojson(plain)
    assert (found.name, found.id) == ("Größe", expected.id)
    np.testing.assert_array_equal(found.rings[0], SQUARE)
    whole = path.read_bytes()
    path.write_bytes(whole[:60])
    with pytest.raises(AnnotationError, match="is damaged"):
        read_geojson(path)
    middle = len(whole) // 3
    path.write_bytes(whole[:middle] + bytes(20) + whole[middle + 20 :])
    with pytest.raises(AnnotationError, match="is damaged"):
        read_geojson(path)


@pytest.mark.parametrize("names", [[], ["a.geojson", "b.geojson"]])
def test_archives_without_exactly_one_list_of_objects(tmp_path, names):
    path = tmp_path / "slide.zip"
    with ZipFile(path, "w") as archive:
        for name in ["readme.txt", *names]:
            archive.writestr(name, "{}")
    with pytest.raises(AnnotationError, match=f"contains {len(names)} GeoJSON files; unzip it"):
        read_geojson(path)


def test_archives_that_are_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "geojson_bytes", 1000)
    path = tmp_path / "slide.zip"
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        archive.writestr("a.geojson", " " * 10_000)
    assert path.stat().st_size < 1000
    with pytest.raises(AnnotationError, match="is too large"):
        read_geojson(path)


def feature(coordinates, kind="Polygon"):
    return [{"type": "Feature", "geometry": {"type": kind, "coordinates": coordinates}}]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("no json", "is not valid GeoJSON"),
        ("[" * 100_000, "is not valid GeoJSON"),
        ({"a": 1}, "has no features"),
        ({"type": "FeatureCollection"}, "has no features"),
        ([1], "Feature 1 of"),
        (feature([["a", "b"]], "LineString"), "GeoJSON: could not convert"),
        (feature([[1], [2]], "LineString"), "not pairs of finite numbers"),
        (feature([[1, math.inf]], "LineString"), "not pairs of finite numbers"),
        (feature(7, "LineString"), "not a list"),
        (feature([], "Circle"), "unknown type 'Circle'"),
        ([{"type": "Feature", "geometry": {"type": "Point"}}], "'coordinates' is missing"),
    ],
)
def test_errors_state_the_defect(tmp_path, content, sentence):
    with pytest.raises(AnnotationError, match=r"in\.geojson' .*") as raised:
        read(tmp_path, content)
    assert sentence in str(raised.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["type", "features", "geometry", "coordinates", "properties", "classification", "id",
             "name", "color", "measurements", "childObjects", "nucleusGeometry", "geometries"]
        ),
        inner | st.sampled_from(["Feature", "FeatureCollection", "Polygon", "Point"]),
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(content=json_values)
def test_any_json_is_read_or_refused(tmp_path, content):
    with suppress(AnnotationError):
        write_geojson(tmp_path / "again.geojson", read(tmp_path, content))


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(SlideNotFoundError, match=r"gone\.geojson"):
        read_geojson(tmp_path / "gone.geojson")
    with pytest.raises(SlideNotFoundError, match=r"^The path is empty; pass the path of a file"):
        read_geojson("")
    with pytest.raises(TargetWriteError, match=r"^'\.' is a folder"):
        write_geojson("", [])
    kept = tmp_path / "kept.geojson"
    kept.mkdir()
    with pytest.raises(TargetWriteError, match="choose another folder"):
        write_geojson(kept, [])
    assert list(tmp_path.iterdir()) == [kept]


def test_twenty_thousand_polygons(tmp_path):
    turn = np.linspace(0, 2 * np.pi, 20, endpoint=False)
    circle = 15 * np.stack([np.cos(turn), np.sin(turn)], axis=1)
    places = np.random.default_rng(0).uniform(20, 50_000, (20_000, 2))
    cells = [Annotation("polygon", (circle + place,), "", "Tumor") for place in places]
    path = tmp_path / "cells.geojson"
    begin = time.process_time()
    write_geojson(path, cells)
    found = read_geojson(path)
    seconds = time.process_time() - begin
    assert len(found) == len(cells)
    np.testing.assert_allclose(found[-1].rings[0], cells[-1].rings[0], atol=0.005)
    begin = time.process_time()
    json.dumps(json.loads(path.read_bytes()))
    assert seconds < 4 * (time.process_time() - begin)  # typically 1.3 times
