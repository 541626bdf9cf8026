"""Tiles of Zarr arrays as bytes: ranges, damage, changes and threads."""

import bz2
import gzip
import json
import lzma
import os
import pickle
import threading
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor

import imagecodecs
import numpy as np
import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.model.errors import (
    SlideClosedError,
    SlideError,
    SlideReadError,
    TileError,
    UnsupportedSlideError,
)
from napari_wsigpu.storage.source import Unreadable
from napari_wsigpu.storage.zarr.zarr_source import ZarrSource
from tests.writers import slides
from tests.writers.zarrs import halved, write_image

HEIGHT, WIDTH, TILE = 600, 900, 256


@pytest.fixture
def pixels():
    return slides.picture(HEIGHT, WIDTH, 3, "uint16")


@pytest.fixture
def path(tmp_path, pixels):
    levels = halved(np.moveaxis(pixels, -1, 0), "cyx", 1)
    write_image(tmp_path / "a.zarr", levels, chunks=(1, TILE, TILE))
    return tmp_path / "a.zarr"


@pytest.fixture
def layout(path):
    return describe(path)


@pytest.fixture
def source(layout):
    source = ZarrSource(layout.path, layout.levels, layout.files)
    yield source
    source.close()


def tile_bytes(level, pixels, row, column):
    """Return the bytes of a tile as in a file of uncompressed tiles."""
    tile = np.zeros((TILE, TILE, 3), "<u2")
    part = pixels[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
    tile[: part.shape[0], : part.shape[1]] = part
    return tile.tobytes()


def places(level):
    return list(zip(level.grid.offsets.ravel(), level.grid.byte_counts.ravel(), strict=True))


def test_tiles_are_contiguous(layout):
    ranges = [place for level in layout.levels for place in places(level)]
    ends = [offset + length for offset, length in ranges]
    assert [offset for offset, _ in ranges] == [0, *ends[:-1]]


def test_whole_tiles(source, layout, pixels):
    for level, whole in zip(layout.levels, (pixels, pixels[::2, ::2]), strict=True):
        ranges = places(level)[::-1]
        found = source.read(ranges)
        tiles = [divmod(number, level.grid.columns) for number in range(len(ranges))][::-1]
        for view, tile in zip(found, tiles, strict=True):
            assert bytes(view) == tile_bytes(level, whole, *tile)


def test_parts_of_tiles_and_places_outside(source, layout, pixels):
    [offset, length] = places(layout.levels[0])[5]
    expected = tile_bytes(layout.levels[0], pixels, 1, 1)
    end = sum(places(layout.levels[-1])[-1])
    ranges = [(offset + 7, 100), (offset + 7, 2 * length), (offset, 0), (-5, 9), (end, 4)]
    wanted = [expected[7:107], expected[7:], b"", b"", b""]
    assert [bytes(view) for view in source.read(ranges)] == wanted


def test_empty_list_of_ranges(source):
    assert source.read([]) == []
    joined = source.read_joined(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert (bytes(joined.buffer), len(joined.starts), len(joined.lengths)) == (b"", 0, 0)


def test_joined_ranges_are_those_of_read(source, layout):
    ranges = [*places(layout.levels[1]), (-5, 9), *places(layout.levels[0])[::-2]]
    offsets, lengths = np.array(ranges, np.int64).T
    joined = source.read_joined(offsets, lengths)
    for view, start, length in zip(source.read(ranges), joined.starts, joined.lengths, strict=True):
        assert bytes(joined.buffer[start : start + length]) == bytes(view)


def test_fills_equal_reads(source, layout):
    ranges = [*places(layout.levels[1]), *places(layout.levels[0])[::-1]]
    found = []
    for (_, length), fill in zip(ranges, source.fills(ranges), strict=True):
        room = bytearray(b"\xff") * length
        assert fill(memoryview(room)) == length
        found.append(bytes(room))
    assert found == [bytes(view) for view in source.read(ranges)]


class TestDamage:
    def damage(self, path, plane, row, column):
        chunk = path / f"0/c/{plane}/{row}/{column}"
        data = bytearray(chunk.read_bytes())
        data[: len(data) // 2] = b"\xff" * (len(data) // 2)
        chunk.write_bytes(data)

    def test_damaged_tile_affects_no_other(self, path, pixels):
        self.damage(path, 1, 1, 2)
        with open_slide(path) as slide:
            with pytest.raises(TileError) as caught:
                slide.levels[0][...]
            assert [name for name, _ in caught.value.failures] == ["level 0, row 1, column 2"]
            assert "its chunk (1, 1, 2) can't be read (" in str(caught.value)
            whole = slide.level_array(0, tolerant=True)[...]
            expected = pixels.copy()
            expected[TILE : 2 * TILE, 2 * TILE : 3 * TILE] = 0
            np.testing.assert_array_equal(whole, expected)
            np.testing.assert_array_equal(slide.levels[0][:TILE], pixels[:TILE])

    @pytest.mark.parametrize("cut", [0, 100])
    def test_the_damaged_one_of_a_tile_of_small_chunks_is_named(self, tmp_path, pixels, cut):
        path = tmp_path / "small.zarr"
        write_image(path, [np.moveaxis(pixels, -1, 0)], chunks=(1, 64, 64))
        os.truncate(path / "0/c/2/3/6", cut)
        with open_slide(path) as slide:
            [(name, reason)] = slide.check_tiles().damaged
        assert name == "level 0, row 0, column 1"
        assert reason.startswith("its chunk (2, 3, 6) can't be read (")

    def test_many_damaged_tiles(self, path, pixels):
        for place in [(0, 0, 0), (2, 2, 3), (1, 1, 1)]:
            self.damage(path, *place)
        with open_slide(path) as slide:
            with pytest.raises(TileError) as caught:
                slide.levels[0][...]
            assert {name for name, _ in caught.value.failures} == {
                f"level 0, row {n}, column {m}" for n, m in [(0, 0), (2, 3), (1, 1)]
            }

    def test_chunk_with_too_few_bytes(self, path, pixels):
        """Missing bytes must not be replaced by old content of the memory."""
        chunk = path / "0/c/1/1/2"
        chunk.write_bytes(imagecodecs.zstd_encode(bytes(TILE * TILE)))
        with open_slide(path) as slide, pytest.raises(TileError, match="row 1, column 2"):
            slide.levels[0][...]

    def test_chunk_with_too_many_bytes(self, path, pixels):
        chunk = path / "0/c/1/1/2"
        chunk.write_bytes(imagecodecs.zstd_encode(bytes(2 * TILE * TILE + 1)))
        with open_slide(path) as slide, pytest.raises(TileError, match="row 1, column 2"):
            slide.levels[0][...]

    @pytest.mark.parametrize("location", ["start", "end"])
    def test_a_shard_whose_chunks_are_damaged(self, tmp_path, pixels, location):
        write_image(
            tmp_path / "b.zarr",
            [pixels],
            "yxc",
            chunks=(TILE, TILE, 3),
            shards={"shape": (3 * TILE, 4 * TILE, 3), "index_location": location},
            compressors=None,
        )
        shard = tmp_path / "b.zarr/0/c/0/0/0"
        if location == "start":
            os.truncate(shard, shard.stat().st_size - 7)
        with open_slide(tmp_path / "b.zarr") as slide:
            level = slide.level_array(0, tolerant=True)
            np.testing.assert_array_equal(level[: 2 * TILE], pixels[: 2 * TILE])
            names = slide.stats()["failed_tiles"]
            assert not names
            level[...]
            assert len(slide.stats()["failed_tiles"]) == (location == "start")

    @pytest.mark.parametrize("size", [0, 7])
    def test_a_chunk_that_is_cut_off(self, path, source, layout, size):
        chunk = path / "0/c/0/0/1"
        chunk.write_bytes(chunk.read_bytes()[:size])
        views = source.read(places(layout.levels[0]))
        assert [isinstance(view.obj, Unreadable) for view in views] == [
            number == 1 for number in range(len(views))
        ]

    def test_a_chunk_that_may_not_be_read(self, path, source, layout):
        chunk = path / "0/c/0/0/1"
        chunk.unlink()
        chunk.symlink_to(chunk)
        with pytest.raises(SlideReadError, match="symbolic links"):
            source.read(places(layout.levels[0])[:2])
        assert len(source.read(places(layout.levels[0])[:1])[0])


class TestChange:
    @pytest.mark.parametrize("document", ["zarr.json", "0/zarr.json", "1/zarr.json"])
    def test_metadata_that_changed(self, path, source, document):
        assert source.read([(0, 10)])[0]
        os.utime(path / document, ns=(1, 1))
        with pytest.raises(SlideError, match="has changed since"):
            source.read([(0, 10)])

    def test_a_folder_that_is_gone(self, path, source):
        path.rename(path.with_name("b.zarr"))
        with pytest.raises(FileNotFoundError, match="There is no file"):
            source.read([(0, 10)])

    def test_closed_source_refuses_reads(self, source):
        source.read([(0, 10)])
        source.release()
        source.read([(0, 10)])
        source.close()
        with pytest.raises(SlideClosedError):
            source.read([(0, 10)])


class TestResources:
    def test_many_threads_read_at_the_same_time(self, path, pixels):
        def read(seed):
            rng = np.random.default_rng(seed)
            for _ in range(5):
                y, x = int(rng.integers(0, HEIGHT - 99)), int(rng.integers(0, WIDTH - 99))
                found = slide.read_region((x, y), (99, 99))
                np.testing.assert_array_equal(found, pixels[y : y + 99, x : x + 99])
                if seed == 0:
                    slide.release()

        with open_slide(path) as slide, ThreadPoolExecutor(8) as pool:
            list(pool.map(read, range(8)))

    def test_nothing_is_left_in_memory(self, path, pixels):
        with open_slide(path) as slide:
            slide.levels[0][:10, :10]
        left = [thread.name for thread in threading.enumerate()]
        assert not [name for name in left if name.startswith("wsigpu")]

    @pytest.mark.parametrize("end", [ZarrSource.release, ZarrSource.close])
    def test_threads_live_as_long_as_the_source(self, source, layout, leaves_nothing, end):
        before = set(threading.enumerate())
        ranges = places(layout.levels[0])
        source.read(ranges[:1])
        assert set(threading.enumerate()) == before
        source.read(ranges)
        begun = set(threading.enumerate()) - before
        assert begun
        source.read(ranges)
        assert begun <= set(threading.enumerate())
        end(source)
        assert set(threading.enumerate()) == before

    def test_no_thread_starts_after_close(self, source, layout, monkeypatch, leaves_nothing):
        opened = source._opened

        def close_and_open(tile):
            source.close()
            return opened(tile)

        monkeypatch.setattr(source, "_opened", close_and_open)
        with pytest.raises(SlideClosedError, match="was closed"):
            source.read(places(layout.levels[0]))

    def test_layout_can_be_pickled(self, layout, pixels):
        copy = pickle.loads(pickle.dumps(layout))
        source = ZarrSource(copy.path, copy.levels, copy.files)
        [view] = source.read(places(copy.levels[0])[:1])
        assert bytes(view) == tile_bytes(copy.levels[0], pixels, 0, 0)


def bare(folder, chunk, **said):
    """Write an array of one chunk in Zarr version 2."""
    (folder / "a.zarr").mkdir()
    document = {
        "zarr_format": 2, "shape": [64, 64], "chunks": [64, 64], "dtype": "|u1", "order": "C",
        "fill_value": 0, "dimension_separator": ".", "compressor": None, "filters": None,
    }  # fmt: skip
    (folder / "a.zarr/.zarray").write_text(json.dumps(document | said))
    if chunk is not None:
        (folder / "a.zarr/0.0").write_bytes(chunk)
    return folder / "a.zarr"


SMALL, BOMB = bytes(range(256)) * 16, bytes(1 << 24)
COMPRESS = {
    "lzma": lambda data: lzma.compress(data, preset=0),
    "bz2": lambda data: bz2.compress(data, 1),
    "zlib": lambda data: zlib.compress(data, 1),
    "gzip": lambda data: gzip.compress(data, 1),
    "zstd": imagecodecs.zstd_encode,
    "blosc": imagecodecs.blosc_encode,
    "lz4": lambda data: imagecodecs.lz4_encode(data, header=True),
}


@pytest.mark.parametrize("order", ["C", "F"])  # read directly, and by zarr
@pytest.mark.parametrize("codec", COMPRESS)
def test_decompression_bombs_are_refused(tmp_path, codec, order):
    said = {"compressor": {"id": codec}, "order": order}
    with open_slide(bare(tmp_path, COMPRESS[codec](SMALL), **said)) as slide:
        expected = np.frombuffer(SMALL, np.uint8).reshape(64, 64, order=order)
        assert (np.asarray(slide.levels[0][...]).reshape(64, 64) == expected).all()
        chunk = COMPRESS[codec](BOMB)
        (tmp_path / "a.zarr/0.0").write_bytes(chunk)
        slide.clear_cache()
        tracemalloc.start()
        with pytest.raises(TileError, match=r"chunks? .*can't be read"):
            slide.read_region((0, 0), (64, 64))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("length", [1, 13, 16, 20, 4000])
def test_truncated_blosc_is_not_read_past_its_end(tmp_path, length, order):
    noise = np.random.default_rng(1).integers(0, 256, 4096, np.uint8)
    chunk = COMPRESS["blosc"](noise)
    assert len(chunk) > len(noise)  # stored without compression
    path = bare(tmp_path, chunk[:length], compressor={"id": "blosc"}, order=order)
    with open_slide(path) as slide, pytest.raises(TileError, match=r"chunks? .*can't be read"):
        slide.read_region((0, 0), (64, 64))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"filters": [{"id": name}]}, f"encoded with '{name}'")
        for name in ("pickle", "json2", "msgpack2", "vlen-bytes", "categorize")
    ]
    + [
        ({"filters": [{"id": "lzma"}], "compressor": {"id": "zlib"}}, "more than once"),
        ({"filters": [{"id": "zlib"}, {"id": "delta", "dtype": "|u1"}]}, "more than once"),
    ],
)
def test_unsafe_codecs_are_refused(tmp_path, said, words):
    with pytest.raises(UnsupportedSlideError, match=words):
        open_slide(bare(tmp_path, b"", **said))


def test_compressed_shards_are_refused(tmp_path):
    """Decompression of whole shards could not be limited to a number of bytes."""
    array = pytest.importorskip("zarr").create_array(
        tmp_path, shape=(64, 64), chunks=(16, 16), shards=(64, 64), dtype="uint8", zarr_format=3
    )
    array[...] = 1
    path = tmp_path / "zarr.json"
    document = json.loads(path.read_text())
    document["codecs"].append({"name": "zstd", "configuration": {"level": 1, "checksum": False}})
    path.write_text(json.dumps(document))
    with pytest.raises(UnsupportedSlideError, match="its shards are compressed"):
        open_slide(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes on this system")
@pytest.mark.parametrize("order", ["C", "F"])
def test_pipe_in_place_of_a_chunk(tmp_path, order):
    path = bare(tmp_path, None, order=order)
    os.mkfifo(path / "0.0")
    with open_slide(path) as slide, pytest.raises(TileError, match="regular file"):
        slide.read_region((0, 0), (64, 64))
