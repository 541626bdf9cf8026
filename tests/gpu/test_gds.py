import logging
import os
import sys
import threading
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu.gpu.transfer import gds
from napari_wsigpu.gpu.transfer.gds import Loader, Transfer
from napari_wsigpu.model.errors import SlideChangedError, SlideClosedError, SlideReadError
from napari_wsigpu.model.layout import SlideFile
from napari_wsigpu.storage.file_reads import PAGE, FileReads
from napari_wsigpu.storage.file_source import FileSource, Run, join_ranges
from tests.fakes.host_device import HostDevice

CONTENT = np.random.default_rng(0).bytes(100_000)
END = len(CONTENT)
RANGES = st.lists(st.tuples(st.integers(-5, 110_000), st.integers(-3, 30_000)), max_size=9)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "slide.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def source(path):
    source = source_of(path)
    yield source
    source.close()


def source_of(path):
    return FileSource(SlideFile.of(str(path), path.stat()))


class FakeKvikio:
    """A substitute for kvikio that reads to host memory and can fail at several points."""

    __version__ = "26.10.0"

    def __init__(self):
        self.fails = ""
        self.reads = []
        self.open = 0
        self.threads = 1

    def CuFile(self, path, flags):  # noqa: N802
        if self.fails == "open":
            raise RuntimeError("cuFileHandleRegister failed")
        assert flags == "r"
        return FakeFile(self, path)

    def set(self, options):
        self.threads = options["num_threads"]


class FakeFile:
    def __init__(self, kvikio, path):
        self.kvikio, self.path = kvikio, path

    def __enter__(self):
        self.kvikio.open += 1
        return self

    def __exit__(self, *error):
        self.kvikio.open -= 1

    def pread(self, buffer, size, offset):
        if self.kvikio.fails == "submit" and self.kvikio.reads:
            raise RuntimeError("no thread")
        self.kvikio.reads.append((buffer.ctypes.data, size, offset))
        return FakeFuture(self, buffer, size, offset)


class FakeFuture:
    def __init__(self, file, buffer, size, offset):
        self.file, self.arguments = file, (buffer, size, offset)

    def get(self):
        buffer, size, offset = self.arguments
        kvikio = self.file.kvikio
        assert kvikio.open, "read after the file was closed"
        if kvikio.fails == "read":
            buffer[:] = 0
            raise RuntimeError("input/output error")
        data = CONTENT[offset : offset + size]
        assert len(data) == size == len(buffer)
        buffer[:] = np.frombuffer(data, np.uint8)
        return size - (kvikio.fails == "short")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """kvikio has not been imported, and files are read in small ranges."""
    monkeypatch.setattr(gds, "direct_reads", gds.DirectReads())
    monkeypatch.setattr(gds, "LARGEST_READ", 7000)
    monkeypatch.setattr(gds, "SMALLEST_READ", 100)
    for name in (gds.GDS, gds.THREADS, gds.COMPATIBILITY):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def without_kvikio(monkeypatch):
    """Machines with a GPU have the real one, which would read instead of our threads."""
    monkeypatch.setitem(sys.modules, "kvikio", None)


@pytest.fixture
def kvikio(monkeypatch):
    fake = FakeKvikio()
    fake.compatible, fake.driver = False, True
    defaults = types.SimpleNamespace(is_compat_mode_preferred=lambda: fake.compatible, set=fake.set)
    driver = types.SimpleNamespace(get=lambda name: {"is_gds_available": fake.driver}[name])
    monkeypatch.setitem(sys.modules, "kvikio", fake)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", defaults)
    monkeypatch.setitem(sys.modules, "kvikio.cufile_driver", driver)
    return fake


def batches(source, count=4, size=20_000):
    """Split the file into batches of two ranges each."""
    step = END // count
    joined = [
        join_ranges(
            np.array([start, start + size + 100]), np.array([10, step - size - 100]), END, PAGE
        )
        for start in range(0, END, step)
    ]
    return [FileReads(plan.size, [(source, plan.runs)]) for plan in joined]


