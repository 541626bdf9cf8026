"""Concurrent range requests for objects on a server, with retries and deadlines.

`http_store.HttpStore` sends the requests for http and https URLs, and obstore all others.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from base64 import b64encode
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit
from weakref import WeakSet, finalize

from napari_wsigpu.model.errors import (
    SlideNotFoundError,
    SlideReadError,
    UnsupportedSlideError,
    file_error,
)
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.storage.readers import closed_error
from napari_wsigpu.storage.remote.http_store import (
    MAX_BYTES,
    HttpResponse,
    HttpStore,
    RangeRequest,
    is_http,
)
from napari_wsigpu.storage.remote.refusal import DISCONNECTED, SILENT, SLOW, server_error
from napari_wsigpu.storage.remote.url import is_supported, public_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Coroutine
    from concurrent.futures import Future

    from obstore import BytesStream, GetResult, ObjectMeta
    from obstore.store import ObjectStore

    Store: TypeAlias = "ObjectStore | HttpStore"

MAX_CONCURRENT = 16
ENTITY_TAG = "ETag "
CONNECT_SECONDS = 5
# Checking the deadline after each chunk of a response takes as long as receiving 0.1 MB. A chunk
# therefore has the size that should arrive in `CHUNK_SECONDS`, judging by the previous response.
CHUNK, LARGEST_CHUNK, CHUNK_SECONDS = 4 << 10, 1 << 20, 0.1
# `Connection` sets its own deadlines, so obstore's timeouts must never expire first.
NO_TIMEOUT = timedelta(days=1)
RETRIES, RETRY_SECONDS = 4, 20
PAUSES = (0.1, 0.3, 1.0)

_first_process: int | None = None
_connections: WeakSet[Connection] = WeakSet()

Result = TypeVar("Result")


class _Running(NamedTuple):
    """The event loop of a connection; `dropped` stops it if nobody closes the connection."""

    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    store: Store
    dropped: finalize[..., Connection]


class Response(NamedTuple):
    """The answer to a range request.

    Attributes
    ----------
    data : memoryview
        The bytes of the range; fewer at the end of the object.
    size : int
        Size of the whole object in bytes.
    version : str
        Entity tag of the object, or else its modification time; empty if the server sends neither.
    media_type : str
        Media type of a response over HTTP, with its parameters.
    """

    data: memoryview
    size: int
    version: str
    media_type: str = ""


class Connection:
    """A connection to an object on a server, or to a folder of objects; thread-safe.

    All requests run in one event loop, in a thread that the first request starts. obstore takes
    credentials from the URL or from environment variables.

    Parameters
    ----------
    url : str
        URL with one of `url.SCHEMES`.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._name = public_url(url)
        self._lock = threading.Lock()  # guards `_closed` and `_running`
        self._closed = False
        self._running: _Running | None = None
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._chunk = CHUNK
        _connections.add(self)

    def get(
        self,
        offset: int,
        length: int | None,
        key: str = "",
        accept: str = "",
        most: int = MAX_BYTES,
    ) -> Future[Response]:
        """Request a range in the background.

        Parameters
        ----------
        offset : int
            First byte; a negative offset counts from the end of the object.
        length : int or None
            Number of bytes; None requests the whole object, which works without range support.
        key : str
            Name of an object below the URL; by default the object of the URL itself.
        accept : str
            Acceptable media types, for a whole object that a web server generates. The server
            then need not state its size in advance.
        most : int
            Largest acceptable number of bytes.

        Returns
        -------
        Future of Response
            Raises a `SlideError` if the server refuses. `release` cancels it.

        Raises
        ------
        SlideClosedError
            If the connection was closed.
        SlideError
            If the URL is invalid or not supported.
        """
        request = RangeRequest(key, offset, length, accept, most)
        return self._submit(lambda store: self._get(store, request))

    def names(self) -> Future[list[str]]:
        """Request the names of the objects directly below the URL, in the background.

        The URL must be one for which `supports_listing` is true.

        Returns
        -------
        Future of list of str
            Raises errors and is cancelled like the future of `get`.

        Raises
        ------
        SlideError
            As `get` does.
        """
        return self._submit(self._names)

    def _submit(
        self, request: Callable[[Store], Coroutine[object, object, Result]]
    ) -> Future[Result]:
        """Run a request in the event loop, and start the loop for the first one."""
        with self._lock:
            if self._closed:
                raise closed_error(self._name)
            _check_process(self._name)
            if self._running is None:
                store = _open_store(self._url, self._name)
                self._slots = asyncio.Semaphore(MAX_CONCURRENT)
                try:
                    loop = asyncio.new_event_loop()
                except OSError as error:  # too many files are open
                    raise file_error(self._name, error) from error
                thread = threading.Thread(
                    target=_serve, args=(loop,), name="wsigpu-remote", daemon=True
                )
                thread.start()
                dropped = finalize(self, _stop, loop, store)
                dropped.atexit = False  # `_close_all` waits for the threads
                self._running = _Running(loop, thread, store, dropped)
            running = self._running
            return asyncio.run_coroutine_threadsafe(request(running.store), running.loop)

    def release(self) -> None:
        """Cancel all requests, and release the thread and sockets; the next `get` restarts them."""
        with self._lock:
            if self._running is not None:
                running, self._running = self._running, None
                running.dropped.detach()
                _stop(running.loop, running.store)
                running.thread.join()

    def close(self) -> None:
        """Cancel all requests, and refuse new ones."""
        with self._lock:
            self._closed = True
        self.release()

    async def _names(self, store: Store) -> list[str]:
        from obstore import list_with_delimiter_async
        from obstore.exceptions import BaseError

        try:
            async with asyncio.timeout(limits.first_byte_seconds):
                found = await list_with_delimiter_async(store)
        except TimeoutError:
            raise SlideReadError(SILENT.format(self._name)) from None
        except (BaseError, OSError) as error:
            raise server_error(self._name, error) from None
        return [str(item["path"]) for item in found["objects"]]

    async def _get(self, store: Store, request: RangeRequest) -> Response:
        async with self._slots:
            for pause in PAUSES:
                response = await self._try(store, request)
                if response is not None:
                    return response
                await asyncio.sleep(pause)
        raise SlideReadError(DISCONNECTED.format(self._name))

    async def _try(self, store: Store, request: RangeRequest) -> Response | None:
        """Request a range once; return None if the response is incomplete."""
        from obstore.exceptions import BaseError

        try:
            result = (await _first_result(store, request)).result()
        except TimeoutError:
            raise SlideReadError(SILENT.format(self._name)) from None
        except (BaseError, OSError) as error:
            raise server_error(self._name, error) from None
        try:
            return await self._read(result, request)
        finally:
            if isinstance(result, HttpResponse):
                result.close()

    async def _read(
        self, result: GetResult | HttpResponse, request: RangeRequest
    ) -> Response | None:
        """Read a response; return None if it is incomplete."""
        from obstore.exceptions import BaseError

        meta, (start, end) = result.meta, result.range
        size = int(meta["size"])
        if (start, end) != request.within(size):
            return None
        is_exact = not isinstance(result, HttpResponse) or result.is_exact
        if end - start > request.most:
            raise _too_large(self._name, request.most)
        chunk = self._chunk
        try:
            stream = result.stream(min_chunk_size=chunk)
            data = await self._receive(stream, end - start, chunk, is_exact=is_exact)
        except TimeoutError:
            if chunk > CHUNK:  # smaller chunks extend the deadline more often
                self._chunk = CHUNK
                return None
            raise SlideReadError(SLOW.format(self._name)) from None
        except (BaseError, OSError):
            return None
        if data is None:
            if is_exact:
                return None
            raise _too_large(self._name, request.most)
        media_type = result.media_type if isinstance(result, HttpResponse) else ""
        return Response(data, size, _version(meta), media_type)

    async def _receive(
        self,
        stream: BytesStream | AsyncIterable[bytes],
        length: int,
        chunk_size: int,
        *,
        is_exact: bool,
    ) -> memoryview | None:
        """Receive at most `length` bytes, exactly that many if `is_exact`; return None otherwise.

        Raises
        ------
        TimeoutError
            If chunks of this size arrive too slowly.
        """
        chunks, received = [], 0
        clock = asyncio.get_running_loop().time
        start = clock()
        latest = start + limits.first_byte_seconds / (1 if chunk_size == CHUNK else 4)
        async with asyncio.timeout_at(latest) as deadline:
            async for chunk in stream:
                chunks.append(chunk)
                received += len(chunk)
                if received > length:
                    return None
                if received == length and len(chunk) < chunk_size:
                    break  # a short chunk is the last; waiting for the end takes as long as a chunk
                deadline.reschedule(latest + received / limits.bytes_per_second)
        if is_exact and received < length:
            return None
        matching = int(CHUNK_SECONDS * received / max(clock() - start, 1e-6))
        self._chunk = min(max(CHUNK, matching), LARGEST_CHUNK)
        return memoryview(chunks[0] if len(chunks) == 1 else b"".join(chunks))


