"""`Reader` for bioio: ``BioImage(path, reader=Reader)``, or ``BioImage(path)`` for slide files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xarray
from bioio_base.dimensions import DimensionNames
from bioio_base.io import pathlike_to_fs
from bioio_base.reader import Reader as BaseReader
from bioio_base.reader_metadata import ReaderMetadata as BaseMetadata
from bioio_base.types import PhysicalPixelSizes

from napari_wsigpu.formats.registry import FORMATS
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.slide.slide import open_slide

if TYPE_CHECKING:
    import os

    import dask.array
    from fsspec.spec import AbstractFileSystem

    from napari_wsigpu.model.arrays import Array


class Reader(BaseReader):  # type: ignore[misc]
    """Reads the levels of a slide: with axes YXS for RGB, CYX otherwise.

    Parameters
    ----------
    image : str or PathLike
        Path of the slide, a local file or folder.
    fs_kwargs : dict, optional
        Ignored.

    Attributes
    ----------
    slide : Slide
        The open slide.
    """

    def __init__(
        self, image: str | os.PathLike[str], fs_kwargs: dict[str, object] | None = None, **_: object
    ) -> None:
        self._fs, self._path = pathlike_to_fs(image, enforce_exists=True)
        self.slide = open_slide(self._path)

    @staticmethod
    def _is_supported_image(fs: AbstractFileSystem, path: str, **_: object) -> bool:
        try:
            with open_slide(path):
                return True
        except SlideError:
            return False

    @property
    def scenes(self) -> tuple[str, ...]:
        """A single scene, the slide."""
        return ("slide",)

    @property
    def resolution_levels(self) -> tuple[int, ...]:
        """Level numbers, finest first."""
        return tuple(range(self.slide.level_count))

    def _array(self, pixels: Array | dask.array.Array) -> xarray.DataArray:
        names = DimensionNames
        if self.slide.layout.rgb:
            dims = [names.SpatialY, names.SpatialX, names.Samples]
            return xarray.DataArray(pixels, dims=dims)
        found = [channel.name for channel in self.slide.channels]
        coords = {names.Channel: found} if len(found) == pixels.shape[2] else None
        dims = [names.Channel, names.SpatialY, names.SpatialX]
        return xarray.DataArray(pixels.transpose(2, 0, 1), dims=dims, coords=coords)

    def _read_delayed(self) -> xarray.DataArray:
        return self._array(self.slide.levels[self.current_resolution_level].to_dask())

    def _read_immediate(self) -> xarray.DataArray:
        return self._array(self.slide.levels[self.current_resolution_level][...])

    @property
    def physical_pixel_sizes(self) -> PhysicalPixelSizes:
        """Pixel size of the current level in micrometers; None if the slide does not state it."""
        if self.slide.mpp is None:
            return PhysicalPixelSizes(None, None, None)
        step = self.slide.level_downsamples[self.current_resolution_level]
        x, y = self.slide.mpp
        return PhysicalPixelSizes(None, y * step, x * step)


class ReaderMetadata(BaseMetadata):  # type: ignore[misc]
    """Describes the reader to bioio without opening a slide."""

    @staticmethod
    def get_supported_extensions() -> list[str]:
        """Return the file extensions of slide formats, without dots."""
        return sorted({ending.removeprefix(".") for item in FORMATS for ending in item.endings})

    @staticmethod
    def get_reader() -> type[Reader]:
        """Return the reader."""
        return Reader
