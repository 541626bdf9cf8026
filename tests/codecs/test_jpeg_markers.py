"""Checks of a JPEG's structure by `end_of_image` and by the native core."""

from __future__ import annotations

from io import BytesIO

import imagecodecs
import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from napari_wsigpu import native, open_slide
from napari_wsigpu.codecs.jpeg import end_of_image
from napari_wsigpu.model.errors import TileError
from napari_wsigpu.native import tables as records
from tests.writers import slides, tiffbytes

SIDE = 64
PIXELS = slides.picture(SIDE, SIDE)
END = b"\xff\xd9"


def encoded(pixels=PIXELS, **options):
    stream = BytesIO()
    Image.fromarray(pixels.squeeze()).save(stream, "JPEG", quality=85, **options)
    return stream.getvalue()


def without(data, marker):
    """Remove all segments with a marker."""
    kept, at = data[:2], 2
    while data[at + 1] != 0xDA:
        past = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        kept += b"" if data[at + 1] == marker else data[at:past]
        at = past
    return kept + data[at:]


PLAIN = encoded()
RESTARTS = encoded(restart_marker_blocks=2, subsampling=0)
ROWS = encoded(slides.picture(250, 40, 1), restart_marker_rows=2)
KINDS = {
    "plain": PLAIN,
    "4:4:4": encoded(subsampling=0),
    "gray": encoded(slides.picture(50, 41, 1)),
    "progressive": encoded(progressive=True),
    "restarts": RESTARTS,
    "restarts after rows": ROWS,
    "restarts in scans": encoded(progressive=True, restart_marker_blocks=3),
    "usual Huffman tables": without(PLAIN, 0xC4),
    "lossless": bytes(imagecodecs.ljpeg_encode(slides.picture(40, 40, 1)[..., 0])),
}
TAILS = {
    "nothing": b"",
    "a zero": b"\0",
    "zeros": bytes(512),
    "ff": b"\xff",
    "ff ff": b"\xff\xff",
    "text": b"a comment",
    "another": PLAIN,
    "its end again": END,
    "a marker": b"\xff\xd8",
    "noise": np.random.default_rng(1).bytes(300),
}


def scan_of(data):
    """Return the offset of the first scan."""
    place = data.index(b"\xff\xda")
    return place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")


def restart(data, number):
    """Return the offset of a restart marker."""
    return data.index(bytes((0xFF, 0xD0 + number)), scan_of(data))


