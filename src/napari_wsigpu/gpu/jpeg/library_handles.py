"""Handles of nvImageCodec: code streams, parts of them, and places in memory."""

from __future__ import annotations

import ctypes
from ctypes import c_int
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.gpu.jpeg.library_structs import ImageInfo, Orientation, Plane, Region, View
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.cpu import Parts
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

    @property
    def last(self) -> int:
        """The handle that was set last."""
        handle: int = self._all.item(self._count - 1)
        return handle

    def _next(self) -> int:
        """Return where the next handle is."""
        if self._count == len(self._all):
            self._all = np.append(self._all, np.zeros_like(self._all))
            self._first = int(self._all.ctypes.data)
        return self._first + HANDLE * self._count

    def _places(self, count: int) -> Sequence[int]:
        """Return where the next handles are, and count them as set."""
        while self._count + count > len(self._all):
            self._all = np.append(self._all, np.zeros_like(self._all))
        self._first = int(self._all.ctypes.data)
        begin = self._first + HANDLE * self._count
        self._count += count
        return range(begin, begin + HANDLE * count, HANDLE)

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
        self._part_infos: _Structures | None = None

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

    def add_parts(self, parts: Parts, image: ImageFormat) -> bool:
        """Set the next handles to where parts of images go in memory.

        Returns
        -------
        bool
            False if the library refuses one.
        """
        if self._part_infos is None or self._part_infos.kind != image:
            self._part_infos = _Structures(ImageInfo, image)
        infos = self._part_infos
        if infos.make_room(len(parts)):
            infos.fill(self._describe(image))
        plane = ImageInfo.plane_info.offset
        infos.column(plane + Plane.width.offset, np.uint32)[: len(parts)] = parts.widths
        infos.column(plane + Plane.height.offset, np.uint32)[: len(parts)] = parts.heights
        infos.column(plane + Plane.row_stride.offset, np.uint64)[: len(parts)] = parts.row_bytes
        infos.column(ImageInfo.buffer.offset, np.uint64)[: len(parts)] = parts.addresses
        self._set.clear()
        places = self._places(len(parts))
        return not any(map(self._create, repeat(self._library._instance), places, infos.addresses))

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

    def add(self, data: int | bytes, length: int) -> bool:
        """Set the next handle to encoded bytes or their address, kept by the caller until `clear`.

        Returns
        -------
        bool
            False if the library refuses them.
        """
        place = self._next()
        if self._create(self._library._instance, place, data, length, None) != SUCCESS:
            return False
        self._count += 1
        return True


class LibraryParts(_Handles):
    """Rectangles of code streams."""

    _destroy = "nvimgcodecCodeStreamDestroy"

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self._create = library._quick.nvimgcodecCodeStreamGetSubCodeStream
        self._views = _Structures(View)

    def add(self, streams: NDArray[np.uint64], parts: Parts) -> bool:
        """Set the next handles to what is wanted of code streams; see `LibraryImages.add_parts`."""
        views = self._views
        if views.make_room(len(parts)):
            views.fill(View(region=Region(dimensions=2)))
        start, end = (View.region.offset + side.offset for side in (Region.start, Region.end))
        for offset, begins, sizes in (
            (0, parts.tops, parts.heights),
            (ctypes.sizeof(c_int), parts.lefts, parts.widths),
        ):
            views.column(start + offset, np.int32)[: len(parts)] = begins
            views.column(end + offset, np.int32)[: len(parts)] = begins + sizes
        places = self._places(len(parts))
        return not any(map(self._create, streams.tolist(), places, views.addresses))


class _Structures:
    """Structures of the library one after another, whose fields are set by columns."""

    def __init__(self, structure: type[ctypes.Structure], kind: Any = None) -> None:
        self.kind = kind
        self._size = ctypes.sizeof(structure)
        self._bytes = np.zeros((0, self._size), np.uint8)
        self.addresses: Sequence[int] = range(0)

    def make_room(self, count: int) -> bool:
        """Have at least so many; say whether they are new, and have to be filled."""
        if count <= len(self._bytes):
            return False
        self._bytes = np.zeros((max(count, FEW), self._size), np.uint8)
        first = int(self._bytes.ctypes.data)
        self.addresses = range(first, first + self._bytes.nbytes, self._size)
        return True

    def fill(self, example: ctypes.Structure) -> None:
        """Make all like one."""
        self._bytes[:] = np.frombuffer(bytes(example), np.uint8)

    def column(self, offset: int, dtype: type[np.generic]) -> NDArray[Any]:
        """Return a field of all."""
        size = np.dtype(dtype).itemsize
        return self._bytes[:, offset : offset + size].view(dtype)[:, 0]
