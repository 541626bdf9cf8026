"""Where a server sends a request on to, asked without telling that server the URL it came from.

obstore follows redirects by itself, but names the URL that it comes from, query and all, to the
next server (`Referer`), and has no option against it.
"""

from __future__ import annotations

from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        How long to wait for each answer.
    """
    if not (urlsplit(url).scheme.lower() in ("http", "https") and urlsplit(url).query):
        return url
    opener = build_opener(_Stay)
    address = url
    for _ in range(MOST_REDIRECTS):
        try:
            headers = {"Range": "bytes=0-0", **(login if same_server(url, address) else {})}
            with opener.open(Request(_plain(address), headers=headers), timeout=seconds):
                return address
        except HTTPError as answer:
            with answer:
                target = answer.headers.get("Location")
            if answer.code not in REDIRECTS or not target:
                return address
        except (OSError, HTTPException, ValueError):  # obstore meets it again, and says it
            return address
        target = urljoin(address, target)
        if urlsplit(target).scheme not in ("http", "https"):
            return address
        address = target
    return address


def same_server(one: str, other: str) -> bool:
    """Whether two URLs lead to the same server by the same way."""
    first, second = urlsplit(one), urlsplit(other)
    return (first.scheme, first.hostname, first.port) == (
        second.scheme,
        second.hostname,
        second.port,
    )


class _Stay(HTTPRedirectHandler):
    """Goes nowhere: a redirect is an answer as any other."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _plain(url: str) -> str:
    """Return a URL without user, password and fragment, in ASCII."""
    parts = urlsplit(url)
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="")
    return quote(plain.geturl(), safe=LEFT_AS_THEY_ARE)
