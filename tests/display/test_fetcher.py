import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from napari_wsigpu.codecs.cpu import default_threads
from napari_wsigpu.display.fetcher import TileFetcher
from napari_wsigpu.model.errors import SlideClosedError
from napari_wsigpu.reading.cache import TileKey

TIMEOUT = 20


class Source:
    """A slide whose reads are recorded, and last as long as is said."""

    least_batch = 1
    least_view_batch = 1
    parts = 1
    slowed = 1.0

    def __init__(self, number=1, seconds=0.0, journal=None):
        self.number = number
        self.seconds = seconds
        self.batches = []
        self.journal = [] if journal is None else journal
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.error = None
        self.stubborn = True  # whether it reads on when nobody wants the tiles any more

    def parts_of(self, level):
        return self.parts

    def read_tiles(self, keys, cancellation):
        self.batches.append(list(keys))
        self.journal += keys
        self.begun.set()
        if not self.stubborn:
            until(lambda: self.gate.is_set() or cancellation.check())
        assert self.gate.wait(TIMEOUT)
        time.sleep(self.seconds * len(keys))
        if self.error:
            raise self.error
        return {key: np.full((2, 2), key.column) for key in keys}

    def keys(self, count, level=0, row=0):
        return [TileKey(self.number, level, row, column) for column in range(count)]

    @property
    def read(self):
        return [key for batch in self.batches for key in batch]


class Screen:
    def __init__(self, source):
        self.source = source
        self.landed = Counter()
        self.errors = []

    def deliver(self, tiles):
        assert threading.current_thread().name == "wsigpu-fetch"
        self.landed.update(tiles.keys())

    def fail(self, error):
        self.errors.append(error)


@pytest.fixture
def fetcher():
    fetcher = TileFetcher()
    yield fetcher
    until(lambda: not any(t.name == "wsigpu-fetch" for t in threading.enumerate()))


def until(condition):
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_all_that_is_wanted_lands_once_in_order(fetcher):
    source = Source()
    screen = Screen(source)
    keys = source.keys(50)
    fetcher.request(screen, keys)
    until(lambda: len(screen.landed) == 50)
    assert source.read == keys
    assert set(screen.landed.values()) == {1}


def test_a_batch_is_of_one_level_and_takes_about_50_ms(fetcher):
    source = Source(seconds=0.002)
    screen = Screen(source)
    fetcher.request(screen, source.keys(250) + source.keys(5, level=1))
    until(lambda: len(screen.landed) == 255)
    assert all(len({key.image for key in batch}) == 1 for batch in source.batches)
    sizes = [len(batch) for batch in source.batches if batch[0].image == 0]
    assert sizes[0] == default_threads()
    assert 8 <= sizes[1] <= 25


def test_a_view_that_takes_less_than_400_ms_is_one_batch(fetcher, monkeypatch):
    source = Source()
    # A busy machine would wake up later from a sleep.
    clock = SimpleNamespace(perf_counter=lambda: 0.0035 * sum(map(len, source.batches)))
    monkeypatch.setattr("napari_wsigpu.display.fetcher.time", clock)
    batch_sizes(fetcher, source, default_threads())
    assert batch_sizes(fetcher, source, 100)[1:] == [100]


class TestTilesThatNobodyWantsAnyMore:
    @pytest.fixture
    def reading(self, fetcher):
        """A source whose tiles are in flight for a screen."""
        source = Source()
        source.stubborn = False
        source.gate.clear()
        screen = Screen(source)
        fetcher.request(screen, source.keys(3))
        assert source.begun.wait(TIMEOUT)
        return source, screen

    def test_a_new_view_does_not_wait_for_those_of_the_old(self, fetcher, reading):
        source, screen = reading
        fetcher.request(screen, source.keys(2, row=5))
        until(lambda: len(source.batches) > 1)
        source.gate.set()
        until(lambda: len(screen.landed) == 2)
        assert set(screen.landed) == {*source.keys(2, row=5)}

    def test_one_that_is_still_wanted_is_read(self, fetcher, reading):
        source, screen = reading
        fetcher.request(screen, source.keys(2, row=5), source.keys(3)[2:])
        source.gate.set()
        until(lambda: len(screen.landed) == 5)
        assert len(source.read) == 5

    def test_another_display_may_want_them(self, fetcher, reading):
        source, screen = reading
        other = Screen(source)
        fetcher.request(other, source.keys(1))
        fetcher.cancel(screen)
        source.gate.set()
        until(lambda: len(other.landed) == 3)
        assert not screen.landed

    def test_they_are_read_again_when_wanted_again(self, fetcher, reading):
        source, screen = reading
        fetcher.cancel(screen)
        fetcher.request(screen, source.keys(3))
        source.gate.set()
        until(lambda: len(screen.landed) == 3)
        assert source.read == 2 * source.keys(3)

    def test_closing_the_slide_does_not_wait_for_them(self, fetcher, reading):
        fetcher.forget_slide(1)
        until(lambda: fetcher._thread is None)


