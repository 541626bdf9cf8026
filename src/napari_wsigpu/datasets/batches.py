"""`PatchBatches`: batches of patches of many slides, decoded ahead of who takes them."""

from __future__ import annotations

import os
import threading
import weakref
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.codecs.cpu import threads_at_work
from napari_wsigpu.datasets.patches import SHOWN
from napari_wsigpu.datasets.run import Run
from napari_wsigpu.model.errors import RegionError
from napari_wsigpu.reading.batches import read_ahead
from napari_wsigpu.reading.open_slides import OpenSlides, pack
from napari_wsigpu.slide.slide import Slide, open_slide

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.datasets.order import Order
    from napari_wsigpu.datasets.patches import Patches
    from napari_wsigpu.reading.plan import Cancellation

    Shape = tuple[int, ...]
    Empty = Callable[[Shape, np.dtype[Any]], tuple[Any, Any]]

# Batches that are read at the same time, and how many each thread is ahead.
READERS_ON_HOST, MOST_ON_HOST, READERS_ON_DEVICE, AHEAD = 2, 8, 4, 2


class Batch(NamedTuple):
    """Patches, and which these are.

    Attributes
    ----------
    pixels : array, shape (patches, height, width, channels)
        On the device that was asked for; has ``__dlpack__``.
    indices : ndarray of int64, shape (patches,)
        Index of each in `Patches`.
    """

    pixels: Any
    indices: NDArray[np.int64]


