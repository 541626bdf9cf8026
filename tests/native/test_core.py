"""The native core, compared with imagecodecs, which decodes with a libjpeg-turbo of its own."""

import ctypes
import os
import sys
import threading

import imagecodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_wsigpu import native
from napari_wsigpu.native import tables

if not native.available:
    pytest.skip(f"no native core: {native.reason}", allow_module_level=True)

SUBSAMPLINGS = "444", "422", "420", "440", "411"
CODING = {"ycbcr": ("RGB", "YCBCR"), "stored": ("RGB", "RGB"), "gray": ("GRAYSCALE",) * 2}
DECODING = {
    "ycbcr": {"outcolorspace": "RGB"},
    "stored": {"colorspace": "RGB", "outcolorspace": "RGB"},
    "gray": {"outcolorspace": "GRAYSCALE"},
}
SIDES = st.integers(1, 90)


def picture(height, width, samples=3, seed=0):
    """Return smooth colors with noise, so that chroma and edges of blocks matter."""
    noise = np.random.default_rng(seed).integers(-40, 40, (height, width, samples))
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin((x + 2 * y) / (5 + 3 * c)) for c in range(samples)], -1)
    return np.clip(128 + 80 * waves + noise, 0, 255).astype(np.uint8)


def encode(pixels, color="ycbcr", subsampling="420", quality=80):
    inside, stored = CODING[color]
    options = {} if color == "gray" else {"subsampling": subsampling}
    squeezed = pixels[..., 0] if color == "gray" else pixels
    return imagecodecs.jpeg8_encode(
        squeezed, level=quality, colorspace=inside, outcolorspace=stored, **options
    )


def decode(data, color="ycbcr", shared=None):
    pixels = imagecodecs.jpeg8_decode(data, tables=shared, **DECODING[color])
    return pixels.reshape(*pixels.shape[:2], -1)


class Request:
    """Tiles of one size in memory, and parts of them that are read into arrays."""

    def __init__(self, tiles, height, width, *, color="ycbcr", codec=tables.JPEG, rgba=False):
        samples = 1 if color == "gray" else 3
        self.encoded = np.frombuffer(b"".join(tiles) or b"\0", np.uint8)
        self.form = np.zeros(1, tables.FORMAT)
        self.form["codec"], self.form["color"] = codec, tables.COLORS[color]
        self.form["height"], self.form["width"] = height, width
        self.form["samples"], self.form["sample_bytes"] = samples, 1
        self.channels = self.form["pixel_bytes"] = 4 if rgba else samples
        self.tiles = np.zeros(len(tiles), tables.TILE)
        lengths = [len(tile) for tile in tiles]
        self.tiles["length"], self.tiles["offset"] = lengths, np.cumsum([0, *lengths[:-1]])
        self.tiles["height"], self.tiles["width"] = height, width
        self.parts, self.pixels = [], []

    def share(self, shared):
        """Set the JPEG tables that all tiles share."""
        self.shared = np.frombuffer(shared, np.uint8)
        self.form["tables"], self.form["tables_size"] = self.shared.ctypes.data, len(shared)

    def want(self, index, left, top, width, height):
        """Add a part of a tile, after those of the tiles before; return the array it goes to."""
        pixels = np.full((height, width, self.channels), 7, np.uint8)
        if not self.tiles["count"][index]:
            self.tiles["first"][index] = len(self.parts)
        self.tiles["count"][index] += 1
        self.parts.append((pixels.ctypes.data, pixels.strides[0], left, top, width, height))
        self.pixels.append(pixels)
        return pixels

    def read(self, **options):
        parts = np.array(self.parts, tables.PART)
        return native.core.read_tiles(
            self.form.ctypes.data,
            self.tiles,
            parts,
            memory=None if "file" in options else self.encoded.ctypes.data,
            **options,
        )


@st.composite
def parts(draw):
    """Draw the size of a tile, and up to three rectangles of it."""
    height, width = draw(SIDES), draw(SIDES)
    boxes = []
    for _ in range(draw(st.integers(1, 3))):
        left, top = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
        sides = draw(st.integers(1, width - left)), draw(st.integers(1, height - top))
        boxes.append((left, top, *sides))
    return height, width, boxes


