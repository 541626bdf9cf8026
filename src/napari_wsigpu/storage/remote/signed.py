"""Ranges of a URL whose query may be a secret, as the signature of a link is.

obstore follows redirects by itself and tells the next server where it comes from, query and all
(`Referer`); it has no option against it. aiohttp asks without, and follows none.
"""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from napari_wsigpu.storage.remote.redirect import plain_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

PAUSES = (0.1, 0.3, 1.0, None)
BUSY = frozenset({429, 500, 502, 503, 504})
SENT_ON = range(300, 400)


def is_secret(url: str) -> bool:
    """Whether a URL has a query that no other server may learn."""
    parts = urlsplit(url)
    return parts.scheme.lower() in ("http", "https") and bool(parts.query)


class SentOn(OSError):  # noqa: N818
    """A server sends on to another place, which has to be asked for anew."""


class SignedStore:
    """Asks one server for ranges of one URL; used in the loop of one thread.

    Parameters
    ----------
    url : str
        The URL, with its query.
    headers : mapping
        Sent with each request.
    connect_seconds, silent_seconds : float
        How long a connection may take, and a server say nothing.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], connect_seconds: float, silent_seconds: float
    ) -> None:
        parts = urlsplit(url)
        if not parts.hostname or parts.port == 0:
            raise ValueError("no host")
        self._url = plain_url(url)
        self._headers = {"Accept-Encoding": "identity", **headers}
        self._seconds = {"sock_connect": connect_seconds, "sock_read": silent_seconds}
        direct = proxy_bypass(parts.hostname)
        self._proxy = None if direct else getproxies().get(parts.scheme.lower())
        self._session: Any = None

    async def get(self, begin: int, end: int) -> SignedAnswer:
        """Ask for a range.

        Raises
        ------
        OSError
            If the server doesn't give it, with words that `refusal.server_error` knows; a
            `SentOn` if it sends on.
        """
        import aiohttp
        from yarl import URL

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, **self._seconds)
            self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)
        for pause in PAUSES:
            try:
                answer = await self._session.get(
                    URL(self._url, encoded=True),
                    headers={**self._headers, "Range": f"bytes={begin}-{end - 1}"},
                    allow_redirects=False,
                    proxy=self._proxy,
                )
            except TimeoutError:
                raise OSError("TimedOut") from None
            except aiohttp.ClientError as error:
                if pause is None or isinstance(error, aiohttp.ClientConnectorCertificateError):
                    raise OSError(_reason(error)) from None
            else:
                if pause is None or answer.status not in BUSY:
                    return SignedAnswer(answer, begin, end)
                answer.release()
            await asyncio.sleep(pause)
        raise AssertionError("the last pause is None")

    async def close(self) -> None:
        """Let go of all connections."""
        if self._session is not None:
            await self._session.close()


class SignedAnswer:
    """What a server sent, as obstore has it.

    Attributes
    ----------
    range : tuple of int
        The first byte and the end of what was sent.
    meta : dict
        ``size`` of the whole object, ``e_tag`` (None if there is none) and ``last_modified``.
    """

    def __init__(self, answer: Any, begin: int, end: int) -> None:
        self._answer = answer
        headers = answer.headers
        unit, _, said = headers.get("Content-Range", "").partition(" ")
        place, _, size = said.partition("/")
        first, _, last = place.partition("-")
        if answer.status != 206:
            answer.close()
            if answer.status in SENT_ON:
                raise SentOn("BareRedirect") if "Location" in headers else OSError("BareRedirect")
            refused = f"status: {answer.status},"
            raise OSError("RangeNotSupported" if answer.status == 200 else refused)
        if unit != "bytes" or not all(
            text.isascii() and text.isdigit() and len(text) < 20 for text in (first, last, size)
        ):
            answer.close()
            raise OSError("ContentRange")
        self.range = int(first), int(last) + 1
        if self.range != (begin, min(end, int(size))):
            answer.close()
            raise OSError("UnexpectedRange")
        try:
            modified = parsedate_to_datetime(headers.get("Last-Modified", "")).astimezone(UTC)
        except ValueError:
            modified = datetime.fromtimestamp(0, UTC)
        self.meta = {"size": int(size), "e_tag": headers.get("ETag"), "last_modified": modified}

    async def stream(self, min_chunk_size: int = 0) -> AsyncIterator[bytes]:
        """Yield the bytes as they come, at least so many at a time until the last ones.

        Raises
        ------
        OSError
            If the connection breaks off.
        """
        import aiohttp

        held = bytearray()
        try:
            async for part in self._answer.content.iter_any():
                held += part
                if len(held) >= min_chunk_size:
                    yield bytes(held)
                    held.clear()
            if held:
                yield bytes(held)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OSError(_reason(error)) from None
        finally:
            if not self._answer.content.at_eof():
                self._answer.close()


def _reason(error: Exception) -> str:
    """Return the word for an error by which `refusal.BY_MARK` knows it."""
    import aiohttp

    cause = getattr(error, "os_error", None)
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "dns error"
    if isinstance(error, aiohttp.ClientConnectorCertificateError | ssl.SSLError):
        return "InvalidCertificate"
    if isinstance(cause, ConnectionRefusedError):
        return "ConnectionRefused"
    return "IncompleteMessage"
