"""`Reader` for bioio: ``BioImage(path, reader=Reader)``, or by its ending, without a word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

    from fsspec.spec import AbstractFileSystem


class Reader(BaseReader):  # type: ignore[misc]
    """Reads the levels of a slide: y, x and samples of RGB ones, and c, y, x of others.

    Parameters
    ----------
    image : str or PathLike
        The slide, a local file or folder.
    fs_kwargs : dict, optional
        Of no use here.

    Attributes
    ----------
    slide : Slide
        The open slide.
    """

    def __init__(
        self, image: str | os.PathLike[str], fs_kwargs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        self._fs, self._path = pathlike_to_fs(image, enforce_exists=True)
        self.slide = open_slide(self._path)

    @staticmethod
    def _is_supported_image(fs: AbstractFileSystem, path: str, **_: Any) -> bool:
        try:
            with open_slide(path):
                return True
        except SlideError:
            return False

    @property
    def scenes(self) -> tuple[str, ...]:
        """The slide alone."""
        return ("slide",)

    @property
    def resolution_levels(self) -> tuple[int, ...]:
        """The numbers of the levels, finest first."""
        return tuple(range(self.slide.level_count))

    def _array(self, pixels: Any) -> xarray.DataArray:
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
        """Micrometres a pixel of the level that is shown."""
        if self.slide.mpp is None:
            return PhysicalPixelSizes(None, None, None)
        step = self.slide.level_downsamples[self.current_resolution_level]
        x, y = self.slide.mpp
        return PhysicalPixelSizes(None, y * step, x * step)


class ReaderMetadata(BaseMetadata):  # type: ignore[misc]
    """What bioio asks of the reader before it imports it."""

    @staticmethod
    def get_supported_extensions() -> list[str]:
        """Return the endings that only slides have, without their dots."""
        return sorted({ending.removeprefix(".") for item in FORMATS for ending in item.endings})

    @staticmethod
    def get_reader() -> type[Reader]:
        """Return the reader."""
        return Reader
