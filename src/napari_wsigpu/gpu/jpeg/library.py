"""nvImageCodec's C library, called once a batch.

Its Python module lets go of the interpreter, and asks for it again, once an image. With a busy
thread beside it, such as one that draws or prepares the next batch, a viewport would take half
a second. Here only the one call that decodes a whole batch lets go of the interpreter.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.gpu.jpeg.library_handles import SUCCESS
from napari_wsigpu.gpu.jpeg.library_structs import (
    Backend,
    BackendParams,
    DecodeParams,
    ExecutionParams,
    InstanceInfo,
    Properties,
)
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

CPU_ONLY, GPU_ONLY, HYBRID, HARDWARE = 1, 2, 3, 4
NO_DEVICE = -99999
DECODED = 1
VERSIONS = range(900, 1000)
FILES = {"win32": "nvimgcodec_0.dll"}
ARGUMENTS = {
    "CodeStreamCreateFromHostMem": [c_void_p, c_void_p, c_void_p, c_size_t, c_void_p],
    "CodeStreamDestroy": [c_void_p],
    "DecoderCreate": [c_void_p, c_void_p, c_void_p, c_char_p],
    "DecoderDecode": [c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_void_p],
    "DecoderDestroy": [c_void_p],
    "FutureDestroy": [c_void_p],
    "FutureGetProcessingStatus": [c_void_p, c_void_p, c_void_p],
    "FutureWaitForAll": [c_void_p],
    "ImageCreate": [c_void_p, c_void_p, c_void_p],
    "ImageDestroy": [c_void_p],
}


class Library:
    """The loaded library and its one instance.

    Raises
    ------
    DeviceError
        If it is not installed, of another version, or does not start.
    """

    def __init__(self) -> None:
        folder = _folder()
        path = str(folder / FILES.get(sys.platform, "libnvimgcodec.so.0"))
        try:
            # The first keeps the interpreter during a call, the second lets others have it.
            self._quick, self._long = ctypes.PyDLL(path), ctypes.CDLL(path)
        except OSError as error:
            raise DeviceError(
                f"nvImageCodec can't be loaded ({error}); install it anew."
            ) from error
        self._declare()
        found = Properties()
        self._quick.nvimgcodecGetProperties(ctypes.byref(found))
        if found.version not in VERSIONS:
            raise DeviceError(
                f"nvImageCodec {found.version // 100 / 10} is of another version than is known "
                "here; install nvidia-nvimgcodec-cu12 or -cu13 of version 0.9."
            )
        info = InstanceInfo(
            load_builtin_modules=1,
            load_extension_modules=1,
            extension_modules_path=str(folder / "extensions").encode(),
        )
        self._instance = c_void_p()
        self._check(self._long.nvimgcodecInstanceCreate, self._instance, ctypes.byref(info))

    def _declare(self) -> None:
        for library in (self._quick, self._long):
            for name, types in ARGUMENTS.items():
                getattr(library, f"nvimgcodec{name}").argtypes = types

    def _check(self, function: Any, handle: c_void_p, *arguments: Any) -> None:
        status = function(ctypes.byref(handle), *arguments)
        if status != SUCCESS:
            raise DeviceError(f"nvImageCodec does not start ({function.__name__}: {status}).")

    def decoder(
        self, device: int, backend: int, options: str = "", threads: int = 0
    ) -> LibraryDecoder:
        """Make a decoder of one backend, with threads of its own, 0 for one a core.

        Raises
        ------
        DeviceError
            If it can't be made.
        """
        backends = Backend(kind=backend, params=BackendParams(load_hint=1.0, load_hint_policy=2))
        execution = ExecutionParams(
            max_num_cpu_threads=threads,
            device_id=device,
            skip_pre_sync=1,
            num_backends=1,
            backends=ctypes.pointer(backends),
        )
        handle = c_void_p()
        status = self._long.nvimgcodecDecoderCreate(
            self._instance, ctypes.byref(handle), ctypes.byref(execution), options.encode()
        )
        if status != SUCCESS:
            raise DeviceError(f"nvImageCodec can't make a decoder here (status {status}).")
        return LibraryDecoder(self, handle, (backends, execution))


class LibraryDecoder:
    """A decoder; for one thread at a time."""

    def __init__(self, library: Library, handle: c_void_p, kept: tuple[Any, ...]) -> None:
        self._library = library
        self._handle = handle
        self._kept = kept
        self._params = DecodeParams(apply_exif_orientation=0)

    def decode(self, streams: NDArray[np.uint64], images: NDArray[np.uint64]) -> list[bool]:
        """Decode a batch; say of each whether it worked.

        Parameters
        ----------
        streams, images : ndarray of uint64, shape (streams,)
            Handles. The stream that the images were made with has the pixels.

        Raises
        ------
        RuntimeError
            If the batch as a whole fails.
        """
        count = len(streams)
        future = c_void_p()
        status = self._library._long.nvimgcodecDecoderDecode(
            self._handle,
            streams.ctypes.data,
            images.ctypes.data,
            count,
            ctypes.byref(self._params),
            ctypes.byref(future),
        )
        if status != SUCCESS:
            raise RuntimeError(f"nvImageCodec refuses a batch (status {status})")
        try:
            self._library._long.nvimgcodecFutureWaitForAll(future)
            found = np.zeros(count, np.uint32)
            size = c_size_t(count)
            self._library._quick.nvimgcodecFutureGetProcessingStatus(
                future, found.ctypes.data, ctypes.byref(size)
            )
        finally:
            self._library._quick.nvimgcodecFutureDestroy(future)
        decoded: list[bool] = (found == DECODED).tolist()
        return decoded

    def close(self) -> None:
        """Destroy the decoder, which takes a few tenths of a second."""
        if self._handle:
            self._library._long.nvimgcodecDecoderDestroy(self._handle)
            self._handle = c_void_p()

    def __del__(self) -> None:
        self.close()


def _folder() -> Path:
    """Return where nvImageCodec is installed; it is not imported, because it would speak up."""
    try:
        found = find_spec("nvidia.nvimgcodec")
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None:
        raise DeviceError(
            "nvImageCodec is not installed; install napari-wsigpu[cuda12] or napari-wsigpu[cuda13]."
        )
    return Path(found.origin).parent
