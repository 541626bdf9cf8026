"""`Library`: nvImageCodec's C library, called once for a whole batch.

nvImageCodec's Python module releases and reacquires the GIL for every image. While another thread
draws or prepares the next batch, decoding a viewport would take half a second. Here, only the one
call that decodes a whole batch releases the GIL.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.gpu.jpeg.nvimagecodec_handles import SUCCESS
from napari_wsigpu.gpu.jpeg.nvimagecodec_structs import (
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


# nvimgcodecBackendKind_t.
CPU_ONLY, GPU_ONLY, HARDWARE = 1, 2, 4
# NVIMGCODEC_DEVICE_CPU_ONLY.
NO_DEVICE = -99999
# NVIMGCODEC_PROCESSING_STATUS_SUCCESS.
DECODED = 1
# Versions with these structures: 0.9.x.
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
        If it is not installed, has another version, or can't be initialized.
    """

    def __init__(self) -> None:
        folder = _folder()
        path = str(folder / FILES.get(sys.platform, "libnvimgcodec.so.0"))
        try:
            # `PyDLL` holds the GIL during a call, `CDLL` releases it.
            self._quick, self._long = ctypes.PyDLL(path), ctypes.CDLL(path)
        except OSError as error:
            raise DeviceError(
                f"nvImageCodec cannot be loaded ({error}); install it again."
            ) from error
        for library in (self._quick, self._long):
            for name, types in ARGUMENTS.items():
                getattr(library, f"nvimgcodec{name}").argtypes = types
        found = Properties()
        self._quick.nvimgcodecGetProperties(ctypes.byref(found))
        if found.version not in VERSIONS:
            raise DeviceError(
                f"nvImageCodec {found.version // 100 / 10} is not supported; "
                "install nvidia-nvimgcodec-cu12 or -cu13, version 0.9."
            )
        info = InstanceInfo(
            load_builtin_modules=1,
            load_extension_modules=1,
            extension_modules_path=str(folder / "extensions").encode(),
        )
        self._instance = c_void_p()
        status = self._long.nvimgcodecInstanceCreate(
            ctypes.byref(self._instance), ctypes.byref(info)
        )
        if status != SUCCESS:
            raise DeviceError(f"nvImageCodec can't be initialized (status {status}).")

    def decoder(
        self, device: int, backend: int, options: str = "", threads: int = 0
    ) -> LibraryDecoder:
        """Create a decoder of one backend.

        Parameters
        ----------
        device : int
            Number of the CUDA device, or `NO_DEVICE`.
        backend : int
            One of the backend kinds above.
        options : str
            Options of nvImageCodec's plugins.
        threads : int
            Number of the decoder's own threads; 0 for one on each core.

        Raises
        ------
        DeviceError
            If nvImageCodec has no such decoder here.
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
            raise DeviceError(f"nvImageCodec cannot create a decoder here (status {status}).")
        # nvImageCodec's decoder references both structures, so `LibraryDecoder` keeps them alive.
        return LibraryDecoder(self, handle, (backends, execution))


class LibraryDecoder:
    """A decoder of nvImageCodec. Only one thread may use it at a time."""

    def __init__(self, library: Library, handle: c_void_p, kept: tuple[object, ...]) -> None:
        self._library = library
        self._handle = handle
        self._kept = kept
        self._params = DecodeParams(apply_exif_orientation=0)

    def decode(self, streams: NDArray[np.uint64], images: NDArray[np.uint64]) -> list[bool]:
        """Decode a batch; return whether each image was decoded.

        The call returns when the CPU's part of the work is done. The pixels are valid once the
        images' CUDA stream is synchronized.

        Parameters
        ----------
        streams, images : ndarray of uint64, shape (images,)
            Handles of the code streams, and of the images to decode them to.

        Raises
        ------
        RuntimeError
            If nvImageCodec refuses the batch as a whole.
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
            raise RuntimeError(f"nvImageCodec refused a batch (status {status})")
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
    """Return nvImageCodec's folder without importing it, because its import prints messages."""
    try:
        found = find_spec("nvidia.nvimgcodec")
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None:
        raise DeviceError(
            "nvImageCodec is not installed; install napari-wsigpu[cuda12] or napari-wsigpu[cuda13]."
        )
    return Path(found.origin).parent
