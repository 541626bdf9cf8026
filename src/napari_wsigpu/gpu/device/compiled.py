"""Kernels that are compiled when they are first needed, and kept on disk by CuPy."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from napari_wsigpu.gpu.device.device import Stream

# Floats are rounded after each operation, as those of the host are.
OPTIONS = ("--fmad=false",)
KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\(\w+\)\s+)?(\w+)\(")


class CompiledKernels:
    """The kernels of texts of CUDA C, compiled side by side.

    Parameters
    ----------
    cupy : module
        CuPy.
    texts : tuple of str
        The texts.
    index : int
        The device's number.

    Raises
    ------
    DeviceError
        If they can't be compiled.
    """

    def __init__(self, cupy: Any, texts: tuple[str, ...], index: int) -> None:
        def compiled(text: str) -> Any:
            with cupy.cuda.Device(index):
                module = cupy.RawModule(code=text, options=OPTIONS)
                module.compile()
            return module

        try:
            with ThreadPoolExecutor(len(texts), "wsigpu-compile") as pool:
                modules = list(pool.map(compiled, texts))
        except Exception as error:  # CuPy's, CUDA's or the compiler's, of many kinds
            raise DeviceError(f"Kernels can't be compiled for 'cuda:{index}' ({error}).") from error
        self._modules = {
            name: module
            for text, module in zip(texts, modules, strict=True)
            for name in KERNEL.findall(text)
        }
        self._found: dict[str, Any] = {}

    def launch(
        self, name: str, blocks: int, threads: int, arguments: tuple[Any, ...], stream: Stream
    ) -> None:
        """Give a stream so many blocks of so many threads of a kernel.

        Parameters
        ----------
        name : str
            The kernel's.
        blocks, threads : int
            How many, and of each how many; a kernel works with any.
        arguments : tuple
            NumPy scalars of the kernel's types; addresses as ``uint64``.
        stream : Stream
            Which runs it.
        """
        if name not in self._found:
            self._found[name] = self._modules[name].get_function(name)
        with stream:
            self._found[name]((blocks,), (threads,), arguments)
