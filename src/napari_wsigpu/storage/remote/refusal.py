"""Why a server does not give a file, in one sentence each.

What obstore says itself holds the URL with its secrets, so it is read but not passed on.
"""

from __future__ import annotations

import re

from napari_wsigpu.model.errors import (
    NotASlideError,
    SlideError,
    SlideNotFoundError,
    SlidePermissionError,
    SlideReadError,
    UnsupportedSlideError,
)

BREAKS_OFF = "The connection to the server of '{}' breaks off again and again; try again later."
FORBIDDEN = (
    "You have no permission to read '{}', or its link has expired; check your credentials, or ask "
    "its owner for access."
)
MISSING = "There is no file at '{}'; check the URL."
BUSY = "The server of '{}' is too busy; try again later."
FAILS = "The server of '{}' fails; try again later."
EMPTY = "'{}' is empty, or shorter than its server says; choose a slide's file."
SILENT = "The server of '{}' does not answer in time; try again later."
SLOW = (
    "The server of '{}' sends its bytes too slowly to read a slide; try again later, or lower the "
    "limit 'bytes_per_second'."
)
UNREADABLE = "'{}' can't be read from its server; check the URL and the network, and try again."

WITHOUT_RANGES = (
    "The server of '{}' can't send parts of a file (range requests); download the whole slide and "
    "open that."
)

STATUS = re.compile(r"\bstatus: (\d{3}),")
BY_STATUS = {
    401: FORBIDDEN,
    403: FORBIDDEN,
    404: MISSING,
    410: MISSING,
    416: EMPTY,
    429: BUSY,
    503: BUSY,
    500: FAILS,
    502: FAILS,
    504: FAILS,
}
# In the order in which an error is searched for them.
BY_MARK = {
    "RangeNotSupported": WITHOUT_RANGES,
    "NotPartial": WITHOUT_RANGES,
    "UnexpectedRange": WITHOUT_RANGES,
    "ContentRange": WITHOUT_RANGES,
    "MissingContentLength": WITHOUT_RANGES,
    "dns error": "There is no server of the name in '{}', or no network; check both.",
    "InvalidCertificate": (
        "The server of '{}' can't prove that it is the right one (its certificate is not valid); "
        "ask whoever runs it."
    ),
    "ConnectionRefused": "The server of '{}' refuses connections; check the URL.",
    "TimedOut": SILENT,
    "IncompleteMessage": BREAKS_OFF,
    "BareRedirect": (
        "'{}' lies in another region than is set; set AWS_REGION, or what its server uses."
    ),
}
# All others are of servers and networks.
KINDS: dict[str, type[SlideError]] = {
    FORBIDDEN: SlidePermissionError,
    MISSING: SlideNotFoundError,
    EMPTY: NotASlideError,
    WITHOUT_RANGES: UnsupportedSlideError,
}


def server_error(name: str, error: Exception) -> SlideError:
    """Say why obstore could not read an object.

    Parameters
    ----------
    name : str
        Its URL without secrets.
    error : Exception
        What obstore raised.
    """
    text = str(error)
    status = STATUS.search(text)
    if status is not None:
        sentence = BY_STATUS.get(int(status[1]), UNREADABLE)
    else:
        sentence = next((said for mark, said in BY_MARK.items() if mark in text), UNREADABLE)
    return KINDS.get(sentence, SlideReadError)(sentence.format(name))
