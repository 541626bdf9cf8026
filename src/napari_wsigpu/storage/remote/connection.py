"""Ranges of one object on a server, many at the same time, with retries and deadlines.

Asked for by obstore, and where a URL's query may be a secret by `signed.SignedStore`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from base64 import b64encode
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from napari_wsigpu.model.errors import (
    SlideNotFoundError,
    SlideReadError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.limits import limits
from napari_wsigpu.storage.readers import closed_error
from napari_wsigpu.storage.remote.refusal import BREAKS_OFF, SILENT, SLOW, server_error
from napari_wsigpu.storage.remote.signed import SignedStore, is_secret
from napari_wsigpu.storage.remote.url import is_supported, public_url

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

MOST_AT_ONCE = 16
MOST_BYTES, FARTHEST = 1 << 30, 1 << 62
ENTITY_TAG = "ETag "
CONNECT_SECONDS = 5
# How fast an answer comes is looked at after each part of it, which costs as much as 0.1 MB do. So
# parts are as large as come in this time, if the answer before came as fast as that.
PART, LARGEST_PART, PART_SECONDS = 4 << 10, 1 << 20, 0.1
FOR_EVER = timedelta(days=1)
RETRIES, RETRY_SECONDS = 4, 20
PAUSES = (0.1, 0.3, 1.0)

_first_process: int | None = None

Found = TypeVar("Found")


class Answer(NamedTuple):
    """What a server sent.

    Attributes
    ----------
    data : memoryview
        The bytes of the range, fewer where the object ends before.
    size : int
        Size of the whole object.
    version : str
        What changes with the object: its entity tag, else when it was modified; may be empty.
    """

    data: memoryview
    size: int
    version: str


class _Wanted(NamedTuple):
    """What is asked for; see `Connection.get`."""

    key: str
    offset: int
    length: int | None

    def within(self, size: int) -> tuple[int, int]:
        """Return where it begins and ends in an object of so many bytes."""
        if self.length is None:
            return 0, size
        begin = self.offset if self.offset >= 0 else max(0, size + self.offset)
        return begin, min(begin + self.length, size)

    @property
    def options(self) -> Any:
        """The same as obstore takes it."""
        if self.length is None:
            return None
        if self.offset < 0:
            return {"range": {"suffix": -self.offset}}
        return {"range": (self.offset, self.offset + self.length)}


class Connection:
    """An object on a server; safe under many threads.

    Credentials are found in the ways of obstore: in the URL, or in environment variables.

    Parameters
    ----------
    url : str
        Of the kinds that `url.SCHEMES` names.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._name = public_url(url)
        self._lock = threading.Lock()
        self._closed = False
        self._running: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None
        self._store: Any = None
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)
        self._part = PART

    def get(self, offset: int, length: int | None, key: str = "") -> Future[Answer]:
        """Ask for a range, in the background.

        Parameters
        ----------
        offset, length : int
            Where it begins, before the end if that is below 0, and how many bytes it has. Without
            a length the whole object is asked for, which servers without ranges give, too.
        key : str
            Which object below the URL; by default that of the URL itself.

        Returns
        -------
        Future of Answer
            Raises a `SlideError` if the server doesn't give it. It is cancelled by `release`.

        Raises
        ------
        SlideClosedError
            If the connection was closed.
        SlideError
            If the URL is none that can be read from.
        """
        return self._begin(lambda store: self._get(store, _Wanted(key, offset, length)))

    def names(self) -> Future[list[str]]:
        """Ask for the names of the objects right below the URL, in the background.

        Returns
        -------
        Future of list of str
            Raises and is cancelled as that of `get`; for a URL that `gives_lists`.

        Raises
        ------
        SlideError
            As `get` does.
        """
        return self._begin(self._names)

    def _begin(self, ask: Callable[[Any], Coroutine[Any, Any, Found]]) -> Future[Found]:
        """Have the store asked in the background."""
        with self._lock:
            if self._closed:
                raise closed_error(self._name)
            _check_process(self._name)
            if self._running is None:
                self._store = _open_store(self._url, self._name)
                self._slots = asyncio.Semaphore(MOST_AT_ONCE)
                loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=loop.run_forever, name="wsigpu-remote", daemon=True
                )
                thread.start()
                self._running = loop, thread
            return asyncio.run_coroutine_threadsafe(ask(self._store), self._running[0])

    def release(self) -> None:
        """Let go of thread and sockets, and cancel what is asked for, until the next `get`."""
        with self._lock:
            if self._running is not None:
                loop, thread = self._running
                store, self._running, self._store = self._store, None, None
                asyncio.run_coroutine_threadsafe(_end(store), loop).result()
                loop.call_soon_threadsafe(loop.stop)
                thread.join()
                loop.close()

    def close(self) -> None:
        """Let go of everything for good."""
        with self._lock:
            self._closed = True
        self.release()

    async def _names(self, store: Any) -> list[str]:
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

    async def _get(self, store: Any, wanted: _Wanted) -> Answer:
        async with self._slots:
            for pause in PAUSES:
                answer = await self._ask(store, wanted)
                if answer is not None:
                    return answer
                await asyncio.sleep(pause)
        raise SlideReadError(BREAKS_OFF.format(self._name))

    async def _ask(self, store: Any, wanted: _Wanted) -> Answer | None:
        """Ask once for a range; None if it arrives incomplete."""
        from obstore.exceptions import BaseError

        try:
            result = (await _begun(store, wanted)).result()
        except TimeoutError:
            raise SlideReadError(SILENT.format(self._name)) from None
        except (BaseError, OSError) as error:
            raise server_error(self._name, error) from None
        meta, (begin, end) = result.meta, result.range
        size = int(meta["size"])
        if (begin, end) != wanted.within(size):
            return None
        if end - begin > MOST_BYTES:
            raise UnsupportedSlideError(
                f"'{self._name}' has parts of more than {MOST_BYTES >> 20} MiB, which are too "
                "large to be read from a server; download it."
            )
        part = self._part
        try:
            data = await self._received(result.stream(min_chunk_size=part), end - begin, part)
        except TimeoutError:
            if part > PART:  # it may come, if it is looked at more often
                self._part = PART
                return None
            raise SlideReadError(SLOW.format(self._name)) from None
        except (BaseError, OSError):
            return None
        return None if data is None else Answer(data, size, _version(meta))

    async def _received(self, parts: Any, length: int, size: int) -> memoryview | None:
        """Put an answer together; None if there is not as much as was said, or more.

        Raises
        ------
        TimeoutError
            If it comes too slowly in parts of such a size.
        """
        found, received = [], 0
        clock = asyncio.get_running_loop().time
        begin = clock()
        latest = begin + limits.first_byte_seconds / (1 if size == PART else 4)
        async with asyncio.timeout_at(latest) as deadline:
            async for part in parts:
                found.append(part)
                received += len(part)
                if received > length:
                    return None
                if received == length and len(part) < size:
                    break  # only a last part is smaller: to wait for the end costs as much again
                deadline.reschedule(latest + received / limits.bytes_per_second)
        if received < length:
            return None
        fast = int(PART_SECONDS * length / max(clock() - begin, 1e-6))
        self._part = min(max(PART, fast), LARGEST_PART)
        return memoryview(found[0] if len(found) == 1 else b"".join(found))


