"""Kernels that are compiled when they are first needed, and kept on disk by CuPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from napari_wsigpu.errors import DeviceError

if TYPE_CHECKING:
    from napari_wsigpu.gpu.device import Stream

# Floats are rounded after each operation, as those of the host are.
OPTIONS = ("--fmad=false",)


class CompiledKernels:
    """The kernels of one text of CUDA C; see `gpu.device.KernelModule`.

    Parameters
    ----------
    cupy : module
        CuPy, whose current device is to run them.
    code : str
        The text.
    index : int
        The device's number, for the error.

    Raises
    ------
    DeviceError
        If they can't be compiled.
    """

    def __init__(self, cupy: Any, code: str, index: int) -> None:
        self._found: dict[str, Any] = {}
        self._module = cupy.RawModule(code=code, options=OPTIONS)
        try:
            self._module.compile()
        except Exception as error:  # CuPy's, CUDA's or the compiler's, of many kinds
            raise DeviceError(f"Kernels can't be compiled for 'cuda:{index}' ({error}).") from error

    def launch(
        self, name: str, blocks: int, threads: int, arguments: tuple[Any, ...], stream: Stream
    ) -> None:
        """Give a stream so many blocks of so many threads of a kernel."""
        if name not in self._found:
            self._found[name] = self._module.get_function(name)
        with stream:
            self._found[name]((blocks,), (threads,), arguments)
