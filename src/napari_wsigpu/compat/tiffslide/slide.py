"""`TiffSlide`: tiffslide's interface on top of `Slide`."""

from __future__ import annotations

import weakref
from io import BytesIO
from typing import IO, TYPE_CHECKING, Literal, overload
from warnings import warn

import numpy as np
import tifffile
from PIL import Image, ImageCms

from napari_wsigpu.compat.shared import LazyMapping, OpenedSlide, truncated
from napari_wsigpu.compat.tiffslide.files import (
    SlideInput,
    TiffFileError,
    open_input,
    open_tifffile,
    resolve_input,
)
from napari_wsigpu.compat.tiffslide.properties import axes_of, tiffslide_properties
from napari_wsigpu.model.errors import RegionError, SlideError, SlideNotFoundError
from napari_wsigpu.model.geometry import computed_once
from napari_wsigpu.slide.containers import no_level
from napari_wsigpu.slide.slide import clear_missing
from napari_wsigpu.storage.remote.url import file_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    import zarr
    from numpy.typing import NDArray

    from napari_wsigpu.compat.tiffslide.files import Filename
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.geometry import Pair

    Kwargs = Mapping[str, object] | None

# Attributes that another process computes again.
DERIVED = "_close", "ts_tifffile", "properties", "associated_images", "zarr_group"


class TiffSlide(OpenedSlide):
    """An open slide.

    Parameters
    ----------
    filename : str, PathLike, fsspec.core.OpenFile or IO of bytes
        Path, URL, or the file itself, which must stay open. URLs that `napari_wsigpu.open_slide`
        does not support are read with fsspec.
    tifffile_options : Mapping, optional
        Options for `ts_tifffile`.
    storage_options : Mapping, optional
        Options for fsspec if `filename` is a URL.

    Attributes
    ----------
    slide : Slide
        The underlying slide.

    Raises
    ------
    TiffFileError
        If the file is not a slide or is damaged (a ``tifffile.TiffFileError``).
    SlideError
        If the file does not exist (a ``FileNotFoundError``) or cannot be read (an ``OSError``).
    """

    def __init__(
        self, filename: Filename, *, tifffile_options: Kwargs = None, storage_options: Kwargs = None
    ) -> None:
        self._input = self._resolved(filename, storage_options)
        self._options = dict(tifffile_options or {})
        self.slide = open_input(self._input)
        # Code written for tiffslide often never closes its slides.
        self._close = weakref.finalize(self, self.slide.close)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name not in DERIVED}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._close = weakref.finalize(self, self.slide.close)

    @staticmethod
    def _resolved(filename: Filename, storage_options: Kwargs) -> SlideInput:
        return resolve_input(filename, storage_options)

    def close(self) -> None:
        """Close the file; further calls do nothing. A stream that was passed in stays open."""
        file = self.__dict__.pop("ts_tifffile", None)
        if file is not None:
            file.close()
        self._close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({file_name(self._input.path)!r})"

    @classmethod
    def detect_format(
        cls, filename: Filename, *, tifffile_options: Kwargs = None, storage_options: Kwargs = None
    ) -> str | None:
        """Return the vendor of a slide, or None if the file is not a slide."""
        try:
            with cls(filename, storage_options=storage_options) as slide:
                return slide.slide.vendor
        except TiffFileError:
            return None

    @computed_once
    def ts_tifffile(self) -> tifffile.TiffFile:
        """The file, opened with tifffile.

        Raises
        ------
        TiffFileError
            If the file is not a TIFF file.
        """
        return open_tifffile(self._input, **self._options)

    @property
    def level_count(self) -> int:
        """Number of levels."""
        return self.slide.level_count

    @property
    def level_dimensions(self) -> tuple[Pair, ...]:
        """(width, height) of each level."""
        return self.slide.level_dimensions

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """Downsample of each level relative to level 0."""
        return self.slide.level_downsamples

    @computed_once
    def properties(self) -> dict[str, object]:
        """All metadata under tiffslide's property names; None for unknown values."""
        return tiffslide_properties(self.slide.layout)

    @computed_once
    def associated_images(self) -> Mapping[str, Image.Image]:
        """Associated images by name, decoded on access."""
        images = self.slide.associated_images
        return LazyMapping(
            "associated images", lambda: images, lambda key: _image(images[key].read())
        )

    @property
    def color_profile(self) -> ImageCms.ImageCmsProfile | None:
        """ICC profile of the pixels, or None."""
        profile = self.slide.icc_profile
        return None if profile is None else ImageCms.getOpenProfile(BytesIO(profile))

    @computed_once
    def zarr_group(self) -> zarr.Group:
        """The levels as a group of read-only Zarr arrays, named by their numbers."""
        # Imported first, as its error says how to install Zarr.
        from napari_wsigpu.compat.zarr_store import SlideStore  # isort: skip
        import zarr

        axes = axes_of(self.slide.layout).lower().replace("s", "c")
        return zarr.open_group(SlideStore(self.slide, axes), mode="r")

    @property
    def ts_zarr_grp(self) -> zarr.Group:
        """Alias of `zarr_group`."""
        return self.zarr_group

    @overload
    def read_region(
        self,
        location: Pair,
        level: int,
        size: Pair,
        *,
        as_array: Literal[False] = False,
        padding: bool = True,
    ) -> Image.Image: ...

    @overload
    def read_region(
        self,
        location: Pair,
        level: int,
        size: Pair,
        *,
        as_array: Literal[True],
        padding: bool = True,
    ) -> Array: ...

    def read_region(
        self,
        location: Pair,
        level: int,
        size: Pair,
        *,
        as_array: bool = False,
        padding: bool = True,
    ) -> Image.Image | Array:
        """Read a region.

        Parameters
        ----------
        location : tuple of int
            (x, y) of the upper left corner in pixels of level 0, divided by the level's
            downsample and truncated.
        level : int
            Index of a level.
        size : tuple of int
            (width, height) in pixels of the level.
        as_array : bool
            Return an array of shape (height, width, channels).
        padding : bool
            Whether to pad a region that extends beyond the level instead of cropping it.

        Returns
        -------
        PIL.Image.Image or ndarray
            The region; 0 where the file has no pixels.

        Raises
        ------
        LevelError
            If the level does not exist (an ``IndexError``) and `padding` is false.
        SlideError
            As `Slide.read_region` does.
        """
        (x, y), (width, height) = map(int, location), map(int, size)
        pixels = self._region((x, y), level, (width, height), padding)
        return pixels if as_array else self._with_profile(_image(pixels))

    def _region(self, location: Pair, level: int, size: Pair, padding: bool) -> Array:
        base = self.slide.layout.levels[0]
        inside = False
        if 0 <= level < self.level_count:
            start, corner = truncated(location, self.level_downsamples[level])
            ends = self.level_dimensions[level]
            lengths = [
                max(0, min(whole, first + length) - max(0, first))
                for whole, first, length in zip(ends, start, size, strict=True)
            ]
            inside = min(lengths) > 0
        elif not padding:
            raise no_level(str(self._input), level, self.level_count)
        if not inside:
            if padding:
                text = f"{size} pixels of level {level} at {location} are out-of-bounds: all zero"
                warn(text, UserWarning, stacklevel=3)
            width, height = size if padding else lengths
            return np.zeros((height, width, base.channels), base.dtype)
        if not padding:
            step = self.level_downsamples[level]
            left, top = (max(0, first) * step for first in start)
            corner, size = (round(left), round(top)), (lengths[0], lengths[1])
        pixels: Array = self.slide.read_region(corner, size, level)
        clear_missing(pixels, self.slide, corner, level)
        return pixels

    def get_thumbnail(self, size: Pair, *, use_embedded: bool = False) -> Image.Image:
        """Return the whole slide as an image of at most `size` pixels.

        Parameters
        ----------
        size : tuple of int
            Maximum (width, height).
        use_embedded : bool
            Use the file's own thumbnail if it is large enough and no larger than the level that
            would be read otherwise.
        """
        factor = max(whole / most for whole, most in zip(self.dimensions, size, strict=True))
        level = self.get_best_level_for_downsample(factor)
        columns, rows = self.level_dimensions[level]
        image = self.associated_images.get("thumbnail") if use_embedded else None
        if image is None or image.size < tuple(size) or image.width * image.height > columns * rows:
            image = self.read_region((0, 0), level, (columns, rows))
        try:
            image.thumbnail(size, Image.Resampling.LANCZOS)
        except ValueError:  # Pillow cannot average 16-bit pixels
            image.thumbnail(size, Image.Resampling.NEAREST)
        return self._with_profile(image)

    def _with_profile(self, image: Image.Image) -> Image.Image:
        profile = self.slide.icc_profile
        if profile is not None:
            image.info["icc_profile"] = profile
        return image


