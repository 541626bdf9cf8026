"""Readers of patches: ours, the installed peers, and decoding alone."""

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

Position: TypeAlias = tuple[int, int]
# Prepares reading patches at positions; the returned function is timed and returns their number.
Reader: TypeAlias = "Callable[[Sequence[Position]], Callable[[], int]]"

CUCIM_BATCH, CUCIM_PREFETCH = 64, 4
OPENSLIDE_CACHE = 32 << 20
TOGETHER = 1024
JPEG = 7


def regions(slide: Slide, device: str, side: int, batch: int, mpp: float | None = None) -> Reader:
    """Return a reader that uses `Slide.read_regions`."""

    def prepare(positions: Sequence[Position]) -> Callable[[], int]:
        slide.clear_cache()
        return lambda: _count(
            slide.read_regions(positions, (side, side), batch_size=batch, device=device, mpp=mpp),
            device,
        )

    return prepare


def tiles(slide: Slide, device: str, side: int, batch: int, mpp: float | None = None) -> Reader:
    """Return a reader of a grid with `Slide.tiles`, for as many patches as positions."""

    def prepare(positions: Sequence[Position]) -> Callable[[], int]:
        def work() -> int:
            grid = slide.tiles(side, batch_size=batch, device=device, mpp=mpp)
            return _count((pixels for pixels, _ in grid), device, len(positions))

        slide.clear_cache()
        return work

    return prepare


def _count(batches: Iterable[Any], device: str, most: float = float("inf")) -> int:
    """Take batches until enough patches have come; return their number."""
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
        The slide; each reader opens it again before it is timed.
    threads : int
        Number of reading threads.
    side, span : int
        Side of a patch in pixels, and in pixels of level 0: equal, or a multiple that Pillow
        averages.
    """
    found: dict[str, Reader] = {}
    with suppress(ImportError):
        cucim = import_module("cucim")

        def by_cucim(positions: Sequence[Position]) -> Callable[[], int]:
            image = cucim.CuImage(str(path))
            options = {"num_workers": threads, "prefetch_factor": CUCIM_PREFETCH}
            size = (side, side)
            return lambda: sum(
                len(np.asarray(batch))
                for batch in image.read_region(positions, size, batch_size=CUCIM_BATCH, **options)
            )

        if span == side:
            found["cuCIM"] = by_cucim
    with suppress(ImportError):
        openslide = import_module("openslide")

        def by_openslide(positions: Sequence[Position]) -> Callable[[], int]:
            slide = openslide.OpenSlide(path)
            slide.set_cache(openslide.OpenSlideCache(OPENSLIDE_CACHE))
            read = slide.read_region
            return lambda: _pooled(
                threads,
                lambda position: _averaged(read(position, 0, (span, span)), span // side),
                positions,
            )

        found["OpenSlide"] = by_openslide
    with suppress(ImportError):
        fastslide = import_module("fastslide")

        def by_fastslide(positions: Sequence[Position]) -> Callable[[], int]:
            read = fastslide.FastSlide.from_file_path(str(path)).read_region
            return lambda: _pooled(
                threads,
                lambda position: _averaged(read(position, 0, (span, span)).numpy(), span // side),
                positions,
            )

        found["FastSlide"] = by_fastslide
    return found


def _averaged(pixels: Any, factor: int) -> NDArray[Any]:
    if factor == 1:
        return np.asarray(pixels)
    picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    return np.asarray(picture.reduce(factor))


def _pooled(threads: int, read: Callable[[Any], Any], items: Sequence[Any]) -> int:
    """Read and drop items in threads; return their number."""

    def dropped(item: Any) -> int:
        read(item)
        return 1

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(dropped, items))


class FileTiles:
    """The tiles of a TIFF file's first level, decoded by tifffile and imagecodecs.

    Parameters
    ----------
    path : Path
        The file.
    threads : int
        Number of decoding threads.
    """

    def __init__(self, path: Path, threads: int) -> None:
        self._threads = threads
        self._file = os.open(path, os.O_RDONLY)
        self._page: Any = tifffile.TiffFile(path).pages.first
        self._offsets, self._lengths = self._page.dataoffsets, self._page.databytecounts
        self._tile = self._page.tilewidth, self._page.tilelength
        self._across = -(-self._page.imagewidth // self._tile[0])

    def alone(self, span: int) -> Reader:
        """Return a reader that decodes the tiles of patches (once per thousand) without pasting."""

        def prepare(positions: Sequence[Position]) -> Callable[[], int]:
            wanted: list[int] = []
            for first in range(0, len(positions), TOGETHER):
                group = positions[first : first + TOGETHER]
                wanted += dict.fromkeys(
                    tile for position in group for tile in self._under(position, span)
                )
            step = max(1, -(-len(wanted) // (8 * self._threads)))
            parts = [wanted[first : first + step] for first in range(0, len(wanted), step)]
            return lambda: _pooled(self._threads, self._decode_all, parts) and len(positions)

        return prepare

    def patch(self, position: Position, side: int, factor: int) -> NDArray[np.uint8]:
        """Return a patch; each pixel is the mean of `factor` x `factor`, rounded half up."""
        span, (width, height) = side * factor, self._tile
        left, top = position[0] // width * width, position[1] // height * height
        columns, rows = (
            -(-(at + span) // size) for at, size in zip(position, self._tile, strict=True)
        )
        shape = rows * height - top, columns * width - left, 3
        pasted = np.empty(shape, np.uint8)
        for tile in self._under(position, span):
            y, x = tile // self._across * height - top, tile % self._across * width - left
            pasted[y : y + height, x : x + width] = self._decode(tile)
        x, y = position[0] - left, position[1] - top
        pixels = pasted[y : y + span, x : x + span].astype(np.uint32)
        sums = pixels.reshape(side, factor, side, factor, 3).sum((1, 3))
        mean: NDArray[np.uint8] = ((sums + factor**2 // 2) // factor**2).astype(np.uint8)
        return mean

    def _under(self, position: Position, span: int) -> list[int]:
        columns, rows = (
            range(at // size, (at + span - 1) // size + 1)
            for at, size in zip(position, self._tile, strict=True)
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
