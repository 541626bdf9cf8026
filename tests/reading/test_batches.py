import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu import open_slide
from napari_wsigpu.gpu.device import driver
from napari_wsigpu.model.errors import DeviceError, RegionError, SlideClosedError, TileError
from napari_wsigpu.reading import arguments
from napari_wsigpu.reading.batches import cancel_reads, read_ahead
from napari_wsigpu.reading.reader import RegionReader
from tests.conftest import decoding_threads, pinned_places
from tests.writers import slides, tiffbytes

DEFAULTS = {
    "batch_size": None,
    "num_workers": 2,
    "prefetch_factor": 2,
    "shuffle": False,
    "seed": 0,
    "drop_last": False,
}


def ahead(read, locations, **options):
    """Read batches region by region."""
    options = DEFAULTS | options

    def read_batch(batch, cancellation):
        assert 1 <= len(batch) <= (options["batch_size"] or 1)
        found = [read(location) for location in batch]
        return found[0] if options["batch_size"] is None else np.stack(found)

    return read_ahead(read_batch, locations, **options)


def numbered(location):
    return np.array(location)


def places(count):
    return [(number, 0) for number in range(count)]


@given(
    count=st.integers(0, 30),
    batch_size=st.one_of(st.none(), st.integers(1, 8)),
    workers=st.integers(0, 4),
    prefetch=st.integers(0, 3),
    drop_last=st.booleans(),
)
def test_all_in_order(count, batch_size, workers, prefetch, drop_last):
    found = list(
        ahead(
            numbered,
            iter(places(count)),
            batch_size=batch_size,
            num_workers=workers,
            prefetch_factor=prefetch,
            drop_last=drop_last,
        )
    )
    if batch_size is None:
        assert [region.tolist() for region in found] == [[number, 0] for number in range(count)]
    else:
        wanted = [places(count)[i : i + batch_size] for i in range(0, count, batch_size)]
        if drop_last:
            wanted = [batch for batch in wanted if len(batch) == batch_size]
        assert [batch.tolist() for batch in found] == [list(map(list, each)) for each in wanted]


def test_slow_ones_do_not_change_the_order():
    def read(location):
        time.sleep(0.02 if location[0] % 4 == 0 else 0)
        return numbered(location)

    found = [region[0] for region in ahead(read, places(20), num_workers=4)]
    assert found == list(range(20))


def test_no_more_are_read_at_once_than_workers():
    lock, now, most = threading.Lock(), [0], [0]

    def read(location):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.002)
        with lock:
            now[0] -= 1
        return numbered(location)

    assert len(list(ahead(read, places(40), num_workers=3))) == 40
    assert most[0] == 3


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 0), (1, 3), (2, 2), (3, 1)])
def test_nothing_is_read_further_ahead_than_asked(workers, prefetch):
    begun = []
    regions = ahead(
        lambda location: begun.append(location) or numbered(location),
        places(60),
        num_workers=workers,
        prefetch_factor=prefetch,
    )
    assert begun == []
    for taken in range(1, 20):
        next(regions)
        time.sleep(0.001)
        assert len(begun) <= taken + 1 + workers * prefetch
    regions.close()


def test_shuffling_leaves_the_callers_list_alone():
    locations = places(30)
    found = [region.tolist() for region in ahead(numbered, locations, shuffle=True, seed=4)]
    assert locations == places(30)
    assert found != [list(place) for place in locations]
    assert sorted(found) == [list(place) for place in locations]


def test_locations_that_fail():
    def locations():
        yield 0, 0
        yield 1, 0
        raise KeyError("no more of these")

    regions = ahead(numbered, locations(), num_workers=1, prefetch_factor=0)
    next(regions)
    with pytest.raises(KeyError, match="no more"):
        list(regions)


def test_endless_locations(leaves_nothing):
    def locations():
        number = 0
        while True:
            yield number, 0
            number += 1

    regions = ahead(numbered, locations())
    assert [next(regions)[0] for _ in range(50)] == list(range(50))
    regions.close()


def test_abandoned_ones_are_not_begun(leaves_nothing):
    begun, allowed = [], threading.Event()

    def read(location):
        begun.append(location)
        assert location == (0, 0) or allowed.wait(10)
        return numbered(location)

    regions = ahead(read, places(100), num_workers=2, prefetch_factor=10)
    next(regions)
    threading.Timer(0.1, allowed.set).start()
    regions.close()
    assert len(begun) <= 3


