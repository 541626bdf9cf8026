"""Encoded bytes that are in memory already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.storage.source import JoinedBytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.storage.source import NewBuffer


class MemorySource:
    """Bytes of a picture that a slide's metadata holds; see `ByteSource`."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; fewer where the data end before."""
        return [self._data[offset : offset + length] for offset, length in ranges]

    def read_joined(
        self,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        new_buffer: NewBuffer = bytearray,
    ) -> JoinedBytes:
        """Return all bytes, and where each range lies in them."""
        size = len(self._data)
        buffer = new_buffer(size)
        memoryview(buffer)[:size] = self._data
        starts = np.minimum(offsets, size)
        return JoinedBytes(buffer, starts, np.minimum(lengths, size - starts))

    def release(self) -> None:
        """Do nothing: there is no handle."""

    def close(self) -> None:
        """Do nothing: there is no handle."""
