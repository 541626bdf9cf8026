"""`Slide`: an open whole-slide image."""

from __future__ import annotations

import copy
import os
import threading
from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, product
from reprlib import repr as short_repr
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from napari_wsigpu.codecs.choose import choose_decoder
from napari_wsigpu.codecs.color import EmbeddedProfile, is_srgb
from napari_wsigpu.codecs.native_format import RGBA
from napari_wsigpu.display.compose import compose
from napari_wsigpu.display.composite_source import CompositeLevel, CompositeSource, CompositeView
from napari_wsigpu.display.device_source import DeviceSource
from napari_wsigpu.display.source import DisplaySource
from napari_wsigpu.formats.describe import describe_for_reading
from napari_wsigpu.formats.tiff.tiff import background, is_rgb
from napari_wsigpu.model.composite import Composite
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    DeviceError,
    LevelError,
    PlaneError,
    RegionError,
    SlideError,
    TileError,
    thread_error,
    too_large,
)
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.model.interrupt import interrupt_event
from napari_wsigpu.reading.arguments import (
    batches_ahead,
    batches_per_read,
    check_out,
    count_of,
    listed,
    region_of,
    regions_of,
    size_of,
)
from napari_wsigpu.reading.batches import Grouping, cancel_reads, interleave, read_ahead
from napari_wsigpu.reading.cache import DEFAULT_BUDGET
from napari_wsigpu.reading.channels import ChannelReader, channel_levels, composite_of
from napari_wsigpu.reading.dask_level import dask_array
from napari_wsigpu.reading.gathering import GatheredReads
from napari_wsigpu.reading.grid import Grid
from napari_wsigpu.reading.level import LevelArray
from napari_wsigpu.reading.log import TileLog
from napari_wsigpu.reading.mosaic import parts_of
from napari_wsigpu.reading.open_slides import pack
from napari_wsigpu.reading.parts import SlideParts
from napari_wsigpu.reading.plan import (
    NO_LOCK,
    Cancellation,
    CancelledError,
    ReadOptions,
    Regions,
)
from napari_wsigpu.reading.reader import DEFAULT_OPTIONS, RegionReader, stored_tiles
from napari_wsigpu.reading.scaling import ScaledReader, Target, find_target
from napari_wsigpu.reading.tile_schedule import TileSchedule
from napari_wsigpu.slide.associated import AssociatedImage
from napari_wsigpu.slide.containers import Levels, NamedItems, no_level
from napari_wsigpu.slide.layout_text import html_table
from napari_wsigpu.slide.opening import Opening
from napari_wsigpu.slide.planes import OpenPlanes
from napari_wsigpu.slide.runtime import PackedSlide, Runtime
from napari_wsigpu.slide.runtime import default as default_runtime
from napari_wsigpu.slide.source import check_files, source_of
from napari_wsigpu.slide.tile_check import TileCheck
from napari_wsigpu.storage import truncation
from napari_wsigpu.storage.memory import MemorySource
from napari_wsigpu.storage.readers import Readers
from napari_wsigpu.storage.stream import StreamSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    import cupy
    import dask.array
    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.codecs.cpu import CpuDecoder
    from napari_wsigpu.model.arrays import AnyArray, Array, DeviceArray, DType
    from napari_wsigpu.model.geometry import Integers, Mask, Pair, Span
    from napari_wsigpu.model.layout import Channel, LevelLayout, Planes, PyramidLevel, SlideLayout
    from napari_wsigpu.reading.plan import Keep
    from napari_wsigpu.reading.tile_schedule import UpcomingTiles
    from napari_wsigpu.storage.source import ByteSource

    # Regions, and the location of each of them.
    Located = tuple[AnyArray, list[Pair]]

Result = TypeVar("Result")

