"""Responses of DICOMweb servers: one object, or several in a multipart message (RFC 2046)."""

from __future__ import annotations

from email.message import Message
from email.parser import BytesHeaderParser
from typing import TYPE_CHECKING, NamedTuple

from napari_wsigpu.model.errors import SlideReadError, UnsupportedSlideError

if TYPE_CHECKING:
    from napari_wsigpu.storage.remote.connection import Response

CRLF = b"\r\n"


class Part(NamedTuple):
    """One object of a response.

    Attributes
    ----------
    media_type : str
        Media type without parameters.
    transfer_syntax : str
        UID of the transfer syntax; empty if the server does not state it.
    data : memoryview
        The object.
    """

    media_type: str
    transfer_syntax: str
    data: memoryview


def parts_of(response: Response, name: str) -> list[Part]:
    """Return the objects in a response, in order.

    Parameters
    ----------
    response : Response
        The response to a request with `accept`.
    name : str
        The URL without secrets, for messages.

    Raises
    ------
    UnsupportedSlideError
        If the response is neither binary nor multipart.
    SlideReadError
        If it ends too early.
    """
    header = Message()
    header["Content-Type"] = response.media_type
    kind, boundary = header.get_content_type(), header.get_boundary()
    if kind == "multipart/related" and boundary:
        return _split(bytes(response.data), f"--{boundary}".encode(errors="replace"), name)
    if kind != "application/octet-stream" and not kind.startswith("image/"):
        raise other_content(name, kind)
    return [_part(header, response.data)]


def other_content(name: str, media_type: str) -> UnsupportedSlideError:
    """Return the error for a response of another media type, such as a login page."""
    return UnsupportedSlideError(
        f"The server of '{name}' sent {media_type.partition(';')[0][:64] or 'untyped data'} "
        "instead of a slide; check that this is the URL of a series on a DICOMweb server, and that "
        "you have access."
    )


def _split(body: bytes, delimiter: bytes, name: str) -> list[Part]:
    view = memoryview(body)
    parts: list[Part] = []
    end = 0 if body.startswith(delimiter) else body.find(CRLF + delimiter) + len(CRLF)
    while body.startswith(delimiter, end):
        start = end + len(delimiter)
        if body.startswith(b"--", start):
            return parts
        content = body.find(2 * CRLF, start)
        stop = body.find(CRLF + delimiter, content + len(2 * CRLF))
        if min(content, stop) < 0:
            break
        header = BytesHeaderParser().parsebytes(body[start:content].lstrip())
        parts.append(_part(header, view[content + len(2 * CRLF) : stop]))
        end = stop + len(CRLF)
    raise SlideReadError(f"The server of '{name}' sent incomplete data; try again later.")


def _part(header: Message, data: memoryview) -> Part:
    return Part(header.get_content_type(), str(header.get_param("transfer-syntax") or ""), data)
