"""Encoded bytes from a server, read with a few concurrent requests and cached in blocks."""

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
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from napari_wsigpu.storage.remote.connection import Response

BLOCK = 64 << 10
MERGED_GAP = 4  # blocks
LONGEST_REQUEST = 64  # blocks
HEAD = 2 * BLOCK  # bytes that `connect` reads
MEMORY = 32 << 20
PART_MEMORY = MEMORY // 8  # for each file of a slide with several files


class Request(NamedTuple):
    """Blocks in one request to the server."""

    blocks: Sequence[int]
    response: Future[Response]


class BlockSource(ViewSource):
    """Numbered blocks of bytes on a server, cached in memory and on disk.

    Subclasses group the blocks into requests (`_runs`), send a request (`_send`), and find the
    blocks in its response (`_split`).

    Parameters
    ----------
    name : str
        The URL without secrets.
    key : str
        The disk cache's key; empty to keep blocks off the disk.
    connection : Connection
        The connection to the server, which this source then owns.
    budget : int
        Bytes of blocks to keep in memory.
    """

    def __init__(self, name: str, key: str, connection: Connection, budget: int = MEMORY) -> None:
        self._name = name
        self._key = key
        self._connection = connection
        self._readers = Readers(name)
        self._state = threading.Lock()  # guards `_memory` and `_pending`
        self._memory: LRUCache[int, memoryview] = LRUCache(budget, getsizeof=len)
        self._pending: dict[int, Request] = {}

    def release(self) -> None:
        """Release the connection and the memory; the next read reconnects.

        Reads in progress fail.
        """
        self._connection.release()
        with self._readers.exclusive():
            self._memory.clear()

    def close(self) -> None:
        """Release the connection and the memory for good; reads in progress fail."""
        self._readers.closed = True
        self._connection.close()
        self.release()

    def _runs(self, blocks: Sequence[int]) -> Iterable[Sequence[int]]:
        """Group ascending block numbers by request; a group may contain additional blocks."""
        raise NotImplementedError

    def _send(self, blocks: Sequence[int]) -> Future[Response]:
        """Request a group of blocks in the background."""
        raise NotImplementedError

    def _split(self, blocks: Sequence[int], response: Response) -> dict[int, memoryview]:
        """Return the blocks in the response to the request for a group."""
        raise NotImplementedError

    def _blocks(self, blocks: Collection[int]) -> dict[int, memoryview]:
        with self._readers:
            found = self._cached(blocks)
            requests = self._request(sorted(set(blocks) - found.keys()))
            try:
                for request in requests:
                    found |= self._receive(request)
            finally:
                self._forget(requests)
        return found

    def _cached(self, blocks: Collection[int]) -> dict[int, memoryview]:
        """Return the blocks that are in memory or on disk."""
        with self._state:
            found = {block: self._memory[block] for block in blocks if block in self._memory}
        if self._key:
            for block in set(blocks) - found.keys():
                data = disk_cache().get(self._key, block)
                if data is not None:
                    found[block] = memoryview(data)
                    self._store_in_memory(block, found[block])
        return found

    def _request(self, blocks: list[int]) -> list[Request]:
        """Return requests for blocks: new ones, or pending ones of other threads."""
        with self._state:
            requests = {
                id(request): request for block in blocks if (request := self._pending.get(block))
            }
            for run in self._runs([block for block in blocks if block not in self._pending]):
                request = Request(run, self._send(run))
                self._pending |= dict.fromkeys(run, request)
                requests[id(request)] = request
        return list(requests.values())

    def _receive(self, request: Request) -> dict[int, memoryview]:
        """Wait for a response, and cache its blocks."""
        try:
            response = request.response.result()
        except CancelledError:
            raise closed_error(self._name) from None
        return self._store(self._split(request.blocks, response))

    def _forget(self, requests: Sequence[Request]) -> None:
        """Remove finished requests from the pending ones."""
        with self._state:
            for request in requests:
                for block in request.blocks:
                    # Another thread may have replaced the request with a new one.
                    if self._pending.get(block) is request:
                        del self._pending[block]

    def _store(self, blocks: dict[int, memoryview]) -> dict[int, memoryview]:
        """Cache blocks."""
        for block, content in blocks.items():
            self._store_in_memory(block, content)
            if self._key:
                disk_cache().put(self._key, block, content)
        return blocks

    def _store_in_memory(self, block: int, content: memoryview) -> None:
        with self._state:
            if len(content) <= self._memory.maxsize:
                self._memory[block] = content


