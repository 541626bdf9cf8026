"""Range requests for http and https URLs.

obstore would send the whole URL, including its query, to the target of a redirect in the `Referer`
header, and follow redirects to any address; no option changes this. This module therefore uses
aiohttp, sends no such header, and blocks redirects to loopback and link-local addresses.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from errno import EMFILE, ENFILE
from ipaddress import IPv6Address, ip_address
from socket import AF_INET
from typing import TYPE_CHECKING, NamedTuple, TypedDict
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from napari_wsigpu.model.limits import limits
from napari_wsigpu.storage.remote.request_headers import request_headers, server_of
from napari_wsigpu.storage.remote.url import HTTP_SCHEMES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from socket import AddressFamily

    from aiohttp import ClientResponse, ClientSession
    from aiohttp.abc import AbstractResolver, ResolveResult
    from obstore import GetOptions

PAUSES = (0.1, 0.3, 1.0, None)  # seconds before each retry; no retry after the last request
BUSY = frozenset({429, 500, 502, 503, 504})
REDIRECTION = range(300, 400)
MAX_REDIRECTS = 5
MAX_BYTES = 1 << 30
REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Status codes that an expired redirect target returns.
EXPIRED = frozenset({401, 403})
UNQUOTED = "%/:=&?~+!$,;'@()*[]|"


class RangeRequest(NamedTuple):
    """The arguments of `Connection.get`."""

    key: str
    offset: int
    length: int | None
    accept: str = ""
    most: int = MAX_BYTES

    def within(self, size: int) -> tuple[int, int]:
        """Return the start and end of the range in an object of `size` bytes."""
        if self.length is None:
            return 0, size
        start = self.offset if self.offset >= 0 else max(0, size + self.offset)
        return start, min(start + self.length, size)

    @property
    def headers(self) -> dict[str, str]:
        """The range as a header (RFC 9110, section 14.2), or the acceptable media types."""
        if self.length is None:
            return {"Accept": self.accept} if self.accept else {}
        last = self.offset + self.length - 1
        return {
            "Range": f"bytes={self.offset}" if self.offset < 0 else f"bytes={self.offset}-{last}"
        }

    @property
    def options(self) -> GetOptions | None:
        """The range in the form that obstore takes."""
        if self.length is None:
            return None
        if self.offset < 0:
            return {"range": {"suffix": -self.offset}}
        return {"range": (self.offset, self.offset + self.length)}


class Metadata(TypedDict):
    """Metadata of an object, with the keys of `obstore.ObjectMeta`."""

    size: int
    e_tag: str | None
    last_modified: datetime


def is_http(url: str) -> bool:
    """Return whether a URL uses http or https."""
    # `urlsplit` raises an error for invalid addresses.
    return url.partition("://")[0].lower() in HTTP_SCHEMES


def has_query(url: str) -> bool:
    """Return whether a URL is an http or https URL with a query."""
    return is_http(url) and "?" in url.partition("#")[0]


class HttpStore:
    """Sends range requests for a URL or keys below it; use it in one event loop only.

    Redirects are followed, but not from https to http, and not to loopback or link-local addresses
    unless the URL itself leads there or `limits.allow_hosts` names the host.

    Parameters
    ----------
    url : str
        The URL, with its query.
    login : mapping
        Headers that are sent to the server of `url`, but not to the target of a redirect.
    connect_seconds, silent_seconds : float
        Time limits for connecting, and for receiving the next bytes.
    """

    def __init__(
        self, url: str, login: Mapping[str, str], connect_seconds: float, silent_seconds: float
    ) -> None:
        parts = urlsplit(url)
        if not parts.hostname or parts.port == 0:
            raise ValueError("no host")
        self._url = self._address = url
        self._login = login
        self._trusts_local = is_local_name(parts.hostname)
        # Hosts named only by redirects; their addresses are checked.
        self._redirected: set[str] = set()
        self._seconds = {"sock_connect": connect_seconds, "sock_read": silent_seconds}
        self._session: ClientSession | None = None

    async def get(self, request: RangeRequest) -> HttpResponse:
        """Request a range.

        Raises
        ------
        OSError
            If the request fails; the message has a marker that `refusal.server_error` recognizes.
        """
        import aiohttp

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, **self._seconds)
            self._session = aiohttp.ClientSession(
                timeout=timeout,
                auto_decompress=False,
                connector=aiohttp.TCPConnector(resolver=_resolver(self)),
            )
        for pause in PAUSES:
            try:
                response = await self._follow(request)
            except TimeoutError:
                raise OSError("TimedOut") from None
            except aiohttp.ClientError as error:
                lasting = isinstance(
                    error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorDNSError
                )
                if isinstance(error, OSError) and error.errno in (EMFILE, ENFILE):
                    raise
                if pause is None or lasting:
                    raise OSError(_reason(error)) from None
            else:
                if pause is None or response.status not in BUSY:
                    return HttpResponse(response, request)
                response.release()
            await asyncio.sleep(pause)
        raise AssertionError("the last pause is None")

    def check_address(self, host: str, address: str) -> None:
        """Check an address to which a host name has been resolved.

        Raises
        ------
        OSError
            If a redirect leads to a loopback or link-local address that is not allowed.
        """
        if host == urlsplit(self._url).hostname:
            self._trusts_local |= is_local_address(address)
        elif host in self._redirected and is_local_address(address):
            self._check_local(host)

    def _check_local(self, host: str) -> None:
        if not self._trusts_local and host not in limits.allow_hosts:
            raise OSError("LocalRedirect")

    async def _follow(self, request: RangeRequest) -> ClientResponse:
        """Request a range from the latest redirect target; once that has expired, from the URL."""
        url = _below(self._url, request.key) if request.key else self._url
        address = url if request.key else self._address
        response = await self._send(address, request)
        if response.status in EXPIRED and address != url:
            response.release()
            address = url
            response = await self._send(address, request)
        for _ in range(MAX_REDIRECTS):
            target = _target(address, response)
            if target is None:
                break
            response.release()
            host = urlsplit(target).hostname or ""
            if host != urlsplit(self._url).hostname:
                self._redirected.add(host)
                if is_local_name(host):
                    self._check_local(host)
            address = target
            response = await self._send(address, request)
        if not request.key:
            self._address = address
        return response

    async def _send(self, address: str, request: RangeRequest) -> ClientResponse:
        from yarl import URL

        assert self._session is not None
        url = urlsplit(address)
        # Only the server of the URL itself may learn the password and the user's headers.
        is_own = server_of(address) == server_of(self._url)
        secrets = {**self._login, **request_headers(address)} if is_own else {}
        direct = proxy_bypass(url.hostname or "")
        proxy = None if direct else getproxies().get(url.scheme.lower())
        return await self._session.get(
            URL(_plain(address), encoded=True),
            headers={**secrets, "Accept-Encoding": "identity", **request.headers},
            allow_redirects=False,
            proxy=proxy,
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def abandon(self) -> None:
        """Drop all connections without closing them, in a process forked from their own."""
        if self._session is not None:
            # Closing them would change the parent's selector. aiohttp has no public way to make
            # the connector forget them, and would warn about each.
            connector = self._session.connector
            self._session.detach()
            if connector is not None:
                connector._closed = True


class HttpResponse:
    """The response to a range request, with the interface of `obstore.GetResult`.

    Attributes
    ----------
    range : tuple of int
        Start and end of the response in the object.
    is_exact : bool
        Whether the server states the end of the range; if not, `range` has the largest possible
        end.
    media_type : str
        Media type of the response, with its parameters.
    meta : Metadata
        Size, entity tag (None if there is none) and modification time of the whole object.
    """

    def __init__(self, response: ClientResponse, request: RangeRequest) -> None:
        self._response = response
        headers = response.headers
        whole = request.length is None and response.status == 200
        self.media_type = headers.get("Content-Type", "")
        self.is_exact = not request.accept or "Content-Length" in headers
        # Content-Range: bytes FIRST-LAST/SIZE (RFC 9110, section 14.4)
        unit, _, value = headers.get("Content-Range", "").partition(" ")
        bounds, _, size = value.partition("/")
        first, _, last = bounds.partition("-")
        if whole:
            unknown = str(request.most) if request.accept else ""
            unit, first, size = "bytes", "0", headers.get("Content-Length", unknown)
            last = str(int(size) - 1) if size.isdigit() else ""
        elif response.status != 206:
            response.close()
            if response.status in REDIRECTION:
                raise OSError("too many redirects" if "Location" in headers else "BareRedirect")
            refused = f"status: {response.status},"
            raise OSError("RangeNotSupported" if response.status == 200 else refused)
        if unit != "bytes" or not all(
            text.isascii() and text.lstrip("-").isdigit() and len(text) < 20
            for text in (first, last, size)
        ):
            response.close()
            raise OSError("ContentRange")
        self.range = int(first), int(last) + 1
        if self.range != request.within(int(size)):
            response.close()
            raise OSError("UnexpectedRange")
        try:
            modified = parsedate_to_datetime(headers.get("Last-Modified", "")).astimezone(UTC)
        except ValueError:
            modified = datetime.fromtimestamp(0, UTC)
        self.meta: Metadata = {
            "size": int(size),
            "e_tag": headers.get("ETag"),
            "last_modified": modified,
        }

    def close(self) -> None:
        """Drop the rest of a response; the connection is reused only if nothing is left."""
        if not self._response.content.at_eof():
            self._response.close()

    async def stream(self, min_chunk_size: int = 0) -> AsyncIterator[bytes]:
        """Yield the bytes as they arrive, in chunks of `min_chunk_size` or more, except the last.

        Raises
        ------
        OSError
            If the connection is lost.
        """
        import aiohttp

        held = bytearray()
        try:
            async for part in self._response.content.iter_any():
                held += part
                if len(held) >= min_chunk_size:
                    yield bytes(held)
                    held.clear()
            if held:
                yield bytes(held)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OSError(_reason(error)) from None
        finally:
            self.close()


def _target(address: str, response: ClientResponse) -> str | None:
    """Return the URL that a response redirects to; None if there is none, or it is unusable."""
    location = response.headers.get("Location")
    if response.status not in REDIRECTS or not location:
        return None
    try:
        target = urljoin(address, location)
        parts = urlsplit(target)
        # A redirect must not downgrade a request from HTTPS to plain HTTP.
        schemes = ("https",) if urlsplit(address).scheme == "https" else ("http", "https")
        reachable = parts.scheme in schemes and parts.hostname and parts.port != 0
    except ValueError:
        return None
    return target if reachable else None


def _below(url: str, key: str) -> str:
    """Return the URL of the object named `key` below a URL."""
    parts = urlsplit(url)
    path = f"{parts.path.rstrip('/')}/{quote(key, safe=UNQUOTED.replace('%', ''))}"
    return parts._replace(path=path.replace("?", "%3F")).geturl()


def is_local_name(host: str) -> bool:
    """Return whether a host is `localhost`, or a local IP address as in `is_local_address`."""
    name = host.rstrip(".").lower()
    return name == "localhost" or name.endswith(".localhost") or is_local_address(name)


def is_local_address(text: str) -> bool:
    """Return whether a string is a loopback, link-local or unspecified IP address."""
    with suppress(ValueError):
        address = ip_address(text.partition("%")[0])
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return address.is_loopback or address.is_link_local or address.is_unspecified
    return False


def _resolver(store: HttpStore) -> AbstractResolver:
    """Return a resolver of host names that lets a store check the addresses."""
    from aiohttp import ThreadedResolver  # aiohttp is optional

    class CheckingResolver(ThreadedResolver):  # type: ignore[misc]
        async def resolve(
            self, host: str, port: int = 0, family: AddressFamily = AF_INET
        ) -> list[ResolveResult]:
            found: list[ResolveResult] = await super().resolve(host, port, family)
            for each in found:
                store.check_address(host, each["host"])
            return found

    return CheckingResolver()


def _plain(url: str) -> str:
    """Return a URL without user, password and fragment, percent-encoded to ASCII."""
    parts = urlsplit(url)
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="")
    return quote(plain.geturl(), safe=UNQUOTED)


def _reason(error: Exception) -> str:
    """Return the marker of an error in `refusal.BY_MARK`."""
    import aiohttp

    cause = getattr(error, "os_error", None)
    if "LocalRedirect" in str(cause):
        return "LocalRedirect"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "dns error"
    if isinstance(error, aiohttp.ClientConnectorCertificateError | ssl.SSLError):
        return "InvalidCertificate"
    if isinstance(cause, ConnectionRefusedError):
        return "ConnectionRefused"
    return "IncompleteMessage"
