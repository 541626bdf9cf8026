"""DICOM slides on DICOMweb servers, from the URL of a series (PS3.18, section 10.4)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit

from napari_wsigpu.formats.dicom import dicom
from napari_wsigpu.formats.dicom.dicom_served import without_names
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    SlideError,
    SlideNotFoundError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.layout import RemoteFile
from napari_wsigpu.model.limits import limits
from napari_wsigpu.storage.remote.connection import Connection
from napari_wsigpu.storage.remote.dicom_frames import FRAMES, DicomWebSource, frames_key
from napari_wsigpu.storage.remote.multipart import other_content, parts_of
from napari_wsigpu.storage.remote.url import public_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from napari_wsigpu.formats.dicom.dicom_instance import Instance
    from napari_wsigpu.model.layout import SlideLayout

METADATA = "application/dicom+json"
BULK = 'multipart/related; type="application/octet-stream", application/octet-stream'
LARGEST_BULK = 32 << 20


def parse(
    url: str, at: Mapping[str, int] = tiff.DEFAULT_PLANE
) -> tuple[SlideLayout, DicomWebSource]:
    """Describe the slide that a series on a DICOMweb server holds.

    Parameters
    ----------
    url : str
        URL of the series; see `is_dicomweb`.
    at : Mapping of str to int, optional
        As in `dicom.parse`.

    Returns
    -------
    (SlideLayout, DicomWebSource)
        The layout, and the open source of its frames, which the caller closes.

    Raises
    ------
    SlideError
        As `dicom.parse` does.
    """
    dicom.check_packages(public_url(url))
    connection = Connection(url)
    found = None
    try:
        found = _parse(url, connection, at)
    finally:
        if found is None:  # otherwise, the returned source owns the connection
            connection.close()
    return found


def _parse(
    url: str, connection: Connection, at: Mapping[str, int]
) -> tuple[SlideLayout, DicomWebSource]:
    from napari_wsigpu.formats.dicom import dicom_json

    name = public_url(url).rstrip("/")
    problems: list[str] = []

    def fetch(uri: str) -> bytes | None:
        try:
            return _bulk(name, connection, uri)
        except SlideError as error:
            problems.append(f"An attribute, such as the ICC profile, is left out: {error}")
            return None

    metadata = connection.get(0, None, "metadata", METADATA, limits.header_bytes).result()
    if "json" not in metadata.media_type.partition(";")[0]:
        raise other_content(name, metadata.media_type)
    listed = dicom_json.slide_instances(name, metadata.data)
    # Start all requests before waiting for the first response.
    first_frames = [
        connection.get(0, None, frames_key(each.name, [1]), FRAMES, limits.tile_bytes)
        for each in listed
    ]
    found: dict[str, tuple[Instance, int, str]] = {}
    for each, response in zip(listed, first_frames, strict=True):
        try:
            parts = parts_of(response.result(), name)
            if len(parts) != 1:
                raise SlideNotFoundError(f"The server has no frames of '{each}'; check the server.")
            instance, reserved = dicom_json.read(each, parts[0], fetch)
        except SlideNotFoundError:
            problems.append(f"'{each}' is left out, because the server has no frames of it.")
        except (CorruptSlideError, UnsupportedSlideError) as error:
            problems.append(str(error))
        else:
            found.setdefault(each.url, (instance, reserved, each.version))
    layout = dicom.slide_of(name, None, [each for each, *_ in found.values()], problems, at)
    shown = [found[file.path] for file in layout.files]
    remote = RemoteFile(
        url,
        "",
        parts=tuple((instance.uid, version) for instance, _, version in shown),
        frame_bytes=tuple(reserved for _, reserved, _ in shown),
    )
    cleaned = tuple(without_names(text, listed) for text in layout.problems)
    layout = replace(layout, remote=remote, problems=cleaned)
    return layout, DicomWebSource(remote, layout.files, connection)


def _bulk(name: str, connection: Connection, uri: str) -> bytes:
    """Return the data at a BulkDataURI below the series.

    Only the path of the URI is used: the request always goes to the server of the series.
    """
    series = "/".join(name.split("/")[-4:])
    try:
        target = urlsplit(urljoin(f"{name}/metadata", uri))
        _, _, key = target.path.partition(f"/{series}/")
        key = "" if target.query or ".." in unquote(key) else unquote(key)
    except ValueError:  # not a URI
        key = ""
    if not key:
        raise UnsupportedSlideError(
            f"The server of '{name}' stores it outside the series, which is not supported."
        )
    data = parts_of(connection.get(0, None, key, BULK, LARGEST_BULK).result(), name)
    if len(data) != 1:
        raise SlideNotFoundError(f"It is missing from the server of '{name}'.")
    return bytes(data[0].data)
