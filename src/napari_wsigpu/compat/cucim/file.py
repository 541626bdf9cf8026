"""A slide file with cuCIM's metadata and cuCIM's rules for region locations."""

from __future__ import annotations

import weakref
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tifffile

from napari_wsigpu.compat.shared import truncated
from napari_wsigpu.model.errors import SlideError, SlideReadError, file_error
from napari_wsigpu.model.geometry import computed_once
from napari_wsigpu.model.tags import RESUNIT, Tag
from napari_wsigpu.slide.slide import open_slide
from napari_wsigpu.storage.remote.url import is_url, public_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from napari_wsigpu.model.arrays import AnyArray
    from napari_wsigpu.model.geometry import Pair

UNIT_NAMES = {2: "inch", 3: "centimeter"}


class CuImageError(SlideError, RuntimeError):
    """cuCIM would reject the arguments, or the image is closed."""


class CuImageOpenError(SlideReadError, ValueError):
    """The file cannot be opened."""


class FirstPage(NamedTuple):
    """TIFF tags of the first page: description, resolution in pixels per unit (x, y), and unit."""

    description: str
    x: float
    y: float
    unit: int


class CuFile:
    """An open slide with the metadata that only cuCIM reports."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.closed = False
        if is_url(path):
            path = public_url(path)
            raise CuImageOpenError(f"Cannot open {path}! It is not a file; use open_slide.")
        try:
            self.slide = open_slide(path)
        except OSError as error:
            raise CuImageOpenError(f"Cannot open {path}! {error}") from error
        if "tiff" not in self.slide.layout.metadata:
            self.slide.close()
            raise CuImageOpenError(f"Cannot open {path}! It is not a TIFF file; use open_slide.")
        # Code written for cuCIM often never closes its images.
        weakref.finalize(self, self.slide.close)

    @property
    def channels(self) -> int:
        """Number of channels of regions: 4 for 8-bit gray, which cuCIM returns as RGBA."""
        base = self.slide.layout.levels[0]
        return 4 if base.channels == 1 and base.dtype == np.uint8 else base.channels

    @computed_once
    def first_page(self) -> FirstPage:
        """Original tags of the first page, which the slide's metadata does not keep."""
        try:
            with tifffile.TiffFile(self.slide.path) as file:
                page = file.pages.first
                codes = Tag.X_RESOLUTION, Tag.Y_RESOLUTION
                x, y = (page.tags.valueof(code, (1, 1)) for code in codes)
                unit = int(page.tags.valueof(Tag.RESOLUTION_UNIT, RESUNIT.NONE))
                return FirstPage(page.description, x[0] / (x[1] or 1), y[0] / (y[1] or 1), unit)
        except OSError as error:
            raise file_error(self.path, error) from error

    def metadata(self) -> dict[str, object]:
        """Return the TIFF tags and vendor fields."""
        metadata = self.slide.metadata
        tags = metadata["tiff"]
        _, x, y, unit = self.first_page
        metadata["tiff"] = {
            "model": tags.get("Model", ""),
            "software": tags.get("Software", ""),
            "resolution_unit": UNIT_NAMES.get(unit, ""),
            "x_resolution": x,
            "y_resolution": y,
        }
        return {name: value for name, value in metadata.items() if isinstance(value, dict)}

    def resolutions(self, region: Pair | None) -> dict[str, Any]:
        """Return the levels of the slide, or the single level of a region (width, height)."""
        slide = self.slide
        grids = [level.grid for level in slide.layout.levels]
        tiles = tuple((grid.tile_width, grid.tile_height) for grid in grids)
        return {
            "level_count": 1 if region else slide.level_count,
            "level_dimensions": (region,) if region else slide.level_dimensions,
            "level_downsamples": (1.0,) if region else slide.level_downsamples,
            "level_tile_sizes": (region,) if region else tiles,
        }

    def read(self, location: Pair, size: Pair, level: int, device: str) -> AnyArray:
        """Return the pixels of a region in the memory of a device."""
        start, corner = truncated(location, self.slide.level_downsamples[level])
        region = self.slide.read_region(corner, size, level, device)
        self._fill_outside([region], [start], level)
        return self._expanded(region)

    def batches(
        self, locations: Sequence[Pair], size: Pair, level: int, batch_size: int, **options: Any
    ) -> Iterator[AnyArray]:
        """Yield batches of regions, shape (batch, height, width, channels).

        With a `batch_size` of 1, the batch axis is omitted.
        """
        downsample = self.slide.level_downsamples[level]
        found = [truncated(location, downsample) for location in locations]
        starts = iter([start for start, _ in found])
        corners = [corner for _, corner in found]
        count = batch_size if batch_size > 1 else None
        for batch in self.slide.read_regions(corners, size, level, count, **options):
            regions = [batch] if count is None else batch
            self._fill_outside(regions, list(islice(starts, batch_size)), level)
            yield self._expanded(batch)

    def _expanded(self, pixels: AnyArray) -> AnyArray:
        """Return pixels with the channels that cuCIM returns, on the same device."""
        if pixels.shape[-1] == self.channels:
            return pixels
        pixels = pixels.repeat(self.channels, -1)
        pixels[..., 3] = 255
        return pixels

    def _fill_outside(
        self, regions: Iterable[AnyArray], starts: Sequence[Pair], level: int
    ) -> None:
        """Fill pixels outside the slide with cuCIM's background for the vendor, in place."""
        layout = self.slide.layout
        value = {"aperio": layout.background, "philips": 255}.get(layout.vendor, 0)
        if value == layout.background:
            return
        columns, rows = self.slide.level_dimensions[level]
        for region, (x, y) in zip(regions, starts, strict=True):
            region[: max(-y, 0)] = region[max(rows - y, 0) :] = value
            region[:, : max(-x, 0)] = region[:, max(columns - x, 0) :] = value
