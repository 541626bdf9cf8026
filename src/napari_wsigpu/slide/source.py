"""Where the bytes of a slide come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from napari_wsigpu.storage.file import FileSource, check_unchanged
from napari_wsigpu.storage.files import FilesSource
from napari_wsigpu.storage.library import LibrarySource
from napari_wsigpu.storage.remote.remote_files import RemoteFilesSource
from napari_wsigpu.storage.remote.source import RemoteSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.model.layout import SlideFile, SlideLayout
    from napari_wsigpu.storage.source import ByteSource


def source_of(layout: SlideLayout) -> ByteSource:
    """Return what reads the bytes of a slide."""
    if layout.levels[0].array is not None:
        from napari_wsigpu.storage.zarr.source import ZarrServerSource, ZarrSource

        images = [*layout.levels, *(item.image for item in layout.associated)]
        if layout.remote is not None:
            return ZarrServerSource(layout.path, images, layout.remote.url)
        return ZarrSource(layout.path, images, layout.files)
    if layout.remote is not None and layout.remote.parts:
        return RemoteFilesSource.of(layout.remote, layout.files)
    if layout.remote is not None:
        return RemoteSource(layout.remote.url, layout.file_size, layout.remote.version)
    if layout.levels[0].library is not None:
        images = [*layout.levels, *(item.image for item in layout.associated if not item.data)]
        return LibrarySource(layout.files[0], images)
    return FileSource(layout.files[0]) if len(layout.files) == 1 else FilesSource(layout.files)


def check_files(files: Sequence[SlideFile], path: str) -> None:
    """Raise a `SlideChangedError` if a file is no longer the one that was opened."""
    for file in files:
        check_unchanged(file, path)
