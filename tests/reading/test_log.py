import json
import logging
import threading

import pytest

from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.log import MAX_REPORTS, MOST_UNCOUNTED, TileLog


@pytest.fixture
def log():
    return TileLog("/slides/a.svs", {-1: "the label image"})


def failures(*columns, level=0):
    return {TileKey(3, level, 7, column): f"reason {column}" for column in columns}


def said(caplog):
    return [record.getMessage() for record in caplog.records]


def test_a_new_log_is_empty_and_json(log):
    assert json.loads(json.dumps(log.stats())) == {
        "tiles_asked": 0,
        "cache_hits": 0,
        "decoded": {"cpu": 0},
        "computed": 0,
        "background": 0,
        "bytes_read": 0,
        "bytes_decoded": 0,
        "failed": 0,
        "failed_tiles": {},
    }


def test_counters_add_up(log):
    log.count(tiles_asked=3, bytes_read=10)
    log.count(tiles_asked=2)
    log.count_decoded(cpu=1, nvimagecodec=4)
    log.count_decoded(nvimagecodec=2)
    stats = log.stats()
    assert (stats["tiles_asked"], stats["bytes_read"]) == (5, 10)
    assert stats["decoded"] == {"cpu": 1, "nvimagecodec": 6}


def test_stats_are_the_callers_own(log):
    log.record_failures(failures(1), report=False)
    stats = log.stats()
    stats["decoded"]["cpu"] = stats["failed_tiles"]["more"] = 5
    assert log.stats()["decoded"] == {"cpu": 0}
    assert log.stats()["failed_tiles"] == {"level 0, row 7, column 1": "reason 1"}


def test_many_threads_lose_no_count(log):
    def work():
        for _ in range(1000):
            log.count(tiles_asked=1)
            log.count_decoded(cpu=1)
            log.count_read(1, 3, 20, 100)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = log.stats()
    assert (stats["tiles_asked"], stats["decoded"]["cpu"]) == (40_000, 32_000)
    assert (stats["bytes_read"], stats["bytes_decoded"]) == (160_000, 2_400_000)
    assert stats["cache_hits"] == 8000


def test_counting_small_reads_takes_little_memory(log):
    for _ in range(3 * MOST_UNCOUNTED):
        log.count_read(0, 1, 20, 100)
    assert len(log._small) <= MOST_UNCOUNTED
    assert log.stats()["tiles_asked"] == 3 * MOST_UNCOUNTED


class TestReports:
    def test_names_and_reasons(self, log, caplog):
        log.record_failures(failures(2) | failures(0, level=-1), report=True)
        assert said(caplog) == [
            "The tile at the label image, row 7, column 0 of '/slides/a.svs' can't be decoded: "
            "reason 0",
            "The tile at level 0, row 7, column 2 of '/slides/a.svs' can't be decoded: reason 2",
        ]

    def test_each_once(self, log, caplog):
        told = []
        log.on_failed_tile = lambda name, why: told.append((name, why))
        for columns in ((1, 2), (2, 3), (1, 2, 3)):
            log.record_failures(failures(*columns), report=True)
        assert [why for _, why in told] == ["reason 1", "reason 2", "reason 3"]
        assert len(caplog.records) == 3
        assert log.stats()["failed"] == 3

    def test_not_before_they_are_shown(self, log, caplog):
        log.record_failures(failures(1), report=False)
        assert said(caplog) == []
        assert log.stats()["failed"] == 1
        log.record_failures(failures(1), report=True)
        assert len(said(caplog)) == 1

    def test_nothing_failed(self, log, caplog):
        log.record_failures({}, report=True)
        assert said(caplog) == []

    @pytest.mark.parametrize("more", [0, 1, 990])
    def test_many_are_summed_up(self, log, caplog, more):
        told = []
        log.on_failed_tile = lambda name, why: told.append(why)
        log.record_failures(failures(*range(MAX_REPORTS + more)), report=True)
        assert told == [f"reason {column}" for column in range(MAX_REPORTS)]
        messages = said(caplog)
        assert len(messages) == MAX_REPORTS + bool(more)
        assert ("Further tiles of '/slides/a.svs' failed" in messages[-1]) == bool(more)
        log.record_failures(failures(*range(MAX_REPORTS + more)), report=True)
        log.record_failures(failures(*range(5000, 5020)), report=True)
        assert len(said(caplog)) == MAX_REPORTS + 1
        assert len(told) == MAX_REPORTS

    def test_threads_that_meet_the_same_tile_report_it_once(self, log, caplog):
        caplog.set_level(logging.WARNING)
        barrier = threading.Barrier(8)

        def work():
            barrier.wait()
            log.record_failures(failures(1), report=True)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(said(caplog)) == 1


def test_the_error_names_all_in_order(log):
    error = log.error(failures(5, 1) | failures(4, level=-1))
    assert [name for name, _ in error.failures] == [
        "the label image, row 7, column 4",
        "level 0, row 7, column 1",
        "level 0, row 7, column 5",
    ]
    assert error.path == "/slides/a.svs"
    assert "2 more" in str(error)


def test_as_few_failed_tiles_are_named_as_are_wanted(log):
    log.record_failures(failures(*range(1000)), report=False)
    stats = log.stats(most_failed=2)
    assert stats["failed"] == 1000
    assert stats["failed_tiles"] == {
        "level 0, row 7, column 0": "reason 0",
        "level 0, row 7, column 1": "reason 1",
    }
    assert log.stats(most_failed=0)["failed_tiles"] == {}