def _too_large(name: str, most: int) -> UnsupportedSlideError:
    return UnsupportedSlideError(
        f"'{name}' has parts larger than {byte_size(most)}, which can't be read from a server; "
        "download it."
    )


def _version(meta: ObjectMeta) -> str:
    if meta["e_tag"]:
        return f"{ENTITY_TAG}{meta['e_tag']}"
    modified = meta["last_modified"]
    return str(modified.isoformat()) if modified.timestamp() else ""


@atexit.register
def _close_all() -> None:
    """Close sockets that scripts left open, as aiohttp would warn about each."""
    if _first_process == os.getpid():
        for connection in list(_connections):
            connection.close()


def _abandon_all() -> None:
    """Drop the sockets in a forked process: they and their loops belong to its parent."""
    for connection in list(_connections):
        if connection._running is not None and isinstance(connection._running.store, HttpStore):
            connection._running.store.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


def _check_process(name: str) -> None:
    """Refuse to read in a fork of a process that has read remote slides: the read would hang."""
    global _first_process
    if _first_process is None:
        _first_process = os.getpid()
    if _first_process != os.getpid():
        raise SlideReadError(
            f"'{name}' can't be read in this process, because it was forked from one that has "
            "read remote slides; start processes with 'spawn' or 'forkserver'."
        )


