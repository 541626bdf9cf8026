"""Encoded bytes that are in memory already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from napari_wsigpu.storage.source import ViewSource

if TYPE_CHECKING:
    from collections.abc import Sequence


class MemorySource(ViewSource):
    """Bytes of a picture that a slide's metadata holds; see `ByteSource`."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; fewer where the data end before."""
        return [self._data[offset : offset + length] for offset, length in ranges]

    def release(self) -> None:
        """Do nothing: there is no handle."""

    def close(self) -> None:
        """Do nothing: there is no handle."""
