"""Blocks of remote slides on the local disk: those unused the longest go beyond a budget."""

from __future__ import annotations

import hmac
import logging
import os
import stat
import struct
import threading
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from secrets import token_bytes
from typing import TYPE_CHECKING, NamedTuple

from napari_wsigpu.model.units import byte_size

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER, BUDGET = "WSIGPU_DISK_CACHE_FOLDER", "WSIGPU_DISK_CACHE_BYTES"
DEFAULT_BUDGET = 2 << 30
HEAD = struct.Struct("<4sI16s")
MAGIC = b"WSB2"
SECRET, SECRET_BYTES = "secret", 32
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
        self._secret: bytes | None = None

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
        path = f"{self.folder}/{key}/{block}"
        try:
            data = self._checked(_content(path), key, block)
            if data is None:
                Path(path).unlink()
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
        folder = self.folder / key
        # Texts, as a path takes longer to be made than a block to be read.
        path = f"{folder}/{block}"
        unfinished = f"{path}.{os.getpid()}-{next(_numbers)}"
        try:
            self._make_room(size)
            seal = self._seal(key, block, data)
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.is_symlink():
                raise PermissionError(f"'{folder}' is a link")
            try:
                with open(unfinished, "xb", buffering=0) as file:  # noqa: PTH123 - a text
                    file.write(HEAD.pack(MAGIC, len(data), seal))
                    file.write(data)
                os.replace(unfinished, path)  # noqa: PTH105 - a text
            except OSError:
                with suppress(OSError):
                    Path(unfinished).unlink()
                raise
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("Parts of remote slides can't be cached on disk: %s", error)

    def clear(self) -> None:
        """Remove all blocks."""
        with self._lock:
            self._evict(0)

    def _checked(self, content: bytes, key: str, block: int) -> bytes | None:
        """Return the data of a file's content; None if it is damaged, or of another block."""
        if len(content) < HEAD.size:
            return None
        magic, length, seal = HEAD.unpack_from(content)
        data = content[HEAD.size :]
        if magic != MAGIC or length != len(data):
            return None
        return data if hmac.compare_digest(seal, self._seal(key, block, data)) else None

    def _seal(self, key: str, block: int, data: bytes | memoryview) -> bytes:
        """Return what only this user can make of a block's name and data.

        Raises
        ------
        OSError
            If there is no secret, nor can one be kept.
        """
        if self._secret is None:
            self._secret = _secret_in(self.folder)
        # The fastest that processors help with: a first view reads some megabytes.
        seal = hmac.new(self._secret, f"{key}/{block}/".encode(), "sha256")
        seal.update(data)
        return seal.digest()[:16]

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


def _content(path: str) -> bytes:
    """Return what a file of this user holds; no link is followed, nor is a pipe waited for.

    Raises
    ------
    OSError
        If it is something else, or can't be read.
    """
    flags = (getattr(os, name, 0) for name in ("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    with open(os.open(path, sum(flags)), "rb") as file:  # noqa: PTH123 - a handle
        status = os.fstat(file.fileno())
        own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
        if not (own and stat.S_ISREG(status.st_mode)):
            raise PermissionError(f"'{path}' is no file of this user")
        return file.read()


def _secret_in(folder: Path) -> bytes:
    """Return what seals a folder's blocks, made when it is asked for first.

    Raises
    ------
    OSError
        If it can't be read or kept.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / SECRET
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}-{next(_numbers)}")
        handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "wb") as file:  # noqa: PTH123 - a handle
            file.write(token_bytes(SECRET_BYTES))
        try:
            with suppress(FileExistsError):  # another process was faster
                os.link(unfinished, path)
        finally:
            unfinished.unlink()
    secret = _content(str(path))
    if len(secret) != SECRET_BYTES:
        raise OSError(f"'{path}' is damaged; remove it")
    return secret


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
