"""A stack of tiles is one JPEG with exactly the pixels of the tiles."""

import re
import struct
from io import BytesIO

import imagecodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_wsigpu.codecs.jpeg import (
    END_OF_IMAGE,
    MAX_ROWS,
    Stacking,
    header_length,
    read_header,
    segments,
)
from tests.gpu.test_codestream import (
    adobe,
    frame,
    inserted,
    markers,
    mutated,
    patched,
    scan,
    with_ids,
    without,
)
from tests.writers import slides

HEIGHT, WIDTH = 48, 80
STRIPS = {"420": 16, "422": 8, "444": 8, "gray": 8}
PILLOW_SUBSAMPLINGS = {"444": 0, "422": 1, "420": 2, "gray": 0}
RESTARTS = re.compile(rb"\xff[\xd0-\xd7]")


def pictures(kind, count, size=(HEIGHT, WIDTH)):
    """Return different parts of one image."""
    height, width = size
    whole = slides.picture(count * height, width, 1 if kind == "gray" else 3)
    return [whole[top : top + height] for top in range(0, len(whole), height)]


def encode(kind, pixels, **options):
    if kind == "gray":
        return slides.jpeg(pixels, **options)
    return slides.jpeg(pixels, outcolorspace="YCBCR", subsampling=kind, **options)


BASE = {kind: encode(kind, *pictures(kind, 1)) for kind in STRIPS}


def with_optimised_tables(kind, count):
    """Return tiles with shared, optimized tables, and Pillow's encoding of all in one image."""
    image = pytest.importorskip("PIL.Image")
    whole, buffer = np.vstack(pictures(kind, count)), BytesIO()
    whole[:, :48] = np.where(np.arange(len(whole))[:, None, None] % 32 < 16, 128, whole[:, :48])
    image.fromarray(whole.squeeze()).save(
        buffer,
        "JPEG",
        quality=85,
        optimize=True,
        subsampling=PILLOW_SUBSAMPLINGS[kind],
        restart_marker_rows=HEIGHT // STRIPS[kind],
    )
    data = buffer.getvalue()
    begin = without(data[: header_length(data)], 0xDD)
    begin = patched(begin, frame(begin) + 5, HEIGHT.to_bytes(2, "big"))
    scans = RESTARTS.split(data[header_length(data) : -2])
    return [begin + part + END_OF_IMAGE for part in scans], data


def stacking_of(data):
    head = data[: header_length(data)]
    return Stacking(head, read_header(head))


def stacked(tiles):
    """Stack tiles."""
    stacking = stacking_of(tiles[0])
    body = b"".join(
        tile[header_length(tile) : -2] + bytes((0xFF, 0xD0 + number % 8))
        for number, tile in enumerate(tiles)
    )
    return stacking, stacking.header(len(tiles)) + body + stacking.strip + END_OF_IMAGE


def as_stored(data):
    """Decode without colour conversion."""
    colors = "GRAYSCALE" if len(read_header(data[: header_length(data)]).ids) == 1 else "YCBCR"
    pixels = imagecodecs.jpeg8_decode(data, colorspace=colors, outcolorspace=colors)
    return pixels.reshape(*pixels.shape[:2], -1)


def check_stack(kind, tiles):
    """Decode a stack as one image, and compare each tile in it with the separately decoded one."""
    stacking, data = stacked(tiles)
    found = as_stored(data)
    assert found.shape[:2] == (len(tiles) * HEIGHT + STRIPS[kind], WIDTH)
    inner = slice(1, -1) if kind == "420" else slice(None)
    for number, tile in enumerate(tiles):
        part = found[number * HEIGHT : (number + 1) * HEIGHT]
        np.testing.assert_array_equal(part[inner], as_stored(tile)[inner], f"tile {number}")
        np.testing.assert_array_equal(part[..., 0], as_stored(tile)[..., 0])
    return stacking, found


