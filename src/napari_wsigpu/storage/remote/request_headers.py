"""Request headers that users set for a server, such as access tokens.

The headers are stored per server, outside the slides, so no slide, pickle, message or log contains
them. The environment variable WSIGPU_REQUEST_HEADERS sets them for a process and its children, as
JSON: ``{"https://host": {"Authorization": "Bearer …"}}``.
"""

from __future__ import annotations

import json
import logging
import os
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from napari_wsigpu.model.errors import UnsupportedSlideError
from napari_wsigpu.storage.remote.url import HTTP_SCHEMES, public_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    Server = tuple[str, str, int]

VARIABLE = "WSIGPU_REQUEST_HEADERS"
PORTS = {"http": 80, "https": 443}
NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}")  # RFC 9110, section 5.6.2

logger = logging.getLogger(__name__)
_headers: dict[Server, dict[str, str]] = {}


def set_request_headers(url: str, headers: Mapping[str, str]) -> None:
    """Send headers, such as an access token, with all requests to the server of a URL.

    The headers replace those set earlier for this server, and also apply to slides that are already
    open: set a new token before the old one expires. No other server receives them, even if this
    server redirects to it. Forked processes inherit the headers; spawned processes don't, so set
    the headers again there.

    Parameters
    ----------
    url : str
        Any http or https URL on the server.
    headers : Mapping of str to str
        Values by name; an empty mapping removes the headers set earlier.

    Raises
    ------
    UnsupportedSlideError
        If the URL or a header is not valid.

    Examples
    --------
    >>> set_request_headers("https://host", {"Authorization": "Bearer …"})  # doctest: +SKIP
    """
    server = server_of(url)
    if server is None:
        raise UnsupportedSlideError(
            f"'{public_url(url)}' is not the URL of a web server; pass a URL like 'https://host'."
        )
    for name, value in headers.items():
        if not (isinstance(value, str) and value.isprintable() and NAME.fullmatch(name)):
            raise UnsupportedSlideError(
                f"The request header {str(name)[:64]!r} is not valid; pass a name without spaces "
                "and a value without line breaks."
            )
    _headers[server] = dict(headers)


def request_headers(url: str) -> dict[str, str]:
    """Return the headers that the user set for the server of a URL."""
    server = server_of(url)
    return {} if server is None else _headers.get(server, {})


def server_of(url: str) -> Server | None:
    """Return the scheme, host and port of an http or https URL; None for anything else."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme.lower(), parts.hostname, parts.port
    except ValueError:
        return None
    return (scheme, host, port or PORTS[scheme]) if scheme in HTTP_SCHEMES and host else None


def _load(text: str) -> None:
    """Set the headers given as JSON; if it is invalid, log a warning that does not quote it."""
    try:
        for url, headers in json.loads(text).items():
            set_request_headers(url, headers)
    except (ValueError, AttributeError, TypeError):
        logger.warning(
            '%s is not valid; write it like \'{"https://host": {"Authorization": "…"}}\'.',
            VARIABLE,
        )


_load(os.environ.get(VARIABLE, "{}"))
