"""Put all tissue of a slide through a network: each tile becomes a vector of numbers.

Usage: ``python examples/embed_slide.py SLIDE [--device cuda] [--beside openslide] [--out FILE]``

Needs ``pip install "napari-wsigpu[torch]" torchvision``. Tiles of 224 x 224 pixels at 0.5 µm each,
of which at least half is tissue (where the saturation of a coarse level is above Otsu's threshold),
go through torchvision's ResNet-50 with random weights, in half precision on a GPU, while the next
ones are decoded. What is printed: tiles a second, for how much of the time the network worked, and
a time line of that, a digit for each part of the time: 9 says that it always worked, 0 that it
waited for tiles. With ``--beside openslide``, the same with OpenSlide in a ``DataLoader``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from napari_wsigpu import Slide, open_slide
from napari_wsigpu.datasets import Patches
from napari_wsigpu.torch import PatchStream

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from torch import Tensor, nn

COARSE = 2048  # pixels along the longer side of what is searched for tissue
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WARM_UP = 3
# Batches that the network may have waiting: more would fill the device's memory.
WAITING = 3
COLUMNS = 60


class Run(NamedTuple):
    """What a run gave.

    Attributes
    ----------
    vectors : ndarray of float16, shape (tiles, numbers)
        In the order of the patches.
    seconds : float
        From the first batch after the warm-up to the last vector.
    spans : list of (float, float)
        When the network began and finished each batch, in seconds.
    tiles : int
        How many were timed.
    """

    vectors: NDArray[np.float16]
    seconds: float
    spans: list[tuple[float, float]]
    tiles: int

    @property
    def busy(self) -> float:
        """For what part of the time the network worked."""
        return sum(end - begin for begin, end in self.spans) / self.seconds

    @property
    def line(self) -> str:
        """A digit for each part of the time: how much of it the network worked."""
        edges = np.linspace(0, self.seconds, COLUMNS + 1)
        begins, ends = np.array(self.spans).T
        shares = [
            np.clip(np.minimum(ends, last) - np.maximum(begins, first), 0, None).sum()
            / (last - first)
            for first, last in itertools.pairwise(edges)
        ]
        return "".join(str(min(9, int(10 * share))) for share in shares)


def find_tissue(slide: Slide) -> NDArray[np.bool_]:
    """Tell tissue from glass by the saturation of a coarse level, by Otsu's threshold."""
    level = next(level for level in slide.pyramid if level.layout.longer_side <= COARSE)
    pixels = slide.level_array(level.number)[...][..., :3].astype(np.int64)
    high, low = pixels.max(-1), pixels.min(-1)
    saturation = 255 * (high - low) // np.maximum(high, 1)
    histogram = np.bincount(saturation.ravel(), minlength=256)
    below = histogram.cumsum()[:-1].astype(float)
    above = histogram.sum() - below
    weighted = (histogram * np.arange(256)).cumsum()
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = weighted[:-1] / below - (weighted[-1] - weighted[:-1]) / above
    tissue: NDArray[np.bool_] = saturation > np.argmax(np.nan_to_num(below * above * apart**2))
    return tissue


def make_network(device: str) -> nn.Module:
    """Return a ResNet-50 without its last layer, with random weights."""
    import torchvision

    torch.manual_seed(0)
    network: nn.Module = torchvision.models.resnet50(weights=None)
    network.fc = torch.nn.Identity()
    network = network.to(device, memory_format=torch.channels_last).eval()
    return network.half() if device != "cpu" else network


def embed(
    batches: Iterable[tuple[Tensor, Tensor]], network: nn.Module, device: str, count: int
) -> Run:
    """Put batches through a network, as many at a time as it takes to keep it busy."""
    clock = _Clock(device)
    kind = torch.float32 if device == "cpu" else torch.float16
    shape = 1, 3, 1, 1
    mean = torch.tensor(MEAN, dtype=kind, device=device).reshape(shape) * 255
    scale = 1 / (torch.tensor(DEVIATION, dtype=kind, device=device).reshape(shape) * 255)
    found: list[Tensor] = []
    places: list[Tensor] = []
    tiles = 0
    with torch.inference_mode():
        for number, (pixels, indices) in enumerate(batches):
            if number == WARM_UP:
                clock.start()
                tiles = 0
            clock.begin()
            on_device = pixels.to(device, non_blocking=True)
            found.append(network((on_device.to(kind) - mean) * scale))
            clock.end()
            places.append(indices)
            tiles += len(indices)
        seconds = clock.stop()
    vectors = torch.cat(found).half().cpu().numpy()
    ordered = np.empty_like(vectors, shape=(count, vectors.shape[1]))
    ordered[torch.cat(places).numpy()] = vectors
    return Run(ordered, seconds, clock.spans(), tiles)


