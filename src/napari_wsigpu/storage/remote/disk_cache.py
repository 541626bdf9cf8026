"""Cache of remote slides' blocks on the local disk, with a budget and LRU eviction."""

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
# Other processes write to the cache too, so a process measures the files again whenever it has
# written this share of the budget.
SHARE_UNMEASURED = 1 / 16

logger = logging.getLogger(__name__)

_numbers = count()


class _Entry(NamedTuple):
    used_ns: int
    size: int
    path: str


class DiskCache:
    """Blocks of bytes in files, within a budget; safe to use from many threads and processes.

    A block that can't be read counts as missing, and one that can't be written is not cached.

    Parameters
    ----------
    folder : Path
        Folder of the files; created on demand, accessible to its owner only.
    budget : int
        Maximum size of all files in bytes; 0 disables the cache.

    Attributes
    ----------
    folder, budget
        The parameters; the budget can be changed.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder = folder
        self.budget = budget
        self._lock = threading.Lock()  # guards `_used` and `_unmeasured`, and eviction
        self._used: int | None = None
        self._unmeasured = 0
        self._warned = False
        self._secret: bytes | None = None

    def get(self, key: str, block: int) -> bytes | None:
        """Return a block and mark it as recently used; None if it is missing or damaged.

        Parameters
        ----------
        key : str
            Name for one version of an object, valid as a file name.
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
        """Store a block, and evict the least recently used ones beyond the budget."""
        size = HEAD.size + len(data)
        if size > self.budget:
            return
        folder = self.folder / key
        # Strings: creating a `Path` takes longer than reading a block.
        path = f"{folder}/{block}"
        unfinished = f"{path}.{os.getpid()}-{next(_numbers)}"
        try:
            self._reserve(size)
            seal = self._seal(key, block, data)
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.is_symlink():
                raise PermissionError(f"'{folder}' is a link")
            try:
                with open(unfinished, "xb", buffering=0) as file:  # noqa: PTH123 - a string
                    file.write(HEAD.pack(MAGIC, len(data), seal))
                    file.write(data)
                os.replace(unfinished, path)  # noqa: PTH105 - a string
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
        """Return the data in a file's content; None if damaged or from another block."""
        if len(content) < HEAD.size:
            return None
        magic, length, seal = HEAD.unpack_from(content)
        data = content[HEAD.size :]
        if magic != MAGIC or length != len(data):
            return None
        return data if hmac.compare_digest(seal, self._seal(key, block, data)) else None

    def _seal(self, key: str, block: int, data: bytes | memoryview) -> bytes:
        """Return a message authentication code of a block's name and data.

        Raises
        ------
        OSError
            If the folder's secret can be neither read nor created.
        """
        if self._secret is None:
            self._secret = _secret_in(self.folder)
        # SHA-256 has hardware support, which matters: the first view reads several megabytes.
        seal = hmac.new(self._secret, f"{key}/{block}/".encode(), "sha256")
        seal.update(data)
        return seal.digest()[:16]

    def _reserve(self, size: int) -> None:
        """Count a block that will be written, and evict others if the budget is exceeded."""
        with self._lock:
            if self._used is None or self._unmeasured > self.budget * SHARE_UNMEASURED:
                self._used, self._unmeasured = sum(entry.size for entry in self._entries()), 0
            self._used += size
            self._unmeasured += size
            if self._used > self.budget:
                self._evict(int(self.budget * LEFT_AFTER_EVICTION) - size)
                self._used += size

    def _evict(self, budget: int) -> None:
        """Remove the least recently used blocks until the rest is within a budget."""
        entries = sorted(self._entries())
        self._used, self._unmeasured = sum(entry.size for entry in entries), 0
        for entry in entries:
            if self._used <= budget:
                break
            with suppress(OSError):
                Path(entry.path).unlink()
            self._used -= entry.size
            with suppress(OSError):  # the folder is not empty
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
    """Return the content of a regular file of this user, without following a symbolic link.

    Raises
    ------
    OSError
        If the path is anything else, or can't be read.
    """
    # O_NONBLOCK keeps `open` from waiting for the other end of a pipe.
    flags = (getattr(os, name, 0) for name in ("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    with open(os.open(path, sum(flags)), "rb") as file:  # noqa: PTH123 - a handle
        status = os.fstat(file.fileno())
        own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
        if not (own and stat.S_ISREG(status.st_mode)):
            raise PermissionError(f"'{path}' is not a regular file of this user")
        return file.read()


def _secret_in(folder: Path) -> bytes:
    """Return the key that authenticates a folder's blocks; create it on first use.

    Raises
    ------
    OSError
        If the key can be neither read nor created.
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
    """Return the cache of this process.

    The environment variables WSIGPU_DISK_CACHE_BYTES and WSIGPU_DISK_CACHE_FOLDER set its budget
    and folder; the defaults are 2 GiB, and a folder in the user's cache directory.
    """
    from platformdirs import user_cache_path

    folder = os.environ.get(FOLDER) or user_cache_path("napari-wsigpu", appauthor=False) / "blocks"
    return DiskCache(Path(folder), _budget())


def _budget() -> int:
    value = os.environ.get(BUDGET) or str(DEFAULT_BUDGET)
    with suppress(ValueError, OverflowError):
        budget = int(float(value))
        if budget >= 0:
            return budget
    logger.warning(
        "%s is '%s', but must be a number of bytes such as 2e9; the disk cache is limited to %s.",
        BUDGET,
        value,
        byte_size(DEFAULT_BUDGET),
    )
    return DEFAULT_BUDGET