def batch_sizes(fetcher, source, count):
    """Return how many tiles each batch has, once that many have come."""
    screen = Screen(source)
    fetcher.request(screen, source.keys(count))
    until(lambda: len(screen.landed) == count)
    return [len(batch) for batch in source.batches]


def test_the_largest_batch_is_of_whole_rounds(fetcher, monkeypatch):
    """Tiles that take no time at all on a coarse clock."""
    monkeypatch.setattr(
        "napari_wsigpu.display.fetcher.time", SimpleNamespace(perf_counter=lambda: 7.0)
    )
    monkeypatch.setattr("napari_wsigpu.display.fetcher.default_threads", lambda: 3)
    source = Source()
    assert batch_sizes(fetcher, source, 600) == [3, 255, 255, 87]


def test_how_long_tiles_will_take_is_learnt(fetcher, monkeypatch):
    # The first batch, and with it the bound on a single tile, has as many tiles as threads.
    monkeypatch.setattr("napari_wsigpu.display.fetcher.default_threads", lambda: 2)
    source = Source(seconds=0.01)
    screen = Screen(source)
    keys = source.keys(16)
    assert fetcher.expected(keys) is None
    assert fetcher.expected([]) == 0
    fetcher.request(screen, keys)
    until(lambda: len(screen.landed) == len(keys))
    assert 0.01 <= fetcher.expected(keys[:1]) < 1
    assert 0.1 <= fetcher.expected(source.keys(10, row=1)) < 10
    assert fetcher.expected(source.keys(10, level=1)) is None
    source.seconds = 0.2
    fetcher.request(screen, source.keys(1, row=2))
    until(lambda: len(screen.landed) == len(keys) + 1)
    assert fetcher.expected(source.keys(2, row=3)) >= 0.4
    fetcher.forget_slide(1)
    assert fetcher.expected(keys) is None


@pytest.mark.parametrize(("seconds", "sizes"), [(0.005, [16, 64, 20]), (0.05, [16, 16, 16])])
def test_a_source_gets_large_batches_unless_they_are_slow(fetcher, seconds, sizes):
    source = Source(seconds=seconds)
    source.least_view_batch = 64
    screen = Screen(source)
    fetcher.request(screen, source.keys(100))
    until(lambda: len(source.batches) >= len(sizes))
    assert [len(batch) for batch in source.batches[:3]] == sizes


def test_what_is_read_while_frames_are_drawn_says_less(fetcher):
    """A display that waits for its tiles has them sooner than one that draws meanwhile."""
    source = Source(seconds=0.09)
    source.slowed = 3.0
    screen = Screen(source)
    fetcher.request(screen, source.keys(1))
    until(lambda: len(screen.landed) == 1)
    assert 0.03 <= fetcher.expected(source.keys(1, row=1)) < 0.06
    fetcher.request(screen, source.keys(1, row=1), waits=True)
    until(lambda: len(screen.landed) == 2)
    assert fetcher.expected(source.keys(1, row=2)) >= 0.09


def test_nothing_is_begun_for_later_while_a_frame_is_drawn(fetcher):
    source = Source()
    screen = Screen(source)
    fetcher.pause_prefetch(TIMEOUT)
    fetcher.request(screen, source.keys(1), source.keys(2, row=1))
    until(lambda: len(screen.landed) == 1)
    fetcher.request(screen, source.keys(1, row=2), source.keys(2, row=1))
    until(lambda: len(screen.landed) == 2)
    time.sleep(0.03)
    assert source.read == source.keys(1) + source.keys(1, row=2)
    fetcher.pause_prefetch(0.0)
    until(lambda: len(screen.landed) == 4)
    fetcher.pause_prefetch(TIMEOUT)
    fetcher.request(screen, (), source.keys(2, row=3))
    fetcher.cancel(screen)  # the fixture waits for the thread to end


