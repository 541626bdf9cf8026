"""Many reads by one call of the system."""

import os
import signal
import sys
import threading

import numpy as np
import pytest

from napari_wsigpu.storage import listed_reads
from napari_wsigpu.storage.listed_reads import read_rows

CONTENT = bytes(range(256)) * 40
ON_LINUX = pytest.mark.skipif(listed_reads.CALLS is None, reason="the system has no such calls")


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
    assert left == [2] or listed_reads.CALLS is None  # the file ends before
    for index in {0, 1, 3} - set(left):
        row = rows[index].tobytes()
        length = lengths[index]
        assert row[:length] == CONTENT[offsets[index] : offsets[index] + length]
        assert not any(row[length:])


def test_what_is_no_file_is_left(tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY) if sys.platform != "win32" else -1
    assert read_rows(folder, [0, 5], [3, 4], np.zeros((2, 8), np.uint8)) == [0, 1]
    if folder >= 0:
        os.close(folder)


def test_where_the_system_has_no_such_call(descriptor, monkeypatch):
    monkeypatch.setattr(listed_reads, "CALLS", None)
    assert read_rows(descriptor, [0, 5], [3, 4], np.zeros((2, 8), np.uint8)) == [0, 1]


@ON_LINUX
def test_a_fork_reads_in_another_way(descriptor):
    rows = np.zeros((1, 8), np.uint8)
    assert read_rows(descriptor, [0], [8], rows) == []
    child = os.fork()
    if not child:
        os._exit(read_rows(descriptor, [0], [8], rows) == [0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@ON_LINUX
def test_signals_wait_until_all_is_read(tmp_path):
    """Were they to end the call, the system would write to memory that is gone."""
    content = np.random.default_rng(0).integers(0, 256, (400, 32 << 10), np.uint8)
    (tmp_path / "file").write_bytes(content)
    came, over, main = [], threading.Event(), threading.main_thread().ident
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))

    def send():
        while not over.wait(1e-5):
            signal.pthread_kill(main, signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with (tmp_path / "file").open("rb") as file:
            for _ in range(4):
                rows = np.zeros_like(content)
                lengths = [content.shape[1]] * len(content)
                offsets = [number * length for number, length in enumerate(lengths)]
                assert read_rows(file.fileno(), offsets, lengths, rows) == []
                assert np.array_equal(rows, content)
    finally:
        over.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert came
