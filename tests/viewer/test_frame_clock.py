"""How long a frame may wait for tiles."""

import time

import pytest

from napari_wsigpu.viewer.drawing.frame_clock import (
    JUMP_PATIENCE_SECONDS,
    MORE_PATIENCE_SECONDS,
    PATIENCE_SECONDS,
    FrameClock,
)


@pytest.mark.parametrize(
    ("rest", "jumped", "expected"),
    [
        (0.0, False, PATIENCE_SECONDS),
        (0.0, True, PATIENCE_SECONDS),
        (0.1, False, MORE_PATIENCE_SECONDS),
        (0.1, True, JUMP_PATIENCE_SECONDS),
    ],
)
def test_a_movement_after_a_rest_waits_longer(rest, jumped, expected):
    clock = FrameClock()
    clock.start()
    time.sleep(0.05)
    clock.end(None)
    time.sleep(rest)
    clock.start()
    before = time.perf_counter()
    until = clock.patient_until(jumped=jumped)
    assert before + expected <= until <= time.perf_counter() + expected
    # All layers of a frame share one limit.
    time.sleep(0.01)
    assert clock.patient_until(jumped=jumped) == until
