"""Stacks put together where their tiles lie are those that are put together elsewhere."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_wsigpu.codecs.decoder import EncodedBatch
from napari_wsigpu.gpu.jpeg.joining import MOST_FILL, cut
from napari_wsigpu.gpu.jpeg.stack import MARGIN
from napari_wsigpu.model.layout import SlideFile
from napari_wsigpu.storage.file import FileSource
from tests.fakes.host_device import level_of
from tests.gpu.test_codestream import Streams, maker_of, workspace
from tests.gpu.test_stack import AT_ONCE, TILES, finished, indices_of, stack_of
from tests.writers import slides

SHARED = slides.split_tables(TILES[0])[0]
SHORT = [slides.split_tables(tile)[1] for tile in TILES]
BACKGROUND = 255


def read(path, tiles, gaps, order=None, shared=True, new_buffer=bytearray):
    """Write tiles to a file, with other bytes before each, and read them as a batch."""
    offsets = np.zeros(len(tiles), np.int64)
    data = b""
    for index, gap in zip(order or range(len(tiles)), gaps, strict=True):
        data += b"between!"[:1] * gap
        offsets[index] = len(data)
        data += tiles[index]
    path.write_bytes(data)
    source = FileSource(SlideFile.of(str(path), path.stat()))
    level = level_of(jpeg_tables=(SHARED,))
    maker = maker_of(level)
    lengths = np.array([len(tile) for tile in tiles])
    spacing = maker.spacing(len(tiles), AT_ONCE)
    found = source.read_joined(offsets, lengths.copy(), new_buffer, spacing)
    source.close()
    np.testing.assert_array_equal(found.lengths, lengths)
    places = np.stack([np.arange(len(tiles)), np.zeros(len(tiles), np.int64)], 1)
    present = np.ones((1, len(tiles)), bool)
    batch = EncodedBatch(
        level,
        places,
        found.buffer,
        found.starts[None],
        found.lengths[None],
        present,
        BACKGROUND,
        shared=shared,
    )
    maker.prepare(batch_of_one(level), 1, workspace())  # the header is known from now on
    return maker, batch


def batch_of_one(level):
    buffer = bytearray(SHORT[0])
    size = np.array([[len(buffer)]])
    nowhere, there = np.zeros((1, 2), np.int64), np.ones((1, 1), bool)
    return EncodedBatch(level, nowhere, buffer, 0 * size, size, there, BACKGROUND)


def segments_of(batch):
    return [bytes(batch[index].segments[0]) for index in range(len(batch))]


def whole(index):
    return SHARED[:-2] + SHORT[index][2:]


def expected(group, count):
    """Return the stream of a group of tiles, of so many in all."""
    tiles = [whole(index) for index in group]
    return stack_of(tiles) if count > AT_ONCE else tiles[0]


def without_fill(stream):
    return re.sub(rb"\xff+(\xff[\xd0-\xd7])", rb"\1", stream)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiles"


class TestInPlace:
    @pytest.mark.parametrize("count", [2, 9, 14, 15, 29, 45, 60])
    def test_the_same_streams_and_no_byte_is_copied(self, path, count):
        maker, batch = read(path, SHORT[:count], [0] * count)
        work = workspace(Streams())
        prepared = maker.prepare(batch, count, work)
        assert indices_of(prepared) == list(range(count))
        assert len(work.encoded) == 0
        for group, stream in zip(prepared.groups, work.streams.found, strict=True):
            assert without_fill(stream) == expected(group, len(batch))
        assert segments_of(batch) == SHORT[:count]

    @settings(max_examples=60, deadline=None)
    @given(
        gaps=st.lists(
            st.sampled_from([0, 1, 2, 7, MARGIN, MOST_FILL - 30, MOST_FILL, 70_000]),
            min_size=1,
            max_size=60,
        )
    )
    def test_tiles_that_lie_apart(self, tmp_path_factory, gaps):
        path = tmp_path_factory.getbasetemp() / "apart"
        maker, batch = read(path, SHORT[: len(gaps)], gaps)
        work = workspace(Streams())
        prepared = maker.prepare(batch, len(gaps), work)
        for group, stream in zip(prepared.groups, work.streams.found, strict=True):
            assert without_fill(stream) == expected(group, len(batch))
        assert segments_of(batch) == SHORT[: len(gaps)]

    def test_scans_are_where_they_were(self, path):
        maker, batch = read(path, SHORT, [0] * 60)
        work = workspace(Streams())
        prepared = maker.prepare(batch, 60, work)
        for row in finished(prepared, [True] * len(prepared.groups), np.arange(60)):
            begin, length = int(row["scan"]) - batch.address, int(row["length"])
            scan = SHORT[row["target"]]
            assert scan.endswith(bytes(batch.view[begin : begin + length]) + b"\xff\xd9")
            assert length > 20

    @pytest.mark.parametrize("why", ["order", "not shared", "share", "the same bytes", "no fill"])
    def test_where_there_is_no_room_they_are_copied(self, path, why):
        order = list(range(30))[::-1] if why == "order" else None
        maker, batch = read(path, SHORT[:30], [0] * 30, order, shared=why != "not shared")
        if why == "the same bytes":
            batch.starts[0, 4], batch.lengths[0, 4] = batch.starts[0, 3], batch.lengths[0, 3]
        stored = segments_of(batch)
        before = bytes(batch.view)
        work = workspace(Streams())
        work.device.jpegs_filled = why != "no fill"
        count = 29 if why == "share" else 30
        prepared = maker.prepare(batch, count, work)
        assert indices_of(prepared) == list(range(count))
        assert len(work.encoded) > 0
        assert bytes(batch.view) == before
        assert segments_of(batch) == stored
        for stream in work.streams.found:
            assert without_fill(stream) == stream

    def test_a_tile_that_is_not_like_the_others_changes_nothing(self, path):
        tiles = [*SHORT[:20], SHORT[20][:-2] + b"\0\0", *SHORT[21:30]]
        maker, batch = read(path, tiles, [0] * 30)
        before = bytes(batch.view)
        prepared = maker.prepare(batch, 30, workspace(Streams()))
        assert indices_of(prepared) == [index for index in range(30) if index != 20]
        assert bytes(batch.view) == before

    def test_a_buffer_of_no_more_than_was_asked_for(self, path):
        sizes = []

        def new_buffer(size):
            sizes.append(size)
            return memoryview(bytearray(size))

        maker, batch = read(path, SHORT, [0] * 60, new_buffer=new_buffer)
        maker.prepare(batch, 60, workspace(Streams()))
        assert len(batch.view) == sizes[0]
        assert sizes[0] < sum(map(len, SHORT)) + (len(cut(60, 5)) + 1) * MARGIN
        assert segments_of(batch) == SHORT


@given(count=st.integers(1, 500), most=st.integers(1, 60))
def test_cut(count, most):
    found = cut(count, most)
    assert found[0] == 0
    assert found[-1] == count
    sizes = np.diff(found)
    assert 0 < sizes.min() <= sizes.max() <= min(most, sizes.min() + 1)
