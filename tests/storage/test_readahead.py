import io

import numpy as np
import pytest
import tifffile

from napari_wsigpu.model.errors import CorruptSlideError, SlideReadError
from napari_wsigpu.model.limits import limits
from napari_wsigpu.storage.memory import MemorySource
from napari_wsigpu.storage.remote.readahead import FIRST_STEP, GROWTH, TAIL, ReadAheadFile

SIZE = 20 << 20
CONTENT = np.random.default_rng(0).bytes(SIZE)


class Source(MemorySource):
    """Records the ranges that are read ahead, which are longer than a parser's reads."""

    def __init__(self, data):
        super().__init__(data)
        self.ahead = []
        self.error = None

    def read(self, ranges):
        if self.error:
            raise self.error
        self.ahead += [wanted for wanted in ranges if wanted[1] >= FIRST_STEP]
        return super().read(ranges)


@pytest.fixture
def source():
    return Source(CONTENT)


@pytest.fixture
def file(source):
    return ReadAheadFile(source, SIZE, "x.svs")


def take(file, position, length):
    file.seek(position)
    data = file.read(length)
    assert data == CONTENT[position : position + length]
    assert file.tell() == position + len(data)


def test_is_a_file(file):
    assert file.readable()
    assert file.seekable()
    assert not file.writable()
    assert file.seek(-10, io.SEEK_END) == SIZE - 10
    assert file.read(20) == CONTENT[-10:]
    assert file.read(20) == b""
    assert file.seek(5) == 5
    assert file.seek(5, io.SEEK_CUR) == 10
    with pytest.raises(OSError, match="negative"):
        file.seek(-1)
    file.seek(SIZE + 10)
    assert file.read(1) == b""


def test_read_ahead_grows(file, source):
    for position in range(0, 3 << 20, 50_000):
        take(file, position, 50_000)
    assert [length for _, length in source.ahead] == [
        FIRST_STEP,
        FIRST_STEP * GROWTH,
        FIRST_STEP * GROWTH**2,
        FIRST_STEP * GROWTH**3,
    ]


def test_first_jump_also_reads_the_end(file, source):
    take(file, 0, 8)
    for position in (10 << 20, 15 << 20, SIZE - TAIL, SIZE - 100):
        take(file, position, 100)
    assert source.ahead == [
        (0, FIRST_STEP),
        (10 << 20, FIRST_STEP),
        (SIZE - TAIL, TAIL),
        (15 << 20, FIRST_STEP),
    ]


def test_long_value_is_read_with_the_next(file, source):
    take(file, 0, 8)
    take(file, 5 << 20, 3 << 20)
    assert source.ahead[1] == (5 << 20, 6 << 20)


def test_an_endless_header_ends(file, monkeypatch):
    monkeypatch.setattr(limits, "header_bytes", 8 << 20)
    for position in range(0, 8 << 20, 2 * FIRST_STEP):
        take(file, position, 8)
    file.seek(15 << 20)
    with pytest.raises(CorruptSlideError, match=r"of 'x\.svs' is larger .* limit is 8.389 MB"):
        file.read(2 << 20)
    assert isinstance(file.failure, CorruptSlideError)


def test_remembers_the_first_failure(file, source):
    take(file, 0, 8)
    source.error = SlideReadError("one")
    for _ in range(2):
        with pytest.raises(SlideReadError):
            file.read(8)
        source.error = SlideReadError("two")
    assert str(file.failure) == "one"


def test_parsers_read_it(tmp_path):
    path = tmp_path / "x.tif"
    pixels = np.random.default_rng(1).integers(0, 255, (3, 500, 400), np.uint8)
    tifffile.imwrite(path, pixels, tile=(64, 64), compression="zlib")
    data = path.read_bytes()
    file = ReadAheadFile(MemorySource(data), len(data), "x.tif")
    np.testing.assert_array_equal(tifffile.imread(file), pixels)
