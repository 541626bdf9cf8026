"""Encoded bytes from several files of a folder on a server, as if they lay one after another."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.storage.connection import Connection
from napari_wsigpu.storage.remote import RemoteSource
from napari_wsigpu.storage.source import ViewSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.layout import RemoteFile, SlideFile


class RemoteFilesSource(ViewSource):
    """Files on a server as one source; a range ends with the file in which it begins.

    Parameters
    ----------
    sources : sequence of RemoteSource
        In the order in which they follow one another; closed with this.
    """

    def __init__(self, sources: Sequence[RemoteSource]) -> None:
        self._sources = sources
        self._starts = np.array([0, *accumulate(each.size for each in sources)][:-1], np.int64)

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

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; fewer where its file ends before."""
        views = [memoryview(b"")] * len(ranges)
        begins = np.array([offset for offset, _ in ranges], np.int64)
        owners = np.maximum(np.searchsorted(self._starts, begins, "right") - 1, 0)
        for owner in np.unique(owners).tolist():
            members, start = np.flatnonzero(owners == owner).tolist(), int(self._starts[owner])
            asked = [(ranges[index][0] - start, ranges[index][1]) for index in members]
            for index, view in zip(members, self._sources[owner].read(asked), strict=True):
                views[index] = view
        return views

    def release(self) -> None:
        """Let go of the connection and memory until the next read; reads in flight fail."""
        for source in self._sources:
            source.release()

    def close(self) -> None:
        """Let go of everything for good; reads in flight fail."""
        for source in self._sources:
            source.close()
