"""Deflate, LZW, PackBits and zstd on a device, with kernels that are also compiled for the host."""

import shutil
import zlib
from functools import partial

import imagecodecs
import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_wsigpu import open_slide
from napari_wsigpu.codecs.byte_codecs import unpack_lzw
from napari_wsigpu.gpu.compressed.compressed_engine import (
    DEFLATE,
    ENGINE,
    KERNELS,
    LZW,
    PACKBITS,
    ZSTD,
    CompressedEngine,
    room_for,
)
from napari_wsigpu.model.errors import DeviceError
from napari_wsigpu.reading.offload import ENGINES
from napari_wsigpu.slide import runtime
from tests.fakes import host_cuda
from tests.fakes.host_cuda import host_cuda_device
from tests.fakes.host_device import level_of
from tests.writers import slides

UNTOUCHED, GUARD = 201, 64
PICTURE = slides.picture(64, 96)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """An engine whose kernels run on the host."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    with pytest.MonkeyPatch.context() as patch:
        device = host_cuda_device(patch, tmp_path_factory.mktemp("compressed"), compiler)
        engine = CompressedEngine(device)
        assert engine.ready()
    return engine


@pytest.fixture(scope="module", params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request):
    if request.param == "host":
        return request.getfixturevalue("host")
    try:
        return runtime.default().devices.worker(0).compressed
    except DeviceError as error:
        pytest.skip(str(error))


def decoded(engine, algorithm, streams, size, sums=None):
    """Return the flag of each stream, and its decoded bytes."""
    device = engine._device
    stream = device.new_stream()
    encoded = np.frombuffer(b"?".join(streams), np.uint8)
    lengths = np.array([len(each) for each in streams])
    starts = np.cumsum([0, *lengths[:-1] + 1])
    with device.active():
        pixels = device.empty((len(streams), size + GUARD), np.uint8)
        device.fill(pixels, UNTOUCHED, stream)
        targets = device.address(pixels) + np.arange(len(streams)) * (size + GUARD)
        flags = device.pinned_array(len(streams), np.int32)
        flags[:] = 1
        room, _memory = device.allocate(room_for(algorithm, len(encoded), len(streams)))
        engine.decode(algorithm, encoded, starts, lengths, sums, targets, size, flags, room, stream)
        found = device.download(pixels, stream)
        stream.synchronize()
    assert (found[:, size:] == UNTOUCHED).all()
    return flags.tolist(), [row[:size].tobytes() for row in found]


THREADS = st.sampled_from([1, 4])


def by_threads(host, threads, algorithm, stream, text):
    """Return the flag of a stream and its decoded bytes, with several threads in a block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_cuda, "TOGETHER", threads)
        [flag], [found] = decoded(host, algorithm, [stream], len(text))
    return flag, found


def by_libtiff(data, size):
    try:
        return unpack_lzw(data, [size])
    except RuntimeError:
        return None


CONTENTS = {
    "tissue": PICTURE.tobytes(),
    "differences": imagecodecs.delta_encode(PICTURE, axis=-2).tobytes(),
    "noise": np.random.default_rng(1).integers(0, 256, 30000, np.uint8).tobytes(),
    "one value": bytes(60000),
    "a repeated word": b"mitosis " * 4000,
    "one byte": b"a",
}


DAMAGED = [CONTENTS["tissue"][:3000], CONTENTS["one value"][:3000], CONTENTS["differences"][:900]]