class NotTiffSlide(TiffSlide):
    """A flat image with the interface of `TiffSlide`, decoded on opening.

    Raises
    ------
    TiffFileError
        If Pillow cannot decode the file.
    """

    @staticmethod
    def _resolved(filename: Filename, storage_options: Kwargs) -> SlideInput:
        found = resolve_input(filename, storage_options)
        try:
            with Image.open(found.stream or found.path) as image:
                pixels = np.asarray(image.convert("L" if image.mode == "L" else "RGB"))
        except FileNotFoundError as error:
            raise SlideNotFoundError(f"There is no file '{found}'; check the path.") from error
        except (OSError, ValueError) as error:
            reason = f"Pillow cannot decode '{found}' ({error})"
            raise TiffFileError(f"{reason}; choose another file.") from error
        return SlideInput(found.path, _as_tiff(pixels), owned=True)

    @classmethod
    def detect_format(
        cls, filename: Filename, *, tifffile_options: Kwargs = None, storage_options: Kwargs = None
    ) -> str | None:
        """Return Pillow's name of a file's format, or None if it is not an image."""
        try:
            found = resolve_input(filename, storage_options)
            with Image.open(found.stream or found.path) as image:
                return image.format
        except (OSError, ValueError, SlideError):
            return None


def _as_tiff(pixels: NDArray[np.uint8]) -> IO[bytes]:
    stream = BytesIO()
    photometric = "rgb" if pixels.ndim > 2 else "minisblack"
    tifffile.imwrite(stream, pixels, tile=(256, 256), photometric=photometric, metadata=None)
    return stream


def _image(pixels: Array) -> Image.Image:
    channels = pixels.shape[2]
    if channels not in (1, 3, 4) or (channels > 1 and pixels.dtype != np.uint8):
        kind = f"{channels} channels of {pixels.dtype}"
        raise RegionError(f"Pillow has no type for {kind}; use as_array=True.")
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