@settings(max_examples=120, deadline=None)
@given(
    parts(),
    st.sampled_from(["ycbcr", "stored", "gray"]),
    st.sampled_from(SUBSAMPLINGS),
    st.integers(5, 98),
    st.booleans(),
    st.booleans(),
)
def test_parts_equal_those_of_the_whole_tile(drawn, color, subsampling, quality, rgba, keep):
    height, width, boxes = drawn
    rgba = rgba and color != "gray"
    pixels = picture(height, width, 1 if color == "gray" else 3)
    data = encode(pixels, color, subsampling, quality)
    expected = decode(data, color)
    request = Request([data], height, width, color=color, rgba=rgba)
    found = [request.want(0, *box) for box in boxes]
    kept = np.zeros_like(expected)
    if keep:
        request.tiles["keep"] = kept.ctypes.data
    assert request.read() == {}
    for (left, top, wide, high), part in zip(boxes, found, strict=True):
        np.testing.assert_array_equal(
            part[..., : expected.shape[2]], expected[top : top + high, left : left + wide]
        )
        assert not rgba or (part[..., 3] == 255).all()
    if keep:
        np.testing.assert_array_equal(kept, expected)


@settings(max_examples=60, deadline=None)
@given(parts(), st.booleans())
def test_raw_tiles_are_copied(drawn, rgba):
    height, width, boxes = drawn
    pixels = picture(height, width)
    request = Request([pixels.tobytes()], height, width, codec=tables.RAW, rgba=rgba)
    found = [request.want(0, *box) for box in boxes]
    assert request.read() == {}
    for (left, top, wide, high), part in zip(boxes, found, strict=True):
        np.testing.assert_array_equal(part[..., :3], pixels[top : top + high, left : left + wide])


def test_tables_may_be_apart():
    data = encode(picture(40, 56))
    shared, abbreviated = b"\xff\xd8", b"\xff\xd8"
    offset = 2
    while data[offset + 1] != 0xDA:  # up to the scan
        end = offset + 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
        if data[offset + 1] in (0xDB, 0xC4):
            shared += data[offset:end]
        else:
            abbreviated += data[offset:end]
        offset = end
    shared, abbreviated = shared + b"\xff\xd9", abbreviated + data[offset:]
    request = Request([abbreviated], 40, 56)
    part = request.want(0, 3, 5, 20, 10)
    assert request.read() == {0: "its JPEG lacks a table"}
    request.share(shared)
    assert request.read() == {}
    np.testing.assert_array_equal(part, decode(abbreviated, shared=shared)[5:15, 3:23])


def test_failures_are_reported_by_index():
    good = encode(picture(40, 56))
    tiles = [good, good[:300], b"", good[:900] + b"\xff\xd9", b"\xff\xd8nothing\xff\xd9"]
    tiles += [encode(picture(40, 48)), encode(picture(40, 56, 1), "gray"), good]
    request = Request(tiles, 40, 56)
    found = [request.want(index, 1, 2, 30, 20) for index in range(len(tiles))]
    failures = request.read(threads=2)
    names = {index: int(status) for index, status in enumerate(request.tiles["status"]) if status}
    assert names == {
        1: tables.DAMAGED,
        2: tables.DAMAGED,
        3: tables.DAMAGED,
        4: tables.DAMAGED,
        5: tables.LEFT_TO_PYTHON,
        6: tables.LEFT_TO_PYTHON,
    }
    assert failures.keys() == names.keys()
    assert failures[1] == "its JPEG data is truncated"
    assert failures[2] == "it is not a JPEG"
    # libjpeg only warns of missing data, and imagecodecs accepts them.
    assert failures[3] == "its JPEG data ends within a row"
    assert failures[4] == "its JPEG has no scan"
    for index in (0, 7):
        np.testing.assert_array_equal(found[index], decode(good)[2:22, 1:31])


@pytest.fixture
def many(tmp_path):
    """Many tiles in a file: their request, its file, and what its parts shall be."""
    pixels = [picture(64, 64, seed=seed) for seed in range(50)]
    request = Request([encode(tile) for tile in pixels], 64, 64)
    for index in range(len(pixels)):
        request.want(index, 10, 20, 50, 40)
    path = tmp_path / "tiles"
    path.write_bytes(request.encoded.tobytes())
    expected = [decode(encode(tile))[20:60, 10:60] for tile in pixels]
    with path.open("rb") as file:
        yield request, file.fileno(), expected


def test_files_and_threads(many):
    request, file, expected = many
    assert request.read(file=file, threads=4) == {}
    np.testing.assert_array_equal(request.pixels, expected)


