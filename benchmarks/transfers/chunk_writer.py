"""Chunks of a local Zarr array, written by several threads."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.storage.zarr.writer import put_chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from numpy.typing import NDArray

MOST_THREADS = 16
MOST_BYTES = 256 << 20


class ChunkWriter:
    """Writes chunks from host memory; leaving its ``with`` statement waits for all of them.

    Parameters
    ----------
    folder : Path
        The folder of the array itself.
    array : zarr.Array
        Of shape (height, width, channels); a chunk holds all channels. No filters, no shards.
    encode : callable, optional
        Makes of a chunk's samples the bytes that the array's compressor decodes, for example
        ``numcodecs.LZ4().encode``. By default they are stored as they are.

    Raises
    ------
    OSError
        From `write`, or at the end, if a chunk can't be written.
    """

    def __init__(
        self, folder: Path, array: Any, encode: Callable[[NDArray[Any]], Any] | None = None
    ) -> None:
        self._folder = folder
        self._array = array
        self._encode = encode
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS), "wsigpu-zarr")
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._bytes = 0

    def write(self, pixels: NDArray[Any], top: int, left: int) -> None:
        """Write a region of whole chunks, or one that reaches the array's end.

        Waits while more than 256 MiB are on their way. The pixels may not be changed before the
        end.
        """
        height, width = self._array.chunks[:2]
        for row, column, path in self._places(pixels.shape, top, left):
            part = pixels[row : row + height, column : column + width]
            self._submit(part.nbytes, self._encode_and_put, path, part)

    def close(self) -> None:
        """Wait for all chunks; raises as `write` does."""
        try:
            while self._pending:
                self._finish_first()
        finally:
            self._pool.shutdown()

    def __enter__(self) -> ChunkWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._pool.shutdown(cancel_futures=True)

    def _places(self, shape: Sequence[int], top: int, left: int) -> Iterator[tuple[int, int, Path]]:
        """Yield where each chunk lies in a region, and its file."""
        height, width = self._array.chunks[:2]
        for row in range(0, shape[0], height):
            for column in range(0, shape[1], width):
                chunk = (top + row) // height, (left + column) // width, 0
                yield row, column, self._folder / self._array.metadata.encode_chunk_key(chunk)

    def _encode_and_put(self, path: Path, part: NDArray[Any]) -> None:
        whole = blocks(np, part, self._array.chunks, self._array.fill_value)[0]
        put_chunk(path, whole if self._encode is None else self._encode(whole))

    def _submit(self, size: int, work: Callable[..., None], *given: Any) -> None:
        self._pending.append((self._pool.submit(work, *given), size))
        self._bytes += size
        while self._bytes > MOST_BYTES and len(self._pending) > 1:
            self._finish_first()

    def _finish_first(self) -> None:
        future, size = self._pending.popleft()
        self._bytes -= size
        future.result()


def blocks(module: Any, pixels: Any, chunk: Sequence[int], fill: Any) -> Any:
    """Lay out a region chunk by chunk, padded to whole ones.

    Parameters
    ----------
    module : module
        NumPy or CuPy, whichever the pixels are of.
    pixels : array, shape (height, width, channels)
        The region; its corner is a chunk's.
    chunk : sequence of int
        Height and width of a chunk, and more.
    fill : int or float
        Value of the padding.

    Returns
    -------
    array of uint8, shape (chunks, bytes)
        Row by row.
    """
    height, width, channels = pixels.shape
    rows, columns = -(-height // chunk[0]), -(-width // chunk[1])
    if (height, width) != (rows * chunk[0], columns * chunk[1]):
        shape = rows * chunk[0], columns * chunk[1], channels
        padded = module.full(shape, fill, pixels.dtype)
        padded[:height, :width] = pixels
        pixels = padded
    apart = pixels.reshape(rows, chunk[0], columns, chunk[1], channels).swapaxes(1, 2)
    return module.ascontiguousarray(apart).reshape(rows * columns, -1).view(np.uint8)
