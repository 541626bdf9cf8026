"""Data sets of PyTorch over patches of slides.

    from napari_wsigpu.datasets import Patches
    from napari_wsigpu.torch import PatchStream

    patches = Patches.grid(["slide.svs"], 224, mpp=0.5)
    for pixels, indices in PatchStream(patches, batch_size=256, shuffle=True, device="cuda"):
        loss = criterion(model(pixels), labels[indices])

Pixels are uint8 tensors of shape (patches, channels, height, width), in the memory format
``torch.channels_last``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.datasets.batches import PatchBatches, PatchReader
from napari_wsigpu.datasets.order import Order
from napari_wsigpu.gpu.device.devices import cuda_index
from napari_wsigpu.gpu.device.driver import import_cuda
from napari_wsigpu.model.errors import DeviceError, MissingPackageError, RegionError

try:
    import torch
    from torch.utils.data import Dataset, IterableDataset, get_worker_info
except ImportError as error:
    raise MissingPackageError(
        "napari_wsigpu.torch needs PyTorch, which can't be imported; pip install torch."
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.datasets.patches import Patches

    Transform = Callable[[Tensor], Tensor]

__all__ = ["PatchDataset", "PatchStream"]


class PatchDataset(Dataset):  # type: ignore[misc]
    """Patches by their indices, for a ``DataLoader`` that chooses them, on the CPU.

    A loader with `collate` as its ``collate_fn`` has each batch read at once, so that stored tiles
    which patches share are decoded once, and copied nowhere:

        DataLoader(data, batch_size=64, shuffle=True, num_workers=4, collate_fn=data.collate)

    Parameters
    ----------
    patches : Patches
        Which there are.
    transform : callable, optional
        Of a batch of pixels; applied in the loader's processes.
    color : {"stored", "srgb"}
        As in `Slide.read_region`.
    open_slides : int
        How many slides each process keeps open.
    """

    def __init__(
        self,
        patches: Patches,
        *,
        transform: Transform | None = None,
        color: Color = "stored",
        open_slides: int = 64,
    ) -> None:
        self.patches = patches
        self._transform = transform
        self._color: Color = color
        self._open_slides = open_slides
        self._reader: PatchReader | None = None

    def __len__(self) -> int:
        return len(self.patches)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return the pixels of a patch, of shape (channels, height, width), and its index."""
        pixels, indices = self.__getitems__([index])
        return pixels[0], int(indices[0])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the pixels of a batch of patches, and their indices, slide by slide."""
        found = np.asarray(indices, np.int64)
        # An index from the end is one that it is for.
        found = np.where(found < 0, found + len(self.patches), found)
        if ((found < 0) | (found >= len(self.patches))).any():
            raise IndexError(
                f"There are {len(self.patches)} patches, and none of those: {indices}."
            )
        found = self.patches.in_turn(found)
        if self._reader is None:
            self._reader = PatchReader(
                self.patches, color=self._color, open_slides=self._open_slides, threads=_threads()
            )
        pixels = _channels_first(torch.from_numpy(self._reader.read(found)))
        if self._transform is not None:
            pixels = self._transform(pixels)
        return pixels, torch.from_numpy(found)

    @staticmethod
    def collate(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what `__getitems__` returned: it is a batch already."""
        return batch

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reader": None}


