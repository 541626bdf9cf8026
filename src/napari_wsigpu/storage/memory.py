"""Encoded bytes that are already in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from napari_wsigpu.storage.source import ViewSource

if TYPE_CHECKING:
    from collections.abc import Sequence


class MemorySource(ViewSource):
    """Source for an associated image that the slide's metadata contains; see `ByteSource`."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; fewer past the end of the data."""
        return [self._data[offset : offset + length] for offset, length in ranges]

    def release(self) -> None:
        """Do nothing: there is no handle."""

    def close(self) -> None:
        """Do nothing: there is no handle."""
