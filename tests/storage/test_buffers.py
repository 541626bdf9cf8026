import gc

import numpy as np
import pytest

from napari_wsigpu.storage import buffers as module
from napari_wsigpu.storage.buffers import PictureMemory, TileMemory


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("size", [1, 48, 196_608])
def test_it_is_as_large_and_as_aligned_as_asked(size):
    memory = TileMemory().take(size)
    assert memory.nbytes == size
    assert memory.flags.writeable
    assert address(memory) % 64 == 8


def test_it_is_used_again_when_the_last_view_is_gone():
    pool = TileMemory()
    first = pool.take(600)
    place = address(first)
    view = first[:300].view("uint16").reshape(10, 15)[2:4, ::3]
    del first
    gc.collect()
    second = pool.take(600)
    assert address(second) != place
    second[...] = 7
    view[...] = 9
    assert (second == 7).all()
    del view
    gc.collect()
    assert address(pool.take(600)) == place


def test_other_sizes_are_other_memory():
    pool = TileMemory()
    place = address(pool.take(600))
    assert address(pool.take(601)) != place
    assert address(pool.take(600)) == place


def test_little_is_kept(monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 1000)
    pool = TileMemory()
    taken = [pool.take(100) for _ in range(50)]
    taken.clear()
    [kept] = pool._free.values()
    assert len(kept) == 10


def test_clear_keeps_nothing():
    pool = TileMemory()
    pool.take(100)
    pool.clear()
    assert not pool._free


class TestPictureMemory:
    def test_prepared_memory_is_used(self):
        memory = PictureMemory()
        memory.prepare(1 << 20)
        rooms = {id(room) for room in memory._free}
        pictures = [memory.empty((500, 690, 3), np.dtype("uint8")) for _ in range(3)]
        assert not memory._free
        assert not np.shares_memory(pictures[0], pictures[1])
        del pictures
        assert {id(room) for room in memory._free} == rooms

    def test_pictures_in_use_are_never_handed_out_again(self):
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

    def test_few_idle_rooms_are_kept_and_none_that_is_too_small(self):
        memory = PictureMemory()
        small = [memory.empty((10, 10), np.dtype("uint8")) for _ in range(5)]
        large = memory.empty((100, 100), np.dtype("uint8"))
        del small
        assert not memory._free
        del large
        assert [room.size for room in memory._free] == [10_000]

    def test_too_large_pictures_are_not_prepared_whole(self, monkeypatch):
        monkeypatch.setattr(module, "LARGEST_PREPARED", 1000)
        memory = PictureMemory()
        memory.prepare(1 << 40)
        assert [room.size for room in memory._free] == [1000] * 3
        assert memory.empty((50, 50), np.dtype("uint8")).shape == (50, 50)

    def test_clear_gives_all_back(self):
        memory = PictureMemory()
        memory.prepare(1000)
        picture = memory.empty((10, 10), np.dtype("uint8"))
        memory.clear()
        del picture
        assert not memory._free
