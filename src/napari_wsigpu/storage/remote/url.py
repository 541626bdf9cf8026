"""URLs of slides: which paths are URLs, which are supported, and how to show them."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

SCHEMES = frozenset({"http", "https", "s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"})
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
# Anything else before the first slash may be part of a password.
HOST = re.compile(r"([^:@\s]*|\[[0-9A-Fa-f:.]*\])(:\d{1,5})?")
HTTP_SCHEMES = frozenset({"http", "https"})
# The path of a series on a DICOMweb server (PS3.18, section 10.4.1.1).
SERIES = re.compile(r".*/studies/[0-9.]{1,64}/series/[0-9.]{1,64}/?", re.DOTALL)


def is_url(path: str) -> bool:
    """Return whether a path is a URL rather than the path of a local file."""
    return URL.match(path) is not None


def is_supported(url: str) -> bool:
    """Return whether slides can be read from URLs with this scheme."""
    found = URL.match(url)
    return found is not None and found[1].lower() in SCHEMES


def has_target(url: str) -> bool:
    """Return whether a URL names anything after its scheme."""
    found = URL.match(public_url(url))
    return found is not None and found[2].strip("/") != ""


def supports_listing(url: str) -> bool:
    """Return whether the objects below a URL can be listed; HTTP has no way to list them."""
    found = URL.match(url)
    return is_supported(url) and found is not None and found[1].lower() not in HTTP_SCHEMES


def is_dicomweb(url: str) -> bool:
    """Return whether a URL names a series on a DICOMweb server."""
    found = URL.match(url)
    if found is None or found[1].lower() not in HTTP_SCHEMES:
        return False
    return SERIES.fullmatch(re.split(r"[?#]", found[2], maxsplit=1)[0]) is not None


def public_url(url: str) -> str:
    """Return a URL without user, password, query and fragment, which is safe to show.

    Parameters
    ----------
    url : str
        A URL, valid or not. Any other path is returned unchanged.
    """
    found = URL.match(url)
    if found is None:
        return url
    scheme, rest = found.groups()
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    user, at, address = host.rpartition("@")
    if scheme.lower() in HTTP_SCHEMES or ":" in user:
        host, at = address, ""
    if not HOST.fullmatch(host if not at else address):
        return f"{scheme}://…"
    return f"{scheme}://{host}{slash}{path}"


def file_name(path: str) -> str:
    """Return the last component of a path, or of a URL with its percent-encoding decoded."""
    if is_url(path):
        return unquote(public_url(path).rstrip("/").rpartition("/")[2])
    return Path(path).name
