"""The files of an image whose pages lie in several, as those of Micro-Manager and OME do."""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tifffile.tifffile import read_ndtiff_index

from napari_wsigpu.formats.tiff import claims
from napari_wsigpu.model.errors import CorruptSlideError, UnsupportedSlideError, file_error
from napari_wsigpu.model.layout import SlideFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tifffile import TiffFile, TiffFrame, TiffPage, TiffPageSeries

    from napari_wsigpu.model.layout import TileGrid

# What stands for the name of one in sentences.
SIBLING = "another file"
BEYOND = 1 << 61
INDEX = "NDTiff.index"
# What the index says of a plane behind its texts.
PLANE_BYTES = 32
NDTIFF_AT, NDTIFF = 8, struct.pack("<I", 483729)
NO_INDEX = (
    "It is one file of an NDTiff stack, whose index (NDTiff.index) is not beside it or can't be "
    "read, as on servers: channels and planes may be missing; have all of its files in one folder "
    "of this machine."
)
SIZES = ("Channels", "Slices", "Frames", "Positions")


class PageFiles:
    """The files in which the pages of a slide lie, in the order in which they are met.

    Parameters
    ----------
    file : TiffFile
        The file that was opened, which comes first.
    source : SlideFile
        The same as it was found.
    series : TiffPageSeries
        The slide's image.
    """

    def __init__(self, file: TiffFile, source: SlideFile, series: TiffPageSeries) -> None:
        self._own = file
        self._folder = Path(source.path).parent
        self._files = [source]
        if series.is_multifile:  # so that all its planes are of the same files
            for other in dict.fromkeys(page.parent for page in series if page is not None):
                if other is not file:
                    self._number(other)

    @property
    def files(self) -> tuple[SlideFile, ...]:
        """All files met so far."""
        return tuple(self._files)

    @property
    def whole(self) -> SlideFile:
        """The opened file as if it held what all do."""
        return replace(
            self._files[0],
            size=sum(file.size for file in self._files),
            modified_ns=max(file.modified_ns for file in self._files),
        )

    def joined(self, grid: TileGrid, pages: Sequence[TiffPage | TiffFrame]) -> TileGrid:
        """Return a grid of pages, in which offsets count through all files.

        Raises
        ------
        UnsupportedSlideError
            If a page lies in another folder, or is stored in another way than the first one.
        SlideError
            If a file can't be found.
        """
        if all(page.parent is self._own for page in pages):
            return grid
        first = pages[0]
        planes = len(grid.offsets) // len(pages)
        offsets = grid.offsets.copy()
        for index, page in enumerate(pages):
            if (page.hash, page.parent.byteorder) != (first.hash, first.parent.byteorder):
                raise UnsupportedSlideError(
                    f"'{self._files[0].path}' is one of several files, whose images are stored in "
                    "different ways; save them as one file."
                )
            begin, size = self._extent(page)
            part = offsets[index * planes : (index + 1) * planes]
            # What would lie beyond its file's end must not be looked for in the next one.
            part[...] = np.where(part < size, part + begin, BEYOND)
        return replace(grid, offsets=offsets)

    def _extent(self, page: TiffPage | TiffFrame) -> tuple[int, int]:
        """Return where the file of a page begins, and its size."""
        number = 0 if page.parent is self._own else self._number(page.parent)
        return sum(file.size for file in self._files[:number]), self._files[number].size

    def _number(self, file: TiffFile) -> int:
        path = Path(file.filehandle.path)
        if path.parent != self._folder:
            raise _other_folders(self._files[0].path)
        names = [item.path for item in self._files]
        if str(path) in names:
            return names.index(str(path))
        try:
            self._files.append(SlideFile.of(str(path), path.stat()))
        except OSError as error:
            raise file_error(str(path), error) from error
        return len(names)


