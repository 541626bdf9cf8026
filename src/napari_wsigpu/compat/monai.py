"""`SlideReader` for MONAI: ``PatchWSIDataset(data, reader=SlideReader)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from monai.data.wsi_reader import BaseWSIReader

from napari_wsigpu.model.errors import RegionError
from napari_wsigpu.slide.slide import Slide, open_slide

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from numpy.typing import DTypeLike

    from napari_wsigpu.model.arrays import Array

    Path = str | os.PathLike[str]


class SlideReader(BaseWSIReader):  # type: ignore[misc]
    """Reads slides for MONAI datasets and transforms; takes the arguments of `BaseWSIReader`."""

    supported_suffixes: Sequence[str] = ()
    backend = "napari-wsigpu"

    def verify_suffix(self, filename: Path | Sequence[Path]) -> bool:
        """Accept any file name; the format is detected from the content."""
        return True

    def read(self, data: Path | Sequence[Path], **kwargs: Any) -> Slide | list[Slide]:
        """Open slides; keyword arguments are passed to `napari_wsigpu.open_slide`."""
        paths: Sequence[Path] = data if isinstance(data, list | tuple) else [data]  # type: ignore[list-item]
        slides = [open_slide(path, **{**self.kwargs, **kwargs}) for path in paths]
        return slides if len(slides) > 1 else slides[0]

    def get_level_count(self, wsi: Slide) -> int:
        """Return the number of levels."""
        return wsi.level_count

    def get_size(self, wsi: Slide, level: int) -> tuple[int, int]:
        """Return (height, width) of a level."""
        width, height = wsi.level_dimensions[level]
        return height, width

    def get_downsample_ratio(self, wsi: Slide, level: int) -> float:
        """Return the downsample of a level relative to level 0."""
        return wsi.level_downsamples[level]

    def get_file_path(self, wsi: Slide) -> str:
        """Return the path of a slide."""
        return wsi.path

    def get_mpp(self, wsi: Slide, level: int) -> tuple[float, float]:
        """Return the pixel size of a level in micrometers, (y, x).

        Raises
        ------
        RegionError
            If the slide does not state it.
        """
        if wsi.mpp is None:
            raise RegionError(f"'{wsi.path}' does not state its pixel size; use level instead.")
        x, y = wsi.mpp
        return y * wsi.level_downsamples[level], x * wsi.level_downsamples[level]

    def get_power(self, wsi: Slide, level: int) -> float:
        """Return the magnification of a level.

        Raises
        ------
        RegionError
            If the slide does not state it.
        """
        if wsi.objective is None:
            raise RegionError(f"'{wsi.path}' does not state its power; use level instead.")
        return wsi.objective / wsi.level_downsamples[level]

    def _get_patch(
        self,
        wsi: Slide,
        location: tuple[int, int],
        size: tuple[int, int],
        level: int,
        dtype: DTypeLike,
        mode: str,
    ) -> Array:
        (top, left), (height, width) = location, size
        pixels = wsi.read_region((left, top), (width, height), level)
        if pixels.shape[2] == 1:
            pixels = np.repeat(pixels, 3, axis=2)
        stored = wsi.read_mask((left, top), (width, height), level)
        pixels[~stored] = 0  # as in MONAI's OpenSlide reader
        pixels = pixels[..., :3]
        if mode == "RGBA":
            most = np.iinfo(pixels.dtype).max if pixels.dtype.kind in "iu" else 1
            pixels = np.dstack([pixels, stored * np.asarray(most, pixels.dtype)])
        moved: Array = np.moveaxis(pixels, -1, self.channel_dim).astype(dtype, copy=False)
        return moved
