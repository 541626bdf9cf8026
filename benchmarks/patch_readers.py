"""Who reads patches: we, the peers that are installed, and decoders alone."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import imagecodecs
import numpy as np
import tifffile
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from napari_wsigpu import Slide

Place: TypeAlias = tuple[int, int]
# Prepares to read patches at places, and returns what is timed: it returns their number.
Reader: TypeAlias = "Callable[[Sequence[Place]], Callable[[], int]]"

CUCIM_BATCH, CUCIM_PREFETCH = 64, 4
OPENSLIDE_CACHE = 32 << 20
TOGETHER = 1024
JPEG = 7


def regions(slide: Slide, device: str, side: int, batch: int, mpp: float | None = None) -> Reader:
    """Return what reads patches by `Slide.read_regions`."""

    def prepare(places: Sequence[Place]) -> Callable[[], int]:
        slide.clear_cache()
        return lambda: _count(
            slide.read_regions(places, (side, side), batch_size=batch, device=device, mpp=mpp),
            device,
        )

    return prepare


def tiles(slide: Slide, device: str, side: int, batch: int, mpp: float | None = None) -> Reader:
    """Return what reads a grid by `Slide.tiles`, as many patches as there are places."""

    def prepare(places: Sequence[Place]) -> Callable[[], int]:
        def work() -> int:
            grid = slide.tiles(side, batch_size=batch, device=device, mpp=mpp)
            return _count((pixels for pixels, _ in grid), device, len(places))

        slide.clear_cache()
        return work

    return prepare


def _count(batches: Iterable[Any], device: str, most: float = float("inf")) -> int:
    """Take batches until there are so many patches; return how many there were."""
    count = 0
    for batch in batches:
        count += len(batch)
        if count >= most:
            break
    if device != "cpu":
        import_module("cupy").cuda.Device(0).synchronize()
    return count


def peers(path: Path, threads: int, side: int, span: int) -> dict[str, Reader]:
    """Return the peers that are installed.

    Parameters
    ----------
    path : Path
        The slide, which each opens anew before it is timed.
    threads : int
        How many read.
    side, span : int
        Pixels of a patch, and of level 0 that it shows: as many, or a multiple that is averaged
        by Pillow.
    """
    found: dict[str, Reader] = {}
    with suppress(ImportError):
        cucim = import_module("cucim")

        def by_cucim(places: Sequence[Place]) -> Callable[[], int]:
            image = cucim.CuImage(str(path))
            options = {"num_workers": threads, "prefetch_factor": CUCIM_PREFETCH}
            size = (side, side)
            return lambda: sum(
                len(np.asarray(batch))
                for batch in image.read_region(places, size, batch_size=CUCIM_BATCH, **options)
            )

        if span == side:
            found["cuCIM"] = by_cucim
    with suppress(ImportError):
        openslide = import_module("openslide")

        def by_openslide(places: Sequence[Place]) -> Callable[[], int]:
            slide = openslide.OpenSlide(path)
            slide.set_cache(openslide.OpenSlideCache(OPENSLIDE_CACHE))
            read = slide.read_region
            return lambda: _pooled(
                threads, lambda place: _averaged(read(place, 0, (span, span)), span // side), places
            )

        found["OpenSlide"] = by_openslide
    with suppress(ImportError):
        fastslide = import_module("fastslide")

        def by_fastslide(places: Sequence[Place]) -> Callable[[], int]:
            read = fastslide.FastSlide.from_file_path(str(path)).read_region
            return lambda: _pooled(
                threads,
                lambda place: _averaged(read(place, 0, (span, span)).numpy(), span // side),
                places,
            )

        found["FastSlide"] = by_fastslide
    return found


def _averaged(pixels: Any, factor: int) -> NDArray[Any]:
    if factor == 1:
        return np.asarray(pixels)
    picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    return np.asarray(picture.reduce(factor))


def _pooled(threads: int, read: Callable[[Any], Any], items: Sequence[Any]) -> int:
    """Have threads read and drop items; return their number."""

    def dropped(item: Any) -> int:
        read(item)
        return 1

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(dropped, items))


class FileTiles:
    """The tiles of a TIFF file's first level, by tifffile and imagecodecs.

    Parameters
    ----------
    path : Path
        The file.
    threads : int
        How many decode.
    """

    def __init__(self, path: Path, threads: int) -> None:
        self._threads = threads
        self._file = os.open(path, os.O_RDONLY)
        self._page: Any = tifffile.TiffFile(path).pages.first
        self._offsets, self._lengths = self._page.dataoffsets, self._page.databytecounts
        self._tile = self._page.tilewidth, self._page.tilelength
        self._across = -(-self._page.imagewidth // self._tile[0])

    def alone(self, span: int) -> Reader:
        """Return what decodes the tiles of patches, each once for a thousand, and pastes none."""

        def prepare(places: Sequence[Place]) -> Callable[[], int]:
            wanted: list[int] = []
            for first in range(0, len(places), TOGETHER):
                group = places[first : first + TOGETHER]
                wanted += dict.fromkeys(
                    tile for place in group for tile in self._under(place, span)
                )
            step = max(1, -(-len(wanted) // (8 * self._threads)))
            parts = [wanted[first : first + step] for first in range(0, len(wanted), step)]
            return lambda: _pooled(self._threads, self._decode_all, parts) and len(places)

        return prepare

    def patch(self, place: Place, side: int, factor: int) -> NDArray[np.uint8]:
        """Return a patch; each pixel is the mean of `factor` x `factor`, rounded half up."""
        span, (width, height) = side * factor, self._tile
        left, top = place[0] // width * width, place[1] // height * height
        columns, rows = (
            -(-(at + span) // size) for at, size in zip(place, self._tile, strict=True)
        )
        shape = rows * height - top, columns * width - left, 3
        pasted = np.empty(shape, np.uint8)
        for tile in self._under(place, span):
            y, x = tile // self._across * height - top, tile % self._across * width - left
            pasted[y : y + height, x : x + width] = self._decode(tile)
        x, y = place[0] - left, place[1] - top
        pixels = pasted[y : y + span, x : x + span].astype(np.uint32)
        sums = pixels.reshape(side, factor, side, factor, 3).sum((1, 3))
        mean: NDArray[np.uint8] = ((sums + factor**2 // 2) // factor**2).astype(np.uint8)
        return mean

    def _under(self, place: Place, span: int) -> list[int]:
        columns, rows = (
            range(at // size, (at + span - 1) // size + 1)
            for at, size in zip(place, self._tile, strict=True)
        )
        return [row * self._across + column for row in rows for column in columns]

    def _decode_all(self, tiles: Sequence[int]) -> None:
        for tile in tiles:
            self._decode(tile)

    def _decode(self, tile: int) -> Any:
        page = self._page
        data = os.pread(self._file, self._lengths[tile], self._offsets[tile])
        if page.compression != JPEG:
            return page.decode(data, tile)[0][0]
        color = page.photometric.name.lower()
        return imagecodecs.jpeg8_decode(
            data, tables=page.jpegtables, colorspace=color, outcolorspace="rgb"
        )
