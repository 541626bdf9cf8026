"""Find the tissue of a folder's slides, and measure its stains tile by tile, on all cores or GPUs.

Usage: ``python examples/tissue_and_stain.py FOLDER [--workers 2 | --cuda | --scheduler ADDRESS]``

Needs ``pip install "napari-wsigpu[dask]"``. Each worker is a process with one thread; without
options everything is done in this process. With ``--cuda`` there is one worker a GPU, tiles are
decoded and measured there, and only figures leave it. ``--scheduler`` uses a cluster that runs
already, whose machines reach the slides by the same paths.

What is written, as JSON on standard output or to ``--json``, is for each slide: the share of tissue
(where the saturation of a coarse level is above Otsu's threshold), and as columns of a table, for
each tile of level 0 that is at least half tissue, the mean and the standard deviation of the
optical densities of haematoxylin and eosin, as Ruifrok and Johnston separate them. The same chunks
go through the same arithmetic wherever they are, so figures of CPUs are equal to the last bit,
however many work; those of GPUs are as close as their decoder is to the CPU's. Of a slide that
can't be decoded its error is written instead, and the exit status is 1.
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
AT_ONCE = 1 << 25  # pixels that a GPU measures
SIDE_ON_GPU = 8192  # pixels of a chunk
SETTINGS = {
    # Workers would give memory back at every turn; to get it again takes as long as the work.
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 256 << 20,
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 32 << 20,
    # By default each process looks 50 times a second whether it answers, and 100 times what runs.
    "distributed.admin.tick.interval": "1s",
    "distributed.worker.profile.enabled": False,
}
LOCAL: dict[str, Any] = {"host": "127.0.0.1", "dashboard_address": ":0"}


class Tissue(NamedTuple):
    """Where a slide's tissue is.

    Attributes
    ----------
    threshold : int
        Saturations above it, of 0 to 255, are tissue.
    mask : ndarray of bool, shape (height, width)
        Of the coarse level.
    """

    threshold: int
    mask: NDArray[np.bool_]


class StainedTiles(NamedTuple):
    """What was measured of the tiles that are tissue.

    Attributes
    ----------
    places : ndarray of int, shape (tiles, 2)
        Their rows and columns, from top to bottom.
    figures : ndarray of float, shape (tiles, 4)
        The `FIGURES` of each.
    """

    places: NDArray[np.int64]
    figures: NDArray[np.float64]


def find_tissue(pixels: NDArray[np.uint8]) -> Tissue:
    """Tell tissue from glass by the saturation of RGB pixels."""
    high, low = pixels[..., :3].max(-1).astype(np.int64), pixels[..., :3].min(-1)
    saturation = 255 * (high - low) // np.maximum(high, 1)
    threshold = otsu(np.bincount(saturation.ravel(), minlength=256))
    return Tissue(threshold, saturation > threshold)


def otsu(histogram: NDArray[np.int64]) -> int:
    """Return the value up to which and above which the two classes differ most."""
    below = histogram.cumsum()[:-1].astype(float)
    above = histogram.sum() - below
    weighted = (histogram * np.arange(len(histogram))).cumsum()
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = weighted[:-1] / below - (weighted[-1] - weighted[:-1]) / above
    return int(np.argmax(np.nan_to_num(below * above * apart**2)))


def tiles_of_tissue(mask: NDArray[np.bool_], slide: Slide) -> NDArray[np.bool_]:
    """Return which tiles of level 0 are tissue, shape (rows, columns)."""
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
        A chunk of whole tiles; those at its lower and right edges may be cut.
    tile : tuple of int
        (height, width) of a tile.

    Returns
    -------
    ndarray, shape (rows, columns, 4)
        Mean and standard deviation of the optical densities of haematoxylin, then of eosin.
    """
    xp: Any = sys.modules[type(pixels).__module__.partition(".")[0]]  # numpy or cupy
    height, width = pixels.shape[:2]
    # A tile's numbers stay in a processor's cache; a GPU would rather have many tiles at once.
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
    # White has no density, so what fills up the last tiles adds nothing to the sums.
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
    """Return what `measure_stains` finds in each chunk, shape (rows, columns, 4)."""
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
        Where chunks of pixels shall be.
    tiles : int, optional
        Tiles a chunk along each axis; by default chunks that suit the device.
    """

    def __init__(self, slide: Slide, device: str = "cpu", tiles: int | None = None) -> None:
        self.slide = slide
        grid = slide.layout.levels[0].grid
        self._tile = grid.tile_height, grid.tile_width
        if tiles is None and device != "cpu":
            tiles = max(1, SIDE_ON_GPU // max(self._tile))
        self._stains = measured(slide.levels[0].to_dask(tiles, device), self._tile)

    def tissue(self) -> Any:
        """Return the task that finds tissue."""
        coarse = self.slide.level_array(self.slide.pyramid[-1].number)
        return dask.delayed(find_tissue, pure=True)(coarse.to_dask())

    def stains(self, tissue: Tissue) -> Any:
        """Return the task that has tiles of tissue measured: their `StainedTiles`.

        Chunks without one are not decoded.
        """
        wanted = tiles_of_tissue(tissue.mask, self.slide)
        chunks = self._stains.to_delayed()[..., 0]
        down, across = self._stains.chunksize[:2]
        corners = [(row * down, column * across) for row, column in np.ndindex(chunks.shape)]
        parts = [
            (corner, chunk)
            for corner, chunk in zip(corners, chunks.flat, strict=True)
            if wanted[corner[0] :, corner[1] :][:down, :across].any()
        ]
        return dask.delayed(gather)(parts, wanted)

    def refusal(self, error: SlideError) -> dict[str, Any]:
        """Return why nothing was found, JSON-serialisable."""
        return {"path": self.slide.path, "error": str(error)}

    def record(self, tissue: Tissue, tiles: StainedTiles) -> dict[str, Any]:
        """Return what was found, JSON-serialisable; tiles as columns of a table."""
        rows, columns = tiles.places.T
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
    parts: Iterable[tuple[tuple[int, int], NDArray[np.float64]]], wanted: NDArray[np.bool_]
) -> StainedTiles:
    """Pick the wanted tiles' figures out of those of chunks."""
    whole = np.empty((*wanted.shape, len(FIGURES)))
    for (top, left), figures in parts:
        rows, columns = figures.shape[:2]
        whole[top : top + rows, left : left + columns] = figures
    return StainedTiles(np.argwhere(wanted), whole[wanted])


