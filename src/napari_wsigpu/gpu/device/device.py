"""The interface of a device whose memory holds decoded tiles.

`gpu.device.cuda` is the real one. All that touches device memory goes through it, so that
the decoder and the engine above it also run where there is no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import DTypeLike, NDArray

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.gpu.device.interop import SharedBuffer
    from napari_wsigpu.gpu.jpeg.jpeg_engine import JpegEngine
    from napari_wsigpu.gpu.jpeg.library import LibraryDecoder
    from napari_wsigpu.gpu.jpeg.library_handles import LibraryImages, LibraryStreams
    from napari_wsigpu.model.layout import LevelLayout


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


class KernelModule(Protocol):
    """What a device runs: the kernels of texts of CUDA C."""

    def launch(
        self, name: str, blocks: int, threads: int, arguments: tuple[Any, ...], stream: Stream
    ) -> None:
        """Give a stream so many blocks of so many threads of a kernel.

        Parameters
        ----------
        name : str
            The kernel's.
        blocks, threads : int
            How many, and of each how many; a kernel works with any.
        arguments : tuple
            NumPy scalars of the kernel's types; addresses as ``uint64``.
        stream : Stream
            Which runs it.
        """


class Device(Protocol):
    """Memory, streams and kernels of one device.

    Attributes
    ----------
    name : str
        As users name it.
    jpeg_engine : JpegEngine
        How it decodes JPEG.
    """

    name: str
    jpeg_engine: JpegEngine

    @property
    def model(self) -> str:
        """As its maker names it."""

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

    def code_streams(self) -> LibraryStreams:
        """Make room for the code streams of a batch."""

    def images(self) -> LibraryImages:
        """Make room for descriptions of memory that nvImageCodec decodes a batch to."""

    def allocate(self, size: int) -> tuple[int, Any]:
        """Take memory: its address, and what has to be kept while it is used.

        Raises
        ------
        MemoryError
            If there is not enough.
        """

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Return a new device array."""

    def address(self, pixels: Any) -> int:
        """Return where a device array begins."""

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

    def table(self, table: NDArray[Any], stream: Stream) -> Any:
        """Copy a table to the device, as bytes."""

    def paste(
        self,
        pastes: NDArray[np.void],
        tile: TileFormat,
        pixels: Any,
        stream: Stream,
        *,
        channel: int | None = None,
        step: tuple[int, int] = (1, 1),
    ) -> None:
        """Copy parts of tiles to their places in `pixels`.

        Parameters
        ----------
        pastes : ndarray of `gpu.device.tables.PASTE`
            The parts.
        tile : TileFormat
            What the tiles are.
        pixels : device array
            Of all channels, or of the one.
        stream : Stream
            Which does it.
        channel : int, optional
            One channel instead of all.
        step : tuple of (int, int)
            Every how many rows and columns of a tile one is copied.
        """

    def colors(self, table: ColorTable) -> Any:
        """Return a table's colours in device memory, copied once while the table lives.

        Raises
        ------
        MemoryError
            If there is not enough.
        """

    def paste_colors(
        self,
        pastes: NDArray[np.void],
        tile: TileFormat,
        pixels: Any,
        colors: Any,
        stream: Stream,
        *,
        step: tuple[int, int] = (1, 1),
    ) -> None:
        """Do as `paste` with all channels of 8-bit RGB or RGBA, and look each colour up."""

    def paste_scaled(
        self,
        parts: NDArray[np.void],
        tile: TileFormat,
        pixels: Any,
        stream: Stream,
        *,
        channel: int | None = None,
        colors: Any = None,
    ) -> None:
        """Draw parts of tiles, larger or smaller than they are, in `pixels`.

        Pixels of 8 bits that become more than four times as large are interpolated within their
        tile, others are the nearest ones.

        Parameters
        ----------
        parts : ndarray of `gpu.device.tables.SCALED`
            The parts.
        tile : TileFormat
            What the tiles are.
        pixels : device array
            Of the channel; RGBA of 8 bits for all channels, which are RGB or RGBA then.
        stream : Stream
            Which does it.
        channel : int, optional
            One channel instead of all.
        colors : device array, optional
            By `colors`: what RGB becomes.
        """

    def share_buffer(self, buffer: int, size: int) -> SharedBuffer:
        """Let the device write into a buffer of the thread's current OpenGL context.

        Raises
        ------
        DeviceError
            If OpenGL draws on another GPU, or its buffers can't be shared.
        """

    def lay_out(
        self, segments: NDArray[np.void], level: LevelLayout, background: float, stream: Stream
    ) -> None:
        """Put the samples of raw segments to their places in tiles.

        Parameters
        ----------
        segments : ndarray of `gpu.device.tables.SEGMENT`
            The segments.
        level : LevelLayout
            Theirs.
        background : int or float
            The sample that is put where the file has no segment.
        stream : Stream
            Which does it.
        """

    def average_area(
        self,
        finer: Any,
        pixels: Any,
        scale: tuple[float, float],
        first: tuple[int, int],
        stream: Stream,
    ) -> None:
        """Average finer pictures to smaller ones; see `reading.average.resample_area`.

        Parameters
        ----------
        finer, pixels : device array, shape (pictures, height, width, channels)
            Of one of `AVERAGED_TYPES`. `pixels` of one picture may be a part of a larger one.
        scale : tuple of (float, float)
            How many finer pixels one spans, down and across.
        first : tuple of (int, int)
            Row and column of the first pixel; `finer` begins with what lies under that.
        stream : Stream
            Which does it.
        """

    def ycbcr_to_rgb(self, addresses: NDArray[np.int64], tile: TileFormat, stream: Stream) -> None:
        """Convert full-range YCbCr tiles to RGB in place, rounded as libjpeg does."""

    def merge_planes(
        self,
        tiles: NDArray[np.void],
        tile: TileFormat,
        sampling: tuple[int, int],
        doubts: NDArray[np.int32],
        stream: Stream,
        *,
        to_rgb: bool,
    ) -> None:
        """Put the planes of JPEG tiles together to pixels, as libjpeg does.

        Parameters
        ----------
        tiles : ndarray of `gpu.device.tables.JPEG_TILE`
            Of each its address, its planes, the strip below it, and its scan, by `shared`.
        tile : TileFormat
            The tiles.
        sampling : tuple of (int, int)
            Luma samples for one of chroma, across and down.
        doubts : ndarray of int32
            By `shared`: is set for tiles whose strip is not there, whose scan has a marker, or
            whose first block is of another brightness than the scan's first code says.
        stream : Stream
            Which does it.
        to_rgb : bool
            Convert from YCbCr.
        """

    def compile(self, *texts: str) -> KernelModule:
        """Compile kernels, once for the same texts; floats are rounded after each operation.

        Raises
        ------
        DeviceError
            If they can't be compiled.
        """

    def shared(self, count: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return host memory that the device can read and set.

        Raises
        ------
        MemoryError
            If there is not enough.
        """

    def copy(self, address: int, pixels: Any, stream: Stream) -> None:
        """Copy a device array to other device memory."""

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
