"""`Scratch`: device memory for intermediate results, lent to batches."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import cupy

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.interfaces import Event, Stream

# Limits of a batch's memory: bytes, and the divisor of device memory. Batches that need more are
# decoded in parts, one after another.
MOST_MEMORY, PART_OF_DEVICE = 2 << 30, 24
# Batches that are decoded at the same time; more of them wait for their memory.
ROOMS = 3


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
    """Lends up to `ROOMS` blocks of memory, which grow as needed.

    Only one thread at a time may have borrowed one; `trim` may be called from any thread.

    Parameters
    ----------
    device : CudaDevice
        Device of the memory.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        # Not borrowed, although earlier work may still use them; the last ones were used last.
        self._idle: list[Room] = []
        # Protects `_idle`. The memory is taken out while work that uses it is submitted, so that
        # `trim` cannot free it.
        self._lock = threading.Lock()

    @cached_property
    def budget(self) -> int:
        """Number of bytes that a batch should not exceed."""
        # Cached because the driver takes long to tell.
        return min(MOST_MEMORY, self._device.memory[1] // PART_OF_DEVICE)

    def borrow(self, size: int, stream: Stream) -> Room:
        """Return memory of at least `size` bytes; work on `stream` will wait for its last use.

        Raises
        ------
        MemoryError
            If the device does not have enough memory.
        """
        with self._lock:
            unused = [room for room in self._idle if room.stream is stream or room.done.done]
            room = None
            if unused or len(self._idle) == ROOMS:
                room = max(unused, key=lambda each: each.size) if unused else self._idle[0]
                self._idle.remove(room)
        if room is not None and room.size >= size:
            if room.stream is not stream:
                stream.wait_event(room.done)
            return room
        if room is not None:
            # Free it first: the device may not have enough for both.
            room.done.synchronize()
            del room
        try:
            address, memory = self._device.allocate(size)
        except MemoryError:
            self.trim()
            address, memory = self._device.allocate(size)
        return Room(address, size, memory, stream, self._device.record(stream))

    def give_back(self, room: Room, stream: Stream) -> None:
        """Take back the memory, whose last use has been submitted to `stream`."""
        with self._lock:
            self._idle.append(room._replace(stream=stream, done=self._device.record(stream)))

    def trim(self) -> None:
        """Free the memory that is not borrowed, after waiting for its last use."""
        with self._lock:
            rooms, self._idle = self._idle, []
        for room in rooms:
            room.done.synchronize()
