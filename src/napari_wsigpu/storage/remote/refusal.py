"""Error messages for the reasons why a file can't be read from a server.

obstore's own messages contain the URL with its secrets, so they are analyzed but never shown.
"""

from __future__ import annotations

import re
from errno import EMFILE, ENFILE

from napari_wsigpu.model.errors import (
    NotASlideError,
    SlideError,
    SlideNotFoundError,
    SlidePermissionError,
    SlideReadError,
    UnsupportedSlideError,
    file_error,
)

DISCONNECTED = "The server of '{}' keeps closing the connection; try again later."
FORBIDDEN = (
    "You don't have permission to read '{}', or the link has expired; check your credentials, or "
    "ask the owner for access."
)
MISSING = "There is no file at '{}'; check the URL."
BUSY = "The server of '{}' is too busy; try again later."
FAILS = "The server of '{}' reported an internal error; try again later."
EMPTY = "'{}' is empty, or shorter than its server claims; choose a slide file."
SILENT = "The server of '{}' did not respond in time; try again later."
SLOW = (
    "The server of '{}' sends data too slowly to read a slide; try again later, or lower the "
    "limit 'bytes_per_second'."
)
UNREADABLE = "'{}' can't be read from its server; check the URL and the network, and try again."

WITHOUT_RANGES = (
    "The server of '{}' does not support range requests; download the whole slide and open the "
    "copy."
)
TRANSCODES = (
    "The server of '{}' does not send its images as they are stored; download the series and open "
    "its folder."
)

STATUS = re.compile(r"\bstatus: (\d{3}),")
BY_STATUS = {
    401: FORBIDDEN,
    403: FORBIDDEN,
    404: MISSING,
    406: TRANSCODES,
    410: MISSING,
    416: EMPTY,
    429: BUSY,
    503: BUSY,
    500: FAILS,
    502: FAILS,
    504: FAILS,
}
# Messages by the marker that selects them; an error's text is searched for the markers in this
# order.
BY_MARK = {
    "RangeNotSupported": WITHOUT_RANGES,
    "NotPartial": WITHOUT_RANGES,
    "UnexpectedRange": WITHOUT_RANGES,
    "ContentRange": WITHOUT_RANGES,
    "MissingContentLength": WITHOUT_RANGES,
    "dns error": "The server of '{}' can't be found; check its name and the network.",
    "InvalidCertificate": (
        "The server of '{}' has an invalid certificate; contact the server's administrator."
    ),
    "ConnectionRefused": "The server of '{}' refused the connection; check the URL.",
    "TimedOut": SILENT,
    "IncompleteMessage": DISCONNECTED,
    "LocalRedirect": (
        "The server of '{}' redirects to a loopback or link-local address, which is not allowed; "
        "if you trust the target, add its host to limits.allow_hosts."
    ),
    "BareRedirect": (
        "'{}' is not in the configured region; set AWS_REGION, or its equivalent for this server."
    ),
}
# All other messages report server or network problems; they become a `SlideReadError`.
KINDS: dict[str, type[SlideError]] = {
    FORBIDDEN: SlidePermissionError,
    MISSING: SlideNotFoundError,
    EMPTY: NotASlideError,
    WITHOUT_RANGES: UnsupportedSlideError,
    TRANSCODES: UnsupportedSlideError,
}


def server_error(name: str, error: Exception) -> SlideError:
    """Return an error with the reason why an object could not be read.

    Parameters
    ----------
    name : str
        The URL of the object without secrets.
    error : Exception
        The error of obstore or `HttpStore`.
    """
    if isinstance(error, OSError) and error.errno in (EMFILE, ENFILE):
        return file_error(name, error)
    text = str(error)
    status = STATUS.search(text)
    if status is not None:
        sentence = BY_STATUS.get(int(status[1]), UNREADABLE)
    else:
        sentence = next((each for mark, each in BY_MARK.items() if mark in text), UNREADABLE)
    return KINDS.get(sentence, SlideReadError)(sentence.format(name))
