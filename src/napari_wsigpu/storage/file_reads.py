"""A plan of reads from local files into one buffer, and the interface of these files."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from napari_wsigpu.storage.file_source import Run

# Direct I/O (O_DIRECT, cuFile) needs offsets, sizes and addresses that are multiples of this.
PAGE = 4096


class Readable(Protocol):
    """A local file that any thread can read by position."""

    def checked_path(self) -> str:
        """Return the path after checking that the file has not been replaced."""

    def open_reader(self) -> AbstractContextManager[Callable[[memoryview, int], None]]:
        """Open the file; yield ``read(view, offset)``, which fills the view from that offset."""


class FileReads(NamedTuple):
    """Runs of bytes to read from each file into one buffer of `size` bytes."""

    size: int
    reads: Sequence[tuple[Readable, Sequence[Run]]]
