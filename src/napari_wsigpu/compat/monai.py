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

    from numpy.typing import DTypeLike, NDArray

    Path = str | os.PathLike[str]


class SlideReader(BaseWSIReader):  # type: ignore[misc]
    """Reads slides for MONAI's data sets and transforms; arguments are those of `BaseWSIReader`."""

    supported_suffixes: Sequence[str] = ()
    backend = "napari-wsigpu"

    def verify_suffix(self, filename: Path | Sequence[Path]) -> bool:
        """Accept any name: what a file is, its content says."""
        return True

    def read(self, data: Path | Sequence[Path], **kwargs: Any) -> Slide | list[Slide]:
        """Open slides; arguments are those of `napari_wsigpu.open_slide`."""
        paths: Sequence[Path] = data if isinstance(data, list | tuple) else [data]  # type: ignore[list-item]
        slides = [open_slide(path, **{**self.kwargs, **kwargs}) for path in paths]
        return slides if len(slides) > 1 else slides[0]

    def get_level_count(self, wsi: Slide) -> int:
        """Return how many levels a slide has."""
        return wsi.level_count

    def get_size(self, wsi: Slide, level: int) -> tuple[int, int]:
        """Return (height, width) of a level."""
        width, height = wsi.level_dimensions[level]
        return height, width

    def get_downsample_ratio(self, wsi: Slide, level: int) -> float:
        """Return how many pixels of level 0 one of a level spans."""
        return wsi.level_downsamples[level]

    def get_file_path(self, wsi: Slide) -> str:
        """Return the path of a slide."""
        return wsi.path

    def get_mpp(self, wsi: Slide, level: int) -> tuple[float, float]:
        """Return micrometres a pixel of a level, (y, x).

        Raises
        ------
        RegionError
            If the slide does not say.
        """
        if wsi.mpp is None:
            raise RegionError(f"'{wsi.path}' has no micrometres a pixel; use level.")
        x, y = wsi.mpp
        return y * wsi.level_downsamples[level], x * wsi.level_downsamples[level]

    def get_power(self, wsi: Slide, level: int) -> float:
        """Return the magnification of a level.

        Raises
        ------
        RegionError
            If the slide does not say.
        """
        if wsi.objective is None:
            raise RegionError(f"'{wsi.path}' does not say its magnification; use level.")
        return wsi.objective / wsi.level_downsamples[level]

    def _get_patch(
        self,
        wsi: Slide,
        location: tuple[int, int],
        size: tuple[int, int],
        level: int,
        dtype: DTypeLike,
        mode: str,
    ) -> NDArray[Any]:
        (top, left), (height, width) = location, size
        pixels = wsi.read_region((left, top), (width, height), level)
        if pixels.shape[2] == 1:
            pixels = np.repeat(pixels, 3, axis=2)
        held = wsi.read_mask((left, top), (width, height), level)
        pixels[~held] = 0  # as MONAI has it by OpenSlide
        pixels = pixels[..., :3]
        if mode == "RGBA":
            most = np.iinfo(pixels.dtype).max if pixels.dtype.kind in "iu" else 1
            pixels = np.dstack([pixels, held * np.asarray(most, pixels.dtype)])
        moved: NDArray[Any] = np.moveaxis(pixels, -1, self.channel_dim).astype(dtype, copy=False)
        return moved