class PatchStream(IterableDataset):  # type: ignore[misc]
    """Batches of patches in an order of its own, decoded ahead, on the CPU or a GPU.

    To be used by itself, or by ``DataLoader(stream, batch_size=None)``. On a GPU without worker
    processes: its threads decode into memory that PyTorch's allocator gave. On the CPU either way;
    each of a loader's processes then has a part of the batches, and decodes in one thread.

    Parameters
    ----------
    patches : Patches
        Which there are.
    batch_size, shuffle, seed, slides_at_once, drop_last
        As in `Order`.
    device : str
        ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
    transform : callable, optional
        Of a batch of pixels, where these are.
    color : {"stored", "srgb"}
        As in `Slide.read_region`.
    rank, world_size : int, optional
        Which part of all batches this process has; by default those of ``torch.distributed`` where
        it is initialised.

    Raises
    ------
    RegionError
        If the order can't be.
    DeviceError
        If the device can't be used.
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
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.patches = patches
        shard = _place(rank, world_size)
        self._order = Order(batch_size, shuffle, seed, slides_at_once, drop_last, *shard)
        self._device = device
        self._transform = transform
        self._color: Color = color
        self._batches: PatchBatches | None = None
        self._epoch = 0
        self._resumes = False

    def __len__(self) -> int:
        """Return how many batches this rank has, by all of its worker processes."""
        return len(self._order.batches(self.patches))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through an epoch; see `PatchBatches`."""
        batches = self._made()
        self._resumes = False
        for pixels, indices in batches:
            tensor = torch.from_numpy(pixels) if self._device == "cpu" else pixels
            if tensor.is_cuda:
                # Memory is taken again when what the caller does with it by then is done.
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            tensor = _channels_first(tensor)
            if self._transform is not None:
                tensor = self._transform(tensor)
            yield tensor, torch.from_numpy(indices)

    def set_epoch(self, epoch: int) -> None:
        """Have the next iterator begin an epoch, whose number the order depends on.

        Epochs count on by themselves, but not those of a loader whose processes end with each.
        """
        self._epoch = epoch
        if self._batches is not None:
            self._batches.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Return how far this epoch is, of plain numbers; batches that were handed out are done.

        Of a stream in a loader's processes, each has a state of its own, which
        ``torchdata.stateful_dataloader.StatefulDataLoader`` gathers and gives back.
        """
        return self._made().state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on, with the next iterator, where another stream of the same kind stopped.

        Raises
        ------
        RegionError
            If the state is that of other patches, or of another order or shard.
        """
        self._made().load_state_dict(state)
        self._resumes = get_worker_info() is None

    def close(self) -> None:
        """Close all slides; the next iterator opens them again."""
        if self._batches is not None:
            self._batches.close()

    def __getstate__(self) -> dict[str, Any]:
        epoch = self._epoch if self._batches is None else self._batches.epoch
        return {**vars(self), "_batches": None, "_epoch": epoch}

    def _made(self) -> PatchBatches:
        """Return the batches of this process."""
        worker = get_worker_info()
        if worker is not None and self._device != "cpu":
            raise DeviceError(
                f"A loader's processes can't decode to '{self._device}'; use num_workers=0, which "
                "decodes ahead in threads."
            )
        if worker is not None and self._resumes:
            # It would begin anew, and hand patches out twice.
            raise RegionError(
                "A loader's processes can't go on from one state of their stream; use "
                "num_workers=0, or torchdata's StatefulDataLoader, which keeps one of each."
            )
        order = self._order if worker is None else self._order.part(worker.id, worker.num_workers)
        if self._batches is None or self._batches.order != order:
            epoch = self._epoch if self._batches is None else self._batches.epoch
            self._batches = PatchBatches(
                self.patches,
                order,
                self._device,
                color=self._color,
                threads=_threads(),
                empty=None if self._device == "cpu" else _CudaMemory(self._device),
            )
            self._batches.epoch = epoch
        return self._batches


class _CudaMemory:
    """Gives out memory of PyTorch's allocator, for threads that decode into it.

    It is that of a stream on which nothing ever runs. So what the allocator gives out is in use by
    no kernel: it waits for those on the streams that a tensor was recorded on before it takes the
    memory again.
    """

    def __init__(self, device: str) -> None:
        self._cupy = import_cuda("cupy", device)
        self._stream = torch.cuda.Stream(cuda_index(device))

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Tensor, Any]:
        """Return a tensor, and the same memory as an array of CuPy."""
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        with torch.cuda.stream(self._stream):
            tensor = torch.empty(shape, dtype=kind, device=self._stream.device)
            return tensor, self._cupy.from_dlpack(tensor)


def _channels_first(pixels: Tensor) -> Tensor:
    """Return the same memory as (patches, channels, height, width)."""
    return pixels.permute(0, 3, 1, 2)


def _threads() -> int | None:
    """Return how many threads decode: one in each of a loader's processes."""
    return None if get_worker_info() is None else 1


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return which of how many processes this is."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank() if rank is None else rank
        world_size = distributed.get_world_size() if world_size is None else world_size
    return rank or 0, 1 if world_size is None else world_size
