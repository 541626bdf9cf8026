"""A batch of JPEG tiles as a few images, of tiles on top of each other."""

from __future__ import annotations

import threading
from collections import defaultdict
from functools import lru_cache
from itertools import accumulate, chain, compress, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.codecs.jpeg import (
    BLOCK,
    END_OF_IMAGE,
    LONGEST_HEADER,
    NO_MARKS,
    Stacking,
    end_of_image,
    header_length,
    header_of_tile,
    read_header,
)
from napari_wsigpu.gpu.device.tables import JPEG_TILE
from napari_wsigpu.gpu.jpeg.codestream import Prepared
from napari_wsigpu.gpu.jpeg.joining import Joined, Stack, StackedBatch, cut, join
from napari_wsigpu.gpu.jpeg.library_handles import ImageFormat
from napari_wsigpu.storage.source import ScanSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.decoder import EncodedBatch
    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.device import Slots, Stream
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.gpu.device.workspace import Workspace
    from napari_wsigpu.gpu.jpeg.codestream import Recipe
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.storage.source import ByteSource

LEAST_STACKS = 2
YCBCR_TRANSFORM = 1
RGB_IDS = b"RGB"
PLANES = "P_YUV"
# Luma samples for one of chroma, across and down: what nvImageCodec calls it.
SUBSAMPLINGS = {(1, 1): 0, (2, 1): 2, (2, 2): 3}
# So narrow, libjpeg repeats chroma instead of smoothing it.
NARROW = 4
NOWHERE = -1
NOTHING = np.zeros(0, np.int64)


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
        tables = self._shared = level.encoding.jpeg_tables[0]
        self._tables = tables[: tables.rfind(END_OF_IMAGE)] if tables else b""
        self._sampling: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._latest = b"?"
        # Header of all tiles of the latest batch, if it was one.
        self._usual = b""
        self._stacking = lru_cache(maxsize=64)(self._new_stacking)
        self._stacks = lru_cache(maxsize=64)(self._new_stacks)

    def read(
        self,
        source: ByteSource,
        level: LevelLayout,
        tiles: NDArray[np.int64],
        background: float,
        worker: DecodeWorker,
    ) -> StackedBatch | None:
        """Read tiles and join them at the same time, if all are like those read before.

        Returns
        -------
        StackedBatch or None
            None if the tiles have to be read as they are: from another source than a file, or
            when they differ from those before.
        """
        if not isinstance(source, ScanSource):
            return None
        offsets, lengths = (each[0] for each in level.grid.ranges(*tiles.T))
        joined = self._alike(offsets, lengths, worker.device)
        if joined is None:
            return None
        buffer = worker.take_buffer(joined.end)
        if not source.read_scans(joined.scans, joined.header, buffer):
            worker.give_buffer(buffer)
            self._usual = b""
            return None
        joined.write_ends(buffer)
        return StackedBatch(level, tiles, buffer, joined, background)

    def prepare(self, batch: EncodedBatch, count: int, work: Workspace) -> StackedTiles:
        """Make code streams of the first `count` tiles of a batch, in a workspace.

        Raises
        ------
        MemoryError
            If the workspace can't be made large enough.
        """
        if isinstance(batch, StackedBatch):
            address, groups = batch.address, [(batch.stacked, np.arange(count))]
        else:
            groups = self._join(batch, count, work)
            address = int(work.encoded.ctypes.data)
        sampling = self._sampling or (1, 1)
        shape = Shape(*self._size, sampling, self._how.sample_format, self._how.color_spec)
        return StackedTiles(groups, address, shape, work, to_rgb=self._how.convert)

    def _join(
        self, batch: EncodedBatch, count: int, work: Workspace
    ) -> list[tuple[Joined, NDArray[np.int64]]]:
        """Join tiles in a workspace; return the stacks of each header, and the tiles' indices."""
        most = self._most(count, work.device)
        starts, lengths = batch.starts[0, :count], batch.lengths[0, :count]
        alike = self._alike(starts, lengths, work.device)
        if alike is not None:
            work.make_room(alike.end, 0, 0)
            if alike.copy(batch, work.encoded):
                return [(alike, np.arange(count))]
        groups: list[tuple[Joined, NDArray[np.int64]]] = []
        end = 0
        for header, (indices, ends) in self._by_header(batch, count).items():
            stacks = self._stacks(header, len(indices), most)
            joined = join(stacks, header, starts[indices], ends - starts[indices], end)
            groups.append((joined, indices))
            end = joined.end
        work.make_room(end, 0, 0)
        for joined, _ in groups:
            joined.copy(batch, work.encoded)
        self._usual = b""
        if len(groups) == 1 and len(groups[0][1]) == count:
            self._usual = groups[0][0].header
        return groups

    def _alike(
        self, offsets: NDArray[np.int64], lengths: NDArray[np.int64], device: CudaDevice
    ) -> Joined | None:
        """Plan to join tiles that all have the usual header.

        Returns
        -------
        Joined or None
            None if there is none, a tile is too short, or each is decoded alone: what their scans
            hold is looked at before.
        """
        header, count = self._usual, len(lengths)
        most = self._most(count, device)
        if not header or not self._joins(header, count, most):
            return None
        if lengths.min() <= len(header) + len(END_OF_IMAGE):
            return None
        return join(self._stacks(header, count, most), header, offsets, lengths)

    def _most(self, count: int, device: CudaDevice) -> int:
        """Return how many of so many tiles a stack has, for the engines to be busy."""
        engine = device.jpeg_engine
        stacks = min(engine.at_once, max(LEAST_STACKS, count // engine.tiles))
        return -(-count // stacks)

    def _by_header(
        self, batch: EncodedBatch, count: int
    ) -> dict[bytes, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Sort the tiles that nvImageCodec can take by their headers: indices, and their ends."""
        view, header = batch.view, self._latest
        starts = batch.starts[0, :count].tolist()
        ends = (batch.starts[0, :count] + batch.lengths[0, :count]).tolist()
        found: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
        for index, (start, past) in enumerate(zip(starts, ends, strict=True)):
            end = self._end(view, start, past)
            if view[start : start + len(header)] != header:
                head = bytes(view[start : min(end, start + LONGEST_HEADER)])
                header = self._check(head) or header
                if not head.startswith(header):
                    continue
            if end - start > len(header) + len(END_OF_IMAGE):
                found[header].append((index, end))
        columns = {key: np.array(tiles, np.int64).T for key, tiles in found.items()}
        return {key: (indices, ends) for key, (indices, ends) in columns.items()}

    def _end(self, view: memoryview, start: int, past: int) -> int:
        """Return where a stream ends; its start if its structure reveals damage.

        What is followed by anything but zeros is left to the CPU, which notices if an end came too
        early.
        """
        try:
            end = start + end_of_image(view[start:past], self._shared)
        except ValueError:
            return start
        return start if bytes(view[end:past]).strip(b"\0") else end

    def _check(self, data: bytes) -> bytes:
        """Return a header that is not the usual one, empty if it is not as the level says."""
        data = data[: header_length(data)]
        shape = *self._size, self._channels
        header = header_of_tile(self._whole(data), shape) if data else None
        if header is None:
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

    def _new_stacks(self, header: bytes, count: int, most: int) -> tuple[Stack, ...]:
        """Return the stacks of so many tiles with this header."""
        if not self._joins(header, count, most):
            return (Stack(self._whole(header), 1, b"", NO_MARKS),) * count
        stacking = self._stacking(header)
        end = stacking.strip + END_OF_IMAGE
        return tuple(
            Stack(stacking.begin(last - first), last - first, end, stacking.marks)
            for first, last in pairwise(cut(count, min(most, stacking.most)))
        )

    def _joins(self, header: bytes, count: int, most: int) -> bool:
        """Whether tiles with this header are joined, not decoded one by one."""
        return min(most, count) > 1 and self._stacking(header).most > 1


class StackedTiles(Prepared):
    """Stacks of a batch, whose planes become tiles.

    Parameters
    ----------
    groups : list of (Joined, ndarray of int64)
        Stacks in one buffer, and the indices of their tiles.
    address : int
        Address of the buffer.
    shape : Shape
        What their tiles have in common.
    work : Workspace
        Where planes go.
    to_rgb : bool
        Whether they are YCbCr.
    """

    kind, joins = "jpeg", True

    def __init__(
        self,
        groups: list[tuple[Joined, NDArray[np.int64]]],
        address: int,
        shape: Shape,
        work: Workspace,
        *,
        to_rgb: bool,
    ) -> None:
        self.work, self._shape, self._to_rgb = work, shape, to_rgb
        self._address, self._joined = address, [joined for joined, _ in groups]
        self._indices = np.concatenate([NOTHING, *(indices for _, indices in groups)])
        stacks = tuple(chain.from_iterable(joined.stacks for joined in self._joined))
        self._plan, self._table = _described(stacks, shape)
        work.make_room(0, self._plan.size, len(self._table))
        self._taken = [
            work.streams.add(address + begin, end - begin)
            for joined in self._joined
            for begin, end in joined.spans
        ]
        self._counts = [stack.size for stack in stacks]
        indices = self._indices.tolist()
        cuts = [0, *accumulate(self._counts)]
        self._groups = [indices[begin:end] for begin, end in pairwise(cuts)]
        self.groups = list(compress(self._groups, self._taken))

    def describe(self, addresses: Sequence[int], stream: Stream) -> None:
        """Describe the stacks' planes."""
        for (start, image), good in zip(self._plan.images, self._taken, strict=True):
            if good:
                self.work.images.add(self.work.planes + start, image, stream.ptr)

    def finish(self, worked: list[bool], slots: Slots, device: CudaDevice, stream: Stream) -> None:
        """Make tiles of planes, and look for the strips.

        All that decoding does not need is put together here, while the device is at work.
        """
        table, place = self._table.copy(), 0
        for joined in self._joined:
            part = table[place : place + len(joined.scans)]
            part["scan"] = joined.scans["place"]
            # Of tiles that are alone in their stream, the template says 0.
            part["length"] *= joined.scans["length"] - len(joined.header) - len(END_OF_IMAGE)
            place += len(part)
        table["scan"] += np.uint64(self._address)
        table["target"] = slots.addresses[self._indices]
        table["planes"] += np.uint64(self.work.planes)
        table["strip"][table["strip"] > 0] += np.uint64(self.work.planes)
        if not (all(worked) and all(self._taken)):
            good = np.array(self._taken)
            good[good] = worked
            table = table[np.repeat(good, self._counts)]
        device.merge_planes(
            table,
            slots.tile,
            self._shape.sampling,
            self.work.doubts,
            stream,
            to_rgb=self._to_rgb,
        )

    def doubtful(self, decoded: Sequence[int]) -> list[int]:
        """Return the tiles of stacks in which one may have led the decoder astray."""
        doubts = self.work.doubts[: len(decoded)]
        if not doubts.any():
            return []
        these = {decoded[place] for place in np.flatnonzero(doubts).tolist()}
        return [index for group in self._groups if not these.isdisjoint(group) for index in group]


@lru_cache(maxsize=256)
def _described(stacks: tuple[Stack, ...], shape: Shape) -> tuple[Plan, NDArray[Any]]:
    """Plan the planes of stacks; return also the table of their tiles, relative to the planes."""
    plan = plan_of(tuple((stack.size, bool(stack.end)) for stack in stacks), shape)
    counts = [stack.size for stack in stacks]
    marks = np.repeat([stack.marks for stack in stacks] or [NO_MARKS], counts or [0], axis=0)
    table = np.zeros(len(plan.places), JPEG_TILE)
    table["planes"] = plan.places[:, :3]
    # No strip lies at 0, where the first tile is.
    table["strip"] = np.maximum(plan.places[:, 3], 0)
    table["length"] = np.repeat([bool(stack.end) for stack in stacks], counts)
    table["shades"], table["quantum"], table["codes"] = marks[:, :2], marks[:, 2], marks[:, 3:]
    return plan, table


@lru_cache(maxsize=256)
def plan_of(stacks: tuple[tuple[int, bool], ...], shape: Shape) -> Plan:
    """Plan memory for stacks of so many tiles, with a strip or without."""
    across, down = shape.sampling
    images: list[tuple[int, ImageFormat]] = []
    firsts: list[tuple[int, int, int]] = []
    strips: list[int] = []
    place = 0
    for count, has_strip in stacks:
        rows = count * shape.height + BLOCK * down * has_strip
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
        strips.append(place + count * shape.height * shape.width if has_strip else NOWHERE)
        starts = [place, *accumulate((high * wide for high, wide, _ in planes), initial=place)]
        firsts.append((starts[0], starts[2], starts[3]) if len(planes) > 1 else (place,) * 3)
        place = starts[-1]
    luma = shape.height * shape.width
    chroma = shape.height // down * -(-shape.width // across)
    steps = [luma, chroma, chroma] if shape.sample_format == PLANES else [luma] * 3
    counts = np.array([count for count, _ in stacks], np.int64)
    ends = np.cumsum(counts)
    numbers = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
    places = np.full((len(numbers), 4), NOWHERE, np.int64)
    places[:, :3] = np.repeat(np.array(firsts, np.int64).reshape(-1, 3), counts, axis=0)
    places[:, :3] += numbers[:, None] * np.array(steps)
    places[ends - 1, 3] = strips
    return Plan(place, images, places)
