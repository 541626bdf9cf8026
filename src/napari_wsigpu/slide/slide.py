"""`Slide`: an open whole-slide image, and how it is opened again elsewhere."""

from __future__ import annotations

import copy
import os
import threading
from collections import deque
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np

from napari_wsigpu.codecs.choose import choose_decoder
from napari_wsigpu.codecs.color import EmbeddedProfile, wants_srgb
from napari_wsigpu.codecs.native_format import RGBA
from napari_wsigpu.display.device_source import DeviceSource
from napari_wsigpu.display.source import DisplaySource
from napari_wsigpu.formats.describe import described
from napari_wsigpu.formats.tiff.tiff import background, is_rgb
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    LevelError,
    PlaneError,
    RegionError,
    TileError,
)
from napari_wsigpu.reading.asked import (
    batches_ahead,
    batches_together,
    check_out,
    count_of,
    region_of,
    regions_of,
    size_of,
)
from napari_wsigpu.reading.batches import Together, in_turn, read_ahead
from napari_wsigpu.reading.cache import DEFAULT_BUDGET
from napari_wsigpu.reading.dask_level import dask_array
from napari_wsigpu.reading.gathering import GatheredReads
from napari_wsigpu.reading.grid import Grid
from napari_wsigpu.reading.level import LevelArray
from napari_wsigpu.reading.log import TileLog
from napari_wsigpu.reading.mosaic import parts_of
from napari_wsigpu.reading.open_slides import pack
from napari_wsigpu.reading.parts import SlideParts
from napari_wsigpu.reading.plan import NO_TURN, ReadOptions, Regions
from napari_wsigpu.reading.reader import DEFAULT_OPTIONS, RegionReader
from napari_wsigpu.reading.scaling import ScaledReader, Target, find_target
from napari_wsigpu.reading.uses import TileUses
from napari_wsigpu.slide.associated import AssociatedImage
from napari_wsigpu.slide.opening import Opening
from napari_wsigpu.slide.planes import OpenPlanes
from napari_wsigpu.slide.runtime import PackedSlide
from napari_wsigpu.slide.runtime import default as default_runtime
from napari_wsigpu.slide.source import check_files, source_of
from napari_wsigpu.storage import truncation
from napari_wsigpu.storage.memory import MemorySource
from napari_wsigpu.storage.readers import Readers
from napari_wsigpu.storage.stream import StreamSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    import dask.array
    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.codecs.cpu import CpuDecoder
    from napari_wsigpu.model.geometry import Span
    from napari_wsigpu.model.layout import Channel, LevelLayout, Planes, PyramidLevel, SlideLayout
    from napari_wsigpu.reading.level import LevelOwner
    from napari_wsigpu.reading.plan import Cancellation, Keep
    from napari_wsigpu.reading.uses import Wanted
    from napari_wsigpu.slide.runtime import Runtime
    from napari_wsigpu.storage.source import ByteSource

Found = TypeVar("Found")

LARGEST_OVERVIEW = 1024
_slide_numbers = count()
_renewing = threading.Lock()
# More pixels are never those of a few tiles, or take long enough for a plan.
SMALL_PIXELS = 1 << 20
NO_PIXELS = np.empty((0, 0, 0), np.uint8)
NO_DEVICE_PIXELS = "out and stream are for pixels on a device; use device='cuda'."
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


