import pytest

from napari_wsigpu.reading.throughput import MIN_TILES, MODES, TRIALS, Throughput


def learn(throughput, seconds, tiles=100, key="jpeg"):
    """Have `choose` followed until all is settled; return what was chosen."""
    chosen = []
    while not throughput.is_measured(key):
        mode = throughput.choose(key, MIN_TILES)
        chosen.append(mode)
        throughput.record(key, mode, tiles, tiles * seconds[mode])
    return chosen


@pytest.mark.parametrize("fastest", MODES)
def test_the_fastest_is_used_once_each_was_tried(fastest):
    throughput = Throughput()
    chosen = learn(throughput, {mode: 1 if mode == fastest else 2 for mode in MODES})
    assert {mode: chosen.count(mode) for mode in MODES} == dict.fromkeys(MODES, TRIALS)
    assert throughput.choose("jpeg", MIN_TILES) == fastest


def test_one_slow_read_changes_nothing():
    throughput = Throughput()
    learn(throughput, {"gpu": 1, "cpu": 2, "both": 3})
    throughput.record("jpeg", "gpu", 100, 10_000)
    assert throughput.choose("jpeg", MIN_TILES) == "gpu"


def test_one_fast_read_proves_nothing():
    throughput = Throughput()
    learn(throughput, {"gpu": 3, "cpu": 2, "both": 4})
    throughput.record("jpeg", "gpu", 100, 1)
    assert throughput.choose("jpeg", MIN_TILES) == "cpu"


def test_what_becomes_slow_is_left():
    throughput = Throughput()
    learn(throughput, {"gpu": 1, "cpu": 2, "both": 3})
    for _ in range(50):
        throughput.record("jpeg", "gpu", 100, 100)
    reads = 0
    while throughput.choose("jpeg", MIN_TILES) == "gpu":
        throughput.record("jpeg", "gpu", 100, 1000)
        reads += 1
        assert reads < 10
    assert throughput.choose("jpeg", MIN_TILES) == "cpu"


def test_the_time_is_that_of_a_tile():
    throughput = Throughput()
    for _ in range(TRIALS):
        throughput.record("jpeg", "gpu", 1000, 2)
        throughput.record("jpeg", "cpu", MIN_TILES, 1)
        throughput.record("jpeg", "both", MIN_TILES, 1)
    assert throughput.choose("jpeg", MIN_TILES) == "gpu"


def test_small_reads_teach_nothing():
    throughput = Throughput()
    for _ in range(10 * TRIALS):
        for mode in MODES:
            throughput.record("jpeg", mode, MIN_TILES - 1, 1)
    assert not throughput.is_measured("jpeg")
    assert throughput.choose("jpeg", MIN_TILES) == MODES[0]
    for _ in range(TRIALS):
        throughput.record("jpeg", MODES[0], MIN_TILES, 1)
    assert throughput.choose("jpeg", MIN_TILES) != MODES[0]


def test_small_reads_try_nothing_but_use_what_is_known():
    throughput, few = Throughput(), MIN_TILES - 1
    assert throughput.choose("jpeg", few) == "gpu"
    for mode, seconds in (("gpu", 3), ("cpu", 1), ("both", 2)):
        for _ in range(TRIALS):
            throughput.record("jpeg", mode, 100, seconds)
        assert throughput.choose("jpeg", few) == ("gpu" if mode == "gpu" else "cpu")


def test_kinds_of_tiles_are_apart():
    throughput = Throughput()
    learn(throughput, {"gpu": 1, "cpu": 2, "both": 3}, key="jpeg")
    learn(throughput, {"gpu": 3, "cpu": 2, "both": 1}, key="jpeg2000")
    assert throughput.choose("jpeg", MIN_TILES) == "gpu"
    assert throughput.choose("jpeg2000", MIN_TILES) == "both"
    assert not throughput.is_measured("other")


def test_both_finish_together():
    throughput = Throughput()
    assert throughput.share("jpeg") == 0.5
    learn(throughput, {"gpu": 1, "cpu": 3, "both": 1})
    share = throughput.share("jpeg")
    assert share * 1 == pytest.approx((1 - share) * 3)
