import numpy as np
import pytest

from napari_wsigpu.model.layout import SlideFile
from napari_wsigpu.storage.file_source import FileSource
from napari_wsigpu.storage.memory import MemorySource

DATA = bytes(range(200))


@pytest.fixture
def file_source(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(DATA)
    source = FileSource(SlideFile.of(str(path), path.stat()))
    yield source
    source.close()


@pytest.mark.parametrize(
    "ranges", [[], [(0, 200)], [(150, 20), (3, 9), (3, 9)], [(190, 50), (200, 1), (900, 9)]]
)
def test_remote_reads_equal_file_reads(file_source, ranges):
    source = MemorySource(DATA)
    assert list(map(bytes, source.read(ranges))) == list(map(bytes, file_source.read(ranges)))
    offsets, lengths = np.array(ranges, np.int64).reshape(-1, 2).T
    joined = []
    for each in (source, file_source):
        found = each.read_joined(offsets, lengths.copy())
        places = zip(found.starts.tolist(), found.lengths.tolist(), strict=True)
        joined.append([bytes(found.buffer[start : start + length]) for start, length in places])
    assert joined[0] == joined[1]


def test_reads_after_release():
    source = MemorySource(DATA)
    source.release()
    source.close()
    assert bytes(source.read([(1, 2)])[0]) == DATA[1:3]
