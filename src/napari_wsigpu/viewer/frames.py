"""`Frames`: what frames take, and how long one may wait for tiles."""

from __future__ import annotations

import time
from typing import Any

# Slices of a frame wait at most so long for tiles, and only if that is expected to make them exact.
PATIENCE_SECONDS = 0.012


class Frames:
    """How long frames take, and how long one may still wait for tiles: all layers together.

    Attributes
    ----------
    seconds : float
        What the last frame of a slide took.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began: float | None = None
        self._patient_until: float | None = None

    def begin(self) -> None:
        """Begin to draw."""
        self._began = time.perf_counter()
        self._patient_until = None

    def end(self, event: Any) -> None:
        """Note that all is drawn."""
        if self._began is not None:
            self.seconds = time.perf_counter() - self._began
        self._began = self._patient_until = None

    def patient_until(self) -> float:
        """Return until when slices of this frame may wait."""
        if self._patient_until is None:
            self._patient_until = time.perf_counter() + PATIENCE_SECONDS
        return self._patient_until
