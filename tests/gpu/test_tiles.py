import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from napari_wsigpu.gpu.device.devices import Devices
from napari_wsigpu.gpu.device.interfaces import TileFormat
from napari_wsigpu.gpu.transfer.device_tiles import NO_TILE, DeviceTiles
from tests.fakes.host_device import HostDevice, at

TILE = TileFormat(4, 8, 1, "uint8")
WIDE = TileFormat(4, 8, 3, "uint16")
SIZE = {TILE: 32, WIDE: 192}
GRID = (4, 5)


def reserve(cache, count, tile=TILE):
    return cache.reserve(tile, SIZE[tile], count)


def tiles_of(numbers):
    return np.array([divmod(number, GRID[1]) for number in numbers], np.int64).reshape(-1, 2)


WHOLE = tiles_of(range(20))


def keep(cache, reserved, numbers, slide=1, level=0):
    cache.keep(reserved, slide, level, GRID, tiles_of(numbers))


def part_of(reserved, indices):
    return reserved._replace(indices=reserved.indices[indices])


def put(cache, *numbers, slide=1, level=0, tile=TILE):
    """Decode tiles that hold their own number, and make them available."""
    reserved = reserve(cache, len(numbers), tile)
    for number, address in zip(numbers, reserved.slots.addresses.tolist(), strict=False):
        at(address, (SIZE[tile],), "uint8")[:] = 100 * slide + number
    keep(cache, reserved, numbers[: len(reserved.indices)], slide, level)
    cache.unpin(reserved)


def held(cache, slide=1, level=0):
    """Return the numbers of the cached tiles; checks their pixels, and pins all of them once."""
    reserved, here = cache.find(slide, level, WHOLE)
    numbers = np.flatnonzero(here).tolist()
    if reserved is None:
        assert numbers == []
        return []
    for number, address in zip(numbers, reserved.slots.addresses.tolist(), strict=True):
        assert (at(address, (SIZE[reserved.pool.tile],), "uint8") == 100 * slide + number).all()
    cache.unpin(reserved)
    return numbers


def touch(cache, number, slide=1):
    reserved, here = cache.find(slide, 0, tiles_of([number]))
    assert here.all()
    cache.unpin(reserved)


@pytest.fixture
def device():
    return HostDevice()


class TestOrder:
    def test_least_recently_used_is_evicted(self, device):
        cache = DeviceTiles(device, 4 * 32)
        put(cache, 0, 1)
        put(cache, 2)
        put(cache, 3)
        touch(cache, 0)
        put(cache, 4)
        assert held(cache) == [0, 2, 3, 4]

    def test_free_slots_are_used_before_eviction(self, device):
        cache = DeviceTiles(device, 4 * 32)
        put(cache, 0, 1)
        put(cache, 2, 3)
        assert held(cache) == [0, 1, 2, 3]

    @pytest.mark.parametrize("order", [range(20), range(19, -1, -1), [6, 3, 11, 9, 0, 2]])
    def test_found_tiles_are_in_the_requested_order(self, device, order):
        cache = DeviceTiles(device, 8 * 32)
        put(cache, 11, 2, 6, 0)
        reserved, here = cache.find(1, 0, tiles_of(order))
        expected = [number for number in order if number in (11, 2, 6, 0)]
        assert np.array(order)[here].tolist() == expected
        values = [at(address, (1,), "uint8")[0] for address in reserved.slots.addresses.tolist()]
        assert values == [100 + number for number in expected]
        cache.unpin(reserved)

    def test_slots_have_addresses_and_format(self, device):
        cache = DeviceTiles(device, 8 * 192)
        for tile in (TILE, WIDE):
            reserved = reserve(cache, 3, tile)
            assert reserved.slots.tile == tile
            addresses = reserved.slots.addresses
            assert addresses.tolist() == reserved.pool.addresses[reserved.indices].tolist()
            assert np.diff(np.sort(addresses)).min() >= SIZE[tile]
            cache.unpin(reserved)

    def test_unknown_level_finds_nothing(self, device):
        cache = DeviceTiles(device, 8 * 32)
        requested = tiles_of([7, 8, 12, 13])
        for _ in ("no level", "other tiles"):
            reserved, here = cache.find(1, 0, requested)
            assert reserved is None
            assert here.tolist() == [False] * 4
            put(cache, 0)
        assert cache.find(1, 0, tiles_of([]))[0] is None
        assert held(cache, level=1) == held(cache, slide=2) == []


