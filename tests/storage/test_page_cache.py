"""Reads of what the system holds in memory."""

import os

import numpy as np
import pytest

from napari_wsigpu.storage import page_cache
from napari_wsigpu.storage.page_cache import read_rows

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def descriptor(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    file = os.open(path, os.O_RDONLY)
    yield file
    os.close(file)


def test_rows_are_filled_or_named(descriptor):
    offsets, lengths = [7, 0, len(CONTENT) - 10, 300], [100, 1, 50, 0]
    rows = np.zeros((4, 128), np.uint8)[:, 3:]
    left = read_rows(descriptor, offsets, lengths, rows)
    assert 2 in left or page_cache.PREADV2 is None  # the file ends before
    for index in {0, 1, 3} - set(left):
        row = rows[index].tobytes()
        length = lengths[index]
        assert row[:length] == CONTENT[offsets[index] : offsets[index] + length]
        assert not any(row[length:])


def test_where_the_system_has_no_such_call(descriptor, monkeypatch):
    monkeypatch.setattr(page_cache, "PREADV2", None)
    assert read_rows(descriptor, [0, 5], [3, 4], np.zeros((2, 8), np.uint8)) == [0, 1]
