"""GeoJSON that is damaged, hostile, or impossible to write back."""

import gzip
import json
import os
import tracemalloc
import zlib
from contextlib import suppress

import numpy as np
import pytest

from napari_wsigpu import Annotation, read_geojson, write_geojson
from napari_wsigpu.limits import limits
from napari_wsigpu.model.errors import AnnotationError, SlideError, TargetWriteError

RING = [[[0, 0], [10, 0], [10, 10], [0, 10], [0, 0]]]


def feature(coordinates=RING, kind="Polygon", **said):
    return {
        "type": "Feature",
        "geometry": {"type": kind, "coordinates": coordinates},
        "properties": said,
    }


def damaged_files():
    text = json.dumps([feature() for _ in range(200)]).encode()
    packed = gzip.compress(text)
    changed = bytearray(packed)
    changed[len(changed) // 2] ^= 0x55
    overwritten = packed[:60] + b"\xff" * 4 + packed[64:]
    return {
        "half of a gzip file": packed[: len(packed) // 2],
        "a changed gzip file": bytes(changed),
        "an overwritten gzip file": overwritten,
        "a gzip header": packed[:10],
        "no UTF-8": b"\xff\xfe\xfa",
        "an endless list": b"[" * 100_000,
        "an integer of 401 digits": json.dumps(feature()).replace("10", "1" + "0" * 400).encode(),
        "an integer of 9000 digits": json.dumps(feature()).replace("10", "1" * 9000).encode(),
        "coordinates beyond any slide": json.dumps(
            feature([[[1e308, 0], [0, 1], [2, 2]]])
        ).encode(),
        "half of a character in a name": json.dumps(feature(name="\ud800")).encode(),
        "half of a character in a class": json.dumps(
            feature(classification={"name": "\udc00"})
        ).encode(),
        "half of a character elsewhere": json.dumps(feature(note=["\ud800x"])).encode(),
        "nothing": b"",
    }


@pytest.mark.parametrize("data", damaged_files().values(), ids=damaged_files())
def test_any_damage_is_reported(tmp_path, data):
    path = tmp_path / "a.geojson"
    path.write_bytes(data)
    with pytest.raises(AnnotationError, match=r"a\.geojson' is "):
        read_geojson(path)


def test_any_byte_of_a_gzip_file_may_be_damaged(tmp_path):
    packed = gzip.compress(json.dumps([feature(name=f"cell {n}") for n in range(60)]).encode())
    for place in range(10, len(packed), 5):
        changed = bytearray(packed)
        changed[place : place + 4] = b"\xff" * 4
        path = tmp_path / "a.geojson.gz"
        path.write_bytes(changed)
        with suppress(SlideError):
            read_geojson(path)


def test_surrogate_pairs_are_joined(tmp_path):
    path = tmp_path / "a.geojson"
    path.write_text(json.dumps(feature(name="\N{MICROSCOPE} \N{MICRO SIGN}")))
    [found] = read_geojson(path)
    write_geojson(path, [found])
    assert read_geojson(path)[0].name == "\N{MICROSCOPE} \N{MICRO SIGN}"


@pytest.mark.parametrize(
    ("name", "value"), [("geojson_bytes", 10_000), ("objects", 99), ("points", 350)]
)
@pytest.mark.parametrize("packed", [False, True])
def test_limits(tmp_path, monkeypatch, name, value, packed):
    path = tmp_path / "a.geojson"
    text = json.dumps([feature() for _ in range(100)]).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    assert len(read_geojson(path)) == 100
    monkeypatch.setattr(limits, name, value)
    with pytest.raises(AnnotationError, match=f"raise the limit '{name}'"):
        read_geojson(path)


def test_a_bomb_is_unpacked_no_further_than_its_limit(tmp_path, monkeypatch):
    path = tmp_path / "bomb.geojson.gz"
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    spaces = bytes(1 << 20).replace(b"\0", b" ")
    path.write_bytes(b"".join(packer.compress(spaces) for _ in range(256)) + packer.flush())
    monkeypatch.setattr(limits, "geojson_bytes", 1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(AnnotationError, match=r"too large: the limit is 1\.049 MB"):
            read_geojson(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.geojson")
    with pytest.raises(AnnotationError, match="not a regular file"):
        read_geojson(tmp_path / "pipe.geojson")
    with pytest.raises(AnnotationError, match="not a regular file"):
        read_geojson(tmp_path)


def test_shapes_with_too_few_points_are_skipped(tmp_path):
    path = tmp_path / "a.geojson"
    features = [
        feature([[0, 0]], "LineString"),
        feature([[0, 0], [1, 1]], "LineString"),
        feature([[[0, 0], [1, 1], [0, 0]]]),
        feature([3, 4], "Point"),
    ]
    path.write_text(json.dumps(features))
    assert [each.kind for each in read_geojson(path)] == ["line", "points"]


def test_unwritable_names_are_reported(tmp_path):
    path = tmp_path / "a.geojson"
    path.write_text("before")
    ring = np.array([[0, 0], [5, 0], [5, 5]], np.float64)
    with pytest.raises(TargetWriteError, match="an invalid character"):
        write_geojson(path, [Annotation("polygon", (ring,), name="\ud800")])
    assert path.read_text() == "before"
