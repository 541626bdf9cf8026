"""What devices, and the code that uses them, have in common: formats, slots and streams.

`gpu.device.cuda.CudaDevice` is the device. All that touches its memory goes through it, so that
the decoder and the engine above it also run on a substitute where there is no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Samples that a device averages to any size.
AVERAGED_TYPES = ("uint8", "uint16", "int16", "float32")


class TileFormat(NamedTuple):
    """Decoded tiles that can lie in one block of memory: shape and type of their samples."""

    height: int
    width: int
    channels: int
    dtype: str


class Slots(NamedTuple):
    """Places in device memory for the tiles of a batch.

    Attributes
    ----------
    tile : TileFormat
        What each place holds.
    addresses : ndarray of int64, shape (tiles,)
        Where they are.
    """

    tile: TileFormat
    addresses: NDArray[np.int64]


class Stream(Protocol):
    """An order of work on a device; a context in which it is the thread's current one."""

    @property
    def ptr(self) -> int:
        """The native handle, ``cudaStream_t`` as an integer."""

    def synchronize(self) -> None:
        """Wait until all work that was given to the stream is done."""

    def wait_event(self, event: Any) -> None:
        """Start what follows only after another stream has come to an event."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> Any: ...


class Event(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Wait until the stream has come there."""
