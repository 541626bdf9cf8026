"""Every compression in every layout, compared with the original pixels or other readers."""

import contextlib
import threading
import time
import weakref
import zlib
from functools import partial

import imagecodecs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu import open_slide
from napari_wsigpu.codecs import raw
from napari_wsigpu.codecs.cpu import CpuDecoder, HostSlots
from napari_wsigpu.codecs.decoder import EncodedBatch
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.model.errors import SlideReadError, TileError
from tests import oracles
from tests.conftest import decoding_threads
from tests.writers import slides, tiffbytes
from tests.writers.tiffbytes import LONG, SHORT, UNDEFINED

ALL_TYPES = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)
# Neither the height nor the width is a multiple of the tile's (32, 48) or the strip's (7).
HEIGHT, WIDTH = 75, 110

LAYOUTS = {
    "tiles": {},
    "strips": {"tile": None, "rows_per_strip": 7},
    "one strip": {"tile": None},
    "separate tiles": {"planar": True},
    "separate strips": {"planar": True, "tile": None, "rows_per_strip": 7},
    "one large tile": {"tile": (160, 160)},
}

BYTE_CODECS = {
    1: bytes,
    5: imagecodecs.lzw_encode,
    8: zlib.compress,
    32946: zlib.compress,
    32773: imagecodecs.packbits_encode,
    34925: imagecodecs.lzma_encode,
    34926: imagecodecs.zstd_encode,
    50000: imagecodecs.zstd_encode,
}


def lerc(tile):
    return imagecodecs.lerc_encode(tile, level=0)


def read(path):
    with open_slide(path) as slide:
        return slide.levels[0][...]


def write(tmp_path, pixels, encode, *, byteorder="<", bigtiff=False, **options):
    item = tiffbytes.page(pixels, encode, **options)
    return tiffbytes.write(tmp_path / "slide.tif", [item], byteorder=byteorder, bigtiff=bigtiff)


def assert_same(found, expected):
    assert found.dtype == expected.dtype
    assert found.dtype.isnative
    np.testing.assert_array_equal(found, expected)


