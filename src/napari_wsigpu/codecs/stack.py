"""A batch of JPEG tiles as a few images, of tiles on top of each other."""

from __future__ import annotations

import threading
from collections import defaultdict
from functools import lru_cache
from itertools import chain, compress, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.codecs.jpeg import (
    BLOCK,
    END_OF_IMAGE,
    LONGEST_HEADER,
    NO_MARKS,
    Stacking,
    header_length,
    read_header,
)
from napari_wsigpu.codecs.library import ImageFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.codestream import Recipe
    from napari_wsigpu.codecs.decoder import EncodedBatch
    from napari_wsigpu.codecs.device import Device, Stream, TileFormat
    from napari_wsigpu.codecs.workspace import Workspace
    from napari_wsigpu.formats.layout import LevelLayout

    # Index of a tile in its batch, and where its scan starts and its end marker ends.
    Scan = tuple[int, int, int]

SHORTEST, MOST_PADDING = 4, 64
BITS = 8
FIRST_RESTART, RESTARTS = 0xD0, 8
YCBCR_TRANSFORM = 1
RGB_IDS = b"RGB"
PLANES = "P_YUV"
# Luma samples for one of chroma, across and down: what nvImageCodec calls it.
SUBSAMPLINGS = {(1, 1): 0, (2, 1): 2, (2, 2): 3}
# So narrow, libjpeg repeats chroma instead of smoothing it.
NARROW = 4
NOWHERE = -1
COLUMNS = 16


class Shape(NamedTuple):
    """What the tiles of a level have in common.

    Attributes
    ----------
    height, width : int
        Of a tile.
    sampling : tuple of (int, int)
        Luma samples for one of chroma, across and down.
    sample_format, color_spec : str
        See `Recipe`.
    """

    height: int
    width: int
    sampling: tuple[int, int]
    sample_format: str
    color_spec: str


class Plan(NamedTuple):
    """Where stacks, and what they hold, lie in one block of memory.

    Attributes
    ----------
    size : int
        Bytes of the block.
    images : list of (int, ImageFormat)
        Start of each stack, and its planes.
    places : ndarray of int64, shape (tiles, 4)
        Start of each tile in each plane; in the first one, if there is no other. Then that of
        the strip below a stack's last tile, else -1.
    """

    size: int
    images: list[tuple[int, ImageFormat]]
    places: NDArray[np.int64]


class Stack(NamedTuple):
    """Tiles that share a header, with what comes before and after them.

    Attributes
    ----------
    header : bytes
        Of the stack.
    scans : list of (int, int, int)
        The tiles.
    end : bytes
        What follows the last tile's marker.
    marks : tuple of int
        See `Stacking`.
    """

    header: bytes
    scans: Sequence[Scan]
    end: bytes
    marks: tuple[int, ...]


