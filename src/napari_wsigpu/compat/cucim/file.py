"""A slide's file as cuCIM sees it: its tags, and pixels where cuCIM has them."""

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
    from collections.abc import Iterator, Sequence

UNIT_NAMES = {2: "inch", 3: "centimeter"}


class CuImageError(SlideError, RuntimeError):
    """Regions were asked for in a way that cuCIM refuses, or of a closed image."""


class CuImageOpenError(SlideReadError, ValueError):
    """The file can't be opened."""


class FirstPage(NamedTuple):
    """Tags of the first page: its description, pixels a unit (x, y), and the unit."""

    description: str
    x: float
    y: float
    unit: int


class CuFile:
    """An open slide, and what cuCIM knows of it that `Slide` doesn't say."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.closed = False
        if is_url(path):
            raise CuImageOpenError(
                f"Cannot open {public_url(path)}! It is no file; use open_slide."
            )
        try:
            self.slide = open_slide(path)
        except OSError as error:
            raise CuImageOpenError(f"Cannot open {path}! {error}") from error
        if "tiff" not in self.slide.layout.metadata:
            self.slide.close()
            raise CuImageOpenError(f"Cannot open {path}! It is no TIFF file; use open_slide.")
        # Code for cuCIM seldom closes its images.
        weakref.finalize(self, self.slide.close)

    @property
    def channels(self) -> int:
        """Channels of the pixels: gray ones of 8 bit are shown as RGBA."""
        base = self.slide.layout.levels[0]
        return 4 if base.channels == 1 and base.dtype == np.uint8 else base.channels

    @computed_once
    def first_page(self) -> FirstPage:
        """Tags that the slide's metadata don't keep as cuCIM has them."""
        try:
            with tifffile.TiffFile(self.slide.path) as file:
                page = file.pages.first
                x, y = (
                    page.tags.valueof(code, (1, 1)) for code in (Tag.X_RESOLUTION, Tag.Y_RESOLUTION)
                )
                unit = int(page.tags.valueof(Tag.RESOLUTION_UNIT, RESUNIT.NONE))
                return FirstPage(page.description, x[0] / (x[1] or 1), y[0] / (y[1] or 1), unit)
        except OSError as error:
            raise file_error(self.path, error) from error

    def metadata(self) -> dict[str, Any]:
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

    def resolutions(self, region: tuple[int, int] | None) -> dict[str, Any]:
        """Return the levels of the slide, or of a region of this (width, height)."""
        slide = self.slide
        grids = [level.grid for level in slide.layout.levels]
        tiles = tuple((grid.tile_width, grid.tile_height) for grid in grids)
        return {
            "level_count": 1 if region else slide.level_count,
            "level_dimensions": (region,) if region else slide.level_dimensions,
            "level_downsamples": (1.0,) if region else slide.level_downsamples,
            "level_tile_sizes": (region,) if region else tiles,
        }

    def read(self, place: tuple[int, int], size: tuple[int, int], level: int, device: str) -> Any:
        """Read a region to a device."""
        start, corner = truncated(place, self.slide.level_downsamples[level])
        region = self.slide.read_region(corner, size, level, device)
        self._fill_outside([region], [start], level)
        return self._shown(region)

    def batches(
        self,
        places: Sequence[tuple[int, int]],
        size: tuple[int, int],
        level: int,
        batch_size: int,
        **options: Any,
    ) -> Iterator[Any]:
        """Read regions, so many at a time; a batch of one has no axis of its own."""
        downsample = self.slide.level_downsamples[level]
        found = [truncated(place, downsample) for place in places]
        starts = iter([start for start, _ in found])
        corners = [corner for _, corner in found]
        count = batch_size if batch_size > 1 else None
        for batch in self.slide.read_regions(corners, size, level, count, **options):
            regions = [batch] if count is None else batch
            self._fill_outside(regions, list(islice(starts, batch_size)), level)
            yield self._shown(batch)

    def _shown(self, pixels: Any) -> Any:
        """Return pixels of shape (..., channels), on whatever device."""
        if pixels.shape[-1] == self.channels:
            return pixels
        pixels = pixels.repeat(self.channels, -1)
        pixels[..., 3] = 255
        return pixels

    def _fill_outside(self, regions: Any, starts: Sequence[tuple[int, int]], level: int) -> None:
        layout = self.slide.layout
        value = {"aperio": layout.background, "philips": 255}.get(layout.vendor, 0)
        if value == layout.background:
            return
        columns, rows = self.slide.level_dimensions[level]
        for region, (x, y) in zip(regions, starts, strict=True):
            region[: max(-y, 0)] = region[max(rows - y, 0) :] = value
            region[:, : max(-x, 0)] = region[:, max(columns - x, 0) :] = value
