"""Ctrl-C, where files have to be removed first."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from napari_wsigpu.model.interrupt import noticed_interrupt

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def late_interrupt() -> Iterator[None]:
    """Do something to its end before Ctrl-C interrupts; the second time it does so at once."""
    with noticed_interrupt() as noticed:
        yield
    if noticed.is_set():
        raise KeyboardInterrupt