class TestPins:
    @pytest.mark.parametrize("how", ["reserved", "found"])
    def test_pinned_slot_is_not_reused(self, device, how):
        cache = DeviceTiles(device, 3 * 32)
        put(cache, 0, 1, 2)
        if how == "found":
            pinned, _ = cache.find(1, 0, tiles_of([0, 1]))
        else:
            pinned = reserve(cache, 2)
        more = reserve(cache, 3)
        assert set(more.indices.tolist()).isdisjoint(pinned.indices.tolist())
        assert len(more.indices) == 1
        cache.unpin(pinned)
        cache.unpin(more)
        assert len(reserve(cache, 3).indices) == 3

    def test_tile_is_pinned_until_the_last_unpin(self, device):
        cache = DeviceTiles(device, 32)
        put(cache, 0)
        first, _ = cache.find(1, 0, WHOLE)
        second, _ = cache.find(1, 0, WHOLE)
        cache.unpin(first)
        with pytest.raises(MemoryError):
            reserve(cache, 1)
        cache.unpin(second)
        reserve(cache, 1)

    def test_no_memory_at_all(self, device):
        cache = DeviceTiles(device, 2 * 32)
        reserve(cache, 2)
        with pytest.raises(MemoryError, match="cuda:0"):
            reserve(cache, 1)

    @pytest.mark.parametrize("drop", ["forget", "clear", "budget"])
    def test_dropped_tile_stays_intact_while_pinned(self, device, drop):
        cache = DeviceTiles(device, 2 * 32)
        put(cache, 0, 1)
        reserved, _ = cache.find(1, 0, WHOLE)
        before = [at(a, (32,), "uint8").copy() for a in reserved.slots.addresses.tolist()]
        if drop == "forget":
            cache.forget(1)
        elif drop == "clear":
            cache.clear()
        else:
            cache.budget = 2 * 32
        assert held(cache) == []
        with pytest.raises(MemoryError):
            put(cache, 2)
        after = [at(a, (32,), "uint8") for a in reserved.slots.addresses.tolist()]
        np.testing.assert_array_equal(before, after)
        cache.unpin(reserved)
        put(cache, 2)
        assert held(cache) == [2]

    def test_dropped_tiles_make_room(self, device):
        cache = DeviceTiles(device, 4 * 32)
        put(cache, 0, 1, 2, 3)
        cache.drop(1, 0, tiles_of([1, 3, 9]))
        cache.drop(2, 0, tiles_of([0]))
        assert held(cache) == [0, 2]
        put(cache, 4, 5)
        assert held(cache) == [0, 2, 4, 5]

    def test_tiles_kept_after_they_were_dropped_are_found(self, device):
        """Another thread clears the cache while a batch is decoded."""
        cache = DeviceTiles(device, 4 * 32)
        reserved = reserve(cache, 1)
        at(reserved.slots.addresses.tolist()[0], (32,), "uint8")[:] = 107
        cache.clear()
        keep(cache, reserved, [7])
        cache.unpin(reserved)
        assert held(cache) == [7]


class TestBudget:
    def test_budget_is_used_and_never_exceeded(self, device):
        cache = DeviceTiles(device, 10 * 32 + 31)
        for number in range(20):
            put(cache, number)
            assert device.live <= cache.budget
        assert cache.used == device.live == 10 * 32
        assert held(cache) == list(range(10, 20))

    def test_memory_is_allocated_in_slabs(self, device, monkeypatch):
        cache = DeviceTiles(device, 1 << 20, 5 * 32)
        put(cache, 0)
        assert device.live == 5 * 32
        put(cache, 1, 2, 3, 4)
        assert device.live == 5 * 32
        put(cache, *range(5, 12))
        assert device.live == 12 * 32
        assert held(cache) == list(range(12))

    def test_formats_share_it(self, device):
        cache = DeviceTiles(device, 2 * 192 + 32)
        put(cache, 0, 1, tile=WIDE, slide=2)
        put(cache, 0, slide=1)
        assert held(cache, slide=2) == [0, 1]
        assert held(cache, slide=1) == [0]
        assert cache.used == 2 * 192 + 32

    def test_a_pinned_format_keeps_its_memory(self, device):
        cache = DeviceTiles(device, 2 * 192)
        put(cache, 0, 1, tile=WIDE, slide=2)
        pinned, _ = cache.find(2, 0, WHOLE)
        put(cache, 0, slide=1)  # one slot is always granted, or nothing could be read
        assert held(cache, slide=1) == [0]
        assert held(cache, slide=2) == [0, 1]
        cache.unpin(pinned)

    def test_tile_larger_than_the_budget_gets_one_slot(self, device):
        cache = DeviceTiles(device, 5)
        first = reserve(cache, 4)
        assert len(first.indices) == 1
        assert device.live == 32
        cache.unpin(first)
        put(cache, 9)
        assert held(cache) == [9]

    def test_setting_the_budget_frees_memory(self, device):
        cache = DeviceTiles(device, 10 * 32)
        put(cache, *range(10))
        cache.budget = 2 * 32
        assert (cache.budget, cache.used, device.live) == (64, 0, 0)
        put(cache, *range(3))
        assert device.live == 2 * 32
        cache.budget = 20 * 32
        put(cache, *range(20))
        assert held(cache) == list(range(20))

    @pytest.mark.parametrize(
        ("total", "budget"), [(8000, 1000), (1 << 34, 2 << 30), (1 << 40, 2 << 30), (0, 0)]
    )
    def test_of_the_process(self, device, monkeypatch, total, budget):
        monkeypatch.setattr(HostDevice, "memory", (0, total))
        devices = Devices()
        cache = devices.tiles(device)
        assert cache.budget == budget
        assert devices.tiles(device) is cache
        assert devices.tiles(HostDevice()) is cache  # one for each device, by its name


