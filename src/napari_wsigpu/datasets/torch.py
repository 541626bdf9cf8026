"""PyTorch datasets over patches of slides.

    from napari_wsigpu.datasets import Patches
    from napari_wsigpu.torch import PatchStream

    patches = Patches.grid(["slide.svs"], 224, mpp=0.5)
    for pixels, indices in PatchStream(patches, batch_size=256, shuffle=True, device="cuda"):
        loss = criterion(model(pixels), labels[indices])

Pixels are uint8 tensors of shape (patches, channels, height, width), in the memory format
``torch.channels_last``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.datasets.batches import PatchBatches, PatchReader, check_options, report
from napari_wsigpu.datasets.order import Order
from napari_wsigpu.gpu.device.devices import cuda_index
from napari_wsigpu.gpu.device.driver import import_cuda
from napari_wsigpu.model.errors import DeviceError, MissingPackageError, RegionError

try:
    import torch
    from torch.utils.data import Dataset, IterableDataset, get_worker_info
except ImportError as error:
    raise MissingPackageError(
        "napari_wsigpu.torch requires PyTorch, which can't be imported; run pip install torch."
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.datasets.batches import OnError
    from napari_wsigpu.datasets.patches import Patches
    from napari_wsigpu.model.arrays import DeviceArray, DType
    from napari_wsigpu.model.errors import TileError

    Transform = Callable[[Tensor], Tensor]

__all__ = ["PatchDataset", "PatchStream"]

# Number of bits of a `DataLoader`'s seed that are stored with the number of the epoch.
EPOCH_SHIFT = 32


class PatchDataset(Dataset):  # type: ignore[misc]
    """Patches by index on the CPU, for a ``DataLoader`` that decides their order.

    A loader with a batch size needs `collate` as its ``collate_fn``. Each batch is then read at
    once: tiles that its patches share are decoded once, and no pixels are copied.

        DataLoader(data, batch_size=64, shuffle=True, num_workers=4, collate_fn=data.collate)

    Parameters
    ----------
    patches : Patches
        The patches.
    transform : callable, optional
        Applied to the pixels of a batch, in the loader's workers.
    color : {"stored", "srgb"}
        As in `Slide.read_region`.
    open_slides : int
        Number of slides that each process keeps open.
    on_error : {"raise", "skip", "background"}
        How patches with damaged tiles are treated. "raise": reading raises a `TileError`. "skip":
        they are left out of the batch, which may then be empty; a single index raises instead.
        "background": the tiles are filled with background. Each process warns once about each
        damaged patch; a warning about several states their number and names at most 10.

    Raises
    ------
    RegionError
        If `color` or `on_error` is unknown.
    """

    def __init__(
        self,
        patches: Patches,
        *,
        transform: Transform | None = None,
        color: Color = "stored",
        open_slides: int = 64,
        on_error: OnError = "raise",
    ) -> None:
        check_options("cpu", color, on_error)
        self.patches = patches
        self._transform = transform
        self._color: Color = color
        self._open_slides = open_slides
        self._on_error: OnError = on_error
        self._reader: PatchReader | None = None

    def __len__(self) -> int:
        return len(self.patches)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return a patch's pixels, shape (channels, height, width), and its index."""
        pixels, indices = self.__getitems__([index])
        if not len(indices):
            raise self.failures[index % len(self)]
        return pixels[0], int(indices[0])

    @property
    def failures(self) -> dict[int, TileError]:
        """The patches with damaged tiles that this process has encountered, by index."""
        return {} if self._reader is None else self._reader.failures

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the pixels and indices of a batch of patches, sorted by slide."""
        given, count = np.asarray(indices, np.int64), len(self.patches)
        # Negative indices count from the end.
        found = np.where(given < 0, given + count, given)
        wrong = given[(found < 0) | (found >= count)]
        if len(wrong):
            raise IndexError(f"Patch index {wrong[0]} is out of range for {count} patches.")
        found = self.patches.sort_by_slide(found)
        if self._reader is None:
            self._reader = PatchReader(
                self.patches,
                color=self._color,
                open_slides=self._open_slides,
                threads=_threads(),
                on_error=self._on_error,
            )
        known = set(self.failures)
        batch = self._reader.read_sound(found)
        report({index: error for index, error in self.failures.items() if index not in known})
        found = batch.indices
        pixels = _channels_first(torch.from_numpy(batch.pixels))
        if self._transform is not None:
            pixels = self._transform(pixels)
        return pixels, torch.from_numpy(found)

    @staticmethod
    def collate(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the argument: `__getitems__` has already made a batch."""
        return batch

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_reader": None}


