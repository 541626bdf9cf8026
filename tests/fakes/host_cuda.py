"""CUDA's kernels, compiled for the host, and as much of CuPy as a `CudaDevice` needs to start them.

Threads run one after another, each block after the one before it. Where threads wait for each
other, a block has one, or `TOGETHER` side by side.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import numpy as np

from napari_wsigpu.gpu.device import cuda, driver
from napari_wsigpu.gpu.device.cuda import CudaDevice

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

# What CUDA's C++ has and the host's has not. Vectors tell of places that are not aligned to them,
# which a GPU would refuse.
SHIM = r"""
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __align__ alignas
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __syncthreads() (meeting ? meeting->arrive_and_wait() : (void)0)
#define __syncwarp() (meeting ? warp->arrive_and_wait() : (void)0)
#define __threadfence __sync_synchronize
#define __nanosleep(nanoseconds) std::this_thread::yield()
using std::max;
using std::min;

struct Place { unsigned x, y, z; };
static thread_local Place blockIdx, threadIdx, gridDim, blockDim;
static thread_local long long misaligned;
static std::barrier<> *meeting;
static thread_local std::barrier<> *warp;

static int __clz(unsigned value) { return value ? __builtin_clz(value) : 32; }
static int __ffs(int value) { return __builtin_ffs(value); }
static unsigned __brev(unsigned value) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; ++bit) reversed |= (value >> bit & 1) << (31 - bit);
    return reversed;
}
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return ((unsigned long long)high << 32 | low) >> (shift & 31);
}
static int __float_as_int(float value) {
    int bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
template <typename T> static T atomicAdd(T *place, T value) {
    return __sync_fetch_and_add(place, value);
}
static unsigned atomicOr(unsigned *place, unsigned value) {
    return __sync_fetch_and_or(place, value);
}

struct alignas(8) uint2 { unsigned x, y; };

struct alignas(16) uint4 {
    unsigned x, y, z, w;
    uint4() {}
    uint4 &operator=(const uint4 &other) {
        misaligned += ((size_t)this & 15) > 0;
        unsigned words[4] = {other.x, other.y, other.z, other.w};
        memcpy((void *)this, words, sizeof words);
        return *this;
    }
    uint4(const uint4 &other) : x(other.x), y(other.y), z(other.z), w(other.w) {
        misaligned += ((size_t)&other & 15) > 0;
    }
};
"""

# Calls a kernel for each thread of each block, and returns how many places were not aligned.
LAUNCHER = r"""
template <typename... Arguments, size_t... Numbers>
static void call(void (*kernel)(Arguments...), void **arguments, std::index_sequence<Numbers...>) {
    kernel(*(typename std::decay<Arguments>::type *)arguments[Numbers]...);
}

template <typename... Arguments>
static long long launch_together(void (*kernel)(Arguments...), const unsigned *sizes,
                                 void **arguments) {
    long long found = 0;
    for (unsigned block = 0; block < sizes[0]; ++block) {
        std::barrier<> all(sizes[3]);
        std::vector<std::unique_ptr<std::barrier<>>> warps;
        for (unsigned first = 0; first < sizes[3]; first += 32)
            warps.emplace_back(new std::barrier<>(std::min(32u, sizes[3] - first)));
        std::vector<std::thread> threads;
        meeting = &all;
        for (unsigned thread = 0; thread < sizes[3]; ++thread)
            threads.emplace_back([&, block, thread] {
                gridDim = {sizes[0], 1, 1}, blockDim = {sizes[3], 1, 1};
                blockIdx = {block, 0, 0}, threadIdx = {thread, 0, 0};
                warp = warps[thread / 32].get();
                call(kernel, arguments, std::index_sequence_for<Arguments...>());
                warp->arrive_and_drop();
                all.arrive_and_drop();
                __sync_fetch_and_add(&found, misaligned);
            });
        for (std::thread &thread : threads) thread.join();
    }
    return found;
}

template <typename... Arguments>
static long long launch(void (*kernel)(Arguments...), const unsigned *sizes, void **arguments) {
    if (sizes[4]) return launch_together(kernel, sizes, arguments);
    meeting = nullptr;
    misaligned = 0;
    gridDim = {sizes[0], sizes[1], sizes[2]};
    blockDim = {sizes[3], 1, 1};
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
                for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
                    call(kernel, arguments, std::index_sequence_for<Arguments...>());
    return misaligned;
}
"""

KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\)\s+)?(\w+)')
LAUNCH = """
extern "C" long long launch_{0}(const unsigned *sizes, void **arguments) {{
    return launch({0}, sizes, arguments);
}}
"""
FLAGS = ("-shared", "-fPIC", "-O1", "-std=c++20", "-w", "-pthread")
# Threads of a block in modules where they wait for each other; several are there at once.
TOGETHER = 1


class HostArray(np.ndarray):
    """Host memory that shows its address as device memory does."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


class Stream(nullcontext):
    """A stream on which all work is done at once."""

    ptr = 0

    def __init__(self, non_blocking: bool = False) -> None:
        super().__init__(self)

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass


class Event:
    """An event, which is reached at once."""

    done = True

    def __init__(self, disable_timing: bool = False) -> None:
        pass

    def record(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Memory:
    """An allocation, whose bytes nobody has written yet."""

    def __init__(self, size: int) -> None:
        self._bytes = np.full(size, 201, np.uint8)
        self.ptr = self._bytes.ctypes.data


class Pool:
    """What page-locked memory comes from; aligned to more than ordinary memory is."""

    def malloc(self, size: int) -> Any:
        room = np.full(size + 512, 201, np.uint8)
        begin = -room.ctypes.data % 512
        return room[begin : begin + size].data


class Kernel:
    """One kernel of a module."""

    def __init__(self, library: ctypes.CDLL, name: str, *, waits: bool) -> None:
        self._name, self._waits = name, waits
        self._launch = getattr(library, f"launch_{name}")
        self._launch.restype = ctypes.c_longlong
        self.launched = 0

    def __call__(self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any]) -> None:
        # As in CuPy: arrays on the device are addresses, those of the host are passed by value.
        values = [
            np.array(value.ctypes.data) if isinstance(value, HostArray) else np.asarray(value)
            for value in arguments
        ]
        places = [value.ctypes.data for value in values]
        threads = min(TOGETHER if self._waits else block[0], block[0])
        at_once = self._waits and threads > 1
        sizes = [*grid, *[1] * (3 - len(grid)), threads, at_once]
        misaligned = self._launch(
            (ctypes.c_uint * 5)(*sizes), (ctypes.c_void_p * len(places))(*places)
        )
        assert not misaligned, f"{self._name} is not aligned at {misaligned} places"
        self.launched += 1


def compiled(folder: Path, compiler: str, code: str, flags: Sequence[str] = FLAGS) -> ctypes.CDLL:
    """Compile kernels, and load them."""
    name = f"kernels-{len(code)}"
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    launches = "".join(LAUNCH.format(name) for name in kernels_of(code))
    source.write_text(SHIM + code + LAUNCHER + launches, "utf-8")
    subprocess.run([compiler, *flags, "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


def kernels_of(code: str) -> list[str]:
    """Return the names of the kernels in a text."""
    found = re.findall(r"^AVERAGE_AREA\((\w+),", code, re.MULTILINE)
    return [*found, *(name for name in KERNEL.findall(code) if name != "name")]


def copy_memory(target: int, source: int, size: int, kind: int, stream: int) -> None:
    ctypes.memmove(target, source, size)


def host_cuda_device(monkeypatch: pytest.MonkeyPatch, folder: Path, compiler: str) -> CudaDevice:
    """Make a `CudaDevice` without nvImageCodec, whose memory and processor are the host's."""

    class RawModule:
        def __init__(self, code: str, options: Sequence[str] = ()) -> None:
            self._library = compiled(folder, compiler, code)
            self._waits = "__syncthreads" in code

        def compile(self) -> None:
            pass

        def get_function(self, name: str) -> Kernel:
            return Kernel(self._library, name, waits=self._waits)

    def empty(shape: Any, dtype: Any) -> Any:
        pixels = np.empty(shape, dtype).view(HostArray)
        pixels.view(np.uint8)[...] = 201
        return pixels

    cupy = ModuleType("cupy")
    cupy.RawModule = RawModule
    cupy.asarray = lambda array: np.array(array).view(HostArray)
    cupy.empty = empty
    cupy.ndarray = HostArray
    cupy.cuda = SimpleNamespace(
        Device=lambda index: nullcontext(),
        Event=Event,
        Memory=Memory,
        PinnedMemoryPool=Pool,
        Stream=Stream,
        get_current_stream=Stream,
        memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        runtime=SimpleNamespace(
            CUDARuntimeError=RuntimeError,
            getDeviceCount=lambda: 1,
            memcpyAsync=copy_memory,
            memGetInfo=lambda: (1 << 30, 1 << 30),
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(driver, "driver_available", lambda: True)
    monkeypatch.setattr(cuda, "Library", MagicMock)
    return CudaDevice(0)
