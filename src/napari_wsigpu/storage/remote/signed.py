"""Ranges of a URL whose query may be a secret, as the signature of a link is.

obstore follows redirects by itself and tells the next server where it comes from, query and all
(`Referer`); it has no option against it. With aiohttp they are followed here, without.
"""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from urllib.parse import SplitResult

PAUSES = (0.1, 0.3, 1.0, None)
BUSY = frozenset({429, 500, 502, 503, 504})
SENT_ON = range(300, 400)
MOST_REDIRECTS = 5
REDIRECTS = frozenset({301, 302, 303, 307, 308})
# What a server that was sent on to answers when it no longer holds.
EXPIRED = frozenset({401, 403})
LEFT_AS_THEY_ARE = "%/:=&?~+!$,;'@()*[]|"


def is_secret(url: str) -> bool:
    """Whether a URL has a query that no other server may learn."""
    parts = urlsplit(url)
    return parts.scheme.lower() in ("http", "https") and bool(parts.query)


class SignedStore:
    """Asks for ranges of one URL, where its server sends on to if it does; in one thread's loop.

    Parameters
    ----------
    url : str
        The URL, with its query.
    login : mapping
        Headers for the server of `url` alone.
    connect_seconds, silent_seconds : float
        How long a connection may take, and a server say nothing.
    """

    def __init__(
        self, url: str, login: Mapping[str, str], connect_seconds: float, silent_seconds: float
    ) -> None:
        parts = urlsplit(url)
        if not parts.hostname or parts.port == 0:
            raise ValueError("no host")
        self._url = self._address = url
        self._login = login
        self._seconds = {"sock_connect": connect_seconds, "sock_read": silent_seconds}
        self._session: Any = None

    async def get(self, begin: int, end: int) -> SignedAnswer:
        """Ask for a range.

        Raises
        ------
        OSError
            If the server doesn't give it, with words that `refusal.server_error` knows.
        """
        import aiohttp

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, **self._seconds)
            self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)
        for pause in PAUSES:
            try:
                answer = await self._followed(f"bytes={begin}-{end - 1}")
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

    async def _followed(self, part: str) -> Any:
        """Ask where the server sent on to last, or the server itself if that holds no more."""
        address = self._address
        answer = await self._ask(address, part)
        if answer.status in EXPIRED and address != self._url:
            answer.release()
            address = self._url
            answer = await self._ask(address, part)
        for _ in range(MOST_REDIRECTS):
            target = _target(address, answer)
            if target is None:
                break
            answer.release()
            address = target
            answer = await self._ask(address, part)
        self._address = address
        return answer

    async def _ask(self, address: str, part: str) -> Any:
        from yarl import URL

        url = urlsplit(address)
        login = self._login if _server(url) == _server(urlsplit(self._url)) else {}
        direct = proxy_bypass(url.hostname or "")
        proxy = None if direct else getproxies().get(url.scheme.lower())
        return await self._session.get(
            URL(_plain(address), encoded=True),
            headers={"Accept-Encoding": "identity", **login, "Range": part},
            allow_redirects=False,
            proxy=proxy,
        )

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
                raise OSError("too many redirects" if "Location" in headers else "BareRedirect")
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


def _target(address: str, answer: Any) -> str | None:
    """Return the URL that an answer sends on to; None if it does not, or not to a server."""
    location = answer.headers.get("Location")
    if answer.status not in REDIRECTS or not location:
        return None
    try:
        target = urljoin(address, location)
        parts = urlsplit(target)
        # What was asked for in secret must not be sent in the clear.
        schemes = ("https",) if address.startswith("https:") else ("http", "https")
        reachable = parts.scheme in schemes and parts.hostname and parts.port != 0
    except ValueError:
        return None
    return target if reachable else None


def _server(url: SplitResult) -> tuple[str, str | None, int | None]:
    return url.scheme, url.hostname, url.port


def _plain(url: str) -> str:
    """Return a URL without user, password and fragment, in ASCII."""
    parts = urlsplit(url)
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="")
    return quote(plain.geturl(), safe=LEFT_AS_THEY_ARE)


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
