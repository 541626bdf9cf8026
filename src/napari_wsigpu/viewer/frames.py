"""`Frames`: what frames take, and how long one may wait for tiles."""

from __future__ import annotations

import time
from typing import Any

# Slices of a frame wait at most so long for tiles, and only if that is expected to make them exact.
PATIENCE_SECONDS = 0.012
# While a frame is drawn, a GPU's tiles take a few times as long: to draw a coarse one first costs
# more than to wait for them.
DEVICE_PATIENCE_SECONDS = 0.03


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
        self._patient_since: float | None = None

    def begin(self) -> None:
        """Begin to draw."""
        self._began = time.perf_counter()
        self._patient_since = None

    def end(self, event: Any) -> None:
        """Note that all is drawn."""
        if self._began is not None:
            self.seconds = time.perf_counter() - self._began
        self._began = self._patient_since = None

    def patient_until(self, *, on_device: bool = False) -> float:
        """Return until when slices of this frame may wait, for tiles of the host or of a device."""
        if self._patient_since is None:
            self._patient_since = time.perf_counter()
        patience = DEVICE_PATIENCE_SECONDS if on_device else PATIENCE_SECONDS
        return self._patient_since + patience
