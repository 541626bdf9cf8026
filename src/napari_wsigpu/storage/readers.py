"""How long something stays open: until nobody reads it any more."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from napari_wsigpu.model.errors import SlideClosedError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Readers:
    """The threads that read something, for which whoever closes it waits.

    It is a context manager: a thread reads within it. Python heeds Ctrl-C between any two of its
    steps, also those that count a reader out. So a thread does not wait for itself: while it
    closes, it reads nothing. For the same reason the lock is a plain one, which ``with`` takes and
    gives back in one step each, as it does not those of a `threading.Condition`.

    Parameters
    ----------
    name : str
        What is read, for the error once it was closed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._reads: dict[int, int] = {}
        self.closed = self._awaited = False

    def __len__(self) -> int:
        return len(self._reads)

    def enter(self) -> int:
        """Count this thread as reading, and return what it leaves by.

        Raises
        ------
        SlideClosedError
            If what it would read was closed.
        """
        with self._lock:
            if self.closed:
                raise closed_error(self._name)
            thread = threading.get_ident()
            self._reads[thread] = self._reads.get(thread, 0) + 1
            return thread

    def leave(self, thread: int) -> None:
        """Count a thread as reading no more; any thread may say so."""
        with self._lock:
            self._reads[thread] -= 1
            if self._reads[thread] <= 0:
                del self._reads[thread]
            if self._awaited:
                self._left.notify_all()

    __enter__ = enter

    def __exit__(self, *_: object) -> None:
        self.leave(threading.get_ident())

    @contextmanager
    def none(self) -> Iterator[None]:
        """Wait until no other thread reads, and let none begin within."""
        with self._lock:
            own, self._awaited = threading.get_ident(), True
            self._left.wait_for(lambda: self._reads.keys() <= {own})
            yield


def closed_error(name: str) -> SlideClosedError:
    """Say that a slide was closed."""
    return SlideClosedError(f"'{name}' was closed; open the slide again.")
