"""Which paths are URLs, and what of them may be shown."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

SCHEMES = frozenset({"http", "https", "s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"})
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
# What is no host can be a part of a password.
HOST = re.compile(r"([^:@\s]*|\[[0-9A-Fa-f:.]*\])(:\d{1,5})?")
WITH_USER = frozenset({"http", "https"})


def is_url(path: str) -> bool:
    """Whether a path is a URL and no path of a local file."""
    return URL.match(path) is not None


def is_supported(url: str) -> bool:
    """Whether slides can be read from servers of a URL's kind."""
    found = URL.match(url)
    return found is not None and found[1].lower() in SCHEMES


def gives_lists(url: str) -> bool:
    """Whether servers of a URL's kind say what a folder holds: those of files give no lists."""
    found = URL.match(url)
    return is_supported(url) and found is not None and found[1].lower() not in WITH_USER


def public_url(url: str) -> str:
    """Return a URL without user, password, query and fragment, to be shown.

    Parameters
    ----------
    url : str
        A URL, valid or not.
    """
    found = URL.match(url)
    if found is None:
        return url
    scheme, rest = found.groups()
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    user, at, address = host.rpartition("@")
    if scheme.lower() in WITH_USER or ":" in user:
        host, at = address, ""
    if not HOST.fullmatch(host if not at else address):
        return f"{scheme}://…"
    return f"{scheme}://{host}{slash}{path}"


def file_name(path: str) -> str:
    """Return the last part of a path, or of a URL as people read it."""
    if is_url(path):
        return unquote(public_url(path).rstrip("/").rpartition("/")[2])
    return Path(path).name
