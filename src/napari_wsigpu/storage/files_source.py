"""Encoded bytes from several local files, addressed as if they were concatenated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.storage.file_source import FileSource
from napari_wsigpu.storage.source import ConcatenatedSource, JoinedBytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.model.arrays import Array, Integers
    from napari_wsigpu.model.layout import SlideFile
    from napari_wsigpu.storage.source import Fill, NewBuffer


class FilesSource(ConcatenatedSource[FileSource]):
    """Local files as one source; no range extends beyond the file in which it starts.

    Parameters
    ----------
    files : sequence of SlideFile
        The files, in the order in which they are concatenated.
    """

    def __init__(self, files: Sequence[SlideFile]) -> None:
        super().__init__([FileSource(file) for file in files], [file.size for file in files])

    def read_joined(
        self, offsets: Integers, lengths: Integers, new_buffer: NewBuffer = bytearray
    ) -> JoinedBytes:
        """Read many ranges into one buffer; see `ByteSource.read_joined`."""
        parts = self._owners(offsets)
        if len(parts) == 1:
            source, start, _ = parts[0]
            return source.read_joined(offsets - start, lengths, new_buffer)
        planned = [
            (source, members, source.join(offsets[members] - start, lengths[members]))
            for source, start, members in parts
        ]
        buffer = new_buffer(sum(joined.size for _, _, joined in planned))
        target = memoryview(buffer)
        starts, found, position = np.zeros_like(offsets), np.zeros_like(lengths), 0
        for source, members, joined in planned:
            source.read_ranges(joined, target[position : position + joined.size])
            starts[members] = joined.starts + position
            found[members] = joined.lengths
            position += joined.size
        return JoinedBytes(buffer, starts, found)

    def read_scans(self, scans: Array, header: bytes, buffer: memoryview) -> bool:
        """Read the scans of JPEG tiles that share a header; see `FileSource.read_scans`."""
        for source, start, members in self._owners(scans["offset"]):
            own = scans[members]
            own["offset"] -= start
            if not source.read_scans(own, header, buffer):
                return False
        return True

    def fills(self, ranges: Sequence[tuple[int, int]]) -> list[Fill]:
        """Return one function per (offset, length), which reads it; see `FillingSource.fills`."""
        owners = np.searchsorted(self._starts, [offset for offset, _ in ranges], "right") - 1
        starts = self._starts[owners].tolist()
        return [
            self._sources[owner].fills([(offset - start, length)])[0]
            for owner, start, (offset, length) in zip(owners.tolist(), starts, ranges, strict=True)
        ]