class TestLossless:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("compression", BYTE_CODECS)
    def test_every_layout(self, tmp_path, compression, layout):
        pixels = slides.picture(HEIGHT, WIDTH)
        encode = BYTE_CODECS[compression]
        path = write(
            tmp_path,
            pixels,
            lambda tile: encode(tile.tobytes()),
            compression=compression,
            **LAYOUTS[layout],
        )
        assert_same(read(path), pixels)

    @pytest.mark.parametrize("more", [1, 100, WIDTH * 3, WIDTH * 3 * 2 - 1])
    @pytest.mark.parametrize("planar", [False, True])
    @pytest.mark.parametrize("compression", BYTE_CODECS)
    def test_a_last_strip_may_hold_more_than_its_rows(self, tmp_path, compression, planar, more):
        pixels = slides.picture(HEIGHT, WIDTH)
        path = write(
            tmp_path,
            pixels,
            lambda tile: BYTE_CODECS[compression](tile.tobytes() + bytes([7]) * more),
            compression=compression,
            tile=None,
            rows_per_strip=7,
            planar=planar,
        )
        assert HEIGHT % 7 == 5
        assert_same(read(path), pixels)

    @pytest.mark.parametrize("compression", BYTE_CODECS)
    def test_a_tile_of_another_width_is_damaged(self, tmp_path, compression):
        """The positions of its rows are unknown."""
        path = write(
            tmp_path,
            slides.picture(32, WIDTH),
            lambda tile: BYTE_CODECS[compression](tile.tobytes() + b"7"),
            compression=compression,
            cut_edges=True,
        )
        with pytest.raises(TileError, match="row 0, column 2"):
            read(path)

    @pytest.mark.parametrize("bigtiff", [False, True])
    @pytest.mark.parametrize("byteorder", ["<", ">"])
    @pytest.mark.parametrize("dtype", ALL_TYPES)
    @pytest.mark.parametrize("compression", [1, 50000])
    def test_every_type(self, tmp_path, compression, dtype, byteorder, bigtiff):
        pixels = slides.picture(HEIGHT, WIDTH, 1, dtype)
        stored = pixels.dtype.newbyteorder(byteorder)
        path = write(
            tmp_path,
            pixels,
            lambda tile: BYTE_CODECS[compression](tile.astype(stored).tobytes()),
            compression=compression,
            photometric=1,
            byteorder=byteorder,
            bigtiff=bigtiff,
        )
        assert_same(read(path), pixels)

    @pytest.mark.parametrize("planar", [False, True])
    @pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
    def test_every_channel_count(self, tmp_path, channels, planar):
        pixels = slides.picture(HEIGHT, WIDTH, channels, "uint16")
        path = write(
            tmp_path,
            pixels,
            lambda tile: zlib.compress(tile.tobytes()),
            compression=8,
            photometric=1,
            planar=planar,
        )
        assert_same(read(path), pixels)

    @pytest.mark.parametrize("layout", ["tiles", "strips", "separate tiles"])
    @pytest.mark.parametrize("byteorder", ["<", ">"])
    @pytest.mark.parametrize(
        ("predictor", "dtype"),
        [(2, "uint8"), (2, "uint16"), (2, "uint32"), (2, "int16"), (3, "float32")],
    )
    def test_predictors(self, tmp_path, predictor, dtype, byteorder, layout):
        pixels = slides.picture(HEIGHT, WIDTH, 3, dtype)
        stored = pixels.dtype.newbyteorder(byteorder)

        def encode(tile):
            if predictor == 2:
                tile = imagecodecs.delta_encode(tile, axis=-2).astype(stored)
            else:
                tile = imagecodecs.floatpred_encode(tile.astype(stored), axis=-2)
            return zlib.compress(tile.tobytes())

        path = write(
            tmp_path,
            pixels,
            encode,
            compression=8,
            byteorder=byteorder,
            more={317: (SHORT, predictor)},
            **LAYOUTS[layout],
        )
        assert_same(oracles.tifffile_page(path), pixels)
        assert_same(read(path), pixels)

    @pytest.mark.parametrize("compression", [1, 5, 8, 32773])
    def test_fill_order_2(self, tmp_path, compression):
        pixels = slides.picture(HEIGHT, WIDTH)

        def encode(tile):
            return imagecodecs.bitorder_encode(BYTE_CODECS[compression](tile.tobytes()))

        fill_order = {266: (SHORT, 2)}
        path = write(tmp_path, pixels, encode, compression=compression, more=fill_order)
        assert_same(read(path), pixels)

    @pytest.mark.parametrize("channels", [3, 4])
    @pytest.mark.parametrize("compression", [34927, 50001])
    def test_webp(self, tmp_path, compression, channels):
        pixels = slides.picture(HEIGHT, WIDTH, channels)
        if channels == 4:
            pixels[..., 3] |= 1  # colours under full transparency need not be kept

        def encode(tile):
            return imagecodecs.webp_encode(tile, level=-1, lossless=True)

        assert_same(read(write(tmp_path, pixels, encode, compression=compression)), pixels)

    @pytest.mark.parametrize("wrapping", [0, 1, 2])
    @pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
    def test_lerc(self, tmp_path, dtype, wrapping):
        pixels = slides.picture(HEIGHT, WIDTH, 3, dtype)
        wrap = [bytes, zlib.compress, imagecodecs.zstd_encode][wrapping]
        path = write(
            tmp_path,
            pixels,
            lambda tile: wrap(lerc(tile)),
            compression=34887,
            more={50674: (LONG, (4, wrapping))},
        )
        assert_same(read(path), pixels)

    @pytest.mark.parametrize("dtype", ["uint8", "uint16"])
    @pytest.mark.parametrize("compression", [50002, 52546])
    def test_jpeg_xl(self, tmp_path, compression, dtype):
        pixels = slides.picture(HEIGHT, WIDTH, 3, dtype)

        def encode(tile):
            return imagecodecs.jpegxl_encode(tile, lossless=True)

        assert_same(read(write(tmp_path, pixels, encode, compression=compression)), pixels)

    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize("dtype", ["uint8", "uint16"])
    @pytest.mark.parametrize("compression", [22610, 34934])
    def test_jpeg_xr(self, tmp_path, compression, dtype, channels):
        pixels = slides.picture(HEIGHT, WIDTH, channels, dtype)

        def encode(tile):
            return imagecodecs.jpegxr_encode(tile.squeeze(), level=1.0)

        path = write(
            tmp_path,
            pixels,
            encode,
            compression=compression,
            photometric=2 if channels == 3 else 1,
        )
        assert_same(read(path), pixels)

    @pytest.mark.parametrize("planar", [False, True])
    @pytest.mark.parametrize("dtype", ["uint8", "uint16"])
    @pytest.mark.parametrize("compression", [33004, 33005, 34712])
    def test_jpeg_2000(self, tmp_path, compression, dtype, planar):
        pixels = slides.picture(HEIGHT, WIDTH, 3, dtype)

        def encode(tile):
            return imagecodecs.jpeg2k_encode(tile.squeeze(), level=0, codecformat="J2K", mct=False)

        path = write(tmp_path, pixels, encode, compression=compression, planar=planar)
        assert_same(read(path), pixels)


