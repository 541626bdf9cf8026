"""OpenGL memory that CUDA writes to: the calls of CUDA, and their failures."""

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest

from napari_wsigpu.gpu.device import driver
from napari_wsigpu.gpu.device.interop import SharedBuffer
from napari_wsigpu.model.errors import DeviceError

RESOURCE, TARGET = "resource", 4096


class Status(int):
    """First result of each function of CUDA's runtime."""

    name = "cudaErrorOperatingSystem"


@pytest.fixture
def cuda(monkeypatch):
    """CUDA's runtime; records all calls, and fails in the function `refused`."""
    made = ModuleType("cuda.bindings.runtime")
    made.calls, made.refused, made.devices = [], None, [1, 0]

    def answering(name, *found):
        def answer(*arguments):
            made.calls.append((name, *arguments))
            return (Status(304 if name == made.refused else 0), *found)

        setattr(made, name, answer)

    made.cudaGLGetDevices = lambda most, which: (Status(0), len(made.devices), made.devices)
    answering("cudaGraphicsGLRegisterBuffer", RESOURCE)
    answering("cudaGraphicsMapResources")
    answering("cudaGraphicsResourceGetMappedPointer", TARGET, 1 << 20)
    answering("cudaMemcpyAsync")
    answering("cudaGraphicsUnmapResources")
    answering("cudaGraphicsUnregisterResource")
    made.cudaGLDeviceList = SimpleNamespace(cudaGLDeviceListAll=1)
    made.cudaGraphicsRegisterFlags = SimpleNamespace(cudaGraphicsRegisterFlagsWriteDiscard=2)
    made.cudaMemcpyKind = SimpleNamespace(cudaMemcpyDeviceToDevice=3)
    for name in ("cuda", "cuda.bindings", made.__name__):
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setattr(driver, "driver_available", lambda: True)
    return made


def shared(size=1 << 16):
    device = SimpleNamespace(name="cuda:0", index=0, active=nullcontext)
    return SharedBuffer(device, 7, size)


def test_pixels_are_copied_while_the_buffer_is_mapped(cuda):
    buffer = shared()
    buffer.write(512, 1000)
    assert cuda.calls == [
        ("cudaGraphicsGLRegisterBuffer", 7, 2),
        ("cudaGraphicsMapResources", 1, RESOURCE, 0),
        ("cudaGraphicsResourceGetMappedPointer", RESOURCE),
        ("cudaMemcpyAsync", TARGET, 512, 1000, 3, 0),
        ("cudaGraphicsUnmapResources", 1, RESOURCE, 0),
    ]
    cuda.calls.clear()
    buffer.close()
    buffer.close()
    assert cuda.calls == [("cudaGraphicsUnregisterResource", RESOURCE)]


def test_opengl_on_another_device(cuda):
    cuda.devices = [1]
    with pytest.raises(DeviceError, match="OpenGL does not draw on 'cuda:0'"):
        shared()
    assert cuda.calls == []


def test_buffer_that_cannot_be_registered(cuda):
    cuda.refused = "cudaGraphicsGLRegisterBuffer"
    with pytest.raises(DeviceError, match="GLRegisterBuffer returned cudaErrorOperatingSystem"):
        shared()


def test_failed_copy_unmaps_the_buffer(cuda):
    buffer = shared()
    cuda.refused = "cudaMemcpyAsync"
    with pytest.raises(DeviceError, match="cannot share memory with OpenGL"):
        buffer.write(512, 1000)
    assert cuda.calls[-1][0] == "cudaGraphicsUnmapResources"


def test_image_larger_than_the_buffer(cuda):
    with pytest.raises(DeviceError, match="doesn't fit into a buffer of 100"):
        shared(100).write(512, 101)
