import contextlib
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu import native
from napari_wsigpu.model.errors import (
    SlideChangedError,
    SlideClosedError,
    SlideError,
    SlideNotFoundError,
    SlidePermissionError,
)
from napari_wsigpu.model.layout import SlideFile
from napari_wsigpu.storage import file_source
from napari_wsigpu.storage.file_source import MERGE_GAP, FileSource

CONTENT = np.random.default_rng(0).bytes(300_000)

SOME_RANGES = st.lists(
    st.tuples(
        st.integers(0, 310_000),
        st.one_of(st.integers(0, 50), st.integers(0, 320_000)),
    ),
    max_size=12,
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "slide.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(params=["pread", "seek"])
def source(path, request, monkeypatch):
    """A source that uses `pread`, and one for systems without it."""
    if request.param == "seek":
        monkeypatch.delattr(os, "pread", raising=False)
        monkeypatch.delattr(os, "preadv", raising=False)
    elif not hasattr(os, "pread"):
        pytest.skip("this system has no pread")
    source = source_of(path)
    yield source
    source.close()


def expected(ranges):
    return [CONTENT[offset : offset + length] for offset, length in ranges]


class TestRead:
    @given(ranges=SOME_RANGES)
    def test_every_byte_is_delivered(self, source, ranges):
        assert [bytes(view) for view in source.read(ranges)] == expected(ranges)

    @given(SOME_RANGES, st.integers(0, 90_000))
    def test_fills_return_every_byte(self, source, ranges, size):
        found = []
        for fill in source.fills(ranges):
            room = bytearray(size)
            count = fill(memoryview(room))
            assert not any(room[count:])
            found.append(bytes(room[:count]))
        assert found == [data[:size] for data in expected(ranges)]

    @pytest.mark.parametrize(
        "item", [(299_990, 100), (300_000, 1), (10**15, 10), (0, 10**15), (5, 0), (0, 0)]
    )
    def test_reads_end_at_end_of_file(self, source, item):
        assert bytes(source.read([item])[0]) == CONTENT[item[0] : sum(item)]

    def test_a_range_before_the_file_is_empty(self, source):
        assert [bytes(view) for view in source.read([(-5, 10)])] == [b""]

    def test_no_ranges_no_data(self, source):
        assert source.read([]) == []

    def test_partial_reads_are_completed(self, source, monkeypatch):
        if hasattr(os, "preadv"):
            preadv = os.preadv
            monkeypatch.setattr(
                os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:999]], at)
            )
        ranges = [(10, 5000), (290_000, 20_000)]
        assert [bytes(view) for view in source.read(ranges)] == expected(ranges)

    def test_many_threads(self, source):
        wrong = []

        def work(seed):
            rng = np.random.default_rng(seed)
            for _ in range(60):
                ranges = [
                    (int(offset), int(length))
                    for offset, length in rng.integers(0, (300_000, 9000), (5, 2))
                ]
                if [bytes(view) for view in source.read(ranges)] != expected(ranges):
                    wrong.append(ranges)
                if rng.random() < 0.1:
                    source.release()

        run_threads(work, 8)
        assert wrong == []


class TestHandle:
    def test_it_is_opened_by_the_first_read_and_released(self, path, handles_of):
        source = source_of(path)
        assert handles_of(path) == 0
        for _ in range(2):
            source.read([(0, 5)])
            source.read([(100_000, 5)])
            assert handles_of(path) == 1
            source.release()
            assert handles_of(path) == 0
        source.close()

    def test_close_is_for_good_and_may_be_repeated(self, path, handles_of):
        source = source_of(path)
        source.read([(0, 5)])
        source.close()
        source.close()
        assert handles_of(path) == 0
        with pytest.raises(SlideClosedError, match=r"slide\.bin"):
            source.read([(0, 5)])

    @pytest.mark.skipif(not hasattr(os, "preadv"), reason="this system has no preadv")
    @pytest.mark.parametrize("end", ["release", "close"])
    def test_close_waits_for_reads_in_progress(self, path, monkeypatch, end):
        source = source_of(path)
        reading, go_on = threading.Event(), threading.Event()
        preadv = os.preadv

        def slow(*arguments):
            reading.set()
            assert go_on.wait(10)
            return preadv(*arguments)

        monkeypatch.setattr(os, "preadv", slow)
        found = []
        reader = threading.Thread(target=lambda: found.extend(source.read([(7, 9)])))
        reader.start()
        assert reading.wait(10)
        ender = threading.Thread(target=getattr(source, end))
        ender.start()
        ender.join(0.1)
        assert ender.is_alive()
        go_on.set()
        ender.join(10)
        reader.join(10)
        assert not ender.is_alive()
        assert bytes(found[0]) == CONTENT[7:16]
        source.close()


