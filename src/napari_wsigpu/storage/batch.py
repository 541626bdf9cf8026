"""What is read into one buffer: runs of local files."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from napari_wsigpu.storage.file import Run

PAGE = 4096


class Readable(Protocol):
    """A local file that is read by position, from any thread."""

    def checked_path(self) -> str:
        """Return the path, once it is sure that the file there is the right one."""

    def reading(self) -> AbstractContextManager[Callable[[memoryview, int], None]]:
        """Give out what fills a view with the bytes from a position on."""


class Batch(NamedTuple):
    """What is read into one buffer: its size in bytes, and the runs of each file."""

    size: int
    reads: Sequence[tuple[Readable, Sequence[Run]]]