JPEG = {
    "RGB as stored": (3, 2, slides.jpeg),
    "YCbCr 4:4:4": (3, 6, lambda tile: slides.jpeg_ycbcr(tile, "444")),
    "YCbCr 4:2:2": (3, 6, lambda tile: slides.jpeg_ycbcr(tile, "422")),
    "YCbCr 4:2:0": (3, 6, lambda tile: slides.jpeg_ycbcr(tile, "420")),
    "gray": (1, 1, slides.jpeg),
}


class TestJpeg:
    @pytest.mark.parametrize("cut_edges", [False, True])
    @pytest.mark.parametrize("layout", ["tiles", "strips"])
    @pytest.mark.parametrize("tables", [False, True])
    @pytest.mark.parametrize("colors", JPEG)
    def test_colors(self, tmp_path, colors, tables, layout, cut_edges):
        channels, photometric, encode = JPEG[colors]
        pixels = slides.picture(HEIGHT, WIDTH, channels)
        more = {}
        if tables:
            more[347] = (UNDEFINED, slides.split_tables(encode(pixels[:16, :16]))[0])
        path = write(
            tmp_path,
            pixels,
            lambda tile: slides.split_tables(encode(tile))[1] if tables else encode(tile),
            compression=7,
            photometric=photometric,
            cut_edges=cut_edges,
            more=more,
            **{"tiles": {"tile": (32, 48)}, "strips": {"tile": None, "rows_per_strip": 16}}[layout],
        )
        found = read(path)
        assert_same(found, oracles.tifffile_page(path))
        assert abs(found.astype(int) - pixels).mean() < 12  # the same image and colours
        if layout == "tiles" and not cut_edges and photometric == 6:
            assert oracles.openslide_reads(path)
        if oracles.openslide_reads(path) and not cut_edges and channels == 3:
            assert_same(found, oracles.openslide_level(path))

    def test_separate_planes(self, tmp_path):
        pixels = slides.picture(HEIGHT, WIDTH)
        path = write(tmp_path, pixels, slides.jpeg, compression=7, planar=True)
        assert_same(read(path), oracles.tifffile_page(path))

    def test_aperio_rgb_equals_openslide(self, tmp_path):
        path = tmp_path / "slide.svs"
        slides.write_aperio(path, slides.picture(200, 300))
        with open_slide(path) as slide:
            for index, level in enumerate(slide.levels):
                assert_same(level[...], oracles.openslide_level(path, index))


def jpeg_2000_ycbcr(tile):
    """Encode RGB as Aperio's 33003 does: YCbCr components, no colour transform declared."""
    red, green, blue = np.moveaxis(tile.astype(float), -1, 0)
    y = 0.299 * red + 0.587 * green + 0.114 * blue
    planes = np.stack([y, 128 + (blue - y) / 1.772, 128 + (red - y) / 1.402], -1)
    samples = np.clip(np.round(planes), 0, 255).astype(np.uint8)
    return imagecodecs.jpeg2k_encode(samples, level=0, codecformat="J2K", mct=False)


@pytest.mark.parametrize(
    ("compression", "encode"),
    [
        (33003, jpeg_2000_ycbcr),
        (33005, lambda tile: imagecodecs.jpeg2k_encode(tile, level=35, codecformat="J2K")),
    ],
)
def test_aperio_jpeg_2000_is_close_to_openslide(tmp_path, compression, encode):
    path = tmp_path / "slide.svs"
    slides.write_aperio(
        path, slides.picture(200, 300), compression=compression, encode=encode, steps=()
    )
    found = read(path).astype(int)
    assert abs(found - oracles.openslide_level(path)).max() <= 1


