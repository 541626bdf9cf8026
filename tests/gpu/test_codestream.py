"""Only streams of the level's tile size are passed to nvImageCodec."""

import ctypes
from itertools import cycle
from operator import add
from types import SimpleNamespace

import imagecodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_wsigpu.codecs.decoder import EncodedTile
from napari_wsigpu.codecs.tile import decode_tile
from napari_wsigpu.gpu.device.interfaces import Slots, TileFormat
from napari_wsigpu.gpu.device.workspace import Workspace
from napari_wsigpu.gpu.jpeg.codestream import Jpeg2000Streams, Recipe, recipe_for
from napari_wsigpu.gpu.jpeg.jpeg_stacks import JpegStreams
from tests.fakes.host_device import HostDevice, joined, level_of
from tests.writers import slides

HEIGHT, WIDTH = 48, 64
START_OF_FRAME = (0xC0, 0xC1, 0xC2)


def encoded(level, segment):
    view = None if segment is None else memoryview(bytes(segment))
    return EncodedTile(level, 0, 0, (view,), 0)


class Streams:
    """Records the bytes that are added, and accepts them according to `answers`."""

    def __init__(self, answers=None):
        self.found = []
        self._answers = answers or cycle([True])

    def add(self, address, length):
        self.found.append(ctypes.string_at(address, length))
        return next(self._answers)

    def clear(self):
        self.found.clear()


def workspace(streams=None):
    """Return a workspace whose code streams are bytes, and which ignores images."""
    device = HostDevice()
    device.code_streams = lambda: streams or Streams()
    device.images = lambda: None
    return Workspace(device)


def preparer_of(level):
    how = recipe_for(level)
    return (JpegStreams if how.kind == "jpeg" else Jpeg2000Streams)(level, how)


def batch_of(level, segments):
    return joined([encoded(level, segment) for segment in segments])


def filled(preparer, level, segments):
    """Return the stream of each segment that has one."""
    work = workspace()
    prepared = preparer.prepare(batch_of(level, segments), len(segments), work)
    indices = [index for (index,) in prepared.groups]
    return dict(sorted(zip(indices, work.streams.found, strict=True)))


def stream_of(level, segment):
    """Return the stream of a segment as bytes; None if there is none."""
    return filled(preparer_of(level), level, [segment]).get(0)


def decoded_by_cpu(level, segment):
    memory = np.empty(level.tile_bytes, np.uint8)
    return decode_tile(encoded(level, segment), memory)


@pytest.fixture
def nvimgcodec():
    return pytest.importorskip("nvidia.nvimgcodec")


