"""`JpegStreams`: JPEG tiles of a batch as a few tall images, each of which is a stack of tiles.

Every stack ends with a strip: a row of blocks with known values below the last tile. If the decoder
lost its position in a damaged tile, the strip is not where it should be, and the CPU decodes all
tiles of the stack again.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from functools import lru_cache
from itertools import accumulate, chain, compress, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.codecs.jpeg import (
    BLOCK,
    END_OF_IMAGE,
    LONGEST_HEADER,
    MAX_ROWS,
    NO_MARKS,
    Stacking,
    end_of_image,
    header_length,
    header_of_tile,
    read_header,
)
from napari_wsigpu.gpu.device.kernel_tables import JPEG_TILE
from napari_wsigpu.gpu.jpeg.codestream import PreparedBatch
from napari_wsigpu.gpu.jpeg.joining import Joined, Stack, StackedBatch, cut, join
from napari_wsigpu.gpu.jpeg.jpeg_kernels import ENGINE, WORD
from napari_wsigpu.gpu.jpeg.nvimagecodec_handles import ImageFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.decoder import EncodedBatch
    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.interfaces import Slots, Stream
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.gpu.device.workspace import Workspace
    from napari_wsigpu.gpu.jpeg.codestream import Recipe
    from napari_wsigpu.model.arrays import Integers
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.storage.source import ByteSource

YCBCR_TRANSFORM = 1  # of the Adobe APP14 segment
RGB_IDS = b"RGB"
# nvImageCodec's format for separate planes of Y, Cb and Cr.
PLANES = "P_YUV"
# nvImageCodec's number for each subsampling: luma samples per chroma sample, across and down.
SUBSAMPLINGS = {(1, 1): 0, (2, 1): 2, (2, 2): 3}
# Up to this width, libjpeg repeats the chroma of an image instead of interpolating it.
NARROW = 4
# Pixels of batches that our kernels decode faster than the seven JPEG engines of an H100.
LARGE_BATCH = 1 << 24
NOWHERE = -1
NOTHING = np.zeros(0, np.int64)


class Shape(NamedTuple):
    """Properties that the tiles of a level share.

    Attributes
    ----------
    height, width : int
        Size of a scan in pixels: a tile, or a restart interval.
    sampling : tuple of (int, int)
        Luma samples per chroma sample, across and down.
    sample_format, color_spec : str
        See `Recipe`.
    """

    height: int
    width: int
    sampling: tuple[int, int]
    sample_format: str
    color_spec: str


class Plan(NamedTuple):
    """Layout of the planes of stacks in one block of device memory.

    Attributes
    ----------
    size : int
        Size of the block in bytes.
    images : list of (int, ImageFormat)
        Offset and planes of each stack.
    offsets : ndarray of int64, shape (scans, 4)
        Offset of each scan in three planes, which are the same one for gray; then the offset of
        the strip for the last scan of a stack that has one, else -1.
    """

    size: int
    images: list[tuple[int, ImageFormat]]
    offsets: Integers


class JpegStreams:
    """Makes code streams of the JPEG tiles of a level.

    Tiles with the same header are joined into stacks. A header is compared with the level first,
    for the reasons given in `codestream.Jpeg2000Streams`.

    Parameters
    ----------
    level : LevelLayout
        Level of the tiles.
    recipe : Recipe
        How its tiles are decoded.
    worker : DecodeWorker, optional
        Worker whose kernels decode large batches, which takes them less time than an engine, or all
        batches if there is no engine. Without it, the engine decodes everything.
    """

    # Number of scans in a tile: see `IntervalStreams`.
    _intervals = 1

    def __init__(
        self,
        level: LevelLayout,
        recipe: Recipe,
        worker: DecodeWorker | None = None,
    ) -> None:
        grid, self._worker = level.grid, worker
        self._has_engine = worker is None or worker.has_jpeg_engine
        self._size = (grid.tile_height // self._intervals, grid.tile_width)
        self._channels = level.channels
        self._colors = level.encoding.jpeg_color
        self._recipe = recipe
        # JPEGTables of TIFF; without the final EOI, they are the start of each tile's header.
        tables = self._jpeg_tables = level.encoding.jpeg_tables[0]
        self._tables = tables[: tables.rfind(END_OF_IMAGE)] if tables else b""
        self._sampling: tuple[int, int] | None = None
        # Protects `_sampling`, which the first tile sets for the whole level. The two headers below
        # are single references; reading a stale one costs time, not correctness.
        self._lock = threading.Lock()
        # Header of the last tile that was accepted.
        self._last_header = b"?"
        # Header of the latest batch, if all of its tiles had the same one; else empty.
        self._common_header = b""
        self._stacking = lru_cache(maxsize=64)(self._new_stacking)
        self._stacks = lru_cache(maxsize=64)(self._new_stacks)

    def read_stacked(
        self,
        source: ByteSource,
        level: LevelLayout,
        tiles: Integers,
        background: float,
        worker: DecodeWorker,
    ) -> StackedBatch | None:
        """Read tiles from a file and join them at the same time, if all have the common header.

        Parameters
        ----------
        source : ByteSource
            File of the slide.
        level : LevelLayout
            Level of the tiles.
        tiles : ndarray of int64, shape (tiles, 2)
            Row and column of each tile.
        background : float
            Value of pixels that the file does not contain.
        worker : DecodeWorker
            Worker that lends the page-locked buffer to the returned batch.

        Returns
        -------
        StackedBatch or None
            None if the tiles must be read as they are stored, because the source is not a file or
            the tiles do not share a known header.
        """
        if not hasattr(source, "read_scans"):  # it is not a file
            return None
        offsets, lengths = (each.T.ravel() for each in level.grid.ranges(*tiles.T))
        joined = self._join_alike(offsets, lengths, worker.device)
        if joined is None:
            return None
        buffer = worker.acquire_buffer(joined.end)
        with worker.turn.lent():
            alike = source.read_scans(joined.scans, joined.header, buffer)
        if not alike:
            worker.release_buffer(buffer)
            self._common_header = b""
            return None
        joined.write_ends(buffer)
        return StackedBatch(level, tiles, buffer, joined, background)

    def prepare(self, batch: EncodedBatch, count: int, work: Workspace) -> StackedTiles:
        """Make code streams of the first `count` tiles of a batch.

        The streams of a `StackedBatch` are in its own buffer already, others are copied to `work`.

        Raises
        ------
        MemoryError
            If there is not enough memory for the workspace.
        """
        if isinstance(batch, StackedBatch):
            groups = [(batch.stacked, np.arange(count))]
            encoded = np.frombuffer(batch.view, np.uint8)
        else:
            groups = self._join(batch, count, work)
            encoded = work.encoded
        sampling = self._sampling or (1, 1)
        shape = Shape(*self._size, sampling, self._recipe.sample_format, self._recipe.color_spec)
        prepared = TilesByKernels if self._by_kernels(count, groups) else StackedTiles
        return prepared(
            groups, encoded, shape, work, intervals=self._intervals, to_rgb=self._recipe.convert
        )

    def _by_kernels(self, count: int, groups: list[tuple[Joined, Integers]]) -> bool:
        """Return whether the kernels decode a batch of `count` tiles, rather than the engine."""
        if self._worker is None or not self._has_engine:
            return not self._has_engine
        pixels, kernels = count * self._intervals * self._size[0] * self._size[1], self._worker.jpeg
        return (
            pixels >= LARGE_BATCH
            and kernels.ready()
            and all(kernels.accepts(joined) for joined, _ in groups)
        )

    def _join(
        self, batch: EncodedBatch, count: int, work: Workspace
    ) -> list[tuple[Joined, Integers]]:
        """Join tiles in a workspace; return the stacks of each header with their tiles' indices."""
        most = self._tiles_per_stack(count, work.device)
        starts, lengths = batch.starts[0, :count], batch.lengths[0, :count]
        if not self._common_header and count > 1:
            # Probably all tiles have the header of the first one; `Joined.copy` compares them.
            first, size = int(starts[0]), min(int(lengths[0]), LONGEST_HEADER)
            self._common_header = self._check(bytes(batch.view[first : first + size]))
        alike = self._join_alike(starts, lengths, work.device)
        if alike is not None:
            work.make_room(alike.end, 0, 0)
            if alike.copy(batch, work.encoded):
                return [(alike, np.arange(count))]
        # Headers differ, or tiles are decoded one by one: check the structure of each tile.
        groups: list[tuple[Joined, Integers]] = []
        end = 0
        for header, (indices, ends) in self._by_header(batch, count).items():
            stacks = self._stacks(header, len(indices), most)
            joined = join(stacks, header, starts[indices], ends - starts[indices], end)
            groups.append((joined, indices))
            end = joined.end
        work.make_room(end, 0, 0)
        for joined, _ in groups:
            joined.copy(batch, work.encoded)
        self._common_header = b""
        if len(groups) == 1 and len(groups[0][1]) == count:
            self._common_header = groups[0][0].header
        return groups

    def _join_alike(
        self, offsets: Integers, lengths: Integers, device: CudaDevice
    ) -> Joined | None:
        """Plan to join tiles under the assumption that all have the common header.

        Returns
        -------
        Joined or None
            None if there is no common header, a tile is too short for it, or tiles are not joined.
            Nothing would reveal damage in tiles without a strip, so `_by_header` checks them first.
        """
        header, count = self._common_header, len(lengths) // self._intervals
        most = self._tiles_per_stack(count, device)
        if not header or not self._joins(header, count, most):
            return None
        repeated = self._repeated(header)
        if lengths.min() <= len(repeated) + len(END_OF_IMAGE):
            return None
        return join(self._stacks(header, count, most), repeated, offsets, lengths)

    def _repeated(self, header: bytes) -> bytes:
        """Return the part of a header that stands before each scan in the file."""
        return header

    def _tiles_per_stack(self, count: int, device: CudaDevice) -> int:
        """Return how many of `count` tiles go into each stack to keep all engines busy."""
        height, width = self._size[0] * self._intervals, self._size[1]
        most = max(1, MAX_ROWS // height)
        if not self._has_engine:
            return most
        return device.jpeg_engine.tiles_per_image(count, height * width, most)

    def _by_header(self, batch: EncodedBatch, count: int) -> dict[bytes, tuple[Integers, Integers]]:
        """Return the indices and ends of the tiles that nvImageCodec can decode, by header."""
        view, header = batch.view, self._last_header
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
        """Return the end of a tile's stream, or its start if the stream is damaged.

        A stream that is followed by anything but zeros counts as damaged: its EOI may be a part of
        the data, which the CPU's decoder notices.
        """
        try:
            end = start + end_of_image(view[start:past], self._jpeg_tables)
        except ValueError:
            return start
        return start if bytes(view[end:past]).strip(b"\0") else end

    def _check(self, data: bytes) -> bytes:
        """Return a tile's header and remember it; return no bytes if it contradicts the level."""
        data = data[: header_length(data)]
        shape = *self._size, self._channels
        header = header_of_tile(self._with_tables(data), shape) if data else None
        if header is None:
            return b""
        if self._colors == "ycbcr" and (
            header.ids == RGB_IDS or header.transform not in (None, YCBCR_TRANSFORM)
        ):
            return b""  # the stored components are RGB
        if self._channels > 1:
            luma, *chroma = header.sampling
            if set(chroma) != {(1, 1)} or luma not in SUBSAMPLINGS:
                return b""
            if luma[0] > 1 and header.width <= NARROW:
                return b""
            with self._lock:
                # nvImageCodec's images and the kernel have one subsampling for a whole batch.
                self._sampling = self._sampling or luma
            if luma != self._sampling:
                return b""
        self._last_header = data
        return data

    def _with_tables(self, header: bytes) -> bytes:
        """Return a tile's header with the tables that it shares, inserted after its SOI."""
        return self._tables + header[2:] if self._tables else header

    def _new_stacking(self, header: bytes) -> Stacking:
        whole = self._with_tables(header)
        found = read_header(whole)
        assert found is not None  # `_check` has accepted it
        return Stacking(whole, found)

    def _new_stacks(self, header: bytes, count: int, most: int) -> tuple[Stack, ...]:
        """Return the stacks of `count` tiles with this header, `most` tiles in each."""
        if not self._joins(header, count, most):
            return (Stack(self._with_tables(header), 1, b"", NO_MARKS),) * count
        stacking = self._stacking(header)
        end = stacking.strip + END_OF_IMAGE
        edges = cut(count, min(most, stacking.max_tiles // self._intervals))
        sizes = [(last - first) * self._intervals for first, last in pairwise(edges)]
        return tuple(Stack(stacking.header(size), size, end, stacking.marks) for size in sizes)

    def _joins(self, header: bytes, count: int, most: int) -> bool:
        """Return whether tiles with this header are joined rather than decoded one by one."""
        return min(most, count) > 1 and self._stacking(header).max_tiles > 1


class StackedTiles(PreparedBatch):
    """Stacks of a batch, whose decoded planes become the pixels of tiles.

    Parameters
    ----------
    groups : list of (Joined, ndarray of int64)
        Stacks of each header, all in one buffer, and the indices of their tiles.
    encoded : ndarray of uint8
        The page-locked buffer, which the workspace or the batch owns.
    shape : Shape
        Properties that the tiles share.
    work : Workspace
        Owner of the planes and of the flags for doubtful tiles.
    intervals : int
        Number of scans in a tile.
    to_rgb : bool
        Whether the tiles are YCbCr and become RGB.
    """

    kind, joins = "jpeg", True

    def __init__(
        self,
        groups: list[tuple[Joined, Integers]],
        encoded: NDArray[np.uint8],
        shape: Shape,
        work: Workspace,
        *,
        intervals: int,
        to_rgb: bool,
    ) -> None:
        self.work, self._shape, self._to_rgb = work, shape, to_rgb
        self._intervals = intervals
        self._encoded, self._address = encoded, int(encoded.ctypes.data)
        self._joined = [joined for joined, _ in groups]
        self._indices = np.concatenate([NOTHING, *(indices for _, indices in groups)])
        stacks = tuple(chain.from_iterable(joined.stacks for joined in self._joined))
        self._plan, self._table = _plane_table(stacks, shape)
        work.make_room(0, self._device_bytes(), len(self._table))
        self._accepted = self._accept()
        self._counts = [stack.size for stack in stacks]
        indices = self._indices.tolist()
        cuts = [0, *accumulate(count // intervals for count in self._counts)]
        self._groups = [indices[start:end] for start, end in pairwise(cuts)]
        self.groups = list(compress(self._groups, self._accepted))

    def _device_bytes(self) -> int:
        """Return the bytes of device memory that the batch needs for planes."""
        return self._plan.size

    def _accept(self) -> list[bool]:
        """Make code streams; return for each stack whether nvImageCodec accepts it."""
        return [
            self.work.streams.add(self._address + start, end - start)
            for joined in self._joined
            for start, end in joined.spans
        ]

    def set_targets(self, addresses: Sequence[int], stream: Stream) -> None:
        """Set the device memory of each stack's planes."""
        for (start, image), good in zip(self._plan.images, self._accepted, strict=True):
            if good:
                self.work.images.add(self.work.planes + start, image, stream.ptr)

    def finish(self, worked: list[bool], slots: Slots, device: CudaDevice, stream: Stream) -> None:
        """Submit the kernel that assembles tiles from planes and checks the strips.

        The table is completed here, while the device decodes, as decoding does not need it.
        """
        table, offset = self._table.copy(), 0
        if not self.joins:  # our kernels check each scan themselves
            table["strip"] = table["length"] = 0
        for joined in self._joined if self.joins else ():
            part = table[offset : offset + len(joined.scans)]
            part["scan"] = joined.scans["place"]
            # So far, the length is 1 for joined tiles and 0 for single ones, which are not checked.
            part["length"] *= joined.scans["length"] - len(joined.header) - len(END_OF_IMAGE)
            offset += len(part)
        table["scan"] += np.uint64(self._address)
        table["target"] = np.repeat(slots.addresses[self._indices], self._intervals)
        table["planes"] += np.uint64(self.work.planes)
        table["strip"][table["strip"] > 0] += np.uint64(self.work.planes)
        # Rows of the table, and with them the flags, are in the order of the decoded tiles.
        if not (all(worked) and all(self._accepted)):
            good = np.array(self._accepted)
            good[good] = worked
            table = table[np.repeat(good, self._counts)]
        if self._intervals > 1:
            if self.joins:
                device.check_scans(table, self._shape.width, self.work.doubts, stream)
            # The planes of a tile start with those of its first interval, and are checked now.
            table = table[:: self._intervals].copy()
            table["strip"] = table["length"] = 0
        device.merge_planes(
            table, slots.tile, self._shape.sampling, self.work.doubts, stream, to_rgb=self._to_rgb
        )

    def doubtful(self, decoded: Sequence[int]) -> list[int]:
        """Return all tiles of the stacks in which the kernel has set a flag."""
        doubts = self.work.doubts[: len(decoded) * self._intervals]
        if not doubts.any():
            return []
        rows = np.unique(np.flatnonzero(doubts) // self._intervals)
        flagged = {decoded[row] for row in rows.tolist()}
        return [index for group in self._groups if not flagged.isdisjoint(group) for index in group]


class TilesByKernels(StackedTiles):
    """Tiles of a batch that our own kernels decode, each of them alone; see `StackedTiles`."""

    joins = False

    def _device_bytes(self) -> int:
        # The encoded bytes follow the planes.
        self._copy = -(-self._plan.size // WORD) * WORD
        return self._copy + max((joined.end for joined in self._joined), default=0) + WORD

    def _accept(self) -> list[bool]:
        return [True for joined in self._joined for _ in joined.stacks]

    def set_targets(self, addresses: Sequence[int], stream: Stream) -> None:
        """Remember the stream; the kernels need no handles of nvImageCodec."""
        self._stream = stream

    def decode(self, worker: DecodeWorker) -> list[bool]:
        """Upload the scans and submit the kernels; return for each stack whether they decode it."""
        size, sampling = (self._shape.height, self._shape.width), self._shape.sampling
        planes = self._table["planes"] + np.uint64(self.work.planes)
        address, worked, first = self.work.planes + self._copy, list[bool](), 0
        for joined in self._joined:
            start, end = joined.spans[0][0], joined.end
            self.work.device.upload(address + start, self._encoded[start:end], self._stream)
            past = first + len(joined.scans)
            flags = self.work.doubts[first:past]
            good = worker.jpeg.decode(
                joined, address, planes[first:past], size, sampling, flags, self._stream
            )
            worked += [good] * len(joined.stacks)
            first = past
        return worked

    def engine(self, worker: DecodeWorker) -> str:
        """Return the name of the kernels."""
        return ENGINE

    def doubtful(self, decoded: Sequence[int]) -> list[int]:
        """Return the tiles for which the kernel has set a flag."""
        doubts = self.work.doubts[: len(self._table)].reshape(-1, self._intervals)
        wrong = self._indices[doubts.any(axis=1)].tolist()
        return sorted({*wrong} & {*decoded})


@lru_cache(maxsize=256)
def _plane_table(stacks: tuple[Stack, ...], shape: Shape) -> tuple[Plan, NDArray[np.void]]:
    """Return the layout of stacks and a table of their tiles, with offsets instead of addresses."""
    plan = plan_stacks(tuple((stack.size, bool(stack.end)) for stack in stacks), shape)
    counts = [stack.size for stack in stacks]
    marks = np.repeat([stack.marks for stack in stacks] or [NO_MARKS], counts or [0], axis=0)
    table = np.zeros(len(plan.offsets), JPEG_TILE)
    table["planes"] = plan.offsets[:, :3]
    # Zero means no strip, because offset 0 belongs to the first tile.
    table["strip"] = np.maximum(plan.offsets[:, 3], 0)
    table["length"] = np.repeat([bool(stack.end) for stack in stacks], counts)
    table["shades"], table["quantum"], table["codes"] = marks[:, :2], marks[:, 2], marks[:, 3:]
    return plan, table


@lru_cache(maxsize=256)
def plan_stacks(stacks: tuple[tuple[int, bool], ...], shape: Shape) -> Plan:
    """Lay out the planes of stacks, given the number of tiles and whether there is a strip."""
    across, down = shape.sampling
    images: list[tuple[int, ImageFormat]] = []
    firsts: list[tuple[int, int, int]] = []
    strips: list[int] = []
    offset = 0
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
        images.append((offset, image))
        strips.append(offset + count * shape.height * shape.width if has_strip else NOWHERE)
        starts = [offset, *accumulate((high * wide for high, wide, _ in planes), initial=offset)]
        firsts.append((starts[0], starts[2], starts[3]) if len(planes) > 1 else (offset,) * 3)
        offset = starts[-1]
    luma = shape.height * shape.width
    chroma = shape.height // down * -(-shape.width // across)
    steps = [luma, chroma, chroma] if shape.sample_format == PLANES else [luma] * 3
    counts = np.array([count for count, _ in stacks], np.int64)
    ends = np.cumsum(counts)
    numbers = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
    offsets = np.full((len(numbers), 4), NOWHERE, np.int64)
    offsets[:, :3] = np.repeat(np.array(firsts, np.int64).reshape(-1, 3), counts, axis=0)
    offsets[:, :3] += numbers[:, None] * np.array(steps)
    offsets[ends - 1, 3] = strips
    return Plan(offset, images, offsets)
