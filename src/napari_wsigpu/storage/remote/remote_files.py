"""Encoded bytes from several files of a folder on a server, as if they lay one after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from napari_wsigpu.storage.remote.connection import Connection
from napari_wsigpu.storage.remote.source import RemoteSource
from napari_wsigpu.storage.source import SourcesInTurn, ViewSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.model.layout import RemoteFile, SlideFile


class RemoteFilesSource(SourcesInTurn[RemoteSource], ViewSource):
    """Files on a server as one source; a range ends with the file in which it begins.

    Parameters
    ----------
    sources : sequence of RemoteSource
        In the order in which they follow one another; closed with this.
    """

    def __init__(self, sources: Sequence[RemoteSource]) -> None:
        super().__init__(sources, [each.size for each in sources])

    @classmethod
    def of(cls, remote: RemoteFile, files: Sequence[SlideFile]) -> RemoteFilesSource:
        """Return the files of a slide, which share a connection."""
        connection = Connection(remote.folder)
        return cls(
            [
                RemoteSource(f"{remote.folder}/{key}", file.size, version, connection, key)
                for file, (key, version) in zip(files, remote.parts, strict=True)
            ]
        )