def check_stack(file: TiffFile) -> None:
    """Refuse a stack of Micro-Manager's before tifffile opens its files and lists its planes.

    Raises
    ------
    UnsupportedSlideError
        If it has more planes than the limits say, or an index names files in other folders.
    CorruptSlideError
        If what is to be one of its files is none.
    """
    folder = Path(file.filehandle.dirname)
    others: Iterable[Path] = ()
    counts: list[int] = []
    if file.is_mmstack:
        others = folder.glob("*_MMStack*.tif")
        told = file.micromanager_metadata or {}
        numbers = told["IndexMap"][:, : len(SIZES)].max(axis=0).tolist()
        counts = [
            max(number + 1, int(told["Summary"].get(name, 1)))
            for number, name in zip(numbers, SIZES, strict=True)
        ]
    elif file.is_ndtiff:
        index = folder / INDEX
        _check_files(file, [index])
        _check_index(index)
        names: set[str] = set()
        places: dict[str, dict[int | str, None]] = {}
        for axes, name, *_ in read_ndtiff_index(index):
            names.add(name)
            for axis, value in axes.items():
                places.setdefault(axis, {})[value] = None
        if any(Path(name).name != name for name in names):
            raise _other_folders(file.filehandle.path)
        others = map(folder.joinpath, names)
        counts = [_length(list(values)) for values in places.values()]
    _check_files(file, others)
    claims.check_planes(file.filename, math.prod(counts))


def _check_index(path: Path) -> None:
    """Refuse an index with a text longer than itself; tifffile would take memory for it first."""
    size, place = path.stat().st_size, 0
    with path.open("rb") as index:
        while place < size:
            for _ in range(2):  # where a plane lies on the axes, and the name of its file
                index.seek(place)
                length = int.from_bytes(index.read(4), "little")
                if length > size:
                    raise CorruptSlideError(
                        f"The index of planes '{path}' is damaged; get a fresh copy of it."
                    )
                place += 4 + length
            place += PLANE_BYTES


def _length(places: Sequence[int | str]) -> int:
    """Return how long an axis is on which these are named or numbered, as the first one is."""
    if isinstance(places[0], str):
        return len(places)
    numbers = [int(place) for place in places]
    return max(numbers) - min(numbers) + 1


def _check_files(file: TiffFile, paths: Iterable[Path]) -> None:
    """Refuse what is there and no file; to open a pipe would wait."""
    if any(path.exists() and not path.is_file() for path in paths):
        raise CorruptSlideError(
            f"'{file.filehandle.path}' is one of several files, of which {SIBLING} is no regular "
            "file; get a fresh copy of all."
        )


def _other_folders(path: str) -> UnsupportedSlideError:
    return UnsupportedSlideError(
        f"'{path}' names files in other folders, which are not read; copy all of them to one "
        "folder and write its index anew."
    )


def _is_of_ndtiff(file: TiffFile) -> bool:
    """Whether a file is one of an NDTiff set, as its header says."""
    file.filehandle.seek(NDTIFF_AT)
    return bool(file.filehandle.read(len(NDTIFF)) == NDTIFF)


def stack_problem(file: TiffFile, series: TiffPageSeries) -> str | None:
    """Say that a stack has more planes than its files here, or several images of one."""
    if series.kind == "ome":
        stated = len(series.pages)
    elif series.kind == "mmstack":
        summary = (file.micromanager_metadata or {}).get("Summary", {})
        counts = [summary.get(name) for name in SIZES]
        stated = math.prod(count for count in counts if isinstance(count, int) and count > 0)
    elif series.kind == "ndtiff":
        named = read_ndtiff_index(Path(file.filehandle.dirname, INDEX))
        images = Counter(tuple(sorted(axes.items())) for axes, *_ in named)
        if again := images.total() - len(images):
            return f"Of {again} plane(s) the index names several images; the last is shown."
        return None
    else:
        return NO_INDEX if _is_of_ndtiff(file) else None
    found = sum(page is not None for page in series.pages)
    if stated <= found:
        return None
    return (
        f"The stack has {stated} planes, but its files here hold {found}; copy all of its files "
        "to one folder, if there are more."
    )
