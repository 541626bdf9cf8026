"""Blocks of remote slides on the local disk: those unused the longest go beyond a budget."""

from __future__ import annotations

import logging
import os
import struct
import threading
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from napari_wsigpu.units import byte_size

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER, BUDGET = "WSIGPU_DISK_CACHE_FOLDER", "WSIGPU_DISK_CACHE_BYTES"
DEFAULT_BUDGET = 2 << 30
HEAD = struct.Struct("<4sII")
MAGIC = b"WSB1"
LEFT_AFTER_EVICTION = 0.9
# Other processes write too: how much of the budget this one writes before it looks again.
SHARE_UNSEEN = 1 / 16

logger = logging.getLogger(__name__)

_numbers = count()


class _Entry(NamedTuple):
    used_ns: int
    size: int
    path: str


class DiskCache:
    """Blocks of bytes as files, within a budget; safe under many threads and processes.

    What can't be read or written is as if it were not there.

    Parameters
    ----------
    folder : Path
        Where the files are; made when it is needed, for its owner only.
    budget : int
        How many bytes they may take; 0 for no cache.

    Attributes
    ----------
    folder, budget
        The same; the budget can be changed.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder = folder
        self.budget = budget
        self._lock = threading.Lock()
        self._used: int | None = None
        self._unseen = 0
        self._warned = False

    def get(self, key: str, block: int) -> bytes | None:
        """Return a block, now the most recently used; None if it is not there or damaged.

        Parameters
        ----------
        key : str
            Name of an object in one version, fit for a file name.
        block : int
            Number of the block.
        """
        if self.budget <= 0:
            return None
        path = self.folder / key / str(block)
        try:
            data = _checked(path.read_bytes())
            if data is None:
                path.unlink()
            else:
                os.utime(path)
        except OSError:
            return None
        return data

    def put(self, key: str, block: int, data: bytes | memoryview) -> None:
        """Keep a block, and remove others that were not used for the longest time."""
        size = HEAD.size + len(data)
        if size > self.budget:
            return
        path = self.folder / key / str(block)
        unfinished = path.with_suffix(f".{os.getpid()}-{next(_numbers)}")
        try:
            self._make_room(size)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with unfinished.open("xb") as file:
                    file.write(HEAD.pack(MAGIC, len(data), crc32(data)))
                    file.write(data)
                unfinished.replace(path)
            except OSError:
                with suppress(OSError):
                    unfinished.unlink()
                raise
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("Parts of remote slides can't be cached on disk: %s", error)

    def clear(self) -> None:
        """Remove all blocks."""
        with self._lock:
            self._evict(0)

    def _make_room(self, size: int) -> None:
        with self._lock:
            if self._used is None or self._unseen > self.budget * SHARE_UNSEEN:
                self._used, self._unseen = sum(entry.size for entry in self._entries()), 0
            self._used += size
            self._unseen += size
            if self._used > self.budget:
                self._evict(int(self.budget * LEFT_AFTER_EVICTION) - size)
                self._used += size

    def _evict(self, budget: int) -> None:
        """Remove what was unused the longest until the rest is within a budget."""
        entries = sorted(self._entries())
        self._used, self._unseen = sum(entry.size for entry in entries), 0
        for entry in entries:
            if self._used <= budget:
                break
            with suppress(OSError):
                Path(entry.path).unlink()
            self._used -= entry.size
            with suppress(OSError):  # others are in it
                Path(entry.path).parent.rmdir()

    def _entries(self) -> Iterator[_Entry]:
        with suppress(OSError), os.scandir(self.folder) as folders:
            for folder in folders:
                with suppress(OSError), os.scandir(folder) as blocks:
                    for block in blocks:
                        with suppress(OSError):
                            status = block.stat()
                            yield _Entry(status.st_mtime_ns, status.st_size, block.path)


def _checked(content: bytes) -> bytes | None:
    """Return the data of a file's content; None if it is damaged."""
    if len(content) < HEAD.size:
        return None
    magic, length, checksum = HEAD.unpack_from(content)
    data = content[HEAD.size :]
    sound = magic == MAGIC and length == len(data) and checksum == crc32(data)
    return data if sound else None


@cache
def disk_cache() -> DiskCache:
    """Return the process's cache.

    Its budget is the environment variable WSIGPU_DISK_CACHE_BYTES, 2 GiB without it; its folder is
    WSIGPU_DISK_CACHE_FOLDER, or one in the user's folder for caches.
    """
    from platformdirs import user_cache_path

    folder = os.environ.get(FOLDER) or user_cache_path("napari-wsigpu", appauthor=False) / "blocks"
    return DiskCache(Path(folder), _budget())


def _budget() -> int:
    given = os.environ.get(BUDGET) or str(DEFAULT_BUDGET)
    with suppress(ValueError, OverflowError):
        budget = int(float(given))
        if budget >= 0:
            return budget
    logger.warning(
        "%s is '%s', which is no number of bytes as 2e9 is; the cache on disk takes %s at most.",
        BUDGET,
        given,
        byte_size(DEFAULT_BUDGET),
    )
    return DEFAULT_BUDGET