class TestHeader:
    @pytest.mark.parametrize(
        ("kind", "sampling"),
        [
            ("420", ((2, 2), (1, 1), (1, 1))),
            ("422", ((2, 1), (1, 1), (1, 1))),
            ("444", ((1, 1), (1, 1), (1, 1))),
            ("440", ((1, 2), (1, 1), (1, 1))),
            ("411", ((4, 1), (1, 1), (1, 1))),
            ("gray", ((1, 1),)),
        ],
    )
    def test_what_an_encoder_writes(self, kind, sampling):
        (pixels,) = pictures(kind, 1)
        data = encode(kind, pixels)
        header = read_header(data[: header_length(data)])
        assert (header.height, header.width, header.bits) == (HEIGHT, WIDTH, 8)
        assert header.sampling == sampling
        assert header.frame == 0xC0
        assert header.ids == bytes(range(1, len(sampling) + 1))
        assert header.tables == ((0, 0), (1, 1), (1, 1))[: len(sampling)]
        assert header.transform is None
        assert not header.restarts

    def test_header_ends_at_the_scan(self):
        data = BASE["420"]
        end = header_length(data)
        last = markers(data)[-1][1]
        assert end == last + 2 + int.from_bytes(data[last + 2 : last + 4], "big")
        assert [(marker, start) for marker, start, _ in segments(data)] == markers(data)

    @pytest.mark.parametrize("length", range(0, 700, 9))
    def test_truncated_header_has_no_scan(self, length):
        data = BASE["420"]
        assert header_length(data[: min(length, header_length(data) - 1)]) == 0

    def test_restart_markers(self):
        _, data = with_optimised_tables("420", 3)
        assert read_header(data[: header_length(data)]).restarts
        place = next(place for marker, place in markers(data) if marker == 0xDD)
        none = patched(data, place + 4, bytes(2))
        assert not read_header(none[: header_length(none)]).restarts

    @pytest.mark.parametrize("transform", [0, 1, 2])
    def test_adobe(self, transform):
        data = inserted(BASE["444"], 2, adobe(transform))
        assert read_header(data[: header_length(data)]).transform == transform

    @pytest.mark.parametrize("ids", [(1, 2, 3), b"RGB", (0, 1, 2)])
    def test_names_of_components(self, ids):
        data = with_ids(BASE["444"], ids)
        assert read_header(data[: header_length(data)]).ids == bytes(ids)

    @pytest.mark.parametrize(
        "harm",
        {
            "a second frame": lambda data: inserted(data, scan(data), data[frame(data) :][:19]),
            "no frame": lambda data: without(data, 0xC0),
            "a frame cut short": lambda data: patched(data, frame(data) + 2, [0, 8]),
            "components that are none": lambda data: patched(data, frame(data) + 9, [4]),
            "a scan of one component": lambda data: patched(
                data, scan(data) + 2, [0, 8, 1, 1, 0, 0, 63, 0]
            ),
            "a scan of others": lambda data: patched(data, scan(data) + 5, [9]),
            "a scan in another order": lambda data: patched(data, scan(data) + 5, [2, 0, 1]),
            "a scan of none": lambda data: patched(data, scan(data) + 4, [0]),
        }.values(),
    )
    def test_damaged_or_partial_headers(self, harm):
        data = harm(BASE["420"])
        assert read_header(data[: header_length(data)]) is None

    @settings(max_examples=200)
    @given(st.binary(max_size=120), st.sampled_from([b"", b"\xff\xd8", b"\xff\xd8\xff\xda"]))
    def test_random_bytes(self, data, begin):
        data = begin + data
        place = 2
        for _, start, end in segments(data):
            assert start == place
            assert start + 2 <= end <= len(data)
            place = end
        assert header_length(data) <= len(data)
        read_header(data)


OPTIMISED = "optimised tables"


