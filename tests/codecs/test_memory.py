import gc

import pytest

from napari_wsigpu.codecs import memory as module
from napari_wsigpu.codecs.memory import TileMemory


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
