"""The face of a device whose memory holds decoded tiles.

`codecs.cuda` is the real one. All that touches device memory goes through this face, so that
the decoder and the engine above it also run where there is no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import DTypeLike, NDArray

    from napari_wsigpu.codecs.library import LibraryDecoder, LibraryImages, LibraryStreams


class TileFormat(NamedTuple):
    """Decoded tiles that can lie in one block of memory.

    Attributes
    ----------
    height, width, channels, dtype
        Shape and type of the interleaved samples.
    sample_format, color_spec : str
        What nvImageCodec calls samples that are meant like these.
    """

    height: int
    width: int
    channels: int
    dtype: str
    sample_format: str = "I_RGB"
    color_spec: str = "SRGB"


class Window(NamedTuple):
    """A region in a level's own pixels, and the one channel wanted of it (None: all).

    It may reach outside of the level.
    """

    top: int
    left: int
    height: int
    width: int
    channel: int | None = None


class Stream(Protocol):
    """An order of work on a device; a context in which it is the thread's current one."""

    @property
    def ptr(self) -> int:
        """The native handle, ``cudaStream_t`` as an integer."""

    def synchronize(self) -> None:
        """Wait until all work that was given to the stream is done."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> Any: ...


class Event(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Wait until the stream has come there."""


class Device(Protocol):
    """Memory, streams and kernels of one device."""

    name: str

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes of device memory that are free, and that there are."""

    def active(self) -> AbstractContextManager[Any]:
        """Make the device the calling thread's current one."""

    def new_stream(self) -> Stream:
        """Make a stream that does not wait for others."""

    def as_stream(self, stream: Any) -> Stream:
        """Wrap a caller's stream: an integer handle or an object with ``ptr``."""

    def decoder(self, kind: str) -> tuple[LibraryDecoder, str]:
        """Make an nvImageCodec decoder for "jpeg" or "jpeg2000"; return it and its path's name."""

    def code_streams(self, count: int) -> LibraryStreams:
        """Make room for the code streams of a batch."""

    def images(self, addresses: Sequence[int], tile: TileFormat, stream: Stream) -> LibraryImages:
        """Describe places in memory to nvImageCodec; a stream has the pixels."""

    def allocate(self, size: int) -> tuple[int, Any]:
        """Take memory: its address, and what has to be kept while it is used.

        Raises
        ------
        MemoryError
            If there is not enough.
        """

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Return a new device array."""

    def is_own(self, pixels: Any) -> bool:
        """Whether this is an array in the device's memory."""

    def follow(self, stream: Stream) -> None:
        """Have a stream wait for what the thread's current stream holds.

        New arrays may lie in memory that the current stream still uses.
        """

    def record(self, stream: Stream) -> Event:
        """Return the place up to which a stream holds work now."""

    def fill(self, pixels: Any, value: float, stream: Stream) -> None:
        """Set all of a device array to one value."""

    def rows(self, tiles: NDArray[np.int64], stream: Stream) -> Any:
        """Copy rows of (address, tile row, tile column) to the device, for what follows."""

    def paste(
        self,
        rows: Any,
        tile: TileFormat,
        level: tuple[int, int],
        pixels: Any,
        window: Window,
        stream: Stream,
    ) -> None:
        """Copy the parts of tiles that lie in a window to their place in `pixels`.

        What lies beyond the (height, width) of the level is left out.
        """

    def ycbcr_to_rgb(self, rows: Any, tile: TileFormat, stream: Stream) -> None:
        """Convert full-range YCbCr tiles to RGB in place, rounded as libjpeg does."""

    def round_as_libjpeg(self, rows: Any, tile: TileFormat, stream: Stream) -> NDArray[np.int32]:
        """Give RGB that a JPEG engine made of YCbCr the rounding of libjpeg, in place.

        Returns
        -------
        ndarray of int32
            Valid once the stream is synchronised, one flag a tile: not 0 where a clipped pixel
            hides how it has to be rounded.
        """

    def upload(self, address: int, pixels: NDArray[Any], stream: Stream) -> None:
        """Copy host pixels to device memory; keep them until the stream is synchronised."""

    def send(self, pixels: NDArray[Any], target: Any, stream: Stream) -> None:
        """Copy host pixels to a device array; keep them until the stream is synchronised."""

    def download(self, pixels: Any, stream: Stream) -> NDArray[Any]:
        """Copy a device array to the host; valid once the stream is synchronised."""

    def download_tile(self, address: int, tile: TileFormat, stream: Stream) -> NDArray[Any]:
        """Copy one tile to the host; valid once the stream is synchronised."""

    def staging(self, count: int, size: int) -> NDArray[Any]:
        """Return host memory of shape (count, size) in bytes, fast to upload."""
