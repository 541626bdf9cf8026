"""`PatchBatches`: batches of patches from many slides, decoded ahead of the caller."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from napari_wsigpu.codecs.color import is_srgb
from napari_wsigpu.codecs.cpu import default_threads
from napari_wsigpu.datasets.schedules import EpochSchedules
from napari_wsigpu.gpu.device.devices import cuda_index
from napari_wsigpu.model.errors import RegionError, TileError
from napari_wsigpu.reading.batches import read_ahead
from napari_wsigpu.reading.open_slides import OpenSlides, pack
from napari_wsigpu.slide.slide import Slide, open_slide

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.datasets.order import Order
    from napari_wsigpu.datasets.patches import Patches
    from napari_wsigpu.model.arrays import AnyArray, DType
    from napari_wsigpu.model.geometry import Integers
    from napari_wsigpu.reading.plan import Cancellation

    # Allocates memory for a shape and type; returns its owner and an array on it.
    Empty = Callable[[tuple[int, ...], DType], tuple[AnyArray, AnyArray]]

OnError = Literal["raise", "skip", "background"]
ON_ERROR = "raise", "skip", "background"
MOST_REPORTED = 10

logger = logging.getLogger(__name__)

# Number of readers on the host (least, most) and on a device; batches that each reader prefetches.
READERS_ON_HOST, MOST_ON_HOST, READERS_ON_DEVICE, AHEAD = 2, 8, 4, 2


class Batch(NamedTuple):
    """A batch of patches.

    Attributes
    ----------
    pixels : array, shape (patches, height, width, channels)
        Pixels on the requested device, with ``__dlpack__``.
    indices : ndarray of int64, shape (patches,)
        Index of each patch in `Patches`.
    """

    pixels: AnyArray
    indices: Integers


def check_options(device: str, color: Color, on_error: OnError) -> None:
    """Check options before the first slide is opened; nothing is started.

    Raises
    ------
    RegionError
        If `color` or `on_error` is unknown.
    DeviceError
        If `device` is not the name of a device.
    """
    is_srgb(color)
    if device != "cpu":
        cuda_index(device)
    if on_error not in ON_ERROR:
        raise RegionError(f"on_error is {on_error!r}; use one of {', '.join(ON_ERROR)}.")


class PatchReader:
    """Reads patches by their indices, and opens slides when they are first needed.

    It can be used from many threads, in forked processes, and after unpickling; each process opens
    its own slides.

    Parameters
    ----------
    patches : Patches
        All patches that can be read.
    device : str
        Device to return the pixels on: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
    color : {"stored", "srgb"}
        As in `Slide.read_region`.
    open_slides : int
        Number of slides to keep open; the least recently used ones are closed.
    threads : int, optional
        As in `open_slide`.
    on_error : {"raise", "skip", "background"}
        How `read_sound` treats patches with damaged tiles.

    Attributes
    ----------
    failures : dict of int to TileError
        The error of each patch that was skipped or shows background, by index.
    """

    def __init__(
        self,
        patches: Patches,
        device: str = "cpu",
        *,
        color: Color = "stored",
        open_slides: int = 16,
        threads: int | None = None,
        on_error: OnError = "raise",
    ) -> None:
        check_options(device, color, on_error)
        self.failures: dict[int, TileError] = {}
        self._on_error = on_error
        self.patches = patches
        self.device = device
        self._color = color
        self._most_open = open_slides
        self._threads = threads
        self._start()

    def _start(self) -> None:
        """Create the state that is not shared with other processes."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._slides = OpenSlides(self._most_open)
        weakref.finalize(self, self._slides.close)
        # Channels, type and path of the first slide; all other slides must match it.
        self._kind: tuple[int, DType, str] | None = None

    def __getstate__(self) -> dict[str, object]:
        inherited = ("_process", "_lock", "_slides", "_kind")
        return {name: value for name, value in vars(self).items() if name not in inherited}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        vars(self).update(state)
        self._start()

    def read(
        self,
        indices: Integers,
        empty: Empty | None = None,
        schedules: EpochSchedules | None = None,
        position: int = 0,
    ) -> AnyArray:
        """Read patches that are sorted by slide and plane.

        Parameters
        ----------
        indices : ndarray of int64
            Indices of the patches.
        empty : callable, optional
            Allocates memory for a shape and type. It returns an object, which becomes the result,
            and an array on the device in the same memory.
        schedules : EpochSchedules, optional
            Provides the tiles that later patches of the epoch need.
        position : int
            Position of the first patch in the epoch.

        Returns
        -------
        array, shape (patches, height, width, channels)

        Raises
        ------
        RegionError
            If slides differ in channels or sample type.
        SlideError
            As in `Slide.read_batch`.
        """
        if os.getpid() != self._process:  # forked: the open slides belong to the parent
            self._start()
        patches = self.patches
        numbers, planes = patches.slides[indices], patches.planes[indices]
        changes = (np.diff(numbers) != 0) | (np.diff(planes, axis=0) != 0).any(axis=1)
        starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
        owner, pixels = None, None
        if len(starts) > 1 or empty is not None:
            owner, pixels = self._empty(int(numbers[0]), len(indices), empty)
        for start, end in pairwise([*starts, len(indices)]):
            out = None if pixels is None else pixels[start:end]
            found = self._read_plane(indices[start:end], out, schedules, position + start)
        return found if owner is None else owner

    def read_sound(
        self,
        indices: Integers,
        empty: Empty | None = None,
        schedules: EpochSchedules | None = None,
        position: int = 0,
    ) -> Batch:
        """Read patches like `read`, but treat patches with damaged tiles as `on_error` specifies.

        Returns
        -------
        Batch
            Without the patches that were skipped; it may be empty.
        """
        while True:
            if self._on_error == "skip":
                sound = ~np.isin(indices, list(self.failures))
                schedules = schedules if sound.all() else None  # positions are no longer known
                indices = indices[sound]
            if not len(indices):
                return Batch(self._empty(0, 0, empty)[0], indices)
            try:
                return Batch(self.read(indices, empty, schedules, position), indices)
            except TileError:
                # `_read_plane` has recorded the damaged patches.
                if self._on_error != "skip":
                    raise

    def close(self) -> None:
        """Close all slides; the next read reopens them."""
        if os.getpid() == self._process:
            self._slides.close()

    def _read_plane(
        self, indices: Integers, out: AnyArray | None, schedules: EpochSchedules | None, first: int
    ) -> AnyArray:
        """Read patches of a single plane."""
        patches = self.patches
        number = int(patches.slides[indices[0]])
        locations = [(x, y) for x, y in patches.locations[indices].tolist()]
        z, t = patches.plane_of(indices[0])
        with self._slides.use(self._packed(number)) as slide:
            assert isinstance(slide, Slide)
            self._check(slide)
            read = partial(
                slide.read_batch,
                size=patches.size,
                level=patches.level,
                device=self.device,
                mpp=patches.mpp,
                color=self._color,
                z=z,
                t=t,
            )
            wanted = None if schedules is None else schedules.after(slide, first)
            try:
                return read(locations, out=out, wanted=wanted)
            except TileError as error:
                if self._on_error == "raise":
                    raise
                damaged = _damaged(error, locations, read)
                with self._lock:
                    for at in damaged:
                        own = TileError(error.path, error.failures, (), [locations[at]])
                        self.failures[int(indices[at])] = own
                if self._on_error == "skip":
                    raise
            return read(locations, out=out, tolerant=True)

    def _empty(self, number: int, count: int, empty: Empty | None) -> tuple[AnyArray, AnyArray]:
        """Allocate memory for patches with the channels and type of slide `number`."""
        with self._slides.use(self._packed(number)) as slide:
            assert isinstance(slide, Slide)
            channels, dtype, _ = self._check(slide)
            width, height = self.patches.size
            shape = count, height, width, channels
            if empty is not None:
                return empty(shape, dtype)
            pixels = slide.empty(shape, dtype, self.device)
            return pixels, pixels

    def _check(self, slide: Slide) -> tuple[int, DType, str]:
        """Check a slide's channels and type; return the first slide's channels, type and path."""
        image = slide.layout.levels[0]
        with self._lock:
            if self._kind is None:
                self._kind = image.channels, image.dtype, slide.path
            channels, dtype, path = self._kind
        if (image.channels, image.dtype) != (channels, dtype):
            raise RegionError(
                f"'{slide.path}' has {image.channels} channels of {image.dtype}, but '{path}' has "
                f"{channels} of {dtype}; put these slides into separate datasets."
            )
        return self._kind

    def _packed(self, number: int) -> bytes:
        # Slides are opened with device="auto": the device that needs the pixels decodes them, or
        # the CPU if that device cannot.
        return pack(partial(_open, self.patches.paths[number], self._threads))


