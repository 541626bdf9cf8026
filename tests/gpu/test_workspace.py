"""Workspaces are reused, and stay usable if the device has no memory."""

import gc

import numpy as np
import pytest

from napari_wsigpu.gpu.device import workspace
from napari_wsigpu.gpu.device.workspace import FEW_TILES, SMALLEST, Workspace
from tests.fakes.host_device import HostDevice, at

pytest.importorskip("nvidia.nvimgcodec")


class Counting(HostDevice):
    """Records what it allocates."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def allocate(self, size):
        self.asked.append(("planes", size))
        return super().allocate(size)

    def pinned_array(self, count, dtype):
        self.asked.append((np.dtype(dtype).name, count))
        return super().pinned_array(count, dtype)


@pytest.fixture
def device():
    return Counting()


def use(work, encoded, planes, tiles):
    """Make room, and write to all of it."""
    work.make_room(encoded, planes, tiles)
    assert len(work.encoded) >= encoded
    assert len(work.doubts) >= tiles
    assert not work.doubts[:tiles].any()
    work.encoded[:encoded] = 1
    if planes:
        at(work.planes, (planes,), "uint8")[:] = 2
    work.doubts[:] = 1


class TestMakeRoom:
    def test_new_workspace_allocates_no_device_memory(self, device):
        work = Workspace(device)
        assert device.live == 0
        assert device.asked == [("int32", FEW_TILES)]
        use(work, 0, 0, 0)
        assert device.live == 0

    def test_it_grows(self, device):
        work = Workspace(device)
        for size in (1, SMALLEST, SMALLEST + 1, 3 * SMALLEST, 10 * SMALLEST):
            use(work, size, size + 5, size // 1000)
        assert device.live < 13 * SMALLEST

    def test_old_memory_is_freed_first(self, device):
        work = Workspace(device)
        use(work, 1, 4 * SMALLEST, 1)
        before = device.live
        use(work, 1, 8 * SMALLEST, 1)
        assert device.live == 2 * before

    def test_it_is_used_again(self, device):
        work = Workspace(device)
        use(work, 5 * SMALLEST, 7 * SMALLEST, 900)
        asked, places = len(device.asked), (work.planes, work.encoded.ctypes.data)
        for part in (1, 2, 4):
            use(work, 5 * SMALLEST // part, 7 * SMALLEST // part, 900 // part)
        assert len(device.asked) == asked
        assert (work.planes, work.encoded.ctypes.data) == places

    def test_memory_has_headroom(self, device):
        """Batches of similar sizes reuse the memory."""
        work = Workspace(device)
        use(work, 8 * SMALLEST, 8 * SMALLEST, 500)
        asked = len(device.asked)
        use(work, 10 * SMALLEST, 10 * SMALLEST, 1000)
        assert len(device.asked) == asked

    def test_flags_are_cleared_for_each_batch(self, device):
        work = Workspace(device)
        for tiles in (3, FEW_TILES, FEW_TILES + 1, 5, 4 * FEW_TILES):
            use(work, 1, 1, tiles)

    def test_it_is_freed_with_the_workspace(self, device):
        work = Workspace(device)
        use(work, 1, 3 * SMALLEST, 1)
        work.clear()
        assert device.live > 0
        del work
        gc.collect()
        assert device.live == 0


class TestShortMemory:
    @pytest.fixture(autouse=True)
    def exactly(self, monkeypatch):
        monkeypatch.setattr(workspace, "SMALLEST", 1)

    def test_it_stays_usable(self, device):
        work = Workspace(device)
        use(work, 100, 1000, 10)
        device.free = 2000
        for _ in range(2):
            with pytest.raises(MemoryError):
                work.make_room(200, 100_000, 10)
            use(work, 200, 1000, 10)
            assert device.live == 1250

    def test_too_small_buffers_are_dropped(self, device):
        """The old memory is freed first, so that the larger one fits."""
        device.free = 2000
        work = Workspace(device)
        use(work, 1, 1000, 1)
        use(work, 1, 1500, 1)
        assert device.live == 1875

    def test_failure_releases_everything(self, device):
        work = Workspace(device)
        use(work, 1, 1000, 1)
        with pytest.raises(MemoryError):
            work.make_room(1, 1 << 50, 1)
        assert device.live == 0
        assert work.planes == 0

    def test_no_memory_for_flags(self, device, monkeypatch):
        def full(count, dtype):
            raise MemoryError("no page-locked memory")

        work = Workspace(device)
        use(work, 10, 1000, 10)
        with monkeypatch.context() as context:
            context.setattr(device, "pinned_array", full)
            with pytest.raises(MemoryError):
                work.make_room(10, 1000, FEW_TILES + 1)
            use(work, 10, 1000, FEW_TILES)
            with pytest.raises(MemoryError):
                Workspace(device)
        use(work, 10, 1000, FEW_TILES + 1)

    def test_no_memory_for_encoded_bytes(self, device, monkeypatch):
        def full(count, dtype):
            raise MemoryError("no memory")

        work = Workspace(device)
        use(work, 10, 1000, 10)
        with monkeypatch.context() as context:
            context.setattr(device, "pinned_array", full)
            with pytest.raises(MemoryError):
                work.make_room(1000, 1000, 10)
            use(work, 12, 1000, 10)
        use(work, 1000, 1000, 10)


def test_clear_forgets_the_streams():
    work = Workspace(HostDevice())
    data = np.frombuffer(b"\xff\x4f\xff\x51", np.uint8)
    for _ in range(2):
        work.streams.add(data.ctypes.data, 4)
        work.clear()
        assert len(work.streams.used) == len(work.images.used) == 0