def sweep(
    slides: Iterable[Slide],
    client: Client | None = None,
    device: str = "cpu",
    tiles: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Find tissue and measure stains of slides; yield each one's record when it is done.

    That of a slide that can't be decoded says why.

    Parameters
    ----------
    slides : iterable of Slide
        Of 8-bit RGB, open in this process.
    client : distributed.Client, optional
        Whose workers do it; by default this thread does.
    device : str
        Where chunks of pixels shall be.
    tiles : int, optional
        Tiles a chunk along each axis.
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
    # What is asked for within a minute is otherwise done in turns, and all slides come at the end.
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


def one_worker_a_gpu(count: int | None = None, **options: Any) -> SpecCluster:
    """Start a cluster on this machine with one process for each GPU, each with one thread.

    ``dask_cuda.LocalCUDACluster`` does this and more, where it is installed.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given:
        there = given.split(",")
    else:
        import cupy

        there = [str(number) for number in range(cupy.cuda.runtime.getDeviceCount())]
    workers = {
        gpu: {
            "cls": Nanny,
            "options": LOCAL | {"nthreads": 1, "env": {"CUDA_VISIBLE_DEVICES": gpu}} | options,
        }
        for gpu in there[:count]
    }
    return SpecCluster(workers, {"cls": Scheduler, "options": {**LOCAL, "port": 0}})


def slides_in(folder: Path, opened: ExitStack) -> Iterator[Slide]:
    """Open the 8-bit RGB slides of a folder; say of other files why they are left out."""
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        try:
            slide = opened.enter_context(open_slide(path))
        except SlideError as error:
            print(f"Left out: {error}", file=sys.stderr)
            continue
        if slide.layout.rgb and slide.levels[0].dtype == np.uint8:
            yield slide
        else:
            print(f"Left out: '{path}' is not 8-bit RGB.", file=sys.stderr)


def refuse(sentence: str) -> int:
    """Say why nothing is done; return the exit status."""
    print(sentence, file=sys.stderr)
    return 1


def count(text: str) -> int:
    """Return how many workers were asked for."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 0")
    return int(text)


def write(path: Path, mode: str, text: str = "") -> int:
    """Write to a file, or say why that can't be; return the exit status."""
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        return refuse(f"'{path}' can't be written ({error.strerror}); give another file.")
    return 0


def said(record: dict[str, Any]) -> str:
    """Return what is said of a slide when it is done."""
    name = Path(record["path"]).name
    if "error" in record:
        return f"{name}: {record['error'].removesuffix('.')}"
    return f"{name}: {record['tissue']:.0%} tissue, {len(record['tiles']['row'])} tiles"


def run(given: argparse.Namespace) -> int:
    """Measure the slides of a folder; return the exit status."""
    with ExitStack() as opened:
        try:
            slides = list(slides_in(given.folder, opened))
        except OSError as error:
            return refuse(f"'{given.folder}' can't be read ({error.strerror}); give a folder.")
        if not slides:
            return refuse(f"'{given.folder}' holds no 8-bit RGB slide; give a folder of slides.")
        device = "cuda" if given.cuda else "cpu"
        slides[0].levels[0].to_dask(device=device)  # refuses a device that this process can't use
        client = None
        if given.workers or given.cuda or given.scheduler:
            cluster: Any = given.scheduler
            if given.cuda:
                cluster = opened.enter_context(one_worker_a_gpu())
            elif given.workers:
                cluster = opened.enter_context(
                    LocalCluster(n_workers=given.workers, threads_per_worker=1, **LOCAL)
                )
            try:
                client = opened.enter_context(Client(cluster))
            except (OSError, ValueError) as error:
                return refuse(f"There is no scheduler at '{cluster}' ({error}); start one.")
        if given.json and write(given.json, "a"):
            return 1
        begin = time.perf_counter()
        records = []
        for record in sweep(slides, client, device):
            records.append(record)
            seconds = time.perf_counter() - begin
            print(f"{len(records)}/{len(slides)} {said(record)}, {seconds:.1f} s", file=sys.stderr)
    lines = map(json.dumps, sorted(records, key=lambda record: record["path"]))
    text = "[{}]".format(",\n".join(lines))
    failed = int(any("error" in record for record in records))
    if given.json:
        return write(given.json, "w", text + "\n") or failed
    print(text)
    return failed


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Measure the stains of a folder's slides.")
    parser.add_argument("folder", type=Path)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--workers", type=count, default=0, help="processes; 0: only this one")
    where.add_argument("--cuda", action="store_true", help="one worker a GPU")
    where.add_argument("--scheduler", help="address of a cluster that runs already")
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