def _damaged(
    error: TileError,
    locations: Sequence[tuple[int, int]],
    read: Callable[[Sequence[tuple[int, int]]], AnyArray],
) -> Sequence[int]:
    """Return the indices of the regions that contain damaged tiles.

    On a computed level, the error may not name regions; each region is then read alone.
    """
    if error.regions or len(locations) == 1:
        return error.regions or (0,)
    found = []
    for index, location in enumerate(locations):
        try:
            read([location])
        except TileError:
            found.append(index)
    return found


def _open(path: str, threads: int | None) -> Slide:
    return open_slide(path, threads=threads)


class PatchBatches:
    """Iterates over batches of patches, epoch after epoch, and can save and restore its position.

    Parameters
    ----------
    patches : Patches
        The patches.
    order : Order
        Their order, and the share of them that this object yields.
    device : str
        Device to return the pixels on: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
    color : {"stored", "srgb"}
        As in `Slide.read_region`.
    threads : int, optional
        Number of CPU threads that decode each slide, as in `open_slide`.
    empty : callable, optional
        Allocates the memory of batches, as in `PatchReader.read`; by default new arrays of NumPy
        or CuPy.
    on_error : {"raise", "skip", "background"}
        How patches with damaged tiles are treated. "raise": the iterator raises an error. "skip":
        they are left out, and so is a batch that becomes empty. "background": the tiles are filled
        with background. At the end of each epoch, a warning gives the number of damaged patches
        so far and names the first 10; ``reader.failures`` has an error for each.

    Attributes
    ----------
    patches, order
        The arguments of the same names.

    Examples
    --------
    >>> for pixels, indices in PatchBatches(patches, Order(64)):  # doctest: +SKIP
    ...     train(pixels, labels[indices])
    """

    def __init__(
        self,
        patches: Patches,
        order: Order,
        device: str = "cpu",
        *,
        color: Color = "stored",
        threads: int | None = None,
        empty: Empty | None = None,
        on_error: OnError = "raise",
    ) -> None:
        self.patches = patches
        self.order = order
        self._epoch = 0
        self._yielded = 0  # batches of this epoch, including those before the state was loaded
        self._resume_at = 0  # batch at which the next iterator starts
        # Identifies the newest iterator. Older ones no longer count batches.
        self._newest = object()
        self._checksum = -1, 0  # an epoch, and the checksum of its order
        self._empty = empty
        most = 2 * order.slides_at_once
        self.reader = PatchReader(
            patches, device, color=color, open_slides=most, threads=threads, on_error=on_error
        )

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next iterator starts or continues.

        It increases at the end of each epoch. If it is set, the next iterator starts that epoch,
        even if another iterator is still in use.
        """
        return self._epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        if number != self._epoch:
            self._epoch, self._yielded, self._resume_at = number, 0, 0
            self._newest = object()

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return len(self.order.batches(self.patches))

    def __iter__(self) -> Generator[Batch, None, None]:
        """Iterate over the epoch, starting at the position that `load_state_dict` restored."""
        self._yielded, self._resume_at = self._resume_at, 0
        token = self._newest = object()
        indices = self.order.indices(self.patches, self.epoch)
        numbers = self.order.batches(self.patches)[self._yielded :]
        batches = [self.order.batch(self.patches, indices, number) for number in numbers]
        positions = range(0, len(batches) * self.order.batch_size, self.order.batch_size)
        ahead = read_ahead(
            partial(self._read, self._schedules(batches)),
            zip(positions, batches, strict=True),
            batch_size=None,
            num_workers=READERS_ON_DEVICE if self.reader.device != "cpu" else _host_readers(),
            prefetch_factor=AHEAD,
            batch_bytes=self.order.batch_size * self.patches.size[0] * self.patches.size[1] * 4,
        )
        try:
            for batch in ahead:
                # Count the batch before yielding it: the caller may never request another one.
                self._yielded += self._newest is token
                if len(batch.indices):
                    yield batch
        finally:
            ahead.close()
        report(self.reader.failures)
        if self._newest is token:
            self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch as plain numbers; yielded batches count as done."""
        epoch, checksum = self._checksum
        if epoch != self.epoch:
            indices = self.order.indices(self.patches, self.epoch)
            checksum = self.order.checksum(self.patches, indices)
            self._checksum = self.epoch, checksum
        return {
            "epoch": self.epoch,
            "batches": self._yielded,
            "batch_size": self.order.batch_size,
            "shard": self.order.shard,
            "shards": self.order.shards,
            "checksum": checksum,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Make the next iterator continue where one with the same patches and order stopped.

        Raises
        ------
        RegionError
            If the state belongs to other patches, or to another order or shard.
        """
        before = self._epoch, self._yielded
        self._epoch, self._yielded = state.get("epoch", 0), state.get("batches", 0)
        for name, value in self.state_dict().items():
            if state.get(name) != value:
                self._epoch, self._yielded = before
                raise RegionError(
                    f"The state belongs to another dataset or order: its {name} is "
                    f"{state.get(name)!r}, not {value!r}; use the same patches and order."
                )
        self._resume_at = self._yielded
        self._newest = object()

    def close(self) -> None:
        """Close all slides; the next iterator reopens them."""
        self.reader.close()

    def _schedules(self, batches: Sequence[Integers]) -> EpochSchedules | None:
        """Return schedules of the tiles to keep cached.

        Returns None for devices, and if more than two batches are read at the same time: the order
        in which they finish is not predictable.
        """
        if self.reader.device != "cpu" or _host_readers() > READERS_ON_HOST:
            return None
        at_once = self.order.slides_at_once if self.order.shuffle else 1
        return EpochSchedules(self.patches, batches, min(len(self.patches.paths), at_once))

    def _read(
        self,
        schedules: EpochSchedules | None,
        items: Sequence[tuple[int, Integers]],
        cancellation: Cancellation,
    ) -> Batch:
        cancellation.check()
        ((position, indices),) = items
        return self.reader.read_sound(indices, self._empty, schedules, position)


def report(failures: Mapping[int, TileError]) -> None:
    """Log a warning that counts and lists the patches with damaged tiles."""
    if failures:
        listed = "; ".join(
            f"{index} at {error.locations[0]} in '{error.path}'"
            for index, error in sorted(failures.items())[:MOST_REPORTED]
        )
        more = len(failures) - MOST_REPORTED
        logger.warning(
            "%d patches have damaged tiles: %s%s",
            len(failures),
            listed,
            f" and {more} more" if more > 0 else "",
        )


def _host_readers() -> int:
    # All cores decode a batch together, but only its reader averages pixels.
    return max(READERS_ON_HOST, min(default_threads() // 2, MOST_ON_HOST))
