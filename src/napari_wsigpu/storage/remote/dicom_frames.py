"""Frames of a series on a DICOMweb server (PS3.18), addressed as if they were in files."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.model.errors import SlideNotFoundError
from napari_wsigpu.storage.remote.connection import Connection
from napari_wsigpu.storage.remote.multipart import parts_of
from napari_wsigpu.storage.remote.remote_source import BlockSource, Request
from napari_wsigpu.storage.remote.url import public_url
from napari_wsigpu.storage.source import Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from napari_wsigpu.model.layout import RemoteFile, SlideFile
    from napari_wsigpu.storage.remote.connection import Response

# Frames as they are stored. Servers differ in the media type of compressed frames (PS3.18, section
# 8.7.3): most accept the first one for all frames, and strict servers need the second one.
FRAMES = (
    'multipart/related; type="application/octet-stream"; transfer-syntax=*, '
    'multipart/related; type="image/*"; transfer-syntax=*'
)
MOST_FRAMES = 16  # in one request
PART_HEADER = 4 << 10  # bytes


def frames_key(uid: str, frames: Sequence[int]) -> str:
    """Return the path of an instance's frames, numbered from 1, below the URL of the series."""
    return f"instances/{uid}/frames/{','.join(map(str, frames))}"


class DicomWebSource(BlockSource):
    """The frames of a series, read by position from any thread.

    A frame's size is unknown until it has been read. Each frame therefore reserves a range of
    bytes, larger than an encoded frame can be; reading the range returns fewer bytes. The frames of
    an instance follow one another, and so do the instances. Each frame is a block of the cache.

    Parameters
    ----------
    remote : RemoteFile
        The series, with `parts` and `frame_bytes`.
    files : sequence of SlideFile
        The instances; the size of each is the sum of the ranges that its frames reserve.
    connection : Connection, optional
        A connection to the URL of the series, which this source then owns.
    """

    def __init__(
        self, remote: RemoteFile, files: Sequence[SlideFile], connection: Connection | None = None
    ) -> None:
        name = public_url(remote.url)
        identity = repr((name, remote.parts, remote.frame_bytes))
        key = sha256(identity.encode()).hexdigest()
        super().__init__(name, key, connection or Connection(remote.url))
        self._uids = [uid for uid, _ in remote.parts]
        self._frame_bytes = remote.frame_bytes
        sizes = np.array([file.size for file in files], np.int64)
        counts = sizes // np.array(remote.frame_bytes, np.int64)
        self._starts = np.cumsum(sizes) - sizes
        # The first block of each instance, and the end of all blocks.
        self._firsts = np.array([0, *np.cumsum(counts)], np.int64)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; fewer at the end of a frame."""
        positions = [self._position(offset) for offset, _ in ranges]
        blocks = self._blocks({block for block, _ in positions if block < self._firsts[-1]})
        return [
            blocks.get(block, memoryview(b""))[within : within + length]
            for (block, within), (_, length) in zip(positions, ranges, strict=True)
        ]

    def _position(self, offset: int) -> tuple[int, int]:
        """Return the block that an offset lies in, and the offset within the block."""
        instance = int(np.searchsorted(self._starts, offset, "right")) - 1
        frame, within = divmod(offset - int(self._starts[instance]), self._frame_bytes[instance])
        return int(self._firsts[instance]) + frame, within

    def _runs(self, blocks: Sequence[int]) -> Iterator[list[int]]:
        owners = self._owners(blocks)
        for owner in np.unique(owners):
            own = np.array(blocks)[owners == owner]
            for run in np.array_split(own, -(-len(own) // MOST_FRAMES)):
                yield run.tolist()

    def _owners(self, blocks: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.searchsorted(self._firsts, blocks, "right") - 1

    def _send(self, blocks: Sequence[int]) -> Future[Response]:
        owner = int(self._owners(blocks)[0])
        frames = [block - int(self._firsts[owner]) + 1 for block in blocks]
        most = len(blocks) * (self._frame_bytes[owner] + PART_HEADER)
        key = frames_key(self._uids[owner], frames)
        return self._connection.get(0, None, key, FRAMES, most)

    def _receive(self, request: Request) -> dict[int, memoryview]:
        try:
            return super()._receive(request)
        except SlideNotFoundError:
            if len(request.blocks) == 1:
                return {request.blocks[0]: memoryview(Unreadable("it is missing from the server"))}
        # A server refuses the whole list if one of its frames is missing.
        alone = [Request([block], self._send([block])) for block in request.blocks]
        found: dict[int, memoryview] = {}
        for each in alone:
            found |= self._receive(each)
        return found

    def _split(self, blocks: Sequence[int], response: Response) -> dict[int, memoryview]:
        parts = parts_of(response, self._name)
        if len(parts) != len(blocks):
            raise SlideNotFoundError(f"Frames of '{self._name}' are missing from its server.")
        return {block: part.data for block, part in zip(blocks, parts, strict=True)}