class JpegStreams:
    """Makes code streams of JPEG tiles.

    A header is compared with the level, for the reasons of `codestream.Jpeg2000Streams`.

    Parameters
    ----------
    level : LevelLayout
        The level.
    how : Recipe
        Its recipe.
    """

    def __init__(self, level: LevelLayout, how: Recipe) -> None:
        grid = level.grid
        self._size = (grid.tile_height, grid.tile_width)
        self._channels = level.channels
        self._colors = level.encoding.jpeg_color
        self._how = how
        tables = level.encoding.jpeg_tables[0]
        self._tables = tables[: tables.rfind(END_OF_IMAGE)] if tables else b""
        self._sampling: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._latest = b"?"
        self._stacking = lru_cache(maxsize=64)(self._new_stacking)

    def prepare(self, batch: EncodedBatch, count: int, work: Workspace) -> StackedTiles:
        """Make code streams of the first `count` tiles of a batch, in a workspace.

        Raises
        ------
        MemoryError
            If the workspace can't be made large enough.
        """
        most = -(-count // work.device.jpegs_at_once)
        stacks = [
            stack
            for header, scans in self._by_header(batch, count).items()
            for stack in self._stacks(header, scans, most)
        ]
        sampling = self._sampling or (1, 1)
        shape = Shape(*self._size, sampling, self._how.sample_format, self._how.color_spec)
        return StackedTiles(stacks, shape, batch, work, to_rgb=self._how.convert)

    def _by_header(self, batch: EncodedBatch, count: int) -> dict[bytes, list[Scan]]:
        """Sort the tiles that nvImageCodec can take by their headers."""
        buffer, header = batch.buffer, self._latest
        length, shortest = len(header), len(header) + len(END_OF_IMAGE) + 1
        starts = batch.starts[0, :count].tolist()
        ends = (batch.starts[0, :count] + batch.lengths[0, :count]).tolist()
        places = list(enumerate(zip(starts, ends, strict=True)))
        scans = [
            (index, start + length, end)
            for index, (start, end) in places
            if end - start >= shortest
            and buffer.startswith(header, start)
            and buffer.endswith(END_OF_IMAGE, start, end)
        ]
        if 0 < len(scans) == count:
            return {header: scans}
        found: defaultdict[bytes, list[Scan]] = defaultdict(list)
        for index, (start, past) in places:
            end = _end_before_padding(buffer, start, past)
            if not buffer.startswith(header, start):
                head = bytes(buffer[start : min(end, start + LONGEST_HEADER)])
                header = self._check(head) or header
                length = len(header)
                if not buffer.startswith(header, start):
                    continue
            if end - start > length + len(END_OF_IMAGE):
                found[header].append((index, start + length, end))
        return found

    def _check(self, data: bytes) -> bytes:
        """Return a header that is not the usual one, empty if it is not as the level says."""
        data = data[: header_length(data)]
        header = read_header(self._whole(data)) if data else None
        if (
            header is None
            or header.bits != BITS
            or (header.height, header.width) != self._size
            or len(header.ids) != self._channels
        ):
            return b""
        if self._colors == "ycbcr" and (
            header.ids == RGB_IDS or header.transform not in (None, YCBCR_TRANSFORM)
        ):
            return b""  # what is stored is RGB
        if self._channels > 1:
            luma, *chroma = header.sampling
            if set(chroma) != {(1, 1)} or luma not in SUBSAMPLINGS:
                return b""
            if luma[0] > 1 and header.width <= NARROW:
                return b""
            with self._lock:
                self._sampling = self._sampling or luma
            if luma != self._sampling:
                return b""
        self._latest = data
        return data

    def _whole(self, header: bytes) -> bytes:
        return self._tables + header[2:] if self._tables else header

    def _new_stacking(self, header: bytes) -> Stacking:
        whole = self._whole(header)
        found = read_header(whole)
        assert found is not None  # or it would not have passed
        return Stacking(whole, found)

    def _stacks(self, header: bytes, scans: list[Scan], most: int) -> list[Stack]:
        if most > 1 and len(scans) > 1:
            stacking = self._stacking(header)
            most = min(most, stacking.most)
        if most == 1 or len(scans) == 1:
            whole = self._whole(header)
            return [Stack(whole, [scan], b"", NO_MARKS) for scan in scans]
        stacks = -(-len(scans) // most)
        cuts = [number * len(scans) // stacks for number in range(stacks + 1)]
        end = stacking.strip + END_OF_IMAGE
        return [
            Stack(stacking.begin(last - first), scans[first:last], end, stacking.marks)
            for first, last in pairwise(cuts)
        ]


class StackedTiles:
    """Stacks of a batch, whose planes become tiles; see `codestream.Prepared`.

    Parameters
    ----------
    stacks : list of Stack
        The stacks.
    shape : Shape
        What their tiles have in common.
    batch : EncodedBatch
        Where their bytes are.
    work : Workspace
        Where streams and planes go.
    to_rgb : bool
        Whether they are YCbCr.
    """

    kind = "jpeg"

    def __init__(
        self,
        stacks: list[Stack],
        shape: Shape,
        batch: EncodedBatch,
        work: Workspace,
        *,
        to_rgb: bool,
    ) -> None:
        self.work, self._shape, self._to_rgb = work, shape, to_rgb
        self._plan = plan = plan_of(tuple((len(s.scans), bool(s.end)) for s in stacks), shape)
        most = int(batch.lengths.sum()) + sum(len(s.header) + len(s.end) for s in stacks)
        work.make_room(most, plan.size, len(plan.places))
        ends, self._scans = _join(stacks, batch.buffer, work.encoded)
        self._first = first = int(work.encoded.ctypes.data)
        self._taken = [
            work.streams.add(first + start, end - start)
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        self._stacks = stacks
        self._groups = [[index for index, _, _ in stack.scans] for stack in stacks]
        self.groups = list(compress(self._groups, self._taken))

    def describe(self, addresses: Sequence[int], stream: Stream) -> None:
        """Describe the stacks' planes."""
        for (start, image), good in zip(self._plan.images, self._taken, strict=True):
            if good:
                self.work.images.add(self.work.planes + start, image, stream.ptr)

    def rows(
        self, worked: list[bool], addresses: NDArray[np.int64], tiles: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return rows of the decoded tiles, with what `Device.merge_planes` wants.

        All that decoding does not need is put together here, while the device is at work.
        """
        indices = list(chain.from_iterable(self._groups))
        counts = [len(group) for group in self._groups]
        table = np.empty((len(indices), COLUMNS), np.int64)
        table[:, 0] = addresses[indices]
        table[:, 1:3] = tiles[indices]
        table[:, 3:7] = self._plan.places + self.work.planes
        table[self._plan.places[:, 3] == NOWHERE, 6] = 0
        table[:, 7:9] = self._scans
        table[:, 7] += self._first
        table[:, 9:] = np.repeat([stack.marks for stack in self._stacks], counts, axis=0)
        if all(worked) and all(self._taken):
            return table
        good = np.array(self._taken)
        good[good] = worked
        found: NDArray[np.int64] = table[np.repeat(good, counts)]
        return found

    def finish(self, rows: Any, tile: TileFormat, device: Device, stream: Stream) -> None:
        """Make tiles of planes, and look for the strips."""
        device.merge_planes(
            rows, tile, self._shape.sampling, self.work.doubts, stream, to_rgb=self._to_rgb
        )

    def doubtful(self, decoded: Sequence[int]) -> list[int]:
        """Return the tiles of stacks in which one may have led the decoder astray."""
        doubts = self.work.doubts[: len(decoded)]
        if not doubts.any():
            return []
        these = {decoded[place] for place in np.flatnonzero(doubts).tolist()}
        return [index for group in self._groups if not these.isdisjoint(group) for index in group]


@lru_cache(maxsize=256)
def plan_of(stacks: tuple[tuple[int, bool], ...], shape: Shape) -> Plan:
    """Plan memory for stacks of so many tiles, with a strip or without."""
    across, down = shape.sampling
    strip_rows = BLOCK * down
    images: list[tuple[int, ImageFormat]] = []
    places: list[tuple[int, ...]] = []
    place = 0
    for count, has_strip in stacks:
        rows = count * shape.height + strip_rows * has_strip
        planes = [(rows, shape.width, 1)]
        if shape.sample_format == PLANES:
            planes += [(-(-rows // down), -(-shape.width // across), 1)] * 2
        image = ImageFormat(
            tuple(planes),
            "uint8",
            shape.sample_format,
            shape.color_spec,
            SUBSAMPLINGS[shape.sampling] if len(planes) > 1 else 0,
        )
        images.append((place, image))
        strip = place + count * shape.height * shape.width if has_strip else NOWHERE
        columns: list[Sequence[int]] = []
        for high, wide, _ in planes:
            step = high * shape.height // rows * wide
            columns.append(range(place, place + count * step, step))
            place += high * wide
        strips = [NOWHERE] * (count - 1) + [strip]
        places += zip(*(columns * 3)[:3], strips, strict=True)
    return Plan(place, images, np.array(places, np.int64).reshape(-1, 4))


def _join(
    stacks: list[Stack], buffer: bytearray, room: NDArray[np.uint8]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Put each stack together in the room.

    Returns
    -------
    ends : list of int
        Where each ends.
    scans : list of (int, int)
        Where each scan begins that shares a stack, and its length.
    """
    source, target, place = memoryview(buffer), room.data, 0
    ends: list[int] = []
    scans: list[tuple[int, int]] = []
    for header, tiles, after, _ in stacks:
        target[place : place + len(header)] = header
        place += len(header)
        for number, (_, start, end) in enumerate(tiles):
            begin, place = place, place + end - start
            target[begin:place] = source[start:end]
            if after:  # else the tile's own marker ends the image
                target[place - 1] = FIRST_RESTART + number % RESTARTS
            scans.append((begin, place - begin - len(END_OF_IMAGE) if after else 0))
        target[place : place + len(after)] = after
        place += len(after)
        ends.append(place)
    return ends, scans


def _end_before_padding(buffer: bytearray, start: int, end: int) -> int:
    """Return where a stream ends that may be padded with zeros; its start if it has no end."""
    tail = buffer[max(start, end - MOST_PADDING) : end].rstrip(b"\0")
    if end - start < SHORTEST or not tail.endswith(END_OF_IMAGE):
        return start
    return max(start, end - MOST_PADDING) + len(tail)
