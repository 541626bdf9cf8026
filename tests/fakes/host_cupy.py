"""A stand-in for CuPy whose device memory is host memory, as far as `wsigpu bench` needs it."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pytest

STREAM = 5


class DeviceArray(np.ndarray):
    """Host memory with the interface of a CuPy array."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self, out: Any) -> None:
        out[...] = self


class Stream(nullcontext):
    """A stream that runs all work synchronously."""

    ptr = STREAM

    def __init__(self, non_blocking: bool = False) -> None:
        super().__init__()

    def synchronize(self) -> None:
        pass


def on_device(array: Any) -> DeviceArray:
    return np.asarray(array).view(DeviceArray)


def copy_memory(target: int, source: int, size: int, kind: int, stream: int) -> None:
    assert (kind, stream) == (1, STREAM)
    ctypes.memmove(target, source, size)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the stand-ins in `sys.modules`."""
    cupy = SimpleNamespace(
        asarray=on_device,
        asnumpy=np.asarray,
        ascontiguousarray=lambda array: on_device(np.ascontiguousarray(array)),
        concatenate=lambda arrays: on_device(np.concatenate(arrays)),
        cuda=SimpleNamespace(
            Stream=Stream,
            alloc_pinned_memory=bytearray,
            get_current_stream=Stream,
            runtime=SimpleNamespace(memcpyAsync=copy_memory, memcpyHostToDevice=1),
        ),
        empty=lambda *given: on_device(np.empty(*given)),
        full=lambda *given: on_device(np.full(*given)),
    )
    modules = {
        "cupy": cupy,
        "cupyx": SimpleNamespace(empty_pinned=np.empty),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
