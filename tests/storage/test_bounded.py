"""`BoundedReader` reads like any other file, but allocates no memory beyond the file's size."""

import io
import tracemalloc

import pytest

from napari_wsigpu.storage.bounded import SMALL, BoundedReader

DATA = bytes(range(256)) * (SMALL // 100)


@pytest.mark.parametrize("size", [-1, None, 0, 7, SMALL, SMALL + 1, len(DATA), 1 << 40])
@pytest.mark.parametrize("place", [0, 5, len(DATA) - 3, len(DATA), len(DATA) + 9])
def test_it_reads_as_any_file(size, place):
    file, plain = BoundedReader(io.BytesIO(DATA)), io.BytesIO(DATA)
    for each in (file, plain):
        each.seek(place)
    assert file.read(size) == plain.read(size)
    assert file.tell() == plain.tell()
    assert file.read(3) == plain.read(3)


def test_allocates_no_memory_beyond_the_file():
    file = BoundedReader(io.BytesIO(b"short"))
    tracemalloc.start()
    try:
        assert file.read(1 << 32) == b"short"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