class PatchStream(IterableDataset):  # type: ignore[misc]
    """Batches of patches in an order of its own, decoded ahead on the CPU or a GPU.

    Iterate over it directly, or use ``DataLoader(stream, batch_size=None)``. For a GPU, the loader
    must have no worker processes: threads of the stream decode into memory of PyTorch's allocator.
    On the CPU, each worker process gets a share of the batches and decodes in one thread.

    Parameters
    ----------
    patches : Patches
        The patches.
    batch_size, shuffle, seed, slides_at_once, drop_last
        As in `Order`.
    device : str
        ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
    transform : callable, optional
        Applied to the pixels of a batch, on their device.
    color : {"stored", "srgb"}
        As in `Slide.read_region`.
    on_error : {"raise", "skip", "background"}
        As in `PatchBatches`; `failures` lists the patches.
    rank, world_size : int, optional
        Share of all batches that this process gets; by default from ``torch.distributed`` if that
        is initialized.

    Raises
    ------
    RegionError
        If the order is not valid, or `color` or `on_error` is unknown.
    DeviceError
        If `device` is not the name of a device. Iterating raises it if the device cannot be used.
    """

    def __init__(
        self,
        patches: Patches,
        batch_size: int = 256,
        *,
        shuffle: bool = False,
        seed: int = 0,
        slides_at_once: int = 16,
        drop_last: bool = False,
        device: str = "cpu",
        transform: Transform | None = None,
        color: Color = "stored",
        on_error: OnError = "raise",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        check_options(device, color, on_error)
        self.patches = patches
        shard = _shard(rank, world_size)
        self._order = Order(batch_size, shuffle, seed, slides_at_once, drop_last, *shard)
        self._device = device
        self._transform = transform
        self._color: Color = color
        self._on_error: OnError = on_error
        self._batches: PatchBatches | None = None
        self._epoch = 0
        self._loader_epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._resumes = False

    def __len__(self) -> int:
        """Return the number of batches of this rank, in all its worker processes together."""
        return len(self._order.batches(self.patches))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over an epoch; see `PatchBatches`."""
        batches = self._worker_batches()
        self._resumes = False
        for pixels, indices in batches:
            tensor = torch.from_numpy(pixels) if isinstance(pixels, np.ndarray) else pixels
            if tensor.is_cuda:
                # The allocator may reuse the memory only after the caller's current stream has
                # finished the work that uses it.
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            tensor = _channels_first(tensor)
            if self._transform is not None:
                tensor = self._transform(tensor)
            yield tensor, torch.from_numpy(indices)
        if get_worker_info() is None:
            self._loader_epoch[0] = batches.epoch << EPOCH_SHIFT

    @property
    def failures(self) -> dict[int, TileError]:
        """The patches with damaged tiles that this process has encountered, by index."""
        return {} if self._batches is None else self._batches.reader.failures

    def set_epoch(self, epoch: int) -> None:
        """Make the next iterator start this epoch; the order of patches depends on its number.

        Unless this method is called, epochs are counted automatically.
        """
        self._epoch = epoch
        self._loader_epoch[0] = epoch << EPOCH_SHIFT
        if self._batches is not None:
            self._batches.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch as plain numbers; yielded batches count as done.

        In each worker of a ``DataLoader``, the stream has its own state;
        ``torchdata.stateful_dataloader.StatefulDataLoader`` collects and restores them all.
        """
        return self._worker_batches().state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Make the next iterator continue where another stream with the same arguments stopped.

        Raises
        ------
        RegionError
            If the state belongs to other patches, or to another order or shard.
        """
        self._worker_batches().load_state_dict(state)
        self._resumes = get_worker_info() is None

    def close(self) -> None:
        """Close all slides; the next iterator reopens them."""
        if self._batches is not None:
            self._batches.close()

    def __getstate__(self) -> dict[str, object]:
        epoch = self._epoch if self._batches is None else self._batches.epoch
        return {**vars(self), "_batches": None, "_epoch": epoch}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._loader_epoch.share_memory_()

    def _epoch_of_worker(self, loader_seed: int) -> int:
        """Return the number of the epoch that a new worker of a `DataLoader` works on.

        Without persistent workers, a loader starts new processes for each epoch, which share a new
        seed. The shared integer holds the epoch and a part of this seed, so that all processes
        together count an epoch once: two processes that count it at the same time write the same
        number.
        """
        seed = loader_seed & (1 << EPOCH_SHIFT) - 1 or 1
        epoch, counted = divmod(int(self._loader_epoch[0]), 1 << EPOCH_SHIFT)
        if counted != seed:
            epoch += bool(counted)  # 0: no process has started since `set_epoch`
            self._loader_epoch[0] = epoch << EPOCH_SHIFT | seed
        return epoch

    def _worker_batches(self) -> PatchBatches:
        """Return the batches for this process, created on first use."""
        worker = get_worker_info()
        if worker is not None and self._device != "cpu":
            raise DeviceError(
                f"DataLoader workers can't decode to '{self._device}'; use num_workers=0, which "
                "decodes ahead in threads."
            )
        if worker is not None and self._resumes:
            # Every process would start at the first patch and yield patches twice.
            raise RegionError(
                "DataLoader workers can't all continue from one state of the stream; use "
                "num_workers=0, or torchdata's StatefulDataLoader, which saves one state for each."
            )
        order = self._order if worker is None else self._order.part(worker.id, worker.num_workers)
        if self._batches is None or self._batches.order != order:
            epoch = self._epoch if self._batches is None else self._batches.epoch
            if worker is not None and self._batches is None:
                epoch = self._epoch_of_worker(worker.seed - worker.id)
            self._batches = PatchBatches(
                self.patches,
                order,
                self._device,
                color=self._color,
                threads=_threads(),
                empty=None if self._device == "cpu" else _CudaMemory(self._device),
                on_error=self._on_error,
            )
            self._batches.epoch = epoch
        return self._batches


class _CudaMemory:
    """Allocates memory with PyTorch, for threads that decode into it.

    The memory belongs to a CUDA stream that never runs any work. The allocator therefore
    hands out only memory that no kernel still uses: before it reuses a tensor's memory, it waits
    for the streams on which the tensor was recorded.
    """

    def __init__(self, device: str) -> None:
        self._cupy = import_cuda("cupy", device)
        self._stream = torch.cuda.Stream(cuda_index(device))

    def __call__(self, shape: tuple[int, ...], dtype: DType) -> tuple[Tensor, DeviceArray]:
        """Return a tensor, and a CuPy array in the same memory."""
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        with torch.cuda.stream(self._stream):
            tensor = torch.empty(shape, dtype=kind, device=self._stream.device)
            return tensor, self._cupy.from_dlpack(tensor)


def _channels_first(pixels: Tensor) -> Tensor:
    """Return a view of shape (patches, channels, height, width)."""
    return pixels.permute(0, 3, 1, 2)


def _threads() -> int | None:
    """Return the number of decoding threads: one in each worker of a `DataLoader`."""
    return None if get_worker_info() is None else 1


def _shard(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the index of this process, and the number of processes."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank() if rank is None else rank
        world_size = distributed.get_world_size() if world_size is None else world_size
    return rank or 0, 1 if world_size is None else world_size