class TestStacks:
    @pytest.mark.parametrize("tables", ["standard tables", OPTIMISED])
    @pytest.mark.parametrize("kind", STRIPS)
    @pytest.mark.parametrize("count", [1, 2, 3, 9, 17])
    def test_stacked_tiles_equal_separate_ones(self, kind, count, tables):
        if tables == OPTIMISED:
            tiles, _ = with_optimised_tables(kind, count)
        else:
            tiles = [encode(kind, pixels) for pixels in pictures(kind, count)]
        stacking, found = check_stack(kind, tiles)
        assert stacking.strip_rows == STRIPS[kind]
        first, second = stacking.marks[:2]
        assert abs(first - second) >= 8
        strip = found[count * HEIGHT :, :, 0]
        expected = np.where(np.arange(WIDTH) // 8 % 2, second, first)
        np.testing.assert_array_equal(strip, np.tile(expected, (STRIPS[kind], 1)))

    @pytest.mark.parametrize("kind", STRIPS)
    def test_it_is_what_an_encoder_writes(self, kind):
        """Except for the strip, and the position of the restart interval."""
        tiles, whole = with_optimised_tables(kind, 5)
        stacking, data = stacked(tiles)
        end = len(stacking.strip) + len(END_OF_IMAGE) + 2
        begin = stacking.header(5)
        assert data[len(begin) : -end] == whole[header_length(whole) : -2]
        rows = (5 * HEIGHT + STRIPS[kind]).to_bytes(2, "big")
        expected = patched(whole, frame(whole) + 5, rows)[: header_length(whole)]
        found = {begin[start:stop] for _, start, stop in segments(begin)}
        assert found == {expected[start:stop] for _, start, stop in segments(expected)}

    @pytest.mark.parametrize("width", [16, 24, 32, 40, 48, 57, 64, 65, 72, 79, 512])
    @pytest.mark.parametrize("kind", STRIPS)
    def test_tiles_of_any_width(self, kind, width):
        tiles = [encode(kind, pixels) for pixels in pictures(kind, 3, (HEIGHT, width))]
        stacking, data = stacked(tiles)
        assert stacking.max_tiles > 1
        luma = as_stored(data)[..., 0]
        expected = np.vstack([as_stored(tile)[..., 0] for tile in tiles])
        np.testing.assert_array_equal(luma[: 3 * HEIGHT], expected)
        assert set(luma[3 * HEIGHT :].ravel().tolist()) == set(stacking.marks[:2])

    @pytest.mark.parametrize("tables", ["standard tables", OPTIMISED])
    @pytest.mark.parametrize("level", [50, 100])
    def test_marks_match_the_header(self, level, tables):
        data = encode("gray", *pictures("gray", 1), level=level)
        if tables == OPTIMISED:
            data = with_optimised_tables("gray", 1)[0][0]
        header = read_header(data[: header_length(data)])
        quanta = next(place for marker, place in markers(data) if marker == 0xDB)
        codes = next(place for marker, place in markers(data) if marker == 0xC4)
        _, _, quantum, *words = stacking_of(data).marks
        assert quantum == header.quanta[0][0] == data[quanta + 5]
        counts = data[codes + 5 : codes + 21]
        symbols = data[codes + 21 : codes + 21 + sum(counts)]
        assert struct.pack("<4q", *words) == counts + symbols.ljust(16, b"\0")

    @pytest.mark.parametrize("kind", STRIPS)
    def test_no_strip_of_one_block(self, kind):
        tile = encode(kind, *pictures(kind, 1, (HEIGHT, 8)))
        assert stacking_of(tile).max_tiles == 1

    @pytest.mark.parametrize("level", [1, 10, 50, 90, 100])
    def test_any_quality(self, level):
        for kind in STRIPS:
            check_stack(kind, [encode(kind, pixels, level=level) for pixels in pictures(kind, 2)])

    def test_its_header_says_its_height(self):
        data = BASE["420"]
        stacking = stacking_of(data)
        assert stacking.max_tiles == MAX_ROWS // HEIGHT
        for count in (1, 2, 7, stacking.max_tiles):
            begin = stacking.header(count)
            assert read_header(begin).height == count * HEIGHT + 16
            assert read_header(begin).restarts
            assert header_length(begin) == len(begin)

    def test_tall_tiles_are_few(self):
        data = encode("gray", *pictures("gray", 1, (MAX_ROWS // 2 + 8, 16)))
        assert stacking_of(data).max_tiles == 1
        data = encode("gray", *pictures("gray", 1, (MAX_ROWS // 2, 16)))
        assert stacking_of(data).max_tiles == 2


def resized(data, height, width):
    size = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return patched(data, frame(data) + 5, size)


FLAT = np.full((HEIGHT, WIDTH, 3), 128, np.uint8)


class TestNoStacks:
    @pytest.mark.parametrize(
        ("kind", "height"), [("420", 40), ("420", 50), ("422", 44), ("444", 47), ("gray", 49)]
    )
    def test_tiles_that_end_within_an_mcu(self, kind, height):
        (pixels,) = pictures(kind, 1, (height, WIDTH))
        assert stacking_of(encode(kind, pixels)).max_tiles == 1

    @pytest.mark.parametrize(
        "data",
        {
            "restart markers": inserted(BASE["420"], scan(BASE["420"]), b"\xff\xdd\0\4\0\3"),
            "progressive": patched(BASE["420"], frame(BASE["420"]) + 1, [0xC2]),
            "arithmetic": patched(BASE["420"], frame(BASE["420"]) + 1, [0xC9]),
            "4:4:0": encode("440", *pictures("440", 1)),
            "no steps": encode("420", FLAT, optimize=True),
            "no tables": without(BASE["420"], 0xC4),
            "no quantisation": without(BASE["420"], 0xDB),
        }.values(),
    )
    def test_tiles_without_a_strip(self, data):
        stacking = stacking_of(data)
        assert stacking.max_tiles == 1
        assert stacking.strip == b""

    @pytest.mark.parametrize(("height", "most"), [(2040, MAX_ROWS // 2040), (2048, 1)])
    def test_more_mcus_than_a_restart_interval(self, height, most):
        data = resized(BASE["gray"], height, 2048)
        assert stacking_of(data).max_tiles == most

    @pytest.mark.parametrize("table", [(0, 0), (0, 1), (1, 0), (1, 1)])
    def test_without_a_code_that_the_strip_needs(self, table):
        """Chroma must not change, and each block must end."""
        data = BASE["420"]
        assert stacking_of(data).max_tiles > 1
        kind, number = table
        place = next(
            place
            for marker, place in markers(data)
            if marker == 0xC4 and data[place + 4] == 16 * kind + number
        )
        symbols = place + 21
        count = sum(data[place + 5 : symbols])
        unneeded = bytes([0xE3] * count) if table != (0, 0) else bytes(count)
        assert stacking_of(patched(data, symbols, unneeded)).max_tiles == 1

    def test_header_that_libjpeg_parses_differently(self):
        """After a marker without a segment, decoders disagree about what follows."""
        data = BASE["gray"]
        start = frame(data)
        large = patched(data[start : start + 13], 5, b"\x75\x30\x75\x30")
        gap = 0xFFC0 - len(large) - 4
        comment = b"\xff\xfe" + (gap + 2 + 13).to_bytes(2, "big") + bytes(gap)
        hidden = b"\xff\xd8\xff\x01" + large + comment + data[start:]
        for alone in (0x01, 0xD0, 0xD7, 0xD8, 0xD9, 0xFF):
            changed = patched(hidden, 3, [alone])
            assert header_length(changed) == 0
        assert read_header(hidden) is None

    def test_shades_with_low_contrast(self):
        """The only difference is one or two, with the finest quantization."""
        data = encode("gray", FLAT[..., :1].copy(), level=100)
        place = next(place for marker, place in markers(data) if marker == 0xC4)
        assert data[place + 4] == 0
        few = b"\xff\xc4\0\x15\0" + bytes([0, 2, *[0] * 14]) + b"\0\1"
        fewer = inserted(without(data, 0xC4), place, few)
        assert stacking_of(data).max_tiles > 1
        assert stacking_of(fewer).max_tiles == 1


class TestDamage:
    @settings(max_examples=200)
    @given(st.data())
    def test_a_stack_of_any_header_is_proven(self, data):
        kind = data.draw(st.sampled_from(list(STRIPS)))
        whole = BASE[kind]
        places = [place for _, place in markers(whole)]
        harmed = data.draw(mutated(whole, places))
        head = harmed[: header_length(harmed)]
        header = read_header(head)
        if header is None or (header.height, header.width) != (HEIGHT, WIDTH):
            return
        if header.sampling != read_header(whole[: header_length(whole)]).sampling:
            return
        stacking = Stacking(head, header)
        assert 1 <= stacking.max_tiles <= MAX_ROWS // HEIGHT
        if stacking.max_tiles == 1:
            return
        first, second = stacking.marks[:2]
        assert abs(first - second) >= 8
        for count in (2, stacking.max_tiles):
            begun = read_header(stacking.header(count))
            assert begun.restarts
            assert begun.height == count * HEIGHT + STRIPS[kind]
            assert begun.huffman == header.huffman