def transferred(source, device=None, **options):
    """Read batches; return the bytes of each range as read, and as in the file."""
    device = device or HostDevice()
    loader = Loader(device)
    found, expected = [], []
    wanted = batches(source, **options)
    try:
        transfer = Transfer(loader, device.new_stream())
        for batch, buffer in zip(wanted, transfer.buffers(wanted), strict=True):
            for _, runs in batch.reads:
                found += [bytes(buffer[place : place + size]) for _, place, size in runs]
                expected += [CONTENT[offset : offset + size] for offset, _, size in runs]
    finally:
        loader.close()
    return found, expected


@given(RANGES, st.sampled_from([1, 512, 4096]))
def test_ranges_are_joined_on_pages(ranges, page):
    offsets, lengths = np.array(ranges, np.int64).reshape(-1, 2).T
    joined = join_ranges(offsets, lengths, END, page)
    buffer = bytearray(joined.size)
    for offset, place, size in joined.runs:
        assert offset % page == place % page == 0
        assert size % page == 0 or offset + size == END
        buffer[place : place + size] = CONTENT[offset : offset + size]
    assert sum(run.size for run in joined.runs) == joined.size
    for (offset, length), start, found in zip(ranges, joined.starts, joined.lengths, strict=True):
        expected = CONTENT[offset : offset + max(0, length)] if offset >= 0 else b""
        assert bytes(buffer[start : start + found]) == expected
    between = zip(joined.runs, joined.runs[1:], strict=False)
    assert all(a.offset + a.size < b.offset for a, b in between)


class TestTransfer:
    def test_by_threads(self, source):
        found, expected = transferred(source)
        assert found == expected
        assert len(found) == 4

    def test_by_kvikio(self, source, kvikio):
        found, expected = transferred(source)
        assert found == expected
        assert kvikio.open == 0
        assert kvikio.threads == gds.threads_per_file(gds.MOST_KVIKIO_THREADS)
        assert kvikio.reads
        assert all(offset % PAGE == 0 for _, _, offset in kvikio.reads)

    def test_nothing(self, source):
        device = HostDevice()
        transfer = Transfer(Loader(device), device.new_stream())
        assert list(transfer.buffers([])) == []
        [empty] = transfer.buffers([FileReads(0, [(source, [])])])
        assert empty.shape == (0,)

    @pytest.mark.parametrize("fails", ["open", "submit", "read"])
    def test_threads_read_what_kvikio_cannot(self, source, kvikio, caplog, fails):
        kvikio.fails = fails
        for _ in range(2):
            found, expected = transferred(source)
            assert found == expected
        assert kvikio.open == 0
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert "without kvikio" in record.message
        assert len(kvikio.reads) <= 2  # and not for the next batches

    def test_truncated_file_read_by_kvikio(self, source, path, kvikio):
        kvikio.fails = "short"
        with pytest.raises(SlideChangedError, match=path.name):
            transferred(source)
        assert kvikio.open == 0

    @pytest.mark.parametrize("by", ["threads", "kvikio"])
    def test_a_closed_file(self, source, request, by):
        if by == "kvikio":
            request.getfixturevalue("kvikio")
        source.close()
        with pytest.raises(SlideClosedError):
            transferred(source)

    @pytest.mark.parametrize("by", ["threads", "kvikio"])
    @pytest.mark.usefixtures("leaves_nothing")
    def test_abandoned_iteration_frees_everything(self, source, request, by):
        if by == "kvikio":
            kvikio = request.getfixturevalue("kvikio")
        device = HostDevice()
        loader = Loader(device)
        buffers = Transfer(loader, device.new_stream()).buffers(batches(source))
        next(buffers)
        buffers.close()
        loader.close()
        source.release()
        if by == "kvikio":
            assert kvikio.open == 0

    @pytest.mark.usefixtures("leaves_nothing")
    def test_unreadable_file(self, source, monkeypatch):
        def refuse(*arguments):
            raise OSError(5, os.strerror(5))

        monkeypatch.setattr(os, "preadv", refuse)
        with pytest.raises(SlideReadError):
            transferred(source)
        source.release()

    def test_a_device_without_memory(self, source):
        device = HostDevice()

        def empty(shape, dtype):
            raise MemoryError

        device.empty = empty
        with pytest.raises(MemoryError):
            transferred(source, device)

    def test_failed_trial_allocation_is_ignored(self, source):
        device = HostDevice()

        def staging(count, size):
            raise MemoryError

        device.staging = staging
        with pytest.raises(MemoryError):
            transferred(source, device)

    def test_it_reads_ahead(self, source):
        device = HostDevice()
        made = []
        empty = device.empty
        device.empty = lambda *arguments: made.append(arguments) or empty(*arguments)
        transfer = Transfer(Loader(device), device.new_stream())
        made.clear()
        for number, _ in enumerate(transfer.buffers(batches(source))):
            assert len(made) == min(4, number + 2)