class PatchReader:
    """Reads patches by their indices, of slides that it opens when they are first needed.

    Safe under many threads, and in processes that are forked or to which it is pickled; each
    opens slides of its own.

    Parameters
    ----------
    patches : Patches
        All that may be asked for.
    device : str
        Where the pixels shall be: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
    color : {"stored", "srgb"}
        As in `Slide.read_region`.
    open_slides : int
        How many slides stay open; those that were not used for longest are closed.
    threads : int, optional
        As in `open_slide`.
    """

    def __init__(
        self,
        patches: Patches,
        device: str = "cpu",
        *,
        color: Color = "stored",
        open_slides: int = 16,
        threads: int | None = None,
    ) -> None:
        self.patches = patches
        self.device = device
        self._color = color
        self._most_open = open_slides
        self._threads = threads
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._slides = OpenSlides(self._most_open)
        weakref.finalize(self, self._slides.close)
        # Channels and type of the first slide, and which that is.
        self._kind: tuple[int, np.dtype[Any], str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        inherited = ("_process", "_lock", "_slides", "_kind")
        return {name: value for name, value in vars(self).items() if name not in inherited}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def read(
        self,
        indices: NDArray[np.int64],
        empty: Empty | None = None,
        run: Run | None = None,
        place: int = 0,
    ) -> Any:
        """Read patches that are ordered by their slides and planes.

        Parameters
        ----------
        indices : ndarray of int64
            Which.
        empty : callable, optional
            Makes memory for a shape and type: an object, which is returned, and an array on the
            device in the same memory.
        run : Run, optional
            What is read before and after these.
        place : int
            Place of the first of them there.

        Returns
        -------
        array, shape (patches, height, width, channels)

        Raises
        ------
        RegionError
            If slides differ in channels or type.
        SlideError
            As `Slide.read_batch` does.
        """
        if os.getpid() != self._process:  # forked: what others opened is not ours
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
            found = self._read(indices[start:end], out, run, place + start)
        return found if owner is None else owner

    def close(self) -> None:
        """Close all slides; the next read opens them again."""
        if os.getpid() == self._process:
            self._slides.close()

    def _read(self, indices: NDArray[np.int64], out: Any, run: Run | None, place: int) -> Any:
        """Read patches of one plane."""
        patches = self.patches
        number = int(patches.slides[indices[0]])
        locations = [(x, y) for x, y in patches.locations[indices].tolist()]
        z, t = (None if number == SHOWN else int(number) for number in patches.planes[indices[0]])
        with self._slides.use(self._packed(number)) as slide:
            assert isinstance(slide, Slide)
            self._check(slide)
            return slide.read_batch(
                locations,
                patches.size,
                patches.level,
                self.device,
                mpp=patches.mpp,
                out=out,
                color=self._color,
                wanted=None if run is None else run.wanted(slide, place),
                z=z,
                t=t,
            )

    def _empty(self, number: int, count: int, empty: Empty | None) -> tuple[Any, Any]:
        """Return memory for patches of which a slide has the first ones."""
        with self._slides.use(self._packed(number)) as slide:
            assert isinstance(slide, Slide)
            channels, dtype, _ = self._check(slide)
            width, height = self.patches.size
            shape = count, height, width, channels
            if empty is not None:
                return empty(shape, dtype)
            pixels = slide.empty(shape, dtype, self.device)
            return pixels, pixels

    def _check(self, slide: Slide) -> tuple[int, np.dtype[Any], str]:
        image = slide.layout.levels[0]
        with self._lock:
            if self._kind is None:
                self._kind = image.channels, image.dtype, slide.path
            channels, dtype, path = self._kind
        if (image.channels, image.dtype) != (channels, dtype):
            raise RegionError(
                f"'{slide.path}' has {image.channels} channels of {image.dtype}, but '{path}' "
                f"{channels} of {dtype}; put such slides into data sets of their own."
            )
        return self._kind

    def _packed(self, number: int) -> bytes:
        # What pixels are read to decodes, unless the slide can't be: then as ever.
        return pack(partial(_opened, self.patches.paths[number], self._threads))


def _opened(path: str, threads: int | None) -> Slide:
    return open_slide(path, threads=threads)


class PatchBatches:
    """Batches of patches, epoch after epoch, read ahead; where it stopped can be saved.

    Parameters
    ----------
    patches : Patches
        Which there are.
    order : Order
        In which order, and which part of them.
    device : str
        Where the pixels shall be: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
    color : {"stored", "srgb"}
        As in `Slide.read_region`.
    open_slides : int, optional
        How many slides stay open; by default twice as many as the order needs at once.
    threads : int, optional
        How many threads decode each slide on the CPU, as in `open_slide`.
    empty : callable, optional
        Makes the memory that batches are put in, as in `PatchReader.read`; by default that of new
        arrays of NumPy or CuPy.

    Attributes
    ----------
    patches, order
        As given.

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
        open_slides: int | None = None,
        threads: int | None = None,
        empty: Empty | None = None,
    ) -> None:
        self.patches = patches
        self.order = order
        self._epoch = 0
        self._taken = 0
        self._first = 0
        # What the newest iterator is known by: an older one counts no more.
        self._newest = object()
        self._checksum = -1, 0  # an epoch's number, and the sum that tells its order
        self._empty = empty
        most = 2 * order.slides_at_once if open_slides is None else open_slides
        self.reader = PatchReader(patches, device, color=color, open_slides=most, threads=threads)

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next iterator begins, or goes on with.

        Counted on at the end of each. If another one is set, the next iterator begins it, whatever
        one that is under way does.
        """
        return self._epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        if number != self._epoch:
            self._epoch, self._taken, self._first = number, 0, 0
            self._newest = object()

    def __len__(self) -> int:
        """Return how many batches an epoch has."""
        return len(self.order.batches(self.patches))

    def __iter__(self) -> Generator[Batch, None, None]:
        """Go through the epoch, from where `load_state_dict` said on if it was called."""
        self._taken, self._first = self._first, 0
        this = self._newest = object()
        indices = self.order.indices(self.patches, self.epoch)
        numbers = self.order.batches(self.patches)[self._taken :]
        batches = [self.order.batch(self.patches, indices, number) for number in numbers]
        places = range(0, len(batches) * self.order.batch_size, self.order.batch_size)
        ahead = read_ahead(
            partial(self._read, self._run(batches)),
            zip(places, batches, strict=True),
            batch_size=None,
            num_workers=READERS_ON_DEVICE if self.reader.device != "cpu" else _host_readers(),
            prefetch_factor=AHEAD,
            batch_bytes=self.order.batch_size * self.patches.size[0] * self.patches.size[1] * 4,
        )
        try:
            for batch in ahead:
                # Who takes it has it, even if nothing more is asked for.
                self._taken += self._newest is this
                yield batch
        finally:
            ahead.close()
        if self._newest is this:
            self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        """Return how far the epoch is, of plain numbers: batches that were handed out are done."""
        epoch, checksum = self._checksum
        if epoch != self.epoch:
            indices = self.order.indices(self.patches, self.epoch)
            checksum = self.order.checksum(self.patches, indices)
            self._checksum = self.epoch, checksum
        return {
            "epoch": self.epoch,
            "batches": self._taken,
            "batch_size": self.order.batch_size,
            "shard": self.order.shard,
            "shards": self.order.shards,
            "checksum": checksum,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on, with the next iterator, where another one of the same patches and order stopped.

        Raises
        ------
        RegionError
            If the state is that of other patches, or of another order or shard.
        """
        before = self._epoch, self._taken
        self._epoch, self._taken = state.get("epoch", 0), state.get("batches", 0)
        for name, value in self.state_dict().items():
            if state.get(name) != value:
                self._epoch, self._taken = before
                raise RegionError(
                    f"The state is that of another data set or order: its {name} is "
                    f"{state.get(name)!r}, not {value!r}; use the patches and order that it had."
                )
        self._first = self._taken
        self._newest = object()

    def close(self) -> None:
        """Close all slides; the next iterator opens them again."""
        self.reader.close()

    def _run(self, batches: Sequence[NDArray[np.int64]]) -> Run | None:
        """Return what tells which tiles are worth keeping.

        None where more batches than two are read at the same time: each would find of the others
        too little of what it wants.
        """
        if self.reader.device != "cpu" or _host_readers() > READERS_ON_HOST:
            return None
        at_once = self.order.slides_at_once if self.order.shuffle else 1
        return Run(self.patches, batches, min(len(self.patches.paths), at_once))

    def _read(
        self,
        run: Run | None,
        items: Sequence[tuple[int, NDArray[np.int64]]],
        cancellation: Cancellation,
    ) -> Batch:
        cancellation.check()
        ((place, indices),) = items
        return Batch(self.reader.read(indices, self._empty, run, place), indices)


def _host_readers() -> int:
    # Decoding is shared by the cores; to average takes the thread that reads.
    return max(READERS_ON_HOST, min(threads_at_work() // 2, MOST_ON_HOST))
