"""`Slide`: what a user holds. Batches of regions, grids, and what other processes open."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.formats.describe import described
from napari_wsigpu.model.errors import RegionError, TileError
from napari_wsigpu.reading.asked import batches_ahead, check_out, count_of, regions_of, size_of
from napari_wsigpu.reading.batches import in_turn, read_ahead
from napari_wsigpu.reading.cache import DEFAULT_BUDGET
from napari_wsigpu.reading.grid import Grid
from napari_wsigpu.reading.open_slides import pack
from napari_wsigpu.reading.plan import NO_TURN, Regions, Wish
from napari_wsigpu.reading.uses import TileUses
from napari_wsigpu.slide.readable import ReadableSlide
from napari_wsigpu.slide.runtime import PackedSlide

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.model.layout import SlideLayout
    from napari_wsigpu.reading.plan import Cancellation, Keep
    from napari_wsigpu.reading.scaling import ScaledReader, Target
    from napari_wsigpu.reading.uses import Wanted
    from napari_wsigpu.slide.runtime import Runtime

MOVED = {
    "clearings",
    "count_shown",
    "display_background",
    "display_number",
    "least_batch",
    "parts_of",
    "read_tiles",
}


def open_slide(
    path: str | os.PathLike[str],
    device: str = "auto",
    threads: int | None = None,
    *,
    runtime: Runtime | None = None,
) -> Slide:
    """Open a whole-slide image.

    Parameters
    ----------
    path : str or PathLike
        A slide of any vendor, a TIFF file, a file or the folder of a DICOM slide, or the folder of
        an OME-Zarr image; what it is, is decided by its content. Or the URL of a TIFF, DICOM or
        OME-Zarr slide (https, s3, gs, az).
    device : str
        What decodes tiles: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
    threads : int, optional
        How many threads decode on the CPU, the one that reads included; by default one a core.
    runtime : Runtime, optional
        Caches and devices to use instead of those that all slides of the process share.

    Returns
    -------
    Slide
        Use it in a ``with`` statement, or call its `close`.

    Raises
    ------
    SlideError
        If the file can't be read, is no slide, is damaged, or needs what is not there; the
        kinds are in `napari_wsigpu.model.errors`, and each says what to do.

    Examples
    --------
    >>> with open_slide("slide.svs") as slide:  # doctest: +SKIP
    ...     pixels = slide.read_region((10_000, 8_000), (512, 512))
    """
    with described(path) as (layout, source):
        return Slide(layout, device, threads, runtime=runtime, source=source)


class Slide(ReadableSlide):
    """An open whole-slide image. Safe to use from many threads.

    Made by `open_slide`. A slide can be pickled; another process then opens the file with the
    default runtime of that process, and parses it again only if asked for what it says: metadata
    and label images, which can name a patient and don't travel with the pickle.

    Attributes
    ----------
    layout : SlideLayout
        The immutable description of the file.
    levels : tuple of LevelArray
        The file's levels, finest first, as exact array-likes.
    associated_images : Mapping of str to AssociatedImage
        Pictures beside the slide.
    runtime : Runtime
        The caches and devices that it shares with other slides.
    displayed : DisplaySource
        What displays read of it.
    """

    def read_batch(
        self,
        locations: Sequence[tuple[int, int]],
        size: tuple[int, int],
        level: int = 0,
        device: str = "cpu",
        *,
        mpp: float | None = None,
        out: Any = None,
        color: Color = "stored",
        wanted: Wanted | None = None,
        z: int | None = None,
        t: int | None = None,
    ) -> Any:
        """Read rectangles of one size at once; stored tiles that several need are decoded once.

        For who reads ahead with threads of their own; `read_regions` has its own.

        Parameters
        ----------
        locations : sequence of tuple of int
            (x, y) of each upper left corner in pixels of level 0.
        size, level, device, mpp, color, z, t
            As in `read_region`.
        out : ndarray or cupy.ndarray, optional
            Where to put the pixels: of their shape and type, C-contiguous, and on `device`.
        wanted : Wanted, optional
            By which tiles are kept for rectangles that are read later: what `after` of `tile_uses`
            returns. Who shares that reads one after another. Without it they are kept if such
            tiles have been wanted again lately.

        Returns
        -------
        ndarray or cupy.ndarray, shape (regions, height, width, channels)

        Raises
        ------
        RegionError, LevelError, PlaneError, DeviceError, TileError, SlideError
            As in `read_region`; a `TileError` names the locations.
        """
        plane = self.plane(z, t)
        reader, target = plane._scaled(level, mpp)
        regions = regions_of(locations, size, plane.level_downsamples[target.level])
        if out is not None:
            image = plane._images[target.level]
            check_out(out, (len(regions), *size_of(size)[::-1], image.channels), image.dtype)
        if not len(regions):
            regions = regions_of([(0, 0)], size, plane.level_downsamples[target.level])
            return plane._read_batch(reader, regions, device, Wish(), [(0, 0)])[:0]
        wish = Wish(
            keep="recurring" if wanted is None else "later",
            table=plane._profile.table(color),
            later=wanted,
            past=len(regions),
            # Who waits for a server would have others wait as well.
            turn=NO_TURN if wanted is None or self.layout.remote else wanted.uses.turn,
        )
        return plane._read_batch(reader, regions, device, wish, locations, out)

    def tile_uses(
        self,
        locations: Sequence[tuple[int, int]],
        size: tuple[int, int],
        level: int = 0,
        *,
        mpp: float | None = None,
        room: int = DEFAULT_BUDGET // 2,
        z: int | None = None,
        t: int | None = None,
    ) -> TileUses | None:
        """Look through rectangles that will be read batch by batch, without reading any.

        Parameters
        ----------
        locations : sequence of tuple of int
            (x, y) of each upper left corner in pixels of level 0, in their order.
        size, level, mpp, z, t
            As in `read_region`.
        room : int
            Bytes that stored tiles may take which are kept until they are wanted again.

        Returns
        -------
        TileUses or None
            Its ``after(n)`` is for `read_batch`, where rectangle ``n`` is the first of a batch.
            None where tiles are not the level's own, as they lie on each other or are averaged, and
            of no rectangles, or of millions.

        Raises
        ------
        RegionError, LevelError, PlaneError
            As in `read_region`.

        Examples
        --------
        >>> uses = slide.tile_uses(locations, (256, 256))  # doctest: +SKIP
        >>> for n in range(0, len(locations), 64):  # doctest: +SKIP
        ...     batch = slide.read_batch(
        ...         locations[n : n + 64], (256, 256), wanted=uses and uses.after(n)
        ...     )
        """
        plane = self.plane(z, t)
        _, target = plane._scaled(level, mpp)
        image = plane._images[target.level]
        if image.parts or image.computed or not len(locations):
            return None
        regions = regions_of(locations, size, plane.level_downsamples[target.level])
        return TileUses.of(image, target.finer(regions), room)

    def read_regions(
        self,
        locations: Iterable[tuple[int, int]],
        size: tuple[int, int],
        level: int = 0,
        batch_size: int | None = None,
        *,
        mpp: float | None = None,
        device: str = "cpu",
        num_workers: int | None = None,
        prefetch_factor: int = 2,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        color: Color = "stored",
        z: int | None = None,
        t: int | None = None,
    ) -> Iterator[Any]:
        """Read many rectangles of one size, decoding ahead of the caller.

        Parameters
        ----------
        locations : iterable of tuple of int
            (x, y) of each upper left corner in pixels of level 0.
        size : tuple of int
            (width, height) in pixels of `level`.
        level : int
            Index in `levels`.
        batch_size : int, optional
            Hand out this many regions at a time, stacked; by default single regions. Stored tiles
            that several of them need are decoded once.
        mpp : float, optional
            Micrometres a pixel instead of a level, as in `read_region`.
        device : str
            Where the pixels shall be, as in `read_region`.
        num_workers : int, optional
            How many regions or batches are read at the same time, at most 64; by default 2 to the
            host, whose cores decode each of them together, and 3 to a device. With 0 each is read
            when it is asked for.
        prefetch_factor : int
            How many regions or batches each worker reads ahead of the one that is handed out;
            fewer if these would take more than 1 GiB of memory.
        shuffle : bool
            Hand them out in the order of ``random.Random(seed).shuffle(list(locations))``.
        seed : int
            Seed of that order.
        drop_last : bool
            Leave out a last batch that is smaller than the others.
        color : {"stored", "srgb"}
            As in `read_region`.
        z, t : int, optional
            As in `read_region`.

        Yields
        ------
        ndarray or cupy.ndarray, shape (height, width, channels)
            One region for each location; or (regions, height, width, channels) with a
            batch size.

        Raises
        ------
        DeviceError
            If the device can't be used.
        SlideError
            As `read_region` does, when the region's turn comes.
        """
        plane = self.plane(z, t)
        reader, target = plane._scaled(level, mpp)
        if device != "cpu":
            plane._reader.offload.worker(device)
        if num_workers is None:
            num_workers = batches_ahead(device, target)
        wish = Wish(keep="recurring", table=plane._profile.table(color))

        def read(batch: list[tuple[int, int]], cancellation: Cancellation) -> Any:
            regions = regions_of(batch, size, plane.level_downsamples[target.level])
            options = replace(wish, cancellation=cancellation)
            pixels = plane._read_batch(reader, regions, device, options, batch)
            return pixels if batch_size is not None else pixels[0]

        return read_ahead(
            read,
            locations,
            batch_size=batch_size,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            batch_bytes=count_of(batch_size) * plane._region_bytes(size, target.level),
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )

    def tiles(
        self,
        size: int | tuple[int, int],
        *,
        level: int = 0,
        mpp: float | None = None,
        overlap: int = 0,
        batch_size: int = 64,
        device: str = "cpu",
        prefetch_factor: int = 2,
        color: Color = "stored",
        z: int | None = None,
        t: int | None = None,
    ) -> Iterator[tuple[Any, list[tuple[int, int]]]]:
        """Read a whole level as a grid of regions; each stored tile is decoded once.

        The level is read in some bands at the same time, each row by row, and batches of these are
        handed out in turn. Stored tiles that regions share are kept until the last of them is
        read: about as many as lie across the level, a band. If they don't fit into the cache, some
        are decoded again.

        Parameters
        ----------
        size : int or tuple of int
            Side, or (width, height), of a region in pixels of `level`, or of `mpp`.
        level : int
            Index in `levels`.
        mpp : float, optional
            Micrometres a pixel instead of a level, as in `read_region`.
        overlap : int
            How many pixels a region shares with the next one, across and down.
        batch_size : int
            How many regions are handed out at a time; the last batch may have fewer.
        device : str
            Where the pixels shall be, as in `read_region`.
        prefetch_factor : int
            As in `read_regions`.
        color : {"stored", "srgb"}
            As in `read_region`.
        z, t : int, optional
            As in `read_region`.

        Yields
        ------
        ndarray or cupy.ndarray, shape (regions, height, width, channels)
            A batch. What reaches beyond the level has the background's value.
        list of tuple of int
            (x, y) of the upper left corner of each region in pixels of level 0.

        Raises
        ------
        RegionError, LevelError, DeviceError
            If the grid, level or device can't be.
        SlideError
            As `read_region` does, when the batch's turn comes.

        Examples
        --------
        >>> for batch, locations in slide.tiles(256, mpp=0.5):  # doctest: +SKIP
        ...     scores = model(batch)
        """
        plane = self.plane(z, t)
        reader, target = plane._scaled(level, mpp)
        if device != "cpu":
            plane._reader.offload.worker(device)
        width, height = size_of((size, size) if hasattr(size, "__index__") else size, least=1)
        if batch_size is None:
            raise RegionError("batch_size is None; it has to be a whole number >= 1.")
        grid = plane._grid(size, target, overlap)
        table = plane._profile.table(color)
        keep: Keep = "partly" if grid.image.parts else "later"
        region_bytes = plane._region_bytes((width, height), target.level)
        bands = grid.bands(batches_ahead(device, target))

        def read(
            band: range, batch: list[int], cancellation: Cancellation
        ) -> tuple[Any, list[tuple[int, int]]]:
            past = batch[-1] + 1
            tops, lefts = grid.corners(batch[0], past)
            regions = Regions.alike(tops, lefts, height, width)
            locations = [(x, y) for x, y in plane._corners(tops, lefts, target.level).tolist()]
            later = partial(grid.wanted_after, band, batch[0])
            wish = Wish(
                keep=keep,
                table=table,
                cancellation=cancellation,
                later=later,
                past=len(batch),
            )
            return plane._read_batch(reader, regions, device, wish, locations), locations

        # Each band is read by one thread, so that a batch finds what the one before it kept.
        return in_turn(
            read_ahead(
                partial(read, band),
                band,
                batch_size=batch_size,
                num_workers=1,
                prefetch_factor=prefetch_factor,
                batch_bytes=len(bands) * count_of(batch_size) * region_bytes,
            )
            for band in bands
        )

    def tile_locations(
        self,
        size: int | tuple[int, int],
        *,
        level: int = 0,
        mpp: float | None = None,
        overlap: int = 0,
    ) -> NDArray[np.int64]:
        """Return where the regions of a grid lie, row by row, without reading any.

        Parameters
        ----------
        size, level, mpp, overlap
            As in `tiles`.

        Returns
        -------
        ndarray of int64, shape (regions, 2)
            (x, y) of each upper left corner in pixels of level 0.

        Raises
        ------
        RegionError, LevelError
            If the grid or level can't be.
        """
        _, target = self._scaled(level, mpp)
        grid = self._grid(size, target, overlap)
        return self._corners(*grid.corners(0, len(grid)), target.level)

    def opener(self, device: str) -> Callable[[], Slide]:
        """Return what opens the slide again in another process, where tasks run side by side.

        Each of them decodes alone there, unless a number of threads was asked for, and tiles that
        one takes whole are not kept for others. What decodes is as here; where that is free to
        choose, it is the device that pixels are to be on.
        """
        own = device if self.device == "auto" and device != "cpu" else self.device
        layout = self.layout.without_words()
        return partial(_reopened, layout, own, self._threads or 1, self._display_color)

    def packed(self, device: str) -> PackedSlide:
        """Return what tasks of another process open the slide by, as `opener` says, but once."""
        return PackedSlide(pack(self.opener(device)))

    def __getattr__(self, name: str) -> Any:
        """Return what was the slide's own before it became that of `displayed`."""
        if name not in MOVED:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        warnings.warn(
            f"Slide.{name} is deprecated; use Slide.displayed", DeprecationWarning, stacklevel=2
        )
        if name == "display_number":
            return self.displayed.number(self.display_color)
        if name == "display_background":
            return self.displayed.background(self.display_color)
        return getattr(self.displayed, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Slide:
        return self

    def __reduce__(
        self,
    ) -> tuple[type[Slide], tuple[SlideLayout, str, int | None], dict[str, Any]]:
        state = {"_display_color": self._display_color, "_described": None}
        return type(self), (self.layout.without_words(), self.device, self._threads), state

    def __dask_tokenize__(self) -> Any:
        from dask.base import normalize_token

        return normalize_token((self.layout.without_words(), self.device, self._display_color))

    def _grid(self, size: int | tuple[int, int], target: Target, overlap: int) -> Grid:
        width, height = size_of((size, size) if hasattr(size, "__index__") else size, least=1)
        return Grid.over(self._images[target.level], target, (height, width), overlap)

    def _corners(
        self, tops: NDArray[np.int64], lefts: NDArray[np.int64], level: int
    ) -> NDArray[np.int64]:
        """Return (x, y) in pixels of level 0 of corners in a level's own."""
        corners = np.column_stack([lefts, tops]) * self.level_downsamples[level]
        found: NDArray[np.int64] = np.floor(corners + 0.5).astype(np.int64)
        return found

    def _read_batch(
        self,
        reader: ScaledReader,
        regions: Regions,
        device: str,
        wish: Wish,
        locations: Sequence[tuple[int, int]],
        out: Any = None,
    ) -> Any:
        try:
            if device == "cpu":
                return self._guarded(partial(reader.read, regions, wish, out))
            return self._guarded(partial(reader.read_to_device, regions, device, out, None, wish))
        except TileError as error:
            raise error.among(locations) from None

    def _region_bytes(self, size: tuple[int, int], level: int) -> int:
        width, height = size_of(size)
        image = self._images[level]
        return width * height * image.channels * image.dtype.itemsize


def _reopened(layout: SlideLayout, device: str, threads: int, color: Color) -> Slide:
    slide = Slide(layout, device, threads, keeps_whole=False)
    slide.display_color = color
    slide._described = None
    return slide