DHT = PLAIN.index(b"\xff\xc4")
FIRST, SECOND, THIRD = (restart(RESTARTS, number) for number in range(3))
DAMAGED = {
    "no end": PLAIN[:-2],
    "half": PLAIN[: len(PLAIN) // 2],
    "header only": PLAIN[: scan_of(PLAIN)],
    "no quantisation tables": without(PLAIN, 0xDB),
    "a Huffman table is missing": PLAIN.replace(
        PLAIN[DHT : DHT + 4], b"\xff\xfe" + PLAIN[DHT + 2 : DHT + 4], 1
    ),
    "no frame": without(PLAIN, 0xC0),
    "no scan": PLAIN[: PLAIN.index(b"\xff\xda")] + END,
    "a restart is missing": RESTARTS[:SECOND] + RESTARTS[SECOND + 2 :],
    "a restart interval is missing": RESTARTS[:FIRST] + RESTARTS[SECOND:],
    "restarts are swapped": RESTARTS[:FIRST] + b"\xff\xd1" + RESTARTS[FIRST + 2 :],
    "the last intervals are missing": RESTARTS[:THIRD] + END,
    "eight intervals are missing": ROWS[: restart(ROWS, 1)] + ROWS[ROWS.rindex(b"\xff\xd1") :],
    "restarts without an interval": without(RESTARTS, 0xDD),
    "not at its begin": b"\0" + PLAIN,
    "nothing": b"",
}
# Damage that only a decoder detects.
RUNS_OUT = {
    "half, and an end": PLAIN[: len(PLAIN) // 2] + END,
    "an end in the middle": PLAIN[: len(PLAIN) // 2] + END + PLAIN[len(PLAIN) // 2 :],
    "an end at the begin": PLAIN[: scan_of(PLAIN)] + END,
    "the last bytes are missing": PLAIN[:-8] + END,
}


STRUCTURAL = {
    "it is not a JPEG",
    "its JPEG has no scan",
    "its JPEG has no frame",
    "its JPEG has several frames",
    "its JPEG has two start markers",
    "its JPEG data is truncated",
    "its JPEG has a damaged segment",
    "its JPEG lacks a table",
    "the restart markers of its JPEG are out of order",
    "its JPEG lacks restart intervals",
}


def reason_of(data):
    """Return the error of the check in Python; None if there is none."""
    try:
        end_of_image(data)
    except ValueError as error:
        return str(error)
    return None


def of_core(data, shared=b""):
    """Decode with the native core; return its error, or None and the size of the image."""
    encoded, tables = np.frombuffer(data or b"\0", np.uint8), np.frombuffer(shared, np.uint8)
    out = np.empty(300 * 300 * 3, np.uint8)
    address = tables.ctypes.data if len(tables) else 0
    form = (address, len(tables), records.JPEG, records.COLORS["auto"], SIDE, SIDE, 3, 1, 3, 0)
    tile = (0, len(data), out.ctypes.data, 0, 0, SIDE, SIDE, 0, 0)
    form, tile = np.array([form], records.FORMAT), np.array([tile], records.TILE)
    parts = np.zeros(0, records.PART)
    found = native.core.read_tiles(form.ctypes.data, tile, parts, memory=encoded.ctypes.data)
    return found.get(0)


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
@pytest.mark.parametrize("data", KINDS.values(), ids=KINDS)
def test_end_is_found_before_other_bytes(data, tail):
    assert end_of_image(data + tail) == len(data)


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_damage_of_the_structure(data):
    with pytest.raises(ValueError, match="JPEG"):
        end_of_image(data)


@pytest.mark.parametrize("data", [*RUNS_OUT.values()], ids=RUNS_OUT)
def test_damage_outside_the_structure(data):
    assert data[end_of_image(data) - 2 :][:2] == END


def test_tables_may_be_shared():
    abbreviated = without(without(PLAIN, 0xDB), 0xC4)
    shared = without(without(PLAIN, 0xC0), 0xE0)
    shared = shared[: shared.index(b"\xff\xda")] + END
    assert end_of_image(abbreviated, shared) == len(abbreviated)
    with pytest.raises(ValueError, match="its JPEG lacks a table"):
        end_of_image(abbreviated, shared[: shared.index(b"\xff\xdb")] + END)


@pytest.mark.skipif(not native.available, reason="no native core")
@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([PLAIN, RESTARTS, KINDS["progressive"], KINDS["restarts in scans"]]),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=3),
    st.one_of(st.none(), st.tuples(st.integers(0, 4000), st.integers(0, 40))),
    st.sampled_from([b"", *TAILS.values()]),
)
def test_native_core_agrees(data, bytes_set, cut, tail):
    changed = bytearray(data)
    for place, value in bytes_set:
        changed[place % len(changed)] = value
    if cut is not None:
        del changed[cut[0] % len(changed) :][: cut[1]]
    changed = bytes(changed + tail)
    said = of_core(changed)
    assert (said if said in STRUCTURAL else None) == reason_of(changed)


def written(folder, segments, **options):
    """Write a TIFF of 2 x 1 tiles."""
    found = iter(segments)
    pixels = np.zeros((SIDE, SIDE * len(segments), 3), np.uint8)
    page = tiffbytes.page(
        pixels, lambda _tile: next(found), tile=(SIDE, SIDE), compression=7, photometric=6
    )
    return tiffbytes.write(folder / "slide.tif", [page])


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_sound_tiles_are_read_whatever_follows(tmp_path, host_gpu, tail):
    path = written(tmp_path, [PLAIN + tail, RESTARTS + tail, KINDS["progressive"] + tail])
    expected = tifffile.imread(path)
    for device in ("cpu", "cuda"):
        with open_slide(path, device) as slide:
            np.testing.assert_array_equal(slide.levels[0][...], expected)
        with open_slide(path, device) as slide:
            part = slide.read_region((50, 20), (30, 30))
            np.testing.assert_array_equal(part, expected[20:50, 50:80])


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_damage_is_reported_for_every_region(tmp_path, host_gpu, device, data):
    if not data:
        pytest.skip("a tile without bytes is missing")
    path = written(tmp_path, [PLAIN, data])
    for place, size in (((64, 0), (64, 64)), ((70, 0), (4, 1)), ((60, 0), (9, 9))):
        with open_slide(path, device) as slide:
            with pytest.raises(TileError, match="JPEG"):
                slide.read_region(place, size)
            with pytest.raises(TileError, match="JPEG"):
                list(slide.read_regions([place], size, batch_size=1))
            np.testing.assert_array_equal(
                slide.read_region((0, 0), (SIDE, SIDE)), imagecodecs.jpeg8_decode(PLAIN)
            )


@pytest.mark.skipif(not native.available, reason="no native core")
@pytest.mark.parametrize("data", RUNS_OUT.values(), ids=RUNS_OUT)
def test_running_out_of_data_is_damage(tmp_path, data):
    path = written(tmp_path, [PLAIN, data])
    for place, size in (((64, 0), (64, 64)), ((127, 63), (1, 1))):
        with open_slide(path, "cpu") as slide, pytest.raises(TileError, match="ends within a row"):
            slide.read_region(place, size)


@pytest.mark.skipif(not native.available, reason="no native core")
@pytest.mark.parametrize("kind", ["gray", "planar", "batches"])
def test_truncation_is_detected_by_all_cpu_decoders(tmp_path, kind):
    data = encoded(slides.picture(SIDE, SIDE, 1))
    half = data[: len(data) // 2] + END
    planar = kind == "planar"
    pixels = np.zeros((SIDE, SIDE, 3 if planar else 1), np.uint8)
    found = iter([data, half, data] if planar else [half])
    page = tiffbytes.page(
        pixels,
        lambda _tile: next(found),
        **{"tile": (SIDE, SIDE), "compression": 7, "photometric": 2 if planar else 1},
        planar=planar,
    )
    path = tiffbytes.write(tmp_path / "slide.tif", [page])
    with open_slide(path, "cpu") as slide:
        read = slide.read_regions([(0, 0), (9, 9)], (50, 50), batch_size=2)
        level = slide.levels[0]
        with pytest.raises(TileError, match="ends within a row"):
            list(read if kind == "batches" else level)


@pytest.mark.parametrize("missing", [(0,), (0, 1)])
@pytest.mark.parametrize("jfif", [True, False])
def test_colours_come_from_the_first_existing_tile(tmp_path, missing, jfif):
    pixels = slides.picture(SIDE, 3 * SIDE)
    encode = encoded if jfif else slides.jpeg
    options = {"compression": 7, "photometric": 2, "tile": (SIDE, SIDE)}
    whole = tiffbytes.write(tmp_path / "whole.tif", [tiffbytes.page(pixels, encode, **options)])
    page = tiffbytes.page(pixels, encode, **options, missing=missing)
    expected = tifffile.imread(whole)
    expected[:, : SIDE * len(missing)] = 0
    with open_slide(tiffbytes.write(tmp_path / "part.tif", [page]), "cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], expected)


def adobe(transform):
    return b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0" + bytes([transform])


MARKERS = {
    "nothing": b"",
    "JFIF": b"\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0",
    "Adobe's RGB": adobe(0),
    "Adobe's YCbCr": adobe(1),
}


@pytest.mark.parametrize("photometric", [2, 6])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("marker", MARKERS.values(), ids=MARKERS)
def test_lossless_jpeg_is_never_converted(tmp_path, photometric, dtype, marker):
    def lossless(tile):
        data = imagecodecs.jpeg8_encode(tile, lossless=True, bitspersample=8 * tile.itemsize)
        plain = without(without(bytes(data), 0xE0), 0xEE)
        return plain[:2] + marker + plain[2:]

    pixels = slides.picture(SIDE, 2 * SIDE, 3, dtype)
    options = {"compression": 7, "photometric": photometric, "tile": (SIDE, SIDE)}
    page = tiffbytes.page(pixels, lossless, **options)
    path = tiffbytes.write(tmp_path / "slide.tif", [page])
    with open_slide(path, "cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], pixels)
    np.testing.assert_array_equal(tifffile.imread(path), pixels)
