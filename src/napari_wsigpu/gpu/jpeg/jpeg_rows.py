"""Encoded JPEGs in rows of memory, which nvImageCodec's CPU backend decodes by one call."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.gpu.jpeg.library import CPU_ONLY, NO_DEVICE, Library

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.cpu import Parts
    from napari_wsigpu.gpu.jpeg.library_handles import ImageFormat

    Bytes = NDArray[np.uint8]

# Of fewer tiles at a time some threads wait for others; a decoder keeps memory for their pixels.
AT_ONCE, MOST_BYTES = 256, 64 << 20
SHORTEST_ROW = 4 << 10
# As libjpeg does by itself, and everybody else who decodes by it.
SMOOTH = "libjpeg_turbo_decoder:fancy_upsampling=1"


def at_once(size: int) -> int:
    """Return how many tiles of so many bytes are decoded by one call."""
    return max(1, min(AT_ONCE, MOST_BYTES // size))


class JpegRows:
    """A decoder of JPEGs that lie in rows of its memory.

    Code streams of the library stay bound to the rows: tiles of one form follow each other in
    them, and only what is wanted of each has to be told.

    Parameters
    ----------
    library : Library
        The library.
    threads : int
        How many of its threads decode.
    """

    def __init__(self, library: Library, threads: int) -> None:
        self.threads = threads
        self._decoder = library.decoder(NO_DEVICE, CPU_ONLY, SMOOTH, threads)
        self._streams, self._parts = library.streams(), library.parts()
        self._images = library.images(on_device=False)
        self._form: Hashable = None
        self._held = np.zeros(AT_ONCE, np.uint64)
        self._rows: Bytes = np.empty((0, 0), np.uint8)
        self._memory: Bytes = self._rows
        self._addresses: list[int] = []

    def make_room(self, length: int) -> Bytes:
        """Return `AT_ONCE` rows of memory, each for a JPEG of up to so many bytes."""
        if self._rows.shape[1] < length:
            size = max(SHORTEST_ROW, 1 << (length - 1).bit_length())
            self._rows = np.zeros((AT_ONCE, size), np.uint8)
            self._forget()
        return self._rows

    def memory(self, size: int) -> Bytes:
        """Return memory for so many bytes of each of `at_once` tiles."""
        if self._memory.shape[1] != size:
            self._memory = np.empty((at_once(size), size), np.uint8)
            first = int(self._memory.ctypes.data)
            self._addresses = [first + size * number for number in range(len(self._memory))]
        return self._memory

    def decode(
        self,
        numbers: NDArray[np.int64],
        parts: Parts | None,
        targets: Sequence[Bytes | None],
        image: ImageFormat,
        form: Hashable,
    ) -> list[bool]:
        """Decode JPEGs of one form.

        Parameters
        ----------
        numbers : ndarray of int64
            Their rows.
        parts : Parts or None
            What is wanted of the first of them, and where it goes.
        targets : sequence of (ndarray of uint8 or None)
            Where the pixels of the others go; None for the row of `memory`.
        image : ImageFormat
            What they are when they are decoded.
        form : hashable
            What the library keeps of the first JPEG of a row, and all later ones must be like.

        Returns
        -------
        list of bool
            Of each, whether it worked.
        """
        if form != self._form:
            self._forget()
            self._form = form
        self._parts.clear()
        self._images.clear()
        for number in numbers[self._held[numbers] == 0].tolist():
            self._bind(number)
        streams = self._held[numbers]
        known = bool(streams.all())
        if known and parts is not None and len(parts):
            known = self._parts.add(streams, parts) and self._images.add_parts(parts, image)
            streams[: len(parts)] = self._parts.used
        whole = numbers[len(numbers) - len(targets) :].tolist()
        for number, target in zip(whole, targets, strict=True):
            place = self._addresses[number] if target is None else int(target.ctypes.data)
            self._images.add(place, image, 0)
        if known:
            with suppress(RuntimeError):
                return self._decoder.decode(streams, self._images.used)
        return [False] * len(numbers)  # each is decoded by itself

    def close(self) -> None:
        """Destroy the decoder."""
        self._decoder.close()

    def _bind(self, number: int) -> None:
        """Bind a code stream to a row, which holds a JPEG now, unless the library refuses it."""
        row = self._rows[number]
        if self._streams.add(int(row.ctypes.data), len(row)):
            self._held[number] = self._streams.last

    def _forget(self) -> None:
        self._held[:] = 0
        self._streams.clear()
        self._form = None
