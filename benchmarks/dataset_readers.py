"""Batches of patches by other libraries, each the fastest way that it has.

Libraries that read one region a call are read by processes (`Workers`), which are forked once,
before anything touches CUDA, each with a handle of its own; they put pixels right into memory that
all share, where a loader of PyTorch would send each batch through a new file. cuCIM reads lists of
regions by threads of its own too (`cucim_batches`).
"""

from __future__ import annotations

import mmap
import multiprocessing
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.queues import SimpleQueue
    from multiprocessing.synchronize import Lock

    from numpy.typing import NDArray
    from torch import Tensor

    Place = tuple[int, int]
    # The turn, the slot, the first patch in it, the places, and whether the device averages.
    Task = tuple[int, int, int, Sequence[Place], bool]

# Patches that a process reads at a time, neighbours where the order has them.
PART = 16
# How long a batch may take before its loader is given up.
PATIENCE_SECONDS = 30


class Peer:
    """Patches of a slide's level 0; it is opened when the first one is read.

    Parameters
    ----------
    path : str
        The slide.
    side, factor : int
        Pixels of a patch, and how many of level 0 one of them spans.
    """

    package = ""
    channels = 3

    def __init__(self, path: str, side: int, factor: int) -> None:
        self.path, self.side, self.factor = path, side, factor
        self._read: Callable[[Place, int], Any] | None = None

    def open(self) -> Callable[[Place, int], Any]:
        """Open the slide; return what reads (x, y) and a side."""
        raise NotImplementedError

    def stored(self, place: Place) -> Any:
        """Return the pixels of level 0 under a patch, as the library gives them."""
        if self._read is None:
            self._read = self.open()
        return self._read(place, self.side * self.factor)

    def patch(self, place: Place) -> NDArray[np.uint8]:
        """Return a patch in RGB, averaged by Pillow."""
        pixels = self.stored(place)
        picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(np.asarray(pixels))
        if self.factor > 1:
            picture = picture.reduce(self.factor)
        return np.asarray(picture.convert("RGB"))


class ByOpenSlide(Peer):
    """By openslide-python."""

    package = "openslide"
    channels = 4

    def open(self) -> Callable[[Place, int], Any]:
        """Open the slide."""
        slide = import_module("openslide").OpenSlide(self.path)
        return lambda place, span: slide.read_region(place, 0, (span, span))


class ByFastSlide(Peer):
    """By FastSlide."""

    package = "fastslide"

    def open(self) -> Callable[[Place, int], Any]:
        """Open the slide."""
        slide = import_module("fastslide").FastSlide.from_file_path(self.path)
        return lambda place, span: slide.read_region(place, 0, (span, span)).numpy()


class ByTiffSlide(Peer):
    """By tiffslide."""

    package = "tiffslide"

    def open(self) -> Callable[[Place, int], Any]:
        """Open the slide."""
        slide = import_module("tiffslide").TiffSlide(self.path)
        return lambda place, span: slide.read_region(place, 0, (span, span), as_array=True)


class ByCuCim(Peer):
    """By cuCIM."""

    package = "cucim"

    def open(self) -> Callable[[Place, int], Any]:
        """Open the slide."""
        slide = import_module("cucim").CuImage(self.path)
        return lambda place, span: slide.read_region(place, (span, span))


def peers() -> dict[str, type[Peer]]:
    """Return those whose package is installed."""
    kinds = {
        "OpenSlide": ByOpenSlide,
        "tiffslide": ByTiffSlide,
        "FastSlide": ByFastSlide,
        "cuCIM": ByCuCim,
    }
    return {name: kind for name, kind in kinds.items() if find_spec(kind.package) is not None}


