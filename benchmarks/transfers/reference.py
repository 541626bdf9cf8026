"""A level's right pixels: tile by tile by tifffile, by zarr-python, or by our own CPU decoder."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from tifffile import TiffFile, TiffPage

    from napari_wsigpu.model.layout import LevelLayout

BAND = 1024


class Region(NamedTuple):
    """A rectangle in the pixels of a level."""

    left: int
    top: int
    width: int
    height: int


class TiffReference:
    """Pages as tifffile and imagecodecs decode it.

    Parameters
    ----------
    file : TiffFile
        The open file.
    pages : sequence of TiffPage
        The pages that hold the level.
    image : LevelLayout
        The level.
    """

    name = "tifffile"

    def __init__(self, file: TiffFile, pages: Sequence[TiffPage], image: LevelLayout) -> None:
        self._file = file.filehandle
        self._image = image
        self._places = {
            offset: (page, index) for page in pages for index, offset in enumerate(page.dataoffsets)
        }
        self._lock = threading.Lock()

    def difference(self, region: Region, pixels: NDArray[Any]) -> float:
        """Return the largest difference of any sample of the tiles that the file holds."""
        grid = self._image.grid
        rows = range(
            region.top // grid.tile_height, -(-(region.top + region.height) // grid.tile_height)
        )
        columns = range(
            region.left // grid.tile_width, -(-(region.left + region.width) // grid.tile_width)
        )
        cells = [
            (plane, row, column)
            for plane in range(grid.planes)
            for row in rows
            for column in columns
            if grid.byte_counts[plane, row, column]
        ]
        with ThreadPoolExecutor() as pool:
            return max(pool.map(lambda cell: self._apart(region, pixels, *cell), cells), default=0)

    def _apart(
        self, region: Region, pixels: NDArray[Any], plane: int, row: int, column: int
    ) -> float:
        grid = self._image.grid
        offset = int(grid.offsets[plane, row, column])
        page, index = self._places[offset]
        with self._lock:
            # tifffile reads tags when they are first asked for, by the same handle.
            decode, tables = page.decode, page.jpegtables
            self._file.seek(offset)
            data = self._file.read(int(grid.byte_counts[plane, row, column]))
        tile: Any = decode(data, index, jpegtables=tables)
        top, left = row * grid.tile_height, column * grid.tile_width
        height, width = tile[0].shape[1:3]
        bottom = min(top + height, region.top + region.height)
        right = min(left + width, region.left + region.width)
        y, x = max(top, region.top), max(left, region.left)
        found = pixels[y - region.top : bottom - region.top, x - region.left : right - region.left]
        if grid.planes > 1:
            found = found[..., plane : plane + 1]
        return largest_difference(
            found, tile[0][0, y - top : bottom - top, x - left : right - left]
        )


class ReaderReference:
    """A level as another reader has it, where tifffile has no such page.

    Parameters
    ----------
    name : str
        The reader.
    read : callable
        Returns the pixels of a region, shape (height, width, channels).
    """

    def __init__(self, name: str, read: Callable[[Region], NDArray[Any]]) -> None:
        self.name = name
        self._read = read

    def difference(self, region: Region, pixels: NDArray[Any]) -> float:
        """Return the largest difference of any sample."""
        largest = 0.0
        for top in range(0, region.height, BAND):
            height = min(BAND, region.height - top)
            expected = self._read(region._replace(top=region.top + top, height=height))
            largest = max(largest, largest_difference(pixels[top : top + height], expected))
        return largest


def find_pages(file: TiffFile, image: LevelLayout) -> list[TiffPage]:
    """Return the pages whose tiles or strips are those of a level; none if some are not.

    They are in the order of the channels.
    """
    held = image.grid.offsets[image.grid.byte_counts > 0]
    if image.computed or image.parts or image.encoding.jpeg_header is not None or not held.size:
        return []
    order = {offset: place for place, offset in enumerate(image.grid.offsets.ravel().tolist())}
    pages = [page for page in _pages(file.pages) if np.isin(page.dataoffsets, held).any()]
    pages.sort(key=lambda page: min(order.get(offset, held.size) for offset in page.dataoffsets))
    offsets = [offset for page in pages for offset in page.dataoffsets]
    return pages if np.isin(held, offsets).all() else []


def largest_difference(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the largest difference of any sample; infinite where shapes differ."""
    if found.shape != expected.shape:
        return float("inf")
    if np.array_equal(found, expected):
        return 0
    return float(np.abs(found.astype(np.float64) - expected).max())


def _pages(pages: Any) -> Iterator[Any]:
    for page in pages:
        yield page
        yield from _pages(page.pages or ())
