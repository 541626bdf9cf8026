"""Ctrl-C on the command line, where work should come to an orderly end."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERRUPTED = 130


@contextmanager
def noticed_interrupt() -> Iterator[threading.Event]:
    """Give out what Ctrl-C sets; the second time it interrupts at once.

    An exception that a signal raises is lost if it meets Python in a finalizer.
    """
    noticed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noticed
        return

    def notice(number: int, frame: Any) -> None:
        noticed.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, notice)
    try:
        yield noticed
    finally:
        signal.signal(signal.SIGINT, before)
