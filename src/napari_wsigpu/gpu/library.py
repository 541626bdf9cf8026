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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.errors import DeviceError
from napari_wsigpu.gpu.library_structs import (
    Backend,
    BackendParams,
    DecodeParams,
    ExecutionParams,
    ImageInfo,
    InstanceInfo,
    Orientation,
    Plane,
    Properties,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

CPU_ONLY, GPU_ONLY, HYBRID, HARDWARE = 1, 2, 3, 4
NO_DEVICE = -99999
DEVICE_BUFFER, HOST_BUFFER = 1, 2
SUCCESS = 0
DECODED = 1
HANDLE, FEW = 8, 64
VERSIONS = range(900, 1000)
FILES = {"win32": "nvimgcodec_0.dll"}
SAMPLE_TYPES = {"uint8": 0x0802, "uint16": 0x1004}
SAMPLE_FORMATS = {"I_Y": 4, "I_RGB": 8, "P_YUV": 11}
COLOR_SPECS = {"SRGB": 1, "GRAY": 2, "SYCC": 3}


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
            library.nvimgcodecCodeStreamCreateFromHostMem.argtypes = [
                c_void_p,
                c_void_p,
                c_void_p,
                c_size_t,
                c_void_p,
            ]
            library.nvimgcodecDecoderDecode.argtypes = [
                c_void_p,
                c_void_p,
                c_void_p,
                c_int,
                c_void_p,
                c_void_p,
            ]
            for name in ("CodeStreamDestroy", "ImageDestroy", "FutureDestroy", "DecoderDestroy"):
                getattr(library, f"nvimgcodec{name}").argtypes = [c_void_p]
            library.nvimgcodecFutureWaitForAll.argtypes = [c_void_p]
            library.nvimgcodecFutureGetProcessingStatus.argtypes = [c_void_p, c_void_p, c_void_p]
            library.nvimgcodecImageCreate.argtypes = [c_void_p, c_void_p, c_void_p]
            library.nvimgcodecDecoderCreate.argtypes = [c_void_p, c_void_p, c_void_p, c_char_p]

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

    def images(self, *, on_device: bool) -> LibraryImages:
        """Make room for the descriptions of a batch's images, in device or host memory."""
        return LibraryImages(self, on_device=on_device)

    def streams(self) -> LibraryStreams:
        """Make room for the code streams of a batch."""
        return LibraryStreams(self)


class ImageFormat(NamedTuple):
    """What a decoded image is.

    Attributes
    ----------
    planes : tuple of (int, int, int)
        Height, width and interleaved channels of each plane; they follow each other in memory.
    dtype : str
        Type of the samples.
    sample_format, color_spec : str
        What nvImageCodec calls samples that are meant like these.
    subsampling : int
        What it calls the resolution of the chroma planes.
    """

    planes: tuple[tuple[int, int, int], ...]
    dtype: str
    sample_format: str
    color_spec: str
    subsampling: int = 0


class _Handles:
    """Handles of the library, used again by one batch after the other."""

    _destroy: str

    def __init__(self, library: Library) -> None:
        self._library = library
        self._all = np.zeros(FEW, np.uint64)
        self._first = int(self._all.ctypes.data)
        self._count = 0

    @property
    def used(self) -> NDArray[np.uint64]:
        """The handles that were set since the last `clear`."""
        return self._all[: self._count]

    def _next(self) -> int:
        """Return where the next handle is."""
        if self._count == len(self._all):
            self._all = np.append(self._all, np.zeros_like(self._all))
            self._first = int(self._all.ctypes.data)
        return self._first + HANDLE * self._count

    def clear(self) -> None:
        """Let go of what the handles stand for; they are kept for something else."""
        self._count = 0

    def close(self) -> None:
        """Destroy the handles."""
        self.clear()
        for handle in self._all[self._all > 0].tolist():
            getattr(self._library._quick, self._destroy)(handle)
        self._all[:] = 0

    def __del__(self) -> None:
        self.close()


class LibraryImages(_Handles):
    """Places in memory to decode to."""

    _destroy = "nvimgcodecImageDestroy"

    def __init__(self, library: Library, *, on_device: bool) -> None:
        super().__init__(library)
        self._create = library._quick.nvimgcodecImageCreate
        self._kind = DEVICE_BUFFER if on_device else HOST_BUFFER
        self._infos: dict[ImageFormat, ImageInfo] = {}
        self._set: dict[int, tuple[int, ImageFormat, int]] = {}

    def add(self, address: int, image: ImageFormat, stream: int) -> None:
        """Set the next handle to a place in memory; a CUDA stream has the pixels.

        Raises
        ------
        DeviceError
            If the library refuses it.
        """
        place, wanted = self._next(), (address, image, stream)
        if self._set.get(self._count) != wanted:
            info = self._infos.get(image)
            if info is None:
                info = self._infos[image] = self._describe(image)
            info.buffer, info.cuda_stream = address, stream
            self._set.pop(self._count, None)
            if self._create(self._library._instance, place, ctypes.byref(info)) != SUCCESS:
                raise DeviceError("nvImageCodec refuses an image buffer.")
            self._set[self._count] = wanted
        self._count += 1

    def _describe(self, image: ImageFormat) -> ImageInfo:
        info = ImageInfo(
            color_spec=COLOR_SPECS[image.color_spec],
            sample_format=SAMPLE_FORMATS[image.sample_format],
            chroma_subsampling=image.subsampling,
            orientation=Orientation(),
            num_planes=len(image.planes),
            buffer_kind=self._kind,
        )
        for number, (height, width, channels) in enumerate(image.planes):
            info.plane_info[number] = Plane(
                width=width,
                height=height,
                row_stride=width * channels * np.dtype(image.dtype).itemsize,
                num_channels=channels,
                sample_type=SAMPLE_TYPES[image.dtype],
            )
        return info


class LibraryStreams(_Handles):
    """Code streams."""

    _destroy = "nvimgcodecCodeStreamDestroy"

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self._create = library._quick.nvimgcodecCodeStreamCreateFromHostMem

    def add(self, address: int, length: int) -> bool:
        """Set the next handle to encoded bytes, kept by the caller until `clear`.

        Returns
        -------
        bool
            False if the library refuses them.
        """
        place = self._next()
        if self._create(self._library._instance, place, address, length, None) != SUCCESS:
            return False
        self._count += 1
        return True


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
