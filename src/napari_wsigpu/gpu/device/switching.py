"""How threads that feed a device share the interpreter."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Seconds.
INTERVAL = 5e-5
LONGEST_TURN = 0.1

# Protects `_users` and `_usual`: the first user shortens the interval, the last one restores it.
_lock = threading.Lock()
_users = 0
_usual = 0.0


@contextmanager
def prompt_switching() -> Iterator[None]:
    """Shorten the interpreter's switch interval from 5 ms to 50 µs, until the last user is done.

    A batch needs the GIL a dozen times, for a few microseconds each. With the default
    interval, the GPU would be idle for up to 5 ms each time while another thread draws or prepares
    the next batch.
    """
    global _users, _usual
    with _lock:
        if _users == 0:
            _usual = sys.getswitchinterval()
            sys.setswitchinterval(min(INTERVAL, _usual))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                sys.setswitchinterval(_usual)


class Turn:
    """The right to prepare work for a device, which one thread has at a time.

    It protects no data. Preparing a batch takes hundreds of NumPy calls, and calls with more than
    500 elements release the GIL. If several threads do that at once, they wait for each other
    after every call, which takes longer than the calls themselves.

    A thread takes the turn to prepare a batch, and lends it while it waits for bytes, for a device
    or for a lock. Others wait for it for `LONGEST_TURN` at most, so a thread that is stopped in its
    turn can't block them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take the turn for the duration of a block, unless this thread has it already."""
        if self._owner == threading.get_ident():
            yield
            return
        self._take()
        try:
            yield
        finally:
            self._give()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lend the turn to other threads for the duration of a block, if this thread has it."""
        had = self._give()
        try:
            yield
        finally:
            if had:
                self._take()

    def _take(self) -> None:
        if self._lock.acquire(timeout=LONGEST_TURN):
            self._owner = threading.get_ident()

    def _give(self) -> bool:
        """Give the turn back; return whether this thread had it."""
        if self._owner != threading.get_ident():
            return False
        self._owner = None
        self._lock.release()
        return True
