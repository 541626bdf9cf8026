"""Ctrl-C handling for the command line, so that long operations can stop cleanly."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

# Exit status of a process that SIGINT ended: 128 + 2.
INTERRUPTED = 130


@contextmanager
def interrupt_event(then: Callable[[], None] = lambda: None) -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets; a second Ctrl-C interrupts immediately.

    The first one also calls `then`.

    Raising from a signal handler is unreliable: Python drops exceptions raised while a finalizer
    runs. Only the main thread receives signals; in any other thread, the event is never set.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def handle(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        then()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