class TestChangedFiles:
    def test_another_file_of_the_same_size_is_noticed(self, path, handles_of):
        source = source_of(path)
        source.read([(0, 5)])
        source.release()
        other = path.with_name("other.bin")
        other.write_bytes(CONTENT[::-1])
        os.utime(other, ns=(0, 0))
        other.replace(path)
        with pytest.raises(SlideChangedError, match=r"slide\.bin.*changed"):
            source.read([(0, 5)])
        assert handles_of(path) == 0
        source.close()

    def test_a_file_rewritten_while_open_is_noticed(self, path):
        source = source_of(path)
        source.read([(0, 5)])
        with path.open("r+b") as file:
            file.write(b"other")
        os.utime(path, ns=(0, 0))
        with pytest.raises(SlideChangedError, match=r"slide\.bin.*changed"):
            source.read([(0, 5)])
        source.close()

    @pytest.mark.parametrize("content", [CONTENT + b"x", CONTENT[:-1], b""])
    def test_another_size_is_noticed(self, path, content, handles_of):
        source = source_of(path)
        source.read([(0, 5)])
        source.release()
        path.write_bytes(content)
        with pytest.raises(SlideChangedError, match=r"slide\.bin.*changed"):
            source.read([(0, 5)])
        assert handles_of(path) == 0
        source.close()

    def test_fills_detect_a_changed_file(self, path):
        source = source_of(path)
        [fill] = source.fills([(0, 5)])
        room = bytearray(5)
        assert fill(memoryview(room)) == 5
        os.utime(path, ns=(0, 0))
        with pytest.raises(SlideChangedError, match=r"slide\.bin.*changed"):
            fill(memoryview(room))
        source.close()
        with pytest.raises(SlideClosedError):
            fill(memoryview(room))

    def test_a_deleted_file_is_read_on_or_missed(self, path):
        source = source_of(path)
        source.read([(0, 5)])
        try:
            path.unlink()
        except PermissionError:
            source.close()
            pytest.skip("this system keeps open files from being deleted")
        with contextlib.suppress(SlideError):
            assert bytes(source.read([(0, 5)])[0]) == CONTENT[:5]
        source.release()
        with pytest.raises(SlideNotFoundError, match=r"slide\.bin"):
            source.read([(0, 5)])
        source.close()

    @pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() == 0, reason="this user may read everything"
    )
    def test_no_permission(self, path):
        path.chmod(0)
        source = source_of(path)
        with pytest.raises(SlidePermissionError, match=r"slide\.bin"):
            source.read([(0, 5)])
        source.close()

    def test_a_truncated_open_file_is_noticed(self, path):
        source = source_of(path)
        source.read([(0, 5)])
        with path.open("r+b") as file:
            file.truncate(1000)
        with pytest.raises(SlideChangedError, match=r"slide\.bin.*changed"):
            source.read([(900, 500)])
        source.close()


def source_of(path):
    return FileSource(SlideFile.of(str(path), path.stat()))


def run_threads(work, count):
    errors = []

    def guarded(seed):
        try:
            work(seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


class TestManyRanges:
    """Many ranges, read by the native core or by Python."""

    @pytest.fixture(params=["core", "Python"])
    def reading(self, request, monkeypatch):
        if request.param == "Python":
            monkeypatch.setattr(native, "core", None)

    @pytest.fixture
    def apart(self, tmp_path):
        """A file, and distant ranges in it."""
        content = np.random.default_rng(1).bytes(40 * 2 * MERGE_GAP)
        path = tmp_path / "large.bin"
        path.write_bytes(content)
        return path, content, np.arange(40)[::-1] * 2 * MERGE_GAP, np.full(40, 1000)

    def test_are_read_into_one_buffer(self, apart, reading):
        path, content, offsets, lengths = apart
        source = FileSource(SlideFile.of(str(path), path.stat()))
        found = source.read_joined(offsets, lengths)
        for start, length, offset in zip(found.starts, found.lengths, offsets, strict=True):
            assert found.buffer[start : start + length] == content[offset : offset + length]
        source.close()

    def test_large_ones_are_read_in_pieces(self, apart, reading, monkeypatch):
        path, content, offsets, _ = apart
        monkeypatch.setattr(file_source, "PIECE", 100_000)
        source = FileSource(SlideFile.of(str(path), path.stat()))
        lengths = np.array([1, 99_999, 100_000, 100_001, 250_000, 399_999, 10 * MERGE_GAP])
        found = source.read_joined(offsets[::6].copy(), lengths)
        for start, length, offset in zip(found.starts, found.lengths, offsets[::6], strict=True):
            assert found.buffer[start : start + length] == content[offset : offset + length]
        source.close()

    def test_truncated_file(self, apart, reading):
        path, content, offsets, lengths = apart
        source = FileSource(SlideFile.of(str(path), path.stat()))
        source.read_joined(offsets, lengths)
        path.write_bytes(content[:100_000])
        with pytest.raises(SlideChangedError):
            source.read_joined(offsets, lengths)
        source.close()