class TestShortMemory:
    @pytest.mark.parametrize(("free", "slots"), [(100, 50), (49, 25), (3, 3), (1, 1)])
    def test_failed_allocations_are_halved(self, free, slots, monkeypatch):
        """100 slots are requested: 100, 50, 25, 12, 6, 3, 1."""
        device = HostDevice(free=free * 32)
        requested = []
        allocate = device.allocate
        monkeypatch.setattr(
            device, "allocate", lambda size: requested.append(size) or allocate(size)
        )
        cache = DeviceTiles(device, 1 << 30, 0)
        reserved = reserve(cache, 100)
        expected = 100 if free == 100 else slots
        assert len(reserved.indices) == len(reserved.slots.addresses) == expected
        assert requested == [
            n * 32 for n in (100, 50, 25, 12, 6, 3, 1) if n >= len(reserved.indices)
        ]

    def test_no_slot_at_all(self):
        cache = DeviceTiles(HostDevice(free=31), 1 << 30)
        for _ in range(2):
            with pytest.raises(MemoryError):
                reserve(cache, 100)
        assert cache.used == 0

    def test_existing_memory_stays_usable(self):
        device = HostDevice(free=4 * 32)
        cache = DeviceTiles(device, 1 << 30)
        put(cache, 0, 1)
        device.free = 0
        put(cache, *range(2, 12))
        assert len(held(cache)) == device.live // 32 > 0


class TestKeep:
    def test_only_decoded_tiles_are_kept(self, device):
        cache = DeviceTiles(device, 8 * 32)
        reserved = reserve(cache, 4)
        for address, number in zip(reserved.slots.addresses.tolist(), range(4), strict=True):
            at(address, (32,), "uint8")[:] = 100 + number
        cache.keep(part_of(reserved, [1, 3]), 1, 0, GRID, tiles_of([1, 3]))
        cache.unpin(reserved)
        assert held(cache) == [1, 3]
        assert len(reserve(cache, 6).indices) == 6  # those of failed tiles are free again
        assert held(cache) == [1, 3]

    def test_none_of_them(self, device):
        cache = DeviceTiles(device, 8 * 32)
        reserved = reserve(cache, 2)
        cache.keep(part_of(reserved, []), 1, 0, GRID, tiles_of([]))
        cache.unpin(reserved)
        assert held(cache) == []

    def test_the_same_tile_decoded_twice(self, device):
        """Two threads decode it at once: one slot holds it afterwards, the other is free."""
        cache = DeviceTiles(device, 3 * 32)
        put(cache, 7)
        first, second = reserve(cache, 1), reserve(cache, 1)
        for reserved in (first, second):
            at(reserved.slots.addresses.tolist()[0], (32,), "uint8")[:] = 103
        keep(cache, first, [3])
        reader, _ = cache.find(1, 0, tiles_of(range(5)))
        keep(cache, second, [3])
        cache.unpin(first)
        cache.unpin(second)
        assert held(cache) == [3, 7]
        others = reserve(cache, 3)
        assert len(others.indices) == 2  # all but the one that is still pinned
        cache.unpin(others)
        cache.unpin(reader)

    def test_earlier_slot_becomes_free(self, device):
        cache = DeviceTiles(device, 3 * 32)
        put(cache, 7, 3)
        put(cache, 3)
        put(cache, 0)
        assert held(cache) == [0, 3, 7]

    def test_most_recently_used_tiles_are_kept(self, device):
        cache = DeviceTiles(device, 3 * 32)
        slow = reserve(cache, 1)
        at(slow.slots.addresses.tolist()[0], (32,), "uint8")[:] = 100
        put(cache, 1)
        put(cache, 2)
        keep(cache, slow, [0])
        cache.unpin(slow)
        put(cache, 3)
        assert held(cache) == [0, 2, 3]


