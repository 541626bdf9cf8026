"""`CompiledKernels`: CUDA kernels compiled on first use and cached on disk by CuPy."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from types import ModuleType

    from cupy import RawKernel, RawModule

    from napari_wsigpu.gpu.device.interfaces import Stream

# Without fused multiply-add, products and sums are rounded separately, as on the host.
OPTIONS = ("--fmad=false",)
KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(")


class CompiledKernels:
    """Kernels from several CUDA sources, which are compiled in parallel.

    Parameters
    ----------
    cupy : module
        CuPy.
    texts : tuple of str
        Sources; each kernel is ``extern "C"`` and has a unique name.
    index : int
        Number of the device.

    Raises
    ------
    DeviceError
        If the kernels cannot be compiled.
    """

    def __init__(self, cupy: ModuleType, texts: tuple[str, ...], index: int) -> None:
        def compiled(text: str) -> RawModule:
            with cupy.cuda.Device(index):
                module = cupy.RawModule(code=text, options=OPTIONS)
                module.compile()
            return module

        try:
            with ThreadPoolExecutor(len(texts), "wsigpu-compile") as pool:
                modules = list(pool.map(compiled, texts))
        except Exception as error:  # CuPy, CUDA and the compiler have no common base class
            raise DeviceError(
                f"Kernels cannot be compiled for 'cuda:{index}' ({error})."
            ) from error
        self._modules = {
            name: module
            for text, module in zip(texts, modules, strict=True)
            for name in KERNEL.findall(text)
        }
        # Filled by `launch` without a lock: two threads would store the same function.
        self._found: dict[str, RawKernel] = {}

    def launch(
        self, name: str, blocks: int, threads: int, arguments: tuple[object, ...], stream: Stream
    ) -> None:
        """Launch a kernel on a stream.

        Parameters
        ----------
        name : str
            Name of the kernel.
        blocks, threads : int
            Number of blocks, and of threads in each. Not all kernels work with any number.
        arguments : tuple
            NumPy scalars of the kernel's types; addresses are ``uint64``.
        stream : Stream
            Stream to which the kernel is submitted.
        """
        if name not in self._found:
            self._found[name] = self._modules[name].get_function(name)
        with stream:
            self._found[name]((blocks,), (threads,), arguments)
