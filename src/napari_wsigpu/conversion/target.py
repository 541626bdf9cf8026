"""The interface of what writes a conversion's result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from napari_wsigpu.conversion.pixels import Block, Segment

    # Made in any thread, and then given to `write`.
    Job = Callable[[], Sequence[Segment]]


class Target(Protocol):
    """A file or folder that grows tile by tile; `Journal` knows which are there."""

    def begin(self, checked: Callable[[int], None]) -> None:
        """Write all but tiles; let the journal forget tiles that are not there as it knows them.

        `checked` is told how many more of these were looked at.
        """

    def jobs(self, block: Block) -> Iterator[Job]:
        """Yield what encodes the tiles of a block that are not there yet."""

    def write(self, segments: Sequence[Segment]) -> None:
        """Keep encoded tiles, and note them in the journal."""

    def secure(self) -> None:
        """Return when what was written outlasts a failure of power."""

    def finish(self) -> None:
        """Make the result whole, once all tiles are there."""

    def close(self) -> None:
        """Let go of handles."""
