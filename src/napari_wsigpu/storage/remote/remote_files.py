"""Encoded bytes from several files on a server, addressed as if they were concatenated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from napari_wsigpu.storage.remote.connection import Connection
from napari_wsigpu.storage.remote.remote_source import RemoteSource
from napari_wsigpu.storage.source import ConcatenatedSource, ViewSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.model.layout import RemoteFile, SlideFile


class RemoteFilesSource(ConcatenatedSource[RemoteSource], ViewSource):
    """Files on a server as one source; no range extends beyond the file in which it starts.

    Parameters
    ----------
    sources : sequence of RemoteSource
        The files in order; this source owns and closes them.
    """

    def __init__(self, sources: Sequence[RemoteSource]) -> None:
        super().__init__(sources, [each.size for each in sources])

    @classmethod
    def of(cls, remote: RemoteFile, files: Sequence[SlideFile]) -> RemoteFilesSource:
        """Return a source for the files of a slide, with one connection for all of them."""
        connection = Connection(remote.folder)
        return cls(
            [
                RemoteSource(f"{remote.folder}/{key}", file.size, version, connection, key)
                for file, (key, version) in zip(files, remote.parts, strict=True)
            ]
        )
