"""`KernelEngine`: base class of the decoders that consist of our own kernels."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from napari_wsigpu.gpu.device.cuda import CudaDevice

logger = logging.getLogger(__name__)


class KernelEngine(ABC):
    """Kernels of one device for a kind of tiles.

    Only one thread may call a subclass's `decode` at a time (it holds `DecodeWorker.decoding`);
    `ready` may be called from any thread.

    Parameters
    ----------
    device : CudaDevice
        Device to decode on.

    Attributes
    ----------
    works : bool or None
        Whether the kernels can be compiled for the device; None before `ready` was called.
    """

    # What happens to the tiles if the kernels cannot be compiled, for the log.
    _otherwise: ClassVar[str]

    def __init__(self, device: CudaDevice) -> None:
        self.works: bool | None = None
        self._device = device

    @staticmethod
    @abstractmethod
    def _programs() -> tuple[str, ...]:
        """Return the sources of the kernels."""

    def ready(self) -> bool:
        """Return whether the device runs the kernels, which are compiled on the first call."""
        if self.works is None:
            try:
                self._device.compile(*self._programs())
                self.works = True
            except DeviceError as error:
                self.works = False
                logger.info("%s: %s", self._otherwise, error)
        return self.works
