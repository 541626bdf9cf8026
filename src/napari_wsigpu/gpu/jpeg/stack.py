"""A batch of JPEG tiles as a few images, of tiles on top of each other."""

from __future__ import annotations

import threading
from collections import defaultdict
from functools import lru_cache
from itertools import accumulate, compress, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.codecs.jpeg import (
    BLOCK,
    END_OF_IMAGE,
    LONGEST_HEADER,
    MOST_ROWS,
    NO_MARKS,
    Stacking,
    end_of_image,
    header_length,
    header_of_tile,
    read_header,
)
from napari_wsigpu.gpu.device.tables import JPEG_TILE
from napari_wsigpu.gpu.jpeg.joining import (
    Scans,
    Stack,
    all_have,
    copy_stacks,
    cut,
    leave_room,
    stack_in_place,
)
from napari_wsigpu.gpu.jpeg.library_handles import ImageFormat
from napari_wsigpu.storage.source import Spacing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.decoder import EncodedBatch
    from napari_wsigpu.gpu.device.device import Device, Slots, Stream
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.gpu.device.workspace import Workspace
    from napari_wsigpu.gpu.jpeg.codestream import Recipe
    from napari_wsigpu.model.layout import LevelLayout

# Where tiles are put together as they lie, the header of a stack goes before its first one.
MARGIN = 1024
# So many bytes are left over between two tiles that are read at once, less than `joining` can fill.
MOST_BETWEEN = 2048
YCBCR_TRANSFORM = 1
RGB_IDS = b"RGB"
PLANES = "P_YUV"
# Luma samples for one of chroma, across and down: what nvImageCodec calls it.
SUBSAMPLINGS = {(1, 1): 0, (2, 1): 2, (2, 2): 3}
# So narrow, libjpeg repeats chroma instead of smoothing it.
NARROW = 4
NOWHERE = -1
NO_SCANS = Scans(*[np.zeros(0, np.int64)] * 3)


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
        self._stacking = lru_cache(maxsize=64)(self._new_stacking)

    def prepare(self, batch: EncodedBatch, count: int, work: Workspace) -> StackedTiles:
        """Make code streams of the first `count` tiles of a batch, in a workspace.

        Raises
        ------
        MemoryError
            If the workspace can't be made large enough.
        """
        most = -(-count // work.device.jpegs_at_once)
        header = self._latest
        alike = self._alike(header, batch, count, most)
        by_header = self._by_header(header, batch, count) if alike is None else {header: alike}
        stacks = [
            stack
            for header, scans in by_header.items()
            for stack in self._stacks(header, len(scans.indices), most)
        ]
        sampling = self._sampling or (1, 1)
        shape = Shape(*self._size, sampling, self._how.sample_format, self._how.color_spec)
        scans = alike or Scans(
            *map(np.concatenate, zip(NO_SCANS, *by_header.values(), strict=True))
        )
        alone = alike is not None and count == len(batch)
        own = header if alone and batch.shared and work.device.jpegs_filled else None
        return StackedTiles(stacks, scans, shape, batch, work, own, to_rgb=self._how.convert)

    def spacing(self, count: int, at_once: int) -> Spacing:
        """Return how so many tiles are to lie in a buffer, if all are alike."""
        most = min(-(-count // at_once), max(1, MOST_ROWS // self._size[0]))
        found = np.zeros(count, np.int64)
        found[cut(count, most)[:-1]] = MARGIN
        return Spacing(found, MOST_BETWEEN)

    def _alike(self, header: bytes, batch: EncodedBatch, count: int, most: int) -> Scans | None:
        """Return the tiles if all are whole and have this header.

        The markers in scans that are joined are looked for where they are decoded: one leaves the
        whole stack in doubt.
        """
        starts, sizes = batch.starts[0, :count], batch.lengths[0, :count]
        ends = starts + sizes
        if (
            not count
            or sizes.min() <= len(header) + len(END_OF_IMAGE)
            or not all_have(batch.view, header, starts)
            or not all_have(batch.view, END_OF_IMAGE, ends - len(END_OF_IMAGE))
        ):
            return None
        if not self._joins(header, count, most) and not all(
            self._end(batch.view, *place) == place[1]
            for place in zip(starts.tolist(), ends.tolist(), strict=True)
        ):
            return None
        return Scans(np.arange(count), starts + len(header), ends)

    def _by_header(self, header: bytes, batch: EncodedBatch, count: int) -> dict[bytes, Scans]:
        """Sort the tiles that nvImageCodec can take by their headers."""
        view = batch.view
        starts = batch.starts[0, :count].tolist()
        ends = (batch.starts[0, :count] + batch.lengths[0, :count]).tolist()
        found: defaultdict[bytes, list[tuple[int, int, int]]] = defaultdict(list)
        for index, (start, past) in enumerate(zip(starts, ends, strict=True)):
            end = self._end(view, start, past)
            if view[start : start + len(header)] != header:
                head = bytes(view[start : min(end, start + LONGEST_HEADER)])
                header = self._check(head) or header
                if not head.startswith(header):
                    continue
            if end - start > len(header) + len(END_OF_IMAGE):
                found[header].append((index, start + len(header), end))
        return {key: Scans(*np.array(scans, np.int64).T) for key, scans in found.items()}

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

    def _stacks(self, header: bytes, count: int, most: int) -> list[Stack]:
        """Return the stacks of so many tiles with this header."""
        if not self._joins(header, count, most):
            return [Stack(self._whole(header), 1, b"", NO_MARKS)] * count
        stacking = self._stacking(header)
        end = stacking.strip + END_OF_IMAGE
        return [
            Stack(stacking.begin(last - first), last - first, end, stacking.marks)
            for first, last in pairwise(cut(count, min(most, stacking.most)))
        ]

    def _joins(self, header: bytes, count: int, most: int) -> bool:
        """Whether tiles with this header are joined, not decoded one by one."""
        return min(most, count) > 1 and self._stacking(header).most > 1


class StackedTiles:
    """Stacks of a batch, whose planes become tiles; see `codestream.Prepared`.

    Parameters
    ----------
    stacks : list of Stack
        The stacks.
    scans : Scans
        Those of their tiles.
    shape : Shape
        What their tiles have in common.
    batch : EncodedBatch
        Where their bytes are.
    work : Workspace
        Where streams and planes go.
    own : bytes or None
        What all tiles of the batch begin with, if they may be put together where they lie.
    to_rgb : bool
        Whether they are YCbCr.
    """

    kind, joins = "jpeg", True

    def __init__(
        self,
        stacks: list[Stack],
        scans: Scans,
        shape: Shape,
        batch: EncodedBatch,
        work: Workspace,
        own: bytes | None,
        *,
        to_rgb: bool,
    ) -> None:
        self.work, self._shape, self._to_rgb = work, shape, to_rgb
        self._plan = plan = plan_of(tuple((s.size, bool(s.end)) for s in stacks), shape)
        if own is not None and leave_room(stacks, scans, len(batch.view)):
            work.make_room(0, plan.size, len(plan.places))
            batch.lost = own
            spans, begins = stack_in_place(stacks, scans, batch.view), scans.starts
            first = batch.address
        else:
            most = int(batch.lengths.sum()) + sum(len(s.header) + len(s.end) for s in stacks)
            work.make_room(most, plan.size, len(plan.places))
            spans, begins = copy_stacks(stacks, scans, batch.view, work.encoded.data)
            first = int(work.encoded.ctypes.data)
        self._stacks, self._scans, self._begins = stacks, scans, first + begins
        self._taken = [work.streams.add(first + start, end - start) for start, end in spans]
        cuts = [0, *accumulate(stack.size for stack in stacks)]
        indices = scans.indices.tolist()
        self._groups = [indices[begin:end] for begin, end in pairwise(cuts)]
        self.groups = list(compress(self._groups, self._taken))

    def describe(self, addresses: Sequence[int], stream: Stream) -> None:
        """Describe the stacks' planes."""
        for (start, image), good in zip(self._plan.images, self._taken, strict=True):
            if good:
                self.work.images.add(self.work.planes + start, image, stream.ptr)

    def decode(self, worker: DecodeWorker) -> list[bool]:
        """Decode the stacks."""
        return worker.decode(self.kind, self.work.streams.used, self.work.images.used)

    def engine(self, worker: DecodeWorker) -> str:
        """Return the name of nvImageCodec's path."""
        return worker.engine(self.kind) or ""

    def finish(self, worked: list[bool], slots: Slots, device: Device, stream: Stream) -> None:
        """Make tiles of planes, and look for the strips.

        All that decoding does not need is put together here, while the device is at work.
        """
        indices, starts, ends = self._scans
        counts = [stack.size for stack in self._stacks]
        strips = self._plan.places[:, 3]
        shared = np.repeat([bool(stack.end) for stack in self._stacks], counts)
        marks = np.repeat([stack.marks for stack in self._stacks], counts, axis=0)
        table = np.empty(len(indices), JPEG_TILE)
        table["target"] = slots.addresses[indices]
        table["planes"] = self._plan.places[:, :3] + self.work.planes
        table["strip"] = np.where(strips == NOWHERE, 0, strips + self.work.planes)
        table["scan"] = self._begins
        table["length"] = np.where(shared, ends - starts - len(END_OF_IMAGE), 0)
        table["shades"], table["quantum"] = marks[:, :2], marks[:, 2]
        table["codes"] = marks[:, 3:]
        if not (all(worked) and all(self._taken)):
            good = np.array(self._taken)
            good[good] = worked
            table = table[np.repeat(good, counts)]
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
