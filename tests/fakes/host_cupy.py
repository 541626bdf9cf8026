"""CuPy, nvCOMP and kvikio whose device is the host, as far as benchmarks and Zarr need them."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np

if TYPE_CHECKING:
    import pytest

STREAM = 5


class DeviceArray(np.ndarray):
    """Host memory that is copied as device memory is."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self, out: Any) -> None:
        out[...] = self


class Stream(nullcontext):
    """A stream on which all work is done at once."""

    ptr = STREAM

    def __init__(self, non_blocking: bool = False) -> None:
        super().__init__()

    def synchronize(self) -> None:
        pass


class Codec(nullcontext):
    """nvCOMP's, whose LZ4 blocks are imagecodecs'."""

    def __init__(self, algorithm: str, bitstream_kind: str, cuda_stream: int) -> None:
        super().__init__(self)
        assert (algorithm, bitstream_kind, cuda_stream) == ("LZ4", "raw", STREAM)

    def encode(self, arrays: list[Any]) -> list[Any]:
        blocks = (imagecodecs.lz4_encode(array.tobytes(), header=False) for array in arrays)
        return [np.frombuffer(block, np.int8) for block in blocks]


class CuFile(nullcontext):
    """kvikio's, for writing."""

    def __init__(self, path: str, mode: str) -> None:
        super().__init__(self)
        assert mode == "w"
        self._path = path

    def write(self, data: Any) -> None:
        assert isinstance(data, DeviceArray)
        Path(self._path).write_bytes(data)


def on_device(array: Any) -> DeviceArray:
    return np.asarray(array).view(DeviceArray)


def copy_memory(target: int, source: int, size: int, kind: int, stream: int) -> None:
    assert (kind, stream) == (1, STREAM)
    ctypes.memmove(target, source, size)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these be what is imported."""
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
    nvcomp = SimpleNamespace(
        BitstreamKind=SimpleNamespace(RAW="raw"),
        Codec=Codec,
        as_arrays=lambda arrays, cuda_stream: arrays,
    )
    modules = {
        "cupy": cupy,
        "cupyx": SimpleNamespace(empty_pinned=np.empty),
        "kvikio": SimpleNamespace(CuFile=CuFile),
        "nvidia.nvcomp": nvcomp,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
