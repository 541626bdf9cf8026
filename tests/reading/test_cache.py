import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu.reading.cache import TileCache, TileKey


def key(number, slide=0):
    return TileKey(slide, 0, 0, number)


def tile(size):
    return np.zeros(size, np.uint8)


def held(cache, count=20, slide=0):
    """Which tiles are in the cache; asking does change their order."""
    return [number for number in range(count) if cache.get(key(number, slide)) is not None]


def test_the_least_recently_used_goes_first():
    cache = TileCache(30)
    for number in range(3):
        cache.put(key(number), tile(10))
    cache.get(key(0))
    cache.put(key(3), tile(10))
    assert held(cache) == [0, 2, 3]
    assert cache.used == 30


def test_a_tile_larger_than_the_budget_is_not_kept_and_evicts_none():
    cache = TileCache(30)
    cache.put(key(0), tile(30))
    cache.put(key(1), tile(31))
    assert held(cache) == [0]


@pytest.mark.parametrize("budget", [0, -1])
def test_no_budget_keeps_nothing(budget):
    cache = TileCache(budget)
    cache.put(key(0), tile(1))
    assert held(cache) == []
    assert cache.budget == 0


def test_shrinking_keeps_the_most_recently_used():
    cache = TileCache(50)
    for number in range(5):
        cache.put(key(number), tile(10))
    cache.get(key(0))
    cache.budget = 25
    assert held(cache) == [0, 4]
    assert (cache.used, cache.budget) == (20, 25)


def test_order_survives_a_change_of_budget():
    cache = TileCache(50)
    for number in range(5):
        cache.put(key(number), tile(10))
    cache.get(key(0))
    cache.budget = 60  # from the least recently used: 1, 2, 3, 4, 0
    for number in range(5, 9):
        cache.put(key(number), tile(10))
    assert held(cache) == [0, 4, 5, 6, 7, 8]


def test_forget_drops_one_slide_only():
    cache = TileCache(100)
    for slide in (1, 2):
        for number in range(3):
            cache.put(key(number, slide), tile(10))
    cache.forget(1)
    cache.forget(3)
    assert held(cache, slide=1) == []
    assert held(cache, slide=2) == [0, 1, 2]
    assert cache.used == 30


def test_a_tile_put_again_is_counted_once():
    cache = TileCache(100)
    cache.put(key(0), tile(10))
    cache.put(key(0), tile(20))
    assert cache.used == 20


@given(
    budget=st.integers(0, 60),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 9), st.integers(1, 40)),
            st.tuples(st.just("get"), st.integers(0, 9), st.just(0)),
            st.tuples(st.just("budget"), st.integers(0, 60), st.just(0)),
        ),
        max_size=60,
    ),
)
def test_it_behaves_like_a_list_in_order_of_use(budget, steps):
    cache = TileCache(budget)
    model: list[tuple[int, int]] = []  # (number, size), least recently used first

    def shrink():
        while sum(size for _, size in model) > budget:
            model.pop(0)

    for what, number, size in steps:
        if what == "budget":
            cache.budget = budget = number
            shrink()
        elif what == "put":
            cache.put(key(number), tile(size))
            if size <= budget:
                model = [item for item in model if item[0] != number] + [(number, size)]
                shrink()
        else:
            found = cache.get(key(number))
            mine = [item for item in model if item[0] == number]
            assert (found is None) == (not mine)
            model = [item for item in model if item[0] != number] + mine
        assert cache.used == sum(size for _, size in model) <= max(budget, 0)


def test_many_threads_keep_the_budget():
    cache = TileCache(1000)
    errors = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(500):
                number = int(rng.integers(50))
                if rng.random() < 0.5:
                    cache.put(key(number, seed % 2), tile(int(rng.integers(1, 200))))
                elif rng.random() < 0.05:
                    cache.forget(seed % 2)
                elif rng.random() < 0.05:
                    cache.budget = int(rng.integers(500, 1000))
                else:
                    cache.get(key(number, seed % 2))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert cache.used <= cache.budget
    for slide in (0, 1):
        cache.forget(slide)
    assert cache.used == 0
