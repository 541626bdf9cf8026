"""Where a server sends a request on to, asked without telling that server the URL it came from.

obstore follows redirects by itself, but names the URL that it comes from, query and all, to the
next server (`Referer`), and has no option against it.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from socket import SHUT_RDWR
from threading import Timer
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import (
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    Request,
    build_opener,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from urllib.request import OpenerDirector

MOST_REDIRECTS = 5
REDIRECTS = frozenset({301, 302, 303, 307, 308})
LEFT_AS_THEY_ARE = "%/:=&?~+!$,;'@()*[]|"


def final_url(url: str, login: Mapping[str, str], seconds: float) -> str:
    """Return the URL at which a server finally answers, whatever it answers.

    Parameters
    ----------
    url : str
        Where to begin. Without http and a query there is no secret to keep, and no request.
    login : mapping
        Headers for the server of `url` alone.
    seconds : float
        How long to wait for all answers.

    Raises
    ------
    TimeoutError
        If they are longer in coming.
    """
    if not (urlsplit(url).scheme.lower() in ("http", "https") and urlsplit(url).query):
        return url
    with _Deadline(seconds) as deadline:
        return _followed(url, login, build_opener(_Stay, deadline), deadline)


def _followed(
    url: str, login: Mapping[str, str], opener: OpenerDirector, deadline: _Deadline
) -> str:
    address = url
    for _ in range(MOST_REDIRECTS):
        try:
            headers = {"Range": "bytes=0-0", **(login if same_server(url, address) else {})}
            request = Request(plain_url(address), headers=headers)
            with opener.open(request, timeout=deadline.seconds):
                deadline.check()  # a shut connection looks like the end of headers
                return address
        except HTTPError as answer:
            with answer:
                target = answer.headers.get("Location")
            if answer.code not in REDIRECTS or not target:
                return address
        except TimeoutError:
            raise
        except (OSError, HTTPException, ValueError):  # obstore meets it again, and says it
            deadline.check()
            return address
        target = urljoin(address, target)
        if urlsplit(target).scheme not in ("http", "https"):
            return address
        address = target
    return address


def same_server(one: str, other: str) -> bool:
    """Whether two URLs lead to the same server by the same way."""
    first, second = ((url.scheme, url.hostname, url.port) for url in map(urlsplit, (one, other)))
    return first == second


class _Stay(HTTPRedirectHandler):
    """Goes nowhere: a redirect is an answer as any other."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Deadline(HTTPSHandler, HTTPHandler):
    """Shuts connections after a time, since a timeout of a socket begins anew with each byte."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self._passed = False
        self._connections: list[HTTPConnection] = []
        self._timer = Timer(seconds, self._shut)

    def http_open(self, request: Request) -> Any:
        """Send a request by a connection that is shut after the time."""
        return self.do_open(partial(self._connected, HTTPConnection), request)

    def https_open(self, request: Request) -> Any:
        """Send a request by a connection that is shut after the time."""
        return self.do_open(partial(self._connected, HTTPSConnection), request)

    def check(self) -> None:
        """Raise TimeoutError if it has passed."""
        if self._passed:
            raise TimeoutError

    def _connected(self, kind: type[HTTPConnection], *given: Any, **options: Any) -> HTTPConnection:
        self._connections.append(kind(*given, **options))
        return self._connections[-1]

    def _shut(self) -> None:
        self._passed = True
        for connection in self._connections:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(SHUT_RDWR)

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()
        for connection in self._connections:
            connection.close()


def plain_url(url: str) -> str:
    """Return a URL without user, password and fragment, in ASCII."""
    parts = urlsplit(url)
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="")
    return quote(plain.geturl(), safe=LEFT_AS_THEY_ARE)
