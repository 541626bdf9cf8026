"""The face of every place that encoded bytes can come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class ByteRange(NamedTuple):
    """`length` bytes from `offset` on."""

    offset: int
    length: int


class ByteSource(Protocol):
    """Encoded bytes by position, from any thread."""

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; fewer where the source ends before.

        Raises
        ------
        SlideError
            If the source can't be read.
        """

    def release(self) -> None:
        """Let go of handles until the next read."""

    def close(self) -> None:
        """Let go of handles for good; later reads raise `SlideClosedError`."""
