"""Data sets of PyTorch by other libraries: one patch at a time, as their users write them."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor


class Peer:
    """Patches of a slide's level 0, averaged by Pillow; the slide is opened in each process.

    Parameters
    ----------
    path : str
        The slide.
    places : sequence of tuple of int
        (x, y) of each patch.
    side, factor : int
        Pixels of a patch, and how many of level 0 one of them spans.
    """

    package = ""

    def __init__(
        self, path: str, places: Sequence[tuple[int, int]], side: int, factor: int
    ) -> None:
        self.path, self.places, self.side, self.factor = path, places, side, factor
        self._read: Callable[[tuple[int, int], int], Any] | None = None

    def open(self) -> Callable[[tuple[int, int], int], Any]:
        """Open the slide; return what reads (x, y) and a side."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self._read is None:
            self._read = self.open()
        pixels = self._read(self.places[index], self.side * self.factor)
        picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(np.asarray(pixels))
        if self.factor > 1:
            picture = picture.reduce(self.factor)
        return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1), index


class ByOpenSlide(Peer):
    """By openslide-python."""

    package = "openslide"

    def open(self) -> Callable[[tuple[int, int], int], Any]:
        """Open the slide."""
        slide = import_module("openslide").OpenSlide(self.path)
        return lambda place, span: slide.read_region(place, 0, (span, span))


class ByFastSlide(Peer):
    """By FastSlide."""

    package = "fastslide"

    def open(self) -> Callable[[tuple[int, int], int], Any]:
        """Open the slide."""
        slide = import_module("fastslide").FastSlide.from_file_path(self.path)
        return lambda place, span: slide.read_region(place, 0, (span, span)).numpy()


class ByTiffSlide(Peer):
    """By tiffslide."""

    package = "tiffslide"

    def open(self) -> Callable[[tuple[int, int], int], Any]:
        """Open the slide."""
        slide = import_module("tiffslide").TiffSlide(self.path)
        return lambda place, span: slide.read_region(place, 0, (span, span), as_array=True)


class ByCuCim(Peer):
    """By cuCIM."""

    package = "cucim"

    def open(self) -> Callable[[tuple[int, int], int], Any]:
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


def cucim_batches(
    peer: Peer, indices: Sequence[int], batch_size: int, threads: int, device: str
) -> Iterator[Tensor]:
    """Yield batches by cuCIM's own threads, without processes; averaged where they are wanted."""
    image = import_module("cucim").CuImage(peer.path)
    span = peer.side * peer.factor
    batches = image.read_region(
        [peer.places[index] for index in indices],
        (span, span),
        batch_size=batch_size,
        num_workers=threads,
        prefetch_factor=4,
    )
    for batch in batches:
        pixels = np.asarray(batch)
        if device == "cpu" and peer.factor > 1:
            reduced = [np.array(Image.fromarray(each).reduce(peer.factor)) for each in pixels]
            pixels = np.stack(reduced)
        tensor = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2)
        if device != "cpu" and peer.factor > 1:
            mean = torch.nn.functional.avg_pool2d(tensor.float(), peer.factor)
            tensor = (mean + 0.5).byte()
        yield tensor
    with suppress(AttributeError):
        image.close()
