"""Find the tissue on the slides of a folder, and measure its stains per tile, on all cores or GPUs.

Usage: ``python examples/tissue_and_stain.py FOLDER [--workers 2 | --cuda | --scheduler ADDRESS]``

Needs ``pip install "napari-wsigpu[dask]"``. Each worker is a process with one thread; without
options, this process does all the work. ``--cuda`` starts one worker per GPU, which decodes and
measures tiles there and returns only results. ``--scheduler`` uses a running cluster, whose
machines must reach the slides by the same paths.

The results are written as JSON to standard output or to ``--json``. Each slide has its share of
tissue, found by Otsu's threshold on the saturation of a coarse level. A table lists, for each tile
of level 0 that is at least half tissue, the mean and standard deviation of the optical densities of
haematoxylin and eosin, separated as by Ruifrok and Johnston. Every chunk goes through the same
arithmetic, so CPU results are identical to the last bit for any number of workers; GPU results are
as close as the GPU's decoder is to the CPU's. A slide that cannot be decoded gets its error
instead, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import dask
import dask.array
import numpy as np
from distributed import Client, LocalCluster, Nanny, Scheduler, SpecCluster, as_completed

from napari_wsigpu import Slide, SlideError, open_slide
from napari_wsigpu.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

STAINS = ("haematoxylin", "eosin")
FIGURES = [f"{stain}_{figure}" for stain in STAINS for figure in ("mean", "std")]
# Optical densities of haematoxylin, eosin and DAB in red, green and blue (Ruifrok and Johnston)
COLORS = np.array([[0.65, 0.704, 0.286], [0.072, 0.99, 0.105], [0.268, 0.57, 0.776]])
UNMIX = np.linalg.inv(COLORS / np.linalg.norm(COLORS, axis=1, keepdims=True))[:, : len(STAINS)]
DENSITY = -np.log10(np.maximum(np.arange(256), 1) / 255)
WHITE = 255
LEAST_TISSUE = 0.5
AT_ONCE = 1 << 25  # pixels that a GPU measures at once
SIDE_ON_GPU = 8192  # pixels of a chunk
SETTINGS = {
    # By default workers return memory after each task, and requesting it again takes as long as the
    # work itself.
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 256 << 20,
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 32 << 20,
    # By default each process checks 50 times a second that it responds, and samples its profile 100
    # times.
    "distributed.admin.tick.interval": "1s",
    "distributed.worker.profile.enabled": False,
}
LOCAL: dict[str, Any] = {"host": "127.0.0.1", "dashboard_address": ":0"}


class Tissue(NamedTuple):
    """The tissue of a slide.

    Attributes
    ----------
    threshold : int
        Pixels with a higher saturation (0 to 255) are tissue.
    mask : ndarray of bool, shape (height, width)
        Mask of the coarse level.
    """

    threshold: int
    mask: NDArray[np.bool_]


class StainedTiles(NamedTuple):
    """Measurements of the tiles that are tissue.

    Attributes
    ----------
    positions : ndarray of int, shape (tiles, 2)
        Row and column of each tile, from top to bottom.
    figures : ndarray of float, shape (tiles, 4)
        The `FIGURES` of each tile.
    """

    positions: NDArray[np.int64]
    figures: NDArray[np.float64]


def find_tissue(pixels: NDArray[np.uint8]) -> Tissue:
    """Find tissue by the saturation of RGB pixels."""
    high, low = pixels[..., :3].max(-1).astype(np.int64), pixels[..., :3].min(-1)
    saturation = 255 * (high - low) // np.maximum(high, 1)
    threshold = otsu(np.bincount(saturation.ravel(), minlength=256))
    return Tissue(threshold, saturation > threshold)


def otsu(histogram: NDArray[np.int64]) -> int:
    """Return Otsu's threshold: the value that separates the two classes best."""
    below = histogram.cumsum()[:-1].astype(float)
    above = histogram.sum() - below
    weighted = (histogram * np.arange(len(histogram))).cumsum()
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = weighted[:-1] / below - (weighted[-1] - weighted[:-1]) / above
    return int(np.argmax(np.nan_to_num(below * above * apart**2)))