class Slide:
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

    @property
    def path(self) -> str:
        """Absolute path of the file, or its URL without user, password and query.

        A label image has the slide's path and a number: its own name can be a patient's.
        """
        return self.layout.path

    @property
    def vendor(self) -> str:
        """Vendor as OpenSlide names it, for example ``"aperio"`` or ``"generic-tiff"``."""
        return self.layout.vendor

    @property
    def dimensions(self) -> tuple[int, int]:
        """(width, height) of level 0 in pixels."""
        return self.level_dimensions[0]

    @property
    def level_count(self) -> int:
        """Number of levels: the stored ones, and those that the format lets decoders scale."""
        return len(self.layout.levels)

    @property
    def level_dimensions(self) -> tuple[tuple[int, int], ...]:
        """(width, height) of each level in its own pixels."""
        return tuple((level.width, level.height) for level in self.layout.levels)

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """How many pixels of level 0 one pixel of each level spans."""
        return self.layout.downsamples

    @property
    def mpp(self) -> tuple[float, float] | None:
        """Micrometres a pixel of level 0, (x, y); None where the file doesn't say."""
        return self.layout.mpp

    @property
    def objective(self) -> float | None:
        """Magnification of the objective; None where the file doesn't say."""
        return self.layout.objective

    @property
    def planes(self) -> Planes:
        """How many planes along z and t can be chosen, how far apart they lie, and which is shown.

        The one that is shown is the one that the file names, else the middle one along z (of some
        vendors' slides the first one, as OpenSlide shows it) and the first one along t.
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
        self._begin(Opening(layout, device, threads, stream=stream), runtime, source=source)

    def _begin(
        self,
        opening: Opening,
        runtime: Runtime | None,
        decoder: CpuDecoder | None = None,
        source: ByteSource | None = None,
    ) -> None:
        self.runtime = default_runtime() if runtime is None else runtime
        self._described: SlideLayout | None = opening.layout
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
        """Take new handles, threads and locks: when it is made, and in a forked process."""
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
        images = {level.number: level.layout for level in sorted(self._pyramid)}
        parts = parts_of(list(images.values()))
        images |= {-1 - i: item.image for i, item in enumerate(layout.associated)}
        self._images: dict[int, LevelLayout] = images
        names = {-1 - i: f"the {item.name} image" for i, item in enumerate(layout.associated)}
        names |= {number: part.name for number, part in parts.items()}
        images = images | {number: part.image for number, part in parts.items()}
        self._log = TileLog(
            layout.path,
            names,
            partial(truncation.reason, layout, images),
            # Of a server each answer says which version it is of.
            partial(check_files, () if layout.remote or source else layout.files, layout.path),
        )
        self._log.on_failed_tile = listener
        if closed:
            self._source.close()

        def reader(source: ByteSource, layout: SlideLayout = layout) -> RegionReader:
            parts = SlideParts(
                self._number, layout, images, self._pyramid, source, decoder, self._log
            )
            return RegionReader(
                parts,
                self.runtime.tiles,
                self.runtime.devices,
                self.runtime.throughput,
                device,
                keeps_whole=opening.keeps_whole,
            )

        self._reader = reader(self._source)
        first = layout.levels[0]
        # Of pictures whose bytes lie elsewhere, or whose samples can't show the slide's background.
        self._others = {
            -1 - i: reader(
                self._source if item.data is None else MemorySource(item.data),
                replace(layout, background=background(item.image)),
            )
            for i, item in enumerate(layout.associated)
            if item.data is not None or item.image.dtype != first.dtype
        }
        self._profile = self._profile_of("", first, layout.icc, rgb=layout.rgb)
        self.displayed = DisplaySource(
            self._number,
            layout,
            self._pyramid,
            self._profile.table,
            lambda *which: self._guarded(partial(self._reader.read_tiles, *which)),
            self._log,
        )
        self._device_source: DeviceSource | None = None
        self.levels = tuple(self.level_array(index) for index in range(self.level_count))
        self.associated_images: Mapping[str, AssociatedImage] = {
            item.name: AssociatedImage(
                item,
                self.level_array(-1 - index),
                decoder.refusal(item.image),
                self._profile_of(
                    f"The {item.name} image of ",
                    item.image,
                    item.icc,
                    rgb=is_rgb(item.image),
                ),
            )
            for index, item in enumerate(layout.associated)
        }
        self._process = os.getpid()  # last: other threads of a forked process wait for it

    @property
    def display_color(self) -> Color:
        """What the layers of a viewer show: pixels as ``"stored"``, or in ``"srgb"``.

        sRGB is by the slide's ICC profile. `levels` always are as stored; tolerant levels made by
        `level_array` follow this. A pickled slide keeps it.

        Raises
        ------
        SlideError
            If it is set to sRGB, and the slide has no profile that can be applied.
        """
        return self._opening.color

    @display_color.setter
    def display_color(self, color: Color) -> None:
        if wants_srgb(color):
            self._profile.profile()
        self._renew()
        for slide in (self, *self._planes.all()):
            slide._opening = replace(slide._opening, color=color)

    @property
    def pyramid(self) -> tuple[PyramidLevel, ...]:
        """What viewers show, finest first: the slide's levels, and others by 2 x 2 averages.

        These are computed between levels of which one is more than about twice as large as the
        next, and beyond the coarsest. So what a viewer has to load is about 4 times as many pixels
        as its canvas has, at most, and the coarsest level fits a screen. `level_array` makes an
        array of each by its number, which for the slide's own is the index in `levels`: those
        have a ``number < slide.level_count``, in the arrays of a layer (``layer.data``) too.
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
            Number of a level of `pyramid`: index in `levels` for those.
        channel : int, optional
            Show this channel alone, as a two-dimensional array.
        tolerant : bool
            For a viewer: show tiles that can't be decoded as background instead of raising,
            and levels in the slide's `display_color`.
        color : {"stored", "srgb"}, optional
            Show a level so, whatever else holds.

        Raises
        ------
        LevelError
            If there is no such level or channel.
        UnsupportedSlideError
            If sRGB is asked for, and the slide has no profile that can be applied.
        """
        if color is not None and wants_srgb(color):
            self._profile.profile()
        layout = self._images.get(index)
        if layout is None:
            raise LevelError(
                f"'{self.path}' has no level {index!r}; its levels are 0 to "
                f"{max(level.number for level in self._pyramid)}."
            )
        if channel is not None and not 0 <= channel < layout.channels:
            raise LevelError(
                f"'{self.path}' has no channel {channel!r}; its channels are 0 to "
                f"{layout.channels - 1}."
            )

        def read(rows: Span, columns: Span, channel: int | None) -> NDArray[Any]:
            shown = self.display_color if tolerant and index >= 0 else "stored"
            table = self._profile.table(color or shown)
            wanted = channel if table is None else None
            # Displays come back to what they have shown, scripts perhaps never.
            keep: Keep = "all" if tolerant or layout.computed else "recurring"
            options = ReadOptions(channel=wanted, tolerant=tolerant, keep=keep, table=table)
            pixels: NDArray[Any] = self._guarded(
                lambda: self._reader_of(index).read(index, Regions.slice(rows, columns), options)[0]
            )
            return pixels if wanted == channel else pixels[..., channel]

        owner = cast("LevelOwner", self)  # what is read to devices and in tasks, others add
        return LevelArray(layout, read, owner, index, channel, tolerant=tolerant)

    @property
    def device(self) -> str:
        """What decodes tiles, as in `open_slide`; from the next read on, if it is set.

        To set it to a GPU may take seconds. A GPU that failed is tried again.

        Raises
        ------
        DeviceError
            If it can't be used; the slide is decoded as before then.
        """
        self._renew()
        return self._reader.offload.device

    @device.setter
    def device(self, device: str) -> None:
        self._renew()
        for reader in (self._reader, *self._others.values()):
            reader.offload.device = device
        self._opening = replace(self._opening, device=device)
        for plane in self._planes.all():
            plane.device = device

    @property
    def decoder(self) -> tuple[str, str]:
        """What decodes level 0 now, and why, for example ("CPU", "chosen")."""
        self._renew()
        return self._reader.offload.decoder

    def on_failed_tile(self, report: Callable[[str, str], None]) -> None:
        """Have `report` called with name and reason of each tile that is shown as background.

        Called once a tile, from the thread that read it.
        """
        self._renew()
        for slide in (self, *self._planes.all()):
            slide._log.on_failed_tile = report

    def stats(self, most_failed: int | None = None) -> dict[str, Any]:
        """Return counters: tiles asked, hits, decoded by which decoder, bytes read, failed.

        Under "display": how many tiles displays wait for (queue), how many were decoded at once
        last (batch), and how many were prefetched, and of those needed later (prefetch_hits).

        Parameters
        ----------
        most_failed : int, optional
            Name only the first so many failed tiles.
        """
        self._renew()
        display = self.runtime.fetcher.stats(self._number)
        return {**self._log.stats(most_failed), "display": display}

    def clear_cache(self) -> None:
        """Drop this slide's decoded tiles, of all planes, from memory and from devices."""
        self._renew()
        self.displayed.clearings += 1
        self._reader.clear_cache()
        for plane in self._planes.all():
            plane.clear_cache()

    def release(self) -> None:
        """Let go of file handle, threads and tiles; the next read takes them again."""
        self._renew()
        self._source.release()  # a server's answers could be long in coming
        self.runtime.fetcher.forget_slide(self._number)
        self._source.release()
        self.clear_cache()
        self._release_readers()
        for other in (*(self._labels or {}).values(), *self._planes.all()):
            other.release()

    def close(self) -> None:
        """Let go of everything for good; may be called twice.

        Reads in flight in other threads end first, with `SlideClosedError` if they are long.
        """
        self._renew()
        self._reads.closed = True
        self._source.close()
        with self._reads.none():
            pass
        self.runtime.fetcher.forget_slide(self._number)
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

    def _open_plane(self, which: tuple[int, int]) -> Slide:
        with self._opening.described(*which) as (opening, source):
            layout = opening.layout
            if _kind(layout) != _kind(self.layout) or (layout.planes.z, layout.planes.t) != which:
                raise CorruptSlideError(
                    f"The plane at z = {which[0]}, t = {which[1]} of '{self.path}' has other "
                    "channels or samples than the one that is shown; get a fresh copy of the file."
                )
            plane = _opened(opening, self.runtime, self._decoder, source)
        plane._log.on_failed_tile = self._log.on_failed_tile
        return plane

    def _release_readers(self) -> None:
        for reader in (self._reader, *self._others.values()):
            reader.release()
        self._profile.release()

    def _profile_of(
        self, name: str, image: LevelLayout, icc: tuple[int, int] | bytes | None, *, rgb: bool
    ) -> EmbeddedProfile:
        return EmbeddedProfile(f"{name}'{self.path}'", image, icc, self._read_bytes, rgb=rgb)

    def _read_bytes(self, place: tuple[int, int] | bytes) -> bytes:
        if isinstance(place, bytes):
            return place
        return self._guarded(lambda: bytes(self._source.read([place])[0]))

    def _guarded(self, read: Callable[[], Found]) -> Found:
        """Read while the slide is open, and keep it open meanwhile."""
        self._renew()
        try:
            with self._reads:
                return read()
        except MemoryError:
            raise RegionError(
                f"There is no memory left to read this region of '{self.path}'; read it in parts, "
                "or let go of others."
            ) from None

    def _reader_of(self, index: int) -> RegionReader:
        return self._others.get(index, self._reader)

    def _renew(self) -> None:
        """Take new locks, threads and handles in a process that was forked from the slide's own.

        The copies of the old ones may be held by threads that don't exist here.
        """
        if self._process == os.getpid():
            return
        with _renewing:
            if self._process != os.getpid():
                self._open_in_child()

    def _open_in_child(self, decoder: CpuDecoder | None = None) -> None:
        opening, listener = self._opening.in_child(), self._log.on_failed_tile
        self._planes.renew()
        self._open(opening, decoder, opening.stream, listener, closed=self._reads.closed)
        for plane in self._planes.all():
            if plane._process != self._process:
                plane._open_in_child(self._decoder)

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
    def labels(self) -> Mapping[str, Slide]:
        """Label images that lie on the slide, each a slide of its own of one channel.

        Their pixels are numbers of objects, and 0 where there is none. They are closed with the
        slide. ``layout.labels`` says where they lie, and their colours and properties.
        """
        if self._labels is None:
            whole = replace(self._opening, layout=self._said())
            self._labels = {
                item.name: _opened(whole.label_image(number), self.runtime)
                for number, item in enumerate(whole.layout.labels)
            }
        return self._labels

    def plane(self, z: int | None = None, t: int | None = None) -> Slide:
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
        return self._guarded(lambda: self._planes.get((at["z"], at["t"])))

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
            options = ReadOptions(table=plane._profile.table(color))
            return plane._read_planned(location, size, level, device, mpp, out, stream, options)
        if out is not None or stream is not None:
            raise RegionError(NO_DEVICE_PIXELS)
        pixels, keep = plane._read_small(location, size, level)
        if keep is None:
            return pixels
        return plane._read_planned(location, size, level, options=ReadOptions(keep=keep))

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
        stored = self._read_planned(location, size, level, options=ReadOptions(keep=keep))
        pixels = rgba_of(stored)
        blank(pixels, self, location, level)
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
        options: ReadOptions = DEFAULT_OPTIONS,
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
        height, width = regions.shapes[0]
        if out is not None or stream is not None or height * width > SMALL_PIXELS:
            read = partial(reader.read_to_device, regions, device, out, stream, options)
            pixels = self._guarded(read)
            return pixels[0] if out is None else out

        def read_all(locations: Sequence[tuple[int, int]]) -> Any:
            regions = regions_of(locations, size, self.level_downsamples[target.level])
            return reader.read_to_device(regions, device, None, None, options)

        key = target, height, width, device, options.table
        return self._guarded(lambda: self._gathered.read(key, location, read_all))

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
        plane, reader, target = self._aimed(level, mpp, z, t)
        regions = regions_of([location], size, plane.level_downsamples[target.level])
        return plane._guarded(lambda: reader.held(regions)[0])

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
        regions, options = Regions.slice(rows, columns), ReadOptions(channel=channel)
        read = partial(reader.read_to_device, index, regions, device, options=options)
        return self._guarded(read)[0]

    def read_bytes(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the file's own bytes at each (offset, length), as the layout's grids say them.

        Fewer are returned where the file ends before.

        Raises
        ------
        SlideError
            If the file can't be read.
        """
        return self._guarded(lambda: self._source.read(ranges))

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
        return self._guarded(lambda: self._reader.backend(device).empty(shape, dtype))

    def displayed_on_device(self) -> DeviceSource | None:
        """Return what displays read of it that draw on the GPU; None while the CPU decodes."""
        tiles = self._reader.offload.tiles_on_device(self._reader.read_tiles)
        if tiles is None:
            return None
        if self._device_source is None or self._device_source.tiles is not tiles:
            share = self._reader.offload.share_on

            def read(number: int, places: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
                part = share(self._images[number].stored[0])
                return self._guarded(lambda: tiles.read(number, places, part))

            self._device_source = DeviceSource(self.displayed, tiles, read, self._profile.table)
        return self._device_source

    def _said(self) -> SlideLayout:
        """Return what the file says, asked anew where a pickle left it out."""
        if self._described is None:
            with self._opening.described() as (found, source):
                self._described = found.layout
            if source is not None:
                source.close()
        return self._described

    def _aimed(
        self, level: int, mpp: float | None, z: int | None, t: int | None
    ) -> tuple[Slide, ScaledReader, Target]:
        """Return a plane, what reads it at a level or a resolution, and what that is."""
        plane = self.plane(z, t)
        return plane, *plane._scaled(level, mpp)

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
        plane, reader, target = self._aimed(level, mpp, z, t)
        regions = regions_of(locations, size, plane.level_downsamples[target.level])
        if out is not None:
            image = plane._images[target.level]
            check_out(out, (len(regions), *size_of(size)[::-1], image.channels), image.dtype)
        if not len(regions):
            regions = regions_of([(0, 0)], size, plane.level_downsamples[target.level])
            return plane._read_batch(reader, regions, device, ReadOptions(), [(0, 0)])[:0]
        options = ReadOptions(
            keep="recurring" if wanted is None else "later",
            table=plane._profile.table(color),
            later=wanted,
            past=len(regions),
            # Who waits for a server would have others wait as well.
            turn=NO_TURN if wanted is None or self.layout.remote else wanted.uses.turn,
        )
        return plane._read_batch(reader, regions, device, options, locations, out)

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
        plane, _, target = self._aimed(level, mpp, z, t)
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
            host, whose cores decode each of them together, and 3 to a device, where several small
            ones are read at once. With 0 each is read when it is asked for.
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
        plane, reader, target = self._aimed(level, mpp, z, t)
        if device != "cpu":
            plane._reader.offload.worker(device)
        if num_workers is None:
            num_workers = batches_ahead(device, target)
        options = ReadOptions(keep="recurring", table=plane._profile.table(color))

        def read(batch: list[tuple[int, int]], cancellation: Cancellation) -> Any:
            regions = regions_of(batch, size, plane.level_downsamples[target.level])
            own = replace(options, cancellation=cancellation)
            pixels = plane._read_batch(reader, regions, device, own, batch)
            return pixels if batch_size is not None or len(batch) > 1 else pixels[0]

        def cut(pixels: Any, begin: int, end: int) -> Any:
            return pixels[begin] if batch_size is None else pixels[begin:end]

        grid, (width, height) = plane._images[target.level].grid, size_of(size)
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
            together=Together(batches_together(device, target, tiles, count, batch_bytes), cut),
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
        plane, reader, target = self._aimed(level, mpp, z, t)
        if device != "cpu":
            plane._reader.offload.worker(device)
        width, height = size_of((size, size) if hasattr(size, "__index__") else size, least=1)
        if batch_size is None:
            raise RegionError("batch_size is None; it has to be a whole number >= 1.")
        grid = plane._grid(size, target, overlap)
        table = plane._profile.table(color)
        keep: Keep = "partly" if grid.image.parts else "later"
        bands = grid.bands(batches_ahead(device, target))
        count, stored = count_of(batch_size), grid.image.grid
        batch_bytes = len(bands) * count * plane._region_bytes((width, height), target.level)
        # Regions that overlap, or neighbours in a tile, share tiles.
        tiles = height * width / (stored.tile_height * stored.tile_width)
        together = batches_together(device, target, tiles, count, batch_bytes)

        def read(
            band: range, batch: list[int], cancellation: Cancellation
        ) -> tuple[Any, list[tuple[int, int]]]:
            past = batch[-1] + 1
            tops, lefts = grid.corners(batch[0], past)
            regions = Regions.alike(tops, lefts, height, width)
            locations = [(x, y) for x, y in plane._corners(tops, lefts, target.level).tolist()]
            later = partial(grid.wanted_after, band, batch[0])
            options = ReadOptions(
                keep=keep,
                table=table,
                cancellation=cancellation,
                later=later,
                past=len(batch),
            )
            return plane._read_batch(reader, regions, device, options, locations), locations

        def cut(
            found: tuple[Any, list[tuple[int, int]]], begin: int, end: int
        ) -> tuple[Any, list[tuple[int, int]]]:
            return found[0][begin:end], found[1][begin:end]

        # Each band is read by one thread, so that a batch finds what the one before it kept.
        iterators = deque(
            read_ahead(
                partial(read, band),
                band,
                batch_size=batch_size,
                num_workers=1,
                prefetch_factor=together * prefetch_factor,
                batch_bytes=batch_bytes,
                together=Together(together, cut),
            )
            for band in bands
        )
        return in_turn(iterators)

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
        opening = self._opening.portable()
        threads = opening.threads or 1
        return partial(reopened, replace(opening, device=own, threads=threads, keeps_whole=False))

    def packed(self, device: str) -> PackedSlide:
        """Return what tasks of another process open the slide by, as `opener` says, but once."""
        return PackedSlide(pack(self.opener(device)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Slide:
        return self

    def __reduce__(self) -> tuple[Callable[[Opening], Slide], tuple[Opening]]:
        return reopened, (self._opening.portable(),)

    def __dask_tokenize__(self) -> Any:
        from dask.base import normalize_token

        return normalize_token((self.layout.without_words(), self.device, self.display_color))

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
        options: ReadOptions,
        locations: Sequence[tuple[int, int]],
        out: Any = None,
    ) -> Any:
        try:
            if device == "cpu":
                return self._guarded(partial(reader.read, regions, options, out))
            return self._guarded(
                partial(reader.read_to_device, regions, device, out, None, options)
            )
        except TileError as error:
            raise error.among(locations) from None

    def _region_bytes(self, size: tuple[int, int], level: int) -> int:
        width, height = size_of(size)
        image = self._images[level]
        return width * height * image.channels * image.dtype.itemsize


def _renew_lock() -> None:
    global _renewing
    _renewing = threading.Lock()


def _kind(layout: SlideLayout) -> tuple[int, np.dtype[Any], bool]:
    """Return what planes of a slide have in common."""
    base = layout.levels[0]
    return base.channels, base.dtype, layout.rgb


def rgba_of(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return opaque RGBA pixels of gray, RGB or RGBA ones of shape (height, width, channels)."""
    height, width, channels = pixels.shape
    found = np.empty((height, width, RGBA), np.uint8)
    found[..., :3] = pixels[..., :3] if channels > 2 else pixels[..., :1]
    found[..., 3] = 255
    return found


def blank(pixels: NDArray[Any], slide: Slide, location: tuple[int, int], level: int) -> None:
    """Set to 0 what of a region the file does not hold; `Slide.read_region` shows background there.

    Parameters
    ----------
    pixels : ndarray, shape (height, width, channels)
        The region's pixels, which are changed.
    slide, location, level
        Where they are from, as for `Slide.read_region`.
    """
    height, width = pixels.shape[:2]
    held = slide.read_mask(location, (width, height), level)
    if not held.all():
        pixels[~held] = 0


def check_plane(path: str, axis: str, number: Any, size: int) -> None:
    """Refuse a plane that is none of those along an axis."""
    if not isinstance(number, int | np.integer) or not 0 <= number < size:
        raise PlaneError(
            f"'{path}' has no plane {axis} = {number!r}; its planes along {axis} are 0 to "
            f"{size - 1}."
        )


def _opened(
    opening: Opening,
    runtime: Runtime | None = None,
    decoder: CpuDecoder | None = None,
    source: ByteSource | None = None,
) -> Slide:
    """Open a slide as another one was opened: itself elsewhere, a plane or a label image."""
    slide = Slide.__new__(Slide)
    slide._begin(opening, runtime, decoder, source)
    return slide


def reopened(opening: Opening) -> Slide:
    """Open a slide in another process, as it was opened in the first one.

    Raises
    ------
    SlideError
        If it can't be opened there.
    """
    if opening.label is not None:
        with opening.described() as (found, _):
            return _opened(found)
    slide = _opened(opening)
    slide._described = None
    return slide


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
