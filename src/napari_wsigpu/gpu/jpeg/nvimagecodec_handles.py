"""Reusable handles of nvImageCodec: code streams, and the images to which they are decoded."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.gpu.jpeg.nvimagecodec_structs import ImageInfo, Orientation, Plane
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.gpu.jpeg.nvimagecodec_library import Library

SUCCESS = 0
# nvimgcodecImageBufferKind_t.
DEVICE_BUFFER, HOST_BUFFER = 1, 2
# Bytes of a handle, and the number of handles to start with.
HANDLE, FEW = 8, 64
# nvimgcodecSampleDataType_t, nvimgcodecSampleFormat_t and nvimgcodecColorSpec_t.
SAMPLE_TYPES = {"uint8": 0x0802, "uint16": 0x1004}
SAMPLE_FORMATS = {"I_Y": 4, "I_RGB": 8, "P_YUV": 11}
COLOR_SPECS = {"SRGB": 1, "GRAY": 2, "SYCC": 3}


class ImageFormat(NamedTuple):
    """Format of a decoded image.

    Attributes
    ----------
    planes : tuple of (int, int, int)
        Height, width and interleaved channels of each plane; planes follow each other in memory.
    dtype : str
        Type of the samples.
    sample_format, color_spec : str
        nvImageCodec's names for the meaning of the samples.
    subsampling : int
        nvImageCodec's number for the resolution of the chroma planes.
    """

    planes: tuple[tuple[int, int, int], ...]
    dtype: str
    sample_format: str
    color_spec: str
    subsampling: int = 0


class _Handles:
    """An array of handles, which batches use one after another.

    If nvImageCodec is given an existing handle when it creates an object, it reuses the old object,
    which is faster.
    """

    _destroy: str

    def __init__(self, library: Library) -> None:
        self._library = library
        self._all = np.zeros(FEW, np.uint64)
        self._first = int(self._all.ctypes.data)
        self._count = 0

    @property
    def used(self) -> NDArray[np.uint64]:
        """Handles that were set since the last `clear`, as an array for nvImageCodec."""
        return self._all[: self._count]

    def _next(self) -> int:
        """Return the address of the next handle; double the array if it is full."""
        if self._count == len(self._all):
            self._all = np.append(self._all, np.zeros_like(self._all))
            self._first = int(self._all.ctypes.data)
        return self._first + HANDLE * self._count

    def clear(self) -> None:
        """Start again with the first handle; the objects are kept and reused."""
        self._count = 0

    def close(self) -> None:
        """Destroy the objects."""
        self.clear()
        for handle in self._all[self._all > 0].tolist():
            getattr(self._library._quick, self._destroy)(handle)
        self._all[:] = 0

    def __del__(self) -> None:
        self.close()


class LibraryImages(_Handles):
    """Images in device or host memory to which code streams are decoded."""

    _destroy = "nvimgcodecImageDestroy"

    def __init__(self, library: Library, *, on_device: bool) -> None:
        super().__init__(library)
        self._create = library._quick.nvimgcodecImageCreate
        self._kind = DEVICE_BUFFER if on_device else HOST_BUFFER
        self._infos: dict[ImageFormat, ImageInfo] = {}
        # Target to which each handle was last set; consecutive batches often have the same ones.
        self._set: dict[int, tuple[int, ImageFormat, int]] = {}

    def add(self, address: int, image: ImageFormat, stream: int) -> None:
        """Set the next handle to an image in memory.

        Parameters
        ----------
        address : int
            Address of the image, which the caller keeps allocated.
        image : ImageFormat
            Format of the image.
        stream : int
            Handle of the CUDA stream in which the image is decoded.

        Raises
        ------
        DeviceError
            If nvImageCodec refuses it.
        """
        handle, target = self._next(), (address, image, stream)
        if self._set.get(self._count) != target:
            info = self._infos.get(image)
            if info is None:
                info = self._infos[image] = self._image_info(image)
            info.buffer, info.cuda_stream = address, stream
            # A failed call leaves the handle in an unknown state.
            self._set.pop(self._count, None)
            if self._create(self._library._instance, handle, ctypes.byref(info)) != SUCCESS:
                raise DeviceError("nvImageCodec refuses an image buffer.")
            self._set[self._count] = target
        self._count += 1

    def _image_info(self, image: ImageFormat) -> ImageInfo:
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
    """Code streams in host memory."""

    _destroy = "nvimgcodecCodeStreamDestroy"

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self._create = library._quick.nvimgcodecCodeStreamCreateFromHostMem

    def add(self, address: int, length: int) -> bool:
        """Set the next handle to encoded bytes, which the caller keeps until `clear`.

        Parameters
        ----------
        address, length : int
            Address and number of the bytes.

        Returns
        -------
        bool
            False if nvImageCodec refuses them.
        """
        handle = self._next()
        if self._create(self._library._instance, handle, address, length, None) != SUCCESS:
            return False
        self._count += 1
        return True