def tiles_of_tissue(mask: NDArray[np.bool_], slide: Slide) -> NDArray[np.bool_]:
    """Return a mask of the tiles of level 0 that are tissue, shape (rows, columns)."""
    level = slide.layout.levels[0]
    grid = level.grid
    firsts, ends = [], []
    for tile, extent, size in (
        (grid.tile_height, level.height, mask.shape[0]),
        (grid.tile_width, level.width, mask.shape[1]),
    ):
        edges = np.append(np.arange(0, extent, tile), extent) * size / extent
        firsts.append(np.minimum(np.floor(edges[:-1]).astype(int), size - 1))
        ends.append(np.maximum(np.round(edges[1:]).astype(int), firsts[-1] + 1))
    total = np.pad(mask.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    (top, left), (bottom, right) = np.ix_(*firsts), np.ix_(*ends)
    inside = total[bottom, right] - total[top, right] - total[bottom, left] + total[top, left]
    enough: NDArray[np.bool_] = inside >= LEAST_TISSUE * (bottom - top) * (right - left)
    return enough


def measure_stains(pixels: Any, tile: tuple[int, ...]) -> NDArray[np.float64]:
    """Measure the stains in each tile of RGB pixels.

    Parameters
    ----------
    pixels : ndarray or cupy.ndarray of uint8, shape (height, width, channels)
        A chunk of whole tiles; tiles at its lower and right edges may be cut off.
    tile : tuple of int
        (height, width) of a tile.

    Returns
    -------
    ndarray, shape (rows, columns, 4)
        Mean and standard deviation of the optical densities of haematoxylin, then of eosin.
    """
    xp: Any = sys.modules[type(pixels).__module__.partition(".")[0]]  # numpy or cupy
    height, width = pixels.shape[:2]
    # On the CPU, one tile's data stays in the processor's cache; a GPU needs many tiles at once.
    down, across = tile
    if xp is not np:
        down, across = max(1, AT_ONCE // (down * width)) * down, width
    rows = []
    for top in range(0, height, down):
        parts = [
            _stains(xp, pixels[top : top + down, left : left + across], tile)
            for left in range(0, width, across)
        ]
        rows.append(xp.concatenate(parts, axis=1))
    result = xp.concatenate(rows)
    on_host: NDArray[np.float64] = result if xp is np else result.get()
    return on_host


def _stains(xp: Any, pixels: Any, tile: tuple[int, ...]) -> Any:
    """Measure all tiles of a chunk at once, shape (rows, columns, 4)."""
    table = xp.asarray(DENSITY, np.float32)
    height, width = pixels.shape[:2]
    down, across = tile
    rows, columns = -(-height // down), -(-width // across)
    # White has no optical density, so the padding of the last tiles adds nothing to the sums.
    whole = xp.full((rows * down, columns * across, 3), WHITE, np.uint8)
    whole[:height, :width] = pixels[..., :3]
    heights = np.minimum(down, height - down * np.arange(rows))
    widths = np.minimum(across, width - across * np.arange(columns))
    counts = xp.asarray(np.outer(heights, widths))
    red, green, blue = (table[whole[..., channel]] for channel in range(3))
    figures = []
    for stain in UNMIX.T.tolist():
        density = red * stain[0] + green * stain[1] + blue * stain[2]
        density = density.reshape(rows, down, columns, across)
        mean = density.sum((1, 3), dtype=np.float64) / counts
        square = (density * density).sum((1, 3), dtype=np.float64) / counts
        figures += [mean, xp.sqrt(xp.maximum(square - mean * mean, 0))]
    return xp.stack(figures, -1)


def measured(pixels: dask.array.Array, tile: tuple[int, ...]) -> dask.array.Array:
    """Apply `measure_stains` to each chunk; the result has the shape (rows, columns, 4)."""
    counts = (
        tuple(-(-length // side) for length in lengths)
        for lengths, side in zip(pixels.chunks[:2], tile, strict=True)
    )
    nothing = np.empty((0, 0, 0))
    return pixels.map_blocks(measure_stains, tile, chunks=(*counts, (4,)), meta=nothing)


class Sweep:
    """The work on one slide: first its tissue, then its stains.

    Parameters
    ----------
    slide : Slide
        A slide that is open in this process.
    device : str
        Device that holds the chunks of pixels.
    tiles : int, optional
        Tiles per chunk along each axis; by default chunks that suit the device.
    """

    def __init__(self, slide: Slide, device: str = "cpu", tiles: int | None = None) -> None:
        self.slide = slide
        grid = slide.layout.levels[0].grid
        self._tile = grid.tile_height, grid.tile_width
        if tiles is None and device != "cpu":
            tiles = max(1, SIDE_ON_GPU // max(self._tile))
        self._stains = measured(slide.levels[0].to_dask(tiles, device), self._tile)

    def tissue(self) -> Any:
        """Return the task that finds the tissue."""
        coarse = self.slide.level_array(self.slide.pyramid[-1].number)
        return dask.delayed(find_tissue, pure=True)(coarse.to_dask())

    def stains(self, tissue: Tissue) -> Any:
        """Return the task that measures the tiles of tissue: their `StainedTiles`.

        Chunks without tissue are not decoded.
        """
        selected = tiles_of_tissue(tissue.mask, self.slide)
        chunks = self._stains.to_delayed()[..., 0]
        down, across = self._stains.chunksize[:2]
        corners = [(row * down, column * across) for row, column in np.ndindex(chunks.shape)]
        parts = [
            (corner, chunk)
            for corner, chunk in zip(corners, chunks.flat, strict=True)
            if selected[corner[0] :, corner[1] :][:down, :across].any()
        ]
        return dask.delayed(gather)(parts, selected)

    def refusal(self, error: SlideError) -> dict[str, Any]:
        """Return the error of a slide, JSON-serialisable."""
        return {"path": self.slide.path, "error": str(error)}

    def record(self, tissue: Tissue, tiles: StainedTiles) -> dict[str, Any]:
        """Return the results, JSON-serialisable, with tiles as columns of a table."""
        rows, columns = tiles.positions.T
        return {
            "path": self.slide.path,
            "dimensions": self.slide.dimensions,
            "mpp": self.slide.mpp,
            "tile": self._tile,
            "threshold": tissue.threshold,
            "tissue": float(tissue.mask.mean()),
            "tiles": {"row": rows.tolist(), "column": columns.tolist()}
            | dict(zip(FIGURES, tiles.figures.T.tolist(), strict=True)),
        }


def gather(
    parts: Iterable[tuple[tuple[int, int], NDArray[np.float64]]], selected: NDArray[np.bool_]
) -> StainedTiles:
    """Collect the results of the selected tiles from all chunks."""
    whole = np.empty((*selected.shape, len(FIGURES)))
    for (top, left), figures in parts:
        rows, columns = figures.shape[:2]
        whole[top : top + rows, left : left + columns] = figures
    return StainedTiles(np.argwhere(selected), whole[selected])


def sweep(
    slides: Iterable[Slide],
    client: Client | None = None,
    device: str = "cpu",
    tiles: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Find tissue and measure stains; yield the record of each slide when it is finished.

    The record of a slide that cannot be decoded contains its error.

    Parameters
    ----------
    slides : iterable of Slide
        8-bit RGB slides that are open in this process.
    client : distributed.Client, optional
        Its workers do the work; by default this thread does.
    device : str
        Device that holds the chunks of pixels.
    tiles : int, optional
        Tiles per chunk along each axis.
    """
    work = [Sweep(slide, device, tiles) for slide in slides]
    if client is None:
        for item in work:
            try:
                tissue = item.tissue().compute(scheduler="synchronous")
                found = item.stains(tissue).compute(scheduler="synchronous")
            except SlideError as error:
                yield item.refusal(error)
            else:
                yield item.record(tissue, found)
        return
    tissues: dict[Sweep, Tissue] = {}
    # Without priorities, Dask alternates between tasks submitted within a minute, and all slides
    # finish at the end.
    order = {item: -number for number, item in enumerate(work)}
    whose = {client.compute(item.tissue(), priority=order[item]): item for item in work}
    done = as_completed(list(whose))
    for future in done:
        item = whose.pop(future)
        try:
            found = future.result()
        except SlideError as error:
            yield item.refusal(error)
            continue
        if item in tissues:
            yield item.record(tissues[item], found)
        else:
            tissues[item] = found
            stains = client.compute(item.stains(found), priority=order[item])
            whose[stains] = item
            done.add(stains)


def start_gpu_cluster(count: int | None = None, **options: Any) -> SpecCluster:
    """Start a local cluster with one single-threaded process per GPU.

    ``dask_cuda.LocalCUDACluster`` does this and more if it is installed.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        numbers = visible.split(",")
    else:
        import cupy

        numbers = [str(number) for number in range(cupy.cuda.runtime.getDeviceCount())]
    workers = {
        gpu: {
            "cls": Nanny,
            "options": LOCAL | {"nthreads": 1, "env": {"CUDA_VISIBLE_DEVICES": gpu}} | options,
        }
        for gpu in numbers[:count]
    }
    return SpecCluster(workers, {"cls": Scheduler, "options": {**LOCAL, "port": 0}})


def slides_in(folder: Path, opened: ExitStack) -> Iterator[Slide]:
    """Open the 8-bit RGB slides of a folder, and print why other files are skipped."""
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        try:
            slide = opened.enter_context(open_slide(path))
        except SlideError as error:
            print(f"Skipped: {error}", file=sys.stderr)
            continue
        if slide.layout.rgb and slide.levels[0].dtype == np.uint8:
            yield slide
        else:
            print(f"Skipped: '{path}' is not 8-bit RGB.", file=sys.stderr)


def refuse(sentence: str) -> int:
    """Print an error; return the exit status."""
    print(sentence, file=sys.stderr)
    return 1


def count(text: str) -> int:
    """Parse the number of workers."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 0")
    return int(text)


def write(path: Path, mode: str, text: str = "") -> int:
    """Write to a file, or print why that failed; return the exit status."""
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        return refuse(f"'{path}' can't be written ({error.strerror}); choose another file.")
    return 0


def summary(record: dict[str, Any]) -> str:
    """Return the line that reports a finished slide."""
    name = Path(record["path"]).name
    if "error" in record:
        return f"{name}: {record['error'].removesuffix('.')}"
    return f"{name}: {record['tissue']:.0%} tissue, {len(record['tiles']['row'])} tiles"


def run(options: argparse.Namespace) -> int:
    """Measure the slides of a folder; return the exit status."""
    with ExitStack() as opened:
        try:
            slides = list(slides_in(options.folder, opened))
        except OSError as error:
            return refuse(f"'{options.folder}' can't be read ({error.strerror}); choose a folder.")
        if not slides:
            return refuse(
                f"'{options.folder}' contains no 8-bit RGB slide; choose a folder of slides."
            )
        device = "cuda" if options.cuda else "cpu"
        slides[0].levels[0].to_dask(device=device)  # refuses a device that this process can't use
        client = None
        if options.workers or options.cuda or options.scheduler:
            cluster: Any = options.scheduler
            if options.cuda:
                cluster = opened.enter_context(start_gpu_cluster())
            elif options.workers:
                cluster = opened.enter_context(
                    LocalCluster(n_workers=options.workers, threads_per_worker=1, **LOCAL)
                )
            try:
                client = opened.enter_context(Client(cluster))
            except (OSError, ValueError) as error:
                return refuse(f"No scheduler answers at '{cluster}' ({error}); start one.")
        if options.json and write(options.json, "a"):
            return 1
        begin = time.perf_counter()
        records = []
        for record in sweep(slides, client, device):
            records.append(record)
            seconds = time.perf_counter() - begin
            print(
                f"{len(records)}/{len(slides)} {summary(record)}, {seconds:.1f} s", file=sys.stderr
            )
    lines = map(json.dumps, sorted(records, key=lambda record: record["path"]))
    text = "[{}]".format(",\n".join(lines))
    failed = int(any("error" in record for record in records))
    if options.json:
        return write(options.json, "w", text + "\n") or failed
    print(text)
    return failed


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Measure the stains of a folder's slides.")
    parser.add_argument("folder", type=Path)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--workers", type=count, default=0, help="processes; 0: only this one")
    where.add_argument("--cuda", action="store_true", help="one worker per GPU")
    where.add_argument("--scheduler", help="address of a running cluster")
    parser.add_argument("--json", type=Path, help="file to write instead of standard output")
    dask.config.set(SETTINGS)
    try:
        return run(parser.parse_args())
    except DeviceError as error:
        return refuse(f"Leave out --cuda: {error}")
    except SlideError as error:
        return refuse(str(error))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