@pytest.mark.parametrize("batch_size", [None, 4])
def test_who_reads_an_abandoned_one_is_told(leaves_nothing, batch_size):
    """The first is handed out, the others are read until nobody waits for them any more."""
    told, going_on = [], threading.Semaphore(0)

    def read(batch, cancellation):
        cancellation.check()
        if batch[0] == (0, 0):
            return numbered(batch)
        going_on.release()
        try:
            for _ in range(2000):
                time.sleep(0.005)
                cancellation.check()
        except BaseException as error:
            told.append(error)
            raise
        return numbered(batch)

    regions = read_ahead(read, places(100), **(DEFAULTS | {"batch_size": batch_size}))
    next(regions)
    for _ in range(2):
        assert going_on.acquire(timeout=10)
    regions.close()
    assert len(told) == 2


def test_what_is_read_ahead_of_a_slide_can_be_stopped(leaves_nothing):
    begun, stopped = threading.Event(), threading.Event()

    def read(locations, cancellation):
        while locations == [1]:
            begun.set()
            try:
                cancellation.check()
            except Exception:
                stopped.set()
                raise
            time.sleep(0.01)
        return locations

    batches = read_ahead(read, range(2), batch_size=1, num_workers=1, prefetch_factor=1, slide=7)
    assert next(batches) == [0]
    assert begun.wait(20)
    cancel_reads(8)
    assert not stopped.wait(0.1)
    cancel_reads(7)
    assert stopped.wait(20)
    batches.close()


AT_EXIT = """
import time
from napari_wsigpu.reading.batches import read_ahead

def read(locations, cancellation):
    for _ in range(200):
        cancellation.check()
        time.sleep(0 if locations == [0] else 0.1)
    return locations

batches = read_ahead(read, range(9), batch_size=1, num_workers=2, prefetch_factor=2)
assert next(batches) == [0]
"""


def test_python_does_not_read_on_when_it_exits():
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", AT_EXIT], check=True, timeout=60)
    assert time.monotonic() - begin < 15  # not the 20 s that each batch takes


def test_nobody_is_told_while_regions_are_wanted():
    def read(batch, cancellation):
        cancellation.check()
        return numbered(batch)

    for workers in (0, 2):
        options = DEFAULTS | {"num_workers": workers, "batch_size": 3}
        assert sum(map(len, read_ahead(read, places(20), **options))) == 20


def test_numpy_integers():
    options = {"batch_size": np.int64(2), "num_workers": np.uint8(1)}
    assert len(list(ahead(numbered, places(4), **options))) == 2


def test_without_workers_each_is_read_when_it_is_asked_for(leaves_nothing):
    begun = []

    def read(location):
        begun.append((location, threading.current_thread()))
        return numbered(location)

    regions = ahead(read, places(9), num_workers=0)
    for taken in range(4):
        assert begun == [(place, threading.current_thread()) for place in places(taken)]
        next(regions)
    regions.close()


@pytest.mark.parametrize("started", [0, 1])
def test_without_more_threads_the_caller_reads(monkeypatch, leaves_nothing, started):
    start, left = threading.Thread.start, [None] * started

    def refused(thread):
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    found = [tuple(pair.tolist()) for pair in ahead(numbered, places(9), num_workers=3)]
    assert found == places(9)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "tpu"])
def test_a_device_that_is_not_there_is_refused_at_once(
    tmp_path, monkeypatch, fresh_runtime, device
):
    monkeypatch.setattr(driver, "driver_available", lambda: False)
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 100))
    with open_slide(path, device="cpu") as slide, pytest.raises(DeviceError):
        slide.read_regions([(0, 0)], (10, 10), device=device)