class TestGivingUp:
    def test_forget_drops_one_slide_only(self, device):
        cache = DeviceTiles(device, 20 * 32)
        for slide in (1, 2):
            put(cache, 0, 1, slide=slide)
            put(cache, 5, slide=slide, level=1)
        cache.forget(1)
        cache.forget(3)
        assert held(cache, 1) == held(cache, 1, 1) == []
        assert held(cache, 2) == [0, 1]
        assert held(cache, 2, 1) == [5]

    def test_trim_frees_empty_pools(self, device, monkeypatch):
        cache = DeviceTiles(device, 20 * 192, 0)
        put(cache, 0, tile=WIDE, slide=1)
        put(cache, 0, slide=2)
        cache.trim()
        before = device.live
        cache.forget(1)
        assert device.live == before
        cache.trim()
        assert device.live < before
        assert held(cache, 2) == [0]

    def test_clear_frees_all(self, device, monkeypatch):
        cache = DeviceTiles(device, 20 * 192, 0)
        put(cache, 0, tile=WIDE, slide=1)
        put(cache, 0, slide=2)
        cache.clear()
        assert device.live == cache.used == 0
        assert held(cache, 1) == held(cache, 2) == []
        put(cache, 4)
        assert held(cache) == [4]

    def test_clear_keeps_pinned_tiles(self, device):
        cache = DeviceTiles(device, 4 * 32)
        reserved = reserve(cache, 4)
        cache.clear()
        assert device.live == 4 * 32
        cache.unpin(reserved)
        del reserved
        cache.trim()
        assert device.live == 0


class TestFreedPools:
    def test_it_is_freed_for_another_format(self, device):
        cache = DeviceTiles(device, 2 * 192)
        put(cache, 0, 1, tile=WIDE, slide=2)
        put(cache, 0, slide=1)
        assert cache.used <= cache.budget
        assert device.live == cache.used

    def test_it_stays_while_older_tiles_can_go(self, device):
        cache = DeviceTiles(device, 192 + 4 * 32, 0)
        put(cache, 0, 1, 2, 3, slide=1)
        put(cache, 0, tile=WIDE, slide=2)
        put(cache, 4, slide=1)
        assert held(cache, 2) == [0]
        assert sorted(held(cache, 1)) == [1, 2, 3, 4]

    def test_it_is_freed_before_more_is_taken(self):
        device = HostDevice(free=2 * 192)
        cache = DeviceTiles(device, 2 * 192)
        put(cache, 0, 1, tile=WIDE, slide=2)
        put(cache, *range(12), slide=1)
        assert held(cache, 1) == list(range(12))

    def test_full_device_frees_other_formats(self):
        """The device has less memory than the budget: only other pools can be freed."""
        device = HostDevice(free=2 * 192)
        cache = DeviceTiles(device, 1 << 30)
        put(cache, 0, 1, tile=WIDE, slide=2)
        put(cache, 0, slide=1)
        assert held(cache, 1) == [0]

    def test_it_is_freed_when_the_other_slide_closes(self, device):
        cache = DeviceTiles(device, 2 * 32)
        put(cache, 0, 1, slide=1)
        put(cache, 0, 1, slide=2)  # replaces those of slide 1, which stays open
        cache.forget(2)
        cache.trim()
        assert device.live == 0