class _Clock:
    """Notes when the network begins and finishes batches, on the device that it runs on."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._marks: list[Any] = []
        self._zero: Any = self._now()
        self._begun = time.perf_counter()

    def _now(self) -> Any:
        if self._device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Begin anew, when all before is done."""
        if self._device != "cpu":
            torch.cuda.synchronize()
        self._marks.clear()
        self._zero, self._begun = self._now(), time.perf_counter()

    def begin(self) -> None:
        """Note that a batch is given to the network."""
        self._marks.append(self._now())

    def end(self) -> None:
        """Note that it is through, once it is; wait for those before it if they are many."""
        self._marks.append(self._now())
        if self._device != "cpu" and len(self._marks) > 2 * WAITING:
            self._marks[-2 * WAITING - 1].synchronize()

    def stop(self) -> float:
        """Return the seconds since the start, when all is done."""
        if self._device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - self._begun

    def spans(self) -> list[tuple[float, float]]:
        """Return when each batch was begun and finished, in seconds since the start."""
        zero = self._zero
        times = [
            mark - zero if self._device == "cpu" else zero.elapsed_time(mark) / 1000
            for mark in self._marks
        ]
        return list(zip(times[::2], times[1::2], strict=True))


class ByOpenSlide:
    """The same tiles, one by one, by OpenSlide: read at level 0, averaged by Pillow."""

    def __init__(self, patches: Patches, mpp: float) -> None:
        self.patches = patches
        self.factor = round((patches.mpp or mpp) / mpp)
        self._slide: Any = None

    def __len__(self) -> int:
        return len(self.patches)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        import openslide

        if self._slide is None:
            self._slide = openslide.OpenSlide(self.patches.paths[0])
        x, y = self.patches.locations[index].tolist()
        width, height = (side * self.factor for side in self.patches.size)
        image = self._slide.read_region((x, y), 0, (width, height)).convert("RGB")
        pixels = np.array(image.reduce(self.factor))
        return torch.from_numpy(pixels).permute(2, 0, 1), index


def main() -> None:
    """Run it."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("slide", type=Path)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--mpp", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--beside", choices=("openslide",), help="run this reader too")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tiles", type=int, help="take only so many")
    parser.add_argument("--json", type=Path, help="write figures and time lines to this file")
    parser.add_argument("--out", type=Path, help="write vectors and locations to this file")
    given = parser.parse_args()
    with open_slide(given.slide) as slide:
        finest = (slide.mpp or (given.mpp, given.mpp))[0]
    patches = Patches.grid([given.slide], given.size, mpp=given.mpp, inside=find_tissue)
    patches = patches[: given.tiles]
    print(patches, flush=True)
    network = make_network(given.device)
    stream = PatchStream(patches, given.batch, device=given.device)
    runs = {"ours": embed(stream, network, given.device, len(patches))}
    stream.close()
    if given.beside:
        loader = DataLoader(
            ByOpenSlide(patches, finest),
            given.batch,
            num_workers=given.processes,
            pin_memory=given.device != "cpu",
        )
        runs["OpenSlide"] = embed(loader, network, given.device, len(patches))
    record = {}
    for name, run in runs.items():
        rate = run.tiles / run.seconds
        print(f"{name}: {rate:,.0f} tiles/s, network busy {run.busy:.1%}\n  {run.line}")
        record[name] = {"tiles_per_second": rate, "busy": run.busy, "spans": run.spans}
    if given.json is not None:
        given.json.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    if given.out is not None:
        np.savez(given.out, vectors=runs["ours"].vectors, locations=patches.locations)


if __name__ == "__main__":
    main()
