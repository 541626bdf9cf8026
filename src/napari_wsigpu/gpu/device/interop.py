"""`SharedBuffer`: memory of OpenGL that CUDA writes to, so that pixels need not visit the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from napari_wsigpu.gpu.device.driver import import_cuda
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

MOST_DEVICES = 16
NULL_STREAM = 0


class SharedBuffer:
    """A buffer object of an OpenGL context that one CUDA device can write to.

    All is done by a thread in which that context is the current one.

    Parameters
    ----------
    device : str
        The device's name.
    index : int
        Its number.
    active : callable
        Makes the device the calling thread's current one.
    buffer : int
        OpenGL's name of the buffer.
    size : int
        Its bytes.

    Attributes
    ----------
    size : int
        As given.

    Raises
    ------
    DeviceError
        If OpenGL draws on another GPU, or its buffers can't be shared.
    """

    def __init__(
        self,
        device: str,
        index: int,
        active: Callable[[], AbstractContextManager[Any]],
        buffer: int,
        size: int,
    ) -> None:
        self.size = size
        self._device = device
        self._active = active
        self._runtime: Any = import_cuda("cuda.bindings.runtime", device)
        self._resource: Any = None
        every = self._runtime.cudaGLDeviceList.cudaGLDeviceListAll
        flags = self._runtime.cudaGraphicsRegisterFlags.cudaGraphicsRegisterFlagsWriteDiscard
        with active():
            count, devices = self._call("cudaGLGetDevices", MOST_DEVICES, every)
            if index not in list(devices)[:count]:
                raise DeviceError(f"OpenGL does not draw on '{device}'.")
            (self._resource,) = self._call("cudaGraphicsGLRegisterBuffer", buffer, flags)

    def write(self, address: int, size: int) -> None:
        """Copy device memory to the buffer's begin; what OpenGL does next waits for it.

        Raises
        ------
        DeviceError
            If CUDA refuses.
        """
        if size > self.size:
            raise DeviceError(f"A picture of {size} bytes needs a larger buffer than {self.size}.")
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        with self._active():
            self._call("cudaGraphicsMapResources", 1, self._resource, NULL_STREAM)
            try:
                target, _ = self._call("cudaGraphicsResourceGetMappedPointer", self._resource)
                self._call("cudaMemcpyAsync", target, address, size, kind, NULL_STREAM)
            finally:
                self._call("cudaGraphicsUnmapResources", 1, self._resource, NULL_STREAM)

    def close(self) -> None:
        """Let go of the buffer, before OpenGL deletes it."""
        resource, self._resource = self._resource, None
        if resource is not None:
            with self._active():
                self._call("cudaGraphicsUnregisterResource", resource)

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        error, *found = getattr(self._runtime, name)(*arguments)
        if int(error) != 0:
            raise DeviceError(
                f"'{self._device}' can't share memory with OpenGL: {name} says "
                f"{getattr(error, 'name', error)}."
            )
        return list(found)