class TestUncompressedStrips:
    """Uncompressed strips are read in blocks of moderate size."""

    @pytest.mark.parametrize("rows_per_strip", [0, 1500])
    @pytest.mark.parametrize("planar", [False, True])
    def test_huge_strips_are_split(self, tmp_path, rows_per_strip, planar):
        pixels = slides.picture(60, 50).repeat(67, 0)[:4001].repeat(31, 1)
        path = write(
            tmp_path, pixels, bytes, tile=None, rows_per_strip=rows_per_strip, planar=planar
        )
        with open_slide(path) as slide:
            assert slide.levels[0].chunks[0] < 4001
            assert_same(slide.levels[0][...], pixels)
            assert_same(slide.levels[0][3990:, ::7], pixels[3990:, ::7])

    def test_a_little_is_read_for_a_little(self, tmp_path):
        pixels = slides.picture(60, 50).repeat(100, 0).repeat(40, 1)
        path = write(tmp_path, pixels, bytes, tile=None)
        with open_slide(path) as slide:
            slide.levels[0][3000, 1000]
            assert slide.stats()["bytes_read"] <= pixels.nbytes / 4


class TestEdges:
    def test_padding_of_edge_tiles_is_not_shown(self, tmp_path):
        pixels = slides.picture(HEIGHT, WIDTH)
        path = write(tmp_path, pixels, bytes, tile=(64, 64))
        with open_slide(path) as slide:
            assert slide.levels[0].shape == pixels.shape
            assert_same(slide.levels[0][60:, 100:], pixels[60:, 100:])
            outside = slide.read_region((100, 60), (64, 64))
            assert not outside[HEIGHT - 60 :].any()

    def test_uncompressed_tile_cut_to_the_level(self, tmp_path):
        pixels = slides.picture(HEIGHT, WIDTH)
        assert_same(read(write(tmp_path, pixels, bytes, cut_edges=True)), pixels)


class TestFilled:
    """Uncompressed tiles, which are read straight into their memory."""

    @pytest.fixture(autouse=True)
    def of_any_size(self, monkeypatch):
        monkeypatch.setattr(raw, "SMALLEST_READ", 0)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("byteorder", ["<", ">"])
    @pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
    def test_every_layout(self, tmp_path, dtype, byteorder, layout):
        pixels = slides.picture(HEIGHT, WIDTH, 3, dtype)
        stored = pixels.dtype.newbyteorder(byteorder)
        path = write(
            tmp_path,
            pixels,
            lambda tile: tile.astype(stored).tobytes(),
            byteorder=byteorder,
            **LAYOUTS[layout],
        )
        assert_same(read(path), pixels)

    @pytest.mark.parametrize("more", [b"", b"padding"])
    def test_tiles_cut_to_the_level_or_longer(self, tmp_path, more):
        pixels = slides.picture(HEIGHT, WIDTH)
        assert_same(read(write(tmp_path, pixels, bytes, cut_edges=True)), pixels)
        assert_same(read(write(tmp_path, pixels, lambda tile: tile.tobytes() + more)), pixels)

    def test_fill_order_is_undone(self, tmp_path):
        pixels = slides.picture(HEIGHT, WIDTH)
        turned = write(
            tmp_path,
            pixels,
            lambda tile: imagecodecs.bitorder_encode(tile.tobytes()),
            more={266: (SHORT, 2)},
        )
        assert_same(read(turned), pixels)

    @given(kept=st.integers(1, 4608))
    def test_a_short_tile_never_shows_wrong_pixels(self, tmp_path, kept):
        pixels = slides.picture(HEIGHT, WIDTH)
        path = write(tmp_path, pixels, lambda tile: tile.tobytes()[:kept])
        with open_slide(path) as slide:
            for row, column in [(1, 1), (0, 2), (2, 0), (2, 2)]:
                place = slice(32 * row, 32 * row + 32), slice(48 * column, 48 * column + 48)
                with contextlib.suppress(TileError):
                    np.testing.assert_array_equal(slide.levels[0][place], pixels[place])
            assert slide.stats()["failed"] >= (kept < 4608)


