"""Rates from counters."""

import pytest

from napari_wsigpu.slide.rates import SECONDS, Rates


def counters(tiles=0, by_gpu=0, read=0, asked=0, hits=0):
    return {
        "decoded": {"cpu": tiles, "nvimagecodec": by_gpu},
        "bytes_decoded": 100 * tiles,
        "bytes_read": read,
        "tiles_asked": asked,
        "cache_hits": hits,
    }


def test_first_update_gives_no_rate():
    rates = Rates()
    rates.add(5.0, counters(70))
    assert rates.latest is None


def test_rate_is_difference_over_time():
    rates = Rates()
    rates.add(5.0, counters(10, by_gpu=5, read=1000, asked=20, hits=4))
    rates.add(7.0, counters(13, by_gpu=12, read=5000, asked=40, hits=14))
    step = rates.latest
    assert step.rate(step.tiles) == pytest.approx((3 + 7) / 2)
    assert step.rate(step.bytes_decoded) == pytest.approx(150)
    assert step.rate(step.bytes_read) == pytest.approx(2000)
    assert (step.requested, step.hits) == (20, 10)


def test_only_the_last_minute_is_kept():
    rates = Rates()
    for second in range(200):
        rates.add(float(second), counters(second))
    assert len(rates.steps) == SECONDS
    assert rates.steps[0].end == 140
    rates.add(1000.0, counters(200))
    assert [step.start for step in rates.steps] == [199]


def test_pauses_are_left_out():
    rates = Rates()
    rates.add(0.0, counters(0))
    rates.add(1.0, counters(1))
    rates.pause()
    rates.add(9.0, counters(500))
    rates.add(10.0, counters(502))
    assert [(step.start, step.tiles) for step in rates.steps] == [(0.0, 1), (9.0, 2)]


def test_updates_at_the_same_time_count_once():
    rates = Rates()
    rates.add(1.0, counters(0))
    rates.add(1.0, counters(5))
    assert rates.latest is None
