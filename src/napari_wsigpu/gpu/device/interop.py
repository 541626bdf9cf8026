"""`SharedBuffer`: OpenGL memory that CUDA writes to, so that pixels do not go through the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from napari_wsigpu.gpu.device.driver import import_cuda
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import ModuleType

MOST_DEVICES = 16
# After a resource is unmapped on the null stream, OpenGL commands wait for that stream's work.
NULL_STREAM = 0


class Device(Protocol):
    """The part of `CudaDevice` that this module uses; its module `cuda` imports this one."""

    name: str
    index: int

    def active(self) -> AbstractContextManager[object]:
        """Return a context in which the device is the calling thread's current one."""


class SharedBuffer:
    """An OpenGL buffer object that is registered with one CUDA device.

    All methods must be called in a thread whose current OpenGL context owns the buffer.

    Parameters
    ----------
    device : CudaDevice
        The device.
    buffer : int
        OpenGL name of the buffer.
    size : int
        Size of the buffer in bytes.

    Attributes
    ----------
    size : int
        Size of the buffer in bytes.

    Raises
    ------
    DeviceError
        If OpenGL draws on another GPU, or its buffers cannot be shared.
    """

    def __init__(self, device: Device, buffer: int, size: int) -> None:
        self.size = size
        self._device = device
        self._runtime: ModuleType = import_cuda("cuda.bindings.runtime", device.name)
        self._resource: object = None  # cudaGraphicsResource_t while registered
        every = self._runtime.cudaGLDeviceList.cudaGLDeviceListAll
        flags = self._runtime.cudaGraphicsRegisterFlags.cudaGraphicsRegisterFlagsWriteDiscard
        with device.active():
            count, devices = self._call("cudaGLGetDevices", MOST_DEVICES, every)
            if device.index not in list(devices)[:count]:
                raise DeviceError(f"OpenGL does not draw on '{device.name}'.")
            (self._resource,) = self._call("cudaGraphicsGLRegisterBuffer", buffer, flags)

    def write(self, address: int, size: int) -> None:
        """Copy device memory to the start of the buffer; later OpenGL commands wait for the copy.

        The copy runs on the null stream. The caller must have synchronized the stream that wrote to
        `address`, and must keep the memory alive until the null stream is done.

        Raises
        ------
        DeviceError
            If CUDA refuses, or the buffer is too small.
        """
        if size > self.size:
            raise DeviceError(f"An image of {size} bytes doesn't fit into a buffer of {self.size}.")
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        with self._device.active():
            # Unmap the buffer even after an error: OpenGL must not use it while it is mapped.
            self._call("cudaGraphicsMapResources", 1, self._resource, NULL_STREAM)
            try:
                target, _ = self._call("cudaGraphicsResourceGetMappedPointer", self._resource)
                self._call("cudaMemcpyAsync", target, address, size, kind, NULL_STREAM)
            finally:
                self._call("cudaGraphicsUnmapResources", 1, self._resource, NULL_STREAM)

    def close(self) -> None:
        """Unregister the buffer; call this before OpenGL deletes it."""
        resource, self._resource = self._resource, None
        if resource is not None:
            with self._device.active():
                self._call("cudaGraphicsUnregisterResource", resource)

    def _call(self, name: str, *arguments: object) -> list[Any]:
        error, *results = getattr(self._runtime, name)(*arguments)
        if int(error) != 0:
            raise DeviceError(
                f"'{self._device.name}' cannot share memory with OpenGL: {name} returned "
                f"{getattr(error, 'name', error)}."
            )
        return list(results)
