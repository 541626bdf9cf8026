"""How long a frame may wait for tiles."""

import time

import pytest

from napari_wsigpu.viewer.drawing.frame_clock import (
    MORE_PATIENCE_SECONDS,
    PATIENCE_SECONDS,
    FrameClock,
)


@pytest.mark.parametrize(
    ("rest", "expected"), [(0.0, PATIENCE_SECONDS), (0.1, MORE_PATIENCE_SECONDS)]
)
def test_a_movement_after_a_rest_waits_longer(rest, expected):
    clock = FrameClock()
    clock.start()
    time.sleep(0.05)
    clock.end(None)
    time.sleep(rest)
    clock.start()
    before = time.perf_counter()
    until = clock.patient_until()
    assert before + expected <= until <= time.perf_counter() + expected
    # All layers of a frame share one limit.
    time.sleep(0.01)
    assert clock.patient_until() == until