class TestLzw:
    @pytest.mark.parametrize("name", CONTENTS)
    def test_contents(self, engine, name):
        data = CONTENTS[name]
        flags, found = decoded(engine, LZW, [imagecodecs.lzw_encode(data)] * 3, len(data))
        assert flags == [0, 0, 0]
        assert found == [data] * 3

    def test_each_alignment(self, engine):
        texts = [bytes([number]) * 500 + PICTURE.tobytes()[: 700 - 500] for number in range(8)]
        flags, found = decoded(engine, LZW, [imagecodecs.lzw_encode(text) for text in texts], 700)
        assert flags == [0] * 8
        assert found == texts

    @pytest.mark.parametrize("cut", [4, 5, 50])
    def test_a_truncated_stream_is_flagged(self, engine, cut):
        data = PICTURE.tobytes()
        stream = imagecodecs.lzw_encode(data)
        flags, _ = decoded(engine, LZW, [stream, stream[: -cut - 1]], len(data))
        assert flags == [0, 1]

    def test_a_stream_of_fewer_bytes_is_flagged(self, engine):
        flags, _ = decoded(engine, LZW, [imagecodecs.lzw_encode(bytes(99))], 100)
        assert flags == [1]

    def test_excess_bytes_are_dropped(self, engine):
        text = PICTURE.tobytes()
        flags, found = decoded(engine, LZW, [imagecodecs.lzw_encode(text)], 1000)
        assert (flags, found) == ([0], [text[:1000]])

    @settings(max_examples=150)
    @given(data=st.data())
    def test_damage_is_found_as_by_libtiff(self, host, data):
        text = data.draw(st.sampled_from([CONTENTS["tissue"][:3000], CONTENTS["one value"][:3000]]))
        stream = bytearray(imagecodecs.lzw_encode(text))
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(2, len(stream) - 1))
            stream[place] = data.draw(st.integers(0, 255))
        threads = data.draw(THREADS)
        flag, found = by_threads(host, threads, LZW, bytes(stream), text)
        if flag == 0:
            assert found == by_libtiff(bytes(stream), len(text))

    @pytest.mark.parametrize("threads", [2, 5, 32])
    def test_threads_of_a_block_share_the_work(self, host, monkeypatch, threads):
        monkeypatch.setattr(host_cuda, "TOGETHER", threads)
        for name in ("tissue", "one value", "a repeated word"):
            data = CONTENTS[name]
            flags, found = decoded(host, LZW, [imagecodecs.lzw_encode(data)], len(data))
            assert (flags, found) == ([0], [data])


def by_packbits(data, size):
    try:
        return bytes(imagecodecs.packbits_decode(data))
    except (RuntimeError, ValueError):
        return None


class TestPackBits:
    @pytest.mark.parametrize("name", CONTENTS)
    def test_contents(self, engine, name):
        data = CONTENTS[name]
        flags, found = decoded(engine, PACKBITS, [imagecodecs.packbits_encode(data)] * 3, len(data))
        assert flags == [0, 0, 0]
        assert found == [data] * 3

    @pytest.mark.parametrize("threads", [2, 5, 32])
    def test_threads_of_a_block_share_the_work(self, host, monkeypatch, threads):
        monkeypatch.setattr(host_cuda, "TOGETHER", threads)
        data = CONTENTS["differences"]
        flags, found = decoded(host, PACKBITS, [imagecodecs.packbits_encode(data)], len(data))
        assert (flags, found) == ([0], [data])

    def test_headers_without_bytes(self, engine):
        stream = b"\x80\x01ab\x80\xfec\x80"
        flags, found = decoded(engine, PACKBITS, [stream], 5)
        assert (flags, found) == ([0], [b"abccc"])
        assert by_packbits(stream, 5) == b"abccc"

    @pytest.mark.parametrize(
        "stream", [b"", b"\x04abc", b"\xfd", b"\x01ab", b"\x04abcdef", b"\xfaa"]
    )
    def test_another_size_is_flagged(self, engine, stream):
        flags, _ = decoded(engine, PACKBITS, [b"\x04abcde", stream], 5)
        assert flags == [0, 1]

    @settings(max_examples=150)
    @given(data=st.data())
    def test_damage_is_found_as_by_imagecodecs(self, host, data):
        text = data.draw(st.sampled_from(DAMAGED))
        stream = bytearray(imagecodecs.packbits_encode(text))
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(0, len(stream) - 1))
            stream[place] = data.draw(st.integers(0, 255))
        [flag], [found] = decoded(host, PACKBITS, [bytes(stream)], len(text))
        if flag == 0:
            assert found == by_packbits(bytes(stream), len(text))


def deflated(text, level=6, strategy=zlib.Z_DEFAULT_STRATEGY):
    packer = zlib.compressobj(level, zlib.DEFLATED, -15, 9, strategy)
    return packer.compress(text) + packer.flush()


def sums_of(texts):
    return np.array([zlib.adler32(text) for text in texts], np.uint64)


def by_zlib(data, size):
    try:
        found = zlib.decompress(data, -15)
    except zlib.error:
        return None
    return found if len(found) == size else None


