"""Which tiles of a conversion are written, kept in a file so that a killed one goes on."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.conversion.checksum import crc32
from napari_wsigpu.model.errors import ConversionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

RECORD = np.dtype(
    [
        ("level", "<u4"),
        ("plane", "<u4"),
        ("row", "<u4"),
        ("column", "<u4"),
        ("offset", "<i8"),
        ("count", "<i8"),
        ("check", "<u4"),
        ("seal", "<u4"),  # CRC-32 of all before it
    ]
)
SEALED = RECORD.fields["seal"][1] if RECORD.fields else 0


class Journal:
    """The places of written tiles, in memory and, a batch at a time, in a file.

    The file is locked as long as the journal is open, so that two conversions never write to
    one target.

    Parameters
    ----------
    path : Path
        The file; a new one is begun if it holds another identity.
    identity : Mapping
        What is converted, and how; JSON-serialisable.
    shapes : sequence of tuple of int
        (planes, rows, columns) of each level's tiles.

    Attributes
    ----------
    offsets, counts : list of ndarray of int64, shape (planes, rows, columns)
        Where each level's tiles lie in the data, and their lengths: -1 where they are not
        written.
    checks : list of ndarray of uint32, shape (planes, rows, columns)
        The CRC-32 of what was written of each tile.
    found : bool
        Whether the file is one of the same identity.
    changed : str or None
        Why the file is begun anew although there is one.

    Raises
    ------
    ConversionError
        If another conversion has it open.
    OSError
        If it can't be read or written.
    """

    def __init__(
        self, path: Path, identity: Mapping[str, Any], shapes: Sequence[tuple[int, int, int]]
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
                whole = _trusted(records)
                self._load(np.frombuffer(records[:whole], RECORD))
                self._file.truncate(end + whole)
            else:
                self.changed = _difference(old, identity) if old else None
                self._file.truncate(0)
        except BaseException:
            self._file.close()
            raise

    def note(
        self, level: int, plane: int, row: int, column: int, offset: int, count: int, check: int
    ) -> None:
        """Remember that a tile is written; `commit` keeps it for good."""
        self.offsets[level][plane, row, column] = offset
        self.counts[level][plane, row, column] = count
        self.checks[level][plane, row, column] = check
        self._pending.append((level, plane, row, column, offset, count, check, 0))

    def forget(self, level: int, tiles: NDArray[np.bool_]) -> None:
        """Count tiles as not written, by row and column."""
        self.offsets[level][:, tiles] = 0
        self.counts[level][:, tiles] = -1

    def leave_out(self, level: int, tiles: NDArray[np.bool_]) -> None:
        """Count tiles as written that shall not be, by row and column."""
        self.offsets[level][:, tiles] = 0
        self.counts[level][:, tiles] = 0

    def commit(self) -> None:
        """Keep what was noted. The data have to be safe by then."""
        records = np.array(self._pending, RECORD)
        records["seal"] = _seals(records.tobytes())
        self._file.write(self._head + records.tobytes())
        self._file.flush()
        self._head, self._pending = b"", []

    def is_done(self, level: int) -> NDArray[np.bool_]:
        """Return which tiles of a level are whole, by row and column."""
        done: NDArray[np.bool_] = np.logical_and.reduce(self.counts[level] >= 0, axis=0)
        return done

    @property
    def tiles_done(self) -> int:
        """How many tiles of all levels are whole."""
        return sum(int(self.is_done(level).sum()) for level in range(len(self.counts)))

    @property
    def end(self) -> int:
        """Where the data of all tiles end."""
        pairs = zip(self.offsets, self.counts, strict=True)
        return max((int((o + np.maximum(c, 0)).max(initial=0)) for o, c in pairs), default=0)

    def close(self) -> None:
        """Let go of the file and its lock."""
        self._file.close()

    def _load(self, records: NDArray[Any]) -> None:
        for level, (offsets, counts) in enumerate(zip(self.offsets, self.counts, strict=True)):
            own = records[records["level"] == level]
            place = own["plane"], own["row"], own["column"]
            offsets[place] = own["offset"]
            counts[place] = own["count"]
            self.checks[level][place] = own["check"]


def no_link(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file of an unfinished conversion, but no link to another one; see `os.open`."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _seals(records: bytes) -> list[int]:
    """Return the seal that each record should have."""
    view = memoryview(records)
    return [crc32(view[at : at + SEALED]) for at in range(0, len(view), RECORD.itemsize)]


def _trusted(records: bytes) -> int:
    """Return how many bytes of records come before the first one that is torn or damaged."""
    whole = len(records) // RECORD.itemsize * RECORD.itemsize
    wrong = np.frombuffer(records[:whole], RECORD)["seal"] != _seals(records[:whole])
    return int(wrong.argmax()) * RECORD.itemsize if wrong.any() else whole


def _difference(old: bytes, identity: Mapping[str, Any]) -> str:
    try:
        found = json.loads(old)
        same_source = found["source"] == identity["source"]
    except (ValueError, KeyError, TypeError):
        return "the record of what was written is damaged"
    return "other options were given" if same_source else "the source is another one now"


def _lock(handle: int, path: Path) -> None:
    """Lock a file until it is closed, or its process ends."""
    if sys.platform == "win32":  # an open file can't be replaced there
        return
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConversionError(
            f"Another conversion is writing to '{path.parent}'; "
            "wait for its end, or choose another target."
        ) from None
