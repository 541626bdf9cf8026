"""Handles of nvImageCodec: code streams, and places in memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.gpu.jpeg.library_structs import ImageInfo, Orientation, Plane
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.gpu.jpeg.library import Library

SUCCESS = 0
DEVICE_BUFFER, HOST_BUFFER = 1, 2
HANDLE, FEW = 8, 64
SAMPLE_TYPES = {"uint8": 0x0802, "uint16": 0x1004}
SAMPLE_FORMATS = {"I_Y": 4, "I_RGB": 8, "P_YUV": 11}
COLOR_SPECS = {"SRGB": 1, "GRAY": 2, "SYCC": 3}


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
        """Set the next handle to encoded bytes at an address, kept by the caller until `clear`.

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