class TestRecipe:
    @pytest.mark.parametrize(
        ("channels", "color", "asked"),
        [
            (1, "gray", ("I_Y", "GRAY")),
            (3, "stored", ("P_YUV", "SYCC")),
            (3, "ycbcr", ("P_YUV", "SYCC")),
        ],
    )
    def test_jpeg(self, channels, color, asked):
        how = recipe_for(level_of(channels, jpeg_color=color))
        assert isinstance(how, Recipe)
        assert how.kind == "jpeg"
        assert (how.sample_format, how.color_spec) == asked
        assert how.convert == (color == "ycbcr")

    @pytest.mark.parametrize(
        ("channels", "planes", "dtype"),
        [(2, 1, "uint8"), (4, 1, "uint16"), (3, 3, "uint8"), (1, 1, "int16")],
    )
    def test_jpeg_2000_only_for_our_kernels(self, channels, planes, dtype):
        how = recipe_for(level_of(channels, planes=planes, compression=34712, dtype=dtype))
        assert how.kind == "jpeg2000"
        assert not how.by_library

    @pytest.mark.parametrize("compression", [33003, 33004, 33005, 34712])
    @pytest.mark.parametrize("dtype", ["uint8", "uint16"])
    @pytest.mark.parametrize("channels", [1, 3])
    def test_jpeg_2000(self, compression, dtype, channels):
        how = recipe_for(
            level_of(channels, compression=compression, dtype=dtype, jpeg_color="auto")
        )
        assert how.kind == "jpeg2000"
        assert (how.sample_format, how.color_spec) == (
            ("I_Y", "GRAY") if channels == 1 else ("I_RGB", "SRGB")
        )
        assert not how.convert

    @pytest.mark.parametrize(
        ("compression", "kind"),
        [(5, "LZW"), (8, "deflate"), (32946, "deflate")],
    )
    @pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
    def test_compressed_bytes(self, compression, kind, dtype):
        for channels in (1, 3, 5):
            how = recipe_for(level_of(channels, compression=compression, dtype=dtype))
            assert how.kind == kind
            assert not how.by_library

    @pytest.mark.parametrize("compression", [33003, 34712])
    def test_jpeg_2000_of_ycbcr(self, compression):
        level = level_of(compression=compression, photometric=6)
        assert recipe_for(level).convert
        level = level_of(compression=compression, photometric=6, dtype="uint16")
        assert "more than 8 bits" in recipe_for(level)

    @pytest.mark.parametrize(
        ("reason", "channels", "planes", "encoding"),
        [
            ("auto", 3, 1, {"jpeg_color": "auto"}),
            ("4 channels", 4, 1, {"jpeg_color": "cmyk"}),
            ("2 channels", 2, 1, {"jpeg_color": "auto"}),
            ("uint16", 1, 1, {"jpeg_color": "gray", "dtype": "uint16"}),
            ("stored separately", 3, 3, {"jpeg_color": "gray"}),
            ("fraction of its size", 3, 1, {"jpeg_header": b"\xff\xd8", "jpeg_scale": 2}),
            ("contradict", 3, 1, {"jpeg_color": "gray"}),
            ("contradict", 1, 1, {"jpeg_color": "ycbcr"}),
            ("5 channels", 5, 1, {"compression": 33005}),
            ("uint32", 1, 1, {"compression": 34712, "dtype": "uint32"}),
            ("its tiles are uncompressed", 3, 1, {"compression": 1}),
            ("stored separately", 3, 3, {"compression": 5}),
            ("share bytes", 1, 1, {"compression": 8, "bits": 4}),
            ("another order", 3, 1, {"compression": 8, "blue_first": True}),
            ("another order", 3, 1, {"compression": 5, "fill_order": 2}),
            ("float32 with", 1, 1, {"compression": 8, "dtype": "float32", "predictor": 2}),
            ("48 KiB", 192, 1, {"compression": 8, "dtype": "float32", "predictor": 3}),
            ("LZMA", 3, 1, {"compression": 34925}),
            ("WebP", 3, 1, {"compression": 50001}),
            ("JPEG XL", 3, 1, {"compression": 52546}),
            ("LERC", 3, 1, {"compression": 34887}),
        ],
    )
    def test_reasons_for_the_cpu(self, reason, channels, planes, encoding):
        how = recipe_for(level_of(channels, planes=planes, **encoding))
        assert isinstance(how, str)
        assert reason in how


JPEG = {
    "gray": (1, "gray", slides.jpeg),
    "stored": (3, "stored", lambda tile: without_adobe(slides.jpeg(tile))),
    "stored in 4:2:2": (3, "stored", lambda tile: slides.jpeg_ycbcr(tile, "422")),
    "stored in 4:2:0": (3, "stored", slides.jpeg_ycbcr),
    "4:4:4": (3, "ycbcr", lambda tile: slides.jpeg_ycbcr(tile, "444")),
    "4:2:2": (3, "ycbcr", lambda tile: slides.jpeg_ycbcr(tile, "422")),
    "4:2:0": (3, "ycbcr", slides.jpeg_ycbcr),
}
COLORSPACES = {
    "gray": {"outcolorspace": "GRAYSCALE"},
    "stored": {"colorspace": "RGB", "outcolorspace": "RGB"},
    "ycbcr": {"colorspace": "YCBCR", "outcolorspace": "RGB"},
}


def markers(data):
    """Return marker and offset of each segment of a JPEG, up to the start of scan."""
    found, place = [], 2
    while not found or found[-1][0] != 0xDA:
        found.append((data[place + 1], place))
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return found


def frame(data):
    return next(place for marker, place in markers(data) if marker in START_OF_FRAME)


def scan(data):
    return markers(data)[-1][1]


def patched(data, place, values):
    return data[:place] + bytes(values) + data[place + len(values) :]


def inserted(data, place, segment):
    return data[:place] + segment + data[place:]