class TestDeflate:
    @pytest.mark.parametrize("name", CONTENTS)
    @pytest.mark.parametrize("level", [0, 1, 6, 9])
    def test_contents(self, engine, name, level):
        data = CONTENTS[name]
        streams = [deflated(data, level)] * 3
        flags, found = decoded(engine, DEFLATE, streams, len(data), sums_of([data] * 3))
        assert flags == [0, 0, 0]
        assert found == [data] * 3

    @pytest.mark.parametrize("strategy", [zlib.Z_FIXED, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE])
    def test_kinds_of_blocks(self, engine, strategy):
        texts = [bytes([number]) * number + PICTURE.tobytes()[number:] for number in range(8)]
        streams = [deflated(text, 6, strategy) for text in texts]
        flags, found = decoded(engine, DEFLATE, streams, len(texts[0]), sums_of(texts))
        assert flags == [0] * 8
        assert found == texts

    @pytest.mark.parametrize("level", [1, 6, 9])
    def test_several_blocks(self, engine, level):
        """Each block has its own codes, and matches of the one before it are still to be copied."""
        words = np.random.default_rng(level).poisson(200, 90_000).astype("<u2")
        texts = [np.roll(words, 7 * number).tobytes() for number in range(4)]
        streams = [deflated(text, level) for text in texts]
        flags, found = decoded(engine, DEFLATE, streams, len(texts[0]), sums_of(texts))
        assert flags == [0] * 4
        assert found == texts

    def test_long_codes(self, engine):
        """Symbols whose codes are longer than the table for quick lookups."""
        counts = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584, 4181]
        text = b"".join(bytes([17 * i % 256]) * count for i, count in enumerate(counts))
        text = np.random.default_rng(4).permutation(np.frombuffer(text, np.uint8)).tobytes()
        stream = deflated(text, 6, zlib.Z_HUFFMAN_ONLY)
        flags, found = decoded(engine, DEFLATE, [stream], len(text), sums_of([text]))
        assert (flags, found) == ([0], [text])

    @pytest.mark.parametrize("change", [-1, 1])
    def test_another_size_is_flagged(self, engine, change):
        text = PICTURE.tobytes()
        size = len(text) + change
        flags, _ = decoded(engine, DEFLATE, [deflated(text)], size, sums_of([text]))
        assert flags == [1]

    def test_wrong_checksums_are_flagged(self, engine):
        texts = [np.roll(PICTURE, 7 * number).tobytes() for number in range(5)]
        sums = sums_of(texts)
        sums[2] ^= 0x10000
        sums[4] ^= 1
        streams = [deflated(text) for text in texts]
        flags, _ = decoded(engine, DEFLATE, streams, len(texts[0]), sums)
        assert flags == [0, 0, 1, 0, 1]

    @settings(max_examples=200)
    @given(data=st.data())
    def test_damage_is_found_as_by_zlib(self, host, data):
        text = data.draw(st.sampled_from([CONTENTS["tissue"][:3000], CONTENTS["one value"][:3000]]))
        stream = bytearray(deflated(text, data.draw(st.sampled_from([0, 1, 9]))))
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, len(stream) - 1))
            stream[place] = data.draw(st.integers(0, 255))
        del stream[data.draw(st.integers(1, len(stream))) :]
        threads = data.draw(THREADS)
        flag, found = by_threads(host, threads, DEFLATE, bytes(stream), text)
        if flag == 0:
            assert found == by_zlib(bytes(stream), len(text))

    @pytest.mark.parametrize("threads", [2, 5, 32])
    def test_threads_of_a_block_share_the_work(self, host, monkeypatch, threads):
        monkeypatch.setattr(host_cuda, "TOGETHER", threads)
        for name, data in CONTENTS.items():
            for level in (0, 1, 6, 9):
                stream = deflated(data, level)
                flags, found = decoded(host, DEFLATE, [stream], len(data), sums_of([data]))
                assert (name, level, flags, found) == (name, level, [0], [data])

    @settings(max_examples=100)
    @given(data=st.data())
    def test_matches_of_any_length_and_distance(self, host, data):
        """Matches that overlap themselves, each other and what has just been decoded."""
        chance = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
        text = bytearray(chance.bytes(data.draw(st.integers(1, 9))))
        while len(text) < 6000:
            back, length = (
                int(chance.integers(1, min(len(text), 40) + 1)),
                int(chance.integers(3, 80)),
            )
            text += (text[-back:] * length)[:length]
            text += chance.bytes(int(chance.integers(0, 3)))
        threads = data.draw(THREADS)
        for algorithm, stream in (
            (DEFLATE, deflated(text, 9)),
            (LZW, imagecodecs.lzw_encode(text)),
        ):
            assert by_threads(host, threads, algorithm, bytes(stream), text) == (0, text)


