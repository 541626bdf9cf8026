import gc

import numpy as np
import pytest

from napari_wsigpu.storage import buffers as module
from napari_wsigpu.storage.buffers import PictureMemory, TileMemory


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("size", [1, 48, 196_608])
def test_memory_has_size_and_alignment(size):
    memory = TileMemory().allocate(size)
    assert memory.nbytes == size
    assert memory.flags.writeable
    assert address(memory) % 64 == 8


def test_memory_is_reused_after_the_last_view():
    pool = TileMemory()
    first = pool.allocate(600)
    position = address(first)
    view = first[:300].view("uint16").reshape(10, 15)[2:4, ::3]
    del first
    gc.collect()
    second = pool.allocate(600)
    assert address(second) != position
    second[...] = 7
    view[...] = 9
    assert (second == 7).all()
    del view
    gc.collect()
    assert address(pool.allocate(600)) == position


def test_sizes_do_not_share_memory():
    pool = TileMemory()
    position = address(pool.allocate(600))
    assert address(pool.allocate(601)) != position
    assert address(pool.allocate(600)) == position


def test_little_is_kept(monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 1000)
    pool = TileMemory()
    taken = [pool.allocate(100) for _ in range(50)]
    taken.clear()
    [kept] = pool._free.values()
    assert len(kept) == 10


def test_clear_keeps_nothing():
    pool = TileMemory()
    pool.allocate(100)
    pool.clear()
    assert not pool._free


class TestPictureMemory:
    def test_prepared_memory_is_used(self):
        memory = PictureMemory()
        memory.prepare(1 << 20)
        blocks = {id(block) for block in memory._free}
        pictures = [memory.empty((500, 690, 3), np.dtype("uint8")) for _ in range(3)]
        assert not memory._free
        assert not np.shares_memory(pictures[0], pictures[1])
        del pictures
        assert {id(block) for block in memory._free} == blocks

    def test_pictures_in_use_never_share_memory(self):
        memory = PictureMemory()
        held = []
        for number in range(12):
            picture = memory.empty((100 + number, 50), np.dtype("uint16"))
            picture[:] = number
            held.append(picture)
            if number % 3 == 0:
                held.pop(0)
            assert all((each == each.flat[0]).all() for each in held)
        assert len({int(each.flat[0]) for each in held}) == len(held)

    def test_few_unused_blocks_are_kept_and_no_small_ones(self):
        memory = PictureMemory()
        small = [memory.empty((10, 10), np.dtype("uint8")) for _ in range(5)]
        large = memory.empty((100, 100), np.dtype("uint8"))
        del small
        assert not memory._free
        del large
        assert [block.size for block in memory._free] == [10_000]

    def test_prepared_memory_is_limited(self, monkeypatch):
        monkeypatch.setattr(module, "LARGEST_PREPARED", 1000)
        memory = PictureMemory()
        memory.prepare(1 << 40)
        assert [block.size for block in memory._free] == [1000] * 3
        assert memory.empty((50, 50), np.dtype("uint8")).shape == (50, 50)

    def test_clear_frees_all_blocks(self):
        memory = PictureMemory()
        memory.prepare(1000)
        picture = memory.empty((10, 10), np.dtype("uint8"))
        memory.clear()
        del picture
        assert not memory._free


def test_memory_that_there_is_not():
    with pytest.raises(MemoryError):
        module.allocate(1 << 60)