class TestDamage:
    @pytest.mark.parametrize("lost", [2, 100, 0.5])
    @pytest.mark.parametrize("fill", [b"", b"\0"])
    def test_a_jpeg_tile_that_ends_early_is_refused(self, tmp_path, lost, fill):
        """libjpeg would fill the rest with gray; OpenSlide refuses such a tile too."""

        def cut(tile):
            data = slides.jpeg_ycbcr(tile)
            count = lost if isinstance(lost, int) else int(lost * len(data))
            return data[:-count] + fill * count

        path = write(tmp_path, slides.picture(32, 48), cut, compression=7, photometric=6)
        with pytest.raises(TileError, match="is truncated"), open_slide(path) as slide:
            slide.levels[0][0, 0]

    def test_padding_behind_a_jpeg_tile_is_left_out(self, tmp_path):
        pixels = slides.picture(32, 48)
        plain = write(tmp_path, pixels, slides.jpeg_ycbcr, compression=7, photometric=6)
        expected = read(plain)
        padded = write(
            tmp_path,
            pixels,
            lambda tile: slides.jpeg_ycbcr(tile) + bytes(7),
            compression=7,
            photometric=6,
        )
        assert_same(read(padded), expected)

    @pytest.mark.parametrize("compression", BYTE_CODECS)
    def test_a_short_tile_is_refused(self, tmp_path, compression):
        encode = BYTE_CODECS[compression]
        path = write(
            tmp_path,
            slides.picture(HEIGHT, WIDTH),
            lambda tile: encode(tile.tobytes()[:-1]),
            compression=compression,
        )
        with pytest.raises(TileError, match="row 1, column 1"), open_slide(path) as slide:
            slide.levels[0][32, 48]

    @pytest.mark.parametrize("kept", [4607, 4000, 1600, 1400])
    @pytest.mark.parametrize("compression", BYTE_CODECS)
    def test_a_short_tile_at_an_edge_never_shows_wrong_pixels(self, tmp_path, compression, kept):
        """A tile may be cropped to the level, but other short tiles are damaged."""
        encode = BYTE_CODECS[compression]
        pixels = slides.picture(HEIGHT, WIDTH)
        path = write(
            tmp_path, pixels, lambda tile: encode(tile.tobytes()[:kept]), compression=compression
        )
        with open_slide(path) as slide:
            for row, column in [(0, 2), (2, 0), (2, 2)]:
                place = slice(32 * row, 32 * row + 32), slice(48 * column, 48 * column + 48)
                with contextlib.suppress(TileError):
                    np.testing.assert_array_equal(slide.levels[0][place], pixels[place])

    @pytest.mark.parametrize(
        ("compression", "encode"),
        [
            (7, slides.jpeg_ycbcr),
            (34712, lambda tile: imagecodecs.jpeg2k_encode(tile, codecformat="J2K")),
            (50001, imagecodecs.webp_encode),
            (50002, imagecodecs.jpegxl_encode),
            (34887, lerc),
        ],
    )
    def test_a_tile_of_another_size_is_refused(self, tmp_path, compression, encode):
        other = encode(slides.picture(40, 40))
        path = write(tmp_path, slides.picture(32, 48), lambda _: other, compression=compression)
        with pytest.raises(TileError, match="row 0, column 0"):
            read(path)


class Delivered(list):
    """The indices of delivered tiles, with copies of their pixels."""

    def __init__(self, batch, *, keep=False):
        size = batch.level.tile_bytes
        rooms = [np.empty(size, np.uint8) if keep else None for _ in batch]
        self.slots = HostSlots(rooms)
        self.pixels, self.addresses = {}, set()

    def __call__(self, indices):
        for index in indices:
            tile = self.slots.pixels[index]
            self.append(index)
            self.addresses.add(tile.ctypes.data)
            self.pixels[index] = tile.copy()


