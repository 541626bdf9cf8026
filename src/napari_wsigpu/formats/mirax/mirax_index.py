"""Index.dat of a MIRAX slide: where images and other records lie in its data files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.storage.bounded import BoundedReader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from napari_wsigpu.model.geometry import Integers

VERSION = b"01.02"
LARGEST = 1 << 29
RECORD = np.dtype([("image", "<i4"), ("offset", "<i4"), ("length", "<i4"), ("file", "<i4")])
POSITION = np.dtype([("flag", "u1"), ("x", "<i4"), ("y", "<i4")])


class Piece(NamedTuple):
    """A data file, as a part of all of them one behind the other.

    Attributes
    ----------
    begin : int or None
        Where it begins; None if it is missing.
    size : int
        Its size in bytes.
    """

    begin: int | None
    size: int


class Images(NamedTuple):
    """The images of a level: their numbers, and where they lie in all data files.

    Attributes
    ----------
    numbers, offsets, lengths : ndarray of int64, shape (images,)
        One entry an image.
    lost : int
        How many of them are not there as a whole.
    """

    numbers: Integers
    offsets: Integers
    lengths: Integers
    lost: int


@dataclass(frozen=True)
class Index:
    """An index that was read.

    Attributes
    ----------
    data : bytes
        The file.
    root : int
        Where its two first pointers are.
    pieces : sequence of Piece
        The data files.
    """

    data: bytes
    root: int
    pieces: Sequence[Piece]

    @classmethod
    def read(cls, path: Path, slide: str, pieces: Sequence[Piece]) -> Index:
        """Read an index, which has to be that of the slide of that identifier.

        Raises
        ------
        ValueError
            If it is missing, another's, or too large.
        """
        if not path.is_file():  # to open a pipe would wait
            raise ValueError("its index is missing")
        with BoundedReader(path.open("rb", buffering=0)) as file:
            data = file.read(LARGEST + 1)
        begin = VERSION + slide.encode()
        if len(data) > LARGEST:
            raise ValueError("its index is too large")
        if not data.startswith(begin):
            raise ValueError("its index is that of another slide, or damaged")
        return cls(data, len(begin), pieces)

    def record(self, number: int) -> tuple[int, int]:
        """Return offset and length, in all data files, of a record that is no image.

        Raises
        ------
        ValueError
            If it is not there as a whole.
        """
        page = self._first_page(self._number(self.root + 4) + 4 * number)
        if self._number(page) < 1:
            raise ValueError("a record of its index is empty")
        offset, length, file = (self._number(page + 16 + 4 * i) for i in range(3))
        if not 0 <= file < len(self.pieces) or min(offset, length) < 0:
            raise ValueError("a record of its index is wrong")
        begin, size = self.pieces[file]
        if begin is None or offset + length > size:
            raise ValueError("a record is missing or cut off")
        return begin + offset, length

    def images(self, level: int, most: int) -> Images:
        """Return the images of a level, at most so many; of those with one number the last.

        Raises
        ------
        ValueError
            If its pages are damaged.
        """
        page = self._first_page(self._number(self.root) + 4 * level)
        found, seen, count = [], set[int](), 0
        while page:
            if page in seen:
                raise ValueError(f"the pages of level {level} in its index go round in a circle")
            seen.add(page)
            length = self._number(page)
            count += length
            if length < 0 or count > most or page + 8 + length * RECORD.itemsize > len(self.data):
                raise ValueError(f"its index lists images of level {level} that can't be")
            found.append(np.frombuffer(self.data, RECORD, length, page + 8))
            page = self._number(page + 4)
        records = np.concatenate(found) if found else np.zeros(0, RECORD)
        numbers, last = np.unique(records["image"][::-1], return_index=True)
        records = records[::-1][last]
        files = records["file"]
        if len(records) and (numbers[0] < 0 or files.min() < 0 or files.max() >= len(self.pieces)):
            raise ValueError(f"its index lists images of level {level} that can't be")
        past = max((begin + size for begin, size in self.pieces if begin is not None), default=0)
        begins = np.array([-1 if piece.begin is None else piece.begin for piece in self.pieces])
        sizes = np.array([piece.size for piece in self.pieces])
        offsets, lengths = (records[name].astype(np.int64) for name in ("offset", "length"))
        lost = (begins[files] < 0) | (offsets < 0) | (lengths <= 0)
        lost |= offsets + lengths > sizes[files]
        offsets = np.where(lost, past, offsets + begins[files])
        return Images(
            numbers.astype(np.int64), offsets, np.maximum(lengths, 1), int(np.count_nonzero(lost))
        )

    def _number(self, offset: int) -> int:
        if not 0 <= offset <= len(self.data) - 4:
            raise ValueError("its index is cut off or damaged")
        return int.from_bytes(self.data[offset : offset + 4], "little", signed=True)

    def _first_page(self, pointer: int) -> int:
        """Return where the first page of a list is, whose pointer lies there."""
        return self._number(self._number(pointer) + 4)


def read_positions(data: bytes, photos: tuple[int, int]) -> Integers:
    """Return where photos lie, shape (down, across, 2), as (x, y).

    Raises
    ------
    ValueError
        If these are not the positions of so many.
    """
    if len(data) != photos[0] * photos[1] * POSITION.itemsize:
        raise ValueError("the positions of its photos are not as many as its photos")
    found = np.frombuffer(data, POSITION)
    if (found["flag"] & 0xFE).any():
        raise ValueError("the positions of its photos are damaged")
    return np.stack([found["x"], found["y"]], axis=1).astype(np.int64).reshape(*photos, 2)
