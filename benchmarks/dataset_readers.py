"""Batches of patches from other libraries, each in its fastest setup.

Libraries that read one region per call run in processes (`Workers`). These are forked once, before
CUDA is initialized, and each has its own open slide. They write pixels directly to shared memory,
whereas a PyTorch loader would send each batch through a new file. cuCIM also reads lists of regions
with its own threads (`cucim_batches`).
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

    Position = tuple[int, int]
    # Turn, slot, first patch in the slot, positions, and whether the device averages.
    Task = tuple[int, int, int, Sequence[Position], bool]

# Patches that a process reads at a time: neighbours if the order has them.
PART = 16
# How long a batch may take before its loader is abandoned.
PATIENCE_SECONDS = 30


class Peer:
    """Patches of a slide's level 0; the slide is opened on the first read.

    Parameters
    ----------
    path : str
        The slide.
    side, factor : int
        Side of a patch in pixels, and the pixels of level 0 that one of them spans.
    """

    package = ""
    channels = 3

    def __init__(self, path: str, side: int, factor: int) -> None:
        self.path, self.side, self.factor = path, side, factor
        self._read: Callable[[Position, int], Any] | None = None

    def open(self) -> Callable[[Position, int], Any]:
        """Open the slide; return a function that reads a square at (x, y)."""
        raise NotImplementedError

    def stored(self, position: Position) -> Any:
        """Return the pixels of level 0 under a patch, as the library returns them."""
        if self._read is None:
            self._read = self.open()
        return self._read(position, self.side * self.factor)

    def patch(self, position: Position) -> NDArray[np.uint8]:
        """Return a patch in RGB, averaged by Pillow."""
        pixels = self.stored(position)
        picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(np.asarray(pixels))
        if self.factor > 1:
            picture = picture.reduce(self.factor)
        return np.asarray(picture.convert("RGB"))


class ByOpenSlide(Peer):
    """Patches from openslide-python."""

    package = "openslide"
    channels = 4

    def open(self) -> Callable[[Position, int], Any]:
        """Open the slide."""
        slide = import_module("openslide").OpenSlide(self.path)
        return lambda position, span: slide.read_region(position, 0, (span, span))


class ByFastSlide(Peer):
    """Patches from FastSlide."""

    package = "fastslide"

    def open(self) -> Callable[[Position, int], Any]:
        """Open the slide."""
        slide = import_module("fastslide").FastSlide.from_file_path(self.path)
        return lambda position, span: slide.read_region(position, 0, (span, span)).numpy()


class ByTiffSlide(Peer):
    """Patches from tiffslide."""

    package = "tiffslide"

    def open(self) -> Callable[[Position, int], Any]:
        """Open the slide."""
        slide = import_module("tiffslide").TiffSlide(self.path)
        return lambda position, span: slide.read_region(position, 0, (span, span), as_array=True)


class ByCuCim(Peer):
    """Patches from cuCIM."""

    package = "cucim"

    def open(self) -> Callable[[Position, int], Any]:
        """Open the slide."""
        slide = import_module("cucim").CuImage(self.path)
        return lambda position, span: slide.read_region(position, (span, span))


def peers() -> dict[str, type[Peer]]:
    """Return the peers whose package is installed."""
    kinds = {
        "OpenSlide": ByOpenSlide,
        "tiffslide": ByTiffSlide,
        "FastSlide": ByFastSlide,
        "cuCIM": ByCuCim,
    }
    return {name: kind for name, kind in kinds.items() if find_spec(kind.package) is not None}


class Workers:
    """Processes that read batches with a peer, forked on construction.

    Parameters
    ----------
    peer : Peer
        The reader of each process.
    batch_size, processes : int
        Patches per batch, and number of processes.
    """

    def __init__(self, peer: Peer, batch_size: int, processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self._peer, self._batch_size = peer, batch_size
        # Each process has one part in work and one queued.
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

    def batches(
        self, positions: Sequence[Position], device: str, *, there: bool
    ) -> Iterator[Tensor]:
        """Yield batches on a device, averaged by the device or by the processes.

        Raises
        ------
        TimeoutError
            If no process has read anything for `PATIENCE_SECONDS`.
        """
        self._begin()
        groups = [
            positions[first : first + self._batch_size]
            for first in range(0, len(positions), self._batch_size)
        ]
        missing = {number: len(group) for number, group in enumerate(groups)}
        for number in range(min(self._slots, len(groups))):
            self._ask(number, groups[number], there=there)
        for number, group in enumerate(groups):
            while missing[number]:
                # Slots are requested cyclically, so a slot belongs to the next batch that uses it.
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
        """Stop the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def _begin(self) -> None:
        """Drop the parts that an earlier loop did not take."""
        self._turn.value += 1
        while self._outstanding:
            self._done()

    def _ask(self, number: int, group: Sequence[Position], *, there: bool) -> None:
        turn, slot = self._turn.value, number % self._slots
        for first in range(0, len(group), PART):
            self._tasks.put((turn, slot, first, group[first : first + PART], there))
            self._outstanding += 1

    def _done(self) -> tuple[int, int, str]:
        """Wait for a part of a batch; return its slot, number of patches, and error."""
        if not self._results.poll(PATIENCE_SECONDS):
            raise TimeoutError(f"{self._peer.package} read nothing for {PATIENCE_SECONDS} s")
        slot, count, error = self._results.recv()
        self._outstanding -= 1
        return slot, count, error

    def _pixels(self, slot: int, *, there: bool) -> NDArray[np.uint8]:
        """Return a slot as an array; if the device averages, with the library's pixels."""
        peer = self._peer
        side, channels = (peer.side * peer.factor, peer.channels) if there else (peer.side, 3)
        shape = self._batch_size, side, side, channels
        count = int(np.prod(shape))
        return np.frombuffer(self._memory, np.uint8, count, slot * self._slot).reshape(shape)

    def _work(self, results: Connection, lock: Lock) -> None:
        """Read parts of batches until the process is stopped."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(1)
        while True:
            turn, slot, first, positions, there = self._tasks.get()
            error = ""
            try:
                if turn == self._turn.value:
                    self._fill(self._pixels(slot, there=there)[first:], positions, there=there)
            except Exception as raised:  # the waiting loop reports it
                error = repr(raised)
            with lock:
                results.send((slot, len(positions), error))

    def _fill(
        self, pixels: NDArray[np.uint8], positions: Sequence[Position], *, there: bool
    ) -> None:
        read = self._peer.stored if there else self._peer.patch
        for index, position in enumerate(positions):
            pixels[index] = np.asarray(read(position))


def cucim_batches(
    peer: Peer, positions: Sequence[Position], batch_size: int, threads: int, device: str
) -> Iterator[Tensor]:
    """Yield batches read by cuCIM's threads, averaged on the GPU or by as many threads."""
    image = import_module("cucim").CuImage(peer.path)
    span = peer.side * peer.factor
    batches = image.read_region(
        positions, (span, span), batch_size=batch_size, num_workers=threads, prefetch_factor=4
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
