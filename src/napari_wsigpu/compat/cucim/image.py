"""`CuImage`: slides, regions and batches with cuCIM's interface."""

from __future__ import annotations

import operator
import os
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.compat.cucim.cache import ImageCache
from napari_wsigpu.compat.cucim.file import CuFile, CuImageError
from napari_wsigpu.gpu.device.devices import cuda_index
from napari_wsigpu.gpu.device.driver import import_cuda
from napari_wsigpu.model.errors import RegionError, write_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from napari_wsigpu.model.arrays import AnyArray
    from napari_wsigpu.model.geometry import Pair

Locations = Iterable[int] | Iterable[Iterable[int]]

MICROMETERS = {2: 25400.0, 3: 10000.0}


class DLDataTypeCode(IntEnum):
    """DLPack's type codes."""

    DLInt = 0
    DLUInt = 1
    DLFloat = 2


@dataclass(frozen=True)
class DLDataType:
    """A sample type in DLPack's notation."""

    code: int
    bits: int
    lanes: int


class CuImage:
    """A slide, a region, a batch of regions or an associated image.

    Parameters
    ----------
    path : str or PathLike
        Path of the slide.

    Attributes
    ----------
    path : str
        Path of the slide, as passed in.
    shape, ndim, dims : list of int, int, str
        Length, number and names of the axes: ``"YXC"``, or ``"NYXC"`` for a batch.
    dtype, typestr : DLDataType, str
        Sample type in DLPack's and in numpy's notation.
    device : str
        Device of the pixels, such as ``"cpu"`` or ``"cuda"``.
    channel_names : list of str
        Names of the channels.
    resolutions : dict
        Number of levels, and for each level its dimensions (x, y), downsample and tile size (x, y).
    associated_images : set of str
        Names of the associated images.
    is_loaded, origin, direction, coord_sys : bool, list, list, str
        Constants, for compatibility.

    Raises
    ------
    SlideError
        As raised by `open_slide`; always a ``ValueError`` too.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._set_up(CuFile(os.fspath(path)), None, "cpu", 1.0)

    def _set_up(
        self, file: CuFile, pixels: AnyArray | None, device: str, downsample: float | None
    ) -> None:
        layout = file.slide.layout
        base = layout.levels[0]
        self._file, self._pixels, self._downsample = file, pixels, downsample
        self.path = file.path
        self.device = device
        self.shape = [base.height, base.width, file.channels]
        if pixels is not None:
            self.shape = list(pixels.shape)
        self.ndim = len(self.shape)
        self.dims = "NYXC"[4 - self.ndim :]
        dtype = base.dtype if pixels is None else pixels.dtype
        self.typestr = str(dtype.str)
        self.dtype = DLDataType("iuf".index(dtype.kind), dtype.itemsize * 8, 1)
        names = [channel.name for channel in layout.channels]
        self.channel_names = names if len(names) == self.shape[-1] else [*"RGBA"][: self.shape[-1]]
        self.is_loaded = True
        self.origin = [0.0, 0.0, 0.0]
        self.direction = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
        self.coord_sys = "LPS"
        size = self.shape[-2], self.shape[-3]
        self.resolutions = file.resolutions(None if pixels is None else size)
        self.associated_images: set[str] = set()
        if pixels is None:
            self.associated_images |= set(file.slide.associated_images)

    def _image(self, pixels: AnyArray, device: str, downsample: float | None) -> CuImage:
        """Wrap pixels as an image; `downsample` is None if their scale is unknown."""
        image = object.__new__(CuImage)
        image._set_up(self._file, pixels, device, downsample)
        return image

    # Metadata

    def size(self, dim_order: str = "") -> list[int]:
        """Return the length of each axis in `dim_order`; axes that do not exist are skipped."""
        lengths = dict(zip(self.dims, self.shape, strict=True))
        return [lengths[axis] for axis in (dim_order or self.dims).upper() if axis in lengths]

    def spacing(self, dim_order: str = "") -> list[float]:
        """Return the pixel size along each axis, from the resolution tags alone.

        As in cuCIM, the spacing of a region is divided by the downsample of its level, although the
        pixels of that level are larger by this factor.
        """
        return [self._axis(axis)[0] for axis in (dim_order or self.dims).upper()]

    def spacing_units(self, dim_order: str = "") -> list[str]:
        """Return the units of the numbers that `spacing` returns."""
        return [self._axis(axis)[1] for axis in (dim_order or self.dims).upper()]

    def _axis(self, axis: str) -> tuple[float, str]:
        if axis not in self.dims:
            return 1.0, ""
        if axis not in "XY":
            return 1.0, {"C": "color", "N": "batch"}[axis]
        if self._downsample is None:
            return 1.0, "micrometer"
        _, x, y, unit = self._file.first_page
        value = x if axis == "X" else y
        if unit not in MICROMETERS:
            return value / self._downsample, ""
        return (MICROMETERS[unit] / value if value else 1.0) / self._downsample, "micrometer"

    @property
    def raw_metadata(self) -> str:
        """The image description of the slide; empty for a region."""
        return self._file.first_page.description if self._pixels is None else ""

    @property
    def metadata(self) -> dict[str, object]:
        """Attributes under ``"cucim"``; for a slide also its TIFF tags and vendor fields."""
        left_out = ("device", "is_loaded")
        facts = {k: v for k, v in vars(self).items() if k[0] != "_" and k not in left_out}
        facts["dtype"] = asdict(self.dtype)
        facts["spacing"], facts["spacing_units"] = self.spacing(), self.spacing_units()
        facts["associated_images"] = sorted(self.associated_images)
        facts["resolutions"] = {k: np.array(v).tolist() for k, v in self.resolutions.items()}
        return {"cucim": facts} | (self._file.metadata() if self._pixels is None else {})

    # Pixels

    def read_region(
        self,
        location: Locations = (),
        size: Iterable[int] = (),
        level: int = 0,
        num_workers: int = 0,
        batch_size: int = 1,
        drop_last: bool = False,
        prefetch_factor: int = 2,
        shuffle: bool = False,
        seed: int = 0,
        device: str = "cpu",
    ) -> CuImage | CuImageIterator:
        """Read one region, or many regions of the same size.

        Parameters
        ----------
        location : iterable of int, or of pairs of int
            (x, y) of the upper left corner in pixels of level 0, which is divided by the level's
            downsample and truncated. For many regions, a flat sequence of numbers or a sequence
            of pairs. By default (0, 0).
        size : iterable of int
            (width, height) in pixels of the level; the whole level by default.
        level : int
            Index of a level.
        num_workers : int
            Number of prefetching threads; must be at least 1 for many regions on the CPU.
        batch_size : int
            Number of regions per image with axes NYXC; with 1, images have axes YXC.
        drop_last : bool
            Whether to drop an incomplete last batch.
        prefetch_factor : int
            Number of batches to prefetch.
        shuffle, seed : bool, int
            Whether to shuffle, and the seed. The order is reproducible but differs from cuCIM's.
        device : str
            Device of the result: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

        Returns
        -------
        CuImage or CuImageIterator
            An iterator if there are several locations or `batch_size` is above 1. Pixels outside
            of the slide are the background for Aperio, 255 for Philips, and 0 otherwise.

        Raises
        ------
        RegionError
            If the level is invalid, or the size or the part of a region is out of range (a
            ``ValueError``).
        CuImageError
            If the image is closed, the locations or the size have the wrong form, or
            `num_workers` is 0 for many regions on the CPU (a ``RuntimeError``).
        SlideError
            As raised by `Slide.read_region`.
        """
        whole = self._checked_size(size, level)
        locations = _pairs(location)
        device = str(device)
        if self._pixels is not None:
            return self._image(self._crop(locations[0], whole, device), device, self._downsample)
        self._check_open()
        if len(locations) > 1 and num_workers == 0 and device == "cpu":
            raise CuImageError("Cannot read multiple locations with zero workers!")
        downsample = self._file.slide.level_downsamples[level]
        if len(locations) == 1 and batch_size <= 1:
            pixels = self._file.read(locations[0], whole, level, device)
            return self._image(pixels, device, downsample)
        if shuffle:
            random.Random(seed).shuffle(locations)
        batch_size = max(1, batch_size)
        count = (len(locations) if drop_last else len(locations) + batch_size - 1) // batch_size
        batches = self._file.batches(
            locations[: count * batch_size],
            whole,
            level,
            batch_size,
            device=device,
            num_workers=max(1, num_workers),
            prefetch_factor=prefetch_factor,
        )
        return CuImageIterator((self._image(b, device, downsample) for b in batches), count)

    def associated_image(self, name: str = "", device: str = "cpu") -> CuImage:
        """Read an associated image by name."""
        if name not in self.associated_images:
            known = sorted(self.associated_images)
            raise RegionError(f"'{self.path}' has no associated image '{name}'; it has {known}.")
        self._check_open()
        pixels = self._file.slide.associated_images[name].read()
        return self._image(_to_device(pixels, str(device)), str(device), None)

    def save(self, path: str) -> None:
        """Save the pixels of a region as a PPM file; the ending of its name does not matter.

        Raises
        ------
        RegionError
            If this is a slide or a batch, or the pixels are not 8-bit RGB.
        TargetWriteError
            If the file cannot be written.
        """
        if self._pixels is None or self.ndim != 3 or (self.shape[-1], self.typestr) != (3, "|u1"):
            raise RegionError("Only regions with 8-bit RGB pixels can be saved; read a region.")
        pixels: Any = self._pixels
        pixels = pixels if self.device == "cpu" else pixels.get()
        header = f"P6\n{self.shape[1]}\n{self.shape[0]}\n255\n"
        with write_errors(path):
            Path(path).write_bytes(header.encode() + pixels.tobytes())

    def _checked_size(self, size: Iterable[int], level: int) -> Pair:
        levels = self.resolutions["level_dimensions"]
        if not 0 <= level < len(levels):
            raise RegionError(
                f"Invalid level ({level}) in the request! "
                f"('level' should be less than {len(levels)} and not below 0)"
            )
        numbers = tuple(map(operator.index, size)) or levels[level]
        if len(numbers) != 2:
            raise CuImageError("size (patch size) should be 2!")
        for name, number, most in zip(("width", "height"), numbers, levels[0], strict=True):
            if number <= 0:
                raise RegionError(f"Invalid size ({number}) in the request! (Should be > 0)")
            if number > most:
                raise RegionError(f"Invalid size (it exceeds the original image {name} {most})")
        return numbers[0], numbers[1]

    def _check_open(self) -> None:
        if self._file.closed:
            raise CuImageError("[Error] The image file is closed!")

    def _crop(self, location: Pair, size: Pair, device: str) -> AnyArray:
        (x, y), (width, height) = location, size
        least = min(location)
        if least < 0:
            raise RegionError(f"Invalid location ({least}) in the request! (Should be >= 0)")
        assert self._pixels is not None
        columns, rows = self.size("XY")
        for name, end, most in (("width", x + width, columns), ("height", y + height, rows)):
            if end > most:
                raise RegionError(f"Invalid location/size (it exceeds the image {name} {most})")
        return _to_device(self._pixels[..., y : y + height, x : x + width, :].copy(), device)

    @property
    def __array_interface__(self) -> dict[str, object]:
        return self._interface("__array_interface__", on_cpu=True)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return self._interface("__cuda_array_interface__", on_cpu=False) | {"mask": None}

    def _interface(self, name: str, *, on_cpu: bool) -> dict[str, object]:
        if self._pixels is None or (self.device == "cpu") != on_cpu:
            raise AttributeError(
                f"This image has no {name}: it is a slide, or its pixels are on '{self.device}'.",
                name=name,
            )
        interface: dict[str, object] = getattr(self._pixels, name)
        return interface

    def __iter__(self) -> Iterator[CuImage]:
        if self._pixels is None:
            raise IndexError("A slide is not iterable; read regions of it.")
        return iter([self])

    # Resources

    def close(self) -> None:
        """Close the slide; regions that were read stay valid."""
        if self._pixels is None:
            self._file.closed = True
            self._file.slide.close()

    def __enter__(self) -> CuImage:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<CuImage path:{self.path}>"

    @staticmethod
    def cache(type: str | None = None, **config: Any) -> ImageCache:  # noqa: A002
        """Return the process's tile cache, after optionally emptying and configuring it.

        Parameters
        ----------
        type : str, optional
            ``"per_process"`` empties the cache and sets its capacity; ``"shared_memory"`` does the
            same. Other values turn it off. If omitted, the cache is unchanged.
        **config
            ``memory_capacity`` in MiB (default 1024). ``record_stat=True`` raises an error, since
            hits are counted per slide. Other options are ignored.
        """
        if config.get("record_stat"):
            raise RegionError("Hits are counted per slide, not for the cache; use Slide.stats().")
        if type is not None:
            on = type in ("per_process", "shared_memory")
            ImageCache.set_up(config.get("memory_capacity", 1024) if on else 0)
        return ImageCache()


class CuImageIterator:
    """An iterator over images; its length is their total number."""

    def __init__(self, images: Iterator[CuImage], count: int) -> None:
        self._images = images
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> CuImageIterator:
        return self

    def __next__(self) -> CuImage:
        return next(self._images)


def _pairs(location: Locations) -> list[Pair]:
    numbers: list[int] = []
    try:
        for item in location:
            numbers += map(operator.index, item if isinstance(item, Iterable) else (item,))
    except TypeError:
        raise CuImageError(f"The location {location!r} does not consist of integers.") from None
    if len(numbers) % 2:
        raise CuImageError(
            "[Error] The number of locations should be the multiplication of the number of "
            "dimensions in the size!"
        )
    return list(zip(numbers[::2], numbers[1::2], strict=True)) or [(0, 0)]


def _to_device(pixels: AnyArray, device: str) -> AnyArray:
    if device == "cpu":
        return pixels if isinstance(pixels, np.ndarray) else pixels.get()
    index = cuda_index(device)
    cupy = import_cuda("cupy", device)
    with cupy.cuda.Device(index):
        return cupy.asarray(pixels)