class TestOnADevice:
    @pytest.fixture
    def opened(self, tmp_path, host_gpu):
        """A slide by the device of which tile (1, 3) is damaged, and what the CPU shows of it."""
        numbers = iter(range(25))
        page = tiffbytes.page(
            slides.picture(131, 203),
            lambda tile: slides.jpeg_ycbcr(tile)[: -40 if next(numbers) == 8 else None],
            tile=(32, 48),
            compression=7,
            photometric=6,
        )
        path = tiffbytes.write(tmp_path / "slide.tif", [page])
        with open_slide(path, device="cpu") as slide:
            pixels = slide.level_array(0, tolerant=True)[...]
        with open_slide(path, device="cuda") as slide:
            yield slide, pixels

    @pytest.mark.parametrize("batch_size", [None, 1, 4, 100])
    def test_in_order(self, opened, batch_size):
        slide, pixels = opened
        where = [(x, y) for y in (0, 60, 90) for x in range(0, 60, 7)]
        options = {"device": "cuda", "num_workers": 3}
        found = list(slide.read_regions(where, (40, 30), 0, batch_size, **options))
        assert len(found) == -(-len(where) // (batch_size or 1))
        regions = found if batch_size is None else [one for batch in found for one in batch]
        for (x, y), region in zip(where, regions, strict=True):
            np.testing.assert_array_equal(region, pixels[y : y + 30, x : x + 40])
        assert pinned_places() == 0
        assert slide.stats()["decoded"]["cpu"] == 0

    @pytest.mark.parametrize("taken", [0, 1, 5])
    def test_abandoned_early(self, opened, host_gpu, taken):
        slide, pixels = opened
        regions = slide.read_regions(
            [(0, y % 60) for y in range(1000)], (140, 30), 0, 3, device="cuda", prefetch_factor=4
        )
        for _ in range(taken):
            next(regions)
        regions.close()
        assert not [name for name in decoding_threads() if name.startswith("wsigpu-ahead")]
        assert pinned_places() == 0
        found = slide.read_region((0, 0), (140, 131), device="cuda")
        np.testing.assert_array_equal(found, pixels[:, :140])
        slide.close()
        assert host_gpu.live == 0

    @pytest.mark.parametrize(
        ("decoder", "device", "expected"),
        [("cpu", "cpu", 2), ("cuda", "cpu", 3), ("cuda", "cuda", 3)],
    )
    def test_how_many_are_read_at_the_same_time(
        self, opened, host_gpu, monkeypatch, decoder, device, expected
    ):
        monkeypatch.setattr(arguments, "TILES_PER_READ", 1)
        slide = opened[0]
        slide.device = decoder
        together, lock, counts = threading.Barrier(expected), threading.Lock(), [0, 0]
        name = "read" if device == "cpu" else "read_to_device"
        read = getattr(RegionReader, name)

        def wait_for_others(*args, **options):
            with lock:
                counts[0] += 1
                counts[1] = max(counts)
            together.wait(20)
            with lock:
                counts[0] -= 1
            return read(*args, **options)

        monkeypatch.setattr(RegionReader, name, wait_for_others)
        regions = slide.read_regions([(0, 0)] * (3 * expected), (20, 20), device=device)
        assert len(list(regions)) == 3 * expected
        assert counts == [0, expected]

    @pytest.mark.parametrize("batch_size", [None, 2])
    def test_small_ones_are_read_together(self, opened, host_gpu, monkeypatch, batch_size):
        slide, pixels = opened
        sizes = []
        read = RegionReader.read_to_device

        def counted(reader, number, regions, *args, **options):
            sizes.append(len(regions))
            return read(reader, number, regions, *args, **options)

        monkeypatch.setattr(RegionReader, "read_to_device", counted)
        where = [(3 * number, number) for number in range(25)]
        found = slide.read_regions(where, (20, 30), 0, batch_size, device="cuda", prefetch_factor=3)
        found = [np.array(each) for each in found]
        if batch_size is not None:
            assert [len(each) for each in found] == [2] * 12 + [1]
            found = np.concatenate(found)
        for (x, y), region in zip(where, found, strict=True):
            np.testing.assert_array_equal(region, pixels[y : y + 30, x : x + 20])
        # As many as are read ahead, one group while another is handed out.
        assert max(sizes) == 5 * (batch_size or 1)

    def test_a_failed_tile_comes_at_its_turn(self, opened):
        slide, _ = opened
        where = [(0, 0), (48, 40), (150, 40), (0, 0)]
        regions = slide.read_regions(where, (20, 20), device="cuda")
        assert len([next(regions) for _ in range(2)]) == 2
        with pytest.raises(TileError, match="row 1, column 3"):
            next(regions)
        with pytest.raises(StopIteration):
            next(regions)
        assert pinned_places() == 0

    def test_a_failing_device_comes_at_its_turn(self, opened, host_gpu, monkeypatch):
        monkeypatch.setattr(arguments, "TILES_PER_READ", 1)
        slide, _ = opened
        paste = host_gpu.paste

        def fail(pastes, *args, **options):
            if len(pastes) == 2:
                raise RuntimeError("an illegal memory access")
            paste(pastes, *args, **options)

        monkeypatch.setattr(host_gpu, "paste", fail)
        regions = slide.read_regions([(0, 0), (0, 33), (40, 97)], (20, 20), device="cuda")
        assert len([next(regions) for _ in range(2)]) == 2
        with pytest.raises(DeviceError, match="illegal"):
            next(regions)
        assert pinned_places() == 0

    def test_a_bad_location_comes_at_its_turn(self, opened):
        regions = opened[0].read_regions([(0, 0), ("x", 0)], (5, 5), device="cuda")
        next(regions)
        with pytest.raises(RegionError):
            next(regions)

    def test_closed_between_two(self, opened, host_gpu):
        slide, _ = opened
        regions = slide.read_regions([(0, 0)] * 50, (40, 30), device="cuda", prefetch_factor=1)
        next(regions)
        slide.close()
        with pytest.raises(SlideClosedError):
            list(regions)
        assert host_gpu.live == 0