class Workers:
    """Processes that read batches by a peer; they are forked here, and stay until they are closed.

    Parameters
    ----------
    peer : Peer
        What each of them reads by.
    batch_size, processes : int
        Patches of a batch, and how many processes read.
    """

    def __init__(self, peer: Peer, batch_size: int, processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self._peer, self._batch_size = peer, batch_size
        # Each process has a part to do, and one that waits.
        self._slots = 1 + max(1, -(-2 * processes * PART // batch_size))
        span = peer.side * peer.factor
        self._slot = batch_size * span * span * peer.channels
        self._memory = mmap.mmap(-1, self._slots * self._slot)
        self._tasks: SimpleQueue[Task] = context.SimpleQueue()
        self._turn = context.RawValue("q", 0)
        self._outstanding = 0
        self._results, results = context.Pipe(duplex=False)
        lock = context.Lock()
        self._processes = [
            context.Process(target=self._work, args=(results, lock), daemon=True)
            for _ in range(processes)
        ]
        for process in self._processes:
            process.start()

    def batches(self, places: Sequence[Place], device: str, *, there: bool) -> Iterator[Tensor]:
        """Yield batches on a device; averaged there, by it, or by the processes.

        Raises
        ------
        TimeoutError
            If no process has read anything for `PATIENCE_SECONDS`.
        """
        self._begin()
        groups = [
            places[first : first + self._batch_size]
            for first in range(0, len(places), self._batch_size)
        ]
        missing = {number: len(group) for number, group in enumerate(groups)}
        for number in range(min(self._slots, len(groups))):
            self._ask(number, groups[number], there=there)
        for number, group in enumerate(groups):
            while missing[number]:
                # Slots are asked for in turn: which batch it is, is the next that has this one.
                slot, count, error = self._done()
                if error:
                    raise RuntimeError(error)
                behind = (slot - number) % self._slots
                missing[number + behind] -= count
            pixels = self._pixels(number % self._slots, there=there)[: len(group)]
            tensor = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2)
            yield _averaged(tensor[:, :3], self._peer.factor) if there else tensor
            if number + self._slots < len(groups):
                self._ask(number + self._slots, groups[number + self._slots], there=there)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def _begin(self) -> None:
        """Have processes drop what an earlier loop did not take."""
        self._turn.value += 1
        while self._outstanding:
            self._done()

    def _ask(self, number: int, group: Sequence[Place], *, there: bool) -> None:
        turn, slot = self._turn.value, number % self._slots
        for first in range(0, len(group), PART):
            self._tasks.put((turn, slot, first, group[first : first + PART], there))
            self._outstanding += 1

    def _done(self) -> tuple[int, int, str]:
        """Wait for a part of a batch; return its slot, how many patches it has, and an error."""
        if not self._results.poll(PATIENCE_SECONDS):
            raise TimeoutError(f"{self._peer.package} read nothing for {PATIENCE_SECONDS} s")
        slot, count, error = self._results.recv()
        self._outstanding -= 1
        return slot, count, error

    def _pixels(self, slot: int, *, there: bool) -> NDArray[np.uint8]:
        """Return a slot as an array; averaged on a device, it has what the library gives."""
        peer = self._peer
        side, channels = (peer.side * peer.factor, peer.channels) if there else (peer.side, 3)
        shape = self._batch_size, side, side, channels
        count = int(np.prod(shape))
        return np.frombuffer(self._memory, np.uint8, count, slot * self._slot).reshape(shape)

    def _work(self, results: Connection, lock: Lock) -> None:
        """Read parts of batches until the process is ended."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(1)
        while True:
            turn, slot, first, places, there = self._tasks.get()
            error = ""
            try:
                if turn == self._turn.value:
                    self._fill(self._pixels(slot, there=there)[first:], places, there=there)
            except Exception as raised:  # the loop that waits for it tells
                error = repr(raised)
            with lock:
                results.send((slot, len(places), error))

    def _fill(self, pixels: NDArray[np.uint8], places: Sequence[Place], *, there: bool) -> None:
        read = self._peer.stored if there else self._peer.patch
        for index, place in enumerate(places):
            pixels[index] = np.asarray(read(place))


def cucim_batches(
    peer: Peer, places: Sequence[Place], batch_size: int, threads: int, device: str
) -> Iterator[Tensor]:
    """Yield batches by cuCIM's own threads; on a GPU averaged there, else by as many threads."""
    image = import_module("cucim").CuImage(peer.path)
    span = peer.side * peer.factor
    batches = image.read_region(
        places, (span, span), batch_size=batch_size, num_workers=threads, prefetch_factor=4
    )

    def reduced(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return np.asarray(Image.fromarray(pixels).reduce(peer.factor))

    with ThreadPoolExecutor(threads) as pool:
        for batch in batches:
            pixels = np.asarray(batch)
            if device == "cpu" and peer.factor > 1:
                pixels = np.stack(list(pool.map(reduced, pixels)))
            tensor = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2)
            yield tensor if device == "cpu" else _averaged(tensor, peer.factor)
    with suppress(AttributeError):
        image.close()


def _averaged(pixels: Tensor, factor: int) -> Tensor:
    """Return means of squares, rounded half up as Pillow does."""
    if factor == 1:
        return pixels
    return (torch.nn.functional.avg_pool2d(pixels.float(), factor) + 0.5).byte()