def by_libzstd(data, size):
    try:
        found = imagecodecs.zstd_decode(data, out=size)
    except imagecodecs.ZstdError:
        return None
    return bytes(found) if len(found) == size else None


def blocks_of(text, kinds):
    """A frame without a content size, whose blocks are raw (0) or repeat a byte (1)."""
    frame, each = b"\x28\xb5\x2f\xfd\x00\x58", len(text) // len(kinds)
    for number, kind in enumerate(kinds):
        part = text[number * each : (number + 1) * each]
        header = each << 3 | kind << 1 | (number == len(kinds) - 1)
        frame += header.to_bytes(3, "little") + part[: 1 if kind else None]
    return frame


def test_all_kernels_have_a_name():
    assert {(kind, ENGINE) for kind in KERNELS} <= {*ENGINES}


class TestZstd:
    @pytest.mark.parametrize("name", CONTENTS)
    @pytest.mark.parametrize("level", [-50, -1, 1, 3, 9, 19, 22])
    def test_contents(self, engine, name, level):
        data = CONTENTS[name]
        streams = [imagecodecs.zstd_encode(data, level=level)] * 3
        flags, found = decoded(engine, ZSTD, streams, len(data))
        assert flags == [0, 0, 0]
        assert found == [data] * 3

    @pytest.mark.parametrize("threads", [2, 5, 32])
    def test_threads_of_a_block_wait_for_each_other(self, host, monkeypatch, threads):
        monkeypatch.setattr(host_cuda, "TOGETHER", threads)
        for name in ("tissue", "a repeated word", "one byte"):
            data = CONTENTS[name]
            flags, found = decoded(host, ZSTD, [imagecodecs.zstd_encode(data, level=9)], len(data))
            assert (flags, found) == ([0], [data])

    @pytest.mark.parametrize("level", [1, 5, 15])
    def test_several_blocks(self, engine, level):
        """Later blocks use tables, literals and offsets of those before them."""
        rng = np.random.default_rng(level)
        words = [rng.bytes(rng.integers(3, 40)) for _ in range(300)]
        text = b"".join(words[number] for number in rng.zipf(1.3, 90_000) % 300)[:700_000]
        text += bytes(200_000) + rng.bytes(140_000) + text[:100_000]
        flags, found = decoded(
            engine, ZSTD, [imagecodecs.zstd_encode(text, level=level)], len(text)
        )
        assert flags == [0]
        assert found == [text]

    def test_each_alignment(self, engine):
        texts = [bytes([number]) * number + PICTURE.tobytes()[number:3000] for number in range(8)]
        streams = [
            imagecodecs.zstd_encode(text, level=3 + number) for number, text in enumerate(texts)
        ]
        flags, found = decoded(engine, ZSTD, streams, 3000)
        assert flags == [0] * 8
        assert found == texts

    @pytest.mark.parametrize("kinds", [(0,), (1,), (0, 1, 0, 1)])
    def test_blocks_that_are_not_compressed(self, engine, kinds):
        part = bytes(range(200))
        text = b"".join(part[:1] * 200 if kind else part for kind in kinds)
        stream = blocks_of(text, kinds)
        assert by_libzstd(stream, len(text)) == text
        flags, found = decoded(engine, ZSTD, [stream], len(text))
        assert (flags, found) == ([0], [text])

    @given(text=st.binary(min_size=1, max_size=400), level=st.integers(-5, 19))
    def test_any_content(self, host, text, level):
        text *= 3
        stream = imagecodecs.zstd_encode(text, level=level)
        flags, found = decoded(host, ZSTD, [stream], len(text))
        assert (flags, found) == ([0], [text])

    @pytest.mark.parametrize("change", [-1, 1])
    def test_another_size_is_flagged(self, engine, change):
        text = PICTURE.tobytes()
        flags, _ = decoded(engine, ZSTD, [imagecodecs.zstd_encode(text)], len(text) + change)
        assert flags == [1]

    def test_bytes_after_the_frame_are_flagged(self, engine):
        stream = imagecodecs.zstd_encode(PICTURE.tobytes())
        flags, _ = decoded(engine, ZSTD, [stream + b"more", stream + stream], PICTURE.nbytes)
        assert flags == [1, 1]

    @settings(max_examples=300)
    @given(data=st.data())
    def test_damage_is_found_as_by_libzstd(self, host, data):
        text = data.draw(st.sampled_from(DAMAGED))
        stream = bytearray(
            imagecodecs.zstd_encode(text, level=data.draw(st.sampled_from([1, 9, 19])))
        )
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(4, len(stream) - 1))
            stream[place] = data.draw(st.integers(0, 255))
        del stream[data.draw(st.integers(5, 2 * len(stream))) :]
        if not stream[4] & 0b1111:  # others never reach the kernel
            [flag], [found] = decoded(host, ZSTD, [bytes(stream)], len(text))
            if flag == 0:
                assert found == by_libzstd(bytes(stream), len(text))


