import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu.model.errors import SlideChangedError, SlideClosedError
from napari_wsigpu.model.layout import SlideFile
from napari_wsigpu.storage.files_source import FilesSource

SIZES = (3_000, 1, 70_000, 250_000)
CONTENTS = [np.random.default_rng(size).bytes(size) for size in SIZES]
STARTS = np.cumsum((0, *SIZES[:-1])).tolist()

RANGES = st.lists(st.tuples(st.integers(0, 330_000), st.integers(0, 90_000)), max_size=12)


@pytest.fixture
def files(tmp_path):
    found = []
    for index, content in enumerate(CONTENTS):
        path = tmp_path / f"{index}.dcm"
        path.write_bytes(content)
        found.append(SlideFile.of(str(path), path.stat()))
    return found


@pytest.fixture
def source(files):
    source = FilesSource(files)
    yield source
    source.close()


def expected(offset, length):
    """Return the bytes of a range, up to the end of the file in which it starts."""
    owner = sum(start <= offset for start in STARTS) - 1
    begin = offset - STARTS[owner]
    return CONTENTS[owner][begin : begin + length]


@given(RANGES)
def test_read(source, ranges):
    assert [bytes(view) for view in source.read(ranges)] == [expected(*each) for each in ranges]


@given(RANGES)
def test_read_joined(source, ranges):
    offsets, lengths = np.array(ranges, np.int64).reshape(-1, 2).T
    joined = source.read_joined(offsets.copy(), lengths.copy(), lambda size: bytearray(size + 7))
    assert not joined.reasons
    parts = list(zip(joined.starts.tolist(), joined.lengths.tolist(), strict=True))
    assert [bytes(joined.buffer[start : start + length]) for start, length in parts] == [
        expected(*each) for each in ranges
    ]


@given(RANGES)
def test_fills(source, ranges):
    found = []
    for fill in source.fills(ranges):
        room = bytearray(90_000)
        found.append(bytes(room[: fill(memoryview(room))]))
    assert found == [expected(*each) for each in ranges]


def test_only_needed_files_are_opened(source, files, handles_of):
    source.read([(STARTS[2] + 5, 10), (STARTS[2] + 50, 10)])
    assert [handles_of(Path(each.path)) for each in files] == [0, 0, 1, 0]
    source.release()
    assert [handles_of(Path(each.path)) for each in files] == [0, 0, 0, 0]
    assert bytes(source.read([(0, 2)])[0]) == CONTENTS[0][:2]


def test_changed_file_is_detected_when_read(source, files):
    os.utime(files[1].path, ns=(0, 0))
    source.read([(0, 10)])
    with pytest.raises(SlideChangedError, match=r"1\.dcm"):
        source.read([(0, 10), (STARTS[1], 1)])


def test_closed_for_good(source):
    source.close()
    with pytest.raises(SlideClosedError):
        source.read([(0, 10)])
