"""`OpenedSlide`: what a slide holds while it is open, and how it lets go of it."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, cast

from napari_wsigpu.codecs.choose import choose_decoder
from napari_wsigpu.codecs.color import EmbeddedProfile, wants_srgb
from napari_wsigpu.display.source import DisplaySource
from napari_wsigpu.formats.describe import described
from napari_wsigpu.formats.tiff.tiff import background, is_rgb
from napari_wsigpu.model.errors import CorruptSlideError, LevelError, RegionError, changed_error
from napari_wsigpu.reading.level import LevelArray
from napari_wsigpu.reading.log import TileLog
from napari_wsigpu.reading.mosaic import parts_of
from napari_wsigpu.reading.plan import Regions, Wish
from napari_wsigpu.reading.reader import RegionReader
from napari_wsigpu.slide.associated import AssociatedImage
from napari_wsigpu.slide.described import Described
from napari_wsigpu.slide.planes import OpenPlanes
from napari_wsigpu.slide.runtime import default as default_runtime
from napari_wsigpu.slide.source import check_files, source_of
from napari_wsigpu.storage import truncation
from napari_wsigpu.storage.memory import MemorySource
from napari_wsigpu.storage.readers import Readers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Self

    import numpy as np
    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.codecs.cpu import CpuDecoder
    from napari_wsigpu.display.device_source import DeviceSource
    from napari_wsigpu.model.geometry import Span
    from napari_wsigpu.model.layout import LevelLayout, PyramidLevel, SlideLayout
    from napari_wsigpu.reading.level import LevelOwner
    from napari_wsigpu.slide.runtime import Runtime
    from napari_wsigpu.storage.source import ByteSource

LARGEST_OVERVIEW = 1024

_slide_numbers = count()


class OpenedSlide(Described):
    """A slide's file, threads, caches and planes, and its levels as arrays.

    Parameters
    ----------
    layout : SlideLayout
        The slide.
    device, threads, runtime
        As in `open_slide`.
    keeps_whole : bool
        Whether tiles stay in caches that a region takes whole.
    title : str, optional
        What messages about its tiles call it, if not by its path.
    decoder : CpuDecoder, optional
        What decodes on the CPU, if another slide's threads do.
    source : ByteSource, optional
        Where its bytes come from, if not from what the layout says.
    """

    def __init__(
        self,
        layout: SlideLayout,
        device: str = "auto",
        threads: int | None = None,
        *,
        keeps_whole: bool = True,
        runtime: Runtime | None = None,
        title: str | None = None,
        decoder: CpuDecoder | None = None,
        source: ByteSource | None = None,
    ) -> None:
        super().__init__(layout)
        self._described: SlideLayout | None = layout
        self._labels: dict[str, Any] | None = None
        self.runtime = default_runtime() if runtime is None else runtime
        self._number = next(_slide_numbers)
        self._process, self._asked = os.getpid(), device
        self._reads = Readers(layout.path)
        self._display_color: Color = "stored"
        self._threads = threads
        self._keeps_whole = keeps_whole
        self._planes: OpenPlanes[OpenedSlide] = OpenPlanes(self._open_plane)
        # The planes of a slide share its threads.
        decoder = self._decoder = choose_decoder(layout, threads, decoder)
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
            title or layout.path,
            names,
            partial(truncation.reason, layout, images),
            # Of a server each answer says which version it is of.
            partial(check_files, () if layout.remote or source else layout.files, layout.path),
        )

        def reader(source: ByteSource, layout: SlideLayout = layout) -> RegionReader:
            return RegionReader(
                self._number,
                layout,
                images,
                self._pyramid,
                source,
                decoder,
                self._log,
                self.runtime.tiles,
                self.runtime.devices,
                self.runtime.throughput,
                device,
                keeps_whole=keeps_whole,
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
        return self._display_color

    @display_color.setter
    def display_color(self, color: Color) -> None:
        if wants_srgb(color):
            self._profile.profile()
        self._display_color = color
        for plane in self._planes.all():
            plane._display_color = color

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
            wish = Wish(channel=wanted, tolerant=tolerant, table=table)
            pixels: NDArray[Any] = self._guarded(
                lambda: self._reader_of(index).read(index, Regions.slice(rows, columns), wish)[0]
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
        return self._reader.offload.device

    @device.setter
    def device(self, device: str) -> None:
        for reader in (self._reader, *self._others.values()):
            reader.offload.device = device
        self._asked = device
        for plane in self._planes.all():
            plane.device = device

    @property
    def decoder(self) -> tuple[str, str]:
        """What decodes level 0 now, and why, for example ("CPU", "chosen")."""
        return self._reader.offload.decoder

    def on_failed_tile(self, report: Callable[[str, str], None]) -> None:
        """Have `report` called with name and reason of each tile that is shown as background.

        Called once a tile, from the thread that read it.
        """
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
        display = self.runtime.fetcher.stats(self._number)
        return {**self._log.stats(most_failed), "display": display}

    def clear_cache(self) -> None:
        """Drop this slide's decoded tiles, of all planes, from memory and from devices."""
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

    def _open_plane(self, which: tuple[int, int]) -> OpenedSlide:
        own = self.layout
        remote = own.remote
        path, at = own.path if remote is None else remote.url, dict(zip("zt", which, strict=True))
        with described(path, at) as (layout, source):
            if layout.files != own.files or layout.remote != remote:
                raise changed_error(self.path)
            if _kind(layout) != _kind(own):
                raise CorruptSlideError(
                    f"The plane at z = {at['z']}, t = {at['t']} of '{self.path}' has other "
                    "channels or samples than the one that is shown; get a fresh copy of the file."
                )
            plane = type(self)(
                layout,
                self.device,
                self._threads,
                keeps_whole=self._keeps_whole,
                runtime=self.runtime,
                decoder=self._decoder,
                source=source,
            )
        plane._display_color = self._display_color
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
        data: bytes = self._guarded(lambda: bytes(self._source.read([place])[0]))
        return data

    def _guarded(self, read: Callable[[], Any]) -> Any:
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

        Those that it has copies of may be held by threads that are not there.
        """
        if self._process == os.getpid():
            return
        with _renewing:
            if self._process != os.getpid():
                closed, color = self._reads.closed, self._display_color
                OpenedSlide.__init__(
                    self, self.layout, self._asked, self._threads, keeps_whole=self._keeps_whole
                )
                self._reads.closed, self._display_color = closed, color


_renewing = threading.Lock()


def _renew_lock() -> None:
    global _renewing
    _renewing = threading.Lock()


def _kind(layout: SlideLayout) -> tuple[int, np.dtype[Any], bool]:
    """Return what planes of a slide have in common."""
    base = layout.levels[0]
    return base.channels, base.dtype, layout.rgb


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