class Cache(RuleBasedStateMachine):
    """Compares the cache with a dict of the tiles kept last; each holds a serial number."""

    serials = 0

    def __init__(self):
        super().__init__()
        self.device = HostDevice()
        self.cache = DeviceTiles(self.device, 6 * 192)
        self.kept = {}  # (slide, level, number): serial
        self.pinned = []  # (reserved, serials)
        self.seen = set()  # serials of tiles that were kept

    def write(self, reserved):
        serials = []
        for address in reserved.slots.addresses.tolist():
            Cache.serials += 1
            at(address, (8,), "int64")[0:1] = Cache.serials
            serials.append(Cache.serials)
        return serials

    @staticmethod
    def read(reserved):
        return [int(at(a, (1,), "int64")[0]) for a in reserved.slots.addresses.tolist()]

    def fresh(self, serials):
        """Whether a batch was reserved, and is not yet kept or found."""
        return not set(serials) & self.seen

    @rule(tile=st.sampled_from([TILE, WIDE]), count=st.integers(1, 9))
    def reserve(self, tile, count):
        try:
            reserved = reserve(self.cache, count, tile)
        except MemoryError:
            pinned = sum(len(r.indices) for r, _ in self.pinned if r.pool.tile == tile)
            assert pinned
            return
        assert 1 <= len(reserved.indices) <= count
        self.pinned.append((reserved, self.write(reserved)))

    @precondition(lambda self: self.pinned)
    @rule(
        data=st.data(),
        slide=st.integers(1, 2),
        level=st.integers(0, 1),
        kept=st.lists(st.booleans(), min_size=9, max_size=9),
    )
    def keep(self, data, slide, level, kept):
        reserved, serials = self.pinned[data.draw(st.integers(0, len(self.pinned) - 1))]
        if reserved.pool.tile != (TILE if slide == 1 else WIDE) or not self.fresh(serials):
            return
        count = len(serials)
        numbers = data.draw(
            st.lists(st.integers(0, 19), min_size=count, max_size=count, unique=True)
        )
        indices = np.flatnonzero(kept[:count])
        tiles = tiles_of(numbers)[indices]
        self.cache.keep(part_of(reserved, indices), slide, level, GRID, tiles)
        for index in indices.tolist():
            self.kept[slide, level, numbers[index]] = serials[index]
        self.seen |= set(serials)
        self.cache.unpin(reserved)
        self.pinned = [pin for pin in self.pinned if pin[0] is not reserved]

    @rule(
        slide=st.integers(1, 2),
        level=st.integers(0, 1),
        requested=st.lists(st.integers(0, 19), unique=True),
        hold=st.booleans(),
    )
    def find(self, slide, level, requested, hold):
        reserved, here = self.cache.find(slide, level, tiles_of(requested))
        numbers = [number for number, found in zip(requested, here.tolist(), strict=True) if found]
        if reserved is None:
            assert numbers == []
            return
        expected = [self.kept[slide, level, number] for number in numbers]
        assert self.read(reserved) == expected
        if hold:
            self.pinned.append((reserved, expected))
        else:
            self.cache.unpin(reserved)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        index = data.draw(st.integers(0, len(self.pinned) - 1))
        reserved, _ = self.pinned.pop(index)
        self.cache.unpin(reserved)

    @rule(slide=st.integers(1, 2))
    def forget(self, slide):
        self.cache.forget(slide)
        self.kept = {key: serial for key, serial in self.kept.items() if key[0] != slide}

    @rule()
    def clear(self):
        self.cache.clear()
        self.kept.clear()

    @rule()
    def trim(self):
        self.cache.trim()

    @rule(budget=st.integers(0, 12))
    def set_budget(self, budget):
        self.cache.budget = budget * 192
        self.kept.clear()

    @invariant()
    def what_is_pinned_is_left_alone(self):
        for reserved, serials in self.pinned:
            assert self.read(reserved) == serials

    @invariant()
    def no_place_belongs_to_two(self):
        owners = Counter()
        for (slide, level), (pool, table) in self.cache._levels.items():
            for row, column in np.argwhere(table != NO_TILE).tolist():
                place = int(table[row, column])
                owners[id(pool), place] += 1
                assert pool.owners[place].tolist() == [slide, level, row, column]
        assert not owners or max(owners.values()) == 1
        owned = sum(int((s.owners[:, 0] != NO_TILE).sum()) for s in self.cache._pools.values())
        assert owned == sum(owners.values())

    @invariant()
    def pins_are_counted(self):
        counted = sum(int(pool.pins.sum()) for pool in self.cache._pools.values())
        assert counted == sum(len(reserved.indices) for reserved, _ in self.pinned)

    def teardown(self):
        for reserved, _ in self.pinned:
            self.cache.unpin(reserved)
        self.pinned.clear()
        self.cache.clear()
        assert self.cache.used == 0


TestStates = Cache.TestCase
TestStates.settings = settings(max_examples=60, stateful_step_count=40)


def test_many_threads_find_kept_tiles(device):
    """The tiles of each slide hold its number, and no thread sees another's."""
    cache = DeviceTiles(device, 12 * 32)
    wrong = []

    def work(slide):
        rng = np.random.default_rng(slide)
        try:
            for _ in range(300):
                numbers = rng.choice(20, 3, replace=False).tolist()
                try:
                    put(cache, *numbers, slide=slide)
                except MemoryError:
                    continue
                held(cache, slide)
                if rng.random() < 0.05:
                    cache.forget(slide)
                if rng.random() < 0.02:
                    cache.trim()
                if device.live > 12 * 32:
                    wrong.append(device.live)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(slide,)) for slide in (1, 2, 1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    cache.clear()
    assert device.live == 0
