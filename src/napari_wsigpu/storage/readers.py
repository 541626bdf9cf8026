"""A count of active readers, so that a resource is closed only when the last one has finished."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from napari_wsigpu.model.errors import SlideClosedError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Readers:
    """The threads that are reading a resource; closing it waits for them.

    Use it as a context manager around each read.

    Ctrl-C can interrupt a thread between any two bytecodes, even just before `leave`, so that its
    read stays registered. A thread that closes the resource therefore ignores its own reads: it
    can't be reading while it closes. For the same reason, the lock is a plain `threading.Lock`:
    ``with`` acquires and releases it in one uninterruptible step each, unlike a
    `threading.Condition`.

    Parameters
    ----------
    name : str
        Name of the resource, for the error that reads raise after it is closed.

    Attributes
    ----------
    closed : bool
        Set by the owner to refuse new reads for good.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._reads: dict[int, int] = {}  # nested reads of each thread, by its identifier
        self.closed = self._awaited = False

    def __len__(self) -> int:
        return len(self._reads)

    def enter(self) -> int:
        """Register a read by this thread, and return the identifier that `leave` takes.

        Raises
        ------
        SlideClosedError
            If the resource was closed.
        """
        with self._lock:
            if self.closed:
                raise closed_error(self._name)
            thread = threading.get_ident()
            self._reads[thread] = self._reads.get(thread, 0) + 1
            return thread

    def leave(self, thread: int) -> None:
        """Unregister a read; any thread may do this for another one."""
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
    def exclusive(self) -> Iterator[None]:
        """Wait for the reads of all other threads, and block new ones while the context lasts."""
        # `enter` needs this lock, which is held until the caller's block ends.
        with self._lock:
            own, self._awaited = threading.get_ident(), True
            self._left.wait_for(lambda: self._reads.keys() <= {own})
            yield


def closed_error(name: str) -> SlideClosedError:
    """Return the error for reads of a slide that was closed."""
    return SlideClosedError(f"'{name}' was closed; open the slide again.")
