"""Embed all tissue of a slide with a ResNet-50: each tile becomes a vector.

Usage: ``python examples/embed_slide.py SLIDE [--device cuda] [--compare openslide] [--out FILE]``

Needs ``pip install "napari-wsigpu[torch]" torchvision``. The tiles have 224 x 224 pixels at 0.5 µm
per pixel, and at least half of each is tissue, found by Otsu's threshold on the saturation of a
coarse level. torchvision's ResNet-50 with random weights processes them, in half precision on a
GPU, while the next ones are decoded. The output is the number of tiles per second, the share of the
time during which the network was busy, and a timeline of that share: one digit per interval, from 0
(waiting for tiles) to 9 (busy). ``--compare openslide`` repeats this with OpenSlide in a
``DataLoader``.
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

COARSE = 2048  # longer side in pixels of the level that is searched for tissue
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WARM_UP = 3
# Batches that may wait for the network; more would fill the device's memory.
WAITING = 3
COLUMNS = 60


class Run(NamedTuple):
    """The vectors of a run, and its timing.

    Attributes
    ----------
    vectors : ndarray of float16, shape (tiles, numbers)
        In the order of the patches.
    seconds : float
        Time from the first batch after the warm-up to the last vector.
    spans : list of (float, float)
        Start and end of the network's work on each batch, in seconds.
    tiles : int
        Number of tiles that were timed.
    """

    vectors: NDArray[np.float16]
    seconds: float
    spans: list[tuple[float, float]]
    tiles: int

    @property
    def busy(self) -> float:
        """Share of the time during which the network was busy."""
        return sum(end - start for start, end in self.spans) / self.seconds

    @property
    def line(self) -> str:
        """Timeline: a digit per interval for the share of it in which the network was busy."""
        edges = np.linspace(0, self.seconds, COLUMNS + 1)
        starts, ends = np.array(self.spans).T
        shares = [
            np.clip(np.minimum(ends, last) - np.maximum(starts, first), 0, None).sum()
            / (last - first)
            for first, last in itertools.pairwise(edges)
        ]
        return "".join(str(min(9, int(10 * share))) for share in shares)


def find_tissue(slide: Slide) -> NDArray[np.bool_]:
    """Return the mask of tissue: Otsu's threshold on the saturation of a coarse level."""
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
    """Embed batches, and queue enough of them to keep the network busy."""
    clock = _Clock(device)
    kind = torch.float32 if device == "cpu" else torch.float16
    shape = 1, 3, 1, 1
    mean = torch.tensor(MEAN, dtype=kind, device=device).reshape(shape) * 255
    scale = 1 / (torch.tensor(DEVIATION, dtype=kind, device=device).reshape(shape) * 255)
    vectors_of_batches: list[Tensor] = []
    order: list[Tensor] = []
    tiles = 0
    with torch.inference_mode():
        for number, (pixels, indices) in enumerate(batches):
            if number == WARM_UP:
                clock.start()
                tiles = 0
            clock.batch_started()
            on_device = pixels.to(device, non_blocking=True)
            vectors_of_batches.append(network((on_device.to(kind) - mean) * scale))
            clock.batch_submitted()
            order.append(indices)
            tiles += len(indices)
        seconds = clock.stop()
    vectors = torch.cat(vectors_of_batches).half().cpu().numpy()
    ordered = np.empty_like(vectors, shape=(count, vectors.shape[1]))
    ordered[torch.cat(order).numpy()] = vectors
    return Run(ordered, seconds, clock.spans(), tiles)


class _Clock:
    """Record when the network starts and finishes each batch, on its device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._marks: list[Any] = []
        self._zero: Any = self._now()
        self._started = time.perf_counter()

    def _now(self) -> Any:
        if self._device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Wait for all work so far, and reset the clock."""
        if self._device != "cpu":
            torch.cuda.synchronize()
        self._marks.clear()
        self._zero, self._started = self._now(), time.perf_counter()

    def batch_started(self) -> None:
        """Record the start of a batch."""
        self._marks.append(self._now())

    def batch_submitted(self) -> None:
        """Record the end of the batch; the device sets the time when it gets there."""
        self._marks.append(self._now())
        # Limit the queue on the device.
        if self._device != "cpu" and len(self._marks) > 2 * WAITING:
            self._marks[-2 * WAITING - 1].synchronize()

    def stop(self) -> float:
        """Wait for all work, and return the seconds since the start."""
        if self._device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - self._started

    def spans(self) -> list[tuple[float, float]]:
        """Return start and end of each batch, in seconds since the start."""
        zero = self._zero
        times = [
            mark - zero if self._device == "cpu" else zero.elapsed_time(mark) / 1000
            for mark in self._marks
        ]
        return list(zip(times[::2], times[1::2], strict=True))


class ByOpenSlide:
    """The same tiles from OpenSlide, one at a time: read at level 0 and averaged by Pillow."""

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
    """Run the command line."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("slide", type=Path)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--mpp", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--compare", choices=("openslide",), help="run this reader too")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tiles", type=int, help="limit the number of tiles")
    parser.add_argument("--json", type=Path, help="write figures and time lines to this file")
    parser.add_argument("--out", type=Path, help="write vectors and locations to this file")
    options = parser.parse_args()
    with open_slide(options.slide) as slide:
        finest = (slide.mpp or (options.mpp, options.mpp))[0]
    patches = Patches.grid([options.slide], options.size, mpp=options.mpp, inside=find_tissue)
    patches = patches[: options.tiles]
    print(patches, flush=True)
    network = make_network(options.device)
    stream = PatchStream(patches, options.batch, device=options.device)
    runs = {"ours": embed(stream, network, options.device, len(patches))}
    stream.close()
    if options.compare:
        loader = DataLoader(
            ByOpenSlide(patches, finest),
            options.batch,
            num_workers=options.processes,
            pin_memory=options.device != "cpu",
        )
        runs["OpenSlide"] = embed(loader, network, options.device, len(patches))
    record = {}
    for name, run in runs.items():
        rate = run.tiles / run.seconds
        print(f"{name}: {rate:,.0f} tiles/s, network busy {run.busy:.1%}\n  {run.line}")
        record[name] = {"tiles_per_second": rate, "busy": run.busy, "spans": run.spans}
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    if options.out is not None:
        np.savez(options.out, vectors=runs["ours"].vectors, locations=patches.locations)


if __name__ == "__main__":
    main()
