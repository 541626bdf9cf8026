"""Encoded bytes from a server: few merged requests side by side, and a cache of what they gave."""

from __future__ import annotations

import threading
import traceback
from concurrent.futures import CancelledError
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from cachetools import LRUCache

from napari_wsigpu.model.errors import NotASlideError, changed_error
from napari_wsigpu.storage.readers import Readers, closed_error
from napari_wsigpu.storage.remote.connection import ENTITY_TAG, Connection
from napari_wsigpu.storage.remote.disk_cache import disk_cache
from napari_wsigpu.storage.remote.url import public_url
from napari_wsigpu.storage.source import ViewSource

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from concurrent.futures import Future

    from napari_wsigpu.storage.remote.connection import Answer

BLOCK = 64 << 10
MERGED_GAP = 4  # blocks
LONGEST_REQUEST = 64  # blocks
HEAD = 2 * BLOCK
MEMORY = 32 << 20
PART_MEMORY = MEMORY // 8  # of each of several files


class _Request(NamedTuple):
    """Blocks that are asked for together."""

    blocks: range
    answer: Future[Answer]


class RemoteSource(ViewSource):
    """A file on a server, read by position from any thread.

    It is read in blocks of 64 KiB, which are kept in memory and on disk: on the way to what is
    asked for, its neighbours cost little.

    Parameters
    ----------
    url : str
        Where it is; see `Connection`.
    size : int
        Size in bytes that it must have.
    version : str
        The server's name for the version that it must have, as in `Answer`.
    connection : Connection, optional
        A connection to it, which it then owns.
    key : str
        Which object below the URL of the connection it is; by default that itself.

    Attributes
    ----------
    url, size, version, key
        The same.
    """

    def __init__(
        self,
        url: str,
        size: int,
        version: str,
        connection: Connection | None = None,
        key: str = "",
    ) -> None:
        self.url = url
        self.size = size
        self.version = version
        self._name = public_url(url)
        self._key = _cache_key(url, size, version)
        self._connection, self.key = connection or Connection(url), key
        self._readers = Readers(self._name)
        self._state = threading.Lock()
        self._memory: LRUCache[int, memoryview] = LRUCache(
            PART_MEMORY if key else MEMORY, getsizeof=len
        )
        self._asked: dict[int, _Request] = {}

    @classmethod
    def connect(cls, url: str) -> RemoteSource:
        """Ask a server for a file's begin, and return the file as it is now.

        Raises
        ------
        SlideError
            If the server can't be reached, or doesn't give parts of the file.
        """
        connection = Connection(url)
        try:
            return cls.begun(url, connection.get(0, HEAD).result(), connection)
        except BaseException as error:
            connection.close()
            # Who keeps the exception shall not keep the server's socket.
            traceback.clear_frames(error.__traceback__)
            raise

    @classmethod
    def begun(cls, url: str, begin: Answer, connection: Connection, key: str = "") -> RemoteSource:
        """Return a file whose first `HEAD` bytes a connection gave."""
        source = cls(url, begin.size, begin.version, connection, key)
        source._keep(0, begin.data)
        return source

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; fewer where the file ends before."""
        inside = [
            (offset, max(0, min(length, self.size - offset)) if offset >= 0 else 0)
            for offset, length in ranges
        ]
        blocks = self._blocks(
            {
                block
                for offset, length in inside
                if length
                for block in range(offset // BLOCK, (offset + length - 1) // BLOCK + 1)
            }
        )
        return [_cut(blocks, offset, length) for offset, length in inside]

    def release(self) -> None:
        """Let go of connection and memory until the next read; reads in flight fail."""
        self._connection.release()
        with self._readers.none():
            self._memory.clear()

    def close(self) -> None:
        """Let go of everything for good; reads in flight fail."""
        self._readers.closed = True
        self._connection.close()
        self.release()

    def _blocks(self, wanted: Collection[int]) -> dict[int, memoryview]:
        with self._readers:
            found = self._at_hand(wanted)
            requests = self._ask(sorted(set(wanted) - found.keys()))
            try:
                for request in requests:
                    found |= self._received(request)
            finally:
                self._forget(requests)
        return found

    def _at_hand(self, wanted: Collection[int]) -> dict[int, memoryview]:
        """Return those blocks that are in memory or on disk."""
        with self._state:
            found = {block: self._memory[block] for block in wanted if block in self._memory}
        if self._key:
            for block in set(wanted) - found.keys():
                data = disk_cache().get(self._key, block)
                if data is not None:
                    found[block] = memoryview(data)
                    self._remember(block, found[block])
        return found

    def _ask(self, blocks: list[int]) -> list[_Request]:
        """Ask for blocks, unless another thread did already."""
        with self._state:
            requests = {
                id(request): request for block in blocks if (request := self._asked.get(block))
            }
            for run in _runs([block for block in blocks if block not in self._asked]):
                start = run.start * BLOCK
                length = min(len(run) * BLOCK, self.size - start)
                request = _Request(run, self._connection.get(start, length, self.key))
                self._asked |= dict.fromkeys(run, request)
                requests[id(request)] = request
        return list(requests.values())

    def _received(self, request: _Request) -> dict[int, memoryview]:
        """Wait for an answer, and keep it."""
        try:
            data, size, version = request.answer.result()
        except CancelledError:
            raise closed_error(self._name) from None
        except NotASlideError:  # it ends before what was asked for
            raise changed_error(self._name) from None
        if (size, version) != (self.size, self.version):
            raise changed_error(self._name)
        return self._keep(request.blocks.start, data)

    def _forget(self, requests: Sequence[_Request]) -> None:
        """Ask again for what these asked for, if it is wanted again."""
        with self._state:
            for request in requests:
                for block in request.blocks:
                    if self._asked.get(block) is request:
                        del self._asked[block]

    def _keep(self, first: int, data: memoryview) -> dict[int, memoryview]:
        """Cut data into blocks, and keep these."""
        parts = range(-(-len(data) // BLOCK))
        blocks = {first + part: data[part * BLOCK : (part + 1) * BLOCK] for part in parts}
        for block, content in blocks.items():
            self._remember(block, content)
            if self._key:
                disk_cache().put(self._key, block, content)
        return blocks

    def _remember(self, block: int, content: memoryview) -> None:
        with self._state:
            self._memory[block] = content


def _runs(blocks: Sequence[int]) -> Iterator[range]:
    """Merge blocks that lie near each other, in ascending order, into runs."""
    run = range(0)
    for block in blocks:
        if run and block - run.stop <= MERGED_GAP and block - run.start < LONGEST_REQUEST:
            run = range(run.start, block + 1)
            continue
        if run:
            yield run
        run = range(block, block + 1)
    if run:
        yield run


def _cut(blocks: dict[int, memoryview], offset: int, length: int) -> memoryview:
    """Return a range of the blocks that hold it."""
    if not length:
        return memoryview(b"")
    first, last = offset // BLOCK, (offset + length - 1) // BLOCK
    begin = offset - first * BLOCK
    if first == last:
        return blocks[first][begin : begin + length]
    joined = b"".join(blocks[block] for block in range(first, last + 1))
    return memoryview(joined)[begin : begin + length]


def _cache_key(url: str, size: int, version: str) -> str:
    """Name a version of a file for the cache on disk; empty where it could be another file's too.

    A URL's query may choose the file as well as hold a secret, so it is neither part of the name
    nor overlooked where only an entity tag tells files apart.
    """
    name = public_url(url)
    if not version or (name != url and not version.startswith(ENTITY_TAG)):
        return ""
    return sha256(f"{name}\n{size}\n{version}".encode()).hexdigest()
