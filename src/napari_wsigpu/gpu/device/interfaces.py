"""Types that the device and its users share: tile formats, slots, streams and events.

`gpu.device.cuda.CudaDevice` is the only class that touches device memory. Without a GPU, tests can
therefore run the decoders, and the reading code that uses them, on a substitute for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from napari_wsigpu.model.arrays import Integers

# Sample types that `CudaDevice.average_area` has a kernel for.
AVERAGED_TYPES = ("uint8", "uint16", "int16", "float32")


class TileFormat(NamedTuple):
    """Shape and sample type of decoded tiles. Tiles of one format can share a block of memory."""

    height: int
    width: int
    channels: int
    dtype: str


class Slots(NamedTuple):
    """Device memory to which the tiles of a batch are decoded.

    Attributes
    ----------
    tile : TileFormat
        Format of each tile.
    addresses : ndarray of int64, shape (tiles,)
        Device address of each tile's first sample.
    """

    tile: TileFormat
    addresses: Integers


class Stream(Protocol):
    """A CUDA stream, which runs work in order; as a context, the thread's current stream."""

    @property
    def ptr(self) -> int:
        """``cudaStream_t`` as an integer."""

    def synchronize(self) -> None:
        """Block until all work submitted so far is done."""

    def wait_event(self, event: Event) -> None:
        """Make work submitted from now on wait for an event of another stream."""

    def __enter__(self) -> Stream: ...

    def __exit__(self, *error: object) -> bool | None: ...


class Event(Protocol):
    """A point in a stream's work."""

    @property
    def done(self) -> bool:
        """Whether the stream has reached this point."""

    def synchronize(self) -> None:
        """Block until the stream has reached this point."""
