"""Read Index.dat of a MIRAX slide, which locates images and other records in the data files."""

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


class DataFile(NamedTuple):
    """A data file, and its position if all data files are joined in order.

    Attributes
    ----------
    start : int or None
        Offset of its first byte in the joined files; None if it is missing.
    size : int
        Size in bytes.
    """

    start: int | None
    size: int


class Images(NamedTuple):
    """The images of a level.

    Attributes
    ----------
    numbers : ndarray of int64, shape (images,)
        Positions on the slide, counted row by row.
    offsets, lengths : ndarray of int64, shape (images,)
        Byte ranges in the joined data files.
    lost : int
        Number of images that are missing or truncated.
    """

    numbers: Integers
    offsets: Integers
    lengths: Integers
    lost: int


@dataclass(frozen=True)
class Index:
    """The contents of an index file.

    Attributes
    ----------
    data : bytes
        All bytes of the file.
    root : int
        Offset of its first two pointers: to the images of levels, and to other records.
    data_files : sequence of DataFile
        The data files.
    """

    data: bytes
    root: int
    data_files: Sequence[DataFile]

    @classmethod
    def read(cls, path: Path, slide: str, data_files: Sequence[DataFile]) -> Index:
        """Read the index of the slide with the identifier `slide`.

        Raises
        ------
        ValueError
            If it is missing, too large, or belongs to another slide.
        """
        if not path.is_file():  # opening a pipe would block
            raise ValueError("its index is missing")
        with BoundedReader(path.open("rb", buffering=0)) as file:
            data = file.read(LARGEST + 1)
        head = VERSION + slide.encode()
        if len(data) > LARGEST:
            raise ValueError("its index is too large")
        if not data.startswith(head):
            raise ValueError("its index belongs to another slide, or is damaged")
        return cls(data, len(head), data_files)

    def record(self, number: int) -> tuple[int, int]:
        """Return the byte range, in the joined data files, of a record that is not a level's image.

        Returns
        -------
        tuple of int
            (offset, length).

        Raises
        ------
        ValueError
            If it is missing or truncated.
        """
        page = self._first_page(self._number(self.root + 4) + 4 * number)
        if self._number(page) < 1:
            raise ValueError("a record of its index is empty")
        offset, length, file = (self._number(page + 16 + 4 * i) for i in range(3))
        if not 0 <= file < len(self.data_files) or min(offset, length) < 0:
            raise ValueError("a record of its index lies outside its data files")
        start, size = self.data_files[file]
        if start is None or offset + length > size:
            raise ValueError("a record is missing or truncated")
        return start + offset, length

    def images(self, level: int, most: int) -> Images:
        """Return the images of a level; the last one if several have the same number.

        Raises
        ------
        ValueError
            If the index is damaged, or lists more than `most` images.
        """
        page = self._first_page(self._number(self.root) + 4 * level)
        found, seen, count = [], set[int](), 0
        while page:
            if page in seen:
                raise ValueError(f"the pages of level {level} in its index form a loop")
            seen.add(page)
            length = self._number(page)
            count += length
            if length < 0 or count > most or page + 8 + length * RECORD.itemsize > len(self.data):
                raise ValueError(f"its index lists invalid images of level {level}")
            found.append(np.frombuffer(self.data, RECORD, length, page + 8))
            page = self._number(page + 4)
        records = np.concatenate(found) if found else np.zeros(0, RECORD)
        numbers, last = np.unique(records["image"][::-1], return_index=True)
        records = records[::-1][last]
        files = records["file"]
        count = len(self.data_files)
        if len(records) and (numbers[0] < 0 or files.min() < 0 or files.max() >= count):
            raise ValueError(f"its index lists invalid images of level {level}")
        end = max((start + size for start, size in self.data_files if start is not None), default=0)
        starts = np.array([-1 if file.start is None else file.start for file in self.data_files])
        sizes = np.array([file.size for file in self.data_files])
        offsets, lengths = (records[name].astype(np.int64) for name in ("offset", "length"))
        lost = (starts[files] < 0) | (offsets < 0) | (lengths <= 0)
        lost |= offsets + lengths > sizes[files]
        # A lost image must not be read from the next file.
        offsets = np.where(lost, end, offsets + starts[files])
        return Images(
            numbers.astype(np.int64), offsets, np.maximum(lengths, 1), int(np.count_nonzero(lost))
        )

    def _number(self, offset: int) -> int:
        if not 0 <= offset <= len(self.data) - 4:
            raise ValueError("its index is truncated or damaged")
        return int.from_bytes(self.data[offset : offset + 4], "little", signed=True)

    def _first_page(self, pointer: int) -> int:
        """Return the offset of the first page of a list, from the offset of the list's pointer."""
        return self._number(self._number(pointer) + 4)


def read_positions(data: bytes, photos: tuple[int, int]) -> Integers:
    """Return the positions of photos as (x, y), shape (down, across, 2).

    Raises
    ------
    ValueError
        If the data does not hold a position for each of the `photos`, (down, across).
    """
    if len(data) != photos[0] * photos[1] * POSITION.itemsize:
        raise ValueError("the number of its photos differs from the number of their positions")
    found = np.frombuffer(data, POSITION)
    if (found["flag"] & 0xFE).any():
        raise ValueError("the positions of its photos are damaged")
    return np.stack([found["x"], found["y"]], axis=1).astype(np.int64).reshape(*photos, 2)