def restored(engine, stored, level, restore):
    """Return tiles after a kernel has changed them in place."""
    device = engine._device
    stream = device.new_stream()
    with device.active():
        tiles = device.empty(stored.shape, stored.dtype)
        device.send(stored, tiles, stream)
        addresses = device.address(tiles) + np.arange(len(stored)) * level.tile_bytes
        restore(addresses, level, stream=stream)
        found = device.download(tiles, stream)
        stream.synchronize()
    return found


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "float32", "float64"])
@pytest.mark.parametrize(("swap", "sum_up"), [(True, False), (False, True), (True, True)])
def test_samples_are_restored(engine, dtype, swap, sum_up):
    level = level_of(3, tile=(40, 56), dtype=dtype)
    rng = np.random.default_rng(3)
    pixels = rng.integers(0, 255, (4, 40, 56, 3)).astype(dtype)
    stored = pixels
    if sum_up:
        stored = imagecodecs.delta_encode(pixels.view(f"u{pixels.itemsize}"), axis=-2).view(dtype)
    stored = np.ascontiguousarray(stored.byteswap() if swap else stored)
    restore = partial(engine.restore, swap=swap, sum_up=sum_up)
    np.testing.assert_array_equal(restored(engine, stored, level, restore), pixels)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("channels", [1, 3])
def test_floats_are_restored(engine, dtype, channels):
    level = level_of(channels, tile=(40, 56), dtype=dtype)
    pixels = np.random.default_rng(5).normal(0, 3, (4, 40, 56, channels)).astype(dtype)
    stored = np.stack([imagecodecs.floatpred_encode(each, axis=-2) for each in pixels])
    found = restored(engine, stored, level, engine.restore_floats)
    np.testing.assert_array_equal(found, pixels)


WRITERS = {
    "PackBits": {"compression": "packbits"},
    "PackBits, big-endian": {"compression": "packbits", "byteorder": ">"},
    "deflate": {"compression": "zlib"},
    "deflate, differences": {"compression": "zlib", "predictor": True},
    "LZW": {"compression": "lzw"},
    "LZW, differences": {"compression": "lzw", "predictor": True},
    "zstd": {"compression": "zstd"},
    "zstd, differences": {"compression": "zstd", "predictor": True},
    "deflate, differences, big-endian": {
        "compression": "zlib",
        "predictor": True,
        "byteorder": ">",
    },
}


FLOATS = {
    f"floats, {order}": {"compression": "zlib", "predictor": 3, "byteorder": order}
    for order in "<>"
}
CASES = [
    *((name, dtype) for name in WRITERS for dtype in ("uint8", "uint16")),
    *((name, dtype) for name in FLOATS for dtype in ("float32", "float64")),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_slides_on_a_gpu(tmp_path, name, dtype):
    try:
        runtime.default().devices.worker(0)
    except DeviceError as error:
        pytest.skip(str(error))
    options = {**WRITERS, **FLOATS}[name].copy()
    order = options.pop("byteorder", "<")
    pixels = np.tile(slides.picture(300, 500), (3, 2, 1)).astype(dtype)
    pixels = pixels * (257 if dtype == "uint16" else 1)
    path = tmp_path / "slide.tif"
    tifffile.imwrite(path, pixels, tile=(128, 128), photometric="rgb", byteorder=order, **options)
    with open_slide(path, device="cuda") as slide:
        height, width = pixels.shape[:2]
        found = slide.read_region((0, 0), (width, height), device="cuda").get()
        np.testing.assert_array_equal(found, pixels)
        assert slide.stats()["decoded"]["nvimagecodec"] > 0
