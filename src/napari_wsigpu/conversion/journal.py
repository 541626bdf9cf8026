"""The journal of a conversion: a record of the written tiles, to resume from after a crash."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.conversion.checksum import crc32
from napari_wsigpu.model.errors import ConversionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from napari_wsigpu.model.arrays import Array

RECORD = np.dtype(
    [
        ("level", "<u4"),
        ("plane", "<u4"),
        ("row", "<u4"),
        ("column", "<u4"),
        ("offset", "<i8"),
        ("count", "<i8"),
        ("check", "<u4"),
        ("seal", "<u4"),  # CRC-32 of the fields before it
    ]
)
SEALED = RECORD.fields["seal"][1] if RECORD.fields else 0


class Journal:
    """Offsets and checksums of written tiles, in memory and, after `commit`, in a file.

    The file stays locked while the journal is open, so that two conversions never write to the
    same target.

    Parameters
    ----------
    path : Path
        The journal file. If it belongs to another conversion, it is truncated.
    identity : Mapping
        The source and the options of the conversion; JSON-serializable.
    shapes : sequence of tuple of int
        (planes, rows, columns) of the tiles of each level.

    Attributes
    ----------
    offsets, counts : list of ndarray of int64, shape (planes, rows, columns)
        Offset and length in bytes of each level's tiles in the data; the length is -1 for tiles
        that are not written.
    checks : list of ndarray of uint32, shape (planes, rows, columns)
        CRC-32 of the bytes written for each tile.
    found : bool
        Whether the file existed and has the same identity.
    changed : str or None
        Why an existing file can't be continued, as a clause for messages.

    Raises
    ------
    ConversionError
        If another conversion has the file open.
    OSError
        If the file cannot be read or written.
    """

    def __init__(
        self, path: Path, identity: Mapping[str, object], shapes: Sequence[tuple[int, int, int]]
    ) -> None:
        self.offsets = [np.zeros(shape, np.int64) for shape in shapes]
        self.counts = [np.full(shape, -1, np.int64) for shape in shapes]
        self.checks = [np.zeros(shape, np.uint32) for shape in shapes]
        self.changed: str | None = None
        self._pending: list[tuple[int, ...]] = []
        self._file = open(path, "a+b", opener=no_link)  # noqa: SIM115 - kept open
        try:
            _lock(self._file.fileno(), path)
            self._file.seek(0)
            old, end, records = self._file.readline(), self._file.tell(), self._file.read()
            head = json.dumps(identity, sort_keys=True).encode() + b"\n"
            self.found = old == head
            self._head = b"" if self.found else head
            if self.found:
                whole = _intact_length(records)
                self._load(np.frombuffer(records[:whole], RECORD))
                self._file.truncate(end + whole)
            else:
                self.changed = _difference(old, identity) if old else None
                self._file.truncate(0)
        except BaseException:
            self._file.close()
            raise

    def add(
        self, level: int, plane: int, row: int, column: int, offset: int, count: int, check: int
    ) -> None:
        """Record that a tile is written; `commit` makes the record permanent."""
        self.offsets[level][plane, row, column] = offset
        self.counts[level][plane, row, column] = count
        self.checks[level][plane, row, column] = check
        self._pending.append((level, plane, row, column, offset, count, check, 0))

    def forget(self, level: int, tiles: NDArray[np.bool_]) -> None:
        """Mark tiles as not written; `tiles` has shape (rows, columns)."""
        self.offsets[level][:, tiles] = 0
        self.counts[level][:, tiles] = -1

    def skip(self, level: int, tiles: NDArray[np.bool_]) -> None:
        """Mark tiles that need no data as done; `tiles` has shape (rows, columns)."""
        self.offsets[level][:, tiles] = 0
        self.counts[level][:, tiles] = 0

    def commit(self) -> None:
        """Append the new records to the file.

        The tile data must be on disk already: after a crash, the journal is trusted.
        """
        records = np.array(self._pending, RECORD)
        records["seal"] = _seals_of(records.tobytes())
        self._file.write(self._head + records.tobytes())
        self._file.flush()
        self._head, self._pending = b"", []

    def is_done(self, level: int) -> NDArray[np.bool_]:
        """Return a mask of the complete tiles of a level, shape (rows, columns)."""
        done: NDArray[np.bool_] = np.logical_and.reduce(self.counts[level] >= 0, axis=0)
        return done

    @property
    def tiles_done(self) -> int:
        """Number of complete tiles in all levels."""
        return sum(int(self.is_done(level).sum()) for level in range(len(self.counts)))

    @property
    def end(self) -> int:
        """Offset just past the last byte of tile data."""
        pairs = zip(self.offsets, self.counts, strict=True)
        return max((int((o + np.maximum(c, 0)).max(initial=0)) for o, c in pairs), default=0)

    def close(self) -> None:
        """Close the file, which releases its lock."""
        self._file.close()

    def _load(self, records: Array) -> None:
        for level, (offsets, counts) in enumerate(zip(self.offsets, self.counts, strict=True)):
            of_level = records[records["level"] == level]
            tiles = of_level["plane"], of_level["row"], of_level["column"]
            offsets[tiles] = of_level["offset"]
            counts[tiles] = of_level["count"]
            self.checks[level][tiles] = of_level["check"]


def no_link(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file of an unfinished conversion without following a symbolic link."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _seals_of(records: bytes) -> list[int]:
    """Return the seal that each record must have."""
    view = memoryview(records)
    return [crc32(view[at : at + SEALED]) for at in range(0, len(view), RECORD.itemsize)]


def _intact_length(records: bytes) -> int:
    """Return the number of bytes before the first truncated or damaged record."""
    whole = len(records) // RECORD.itemsize * RECORD.itemsize
    wrong = np.frombuffer(records[:whole], RECORD)["seal"] != _seals_of(records[:whole])
    return int(wrong.argmax()) * RECORD.itemsize if wrong.any() else whole


def _difference(old: bytes, identity: Mapping[str, object]) -> str:
    try:
        found = json.loads(old)
        same_source = found["source"] == identity["source"]
    except (ValueError, KeyError, TypeError):
        return "its journal is damaged"
    return "the options have changed" if same_source else "the source has changed"


def _lock(handle: int, path: Path) -> None:
    """Lock a file until it is closed or the process ends."""
    if sys.platform == "win32":  # Windows does not let an open file be replaced anyway
        return
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConversionError(
            f"Another conversion is writing to '{path.parent}'; "
            "wait until it is done, or choose another target."
        ) from None