def _version(meta: Any) -> str:
    if meta["e_tag"]:
        return f"{ENTITY_TAG}{meta['e_tag']}"
    modified = meta["last_modified"]
    return str(modified.isoformat()) if modified.timestamp() else ""


def _check_process(name: str) -> None:
    """Refuse to read in a copy of a process that has read: obstore would wait for ever there."""
    global _first_process
    if _first_process is None:
        _first_process = os.getpid()
    if _first_process != os.getpid():
        raise SlideReadError(
            f"'{name}' can't be read in a process that was forked from one which has read remote "
            "slides; start processes by 'spawn' or 'forkserver'."
        )


def _open_store(url: str, name: str) -> Any:
    if not is_supported(url):
        raise UnsupportedSlideError(
            f"'{name}' lies where slides can't be read from; "
            "use https, s3, gs or az, or the path of a file."
        )
    try:
        import aiohttp  # noqa: F401
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise UnsupportedSlideError(
            f"'{name}' lies on a server, which needs a further package; "
            'run pip install "napari-wsigpu[remote]" and start again.'
        ) from None
    try:
        login = _login(url)
        if is_secret(url):
            return SignedStore(url, login, CONNECT_SECONDS, 2 * limits.first_byte_seconds)
        return from_url(
            url,
            client_options={
                "allow_http": not url.lower().startswith("https:"),
                "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                "read_timeout": FOR_EVER,
                "timeout": FOR_EVER,
                "default_headers": login,
            },
            retry_config={
                "max_retries": RETRIES,
                "retry_timeout": timedelta(seconds=RETRY_SECONDS),
            },
        )
    except (BaseError, ValueError):
        raise SlideNotFoundError(f"'{name}' is no URL of an object; check it.") from None


def _login(url: str) -> dict[str, str]:
    """Return the header that sends a URL's user and password, which obstore leaves out."""
    parts = urlsplit(url)
    if not parts.scheme.startswith("http") or parts.username is None:
        return {}
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {b64encode(login.encode()).decode()}"}


async def _begun(store: Any, wanted: _Wanted) -> asyncio.Future[Any]:
    """Ask for a range, after half of the time once more, as a connection may be lost.

    What is returned has a result with obstore's attributes.

    Raises
    ------
    TimeoutError
        If no answer begins in time.
    """
    from obstore import get_async

    asked: list[asyncio.Future[Any]] = []
    try:
        for _ in range(2):
            if isinstance(store, SignedStore):
                begin, end = wanted.within(FARTHEST)
                asked.append(asyncio.ensure_future(store.get(begin, end)))
            else:
                answer = get_async(store, wanted.key, options=wanted.options)
                asked.append(asyncio.ensure_future(answer))
            seconds = limits.first_byte_seconds / 2
            done, _ = await asyncio.wait(asked, timeout=seconds, return_when="FIRST_COMPLETED")
            if done:
                return done.pop()  # whose error shall not hold this frame
        raise TimeoutError
    finally:
        for future in asked:
            future.cancel()


async def _end(store: Any) -> None:
    """Cancel what is asked for, and let go of connections."""
    others: list[asyncio.Task[Any]] = [
        task for task in asyncio.all_tasks() if task is not asyncio.current_task()
    ]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    if isinstance(store, SignedStore):
        await store.close()
