"""Tiles that are joined while they are read become the same stacks as in memory."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_wsigpu import native
from napari_wsigpu.codecs.decoder import EncodedBatch
from napari_wsigpu.gpu.device.switching import Turn
from napari_wsigpu.gpu.jpeg.joining import StackedBatch, cut
from napari_wsigpu.gpu.jpeg.jpeg_stacks import JpegStreams
from napari_wsigpu.model.layout import SlideFile, TileGrid
from napari_wsigpu.storage.file_source import FileSource
from napari_wsigpu.storage.files_source import FilesSource
from napari_wsigpu.storage.memory import MemorySource
from tests.fakes.host_device import level_of
from tests.gpu.test_codestream import Streams, batch_of, inserted, preparer_of, workspace
from tests.gpu.test_stack import AT_ONCE, TILES, finished, indices_of, stack_of
from tests.writers import slides

SHARED = slides.split_tables(TILES[0])[0]
SHORT = [slides.split_tables(tile)[1] for tile in TILES]
BACKGROUND = 255

pytestmark = pytest.mark.skipif(native.core is None, reason="needs the native core")


class Worker:
    """Buffers of a worker whose device decodes a number of JPEGs at once."""

    def __init__(self):
        self.device = workspace().device
        self.given = []
        self.turn = Turn()

    def acquire_buffer(self, size):
        return memoryview(bytearray(size))

    def release_buffer(self, buffer):
        self.given.append(buffer)


class Slide:
    """A level in a file with gaps between tiles, and what makes its code streams."""

    def __init__(self, path, tiles, gaps=None, order=None, files=1):
        offsets = np.zeros(len(tiles), np.int64)
        parts = [b""] * files
        for number, index in enumerate(order or range(len(tiles))):
            file = number * files // len(tiles)
            parts[file] += b"between!"[:1] * (0 if gaps is None else gaps[number])
            offsets[index] = len(parts[file]) + sum(map(len, parts[:file]))
            parts[file] += tiles[index]
        paths = [path.with_suffix(f".{file}") for file in range(files)]
        for one, data in zip(paths, parts, strict=True):
            one.write_bytes(data)
        described = [SlideFile.of(str(one), one.stat()) for one in paths]
        self.source = FileSource(described[0]) if files == 1 else FilesSource(described)
        lengths = np.array([len(tile) for tile in tiles])
        grid = TileGrid(48, 64, offsets.reshape(1, -1, 1), lengths.reshape(1, -1, 1))
        plain = level_of(jpeg_tables=(SHARED,), size=(48 * len(tiles), 64))
        self.level = replace(plain, grid=grid)
        self.preparer = preparer_of(self.level)
        self.worker = Worker()
        self.tiles = np.stack([np.arange(len(tiles)), np.zeros(len(tiles), np.int64)], 1)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.source.close()

    def read(self, source=None):
        source = source or self.source
        return self.preparer.read_stacked(source, self.level, self.tiles, BACKGROUND, self.worker)

    def look(self, tiles=SHORT[:1]):
        """Prepare another batch, whose header is then the common one."""
        self.preparer.prepare(batch_of(self.level, tiles), len(tiles), workspace())


def segments_of(batch):
    return [bytes(batch[index].segments[0]) for index in range(len(batch))]


def expected(group, count):
    """Return the stream of a group of tiles."""
    tiles = [SHARED[:-2] + SHORT[index][2:] for index in group]
    return stack_of(tiles) if count > AT_ONCE else tiles[0]


def check(slide, batch):
    """Compare a batch and its code streams with the tiles."""
    count = len(batch)
    assert isinstance(batch, StackedBatch)
    work = workspace(Streams())
    prepared = slide.preparer.prepare(batch, count, work)
    assert indices_of(prepared) == list(range(count))
    assert len(work.encoded) == 0
    for group, stream in zip(prepared.groups, work.streams.found, strict=True):
        assert stream == expected(group, count)
    assert segments_of(batch) == SHORT[:count]
    chosen = list(range(0, count, 3))
    part = batch.part(chosen)
    assert type(part) is EncodedBatch
    assert segments_of(part) == [SHORT[index] for index in chosen]
    for row in finished(prepared, [True] * len(prepared.groups), np.arange(count)):
        begin, length = int(row["scan"]) - batch.address, int(row["length"])
        if count > AT_ONCE:
            scan = SHORT[row["target"]]
            assert scan.endswith(bytes(batch.view[begin : begin + length]) + b"\xff\xd9")
            assert length > 20


class TestStackedReads:
    @pytest.mark.parametrize("count", [15, 29, 45, 60])
    def test_joined_reads_give_the_same_streams_without_copies(self, tmp_path, count):
        with Slide(tmp_path / "tiles", SHORT[:count]) as slide:
            slide.look()
            check(slide, slide.read())

    @settings(max_examples=40, deadline=None)
    @given(
        gaps=st.lists(st.sampled_from([0, 1, 700, 70_000]), min_size=AT_ONCE + 1, max_size=60),
        files=st.integers(1, 3),
        backwards=st.booleans(),
    )
    def test_scattered_tiles(self, tmp_path_factory, gaps, files, backwards):
        path = tmp_path_factory.getbasetemp() / "apart"
        order = list(range(len(gaps)))[:: -1 if backwards else 1]
        with Slide(path, SHORT[: len(gaps)], gaps, order, files) as slide:
            slide.look()
            check(slide, slide.read())

    @pytest.mark.parametrize(
        "why", ["unknown", "various", "other", "no end", "short", "source", "alone"]
    )
    def test_tiles_that_cannot_be_joined_while_read(self, tmp_path, why):
        tiles = SHORT[: AT_ONCE if why == "alone" else 30]
        if why == "no end":
            tiles[20] = tiles[20][:-2] + b"\0\0"
        if why == "short":
            tiles[20] = b""
        if why == "other":
            tiles[20] = SHORT[20][:2] + b"\xff\xfe\0\4ok" + SHORT[20][2:]
        with Slide(tmp_path / "tiles", tiles) as slide:
            if why == "various":
                slide.look([SHORT[0], SHORT[1][:2] + b"\xff\xfe\0\4ok" + SHORT[1][2:]])
            elif why != "unknown":
                slide.look()
            for _ in range(2):
                assert slide.read(MemorySource(b"") if why == "source" else None) is None
                # The buffer is released, and there is no second attempt.
                assert len(slide.worker.given) == (why in ("other", "no end"))


def test_joined_in_memory(tmp_path):
    """With a known header, and without the core, too."""
    for core in (native.core, None):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(native, "core", core)
            level = level_of(jpeg_tables=(SHARED,))
            preparer = preparer_of(level)
            assert isinstance(preparer, JpegStreams)
            for known in (False, True):
                if known and core is not None:  # Python does not examine each tile
                    patched.setattr(preparer, "_by_header", None)
                work = workspace(Streams())
                prepared = preparer.prepare(batch_of(level, SHORT), 60, work)
                assert indices_of(prepared) == list(range(60))
                for group, stream in zip(prepared.groups, work.streams.found, strict=True):
                    assert stream == expected(group, 60)


def test_headers_that_are_too_long_for_the_core():
    comment = b"\xff\xfe\x13\x88" + bytes(5000 - 2)
    level, tiles = level_of(), [inserted(tile, 2, comment) for tile in TILES]
    preparer = preparer_of(level)
    for _ in range(2):
        work = workspace(Streams())
        prepared = preparer.prepare(batch_of(level, tiles), 60, work)
        assert indices_of(prepared) == list(range(60))
        for group, stream in zip(prepared.groups, work.streams.found, strict=True):
            assert stream == stack_of([tiles[index] for index in group])


@given(count=st.integers(1, 500), most=st.integers(1, 60))
def test_cut(count, most):
    found = cut(count, most)
    assert found[0] == 0
    assert found[-1] == count
    sizes = np.diff(found)
    assert 0 < sizes.min() <= sizes.max() <= min(most, sizes.min() + 1)
