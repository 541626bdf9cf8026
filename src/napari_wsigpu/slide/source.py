"""The byte source that matches a slide's layout."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from napari_wsigpu.model.layout import ZARR_DOCUMENTS
from napari_wsigpu.storage.file_source import FileSource, check_unchanged
from napari_wsigpu.storage.files_source import FilesSource
from napari_wsigpu.storage.library_source import LibrarySource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.model.layout import SlideFile, SlideLayout
    from napari_wsigpu.storage.source import ByteSource


def source_of(layout: SlideLayout) -> ByteSource:
    """Return the source that reads a slide's bytes: files, a Zarr store, a library or a server."""
    if layout.levels[0].array is not None:
        from napari_wsigpu.storage.zarr.zarr_source import (
            ZarrArchiveSource,
            ZarrServerSource,
            ZarrSource,
        )

        images = [*layout.levels, *(item.image for item in layout.associated)]
        if layout.remote is not None:
            return ZarrServerSource(layout.path, images, layout.remote.url)
        if PurePath(layout.files[0].path).name not in ZARR_DOCUMENTS:
            return ZarrArchiveSource(layout.path, images, layout.files[0])
        return ZarrSource(layout.path, images, layout.files)
    if layout.remote is not None:
        from napari_wsigpu.storage.remote.dicom_frames import DicomWebSource
        from napari_wsigpu.storage.remote.remote_files import RemoteFilesSource
        from napari_wsigpu.storage.remote.remote_source import RemoteSource

        if layout.remote.frame_bytes:
            return DicomWebSource(layout.remote, layout.files)
        if layout.remote.parts:
            return RemoteFilesSource.of(layout.remote, layout.files)
        return RemoteSource(layout.remote.url, layout.file_size, layout.remote.version)
    if layout.levels[0].library is not None:
        images = [*layout.levels, *(item.image for item in layout.associated if not item.data)]
        return LibrarySource(layout.files[0], images)
    return FileSource(layout.files[0]) if len(layout.files) == 1 else FilesSource(layout.files)


def check_files(files: Sequence[SlideFile], path: str) -> None:
    """Raise a `SlideChangedError` if a file has changed since the slide was opened."""
    for file in files:
        check_unchanged(file, path)