def test_short_files(many):
    request, file, expected = many
    request.tiles["length"][49] += 1
    assert request.read(file=file, threads=4).keys() == {49}
    assert request.tiles["status"][49] == tables.UNREAD
    np.testing.assert_array_equal(request.pixels[:49], expected[:49])


def test_cancelled_tiles_are_left_out(many):
    request, file, _ = many
    cancel = ctypes.c_int32(1)
    failures = request.read(file=file, threads=2, cancel=ctypes.addressof(cancel))
    assert failures.keys() == set(range(50))
    assert (request.tiles["status"] == tables.CANCELLED).all()
    assert all((pixels == 7).all() for pixels in request.pixels)


def test_ranges(many):
    request, file, _ = many
    ranges = np.zeros(2, tables.RANGE)
    ranges[0], ranges[1] = (5, 100, 50), (0, 0, 100)
    buffer = np.zeros(150, np.uint8)
    assert native.core.read_ranges(file, ranges, buffer.ctypes.data, 2)
    np.testing.assert_array_equal(buffer[:100], request.encoded[:100])
    np.testing.assert_array_equal(buffer[100:], request.encoded[5:55])
    ranges["offset"] = 1 << 40
    assert not native.core.read_ranges(file, ranges, buffer.ctypes.data)


@pytest.mark.parametrize("place", ["file", "memory"])
def test_scans_without_their_header(many, place):
    request, file, _ = many
    size = int(request.tiles["length"][0])
    jpeg = request.encoded[:size].tobytes()
    header = jpeg[: jpeg.index(b"\xff\xda") + 14]
    scans = np.zeros(2, tables.SCAN)
    scans["length"], scans["marker"] = size, (0xD3, 0xD9)
    buffer = np.zeros(2 * size, np.uint8)
    source = {"file": file} if place == "file" else {"memory": request.encoded.ctypes.data}
    scans["place"][0] = size - len(header)
    address = buffer.ctypes.data
    assert native.core.read_scans(scans, header, address, **source, threads=2)
    scan = jpeg[len(header) :]
    found = buffer.tobytes()
    assert found.startswith(scan + scan[:-1] + b"\xd3")
    assert not native.core.read_scans(scans, header + b"\xff", address, **source)


@pytest.mark.parametrize("threads", [1, 3])
def test_scans_adjacent_in_the_file(tmp_path, threads):
    parts = [bytes([index]) * (20 + index) + b"\xff\xd9" for index in range(40)]
    tiles = [b"head" + part for part in parts]
    tiles[23] = b"HEAD" + parts[23]
    gap = b"-" * 7  # some tiles are not adjacent to the one before
    stored = [gap * (index % 13 == 5) + tile for index, tile in enumerate(tiles)]
    path = tmp_path / "tiles"
    path.write_bytes(b"".join(stored))
    ends = np.cumsum([len(each) for each in stored])
    scans = np.zeros(40, tables.SCAN)
    scans["length"] = [len(tile) for tile in tiles]
    scans["offset"], scans["marker"] = ends - scans["length"], 0xD9
    sizes = scans["length"] - 4
    scans["place"] = np.cumsum(sizes) - sizes
    buffer = np.zeros(sizes.sum(), np.uint8)
    with path.open("rb") as file:
        read = native.core.read_scans(
            scans, b"head", buffer.ctypes.data, file=file.fileno(), threads=threads
        )
        assert not read
        assert np.flatnonzero(scans["status"]).tolist() == [23]
        assert buffer.tobytes() == b"".join(parts)
        scans["offset"][39] += 1  # beyond the end of the file
        scans["offset"][30] = -1
        native.core.read_scans(
            scans, b"head", buffer.ctypes.data, file=file.fileno(), threads=threads
        )
        assert np.flatnonzero(scans["status"]).tolist() == [23, 30, 39]


def test_records_of_another_version_are_refused():
    class Library:
        @staticmethod
        def wsigpu_layout(sizes, version):
            sizes[0] = 8

    with pytest.raises(OSError, match="built for another version"):
        native.Core(Library())


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_children_read_with_threads_of_their_own(many):
    request, file, expected = many
    stop = threading.Event()

    def read_on():
        own = Request([request.encoded[: request.tiles["length"][0]].tobytes()] * 20, 64, 64)
        for index in range(20):
            own.want(index, 0, 0, 64, 64)
        while not stop.is_set():
            own.read(threads=3)

    reader = threading.Thread(target=read_on)
    reader.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                failures = request.read(file=file, threads=3)
                good = not failures and np.array_equal(request.pixels, expected)
                os._exit(0 if good else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        reader.join()
