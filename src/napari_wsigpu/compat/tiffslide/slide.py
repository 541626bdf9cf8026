"""`TiffSlide`: an open slide by tiffslide's names, read by `Slide`."""

from __future__ import annotations

import weakref
from io import BytesIO
from typing import IO, TYPE_CHECKING, Any, Literal, overload
from warnings import warn

import numpy as np
import tifffile
from PIL import Image, ImageCms

from napari_wsigpu.compat.shared import Items, OpenedSlide, truncated
from napari_wsigpu.compat.tiffslide.files import (
    Place,
    TiffFileError,
    find,
    open_place,
    open_tifffile,
)
from napari_wsigpu.compat.tiffslide.properties import AXES, tiffslide_properties
from napari_wsigpu.model.errors import LevelError, RegionError, SlideError, SlideNotFoundError
from napari_wsigpu.model.geometry import computed_once
from napari_wsigpu.slide.slide import blank
from napari_wsigpu.storage.remote.url import file_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from napari_wsigpu.compat.tiffslide.files import Filename

    Pair = tuple[int, int]


class TiffSlide(OpenedSlide):
    """An open slide.

    Parameters
    ----------
    filename : str, PathLike, fsspec's OpenFile or IO of bytes
        Its path, its URL, or the file itself, which must stay open. Files that are no local ones
        and lie on no server that `napari_wsigpu.open_slide` knows are read by fsspec.
    tifffile_options : Mapping, optional
        For `ts_tifffile`.
    storage_options : Mapping, optional
        For fsspec, where `filename` is a URL.

    Attributes
    ----------
    slide : Slide
        The slide by this package's own names.

    Raises
    ------
    TiffFileError
        If the file is no slide, or a damaged one (a ``tifffile.TiffFileError``).
    SlideError
        If it is not there (a ``FileNotFoundError``) or can't be read (an ``OSError``).
    """

    def __init__(
        self,
        filename: Filename,
        *,
        tifffile_options: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._place = self._found(filename, storage_options)
        self._options = dict(tifffile_options or {})
        self.slide = open_place(self._place)
        # Code for tiffslide seldom closes its slides.
        self._close = weakref.finalize(self, self.slide.close)

    @staticmethod
    def _found(filename: Filename, storage_options: Mapping[str, Any] | None) -> Place:
        return find(filename, storage_options)

    def close(self) -> None:
        """Let go of the file; may be called twice. A stream that was given stays open."""
        file = self.__dict__.pop("ts_tifffile", None)
        if file is not None:
            file.close()
        self._close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({file_name(self._place.path)!r})"

    @classmethod
    def detect_format(
        cls,
        filename: Filename,
        *,
        tifffile_options: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Return the vendor of a slide; None if the file is no slide."""
        try:
            with cls(filename, storage_options=storage_options) as slide:
                return slide.slide.vendor
        except TiffFileError:
            return None

    @computed_once
    def ts_tifffile(self) -> tifffile.TiffFile:
        """The file as tifffile opens it.

        Raises
        ------
        TiffFileError
            If it is no TIFF file.
        """
        return open_tifffile(self._place, **self._options)

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
        """How many pixels of level 0 one of each level spans."""
        return self.slide.level_downsamples

    @computed_once
    def properties(self) -> dict[str, Any]:
        """All metadata by tiffslide's names; None is what the file doesn't say."""
        return tiffslide_properties(self.slide.layout)

    @computed_once
    def associated_images(self) -> Mapping[str, Image.Image]:
        """The pictures beside the slide by name, decoded when they are asked for."""
        pictures = self.slide.associated_images
        return Items(
            "associated images", lambda: pictures, lambda name: _image(pictures[name].read())
        )

    @property
    def color_profile(self) -> ImageCms.ImageCmsProfile | None:
        """The ICC profile of the pixels; None where there is none."""
        profile = self.slide.icc_profile
        return None if profile is None else ImageCms.getOpenProfile(BytesIO(profile))

    @computed_once
    def zarr_group(self) -> Any:
        """The levels as read-only arrays of Zarr, by their numbers, with the slide's axes."""
        import zarr

        from napari_wsigpu.compat.zarr_store import SlideStore

        axes = self.properties[AXES].lower().replace("s", "c")
        return zarr.open_group(SlideStore(self.slide, axes), mode="r")

    @property
    def ts_zarr_grp(self) -> Any:
        """The same as `zarr_group`."""
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
    ) -> NDArray[Any]: ...

    def read_region(
        self,
        location: Pair,
        level: int,
        size: Pair,
        *,
        as_array: bool = False,
        padding: bool = True,
    ) -> Image.Image | NDArray[Any]:
        """Read a rectangle.

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
            Keep the size of a region that reaches beyond the level.

        Returns
        -------
        PIL.Image.Image or ndarray
            0 where the file holds no pixels.

        Raises
        ------
        LevelError
            If there is no such level (an ``IndexError``), without `padding`.
        SlideError
            As `Slide.read_region` does.
        """
        pixels = self._region(
            (int(location[0]), int(location[1])), level, (int(size[0]), int(size[1])), padding
        )
        return pixels if as_array else self._with_profile(_image(pixels))

    def _region(self, location: Pair, level: int, size: Pair, padding: bool) -> NDArray[Any]:
        base = self.slide.layout.levels[0]
        inside = False
        if 0 <= level < self.level_count:
            start, corner = truncated(location, self.level_downsamples[level])
            ends = self.level_dimensions[level]
            lengths = [
                max(0, min(whole, begin + length) - max(0, begin))
                for whole, begin, length in zip(ends, start, size, strict=True)
            ]
            inside = min(lengths) > 0
        elif not padding:
            raise LevelError(
                f"'{self._place}' has no level {level}; its levels are 0 to {self.level_count - 1}."
            )
        if not inside:
            if padding:
                warn(
                    f"{size} pixels of level {level} at {location} are out-of-bounds: all 0",
                    UserWarning,
                    stacklevel=3,
                )
            width, height = size if padding else lengths
            return np.zeros((height, width, base.channels), base.dtype)
        if not padding:
            step = self.level_downsamples[level]
            begins = [max(0, begin) * step for begin in start]
            corner, size = (round(begins[0]), round(begins[1])), (lengths[0], lengths[1])
        pixels: NDArray[Any] = self.slide.read_region(corner, size, level)
        blank(pixels, self.slide, corner, level)
        return pixels

    def get_thumbnail(self, size: Pair, *, use_embedded: bool = False) -> Image.Image:
        """Return the whole slide as an image that fits into (width, height).

        Parameters
        ----------
        size : tuple of int
            (width, height) at most.
        use_embedded : bool
            Make it from the file's own thumbnail, if that is large enough, and smaller than the
            level that fits.
        """
        factor = max(whole / most for whole, most in zip(self.dimensions, size, strict=True))
        level = self.get_best_level_for_downsample(factor)
        columns, rows = self.level_dimensions[level]
        image = self.associated_images.get("thumbnail") if use_embedded else None
        if image is None or image.size < tuple(size) or image.width * image.height > columns * rows:
            image = self.read_region((0, 0), level, (columns, rows))
        try:
            image.thumbnail(size, Image.Resampling.LANCZOS)
        except ValueError:  # Pillow averages no 16 bit pixels
            image.thumbnail(size, Image.Resampling.NEAREST)
        return self._with_profile(image)

    def _with_profile(self, image: Image.Image) -> Image.Image:
        profile = self.slide.icc_profile
        if profile is not None:
            image.info["icc_profile"] = profile
        return image


class NotTiffSlide(TiffSlide):
    """A flat image as a slide of one level, decoded when it is opened; see `TiffSlide`.

    Raises
    ------
    TiffFileError
        If Pillow can't decode it.
    """

    @staticmethod
    def _found(filename: Filename, storage_options: Mapping[str, Any] | None) -> Place:
        place = find(filename, storage_options)
        try:
            with Image.open(place.stream or place.path) as image:
                pixels = np.asarray(image.convert("L" if image.mode == "L" else "RGB"))
        except FileNotFoundError as error:
            raise SlideNotFoundError(f"There is no file '{place}'; check the path.") from error
        except (OSError, ValueError) as error:
            raise TiffFileError(
                f"'{place}' is no image that Pillow can decode ({error}); choose another file."
            ) from error
        return Place(place.path, _as_tiff(pixels), owned=True)

    @classmethod
    def detect_format(
        cls,
        filename: Filename,
        *,
        tifffile_options: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Return Pillow's name of the format of a file; None if it is no image."""
        try:
            place = find(filename, storage_options)
            with Image.open(place.stream or place.path) as image:
                return image.format
        except (OSError, ValueError, SlideError):
            return None


def _as_tiff(pixels: NDArray[np.uint8]) -> IO[bytes]:
    stream = BytesIO()
    tifffile.imwrite(
        stream,
        pixels,
        tile=(256, 256),
        photometric="rgb" if pixels.ndim > 2 else "minisblack",
        metadata=None,
    )
    return stream


def _image(pixels: NDArray[Any]) -> Image.Image:
    channels = pixels.shape[2]
    if channels not in (1, 3, 4) or (channels > 1 and pixels.dtype != np.uint8):
        raise RegionError(
            f"{channels} channels of {pixels.dtype} make no image; use as_array=True."
        )
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
