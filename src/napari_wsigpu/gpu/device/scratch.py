"""`Scratch`: device memory for intermediate results, which batches use one after another."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import cupy

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.interfaces import Event, Stream

# Limits of the memory: bytes, and the divisor of device memory. Batches that need more are decoded
# in parts, one after another.
MOST_MEMORY, PART_OF_DEVICE = 2 << 30, 16


class Room(NamedTuple):
    """A block of device memory.

    Attributes
    ----------
    address, size : int
        Device address and bytes.
    memory : cupy.cuda.Memory
        Owner of the memory.
    stream : Stream
        Stream that used it last.
    done : Event
        Reached when that use is done.
    """

    address: int
    size: int
    memory: cupy.cuda.Memory
    stream: Stream
    done: Event


class Scratch:
    """Lends one block of memory, which grows as needed.

    Only one thread at a time may have borrowed it; `trim` may be called from any thread.

    Parameters
    ----------
    device : CudaDevice
        Device of the memory.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._idle: Room | None = None
        # Protects `_idle`. The memory is taken out while work that uses it is submitted, so that
        # `trim` cannot free it.
        self._lock = threading.Lock()

    @property
    def budget(self) -> int:
        """Number of bytes that a batch should not exceed."""
        return min(MOST_MEMORY, self._device.memory[1] // PART_OF_DEVICE)

    def borrow(self, size: int, stream: Stream) -> Room:
        """Return memory of at least `size` bytes; work on `stream` will wait for its last use.

        Raises
        ------
        MemoryError
            If the device does not have enough memory.
        """
        with self._lock:
            room, self._idle = self._idle, None
        if room is not None and room.size >= size:
            if room.stream is not stream:
                stream.wait_event(room.done)
            return room
        if room is not None:
            # Free it first: the device may not have enough for both.
            room.done.synchronize()
            del room
        address, memory = self._device.allocate(size)
        return Room(address, size, memory, stream, self._device.record(stream))

    def give_back(self, room: Room, stream: Stream) -> None:
        """Take back the memory, whose last use has been submitted to `stream`."""
        with self._lock:
            self._idle = room._replace(stream=stream, done=self._device.record(stream))

    def trim(self) -> None:
        """Free the memory, after waiting for its last use."""
        with self._lock:
            room, self._idle = self._idle, None
        if room is not None:
            room.done.synchronize()