class RemoteSource(BlockSource):
    """A file on a server, read by position from any thread.

    It is read in blocks of 64 KiB, which are cached in memory and on disk: compared with the
    latency of a request, the additional bytes cost little.

    Parameters
    ----------
    url : str
        URL of the file; see `Connection`.
    size : int
        Size in bytes that the file must have.
    version : str
        Version that the file must have, as in `Response`.
    connection : Connection, optional
        A connection to the file's server, which this source then owns.
    key : str
        Name of the file below the connection's URL; by default the URL names the file itself.

    Attributes
    ----------
    url, size, version, key
        The parameters.
    """

    def __init__(
        self, url: str, size: int, version: str, connection: Connection | None = None, key: str = ""
    ) -> None:
        self.url = url
        self.size = size
        self.version = version
        self.key = key
        disk_key = _cache_key(url, size, version)
        connection = connection or Connection(url)
        super().__init__(public_url(url), disk_key, connection, PART_MEMORY if key else MEMORY)

    @classmethod
    def connect(cls, url: str) -> RemoteSource:
        """Read the first `HEAD` bytes of a file, and return a source for its current version.

        Raises
        ------
        SlideError
            If the server can't be reached, or does not support range requests.
        """
        connection = Connection(url)
        try:
            return cls.from_head(url, connection.get(0, HEAD).result(), connection)
        except BaseException as error:
            connection.close()
            # A stored exception must not keep the socket alive through its traceback.
            traceback.clear_frames(error.__traceback__)
            raise

    @classmethod
    def from_head(
        cls, url: str, head: Response, connection: Connection, key: str = ""
    ) -> RemoteSource:
        """Return a source for a file whose first `HEAD` bytes have been read by a connection."""
        source = cls(url, head.size, head.version, connection, key)
        source._store(_cut_into_blocks(0, head.data))
        return source

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; fewer at the end of the file."""
        inside = [
            (offset, max(0, min(length, self.size - offset)) if offset >= 0 else 0)
            for offset, length in ranges
        ]
        blocks = self._blocks({block for each in inside for block in _blocks_of(*each)})
        return [_cut(blocks, offset, length) for offset, length in inside]

    def _runs(self, blocks: Sequence[int]) -> Iterable[range]:
        return _runs(blocks)

    def _send(self, blocks: Sequence[int]) -> Future[Response]:
        start = blocks[0] * BLOCK
        length = min(len(blocks) * BLOCK, self.size - start)
        return self._connection.get(start, length, self.key)

    def _receive(self, request: Request) -> dict[int, memoryview]:
        try:
            return super()._receive(request)
        except NotASlideError:  # the file now ends before the range starts
            raise changed_error(self._name) from None

    def _split(self, blocks: Sequence[int], response: Response) -> dict[int, memoryview]:
        if (response.size, response.version) != (self.size, self.version):
            raise changed_error(self._name)
        return _cut_into_blocks(blocks[0], response.data)


def _cut_into_blocks(first: int, data: memoryview) -> dict[int, memoryview]:
    """Split data into blocks, numbered from `first`."""
    parts = range(-(-len(data) // BLOCK))
    return {first + part: data[part * BLOCK : (part + 1) * BLOCK] for part in parts}


def _blocks_of(offset: int, length: int) -> range:
    """Return the numbers of the blocks that contain a range of bytes."""
    return range(offset // BLOCK, (offset + length - 1) // BLOCK + 1) if length else range(0)


def _runs(blocks: Sequence[int]) -> Iterator[range]:
    """Merge ascending block numbers that are close together into runs."""
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
    """Return a range of the file, given the blocks that contain it."""
    if not length:
        return memoryview(b"")
    first, last = offset // BLOCK, (offset + length - 1) // BLOCK
    start = offset - first * BLOCK
    if first == last:
        return blocks[first][start : start + length]
    joined = b"".join(blocks[block] for block in range(first, last + 1))
    return memoryview(joined)[start : start + length]


def _cache_key(url: str, size: int, version: str) -> str:
    """Return the disk cache's key for a version of a file; empty if it would not be unique.

    A URL's query may select the file, or contain a secret, so it is not part of the key. A file
    whose URL has a query is cached only if an entity tag identifies it.
    """
    name = public_url(url)
    if not version or (name != url and not version.startswith(ENTITY_TAG)):
        return ""
    return sha256(f"{name}\n{size}\n{version}".encode()).hexdigest()
