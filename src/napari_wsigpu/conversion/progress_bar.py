"""A progress bar in a terminal."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from napari_wsigpu.model.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Event

BAR = 30
REFRESH_SECONDS = 0.2
# The remaining time is estimated from this window only: the tiles of an interrupted conversion are
# verified much faster than new ones are written.
RATE_SECONDS = 20


def print_status(bar: ProgressBar | None, *lines: str) -> None:
    """Print lines on standard error in place of the bar, with control characters escaped."""
    if bar is not None:
        bar.clear()
    print(*map(printable, lines), sep="\n", file=sys.stderr)


def interruptible(bar: ProgressBar | None, interrupted: Event) -> Callable[[int, int], None]:
    """Return a callback that draws a bar, and raises KeyboardInterrupt once the event is set."""

    def progress(done: int, total: int) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        if bar is not None:
            bar(done, total)

    return progress


class ProgressBar:
    """A progress bar in a terminal."""

    def __init__(self) -> None:
        self._drawn = 0.0
        self._recent: deque[tuple[float, int]] = deque()

    def __call__(self, done: int, total: int) -> None:
        """Draw the bar, unless it was drawn a moment ago."""
        now = time.monotonic()
        if now - self._drawn < REFRESH_SECONDS and done < total:
            return
        self._drawn = now
        self._recent.append((now, done))
        while now - self._recent[0][0] > RATE_SECONDS:
            self._recent.popleft()
        start, first = self._recent[0]
        share = done / max(1, total)
        written = done - first
        left = f", {(now - start) / written * (total - done):.0f} s left" if written > 0 else ""
        filled = round(BAR * share)
        bar = "#" * filled + "." * (BAR - filled)
        line = f"\r{bar} {share:4.0%}  {done} of {total} tiles{left}"
        sys.stderr.write(f"{line:<79}")
        sys.stderr.flush()

    def clear(self) -> None:
        """Erase the bar."""
        sys.stderr.write(f"\r{'':79}\r")