class TestState:
    def test_on(self, kvikio):
        assert gds.gds_state() == ("26.10.0", True, "")
        assert gds.direct_reads.module() is kvikio

    def test_no_kvikio(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "kvikio", None)
        with pytest.raises(ImportError):
            gds.gds_state()
        assert gds.direct_reads.module() is None

    def test_no_driver(self, kvikio):
        kvikio.driver = False
        assert "nvidia-fs" in gds.gds_state().reason
        assert gds.direct_reads.module() is kvikio

    @pytest.mark.parametrize(
        ("asked", "readable", "why"),
        [
            ("ON", True, "because KVIKIO_COMPAT_MODE is set"),
            ("AUTO", False, "because /run/udev can't be read"),
            ("AUTO", True, "because cuFile can't be used here"),
        ],
    )
    def test_compatibility_mode(self, kvikio, monkeypatch, asked, readable, why):
        kvikio.compatible = True
        monkeypatch.setenv(gds.COMPATIBILITY, asked)
        monkeypatch.setattr(os, "access", lambda path, mode: readable)
        assert gds.gds_state().reason == f"kvikio is in compatibility mode, {why}"
        assert gds.direct_reads.module() is kvikio

    def test_users_thread_count_is_kept(self, kvikio, monkeypatch):
        monkeypatch.setenv(gds.THREADS, "3")
        assert gds.direct_reads.module() is kvikio
        assert kvikio.threads == 1  # kvikio reads the variable itself

    def test_off(self, kvikio, monkeypatch):
        monkeypatch.setenv(gds.GDS, "off")
        assert gds.direct_reads.module() is None

    def test_broken(self, kvikio, monkeypatch):
        def refuse(options):
            raise RuntimeError("no CUDA")

        monkeypatch.setattr(sys.modules["kvikio.defaults"], "set", refuse)
        assert gds.direct_reads.module() is None

    def test_kvikio_is_imported_once(self, monkeypatch):
        loaded = []
        monkeypatch.setattr(gds, "import_module", loaded.append)
        monkeypatch.setenv(gds.THREADS, "3")
        threads = [threading.Thread(target=gds.direct_reads.module) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert loaded == ["kvikio"]


class TestFileSource:
    def test_reading(self, source):
        room = bytearray(500)
        with source.open_reader() as read:
            read(memoryview(room), 1234)
        assert bytes(room) == CONTENT[1234:1734]

    def test_the_end(self, source):
        with source.open_reader() as read, pytest.raises(SlideChangedError):
            read(memoryview(bytearray(500)), END - 100)

    def test_the_path_of_a_file_that_changed(self, source, path):
        assert source.checked_path() == str(path)
        path.write_bytes(CONTENT + b"more")
        with pytest.raises(SlideChangedError):
            source.checked_path()

    def test_runs(self, source):
        joined = source.join(np.array([5000]), np.array([10**9]))
        assert joined.runs == [Run(5000, 0, END - 5000)]
        assert joined.lengths.tolist() == [END - 5000]