def adobe(transform):
    return b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00" + bytes([transform])


def with_ids(data, ids):
    for number, value in enumerate(ids):
        data = patched(data, frame(data) + 10 + 3 * number, [value])
        data = patched(data, scan(data) + 5 + 2 * number, [value])
    return data


def without(data, marker):
    place = next(place for found, place in markers(data) if found == marker)
    return data[:place] + data[place + 2 + int.from_bytes(data[place + 2 : place + 4], "big") :]


def without_adobe(data):
    return without(data, 0xEE)


PICTURE = slides.picture(HEIGHT, WIDTH)
YCBCR = slides.jpeg_ycbcr(PICTURE)
STORED = without_adobe(slides.jpeg(PICTURE))
GRAY = slides.jpeg(slides.picture(HEIGHT, WIDTH, 1))


class TestJpeg:
    @pytest.mark.parametrize("tables", [False, True])
    @pytest.mark.parametrize("colors", JPEG)
    def test_the_stream_holds_the_same_pixels(self, colors, tables):
        channels, color, encode = JPEG[colors]
        segment = encode(slides.picture(HEIGHT, WIDTH, channels))
        options = {}
        if tables:
            shared, segment = slides.split_tables(segment)
            options["jpeg_tables"] = (shared,)
        level = level_of(channels, jpeg_color=color, **options)
        stream = stream_of(level, segment)
        pixels = imagecodecs.jpeg8_decode(stream, **COLORSPACES[color])
        expected = decoded_by_cpu(level, segment)
        np.testing.assert_array_equal(pixels.reshape(expected.shape), expected)

    def test_trailing_zeros_are_allowed(self):
        level = level_of()
        expected = decoded_by_cpu(level, YCBCR)
        for count in (1, 2, 7, 32):
            stream = stream_of(level, YCBCR + bytes(count))
            np.testing.assert_array_equal(imagecodecs.jpeg8_decode(stream), expected)

    def test_progressive_jpeg_is_accepted(self):
        segment = patched(YCBCR, frame(YCBCR) + 1, [0xC2])
        assert stream_of(level_of(), segment) == segment

    @pytest.mark.parametrize(
        ("color", "segment"),
        {
            "missing": ("ycbcr", None),
            "empty": ("ycbcr", b""),
            "3 bytes": ("ycbcr", b"\xff\xd8\xff"),
            "only markers": ("ycbcr", b"\xff\xd8\xff\xd9"),
            "shorter": ("ycbcr", slides.jpeg_ycbcr(slides.picture(HEIGHT - 8, WIDTH))),
            "narrower": ("ycbcr", slides.jpeg_ycbcr(slides.picture(HEIGHT, WIDTH - 8))),
            "taller": ("ycbcr", slides.jpeg_ycbcr(slides.picture(HEIGHT + 1, WIDTH))),
            "wider": ("ycbcr", slides.jpeg_ycbcr(slides.picture(HEIGHT, WIDTH + 1))),
            "turned": ("ycbcr", slides.jpeg_ycbcr(slides.picture(WIDTH, HEIGHT))),
            "gray instead of colours": ("ycbcr", GRAY),
            "colours instead of gray": ("gray", YCBCR),
            "four components": (
                "ycbcr",
                imagecodecs.jpeg8_encode(
                    slides.picture(HEIGHT, WIDTH, 4), colorspace="CMYK", outcolorspace="CMYK"
                ),
            ),
            "Adobe, as stored": ("ycbcr", inserted(YCBCR, 2, adobe(0))),
            "components named RGB": ("ycbcr", with_ids(YCBCR, b"RGB")),
            "chroma of half the height": ("ycbcr", slides.jpeg_ycbcr(PICTURE, "440")),
            "chroma of a quarter of the width": ("ycbcr", slides.jpeg_ycbcr(PICTURE, "411")),
            "stored, in 4:1:1": ("stored", slides.jpeg_ycbcr(PICTURE, "411")),
            "chroma that differs": ("ycbcr", patched(YCBCR, frame(YCBCR) + 14, [0x21])),
            "chroma larger than luma": (
                "ycbcr",
                patched(YCBCR, frame(YCBCR) + 11, [0x11, 0, 2, 0x22]),
            ),
            "samples of no extent": ("ycbcr", patched(YCBCR, frame(YCBCR) + 11, [0])),
            "12 bits": ("ycbcr", patched(YCBCR, frame(YCBCR) + 4, [12])),
            "no frame": ("ycbcr", YCBCR[: frame(YCBCR)] + YCBCR[scan(YCBCR) :]),
            "no marker": ("ycbcr", patched(YCBCR, 2, [0])),
            "no end": ("ycbcr", YCBCR[:-2]),
            "half an end": ("ycbcr", YCBCR[:-1]),
            "half of it": ("ycbcr", YCBCR[: len(YCBCR) // 2]),
            "half of it, then zeros": ("ycbcr", YCBCR[: len(YCBCR) // 2] + bytes(30)),
            "the header": ("ycbcr", YCBCR[: frame(YCBCR) + 8] + b"\xff\xd9"),
        }.values(),
    )
    def test_tiles_left_to_the_cpu(self, color, segment):
        level = level_of(1 if color == "gray" else 3, jpeg_color=color)
        assert stream_of(level, segment) is None

    def test_overlong_header(self):
        comment = b"\xff\xfe\x80\x00" + bytes(0x7FFE)
        segment = inserted(YCBCR, 2, comment)
        assert stream_of(level_of(), segment) is not None
        assert stream_of(level_of(), inserted(segment, 2, comment)) is None
        assert "too long" in recipe_for(level_of(jpeg_tables=(YCBCR[:2] + 3 * comment,)))

    @pytest.mark.parametrize(("width", "taken"), [(3, False), (4, False), (5, True)])
    def test_chroma_that_libjpeg_does_not_smooth(self, width, taken):
        pixels = slides.picture(HEIGHT, width)
        for subsampling in ("422", "420"):
            segment = slides.jpeg_ycbcr(pixels, subsampling)
            found = stream_of(level_of(tile=(HEIGHT, width)), segment)
            assert (found is not None) == taken
        segment = slides.jpeg_ycbcr(pixels, "444")
        assert stream_of(level_of(tile=(HEIGHT, width)), segment) is not None

    def test_frame_with_a_wrong_length(self):
        place = frame(YCBCR) + 2
        for length in (8, 11, 14, 20, 0xFFFF):
            lie = patched(YCBCR, place, length.to_bytes(2, "big"))
            assert stream_of(level_of(), lie) is None

    def test_a_frame_shorter_than_its_fields(self):
        place = frame(YCBCR) + 2
        for length in (0, 1, 2, 3, 6, 7):
            lie = patched(YCBCR, place, length.to_bytes(2, "big"))
            assert stream_of(level_of(), lie) is None

    def test_a_second_frame(self, nvimgcodec):
        """nvImageCodec uses the last one."""
        start = frame(YCBCR)
        other = patched(YCBCR[start : start + 19], 5, b"\x00\x08\x00\x08")
        segment = inserted(YCBCR, scan(YCBCR), other)
        parsed = nvimgcodec.CodeStream(segment)
        assert (parsed.height, parsed.width) == (8, 8)
        assert stream_of(level_of(), segment) is None
        same = inserted(YCBCR, scan(YCBCR), YCBCR[start : start + 19])
        assert stream_of(level_of(), same) is None

    @pytest.mark.parametrize(
        ("colors", "segment"),
        [("ycbcr", inserted(YCBCR, 2, adobe(1))), ("stored", inserted(STORED, 2, adobe(0)))],
    )
    def test_adobe_as_the_slide_says(self, colors, segment):
        level = level_of(jpeg_color=colors)
        assert stream_of(level, segment) == segment

    def test_adobe_behind_the_frame(self):
        """libjpeg obeys it there, too, and does not convert the stored components."""
        plain = without(YCBCR, 0xE0)  # JFIF would take precedence
        segment = inserted(plain, scan(plain), adobe(0))
        level = level_of()
        assert (decoded_by_cpu(level, segment) != decoded_by_cpu(level, YCBCR)).any()
        assert stream_of(level, segment) is None

    def test_tables_with_padding(self):
        shared, segment = slides.split_tables(YCBCR)
        level = level_of(jpeg_tables=(shared + b"\0\0",))
        expected = decoded_by_cpu(level, segment)
        stream = stream_of(level, segment)
        if stream is not None:
            np.testing.assert_array_equal(imagecodecs.jpeg8_decode(stream), expected)

    def test_accepted_header_does_not_accept_others(self):
        level = level_of()
        preparer = preparer_of(level)
        good = [
            YCBCR,
            inserted(YCBCR, 2, b"\xff\xfe\x00\x06okay"),
            slides.jpeg(PICTURE, outcolorspace="YCBCR", subsampling="420", level=70),
        ]
        bad = [
            slides.jpeg_ycbcr(slides.picture(HEIGHT + 16, WIDTH)),
            inserted(YCBCR, 2, adobe(0)),
            slides.jpeg_ycbcr(PICTURE, "444"),  # valid if it is the first
            YCBCR[:-2],
            with_ids(YCBCR, b"RGB"),
            YCBCR[: frame(YCBCR)],
            b"",
        ]
        for _ in range(2):
            assert filled(preparer, level, good) == dict(enumerate(good))
            assert filled(preparer, level, bad) == {}
        mixed = [segment for pair in zip(cycle(good), bad, strict=False) for segment in pair]
        assert list(filled(preparer, level, mixed)) == [0, 2, 4, 6, 8, 10, 12]

    def test_memory_stays_within_the_limit(self):
        level = level_of()
        work = workspace()
        prepared = preparer_of(level).prepare(batch_of(level, [YCBCR] * 5), 3, work)
        assert prepared.groups == [[0], [1], [2]]
        assert work.streams.found == [YCBCR] * 3

    def test_refused_streams_are_left_out(self):
        level = level_of()
        work = workspace(Streams(iter([True, False, True])))
        prepared = preparer_of(level).prepare(batch_of(level, [YCBCR] * 3), 3, work)
        assert prepared.groups == [[0], [2]]


def jpeg_2000(pixels, codecformat="J2K", **options):
    return imagecodecs.jpeg2k_encode(
        pixels.squeeze(), level=0, codecformat=codecformat, **({"mct": False} | options)
    )


J2K = jpeg_2000(PICTURE)


class TestJpeg2000:
    def test_memory_stays_within_the_limit(self):
        level = level_of(compression=34712)
        work = workspace(Streams(iter([True, False, True])))
        prepared = preparer_of(level).prepare(batch_of(level, [J2K] * 5), 3, work)
        assert prepared.groups == [[0], [2]]
        assert work.streams.found == [J2K] * 3

    @pytest.mark.parametrize(
        ("photometric", "transformed", "converted"),
        [(2, False, []), (2, True, []), (6, False, [[100, 103]]), (6, True, [])],
    )
    def test_tiles_are_decoded_to_their_slots(self, photometric, transformed, converted):
        level = level_of(compression=33003, photometric=photometric)
        work, described, found = workspace(), [], []
        streams = [jpeg_2000(PICTURE, mct=transformed)] * 4
        work.images = SimpleNamespace(add=lambda *given: described.append(given))
        device = SimpleNamespace(
            ycbcr_to_rgb=lambda addresses, *_: found.append(addresses.tolist())
        )
        prepared = preparer_of(level).prepare(batch_of(level, streams), 4, work)
        slots = Slots(TileFormat(HEIGHT, WIDTH, 3, "uint8"), np.arange(100, 104))
        prepared.set_targets(slots.addresses.tolist(), SimpleNamespace(ptr=7))
        assert [(address, stream) for address, _, stream in described] == [
            (address, 7) for address in range(100, 104)
        ]
        prepared.finish([True, False, False, True], slots, device, None)
        assert found == converted
        assert prepared.doubtful([0, 3]) == []

    @pytest.mark.parametrize("dtype", ["uint8", "uint16"])
    @pytest.mark.parametrize("channels", [1, 3])
    def test_the_stream_is_the_segment(self, channels, dtype):
        level = level_of(channels, compression=34712, dtype=dtype)
        segment = jpeg_2000(slides.picture(HEIGHT, WIDTH, channels, dtype))
        assert stream_of(level, segment) == segment

    @pytest.mark.parametrize(
        "segment",
        {
            "missing": None,
            "empty": b"",
            "3 bytes": J2K[:3],
            "cut in the sizes": J2K[:20],
            "cut in the components": J2K[:45],
            "a file instead of a stream": jpeg_2000(PICTURE, "JP2"),
            "shorter": jpeg_2000(slides.picture(HEIGHT - 8, WIDTH)),
            "wider": jpeg_2000(slides.picture(HEIGHT, WIDTH + 8)),
            "turned": jpeg_2000(slides.picture(WIDTH, HEIGHT)),
            "gray": jpeg_2000(slides.picture(HEIGHT, WIDTH, 1)),
            "four components": jpeg_2000(slides.picture(HEIGHT, WIDTH, 4)),
            "more bits": jpeg_2000(slides.picture(HEIGHT, WIDTH, 3, "uint16")),
            "fewer bits": jpeg_2000(PICTURE >> 1, bitspersample=7),
            "signed": patched(J2K, 42, [0x87]),
            "one signed": patched(J2K, 48, [0x87]),
            "subsampled": patched(J2K, 46, [2, 2]),
            "shifted": patched(J2K, 19, [8]),
            "a JPEG": YCBCR,
        }.values(),
    )
    def test_tiles_left_to_the_cpu(self, segment):
        assert stream_of(level_of(compression=34712), segment) is None

    @pytest.mark.parametrize("place", [24, 28])
    def test_tiles_without_extent(self, place):
        """nvImageCodec's parser divides by the extent, which crashes the process."""
        assert stream_of(level_of(compression=34712), patched(J2K, place, bytes(4))) is None


MADE_UP = st.one_of(
    st.binary(max_size=80),
    st.binary(max_size=60).map(lambda data: b"\xff\xd8\xff\xc0" + data + b"\xff\xd9"),
    st.binary(max_size=60).map(lambda data: b"\xff\x4f\xff\x51" + data),
)


@st.composite
def mutated(draw, data, header):
    """Change, remove or add bytes of a header whose markers are at these offsets."""
    for _ in range(draw(st.integers(1, 3))):
        near = st.builds(add, st.sampled_from(header), st.integers(0, 19))
        place = draw(near)
        kind = draw(st.sampled_from(["set", "size", "cut", "insert", "end"]))
        if kind == "set":
            data = patched(data, place, draw(st.binary(min_size=1, max_size=3)))
        elif kind == "size":
            data = patched(
                data, place, draw(st.sampled_from([b"\0\x40", b"\0\x30", b"\0\0\0\x08"]))
            )
        elif kind == "cut":
            data = data[:place] + data[place + draw(st.integers(1, 20)) :]
        elif kind == "insert":
            data = inserted(data, place, draw(st.binary(min_size=1, max_size=20)))
        else:
            data = data[:place] + b"\xff\xd9"
    return data


class TestDamage:
    def check(self, nvimgcodec, level, segment):
        stream = stream_of(level, segment)
        if stream is None:
            return
        if stream.startswith(b"\xff\x4f"):
            assert any(stream[24:28])
            assert any(stream[28:32])
        parsed = nvimgcodec.CodeStream(stream)
        try:
            found = (parsed.height, parsed.width, parsed.num_channels)
        except RuntimeError:
            return  # nvImageCodec refuses this tile only
        assert found == (HEIGHT, WIDTH, level.channels)

    @settings(max_examples=150)
    @given(MADE_UP)
    def test_random_bytes(self, nvimgcodec, data):
        for level in (level_of(), level_of(jpeg_color="stored"), level_of(compression=34712)):
            self.check(nvimgcodec, level, data)

    @settings(max_examples=250)
    @given(mutated(YCBCR, [place for _, place in markers(YCBCR)]))
    def test_mutated_jpeg(self, nvimgcodec, data):
        self.check(nvimgcodec, level_of(), data)

    @settings(max_examples=150)
    @given(mutated(slides.split_tables(YCBCR)[1], [0, 2, 20]))
    def test_mutated_jpeg_with_tables(self, nvimgcodec, data):
        level = level_of(jpeg_tables=(slides.split_tables(YCBCR)[0],))
        self.check(nvimgcodec, level, data)

    @settings(max_examples=250)
    @given(mutated(J2K, [0, 8, 20, 28, 40]))
    def test_mutated_jpeg_2000(self, nvimgcodec, data):
        self.check(nvimgcodec, level_of(compression=34712), data)
