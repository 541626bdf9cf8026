"""The face of every tile decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.formats.layout import Encoding, LevelLayout


class EncodedTile(NamedTuple):
    """One tile's encoded bytes, one segment a plane (None where the file has none)."""

    level: LevelLayout
    row: int
    column: int
    segments: tuple[memoryview | None, ...]
    background: float


Deliver = Callable[[int, "NDArray[Any]"], None]


class PendingBatch(Protocol):
    """A batch of tiles that is being decoded."""

    def wait(self) -> dict[int, str]:
        """Return when every tile was delivered or failed: index -> reason of each failure."""

    def cancel(self) -> None:
        """Drop tiles that are not begun and return when no more will be delivered."""


class TileDecoder(Protocol):
    """Decodes batches of tiles."""

    name: str

    def refusal(self, encoding: Encoding) -> str | None:
        """Say why tiles of this encoding can't be decoded; None if they can."""

    def schedule(self, batch: Sequence[EncodedTile], deliver: Deliver) -> PendingBatch:
        """Begin to decode a batch and return at once.

        Parameters
        ----------
        batch : sequence of EncodedTile
            The tiles.
        deliver : callable
            Called from any thread with the index in `batch` and the pixels of each decoded
            tile: shape (height, width, channels), native byte order, not to be written to.
            Edge tiles may be cut to their level's extent.
        """

    def release(self) -> None:
        """Let go of threads and memory until the next batch."""
