import pytest

from napari_wsigpu.reading.throughput import FEWEST_TILES, SHARES, TRIALS, Throughput


def learn(throughput, seconds, tiles=100, key="jpeg"):
    """Have `choose` followed until all is settled; return what was chosen."""
    chosen = []
    while not throughput.settled(key):
        way = throughput.choose(key)
        chosen.append(way)
        throughput.note(key, way, tiles, tiles * seconds[way])
    return chosen


@pytest.mark.parametrize("fastest", SHARES)
def test_the_fastest_is_used_once_each_was_tried(fastest):
    throughput = Throughput()
    chosen = learn(throughput, {way: 1 if way == fastest else 2 for way in SHARES})
    assert {way: chosen.count(way) for way in SHARES} == dict.fromkeys(SHARES, TRIALS)
    assert throughput.choose("jpeg") == fastest


def test_one_slow_read_changes_nothing():
    throughput = Throughput()
    learn(throughput, {"gpu": 1, "cpu": 2, "both": 3})
    throughput.note("jpeg", "gpu", 100, 10_000)
    assert throughput.choose("jpeg") == "gpu"


def test_one_fast_read_proves_nothing():
    throughput = Throughput()
    learn(throughput, {"gpu": 3, "cpu": 2, "both": 4})
    throughput.note("jpeg", "gpu", 100, 1)
    assert throughput.choose("jpeg") == "cpu"


def test_what_becomes_slow_is_left():
    throughput = Throughput()
    learn(throughput, {"gpu": 1, "cpu": 2, "both": 3})
    for _ in range(50):
        throughput.note("jpeg", "gpu", 100, 100)
    reads = 0
    while throughput.choose("jpeg") == "gpu":
        throughput.note("jpeg", "gpu", 100, 1000)
        reads += 1
        assert reads < 10
    assert throughput.choose("jpeg") == "cpu"


def test_the_time_is_that_of_a_tile():
    throughput = Throughput()
    for _ in range(TRIALS):
        throughput.note("jpeg", "gpu", 1000, 2)
        throughput.note("jpeg", "cpu", 20, 1)
        throughput.note("jpeg", "both", 20, 1)
    assert throughput.choose("jpeg") == "gpu"


def test_small_reads_teach_nothing():
    throughput = Throughput()
    for _ in range(10 * TRIALS):
        for way in SHARES:
            throughput.note("jpeg", way, FEWEST_TILES - 1, 1)
    assert not throughput.settled("jpeg")
    assert throughput.choose("jpeg") == SHARES[0]
    for _ in range(TRIALS):
        throughput.note("jpeg", SHARES[0], FEWEST_TILES, 1)
    assert throughput.choose("jpeg") != SHARES[0]


def test_kinds_of_tiles_are_apart():
    throughput = Throughput()
    learn(throughput, {"gpu": 1, "cpu": 2, "both": 3}, key="jpeg")
    learn(throughput, {"gpu": 3, "cpu": 2, "both": 1}, key="jpeg2000")
    assert throughput.choose("jpeg") == "gpu"
    assert throughput.choose("jpeg2000") == "both"
    assert not throughput.settled("other")


def test_both_finish_together():
    throughput = Throughput()
    assert throughput.share("jpeg") == 0.5
    learn(throughput, {"gpu": 1, "cpu": 3, "both": 1})
    share = throughput.share("jpeg")
    assert share * 1 == pytest.approx((1 - share) * 3)
