"""What a batch in flight needs beside the places of its tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.cuda import CudaDevice

SMALLEST = 1 << 20
FEW_TILES = 320


class Workspace:
    """Handles and memory that one batch after the other uses; for one thread at a time.

    Parameters
    ----------
    device : CudaDevice
        What decodes.

    Attributes
    ----------
    device : CudaDevice
        The same.
    streams : LibraryStreams
        The batch's code streams.
    images : LibraryImages
        Where nvImageCodec decodes each of them to.
    encoded : ndarray of uint8
        Host memory for code streams that have to be put together.
    planes : int
        Address of device memory for samples that are not yet pixels.
    doubts : ndarray of int32
        Flags that the device sets, of tiles that may be wrong.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.streams = device.code_streams()
        self.images = device.images()
        self.encoded: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.planes = 0
        self._planes: tuple[int, Any] = 0, None
        self.doubts: NDArray[np.int32] = device.shared(FEW_TILES, np.int32)

    def make_room(self, encoded: int, planes: int, tiles: int) -> None:
        """Have at least so many bytes in `encoded` and at `planes`, and no doubts of any tile.

        Raises
        ------
        MemoryError
            If the device has not enough.
        """
        if encoded > len(self.encoded):
            self.encoded = self.device.shared(_generous(encoded), np.uint8)
        if planes > self._planes[0]:
            self.planes, self._planes = 0, (0, None)
            size = _generous(planes)
            self.planes, memory = self.device.allocate(size)
            self._planes = size, memory
        if tiles > len(self.doubts):
            self.doubts = self.device.shared(2 * tiles, np.int32)
        self.doubts[:tiles] = 0

    def clear(self) -> None:
        """Let go of the batch."""
        self.streams.clear()
        self.images.clear()


def _generous(size: int) -> int:
    return max(SMALLEST, size + size // 4)
