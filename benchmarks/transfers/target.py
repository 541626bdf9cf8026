"""The level of a slide that is measured: what it is, what reads it, and its right pixels."""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tifffile

from benchmarks.machine import check_memory
from benchmarks.transfers.reference import ReaderReference, Region, TiffReference, find_pages
from benchmarks.transfers.zarr_arrays import level_reader
from napari_wsigpu.codecs.table import storage_name
from napari_wsigpu.gpu.device.verify import TOLERANCES
from napari_wsigpu.model.errors import DeviceError, LevelError, RegionError
from napari_wsigpu.model.tags import COMPRESSION, JPEG_2000
from napari_wsigpu.slide.slide import open_slide

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from numpy.typing import NDArray
    from tifffile import TiffPage

    from napari_wsigpu.reading.level import LevelArray
    from napari_wsigpu.slide.slide import Slide

ZARR = "zarr-python"
READ_BYTES = 16 << 20
FORGETTABLE = hasattr(os, "posix_fadvise")


class Target:
    """A level, opened by ourselves; its copies on the host and the device fit into memory.

    Parameters
    ----------
    path : Path
        The slide.
    level : int
        Index of the level.
    stack : ExitStack
        Closes what is opened.
    cold : bool
        Whether the file leaves the operating system's page cache before each read.

    Raises
    ------
    SlideError
        If there is no such slide or level.
    """

    def __init__(self, path: Path, level: int, stack: ExitStack, *, cold: bool = False) -> None:
        if cold and not FORGETTABLE:
            raise RegionError("This system can't drop files from its page cache; omit --cold.")
        self.slide = stack.enter_context(open_slide(path, device="cpu"))
        self.path = self.slide.path
        if not 0 <= level < self.slide.level_count:
            raise LevelError(
                f"'{self.path}' has no level {level}; its levels are 0 to "
                f"{self.slide.level_count - 1}."
            )
        self.level = level
        self.image = self.slide.layout.levels[level]
        self.cold = cold
        self.by_gpu: Slide | None = None
        self.no_gpu = ""
        try:
            self.by_gpu = stack.enter_context(open_slide(path, device="cuda"))
        except DeviceError as error:
            self.no_gpu = str(error).partition(";")[0].removesuffix(".")
        self.pages: list[TiffPage] = []
        self.by_zarr: Callable[[Region], NDArray[Any]] | None = None
        self._reference: TiffReference | ReaderReference
        if self.image.array is not None:
            self.by_zarr = level_reader(self.image.array)
            self._reference = ReaderReference(ZARR, self.by_zarr)
            return
        own = partial(_by_ourselves, self.slide.levels[level])
        self._reference = ReaderReference("napari-wsigpu, CPU", own)
        if Path(self.path).is_dir():
            return
        try:
            file = stack.enter_context(tifffile.TiffFile(self.path))
        except tifffile.TiffFileError:
            return
        self.pages = find_pages(file, self.image)
        if self.pages:
            self._reference = TiffReference(file, self.pages, self.image)

    def gpu_slide(self) -> Slide:
        """Return the slide that the GPU decodes; raise a DeviceError if there is no GPU."""
        if self.by_gpu is None:
            raise DeviceError(f"{self.no_gpu}.")
        return self.by_gpu

    @property
    def whole(self) -> Region:
        """All of the level."""
        return Region(0, 0, self.image.width, self.image.height)

    @property
    def raw(self) -> bool:
        """Whether its tiles are not compressed."""
        image = self.image
        return (
            image.encoding.compression == COMPRESSION.NONE
            and image.array is None
            and not image.computed
        )

    @property
    def tolerance(self) -> float:
        """By how much decoders may differ."""
        compression = self.image.encoding.compression
        if compression == COMPRESSION.JPEG:
            return TOLERANCES["hybrid"]
        return TOLERANCES["GPU"] if compression in JPEG_2000 else 0

    def size(self, region: Region) -> int:
        """Return the bytes of a region's pixels."""
        samples = region.width * region.height * self.image.channels
        return samples * self.image.dtype.itemsize

    def difference(self, region: Region, pixels: NDArray[Any]) -> float:
        """Return the largest difference of any sample from the right ones."""
        return self._reference.difference(region, pixels)

    def location(self, region: Region) -> tuple[int, int]:
        """Return where a region begins, in pixels of level 0."""
        downsample = self.slide.level_downsamples[self.level]
        return round(region.left * downsample), round(region.top * downsample)

    def check_memory(self) -> None:
        """Raise a RegionError if the level and a few copies don't fit into memory."""
        what = f"Level {self.level} of '{self.path}'"
        advice = f"choose a coarser one, up to --level {self.slide.level_count - 1}"
        check_memory(self.size(self.whole), what, advice)

    def forget(self) -> None:
        """Drop the file from the page cache where cold reads are wanted."""
        if self.cold:
            forget(self._paths)

    def warm(self) -> None:
        """Read the files once where they shall be in the page cache, as far as they fit there."""
        for path in () if self.cold else self._paths:
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123
                while file.read(READ_BYTES):
                    pass

    @property
    def _paths(self) -> list[str]:
        if self.by_zarr is not None:
            return [str(path) for path in Path(self.path).rglob("*") if path.is_file()]
        return [file.path for file in self.slide.layout.files] or [self.path]

    def facts(self) -> dict[str, Any]:
        """Say what is measured; JSON-serialisable."""
        grid, image = self.image.grid, self.image
        return {
            "slide": os.path.basename(self.path),  # noqa: PTH119
            "vendor": self.slide.vendor,
            "level": self.level,
            "width": image.width,
            "height": image.height,
            "channels": image.channels,
            "dtype": str(image.dtype),
            "tile": [grid.tile_width, grid.tile_height],
            "compression": "uncompressed" if self.raw else storage_name(image),
            "bytes": self.size(self.whole),
            "right_pixels_by": self._reference.name,
            "page_cache": (
                "cold (the file is dropped from it before each read)"
                if self.cold
                else "warm (the file is read once before)"
            ),
            "own_caches": "empty before each read",
        }


def _by_ourselves(level: LevelArray, region: Region) -> NDArray[Any]:
    left, top, width, height = region
    return level[top : top + height, left : left + width]


def forget(paths: list[str]) -> None:
    """Drop files from the operating system's page cache, as far as it does so."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def to_host(pixels: Any) -> NDArray[Any]:
    """Copy a CuPy array to the host."""
    copied: NDArray[Any] = import_module("cupy").asnumpy(pixels)
    return copied
