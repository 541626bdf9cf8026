"""DICOM slides on servers: one file, or a folder if the server can list its files."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING
from urllib.parse import unquote

from napari_wsigpu.formats.dicom import dicom
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.formats.tiff.siblings import SIBLING
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.layout import RemoteFile, SlideFile
from napari_wsigpu.storage.remote.connection import Connection
from napari_wsigpu.storage.remote.remote_files import RemoteFilesSource
from napari_wsigpu.storage.remote.remote_source import HEAD, RemoteSource
from napari_wsigpu.storage.remote.served import ServedFile
from napari_wsigpu.storage.remote.url import public_url, supports_listing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napari_wsigpu.formats.dicom.dicom_instance import Named
    from napari_wsigpu.model.layout import SlideLayout

ALONE = (
    "Only this file of its series is shown, because the server doesn't list the folder; other "
    "files, such as smaller levels, may exist."
)
# Number of files in a folder whose first bytes are requested.
MOST_FILES = 256


def parse_alone(file: ServedFile, at: Mapping[str, int] = tiff.DEFAULT_PLANE) -> SlideLayout:
    """Describe the part of a slide that one file holds.

    Raises
    ------
    SlideError
        As `dicom.parse` does.
    """
    if not dicom.is_wsi(bytes(file.source.read([(0, dicom.FILE_META)])[0])):
        raise dicom.other_kind(str(file))
    layout = dicom.parse_files(str(file), file, [file], at)
    return replace(layout, problems=(*layout.problems, ALONE))


def parse_series(
    url: str, at: Mapping[str, int] = tiff.DEFAULT_PLANE, *, is_folder: bool = False
) -> tuple[SlideLayout, RemoteFilesSource] | None:
    """Describe the slide that a file on a server belongs to, or that a remote folder holds.

    Returns
    -------
    (SlideLayout, RemoteFilesSource) or None
        The layout, and the open source of its files, which the caller closes. None if the server
        doesn't list the folder, or the folder doesn't hold the file.

    Raises
    ------
    SlideError
        As `dicom.parse` does.
    """
    if not supports_listing(url):
        return None
    folder, _, last = (f"{url.rstrip('/')}/" if is_folder else url).rpartition("/")
    name = unquote(last)
    connection = Connection(folder)
    found = None
    try:
        sources = _sources(connection, folder, name)
        if sources and (is_folder or sources[0].key == name):
            found = _describe(url, folder, sources, at, is_folder=is_folder)
    finally:
        if found is None:  # otherwise, the returned source owns the connection
            connection.close()
    return found


def _sources(connection: Connection, folder: str, first: str) -> list[RemoteSource]:
    """Return sources of the slide files in a folder, the file `first` before the others.

    The list is empty if the server doesn't list the folder.
    """
    sources = []
    with suppress(SlideError):
        names = filter(dicom.may_be_dicom, connection.names().result())
        # Start all requests before waiting for the first response.
        responses = {
            name: connection.get(0, HEAD, name)
            for name in sorted(names, key=lambda name: (name != first, name))[:MOST_FILES]
        }
        for name, response in responses.items():
            with suppress(SlideError):
                head = response.result()
                if dicom.is_wsi(bytes(head.data[: dicom.FILE_META])):
                    url = f"{folder}/{name}"
                    sources.append(RemoteSource.from_head(url, head, connection, name))
    return sources


def _describe(
    url: str,
    folder: str,
    sources: Sequence[RemoteSource],
    at: Mapping[str, int],
    *,
    is_folder: bool,
) -> tuple[SlideLayout, RemoteFilesSource]:
    path = public_url(url)
    by_path = {public_url(source.url): source for source in sources[0 if is_folder else 1 :]}
    if not is_folder:  # the URL may encode the name differently than the server's list
        by_path = {path: sources[0], **by_path}
    files = [
        ServedFile(source, SlideFile(name, source.size, 0)) for name, source in by_path.items()
    ]
    layout = dicom.parse_files(path, None if is_folder else files[0], files, at)
    shown = [by_path[file.path] for file in layout.files]
    parts = tuple((source.key, source.version) for source in shown)
    remote = RemoteFile(url, sha256(repr(parts).encode()).hexdigest(), folder, parts)
    others = [file for file in files if str(file) != path]
    problems = tuple(without_names(text, others) for text in layout.problems)
    return replace(layout, remote=remote, problems=problems), RemoteFilesSource(shown)


def without_names(text: str, files: Sequence[Named]) -> str:
    """Replace the names of files in a message, because they may name a patient."""
    for file in files:
        text = text.replace(f"'{file}'", SIBLING).replace(f"'{file.name}'", SIBLING)
    return text
