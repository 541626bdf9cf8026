import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu.reading import cache
from napari_wsigpu.reading.cache import Recurrence, TileCache, TileKey


def key(number, slide=0, color="stored"):
    return TileKey(slide, 0, 0, number, color)


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


def test_dropped_tiles_make_room():
    cache = TileCache(30)
    for number in range(3):
        cache.put(key(number), tile(10))
    cache.drop(0, 0, np.array([[0, 1], [0, 2], [5, 5]]))
    assert (held(cache), cache.used) == ([0], 10)


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


def put_together(cache, *numbers, size=10, slide=0, color="stored"):
    """Put tiles that lie in one buffer."""
    buffer = np.zeros(size * len(numbers), np.uint8)
    tiles = {
        key(number, slide, color): buffer[size * index :][:size]
        for index, number in enumerate(numbers)
    }
    cache.put_all(tiles, buffer.nbytes)
    return tiles


class TestTilesOfOneBuffer:
    def test_they_go_together(self):
        cache = TileCache(50)
        put_together(cache, 0, 1, 2)
        put_together(cache, 3, 4)
        assert (held(cache), cache.used) == ([0, 1, 2, 3, 4], 50)
        cache.get(key(1))
        cache.put(key(5), tile(10))
        assert (held(cache), cache.used) == ([0, 1, 2, 5], 40)

    def test_memory_is_held_as_long_as_one_of_them_is(self):
        cache = TileCache(100)
        put_together(cache, 0, 1, 2)
        for number in (0, 1):
            cache.put(key(number), tile(10))
        assert cache.used == 50
        cache.put(key(2), tile(10))
        assert cache.used == 30
        assert held(cache) == [0, 1, 2]

    def test_a_buffer_larger_than_the_budget_evicts_none(self):
        cache = TileCache(30)
        cache.put(key(0), tile(10))
        put_together(cache, 1, 2, 3, 4)
        put_together(cache)
        assert (held(cache), cache.used) == ([0], 10)

    def test_what_is_larger_than_its_tiles_counts_as_a_whole(self):
        cache = TileCache(100)
        cache.put_all({key(0): tile(10)}, 90)
        cache.put(key(1), tile(20))
        assert (held(cache), cache.used) == ([1], 20)

    def test_forget_drops_them_in_both_colours(self):
        cache = TileCache(100)
        put_together(cache, 0, 1, slide=3)
        put_together(cache, 0, 1, slide=3, color="srgb")
        put_together(cache, 0, slide=4)
        cache.forget(3)
        assert held(cache, slide=3) == []
        assert cache.get(key(0, 3, "srgb")) is None
        assert cache.used == 10

    @given(
        budget=st.integers(0, 120),
        puts=st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=4, unique=True)),
        asked=st.lists(st.integers(0, 19), max_size=8),
    )
    def test_many_are_found_as_one_by_one(self, budget, puts, asked):
        cache, other, latest = TileCache(budget), TileCache(budget), {}
        for numbers in puts:
            latest |= put_together(cache, *numbers)
            put_together(other, *numbers)
        tiles = np.array([(0, number) for number in asked], np.int64).reshape(-1, 2)
        found = cache.get_all(0, 0, tiles)
        singly = [other.get(key(number)) for number in asked]
        assert [pixels is None for pixels in found] == [pixels is None for pixels in singly]
        for number, pixels in zip(asked, found, strict=True):
            assert pixels is None or pixels is latest[key(number)]
        assert cache.used == other.used <= budget
        put_together(cache, 30, 31)
        put_together(other, 30, 31)
        assert held(cache) == held(other)

    def test_none_of_another_level_or_slide(self):
        cache = TileCache(100)
        put_together(cache, 0, 1)
        tiles = np.array([(0, 0), (0, 1)])
        for slide, level in ((1, 0), (0, 1), (~0, 0)):
            assert cache.get_all(slide, level, tiles) == [None, None]


class TestRecurrence:
    """Whether tiles come again while the cache, which has room for 50, would still hold them."""

    @pytest.fixture
    def recurrence(self):
        return Recurrence(TileCache(50 * 100))

    def note(self, recurrence, *numbers, image=0):
        """A batch of tiles, many enough to be judged alone."""
        return recurrence.record(image, numbers, 100)

    @pytest.fixture(autouse=True)
    def batches(self, monkeypatch):
        monkeypatch.setattr(cache, "MANY_TILES", 8)

    def test_new_ones_do_not(self, recurrence):
        assert not any(self.note(recurrence, *range(n, n + 9)) for n in range(0, 900, 9))

    @pytest.fixture
    def far(self, monkeypatch):
        """All that comes again does so late."""
        monkeypatch.setattr(cache, "NEAR", 0)

    @pytest.mark.usefixtures("far")
    def test_most_have_to_come_again(self, recurrence):
        self.note(recurrence, *range(10))
        assert not self.note(recurrence, *range(6), *range(20, 24))
        assert self.note(recurrence, *range(7), *range(30, 33))

    def test_fewer_are_enough_if_they_come_again_at_once(self, recurrence):
        self.note(recurrence, *range(10))
        assert not self.note(recurrence, 0, 1, *range(20, 28))
        assert self.note(recurrence, 20, 21, 22, *range(30, 37))

    @pytest.mark.usefixtures("far")
    def test_after_a_while_they_would_be_gone(self, recurrence):
        self.note(recurrence, *range(8))
        self.note(recurrence, *range(100, 140))
        assert self.note(recurrence, *range(8))
        self.note(recurrence, *range(200, 250))
        assert not self.note(recurrence, *range(8))

    def test_images_are_told_apart(self, recurrence):
        self.note(recurrence, *range(8))
        assert not self.note(recurrence, *range(8), image=1)
        assert self.note(recurrence, *range(8))

    def test_those_before_a_clearing_do_not_count(self, recurrence):
        self.note(recurrence, *range(8))
        recurrence.forget()
        assert not self.note(recurrence, *range(8))
        assert self.note(recurrence, *range(8))

    def test_without_a_budget_none_is_worth_it(self):
        recurrence = Recurrence(TileCache(0))
        for _ in range(3):
            assert not self.note(recurrence, *range(8))

    def test_single_regions_are_judged_by_their_average(self, monkeypatch):
        """Half of the tiles of neighbours come again: worth it after some; one is no proof."""
        monkeypatch.setattr(cache, "MANY_TILES", 64)
        recurrence = Recurrence(TileCache(500 * 100))
        kept = [
            recurrence.record(0, [300 + column, 301 + column, 400 + column, 401 + column], 100)
            for column in range(40)
        ]
        assert not any(kept[:8])
        assert all(kept[20:])
        assert not recurrence.record(1, [0, 1, 100, 101], 100)
        assert not recurrence.record(1, [0, 1, 100, 101], 100)