# Longest side, in pixels, that the coarsest level of the pyramid may have.
LARGEST_OVERVIEW = 1024
_slide_numbers = count()
# Held while a slide that was inherited by fork gets new handles in the child.
_fork_lock = threading.Lock()
# Regions of up to this many pixels are read on the CPU without a plan if they span few tiles. If a
# GPU was chosen, concurrent reads of such regions are batched. Larger regions gain little from
# either.
SMALL_PIXELS = 1 << 21
NO_PIXELS = np.empty((0, 0, 0), np.uint8)
ONLY_ON_DEVICE = "out and stream require a GPU; use device='cuda'."
RGB = 3


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
        A slide of any supported vendor, a TIFF file, a DICOM file or folder, or the folder of an
        OME-Zarr image. The format is detected from the content, not the name. TIFF, DICOM and
        OME-Zarr slides can also be opened by URL (https, s3, gs, az).
    device : str
        Device that decodes tiles: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
    threads : int, optional
        Number of threads that decode on the CPU, including the calling one; by default one per
        core.
    runtime : Runtime, optional
        Caches and devices to use instead of the process's shared ones.

    Returns
    -------
    Slide
        Use it in a ``with`` statement, or call its `close` method.

    Raises
    ------
    SlideError
        If the file cannot be read, is not a slide, is damaged, or requires something that is not
        installed. The subclasses are in `napari_wsigpu.errors`; each message says what to do.

    Examples
    --------
    >>> with open_slide("slide.svs") as slide:  # doctest: +SKIP
    ...     pixels = slide.read_region((10_000, 8_000), (512, 512))
    """
    with describe_for_reading(path) as (layout, source):
        return Slide(layout, device, threads, runtime=runtime, source=source)


class Slide:
    """An open whole-slide image, returned by `open_slide`. Safe to use from many threads.

    A slide can be pickled. The process that unpickles it opens the file with its own default
    runtime. Metadata and label images can identify a patient, so they are not pickled; the file is
    parsed again when they are first accessed. `copy.copy` opens the file again in the same way,
    but `copy.deepcopy` returns the slide itself, so that copies of arrays and layers share it.

    Attributes
    ----------
    layout : SlideLayout
        Immutable description of the file.
    levels : tuple of LevelArray
        The slide's levels as array-likes that return pixels as stored, finest first.
    associated_images : Mapping of str to AssociatedImage
        Images stored with the slide, such as its label.
    runtime : Runtime
        Caches, devices and threads that the slide shares with others.
    displayed : DisplaySource
        Source of tiles for displays.
    """

    @property
    def path(self) -> str:
        """Absolute path of the file, or its URL without user, password and query.

        A label image has the slide's path plus a number, because its name could be private.
        """
        return self.layout.path

    @property
    def vendor(self) -> str:
        """Vendor in OpenSlide's notation, for example ``"aperio"`` or ``"generic-tiff"``."""
        return self.layout.vendor

    @property
    def dimensions(self) -> Pair:
        """(width, height) of level 0 in pixels."""
        return self.level_dimensions[0]

    @property
    def level_count(self) -> int:
        """Number of levels: stored levels, and levels that the format derives from them."""
        return len(self.layout.levels)

    @property
    def level_dimensions(self) -> tuple[Pair, ...]:
        """(width, height) of each level, in the level's own pixels."""
        return tuple((level.width, level.height) for level in self.layout.levels)

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """Pixels of level 0 per pixel of each level, along one axis."""
        return self._downsamples

    @property
    def mpp(self) -> tuple[float, float] | None:
        """Micrometers per pixel of level 0, (x, y); None if the file doesn't state it."""
        return self.layout.mpp

    @property
    def objective(self) -> float | None:
        """Magnification of the objective; None if the file doesn't state it."""
        return self.layout.objective

    @property
    def planes(self) -> Planes:
        """Number and spacing of the planes along z and t, and the plane that this slide shows.

        By default, the slide shows the plane that the file designates, else the middle one along z
        and the first one along t. For some vendors, it shows the first one along z, as in
        OpenSlide.
        """
        return self.layout.planes

    def __init__(
        self,
        layout: SlideLayout,
        device: str = "auto",
        threads: int | None = None,
        *,
        runtime: Runtime | None = None,
        source: ByteSource | None = None,
    ) -> None:
        stream = source if isinstance(source, StreamSource) else None
        self._set_up(Opening(layout, device, threads, stream=stream), runtime, source=source)

    def _set_up(
        self,
        opening: Opening,
        runtime: Runtime | None,
        decoder: CpuDecoder | None = None,
        source: ByteSource | None = None,
    ) -> None:
        if runtime is not None and not isinstance(runtime, Runtime):
            raise DeviceError(f"runtime is {runtime!r}; it must be a Runtime or None.")
        self.runtime = default_runtime() if runtime is None else runtime
        # The layout with its metadata; None if a pickle left it out and it hasn't been needed yet.
        self._parsed: SlideLayout | None = opening.layout
        self._labels: dict[str, Slide] | None = None
        self._planes: OpenPlanes[Slide] = OpenPlanes(self._open_plane)
        self._open(opening, decoder, source)

    def _open(
        self,
        opening: Opening,
        decoder: CpuDecoder | None = None,
        source: ByteSource | None = None,
        listener: Callable[[str, str], None] | None = None,
        *,
        closed: bool = False,
    ) -> None:
        """Set up handles, threads and locks: for a new slide, and in a forked process."""
        layout, device = opening.layout, opening.device
        self._opening, self.layout = opening, layout
        self._number = next(_slide_numbers)
        self._reads = Readers(layout.path)
        self._reads.closed = closed
        self._gathered = GatheredReads()
        decoder = self._decoder = choose_decoder(layout, opening.threads, decoder)
        self._source = source_of(layout) if source is None else source
        self._pyramid = layout.pyramid(LARGEST_OVERVIEW)
        self._downsamples = layout.downsamples
        # Images are numbered: levels of the pyramid first, then parts of mosaics, then associated
        # images. Tile keys, logs and plans use these numbers.
        images = {level.number: level.layout for level in sorted(self._pyramid)}
        parts = parts_of(list(images.values()))
        self._images: dict[int, LevelLayout] = images
        associated = dict(enumerate(layout.associated, len(images) + len(parts)))
        names = {number: f"the {item.name} image" for number, item in associated.items()}
        names |= {number: part.name for number, part in parts.items()}
        images = images | {number: part.image for number, part in parts.items()}
        images |= {number: item.image for number, item in associated.items()}
        self._all_images, self._associated = images, frozenset(associated)
        # Composites read single channels; `check_tiles` and `overview` read whole tiles.
        by_channel = {} if layout.rgb else channel_levels(self._pyramid, max(images) + 1)
        names |= {
            image.number: f"channel {channel} of level {number}"
            for (number, channel), image in by_channel.items()
        }
        readable = images | {image.number: image.layout for image in by_channel.values()}
        self._log = TileLog(
            layout.path,
            names,
            partial(truncation.reason, layout, readable),
            # Only files on disk are checked: a server states the version of the file in each
            # response, and the bytes of a caller's source have no version.
            partial(check_files, () if layout.remote or source else layout.files, layout.path),
        )
        self._log.on_failed_tile = listener
        if closed:
            self._source.close()

        def new_reader(source: ByteSource, layout: SlideLayout = layout) -> RegionReader:
            parts = SlideParts(
                self._number,
                layout,
                readable,
                self._associated,
                (*self._pyramid, *by_channel.values()),
                source,
                decoder,
                self._log,
            )
            return RegionReader(
                parts,
                self.runtime.tiles,
                self.runtime.devices,
                device,
                keeps_whole=opening.keeps_whole,
            )

        self._reader = new_reader(self._source)
        first = layout.levels[0]
        # Associated images that need a reader of their own: those stored in the metadata have their
        # own source, and those whose sample type differs from level 0 have their own background.
        self._associated_readers = {
            number: new_reader(
                self._source if item.data is None else MemorySource(item.data),
                replace(layout, background=background(item.image)),
            )
            for number, item in associated.items()
            if item.data is not None or item.image.dtype != first.dtype
        }
        self._profile = self._profile_of("", first, layout.icc, rgb=layout.rgb)
        self.displayed = DisplaySource(
            self._number,
            layout,
            self._pyramid,
            self._profile.table,
            lambda *arguments: self._guarded(partial(self._reader.read_tiles, *arguments)),
            self._log,
            by_channel,
        )
        self._channel_reader = ChannelReader(
            self._number, layout.levels[0], by_channel, self._reader, self._log, self._guarded
        )
        self._device_source: DeviceSource | None = None
        self.levels = Levels(map(self.level_array, range(self.level_count)), layout.path)
        images_by_name = {
            item.name: AssociatedImage(
                item,
                self._array(number, item.image),
                decoder.refusal(item.image),
                self._profile_of(
                    f"The {item.name} image of ", item.image, item.icc, rgb=is_rgb(item.image)
                ),
            )
            for number, item in associated.items()
        }
        self.associated_images: Mapping[str, AssociatedImage] = NamedItems(
            images_by_name, "associated image"
        )
        # Set last: until then, other threads of a forked process wait in `_reopen_if_forked`.
        self._process = os.getpid()

    @property
    def display_color(self) -> Color:
        """Colors that viewers show: ``"stored"``, or ``"srgb"``, converted by the ICC profile.

        It applies to levels that `level_array` returns with ``tolerant=True``; `levels` always
        return pixels as stored. A pickled slide keeps it.

        Raises
        ------
        SlideError
            If it is set to sRGB and the slide has no usable profile.
        """
        return self._opening.color

    @display_color.setter
    def display_color(self, color: Color) -> None:
        if is_srgb(color):
            self._profile.profile()
        self._reopen_if_forked()
        for slide in (self, *self._planes.all()):
            slide._opening = replace(slide._opening, color=color)

    @property
    def pyramid(self) -> tuple[PyramidLevel, ...]:
        """Levels that viewers show, finest first: the slide's own, and computed ones.

        A computed level averages 2 x 2 pixels of the one before it. Such levels fill gaps between
        levels that differ by more than a factor of about two, and continue below the coarsest one.
        A viewer therefore loads at most about four times as many pixels as its canvas has, and the
        coarsest level fits a screen. `level_array` returns a level by its number. Levels with
        ``number < slide.level_count`` are the slide's own, and the number is their index in
        `levels`. The arrays of a napari layer (``layer.data``) have the same numbers.
        """
        return self._pyramid

    def level_array(
        self,
        index: int,
        channel: int | None = None,
        *,
        tolerant: bool = False,
        color: Color | None = None,
    ) -> LevelArray:
        """Return a level as an array-like.

        Parameters
        ----------
        index : int
            Number of a level in `pyramid`, which for the slide's own levels is the index in
            `levels`.
        channel : int, optional
            Show only this channel, as a two-dimensional array.
        tolerant : bool
            For viewers: show the background in place of tiles that fail to decode, instead of
            raising, and use the slide's `display_color`.
        color : {"stored", "srgb"}, optional
            Colors to return; by default as stored or, if `tolerant`, as in `display_color`.

        Raises
        ------
        LevelError
            If there is no such level or channel.
        UnsupportedSlideError
            If sRGB is requested and the slide has no usable profile.
        """
        if color is not None and is_srgb(color):
            self._profile.profile()
        layout = self._images.get(index)
        if layout is None:
            raise no_level(self.path, index, len(self._pyramid))
        if channel is not None and (
            not isinstance(channel, int | np.integer) or not 0 <= channel < layout.channels
        ):
            channels = f"its channels are 0 to {layout.channels - 1}"
            raise LevelError(f"'{self.path}' has no channel {channel!r}; {channels}.")
        return self._array(index, layout, channel, tolerant=tolerant, color=color)

    def _array(
        self,
        number: int,
        layout: LevelLayout,
        channel: int | None = None,
        *,
        tolerant: bool = False,
        color: Color | None = None,
    ) -> LevelArray:
        """Return an image as an array-like, by its number in `SlideParts.images`."""

        def read(rows: Span, columns: Span, channel: int | None) -> Array:
            self._reopen_if_forked()
            reader = self._image_reader(number)
            shown = self.display_color if tolerant else "stored"
            table = self._profile.table(color or shown)
            # A color table converts all channels at once; the channel is selected afterwards.
            stored_channel = channel if table is None else None
            # Displays revisit tiles that they have shown; a script may never read a tile twice.
            keep: Keep = "all" if tolerant or layout.computed else "recurring"
            as_stored = channel is None and table is None and rows.step == columns.step == 1
            if as_stored and keep == "recurring" and reader.offload.is_refused(layout):
                rect = Rect(rows.start, columns.start, rows.length, columns.length)
                small, wanted = self._read_rect(number, layout, rect)
                if wanted is None:
                    return small
                keep = wanted
            image, only = self._channel_reader.image_of(number, stored_channel)
            options = ReadOptions(channel=only, tolerant=tolerant, keep=keep, table=table)
            regions = Regions.slice(rows, columns)
            pixels: Array = self._guarded(lambda: reader.read(image, regions, options)[0])
            return pixels if stored_channel == channel else pixels[..., channel]

        return LevelArray(layout, read, self, number, channel, tolerant=tolerant)

    @property
    def device(self) -> str:
        """Device that decodes tiles, as in `open_slide`. A new value takes effect at the next read.

        Switching to a GPU may take seconds. A GPU that failed before is tried again.

        Raises
        ------
        DeviceError
            If the device cannot be used; the slide then keeps the previous one.
        """
        self._reopen_if_forked()
        return self._reader.offload.device

    @device.setter
    def device(self, device: str) -> None:
        self._reopen_if_forked()
        for reader in (self._reader, *self._associated_readers.values()):
            reader.offload.device = device
        self._opening = replace(self._opening, device=device)
        for plane in self._planes.all():
            plane.device = device

    @property
    def decoder(self) -> tuple[str, str]:
        """The current decoder of level 0, and why it is used, for example ``("CPU", "chosen")``."""
        self._reopen_if_forked()
        return self._reader.offload.decoder()

    def on_failed_tile(self, report: Callable[[str, str], None]) -> None:
        """Register a callback for tiles that can't be decoded.

        ``report(name, reason)`` is called for at most the first 10 failed tiles, each once, in the
        thread that read it. Only reads that show the background in place of failed tiles report;
        all other reads raise a `TileError` instead.
        """
        self._reopen_if_forked()
        for slide in (self, *self._planes.all()):
            slide._log.on_failed_tile = report

    def stats(self, most_failed: int | None = None) -> dict[str, Any]:
        """Return counters: tiles requested, cache hits, tiles per decoder, bytes read, failures.

        The counters under "display" are the number of tiles that displays wait for (queue), the
        size of the last batch (batch), the number of prefetched tiles (prefetched), and how many
        of these were needed later (prefetch_hits).

        Parameters
        ----------
        most_failed : int, optional
            Name at most this many failed tiles; by default all of them.
        """
        self._reopen_if_forked()
        display = self.runtime.fetcher.stats(self._number)
        return {**self._log.stats(most_failed), "display": display}

    def check_tiles(self, progress: Callable[[int, int], None] | None = None) -> TileCheck:
        """Decode every stored tile of all planes, levels and associated images completely.

        Cached tiles are dropped first.

        Parameters
        ----------
        progress : callable, optional
            ``progress(done, total)`` is called with the number of tiles checked so far and in
            total. If it raises an exception, the check ends.

        Returns
        -------
        TileCheck
            The damaged and the doubtful tiles.

        Raises
        ------
        SlideError
            If the file can't be read.
        """
        self.clear_cache()
        planes, own, done = self.planes, self._checkable(), 0
        total = planes.count * sum(len(stored_tiles(self._all_images[number])) for number in own)
        damaged: list[tuple[str, str]] = []
        doubtful: list[tuple[str, tuple[str, ...]]] = []

        def advance(tiles: int) -> None:
            nonlocal done
            done += tiles
            if progress is not None:
                progress(done, max(done, total))

        # Buffers are recycled by finalizers, which would swallow Ctrl-C.
        cancellation = Cancellation()
        with suppress(CancelledError), interrupt_event(cancellation.cancel) as interrupted:
            for t, z in product(range(planes.size_t), range(planes.size_z)):
                plane = self.plane(z, t)
                prefix = f"t {t}, z {z}, " if planes.count > 1 else ""
                plane._log.forget_doubtful()
                for number in own if plane is self else plane._checkable() - plane._associated:
                    check = plane._image_reader(number).check_tiles
                    check = partial(check, number, advance, cancellation)
                    damaged += ((prefix + name, why) for name, why in plane._guarded(check))
                doubtful += ((prefix + name, why) for name, why in plane._log.doubtful_tiles())
        if interrupted.is_set():
            raise KeyboardInterrupt
        return TileCheck(done, tuple(damaged), tuple(doubtful))

    def _checkable(self) -> set[int]:
        """Return the numbers of the stored images that can be decoded; for a mosaic, its parts."""
        return {
            number
            for number, image in self._all_images.items()
            if not (image.parts or image.computed or self._decoder.refusal(image))
        }

    def clear_cache(self) -> None:
        """Drop the decoded tiles of all planes of this slide from host and device memory."""
        self._reopen_if_forked()
        self.displayed.clearings += 1
        self._reader.clear_cache()
        for plane in self._planes.all():
            plane.clear_cache()

    def release(self) -> None:
        """Release file handles, threads and cached tiles until the next read."""
        self._reopen_if_forked()
        # Release the source twice: first to end server requests that the fetcher may be waiting
        # for, then to close any handles that it opened before it forgot the slide.
        self._source.release()
        self.runtime.fetcher.forget_slide(self._number)
        self._source.release()
        self.clear_cache()
        self._release_readers()
        for other in (*(self._labels or {}).values(), *self._planes.all()):
            other.release()

    def close(self) -> None:
        """Close the slide for good. Closing it twice is harmless.

        It waits for reads in other threads. Reads that still need the file raise
        `SlideClosedError`.
        """
        self._reopen_if_forked()
        self._reads.closed = True
        self._source.close()
        # Nobody wants any more what displays and iterators are reading.
        cancel_reads(self._number)
        self.runtime.fetcher.forget_slide(self._number)
        with self._reads.exclusive():
            pass
        self.clear_cache()
        self._release_readers()
        for other in (*(self._labels or {}).values(), *self._planes.all()):
            other.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        self.close()
        return False

    def __repr__(self) -> str:
        width, height = self.dimensions
        return f"<Slide '{self.path}' {self.vendor} {width} x {height}>"

    def _repr_html_(self) -> str:
        return html_table(self.layout)

    def __dir__(self) -> list[str]:
        names = super().__dir__()
        return [name for name in names if not name.startswith("_") or name.startswith("__")]

    def _open_plane(self, position: Pair) -> Slide:
        with self._opening.parse_again(*position) as (opening, source):
            layout = opening.layout
            shown = layout.planes
            if _sample_format(layout) != _sample_format(self.layout) or (
                (shown.z, shown.t) != position
            ):
                raise CorruptSlideError(
                    f"The plane at z = {position[0]}, t = {position[1]} of '{self.path}' has "
                    "different channels or samples than the plane that is shown; get a fresh copy "
                    "of the file."
                )
            plane = _open_from(opening, self.runtime, self._decoder, source)
        plane._log.on_failed_tile = self._log.on_failed_tile
        return plane

    def _release_readers(self) -> None:
        for reader in (self._reader, *self._associated_readers.values()):
            reader.release()
        self._profile.release()

    def _profile_of(
        self, name: str, image: LevelLayout, icc: Pair | bytes | None, *, rgb: bool
    ) -> EmbeddedProfile:
        return EmbeddedProfile(f"{name}'{self.path}'", image, icc, self._read_profile, rgb=rgb)

    def _read_profile(self, profile: Pair | bytes) -> bytes:
        if isinstance(profile, bytes):
            return profile
        return self._guarded(lambda: bytes(self._source.read([profile])[0]))

    def _guarded(self, read: Callable[[], Result]) -> Result:
        """Keep the slide open while `read` runs; turn a `MemoryError` into a `RegionError`."""
        self._reopen_if_forked()
        try:
            with self._reads:
                return read()
        except MemoryError:
            raise RegionError(
                f"There is not enough memory to read this region of '{self.path}'; read it in "
                "parts, or release other arrays."
            ) from None
        except RuntimeError as error:
            refused = thread_error(error)
            if refused is None:
                raise  # a `DeviceError` keeps its cause
            raise refused from error

    def _image_reader(self, index: int) -> RegionReader:
        return self._associated_readers.get(index, self._reader)

    def _reopen_if_forked(self) -> None:
        """Set up new locks, threads and handles in a process forked from the slide's own.

        Threads that existed only in the parent may hold the inherited locks.
        """
        if self._process == os.getpid():
            return
        with _fork_lock:
            if self._process != os.getpid():
                self._open_in_child()

    def _open_in_child(self, decoder: CpuDecoder | None = None) -> None:
        opening, listener = self._opening.in_child(), self._log.on_failed_tile
        self._planes.reset_lock()
        self._open(opening, decoder, opening.stream, listener, closed=self._reads.closed)
        for plane in self._planes.all():
            if plane._process != self._process:
                plane._open_in_child(self._decoder)

    @property
    def metadata(self) -> dict[str, Any]:
        """All metadata of the file, JSON-serializable; vendor fields are under the vendor's name.

        Fields that all vendors share come first and are None if the file doesn't state them:
        ``vendor``, ``scanner``, ``objective``, ``mpp`` (x, y), ``scan_date``, ``barcode``, and
        whether there is an ``icc_profile``.
        """
        layout = self._full_layout()
        fields = {
            "vendor": self.vendor,
            "scanner": layout.scanner,
            "objective": self.objective,
            "mpp": None if self.mpp is None else list(self.mpp),
            "scan_date": layout.scan_date,
            "barcode": layout.barcode,
            "icc_profile": layout.icc is not None,
        }
        return NamedItems({**fields, **copy.deepcopy(dict(layout.metadata))}, "metadata field")

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Name and color of each channel; empty for an RGB slide."""
        return self._full_layout().channels

    @property
    def icc_profile(self) -> bytes | None:
        """ICC profile of the slide's pixels; None if the file has none.

        Raises
        ------
        SlideError
            If the file cannot be read.
        """
        profile = self.layout.icc
        return None if profile is None else self._read_profile(profile)

    @property
    def labels(self) -> Mapping[str, Slide]:
        """Label images on the slide, each as a slide with one channel; closed with this slide.

        Their pixels are object numbers, 0 where there is no object. ``layout.labels`` holds their
        positions, colors and properties.
        """
        if self._labels is None:
            whole = replace(self._opening, layout=self._full_layout())
            labels = {
                item.name: _open_from(whole.label_image(number), self.runtime)
                for number, item in enumerate(whole.layout.labels)
            }
            self._labels = NamedItems(labels, "label image")
        return self._labels

    def plane(self, z: int | None = None, t: int | None = None) -> Slide:
        """Return a plane along z and t as a separate slide, which is closed with this one.

        It shares the runtime's caches and devices. If more than 64 planes are open, the least
        recently requested ones are released until they are read again.

        Parameters
        ----------
        z, t : int, optional
            Index of the plane, from 0; by default, the index of the plane that this slide shows.

        Returns
        -------
        Slide
            This slide itself if it shows that plane.

        Raises
        ------
        PlaneError
            If there is no such plane.
        SlideChangedError
            If the file has changed since it was opened.
        CorruptSlideError
            If the plane differs from this one in channels or sample type.
        SlideError
            If the file cannot be read.
        """
        shown = self.planes
        at = {"z": shown.z if z is None else z, "t": shown.t if t is None else t}
        if at == {"z": shown.z, "t": shown.t}:
            return self
        for axis, size in (("z", shown.size_z), ("t", shown.size_t)):
            check_plane(self.path, axis, at[axis], size)
        return self._guarded(lambda: self._planes.get((at["z"], at["t"])))

    def read_region(
        self,
        location: Pair,
        size: Pair,
        level: int = 0,
        device: str = "cpu",
        *,
        mpp: float | None = None,
        out: DeviceArray | None = None,
        stream: int | cupy.cuda.Stream | None = None,
        color: Color = "stored",
        z: int | None = None,
        t: int | None = None,
        composite: Composite | None = None,
    ) -> AnyArray:
        """Read a rectangle of a level, with OpenSlide's coordinates, or at a given resolution.

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
            Device to return the pixels on: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        mpp : float, optional
            Resolution in micrometers per pixel, instead of a level; `size` then counts pixels of
            this resolution. They are computed from the coarsest level that is at least as fine:
            each is the mean of the area it covers (a box filter), rounded to the nearest integer.
            Where the area extends beyond the slide, the background counts too. A level whose
            resolution differs by less than 0.1 % is used as it is.
        out : cupy.ndarray, optional
            Device array for the pixels: C-contiguous, with the shape and type of the region.
        stream : int or cupy.cuda.Stream, optional
            CUDA stream to use instead of an internal one; synchronized before this returns.
        color : {"stored", "srgb"}
            Pixels as stored, or converted to sRGB by the slide's ICC profile. The first conversion
            takes a few tenths of a second longer.
        z, t : int, optional
            Index of the plane, see `planes`; by default the plane that this slide shows.
        composite : Composite, optional
            Settings that combine channels into one RGB image; the result is then 8-bit, on the CPU.
            See the `composite` method.

        Returns
        -------
        ndarray or cupy.ndarray, shape (height, width, channels)
            Pixels outside the slide have the background's value.

        Raises
        ------
        RegionError, LevelError, PlaneError, DeviceError
            If the region, level, plane or device is not valid.
        TileError
            If a tile in the region cannot be decoded.
        UnsupportedSlideError
            If sRGB is requested and the slide has no usable profile.
        SlideError
            If the file cannot be read.
        """
        plane = self if z is None and t is None else self.plane(z, t)
        if composite is not None:
            if device != "cpu" or color != "stored" or out is not None or stream is not None:
                raise RegionError(
                    "Composites are RGB pixels on the CPU; omit device, color, out and stream."
                )
            return plane._read_composite(location, size, level, mpp, composite)
        if device != "cpu" or mpp is not None or color != "stored":
            if device != "cpu" and mpp is None and color == "stored":
                sent = plane._send_small(location, size, level, device, out, stream)
                if sent is not None:
                    return sent
            keep: Keep = "all" if device == "cpu" else "recurring"
            options = ReadOptions(keep=keep, table=plane._profile.table(color))
            return plane._read_planned(location, size, level, device, mpp, out, stream, options)
        if out is not None or stream is not None:
            raise RegionError(ONLY_ON_DEVICE)
        pixels, wanted = plane._read_small(location, size, level)
        if wanted is None:
            return pixels
        return plane._read_planned(location, size, level, options=ReadOptions(keep=wanted))

    def read_rgba(self, location: Pair, size: Pair, level: int = 0) -> NDArray[np.uint8]:
        """Read a rectangle of a gray, RGB or RGBA slide with 8 bits per sample as RGBA pixels.

        Parameters
        ----------
        location, size, level
            As in `read_region`.

        Returns
        -------
        ndarray of uint8, shape (height, width, 4)
            Opaque where the file holds pixels, transparent black elsewhere.

        Raises
        ------
        RegionError, LevelError, TileError, SlideError
            As in `read_region`.
        """
        try:
            pixels, keep = self._read_small(location, size, level, RGBA)
            if keep is None:
                return pixels
            stored = self._read_planned(location, size, level, options=ReadOptions(keep=keep))
            pixels = to_rgba(stored)
            clear_missing(pixels, self, location, level)
        except MemoryError:
            raise too_large(*size) from None
        return pixels

    def composite(
        self, channels: Sequence[int] | None = None, settings: Composite | None = None
    ) -> Composite:
        """Return settings that combine channels into one RGB image, for `read_region` and viewers.

        Parameters
        ----------
        channels : sequence of int, optional
            The visible channels; by default those of `settings`, or else up to four that the file
            marks as visible.
        settings : Composite, optional
            Colors, windows and gammas to keep; a window is computed for each visible channel
            without one.

        Returns
        -------
        Composite
            Colors and windows come from the file. Where the file has none, the dye in the channel's
            name determines the color, and the window covers percentiles 0.1 to 99.8 of the coarsest
            level.

        Raises
        ------
        LevelError
            If there is no such channel, or the slide is RGB.
        RegionError
            If the settings are not those of a slide with as many channels, or have wrong values.
        SlideError
            If the file cannot be read.

        Examples
        --------
        >>> slide.read_region((0, 0), (512, 512), composite=slide.composite([0, 5]))
        ...     # doctest: +SKIP
        """
        if not self.channels:
            raise LevelError(f"'{self.path}' has no channels to combine: its pixels are RGB.")
        if not isinstance(settings, Composite | None):
            raise RegionError(
                f"{short_repr(settings)} is not a composite; pass `slide.composite([0, 5])`, for "
                "example, to combine two channels."
            )
        if settings is not None:
            settings.check(self.path, len(self.channels))
        return composite_of(self.channels, self.channel_overview, channels, settings)

    def composite_region(
        self, number: int, regions: Regions, settings: Composite
    ) -> NDArray[np.uint8]:
        """Return a region of a level of `pyramid` as RGB, with settings from `composite`."""
        # Not tolerant as for displays: a damaged tile raises an error.
        options = ReadOptions(keep="recurring")
        shown = self._channel_reader.region(number, regions, settings.visible, options)
        return compose(shown, settings, regions.shapes[0])

    def composite_level(self, index: int, view: CompositeView) -> CompositeLevel:
        """Return a level of `pyramid` as a composite; the viewer may change `view.settings`."""
        source = CompositeSource(self.displayed, view, self._channel_reader, self.runtime.tiles)
        return CompositeLevel(self.level_array(index), source)

    def reads_channels_apart(self, number: int) -> bool:
        """Return whether the channels of a level are decoded one by one."""
        return self._channel_reader.image_of(number, 0)[0] != number

    def channel_overview(self, channel: int) -> Array:
        """Return the pixels of the coarsest level in one channel, shape (height, width)."""
        number, image, *_ = self._pyramid[-1]
        whole = Regions.one(Rect(0, 0, image.height, image.width))
        return self._channel_reader.region(number, whole, [channel])[0]

    def _read_composite(
        self, location: Pair, size: Pair, level: int, mpp: float | None, composite: Composite
    ) -> NDArray[np.uint8]:
        settings = self.composite(settings=composite)
        if mpp is None:
            number = self._check_level(level)
            regions = regions_of([location], size, self.level_downsamples[number])
            return self.composite_region(number, regions, settings)
        pixels = self._read_planned(location, size, level, mpp=mpp)
        shown = [pixels[..., channel] for channel in settings.visible]
        return compose(shown, settings, pixels.shape[:2])

    def _read_planned(
        self,
        location: Pair,
        size: Pair,
        level: int,
        device: str = "cpu",
        mpp: float | None = None,
        out: DeviceArray | None = None,
        stream: int | cupy.cuda.Stream | None = None,
        options: ReadOptions = DEFAULT_OPTIONS,
    ) -> AnyArray:
        """Read a region with a plan, to the host or a device; parameters as in `read_region`."""
        reader, target = self._scaled_reader(level, mpp)
        regions = regions_of([location], size, self.level_downsamples[target.level])
        if device == "cpu":
            if out is not None or stream is not None:
                raise RegionError(ONLY_ON_DEVICE)
            return self._guarded(lambda: reader.read(regions, options)[0])
        if out is not None:
            image = self._images[target.level]
            shape = *regions.shapes[0], image.channels
            check_out(out, shape, image.dtype, on_host=False)
        height, width = regions.shapes[0]
        if out is not None or stream is not None or height * width > SMALL_PIXELS:
            read = partial(reader.read_to_device, regions, device, out, stream, options)
            pixels = self._guarded(read)
            return pixels[0] if out is None else out

        def read_all(locations: Sequence[Pair]) -> DeviceArray:
            downsample = self.level_downsamples[target.level]
            own = len(locations) == 1 and locations[0] is location
            asked = regions if own else regions_of(locations, size, downsample)
            return reader.read_to_device(asked, device, None, None, options)

        # Reads with the same key from other threads are gathered into one batch.
        key = target, height, width, device, options.table
        return self._guarded(lambda: self._gathered.read(key, location, read_all))

    def _read_small(
        self, location: Pair, size: Pair, level: int, channels: int = 0
    ) -> tuple[Array, Keep | None]:
        """Read a region of a few tiles in this thread and without a plan, if that is possible.

        Parameters
        ----------
        location, size, level
            As in `read_region`.
        channels : int
            `RGBA` to read an RGB slide as opaque RGBA pixels, else 0.

        Returns
        -------
        pixels : ndarray, shape (height, width, channels)
            The pixels.
        keep : str or None
            None if the pixels were read. Otherwise the region needs a plan, with this value of
            `ReadOptions.keep`.
        """
        level, rect = self._rect(location, size, level)
        return self._read_rect(level, self._images[level], rect, channels)

    def _send_small(
        self,
        location: Pair,
        size: Pair,
        level: int,
        device: str,
        out: DeviceArray | None,
        stream: int | cupy.cuda.Stream | None,
    ) -> AnyArray | None:
        """Read a region as `_read_small` does, and copy it to a device; None if it needs a plan."""
        if self._reader.offload.index is not None:  # a chosen GPU is never bypassed
            return None
        level, rect = self._rect(location, size, level)
        if rect.height * rect.width > SMALL_PIXELS:
            return None
        if out is not None:
            image = self._images[level]
            shape = rect.height, rect.width, image.channels
            check_out(out, shape, image.dtype, on_host=False)
        return self._reader.send_small(level, rect, device, out, stream)

    def _rect(self, location: Pair, size: Pair, level: int) -> tuple[int, Rect]:
        """Check a level; return its number, and a region in its pixels."""
        self._reopen_if_forked()
        if type(level) is not int or not 0 <= level < len(self._downsamples):
            level = self._check_level(level)
        return level, region_of(location, size, self._downsamples[level])

    def _read_rect(
        self, number: int, image: LevelLayout, rect: Rect, channels: int = 0
    ) -> tuple[Array, Keep | None]:
        """Read a rectangle of an image, given its number and layout, as `_read_small` does."""
        if rect.height * rect.width > SMALL_PIXELS or (channels and image.channels != RGB):
            return NO_PIXELS, "recurring"
        shape = rect.height, rect.width, channels or image.channels
        pixels = np.empty(shape, image.encoding.dtype)
        return pixels, self._image_reader(number).read_small(number, rect, pixels)

    def read_mask(
        self,
        location: Pair,
        size: Pair,
        level: int = 0,
        *,
        mpp: float | None = None,
        z: int | None = None,
        t: int | None = None,
    ) -> Mask:
        """Return a mask of the pixels in a rectangle that the file holds.

        All other pixels are outside the slide or in tiles that the scanner left out;
        `read_region` fills them with the background. No tile is read or decoded.

        Parameters
        ----------
        location, size, level, mpp, z, t
            As in `read_region`.

        Returns
        -------
        ndarray of bool, shape (height, width)
            An averaged pixel counts as held if the file holds any of the pixels it averages.

        Raises
        ------
        RegionError, LevelError, PlaneError
            If the region, level or plane is not valid.

        Examples
        --------
        >>> alpha = slide.read_mask((0, 0), (512, 512)) * np.uint8(255)  # doctest: +SKIP
        """
        plane, reader, target = self._resolve(level, mpp, z, t)
        regions = regions_of([location], size, plane.level_downsamples[target.level])
        height, width = regions.shapes[0]
        try:
            return plane._guarded(lambda: reader.held(regions)[0])
        except SlideError:  # several are a `ValueError` too
            raise
        except ValueError:  # from NumPy, if the bytes exceed the address space
            raise too_large(width, height) from None

    def read_to_device(
        self, index: int, rows: Span, columns: Span, channel: int | None, device: str
    ) -> DeviceArray:
        """Read part of level `index` to a device, for `LevelArray.read`.

        Returns
        -------
        cupy.ndarray, shape (height, width, channels), or (height, width) for one channel
        """
        self._reopen_if_forked()
        reader = self._image_reader(index)
        image, only = self._channel_reader.image_of(index, channel)
        regions, options = Regions.slice(rows, columns), ReadOptions(channel=only)
        read = partial(reader.read_to_device, image, regions, device, options=options)
        return self._guarded(read)[0]

    def read_bytes(self, ranges: Sequence[Pair]) -> list[memoryview]:
        """Return the bytes of the file at each (offset, length).

        The grids of the layout hold the ranges of the tiles. Ranges are truncated at the end of the
        file.

        Raises
        ------
        SlideError
            If the file cannot be read.
        """
        return self._guarded(lambda: self._source.read(ranges))

    def to_dask(
        self, level: int = 0, tiles: int | None = None, device: str = "cpu"
    ) -> dask.array.Array:
        """Return all planes of a level as a Dask array, without decoding anything yet.

        Parameters
        ----------
        level : int
            Index in `levels`.
        tiles, device
            As in `LevelArray.to_dask`.

        Returns
        -------
        dask.array.Array, shape (t, z, height, width, channels)
            The axes t and z exist only if the slide has several planes along them. Each chunk
            belongs to one plane, which is opened when the chunk is first read.

        Raises
        ------
        LevelError
            If there is no such level.
        ImportError, RegionError, DeviceError
            As in `LevelArray.to_dask`.
        """
        level = self._check_level(level)
        return dask_array(self.levels[level], tiles, device, self.planes.sizes)

    def empty(self, shape: tuple[int, ...], dtype: DType, device: str = "cpu") -> AnyArray:
        """Return an uninitialized array for pixels in the memory of a device.

        Raises
        ------
        DeviceError, RegionError
            If the device cannot be used, or lacks the memory.
        """
        if device == "cpu":
            return np.empty(shape, dtype)
        return self._guarded(lambda: self._reader.backend(device).empty(shape, dtype))

    def displayed_on_device(self) -> DeviceSource | None:
        """Return the source of tiles for displays that draw on the GPU; None if the CPU decodes."""
        # Displays decode channels that the file stores apart as separate images.
        number, _ = self._channel_reader.image_of(0, 0)
        tiles = self._reader.offload.tiles_on_device(self._reader.read_tiles, number)
        if tiles is None:
            return None
        if self._device_source is None or self._device_source.tiles is not tiles:

            def read(number: int, positions: Sequence[Pair]) -> set[Pair]:
                return self._guarded(lambda: tiles.read(number, positions))

            self._device_source = DeviceSource(self.displayed, tiles, read, self._profile.table)
        return self._device_source

    def _full_layout(self) -> SlideLayout:
        """Return the layout with its metadata, parsed again if a pickle left it out."""
        if self._parsed is None:
            with self._opening.parse_again() as (found, source):
                self._parsed = found.layout
            if source is not None:
                source.close()
        return self._parsed

    def _resolve(
        self, level: int, mpp: float | None, z: int | None, t: int | None
    ) -> tuple[Slide, ScaledReader, Target]:
        """Return the plane to read, and the reader and target for a level or a resolution."""
        plane = self.plane(z, t)
        return plane, *plane._scaled_reader(level, mpp)

    def _scaled_reader(self, level: int, mpp: float | None) -> tuple[ScaledReader, Target]:
        """Return a reader for a level or a resolution."""
        self._reopen_if_forked()
        if mpp is not None and level != 0:
            raise RegionError(f"Both level={level!r} and mpp={mpp!r} were given; pass only one.")
        if mpp is None:
            target = Target(self._check_level(level))
        else:
            target = find_target(self.path, mpp, self.mpp, self.level_downsamples)
        return ScaledReader(self._reader, target, self._images[target.level]), target

    def _check_level(self, level: int) -> int:
        if not isinstance(level, int | np.integer) or not 0 <= level < self.level_count:
            raise no_level(self.path, level, self.level_count)
        return int(level)

    def read_batch(
        self,
        locations: Sequence[Pair],
        size: Pair,
        level: int = 0,
        device: str = "cpu",
        *,
        mpp: float | None = None,
        out: AnyArray | None = None,
        color: Color = "stored",
        wanted: UpcomingTiles | None = None,
        tolerant: bool = False,
        z: int | None = None,
        t: int | None = None,
    ) -> AnyArray:
        """Read several rectangles of one size; tiles that they share are decoded once.

        It is meant for callers that read ahead in their own threads, as `read_regions` does.

        Parameters
        ----------
        locations : sequence of tuple of int
            (x, y) of each upper left corner in pixels of level 0.
        size, level, device, mpp, color, z, t
            As in `read_region`.
        out : ndarray or cupy.ndarray, optional
            Array for the pixels: writable, C-contiguous, on `device`, with the shape and type of
            the result.
        wanted : UpcomingTiles, optional
            Tiles that later batches need, so that they stay cached: ``tile_uses(...).after(n)``.
            Batches of a local slide that share a schedule are read one after another. By default,
            tiles are cached if recent reads have revisited tiles.
        tolerant : bool
            Show the background in place of tiles that fail to decode, instead of raising.

        Returns
        -------
        ndarray or cupy.ndarray, shape (regions, height, width, channels)

        Raises
        ------
        RegionError, LevelError, PlaneError, DeviceError, TileError, SlideError
            As in `read_region`; a `TileError` also holds the locations of its regions.
        """
        plane, reader, target = self._resolve(level, mpp, z, t)
        locations = listed(locations)
        regions = regions_of(locations, size, plane.level_downsamples[target.level])
        if out is not None:
            image = plane._images[target.level]
            shape = len(regions), *size_of(size)[::-1], image.channels
            check_out(out, shape, image.dtype, on_host=device == "cpu")
        if not len(regions):
            regions = regions_of([(0, 0)], size, plane.level_downsamples[target.level])
            return plane._read_batch(reader, regions, device, ReadOptions(), [(0, 0)])[:0]
        options = ReadOptions(
            tolerant=tolerant,
            keep="recurring" if wanted is None else "later",
            table=plane._profile.table(color),
            later=wanted,
            regions_done=len(regions),
            # The lock would make all other batches wait for a server's response to this one.
            lock=NO_LOCK if wanted is None or self.layout.remote else wanted.schedule.lock,
        )
        return plane._read_batch(reader, regions, device, options, locations, out)

    def tile_uses(
        self,
        locations: Sequence[Pair],
        size: Pair,
        level: int = 0,
        *,
        mpp: float | None = None,
        room: int = DEFAULT_BUDGET // 2,
        z: int | None = None,
        t: int | None = None,
    ) -> TileSchedule | None:
        """Return a schedule of the tiles that a series of rectangles needs; no tile is read.

        Parameters
        ----------
        locations : sequence of tuple of int
            (x, y) of each upper left corner in pixels of level 0, in reading order.
        size, level, mpp, z, t
            As in `read_region`.
        room : int
            Bytes of decoded tiles that may be cached until they are needed again.

        Returns
        -------
        TileSchedule or None
            Its ``after(n)`` is the argument `wanted` of `read_batch` for a batch whose first
            rectangle is number ``n``. None if the level's tiles overlap or are computed, or if
            there are no rectangles or millions of them.

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
        plane, _, target = self._resolve(level, mpp, z, t)
        image = plane._images[target.level]
        locations = listed(locations)
        if image.parts or image.computed or not len(locations):
            return None
        regions = regions_of(locations, size, plane.level_downsamples[target.level])
        return TileSchedule.of(image, target.finer(regions), room)

    def read_regions(
        self,
        locations: Iterable[Pair],
        size: Pair,
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
    ) -> Iterator[AnyArray]:
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
            Yield batches of this many regions, in which shared tiles are decoded once; by default
            single regions.
        mpp : float, optional
            Micrometers per pixel, instead of a level, as in `read_region`.
        device : str
            Device to return the pixels on, as in `read_region`.
        num_workers : int, optional
            Number of regions or batches read at the same time; 64 if it is larger. With 0, each is
            read when the caller requests it. The default is 3 for a device, where one call reads
            several small regions; 2 for the host, where all cores decode each region; and up to 8
            for the host if regions are averaged to another resolution.
        prefetch_factor : int
            Number of regions or batches that each worker reads ahead of the caller; fewer if they
            would take more than 1 GiB of memory.
        shuffle : bool
            Shuffle the locations in the same way as ``random.Random(seed).shuffle``.
        seed : int
            Seed of that order.
        drop_last : bool
            Leave out the last batch if it is smaller than the others.
        color : {"stored", "srgb"}
            As in `read_region`.
        z, t : int, optional
            As in `read_region`.

        Yields
        ------
        ndarray or cupy.ndarray, shape (height, width, channels)
            One region per location; with a batch size, (regions, height, width, channels).

        Raises
        ------
        DeviceError
            If the device cannot be used.
        SlideError
            As in `read_region`, when the iterator reaches the region.
        """
        plane, reader, target = self._resolve(level, mpp, z, t)
        if device != "cpu":
            plane._reader.offload.worker(device)
        # A GPU that decodes for the host also needs more tiles than a small batch has.
        decoder = "cuda" if target.exact and plane._reader.offload.uses_gpu() else device
        if num_workers is None:
            num_workers = batches_ahead(decoder, target, plane._images[target.level])
        options = ReadOptions(keep="recurring", table=plane._profile.table(color))

        def read(batch: list[Pair], cancellation: Cancellation) -> AnyArray:
            regions = regions_of(batch, size, plane.level_downsamples[target.level])
            own = replace(options, cancellation=cancellation)
            pixels = plane._read_batch(reader, regions, device, own, batch)
            return pixels if batch_size is not None or len(batch) > 1 else pixels[0]

        def cut(pixels: AnyArray, start: int, stop: int) -> AnyArray:
            return pixels[start] if batch_size is None else pixels[start:stop]

        grid, (width, height) = plane._images[target.level].grid, size_of(size)
        # The average number of tiles that a region at a random location touches.
        tiles = (height / grid.tile_height + 1) * (width / grid.tile_width + 1)
        count = count_of(batch_size)
        batch_bytes = count * plane._region_bytes(size, target.level)
        return read_ahead(
            read,
            locations,
            batch_size=batch_size,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            batch_bytes=batch_bytes,
            grouping=Grouping(batches_per_read(decoder, target, tiles, count, batch_bytes), cut),
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            slide=plane._number,
        )

    def tiles(
        self,
        size: int | Pair,
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
    ) -> Iterator[Located]:
        """Read a whole level as a grid of regions; each stored tile is decoded once.

        The level is divided into a few bands that are read at the same time, each row by row, and
        the iterator yields their batches round-robin. A tile that several regions share stays
        cached until the last of them is read, so each band keeps about one row of tiles. Tiles that
        do not fit into the cache are decoded again.

        Parameters
        ----------
        size : int or tuple of int
            Side, or (width, height), of a region in pixels of `level`, or of the resolution `mpp`.
        level : int
            Index in `levels`.
        mpp : float, optional
            Micrometers per pixel, instead of a level, as in `read_region`.
        overlap : int
            Pixels that neighboring regions share, across and down.
        batch_size : int
            Number of regions per batch; the last batch may have fewer.
        device : str
            Device to return the pixels on, as in `read_region`.
        prefetch_factor : int
            As in `read_regions`.
        color : {"stored", "srgb"}
            As in `read_region`.
        z, t : int, optional
            As in `read_region`.

        Yields
        ------
        ndarray or cupy.ndarray, shape (regions, height, width, channels)
            A batch. Pixels beyond the level have the background's value.
        list of tuple of int
            (x, y) of the upper left corner of each region in pixels of level 0.

        Raises
        ------
        RegionError, LevelError, DeviceError
            If the grid, level or device is not valid.
        SlideError
            As in `read_region`, when the iterator reaches the batch.

        Examples
        --------
        >>> for batch, locations in slide.tiles(256, mpp=0.5):  # doctest: +SKIP
        ...     scores = model(batch)
        """
        plane, reader, target = self._resolve(level, mpp, z, t)
        if device != "cpu":
            plane._reader.offload.worker(device)
        width, height = size_of((size, size) if hasattr(size, "__index__") else size, least=1)
        if batch_size is None:
            raise RegionError("batch_size is None; it must be a whole number >= 1.")
        grid = plane._grid(size, target, overlap)
        table = plane._profile.table(color)
        keep: Keep = "partly" if grid.image.parts else "later"
        common = ReadOptions(keep=keep, table=table)
        bands = grid.bands(batches_ahead(device, target, grid.image))
        count, stored = count_of(batch_size), grid.image.grid
        batch_bytes = len(bands) * count * plane._region_bytes((width, height), target.level)
        # Neighboring regions share tiles, so each counts by its area, not by the tiles it touches.
        tiles = height * width / (stored.tile_height * stored.tile_width)
        group = batches_per_read(device, target, tiles, count, batch_bytes)

        def read(band: range, batch: list[int], cancellation: Cancellation) -> Located:
            tops, lefts = grid.corners(batch[0], batch[-1] + 1)
            regions = Regions.alike(tops, lefts, height, width)
            locations = [(x, y) for x, y in plane._corners(tops, lefts, target.level).tolist()]
            later = partial(grid.needed_after, band, batch[0])
            own = replace(common, cancellation=cancellation, later=later, regions_done=len(batch))
            return plane._read_batch(reader, regions, device, own, locations), locations

        def cut(found: Located, start: int, stop: int) -> Located:
            return found[0][start:stop], found[1][start:stop]

        # `read_ahead` refuses what is no number.
        is_number = isinstance(prefetch_factor, int | np.integer)
        ahead = group * int(prefetch_factor) if is_number else prefetch_factor
        # One thread per band, so that each batch finds the tiles that the one before it cached.
        iterators = deque(
            read_ahead(
                partial(read, band),
                band,
                batch_size=batch_size,
                num_workers=1,
                prefetch_factor=ahead,
                batch_bytes=batch_bytes,
                grouping=Grouping(group, cut),
                slide=plane._number,
            )
            for band in bands
        )
        return interleave(iterators)

    def tile_locations(
        self, size: int | Pair, *, level: int = 0, mpp: float | None = None, overlap: int = 0
    ) -> NDArray[np.int64]:
        """Return the locations of the regions of `tiles`, row by row; no region is read.

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
            If the grid or level is not valid.
        """
        _, target = self._scaled_reader(level, mpp)
        grid = self._grid(size, target, overlap)
        return self._corners(*grid.corners(0, len(grid)), target.level)

    def opener(self, device: str) -> Callable[[], Slide]:
        """Return a function that opens the slide in another process, for tasks that run there.

        Each task decodes in one thread, unless `open_slide` was given a number of threads, and
        does not cache tiles that a region covers completely. Tiles are decoded on this slide's
        device. If that device is ``"auto"`` and `device` is a GPU, they are decoded on that GPU.
        """
        own = device if self.device == "auto" and device != "cpu" else self.device
        opening = self._opening.portable()
        threads = opening.threads or 1
        return partial(reopen, replace(opening, device=own, threads=threads, keeps_whole=False))

    def packed(self, device: str) -> PackedSlide:
        """Return a picklable handle that opens the slide once per process, as `opener` does."""
        return PackedSlide(pack(self.opener(device)))

    def __deepcopy__(self, memo: dict[int, object]) -> Slide:
        return self

    def __reduce__(self) -> tuple[Callable[[Opening], Slide], tuple[Opening]]:
        return reopen, (self._opening.portable(),)

    def __dask_tokenize__(self) -> object:
        from dask.base import normalize_token

        layout = self.layout.without_private_data()
        return normalize_token((layout, self.device, self.display_color))

    def _grid(self, size: int | Pair, target: Target, overlap: int) -> Grid:
        width, height = size_of((size, size) if hasattr(size, "__index__") else size, least=1)
        return Grid.over(self._images[target.level], target, (height, width), overlap)

    def _corners(self, tops: Integers, lefts: Integers, level: int) -> Integers:
        """Convert corners from pixels of a level to (x, y) in pixels of level 0."""
        corners = np.column_stack([lefts, tops]) * self.level_downsamples[level]
        found: Integers = np.floor(corners + 0.5).astype(np.int64)
        return found

    def _read_batch(
        self,
        reader: ScaledReader,
        regions: Regions,
        device: str,
        options: ReadOptions,
        locations: Sequence[Pair],
        out: AnyArray | None = None,
    ) -> AnyArray:
        try:
            if device == "cpu":
                return self._guarded(partial(reader.read, regions, options, out))
            read = partial(reader.read_to_device, regions, device, out, None, options)
            return self._guarded(read)
        except TileError as error:
            raise error.among(locations) from None

    def _region_bytes(self, size: Pair, level: int) -> int:
        width, height = size_of(size)
        image = self._images[level]
        return width * height * image.channels * image.dtype.itemsize


def _reset_fork_lock() -> None:
    global _fork_lock
    _fork_lock = threading.Lock()


def _sample_format(layout: SlideLayout) -> tuple[int, DType, bool]:
    """Return the properties that all planes of a slide share."""
    base = layout.levels[0]
    return base.channels, base.dtype, layout.rgb


def to_rgba(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Convert gray, RGB or RGBA pixels, shape (height, width, channels), to opaque RGBA."""
    height, width, channels = pixels.shape
    found = np.empty((height, width, RGBA), np.uint8)
    found[..., :3] = pixels[..., :3] if channels > 2 else pixels[..., :1]
    found[..., 3] = 255
    return found