def test_tiles_in_flight_are_expected_sooner(fetcher):
    source = Source(seconds=0.1)
    screen = Screen(source)
    fetcher.request(screen, source.keys(1))
    until(lambda: len(screen.landed) == 1)
    source.gate.clear()
    flying, other = source.keys(1, row=1), source.keys(1, row=2)
    alone = fetcher.expected(other)
    fetcher.request(screen, flying)
    until(lambda: len(source.batches) == 2)
    assert fetcher.expected(flying) < alone
    assert fetcher.expected(flying + other) >= alone
    time.sleep(alone)
    assert fetcher.expected(flying) == 0
    source.gate.set()
    until(lambda: len(screen.landed) == 2)


def test_a_batch_that_was_held_up_once_makes_no_small_ones_for_ever(fetcher):
    source = Source(seconds=0.2)
    screen = Screen(source)
    fetcher.request(screen, source.keys(4))
    until(lambda: len(screen.landed) == 4)
    source.seconds = 0
    fetcher.request(screen, source.keys(200, row=1))
    until(lambda: len(screen.landed) == 204)
    assert max(len(batch) for batch in source.batches) > 100


def test_a_source_that_answers_late_is_asked_for_many_tiles_at_a_time(fetcher):
    source = Source(seconds=0.01)
    source.least_batch = source.least_view_batch = 4 * default_threads()
    assert batch_sizes(fetcher, source, 6 * default_threads()) == [
        4 * default_threads(),
        2 * default_threads(),
    ]


def test_tiles_that_are_made_of_many_are_decoded_one_by_one(fetcher):
    source = Source(seconds=0.21)
    source.parts = 4 * default_threads()
    assert batch_sizes(fetcher, source, 4) == [1, 1, 1, 1]


def test_tiles_that_take_long_are_not_fetched_ahead(fetcher):
    source = Source(seconds=0.3)
    source.parts = default_threads()
    screen = Screen(source)
    fetcher.request(screen, [], source.keys(5))
    until(lambda: len(screen.landed) == 1)
    until(lambda: fetcher._thread is None)
    assert source.read == source.keys(5)[:1]
    fetcher.request(screen, source.keys(2), source.keys(5))
    until(lambda: len(screen.landed) == 2)
    until(lambda: fetcher._thread is None)
    assert sorted(set(source.read)) == source.keys(2)


def test_only_what_a_display_waits_for_is_in_the_queue(fetcher):
    source = Source()
    screen = Screen(source)
    source.gate.clear()
    fetcher.request(screen, [], source.keys(10))
    assert source.begun.wait(TIMEOUT)
    assert fetcher.stats(1)["queue"] == 0
    fetcher.request(screen, source.keys(3, row=5))
    assert fetcher.stats(1)["queue"] == 3
    source.gate.set()
    until(lambda: fetcher.stats(1)["queue"] == 0)


def test_a_new_view_drops_what_the_old_one_wanted(fetcher):
    source = Source()
    screen = Screen(source)
    source.gate.clear()
    fetcher.request(screen, source.keys(100))
    assert source.begun.wait(TIMEOUT)
    fetcher.request(screen, source.keys(4, row=7))
    source.gate.set()
    until(lambda: {key.row for key in screen.landed} == {0, 7} and len(source.batches) > 1)
    until(lambda: fetcher.stats(1)["queue"] == 0)
    assert len([key for key in source.read if key.row == 0]) == default_threads()
    assert len([key for key in source.read if key.row == 7]) == 4


def test_what_is_in_flight_is_not_fetched_twice(fetcher):
    source = Source()
    screen = Screen(source)
    source.gate.clear()
    keys = source.keys(default_threads())
    fetcher.request(screen, keys)
    assert source.begun.wait(TIMEOUT)
    fetcher.request(screen, keys)
    source.gate.set()
    until(lambda: len(screen.landed) == len(keys))
    until(lambda: fetcher.stats(1)["queue"] == 0)
    assert source.read == keys


def test_a_tile_that_two_displays_want_is_fetched_once_for_both(fetcher):
    source = Source()
    source.gate.clear()
    screens = [Screen(source), Screen(source)]
    for screen in screens:
        fetcher.request(screen, source.keys(40))
    source.gate.set()
    until(lambda: all(len(screen.landed) == 40 for screen in screens))
    assert max(Counter(source.read).values()) == 1