class TestPool:
    @pytest.fixture
    def level(self, tmp_path):
        self.pixels = slides.picture(160, 240)
        self.path = write(tmp_path, self.pixels, bytes)
        return describe(self.path).levels[0]

    @pytest.fixture
    def batch(self, level):
        return self.batch_of(level, np.arange(25))

    def batch_of(self, level, numbers, lengths=32 * 48 * 3):
        tiles = np.stack(np.divmod(numbers, 5), 1)
        starts = level.grid.offsets[:, tiles[:, 0], tiles[:, 1]]
        lengths = np.broadcast_to(lengths, starts.shape)
        data = self.path.read_bytes()
        return EncodedBatch(level, tiles, data, starts, lengths, lengths >= 0, 0)

    @pytest.fixture
    def schedule(self):
        """Return a function that schedules a batch; its decoders are released at the end."""
        decoders = []

        def schedule(batch, workers, delivered):
            decoders.append(CpuDecoder(workers))
            return decoders[-1].schedule(batch, delivered.slots, delivered)

        yield schedule
        for decoder in decoders:
            decoder.release()

    @pytest.mark.parametrize("keep", [False, True])
    @pytest.mark.parametrize("workers", [0, 3])
    def test_every_tile_is_delivered_once(self, batch, schedule, workers, keep):
        delivered = Delivered(batch, keep=keep)
        assert schedule(batch, workers, delivered).wait() == {}
        assert sorted(delivered) == list(range(25))
        for index, tile in delivered.pixels.items():
            y, x = index // 5 * 32, index % 5 * 48
            assert_same(tile, self.pixels[y : y + 32, x : x + 48])
        if keep:
            assert delivered.addresses == {room.ctypes.data for room in delivered.slots.memory}
            for index, room in enumerate(delivered.slots.memory):
                assert_same(room, delivered.pixels[index].ravel())

    def test_tiles_can_be_taken_while_another_thread_makes_the_lists(self, batch):
        tiles, found = batch.tiles, []

        class Interrupted:
            """Tiles during whose conversion another thread takes a tile of the batch."""

            def tolist(self):
                if not found:
                    found.append(None)
                    found[0] = batch[7]
                return tiles.tolist()

        batch.tiles = Interrupted()
        assert (batch[8].row, batch[8].column) == (1, 3)
        assert (found[0].row, found[0].column) == (1, 2)

    def test_failures_affect_no_other_tile(self, level, schedule):
        batch = self.batch_of(level, np.arange(25), np.where(np.arange(25) == 3, 5, 32 * 48 * 3))
        delivered = Delivered(batch)
        failures = schedule(batch, 2, delivered).wait()
        assert list(failures) == [3]
        assert "5 instead of 4608 bytes" in failures[3]
        assert sorted(delivered) == [i for i in range(25) if i != 3]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_source_that_cannot_be_read_ends_the_batch(self, level, schedule, workers):
        tiles = np.stack(np.divmod(np.arange(25), 5), 1)

        def fill(view):
            if begun.append(0) or len(begun) == 4:
                raise SlideReadError("no disk")
            return len(view)

        begun = []
        batch = EncodedBatch.from_fills(level, tiles, [fill] * 25, 0)
        delivered = Delivered(batch)
        pending = schedule(batch, workers, delivered)
        with pytest.raises(SlideReadError, match="no disk"):
            pending.wait()
        assert len(delivered) < 25
        assert workers or delivered == [0, 1, 2]

    def test_release_joins_threads_and_the_next_batch_starts_new_ones(self, level):
        decoder = CpuDecoder(workers=2)
        for _ in range(2):
            batch = self.batch_of(level, np.arange(25))
            delivered = Delivered(batch)
            assert decoder.schedule(batch, delivered.slots, delivered).wait() == {}
            decoder.release()
            assert decoding_threads() == []

    def test_nothing_is_delivered_after_cancel(self, level, schedule):
        batch = self.batch_of(level, np.arange(500) % 25)

        class Slow(Delivered):
            def __call__(self, indices):
                super().__call__(indices)
                time.sleep(0.002)

        delivered = Slow(batch)
        schedule(batch, 2, delivered).cancel()
        count = len(delivered)
        time.sleep(0.05)
        assert len(delivered) == count < 500

    @pytest.mark.parametrize("workers", [0, 2])
    def test_an_error_of_the_receiver_is_not_swallowed(self, batch, workers):
        decoder = CpuDecoder(workers)

        def deliver(indices):
            raise KeyError("no room")

        pending = decoder.schedule(batch, HostSlots([None] * 25), deliver)
        with pytest.raises(KeyError):
            pending.wait()
        decoder.release()

    def test_an_error_in_another_thread_is_not_swallowed(self, level):
        waiting, decoder = threading.get_ident(), CpuDecoder(1)
        batch = self.batch_of(level, np.arange(500) % 25)

        def deliver(indices):
            if threading.get_ident() != waiting:
                raise KeyError("no room")
            time.sleep(0.001)

        pending = decoder.schedule(batch, HostSlots([None] * 500), deliver)
        with pytest.raises(KeyError):
            pending.wait()
        decoder.release()

    def test_threads_go_on_to_the_next_batch(self, level):
        decoder, seen = CpuDecoder(2), set()

        def scheduled(count, seen):
            def deliver(indices):
                seen.add(threading.get_ident())
                time.sleep(0.002)

            batch = self.batch_of(level, np.arange(count) % 25)
            return decoder.schedule(batch, HostSlots([None] * count), deliver)

        first, second = scheduled(50, set()), scheduled(300, seen)
        assert first.wait() == second.wait() == {}
        assert len(seen) == 3
        decoder.release()

    def test_unkept_tiles_share_memory(self, batch, schedule):
        delivered = Delivered(batch)
        schedule(batch, 0, delivered).wait()
        assert len(delivered.addresses) == 1

    def test_a_batch_that_ended_keeps_nothing_alive(self, batch, schedule):
        delivered = Delivered(batch, keep=True)
        gone = weakref.ref(delivered.slots.memory[0])
        pending = schedule(batch, 2, delivered)
        assert pending.wait() == {}
        del delivered
        assert gone() is None
        assert pending is not None

    @pytest.mark.parametrize("workers", [0, 1, 3])
    def test_results_of_tasks_are_in_order(self, workers):
        decoder = CpuDecoder(workers)
        try:
            # Tasks that wait for the pool themselves never wait for each other.
            tasks = [partial(decoder.run_all, [partial(pow, n, 2)] * 3) for n in range(20)]
            assert decoder.run_all(tasks) == [[n * n] * 3 for n in range(20)]
            assert decoder.run_all([]) == []
        finally:
            decoder.release()

    @pytest.mark.parametrize("workers", [0, 1, 3])
    @pytest.mark.parametrize("bad", [0, 5])
    def test_an_error_is_raised_once_no_task_runs(self, workers, bad):
        decoder, running = CpuDecoder(workers), set()

        def task(number):
            running.add(number)
            time.sleep(0.01)
            running.remove(number)
            if number == bad:
                raise ValueError("bad")

        try:
            with pytest.raises(ValueError, match="bad"):
                decoder.run_all([partial(task, number) for number in range(10)])
            assert not running
        finally:
            decoder.release()

    def test_waiting_thread_decodes_alone(self, batch, schedule):
        delivered = Delivered(batch)
        pending = schedule(batch, 0, delivered)
        assert delivered == decoding_threads() == []
        assert pending.wait() == {}
        assert delivered == list(range(25))
        assert decoding_threads() == []


