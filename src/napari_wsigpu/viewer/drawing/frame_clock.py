"""Duration of frames, and the time that the current frame may wait for tiles."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from napari.utils.events import Event

# Longest wait for tiles in one frame. A frame waits only if all of them are expected in this time.
PATIENCE_SECONDS = 0.012
# The GPU decodes several times slower while it draws, so a coarse frame costs more than waiting.
# It would also delay the exact frame of a single movement.
MORE_PATIENCE_SECONDS = 0.03
# After a jump, most tiles are missing: a coarse frame is of little use. On two cores, it delays the
# exact frame by as much as it takes itself.
JUMP_PATIENCE_SECONDS = 0.075


class FrameClock:
    """Clock of frames; all layers of a frame share one limit on waiting for tiles.

    Attributes
    ----------
    seconds : float
        Duration of the last frame that showed a slide.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started: float | None = None
        self._ended = 0.0
        self._patient_since: float | None = None

    def start(self) -> None:
        """Start a frame."""
        self._started = time.perf_counter()
        self._patient_since = None

    def end(self, event: Event) -> None:
        """End the frame, and record its duration."""
        self._ended = time.perf_counter()
        if self._started is not None:
            self.seconds = self._ended - self._started
        self._started = self._patient_since = None

    def patient_until(self, *, on_device: bool = False, jumped: bool = False) -> float:
        """Return the time until which slices of this frame may wait for tiles.

        Parameters
        ----------
        on_device : bool
            Whether a GPU decodes the tiles.
        jumped : bool
            Whether most tiles of the view are missing.
        """
        if self._patient_since is None:
            self._patient_since = time.perf_counter()
        rested = self._started is not None and self._started - self._ended > self.seconds
        patience = MORE_PATIENCE_SECONDS if on_device or rested else PATIENCE_SECONDS
        if jumped and rested:
            patience = JUMP_PATIENCE_SECONDS
        return self._patient_since + patience