def _open_store(url: str, name: str) -> Store:
    if not is_supported(url):
        raise UnsupportedSlideError(
            f"The scheme of '{name}' is not supported; "
            "use https, s3, gs or az, or the path of a file."
        )
    try:
        import aiohttp  # noqa: F401
        import platformdirs  # noqa: F401
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise UnsupportedSlideError(
            f"Reading '{name}' from a server requires optional packages; "
            'run pip install "napari-wsigpu[remote]" and restart.'
        ) from None
    try:
        if is_http(url):
            return HttpStore(url, _login(url), CONNECT_SECONDS, 2 * limits.first_byte_seconds)
        return from_url(
            url,
            client_options={
                "allow_http": True,  # for servers in the user's network, set by AWS_ENDPOINT_URL
                "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                "read_timeout": NO_TIMEOUT,
                "timeout": NO_TIMEOUT,
            },
            retry_config={
                "max_retries": RETRIES,
                "retry_timeout": timedelta(seconds=RETRY_SECONDS),
            },
        )
    except (BaseError, ValueError):
        raise SlideNotFoundError(f"'{name}' is not the URL of an object; check the URL.") from None


def _login(url: str) -> dict[str, str]:
    """Return the header with the URL's user and password."""
    parts = urlsplit(url)
    if parts.username is None:
        return {}
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {b64encode(login.encode()).decode()}"}


async def _first_result(
    store: Store, request: RangeRequest
) -> asyncio.Future[GetResult | HttpResponse]:
    """Request a range; repeat it after half the time limit, in case the connection was lost.

    Returns
    -------
    Future
        The first of the two requests to finish.

    Raises
    ------
    TimeoutError
        If no response starts in time.
    """
    from obstore import get_async

    sent: list[asyncio.Future[GetResult | HttpResponse]] = []
    try:
        for _ in range(2):
            if isinstance(store, HttpStore):
                sent.append(asyncio.ensure_future(store.get(request)))
            else:
                response = get_async(store, request.key, options=request.options)
                sent.append(asyncio.ensure_future(response))
            seconds = limits.first_byte_seconds / 2
            done, _ = await asyncio.wait(sent, timeout=seconds, return_when="FIRST_COMPLETED")
            if done:
                # Return the future: raising its error here would keep this frame alive.
                return done.pop()
        raise TimeoutError
    finally:
        for future in sent:
            future.cancel()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped; the target of a connection's thread."""
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, store: Store) -> None:
    """Make the loop's own thread close the sockets and end; doesn't wait for it.

    The garbage collector may call this in any thread.
    """
    if _first_process == os.getpid():
        asyncio.run_coroutine_threadsafe(_shut_down(store), loop)


async def _shut_down(store: Store) -> None:
    """Cancel all other tasks of the event loop, close the sockets, and stop the loop."""
    others: list[asyncio.Task[object]] = [
        task for task in asyncio.all_tasks() if task is not asyncio.current_task()
    ]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    if isinstance(store, HttpStore):
        await store.close()
    asyncio.get_running_loop().stop()