@pytest.mark.parametrize(("stored", "shown"), [(3, 1), (3, 2), (4, 1), (4, 2), (2, 3)])
def test_png_with_other_samples_is_refused(tmp_path, stored, shown):
    tile = slides.picture(32, 48, stored)
    options = {"compression": 34933, "photometric": 2 if shown == 3 else 1}
    path = tmp_path / "a.tif"
    pixels = slides.picture(32, 48, shown)
    page = tiffbytes.page(pixels, lambda _: imagecodecs.png_encode(tile), **options)
    tiffbytes.write(path, [page])
    with open_slide(path) as slide, pytest.raises(TileError, match=f"{stored} samples per pixel"):
        slide.read_region((0, 0), (48, 32))


@pytest.mark.parametrize(
    ("code", "encode", "stored", "shown"),
    [
        (50002, partial(imagecodecs.jpegxl_encode, lossless=True), "float32", "uint32"),
        (50002, partial(imagecodecs.jpegxl_encode, lossless=True), "uint16", "float16"),
        (22610, imagecodecs.jpegxr_encode, "float32", "int32"),
        (22610, imagecodecs.jpegxr_encode, "float16", "uint16"),
        (34887, imagecodecs.lerc_encode, "float32", "uint32"),
        (34887, imagecodecs.lerc_encode, "int32", "float32"),
        (33005, partial(imagecodecs.jpeg2k_encode, level=0), "uint16", "float16"),
    ],
)
def test_float_and_integer_samples_are_not_mixed(tmp_path, code, encode, stored, shown):
    tile = np.arange(32 * 48).reshape(32, 48).astype(stored)
    pixels = np.zeros((32, 48, 1), shown)
    path = tmp_path / "a.tif"
    page = tiffbytes.page(pixels, lambda _: encode(tile), compression=code, photometric=1)
    tiffbytes.write(path, [page])
    with open_slide(path) as slide, pytest.raises(TileError, match="float"):
        slide.read_region((0, 0), (48, 32))


OF_ANY_TYPE = [
    (50002, partial(imagecodecs.jpegxl_encode, lossless=True)),
    (22610, imagecodecs.jpegxr_encode),
    (34887, imagecodecs.lerc_encode),
]