def clear_missing(pixels: Array, slide: Slide, location: Pair, level: int) -> None:
    """Set pixels that the file does not hold to 0 instead of the background.

    Parameters
    ----------
    pixels : ndarray, shape (height, width, channels)
        Pixels of the region, modified in place.
    slide, location, level
        The arguments of the call of `Slide.read_region` that returned the pixels.
    """
    height, width = pixels.shape[:2]
    held = slide.read_mask(location, (width, height), level)
    if not held.all():
        pixels[~held] = 0


def check_plane(path: str, axis: str, number: object, size: int) -> None:
    """Raise a `PlaneError` if an axis has no plane with this number."""
    if not isinstance(number, int | np.integer) or not 0 <= number < size:
        planes = f"its planes along {axis} are 0 to {size - 1}"
        raise PlaneError(f"'{path}' has no plane {axis} = {number!r}; {planes}.")


def _open_from(
    opening: Opening,
    runtime: Runtime | None = None,
    decoder: CpuDecoder | None = None,
    source: ByteSource | None = None,
) -> Slide:
    """Open a copy, a plane or a label image of a slide with the slide's options."""
    slide = Slide.__new__(Slide)
    slide._set_up(opening, runtime, decoder, source)
    return slide


def reopen(opening: Opening) -> Slide:
    """Open a slide in another process with the options it was first opened with.

    Raises
    ------
    SlideError
        If the other process cannot open it.
    """
    if opening.label is not None:
        with opening.parse_again() as (found, _):
            return _open_from(found)
    slide = _open_from(opening.with_files())
    slide._parsed = None
    return slide


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_fork_lock)
