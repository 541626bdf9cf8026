"""Images whose pages are stored in several files, as Micro-Manager and OME writers do."""

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

# Replaces the name of another file in messages, because the name may identify a patient.
SIBLING = "another file"
BEYOND = 1 << 61  # an offset beyond the end of any file
INDEX = "NDTiff.index"
# Bytes of an index entry after its two strings.
PLANE_BYTES = 32
NDTIFF_OFFSET, NDTIFF = 8, struct.pack("<I", 483729)
NO_INDEX = (
    "The file is part of an NDTiff stack, whose index (NDTiff.index) is missing, unreadable or on "
    "a server: channels and planes may be missing; copy all files of the stack to one local folder."
)
SIZES = ("Channels", "Slices", "Frames", "Positions")


class PageFiles:
    """Collects the files that hold the pages of a slide, in the order of their first use.

    The slide's byte offsets run through these files as if they were joined in this order.

    Parameters
    ----------
    file : TiffFile
        The opened file, which comes first.
    source : SlideFile
        Its path, size and modification time.
    series : TiffPageSeries
        The slide's image.
    """

    def __init__(self, file: TiffFile, source: SlideFile, series: TiffPageSeries) -> None:
        self._own = file
        # tifffile resolves links, and looks for the other files where the opened one really is.
        self._folder = Path(file.filehandle.path).parent
        self._files = [source]
        if series.is_multifile:  # so that every plane of the slide gets the same list of files
            for other in dict.fromkeys(page.parent for page in series if page is not None):
                if other is not file:
                    self._index_of(other)

    @property
    def files(self) -> tuple[SlideFile, ...]:
        """All files collected so far."""
        return tuple(self._files)

    @property
    def whole(self) -> SlideFile:
        """The opened file, with the size of all files."""
        return replace(self._files[0], size=sum(file.size for file in self._files))

    def joined(self, grid: TileGrid, pages: Sequence[TiffPage | TiffFrame]) -> TileGrid:
        """Return the grid of `pages` with offsets that run through all files.

        Raises
        ------
        UnsupportedSlideError
            If a page is in another folder, or its encoding differs from the first page's.
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
                    f"'{self._files[0].path}' is one of several files that store images in "
                    "different ways; save them as one file."
                )
            number = 0 if page.parent is self._own else self._index_of(page.parent)
            start = sum(file.size for file in self._files[:number])
            size = self._files[number].size
            part = offsets[index * planes : (index + 1) * planes]
            # A tile beyond its file's end must not be read from the next file.
            part[...] = np.where(part < size, part + start, BEYOND)
        return replace(grid, offsets=offsets)

    def _index_of(self, file: TiffFile) -> int:
        """Return the index of a file in `files`; a new file is added."""
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
    """Check a Micro-Manager stack before tifffile opens its files and lists its planes.

    Raises
    ------
    UnsupportedSlideError
        If it has more planes than the limits allow, or an index names files in other folders.
    CorruptSlideError
        If one of its paths is not a regular file, or the index is damaged.
    """
    folder = Path(file.filehandle.dirname)
    others: Iterable[Path] = ()
    counts: list[int] = []
    if file.is_mmstack:
        others = folder.glob("*_MMStack*.tif")
        metadata = file.micromanager_metadata or {}
        numbers = metadata["IndexMap"][:, : len(SIZES)].max(axis=0).tolist()
        counts = [
            max(number + 1, int(metadata["Summary"].get(name, 1)))
            for number, name in zip(numbers, SIZES, strict=True)
        ]
    elif file.is_ndtiff:
        index = folder / INDEX
        _check_files(file, [index])
        _check_index(index)
        names: set[str] = set()
        positions: dict[str, dict[int | str, None]] = {}  # by axis, as an ordered set
        for axes, name, *_ in read_ndtiff_index(index):
            names.add(name)
            for axis, value in axes.items():
                positions.setdefault(axis, {})[value] = None
        if any(Path(name).name != name for name in names):
            raise _other_folders(file.filehandle.path)
        others = map(folder.joinpath, names)
        counts = [_length(list(values)) for values in positions.values()]
    _check_files(file, others)
    claims.check_planes(file.filename, math.prod(counts))


def _check_index(path: Path) -> None:
    """Refuse an index that declares a string longer than itself, which tifffile would allocate."""
    size, position = path.stat().st_size, 0
    with path.open("rb") as index:
        while position < size:
            for _ in range(2):  # a plane's position along each axis, then the name of its file
                index.seek(position)
                length = int.from_bytes(index.read(4), "little")
                if length > size:
                    raise CorruptSlideError(
                        f"The index of planes '{path}' is damaged; get a fresh copy of it."
                    )
                position += 4 + length
            position += PLANE_BYTES


def _length(positions: Sequence[int | str]) -> int:
    """Return the length of an axis: the number of names, or the range of the numbers."""
    if isinstance(positions[0], str):
        return len(positions)
    numbers = [int(position) for position in positions]
    return max(numbers) - min(numbers) + 1


def _check_files(file: TiffFile, paths: Iterable[Path]) -> None:
    """Refuse paths that exist but are not regular files: opening a pipe would block."""
    if any(path.exists() and not path.is_file() for path in paths):
        raise CorruptSlideError(
            f"'{file.filehandle.path}' belongs to a set of files, one of which is not a regular "
            "file; get a fresh copy of all of them."
        )


def _other_folders(path: str) -> UnsupportedSlideError:
    return UnsupportedSlideError(
        f"'{path}' names files in other folders, which are not read; copy all of them to one "
        "folder and write a new index."
    )


def _is_of_ndtiff(file: TiffFile) -> bool:
    """Whether a file's header marks it as part of an NDTiff stack."""
    file.filehandle.seek(NDTIFF_OFFSET)
    return bool(file.filehandle.read(len(NDTIFF)) == NDTIFF)


def stack_problem(file: TiffFile, series: TiffPageSeries) -> str | None:
    """Return a problem if planes of a stack are missing or occur more than once, else None."""
    if series.kind == "ome":
        stated = len(series.pages)
    elif series.kind == "mmstack":
        summary = (file.micromanager_metadata or {}).get("Summary", {})
        counts = [summary.get(name) for name in SIZES]
        stated = math.prod(count for count in counts if isinstance(count, int) and count > 0)
    elif series.kind == "ndtiff":
        named = read_ndtiff_index(Path(file.filehandle.dirname, INDEX))
        images = Counter(tuple(sorted(axes.items())) for axes, *_ in named)
        if repeated := images.total() - len(images):
            return (
                f"The index lists {repeated} duplicate image(s); the last one of a plane is shown."
            )
        return None
    else:
        return NO_INDEX if _is_of_ndtiff(file) else None
    found = sum(page is not None for page in series.pages)
    if stated <= found:
        return None
    if series.kind == "ome":  # no file is missing, or `ome` would not trust the XML
        return (
            f"The OME-XML declares {stated} planes, but gives a valid page for only {found} of "
            "them; export the image again."
        )
    return (
        f"The stack has {stated} planes, but the files in this folder hold {found}; copy any "
        "missing files to this folder."
    )