@pytest.mark.parametrize(("code", "encode"), OF_ANY_TYPE)
@pytest.mark.parametrize(("stored", "shown"), [("uint8", "uint16"), ("uint16", "uint32")])
def test_image_with_smaller_samples_is_refused(tmp_path, code, encode, stored, shown):
    """It would fill a part of the tile, and leave the rest uninitialized."""
    tile = slides.picture(32, 48, 1, stored)[..., 0]
    path = tmp_path / "a.tif"
    page = tiffbytes.page(
        np.zeros((32, 48, 1), shown), lambda _: encode(tile), compression=code, photometric=1
    )
    tiffbytes.write(path, [page])
    with open_slide(path) as slide, pytest.raises(TileError, match=f"of type {stored}"):
        slide.read_region((0, 0), (48, 32))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((4, offset) for offset in (0, 3, 1 << 20, (1 << 32) - 1)),
        *((32, count) for count in (0, 9999)),
        (34 + 12 + 4, 1 << 30),  # number of values of a tag
        (34 + 12 * 6 + 8, 1 << 30),  # offset of the image
    ],
)
def test_invalid_offsets_in_jpeg_xr_are_refused(tmp_path, place, value):
    """The decoder itself follows it, and crashes."""
    data = bytearray(imagecodecs.jpegxr_encode(slides.picture(32, 48, 1, "uint16")[..., 0]))
    size = 2 if place == 32 else 4
    data[place : place + size] = value.to_bytes(size, "little")
    path = tmp_path / "a.tif"
    pixels = np.zeros((32, 48, 1), np.uint16)
    page = tiffbytes.page(pixels, lambda _: bytes(data), compression=22610, photometric=1)
    tiffbytes.write(path, [page])
    with open_slide(path) as slide, pytest.raises(TileError, match="JPEG XR data is damaged"):
        slide.read_region((0, 0), (48, 32))


@pytest.mark.parametrize("cut", [1, 100, 900])
def test_truncated_jpeg_xr_is_refused(tmp_path, cut):
    """The decoder itself returns pixels for the missing bytes."""
    data = imagecodecs.jpegxr_encode(slides.picture(32, 48, 3), level=1.0)
    assert len(data) > 1000
    path = tmp_path / "a.tif"
    page = tiffbytes.page(slides.picture(32, 48), lambda _: data[:-cut], compression=22610)
    tiffbytes.write(path, [page])
    with open_slide(path) as slide, pytest.raises(TileError, match="damaged or truncated"):
        slide.read_region((0, 0), (48, 32))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-5], "truncated"),
        (lambda data: data[:400], "truncated"),
        (lambda data: data[:300] + b"\xff" * 50 + data[350:], "damaged"),
    ],
)
def test_damaged_png_is_refused_without_a_word_from_its_library(tmp_path, capfd, damage, reason):
    data = damage(imagecodecs.png_encode(slides.picture(32, 48)))
    path = tmp_path / "a.tif"
    page = tiffbytes.page(slides.picture(32, 48), lambda _: data, compression=34933)
    tiffbytes.write(path, [page])
    with open_slide(path) as slide, pytest.raises(TileError, match=f"PNG data is {reason}"):
        slide.read_region((0, 0), (48, 32))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("end", [b"", b"\0", b"\xff\xd9"])
def test_a_long_run_of_fill_bytes_in_jpeg_takes_no_time(tmp_path, bits, end):
    """Such as erased flash memory; looking for a marker from each of them would take hours."""
    pixels = slides.picture(32, 48, 1, f"uint{bits}")
    options = {"lossless": True, "bitspersample": 16} if bits == 16 else {}
    data = imagecodecs.jpeg8_encode(pixels[..., 0], **options)
    data = data[: data.index(b"\xff\xda") + 20] + b"\xff" * 1_000_000 + end
    path = tmp_path / "a.tif"
    page = tiffbytes.page(pixels, lambda _: data, compression=7, photometric=1)
    tiffbytes.write(path, [page])
    begin = time.monotonic()
    with open_slide(path) as slide, contextlib.suppress(TileError):
        slide.read_region((0, 0), (48, 32))
    assert time.monotonic() - begin < 20


def test_invalid_lerc_is_not_decompressed(tmp_path):
    """imagecodecs itself does that with data that starts like zlib or Zstandard."""
    path = tmp_path / "a.tif"
    bomb = zlib.compress(imagecodecs.lerc_encode(np.zeros((32, 48, 3), np.uint8)))
    page = tiffbytes.page(slides.picture(32, 48), lambda _: bomb, compression=34887)
    tiffbytes.write(path, [page])
    with open_slide(path) as slide, pytest.raises(TileError, match="not LERC"):
        slide.read_region((0, 0), (48, 32))


@pytest.mark.parametrize(("code", "encode"), OF_ANY_TYPE)
@pytest.mark.parametrize("shape", [(32, 48), (31, 48, 3), (48, 32, 3)])
def test_image_of_another_size_is_refused(tmp_path, code, encode, shape):
    tile = np.zeros(shape, np.uint8)
    path = tmp_path / "a.tif"
    tiffbytes.write(
        path, [tiffbytes.page(slides.picture(32, 48), lambda _: encode(tile), compression=code)]
    )
    with open_slide(path) as slide, pytest.raises(TileError, match="shape"):
        slide.read_region((0, 0), (48, 32))
