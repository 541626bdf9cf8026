"""`ReadableSlide`: what an open slide says, its planes and label images, and single regions."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.display.device_source import DeviceSource
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.model.errors import LevelError, PlaneError, RegionError, changed_error
from napari_wsigpu.reading.asked import check_out, region_of, regions_of
from napari_wsigpu.reading.dask_level import dask_array
from napari_wsigpu.reading.plan import Regions, Wish
from napari_wsigpu.reading.reader import USUAL
from napari_wsigpu.reading.scaling import ScaledReader, Target, find_target
from napari_wsigpu.slide.opened import OpenedSlide

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    import dask.array
    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.model.geometry import Span
    from napari_wsigpu.model.layout import Channel, SlideLayout
    from napari_wsigpu.reading.plan import Keep


# More pixels are never those of a few tiles, or take long enough for a plan.
SMALL_PIXELS = 1 << 20
NO_PIXELS = np.empty((0, 0, 0), np.uint8)
NO_DEVICE_PIXELS = "out and stream are for pixels on a device; use device='cuda'."
RGB, RGBA = 3, 4


class ReadableSlide(OpenedSlide):
    """An open slide that is read region by region; see `OpenedSlide`."""

    @property
    def metadata(self) -> dict[str, Any]:
        """All the file says, JSON-serialisable; vendor fields under the vendor's name.

        What all vendors have comes first, None where the file doesn't say: ``vendor``,
        ``scanner``, ``objective``, ``mpp`` (x, y), ``scan_date``, ``barcode``, and whether there
        is an ``icc_profile``.
        """
        layout = self._said()
        return {
            "vendor": self.vendor,
            "scanner": layout.scanner,
            "objective": self.objective,
            "mpp": None if self.mpp is None else list(self.mpp),
            "scan_date": layout.scan_date,
            "barcode": layout.barcode,
            "icc_profile": layout.icc is not None,
            **copy.deepcopy(dict(layout.metadata)),
        }

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Name and colour of each channel; empty for an RGB slide."""
        return self._said().channels

    @property
    def icc_profile(self) -> bytes | None:
        """The ICC profile of the slide's pixels; None where the file has none.

        Raises
        ------
        SlideError
            If the file can't be read.
        """
        place = self.layout.icc
        return None if place is None else self._read_bytes(place)

    @property
    def labels(self) -> Mapping[str, Self]:
        """Label images that lie on the slide, each a slide of its own of one channel.

        Their pixels are numbers of objects, and 0 where there is none. They are closed with the
        slide. ``layout.labels`` says where they lie, and their colours and properties.
        """
        if self._labels is None:
            self._labels = {
                item.name: type(self)(
                    item.layout,
                    "cpu",
                    runtime=self.runtime,
                    title=f"{self.path} (label image {number})",  # its name can tell of a patient
                )
                for number, item in enumerate(self._said().labels, 1)
            }
        return self._labels

    def plane(self, z: int | None = None, t: int | None = None) -> Self:
        """Return a plane along z and t as a slide of its own, which is closed with this one.

        It shares the runtime's caches and devices. Of very many planes, those that were asked for
        longest ago are released (`release`), until they are read again.

        Parameters
        ----------
        z, t : int, optional
            Which one of `planes`, counted from 0; by default the one that this slide shows.

        Returns
        -------
        Slide
            This slide itself, if that is the one.

        Raises
        ------
        PlaneError
            If there is no such plane.
        SlideChangedError
            If the file is no longer the one that was opened.
        CorruptSlideError
            If the plane has other channels or samples than this one.
        SlideError
            If the file can't be read.
        """
        shown = self.planes
        at = {"z": shown.z if z is None else z, "t": shown.t if t is None else t}
        if at == {"z": shown.z, "t": shown.t}:
            return self
        for axis, size in (("z", shown.size_z), ("t", shown.size_t)):
            check_plane(self.path, axis, at[axis], size)
        plane: Self = self._guarded(lambda: self._planes.get((at["z"], at["t"])))
        return plane

    def read_region(
        self,
        location: tuple[int, int],
        size: tuple[int, int],
        level: int = 0,
        device: str = "cpu",
        *,
        mpp: float | None = None,
        out: Any = None,
        stream: Any = None,
        color: Color = "stored",
        z: int | None = None,
        t: int | None = None,
    ) -> Any:
        """Read a rectangle, as OpenSlide counts it, or at a resolution in micrometres a pixel.

        Parameters
        ----------
        location : tuple of int
            (x, y) of the upper left corner in pixels of level 0, rounded to the nearest
            pixel of `level`.
        size : tuple of int
            (width, height) in pixels of `level`.
        level : int
            Index in `levels`.
        device : str
            Where the pixels shall be: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        mpp : float, optional
            Micrometres that a pixel of the region shall span, instead of a level; `size` is in
            such pixels. They are averages of the coarsest level that is at least as fine: each is
            the mean of what lies under it, weighted by area (a box filter), integers rounded half
            up. A level within 0.1 % of it is taken as it is.
        out : cupy.ndarray, optional
            Device memory for the pixels: of this region's shape and type, C-contiguous.
        stream : int or cupy.cuda.Stream, optional
            CUDA stream to work on instead of one of our own. It is synchronised.
        color : {"stored", "srgb"}
            Pixels as they are, or in sRGB by the slide's ICC profile. The first such read takes
            some tenths of a second longer.
        z, t : int, optional
            The plane, of `planes`; by default the one that is shown.

        Returns
        -------
        ndarray or cupy.ndarray, shape (height, width, channels)
            Pixels outside the slide have the background's value.

        Raises
        ------
        RegionError, LevelError, PlaneError, DeviceError
            If the region, level, plane or device can't be.
        TileError
            If a tile in the region can't be decoded.
        UnsupportedSlideError
            If sRGB is asked for, and the slide has no profile that can be applied.
        SlideError
            If the file can't be read.
        """
        plane = self if z is None and t is None else self.plane(z, t)
        if device != "cpu" or mpp is not None or color != "stored":
            options = Wish(table=plane._profile.table(color))
            return plane._read_planned(location, size, level, device, mpp, out, stream, options)
        if out is not None or stream is not None:
            raise RegionError(NO_DEVICE_PIXELS)
        pixels, keep = plane._read_small(location, size, level)
        if keep is None:
            return pixels
        return plane._read_planned(location, size, level, options=Wish(keep=keep))

    def read_rgba(
        self, location: tuple[int, int], size: tuple[int, int], level: int = 0
    ) -> NDArray[np.uint8]:
        """Read a rectangle of a gray, RGB or RGBA slide of 8 bits as RGBA pixels.

        Parameters
        ----------
        location, size, level
            As in `read_region`.

        Returns
        -------
        ndarray of uint8, shape (height, width, 4)
            Opaque where the file holds pixels, else transparent black.

        Raises
        ------
        RegionError, LevelError, TileError, SlideError
            As `read_region` does.
        """
        pixels, keep = self._read_small(location, size, level, RGBA)
        if keep is None:
            return pixels
        stored = self._read_planned(location, size, level, options=Wish(keep=keep))
        pixels = rgba_of(stored)
        held = self.read_mask(location, size, level)
        if not held.all():
            pixels[~held] = 0
        return pixels

    def _read_planned(
        self,
        location: tuple[int, int],
        size: tuple[int, int],
        level: int,
        device: str = "cpu",
        mpp: float | None = None,
        out: Any = None,
        stream: Any = None,
        options: Wish = USUAL,
    ) -> Any:
        """Read any region by a plan; parameters as in `read_region`."""
        reader, target = self._scaled(level, mpp)
        regions = regions_of([location], size, self.level_downsamples[target.level])
        if device == "cpu":
            if out is not None or stream is not None:
                raise RegionError(NO_DEVICE_PIXELS)
            return self._guarded(lambda: reader.read(regions, options)[0])
        if out is not None:
            image = self._images[target.level]
            check_out(out, (*regions.shapes[0], image.channels), image.dtype)
        read = partial(reader.read_to_device, regions, device, out, stream, options)
        pixels = self._guarded(read)
        return pixels[0] if out is None else out

    def _read_small(
        self, location: tuple[int, int], size: tuple[int, int], level: int, channels: int = 0
    ) -> tuple[NDArray[Any], Keep | None]:
        """Read a few tiles' pixels in this thread, if the read needs no plan.

        Parameters
        ----------
        location, size, level
            As in `read_region`.
        channels : int
            `RGBA` for opaque pixels of an RGB slide, else 0.

        Returns
        -------
        pixels : ndarray, shape (height, width, channels)
            The pixels.
        keep : str or None
            None if these are read; else which tiles are worth keeping when they are.
        """
        self._renew()
        if type(level) is not int or not 0 <= level < len(self._downsamples):
            level = self._checked(level)
        image = self._images[level]
        region = region_of(location, size, self._downsamples[level])
        if region.height * region.width > SMALL_PIXELS or (channels and image.channels != RGB):
            return NO_PIXELS, "recurring"
        shape = region.height, region.width, channels or image.channels
        pixels = np.empty(shape, image.encoding.dtype)
        return pixels, self._reader.read_small(level, region, pixels)

    def read_mask(
        self,
        location: tuple[int, int],
        size: tuple[int, int],
        level: int = 0,
        *,
        mpp: float | None = None,
        z: int | None = None,
        t: int | None = None,
    ) -> NDArray[np.bool_]:
        """Tell which pixels of a rectangle the file holds, as a mask or an alpha channel.

        The others lie outside the slide or in tiles that the scanner left out; `read_region` shows
        the background there. Nothing is read or decoded.

        Parameters
        ----------
        location, size, level, mpp, z, t
            As in `read_region`.

        Returns
        -------
        ndarray of bool, shape (height, width)
            A pixel that is averaged of finer ones is held if any of these is.

        Raises
        ------
        RegionError, LevelError, PlaneError
            If the region, level or plane can't be.

        Examples
        --------
        >>> alpha = slide.read_mask((0, 0), (512, 512)) * np.uint8(255)  # doctest: +SKIP
        """
        plane = self.plane(z, t)
        reader, target = plane._scaled(level, mpp)
        regions = regions_of([location], size, plane.level_downsamples[target.level])
        mask: NDArray[np.bool_] = plane._guarded(lambda: reader.held(regions)[0])
        return mask

    def read_to_device(
        self, index: int, rows: Span, columns: Span, channel: int | None, device: str
    ) -> Any:
        """Read a region of a level by its number; see `LevelArray.read`.

        Returns
        -------
        cupy.ndarray, shape (height, width, channels), or (height, width) for one channel
        """
        self._renew()
        reader = self._reader_of(index)
        regions, wish = Regions.slice(rows, columns), Wish(channel=channel)
        read = partial(reader.read_to_device, index, regions, device, wish=wish)
        return self._guarded(read)[0]

    def read_bytes(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the file's own bytes at each (offset, length), as the layout's grids say them.

        Fewer are returned where the file ends before.

        Raises
        ------
        SlideError
            If the file can't be read.
        """
        views: list[memoryview] = self._guarded(lambda: self._source.read(ranges))
        return views

    def to_dask(
        self, level: int = 0, tiles: int | None = None, device: str = "cpu"
    ) -> dask.array.Array:
        """Return all planes of a level as a Dask array; nothing is decoded yet.

        Parameters
        ----------
        level : int
            Index in `levels`.
        tiles, device
            As `LevelArray.to_dask` takes them.

        Returns
        -------
        dask.array.Array, shape (t, z, height, width, channels)
            The axes t and z are there if the slide has several planes along them. Each chunk is
            of one plane, which is opened when it is first read.

        Raises
        ------
        LevelError
            If there is no such level.
        ImportError, RegionError, DeviceError
            As `LevelArray.to_dask` does.
        """
        return dask_array(self.levels[self._checked(level)], tiles, device, self.planes.sizes)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: str = "cpu") -> Any:
        """Return a new array for pixels, in the memory of a device.

        Raises
        ------
        DeviceError, RegionError
            If the device can't be used, or has no memory for it.
        """
        if device == "cpu":
            return np.empty(shape, dtype)
        return self._guarded(partial(self._reader.empty_on, device, shape, dtype))

    def displayed_on_device(self) -> DeviceSource | None:
        """Return what displays read of it that draw on the GPU; None while the CPU decodes."""
        tiles = self._reader.offload.tiles_on_device(self._reader.read_tiles)
        if tiles is None:
            return None
        if self._device_source is None or self._device_source.tiles is not tiles:
            share = self._reader.offload.share_on

            def read(number: int, places: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
                part = share(self._images[number].stored[0])
                found: set[tuple[int, int]] = self._guarded(
                    lambda: tiles.read(number, places, part)
                )
                return found

            self._device_source = DeviceSource(self.displayed, tiles, read, self._profile.table)
        return self._device_source

    def _said(self) -> SlideLayout:
        """Return what the file says, asked anew where a pickle left it out."""
        if self._described is None:
            own = self.layout
            found = describe(own.path if own.remote is None else own.remote.url)
            if found.files != own.files or found.remote != own.remote:
                raise changed_error(self.path)
            self._described = found
        return self._described

    def _scaled(self, level: int, mpp: float | None) -> tuple[ScaledReader, Target]:
        """Return what reads a level, or at a resolution."""
        self._renew()
        if mpp is not None and level != 0:
            raise RegionError(f"Both level={level!r} and mpp={mpp!r} were given; give one of them.")
        if mpp is None:
            target = Target(self._checked(level))
        else:
            target = find_target(self.path, mpp, self.mpp, self.level_downsamples)
        return ScaledReader(self._reader, target, self._images[target.level]), target

    def _checked(self, level: int) -> int:
        if not isinstance(level, int | np.integer) or not 0 <= level < self.level_count:
            raise LevelError(
                f"'{self.path}' has no level {level!r}; its levels are 0 to {self.level_count - 1}."
            )
        return int(level)


def rgba_of(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return opaque RGBA pixels of gray, RGB or RGBA ones of shape (height, width, channels)."""
    height, width, channels = pixels.shape
    found = np.empty((height, width, RGBA), np.uint8)
    found[..., :3] = pixels[..., :3] if channels > 2 else pixels[..., :1]
    found[..., 3] = 255
    return found


def check_plane(path: str, axis: str, number: Any, size: int) -> None:
    """Refuse a plane that is none of those along an axis."""
    if not isinstance(number, int | np.integer) or not 0 <= number < size:
        raise PlaneError(
            f"'{path}' has no plane {axis} = {number!r}; its planes along {axis} are 0 to "
            f"{size - 1}."
        )
