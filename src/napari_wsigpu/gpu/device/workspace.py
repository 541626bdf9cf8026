"""`Workspace`: handles and memory that a batch needs until the device is done with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import cupy
    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.cuda import CudaDevice

# Minimum size of an allocation in bytes, and number of flags at first.
SMALLEST = 1 << 20
FEW_TILES = 320


class Workspace:
    """Handles and memory that batches use one after another, each until its stream is done.

    `DecodeWorker` lends a workspace to one batch at a time, so it needs no lock.

    Parameters
    ----------
    device : CudaDevice
        Device that decodes.

    Attributes
    ----------
    device : CudaDevice
        The parameter.
    streams : LibraryStreams
        Code streams of the batch.
    images : LibraryImages
        Device memory to which nvImageCodec decodes each code stream.
    encoded : ndarray of uint8
        Page-locked memory for joined code streams; nvImageCodec and kernels read it.
    planes : int
        Address of device memory for decoded planes.
    doubts : ndarray of int32
        Page-locked flags that kernels set for tiles that may be wrong.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.streams = device.code_streams()
        self.images = device.images()
        self.encoded: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.planes = 0
        self._planes: tuple[int, cupy.cuda.Memory | None] = 0, None  # size and owner of `planes`
        self.doubts: NDArray[np.int32] = device.pinned_array(FEW_TILES, np.int32)

    def make_room(self, encoded: int, planes: int, tiles: int) -> None:
        """Enlarge the memory if necessary, and clear the flags, while the device uses neither.

        Parameters
        ----------
        encoded, planes : int
            Minimum sizes of `encoded` and of the memory at `planes`, in bytes.
        tiles : int
            Minimum number of flags.

        Raises
        ------
        MemoryError
            If the device or the system does not have enough memory.
        """
        if encoded > len(self.encoded):
            self.encoded = self.device.pinned_array(_generous(encoded), np.uint8)
        if planes > self._planes[0]:
            # Free the old memory first: the device may not have enough for both.
            self.planes, self._planes = 0, (0, None)
            size = _generous(planes)
            self.planes, memory = self.device.allocate(size)
            self._planes = size, memory
        if tiles > len(self.doubts):
            self.doubts = self.device.pinned_array(2 * tiles, np.int32)
        self.doubts[:tiles] = 0

    def clear(self) -> None:
        """Forget the batch's code streams and images; handles and memory are kept."""
        self.streams.clear()
        self.images.clear()


def _generous(size: int) -> int:
    """Add a quarter, so that a slightly larger batch does not allocate again."""
    return max(SMALLEST, size + size // 4)
