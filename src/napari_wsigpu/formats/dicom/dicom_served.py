"""DICOM slides on servers: a file, and what a server that gives lists has beside it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote

from napari_wsigpu.formats.dicom import dicom
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.formats.tiff.siblings import SIBLING
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.layout import RemoteFile, SlideFile
from napari_wsigpu.storage.remote.connection import Connection
from napari_wsigpu.storage.remote.remote_files import RemoteFilesSource
from napari_wsigpu.storage.remote.served import ServedFile
from napari_wsigpu.storage.remote.source import HEAD, RemoteSource
from napari_wsigpu.storage.remote.url import gives_lists, public_url

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napari_wsigpu.model.layout import SlideLayout

ALONE = (
    "Only this file of its series is shown, as its server gives no list in which others, such as "
    "smaller levels, could be found."
)
ENDINGS = (".dcm", "")
# Files whose begin is read.
MOST_FILES = 256


def parse_alone(file: ServedFile, at: Mapping[str, int] = tiff.MIDDLE) -> SlideLayout:
    """Describe what one file holds of a slide.

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
    url: str, at: Mapping[str, int] = tiff.MIDDLE, *, is_folder: bool = False
) -> tuple[SlideLayout, RemoteFilesSource] | None:
    """Describe the slide that a file on a server belongs to, or that a folder there holds.

    Returns
    -------
    SlideLayout and RemoteFilesSource
        None if the server gives no list of the folder, or there is no such file in it.

    Raises
    ------
    SlideError
        As `dicom.parse` does.
    """
    if not gives_lists(url):
        return None
    folder, _, last = (f"{url.rstrip('/')}/" if is_folder else url).rpartition("/")
    name = unquote(last)
    connection = Connection(folder)
    found = None
    try:
        sources = _sources(connection, folder, name)
        if sources and (is_folder or sources[0].key == name):
            found = _described(url, folder, sources, at, is_folder=is_folder)
    finally:
        if found is None:
            connection.close()
    return found


def _sources(connection: Connection, folder: str, first: str) -> list[RemoteSource]:
    """Return the files of slides in a folder, of which one comes first; none without a list."""
    sources = []
    with suppress(SlideError):
        names = filter(_may_be, connection.names().result())
        asked = {
            name: connection.get(0, HEAD, name)
            for name in sorted(names, key=lambda name: (name != first, name))[:MOST_FILES]
        }
        for name, answer in asked.items():
            with suppress(SlideError):
                begin = answer.result()
                if dicom.is_wsi(bytes(begin.data[: dicom.FILE_META])):
                    url = f"{folder}/{name}"
                    sources.append(RemoteSource.begun(url, begin, connection, name))
    return sources


def _may_be(name: str) -> bool:
    """Whether a file of that name may be DICOM: names may end in numbers, as those of UIDs do."""
    ending = PurePosixPath(name).suffix.lower()
    return ending in ENDINGS or ending[1:].isdigit()


def _described(
    url: str,
    folder: str,
    sources: Sequence[RemoteSource],
    at: Mapping[str, int],
    *,
    is_folder: bool,
) -> tuple[SlideLayout, RemoteFilesSource]:
    path = public_url(url)
    by_path = {public_url(source.url): source for source in sources[0 if is_folder else 1 :]}
    if not is_folder:  # the URL may spell its name in another way than the list
        by_path = {path: sources[0], **by_path}
    files = [
        ServedFile(source, SlideFile(name, source.size, 0)) for name, source in by_path.items()
    ]
    layout = dicom.parse_files(path, None if is_folder else files[0], files, at)
    shown = [by_path[file.path] for file in layout.files]
    parts = tuple((source.key, source.version) for source in shown)
    remote = RemoteFile(url, sha256(repr(parts).encode()).hexdigest(), folder, parts)
    others = [file for file in files if str(file) != path]
    problems = tuple(_without_names(text, others) for text in layout.problems)
    return replace(layout, remote=remote, problems=problems), RemoteFilesSource(shown)


def _without_names(text: str, files: Sequence[ServedFile]) -> str:
    """Return a sentence without the names of files, which can name a patient."""
    for file in files:
        text = text.replace(f"'{file}'", SIBLING).replace(f"'{file.name}'", SIBLING)
    return text
