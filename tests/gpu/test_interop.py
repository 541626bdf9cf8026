"""Memory of OpenGL that CUDA writes to: what CUDA is asked for, and what it may refuse."""

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest

from napari_wsigpu.gpu.device import driver
from napari_wsigpu.gpu.device.interop import SharedBuffer
from napari_wsigpu.model.errors import DeviceError

RESOURCE, TARGET = "resource", 4096


class Status(int):
    """What a function of CUDA's runtime returns first."""

    name = "cudaErrorOperatingSystem"


@pytest.fixture
def cuda(monkeypatch):
    """CUDA's runtime: it notes what it is asked for, and refuses what `refused` names."""
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
    monkeypatch.setattr(driver, "driver_is_there", lambda: True)
    return made


def shared(size=1 << 16):
    return SharedBuffer("cuda:0", 0, nullcontext, 7, size)


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


def test_a_buffer_that_can_not_be_shared(cuda):
    cuda.refused = "cudaGraphicsGLRegisterBuffer"
    with pytest.raises(DeviceError, match="GLRegisterBuffer says cudaErrorOperatingSystem"):
        shared()


def test_a_copy_that_fails_leaves_the_buffer_unmapped(cuda):
    buffer = shared()
    cuda.refused = "cudaMemcpyAsync"
    with pytest.raises(DeviceError, match="can't share memory with OpenGL"):
        buffer.write(512, 1000)
    assert cuda.calls[-1][0] == "cudaGraphicsUnmapResources"


def test_a_picture_that_is_too_large(cuda):
    with pytest.raises(DeviceError, match="needs a larger buffer than 100"):
        shared(100).write(512, 101)
