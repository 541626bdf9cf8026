"""How ways are timed in turn."""

import numpy as np
import pytest

from benchmarks.transfers.timing import Absent, Case, Row, Way, measure, way
from napari_wsigpu.model.errors import CorruptSlideError

SIZE = 3_000_000


def fake(name, seconds, log, value=0):
    times = iter(seconds)

    def timed(item):
        log.append((name, item))
        return next(times)

    return Way(name, timed, lambda item: np.array([value]))


def case(ways, rounds=3, tolerance=0.0):
    items = range(1 + rounds)
    return Case("case", items, ways, SIZE, lambda item, found: float(found[0]), tolerance)


def test_medians_and_rates():
    log = []
    rows = measure(case([fake("a", [0.3, 0.1, 0.2], log), fake("b", [1, 1, 4], log)]))
    assert rows == [
        Row("case", "a", 200, 100, 15, 0),
        Row("case", "b", 1000, 1000, 3, 0),
    ]


def test_another_way_is_first_each_round():
    log = []
    measure(case([fake(name, [1, 1, 1], log) for name in "abc"]))
    assert log == [
        *(("a", 1), ("b", 1), ("c", 1)),
        *(("b", 2), ("c", 2), ("a", 2)),
        *(("c", 3), ("a", 3), ("b", 3)),
    ]


def test_rows_keep_the_order_of_the_ways():
    rows = measure(case([Absent("a", "no"), fake("b", [1] * 3, []), Absent("c", "never")]))
    assert [(row.way, row.missing) for row in rows] == [
        ("a", "not here: no"),
        ("b", ""),
        ("c", "not here: never"),
    ]


@pytest.mark.parametrize(("apart", "wrong"), [(1, False), (2, True), (float("nan"), True)])
def test_what_is_beyond_the_tolerance_is_wrong(apart, wrong):
    (row,) = measure(case([fake("a", [1] * 3, [], apart)], tolerance=1))
    assert row.wrong is wrong
    assert row.median_ms == 1000


def test_our_failures_are_wrong_and_those_of_peers_are_not():
    def fail(item):
        raise CorruptSlideError("It is\nbroken.")

    ours, peer = measure(case([way("ours", fail), way("peer", fail, peer=True)]))
    assert ours == Row("case", "ours", wrong=True, missing="failed: It is broken.")
    assert peer == Row("case", "peer", missing="failed: It is broken.")


def test_caches_are_emptied_before_each_run_and_that_is_not_timed(monkeypatch):
    log, clock = [], iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: log.append("clock") or next(clock))
    timed = way("a", lambda item: log.append("work"), lambda: log.append("prepare"))
    assert timed.seconds(0) == 1
    assert log == ["prepare", "clock", "work", "clock"]