def test_what_is_on_any_screen_comes_before_what_may_be_next(fetcher):
    journal = []
    first, second = Source(1, journal=journal), Source(2, journal=journal)
    first.gate.clear()
    screens = Screen(first), Screen(second)
    fetcher.request(screens[0], first.keys(50), first.keys(30, row=1))
    assert first.begun.wait(TIMEOUT)
    fetcher.request(screens[1], second.keys(50), second.keys(30, row=1))
    first.gate.set()
    until(lambda: len(screens[0].landed) == 80 and len(screens[1].landed) == 80)
    rows = [key.row for key in journal]
    assert rows == sorted(rows)
    assert len(set(rows)) == 2


def test_hits_of_what_was_prefetched_are_counted_once(fetcher):
    source = Source()
    screen = Screen(source)
    fetcher.request(screen, [], source.keys(10))
    until(lambda: len(screen.landed) == 10)
    until(lambda: fetcher.stats(1)["prefetched"] == 10)
    fetcher.shown(source.keys(4) + source.keys(4, row=9), source.keys(10)[8:])
    fetcher.shown(source.keys(5) + source.keys(10)[8:], [])
    stats = fetcher.stats(1)
    assert (stats["prefetched"], stats["prefetch_hits"]) == (10, 5)
    assert fetcher.stats(2) == {"queue": 0, "batch": 0, "prefetched": 0, "prefetch_hits": 0}


def test_tiles_in_srgb_count_for_the_same_slide(fetcher):
    source = Source()
    screen = Screen(source)
    keys = [key._replace(color="srgb") for key in source.keys(6)]
    fetcher.request(screen, [], keys)
    until(lambda: fetcher.stats(1)["prefetched"] == 6)


@pytest.mark.parametrize("error", [SlideClosedError("closed"), RuntimeError("broken")])
def test_a_slide_that_fails_is_wanted_no_more_and_others_go_on(fetcher, error, caplog):
    bad, good = Source(1), Source(2)
    bad.error = error
    screens = Screen(bad), Screen(good)
    fetcher.request(screens[0], bad.keys(50))
    until(lambda: fetcher.stats(1)["queue"] == 0)
    fetcher.request(screens[1], good.keys(5))
    until(lambda: len(screens[1].landed) == 5)
    assert len(bad.batches) == 1
    assert screens[0].errors == [error]
    assert bool(caplog.records) is not isinstance(error, SlideClosedError)


def test_forgetting_a_slide_waits_for_its_tiles_in_flight(fetcher):
    source = Source()
    screen = Screen(source)
    source.gate.clear()
    fetcher.request(screen, source.keys(90))
    assert source.begun.wait(TIMEOUT)
    threading.Timer(0.2, source.gate.set).start()
    begin = time.monotonic()
    fetcher.forget_slide(1)
    assert time.monotonic() - begin >= 0.15
    assert len(source.batches) == 1
    assert fetcher.stats(1)["queue"] == 0


def test_forgetting_a_display_leaves_the_others(fetcher):
    source = Source()
    source.gate.clear()
    gone, stays = Screen(source), Screen(source)
    fetcher.request(gone, source.keys(50))
    fetcher.request(stays, source.keys(50, row=1))
    fetcher.cancel(gone)
    source.gate.set()
    until(lambda: len([key for key in stays.landed if key.row == 1]) == 50)
    assert len([key for key in source.read if key.row == 0]) <= default_threads()


def test_the_thread_ends_when_nothing_is_wanted_and_begins_again(fetcher):
    source = Source()
    screen = Screen(source)
    for row in range(3):
        fetcher.request(screen, source.keys(5, row=row))
        until(lambda row=row: len(screen.landed) == 5 * (row + 1))
        until(lambda: fetcher._thread is None)


def test_tiles_are_read_from_the_slide_they_were_wanted_of(fetcher):
    """A display may turn to another slide while tiles of the one before are still waiting."""
    first, second = Source(1), Source(2)
    turned, stays = Screen(first), Screen(first)
    first.gate.clear()
    fetcher.request(stays, first.keys(30))
    fetcher.request(turned, first.keys(30))
    assert first.begun.wait(TIMEOUT)
    turned.source = second
    first.gate.set()
    until(lambda: len(stays.landed) == 30)
    assert second.read == []
