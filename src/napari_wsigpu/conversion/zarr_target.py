"""OME-Zarr 0.5 targets: a Zarr v3 group with one array per level and one chunk per tile."""

from __future__ import annotations

import shutil
import warnings
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.conversion.checksum import crc32
from napari_wsigpu.conversion.ome_zarr_attributes import image_attributes, import_zarr
from napari_wsigpu.conversion.paths import HEAD, remove
from napari_wsigpu.conversion.pixels import Segment
from napari_wsigpu.formats.wsigpu import first_pixel
from napari_wsigpu.model.appearance import WHITE, channel_colors, contrast_limits
from napari_wsigpu.model.layout import Channel
from napari_wsigpu.storage.zarr.writer import put_chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import zarr
    from numpy.typing import NDArray
    from zarr.codecs import ZstdCodec
    from zarr.codecs.numcodecs import LZ4

    from napari_wsigpu.conversion.pixels import Block, Job
    from napari_wsigpu.conversion.slide_record import AssociatedPixels, Output
    from napari_wsigpu.model.arrays import Array, DType

AXES = "cyx"
RGB_CHANNELS = (("red", "FF0000"), ("green", "00FF00"), ("blue", "0000FF"), ("alpha", "FFFFFF"))
PICTURE_CHUNK = 1024
SAMPLED = 4


class ZarrTarget:
    """Writes an OME-Zarr image.

    Levels are the arrays ``0``, ``1``, ... with the axes c, y, x, preceded by t and z for stacks.
    Chunks that contain only background are not written. The group also contains associated images
    (``associated/NAME/0``, OME-Zarr images themselves), the bytes of the ICC profile as the array
    ``icc_profile``, and the record of the slide as the attribute ``wsigpu``, whose fields
    `formats.wsigpu` defines.

    Parameters
    ----------
    output : Output
        The contents to write.
    compression : {"raw", "zstd", "lz4"}
        Compression of chunks.

    Raises
    ------
    MissingPackageError
        If zarr is not installed.
    """

    def __init__(self, output: Output, compression: str) -> None:
        self._zarr = import_zarr()
        self._output, self._compression = output, compression
        self._path, self._plan, self._journal = output.path, output.plan, output.journal
        self._encode = chunk_encoder(compression)
        self._arrays: list[zarr.Array] = []  # one per pyramid level; planes are an axis
        along = self._plan.stack_axes
        self._axes = "".join(axis for axis in "tczyx" if axis in along or axis in AXES)
        shown = self._plan.shown._asdict()
        self._shown = {f"default{axis.upper()}": along[axis].index(shown[axis]) for axis in along}

    def prepare(self, checked: Callable[[int], None]) -> None:
        """Write everything but the chunks of levels, and remove damaged chunks.

        `checked` is called with the number of tiles that were verified since its last call.
        """
        # zarr would delete existing arrays, so it writes metadata to a separate folder, which is
        # then copied over the folder that holds chunks of an interrupted conversion.
        head = self._path.with_name(HEAD)
        remove(head)
        self._write_head(head)
        shutil.copytree(head, self._path, dirs_exist_ok=True)
        remove(head)
        for unfinished in list(self._path.rglob("*.partial")):
            unfinished.unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # LZ4 is not in the Zarr specification
            group = self._zarr.open_group(self._path, mode="r+")
            self._arrays = [group[str(index)] for index in range(self._plan.levels_per_plane)]
        for index in range(len(self._plan.levels)):
            self._forget_damaged(index, checked)

    def _write_head(self, path: Path) -> None:
        plan = self._plan
        group = self._zarr.create_group(path, zarr_format=3, overwrite=True)
        chunk_channels = plan.channels if plan.rgb else 1
        stack = {axis: len(numbers) for axis, numbers in plan.stack_axes.items()}
        for index, level in enumerate(plan.pyramid):
            sides = {"c": chunk_channels, "y": level.tile_height, "x": level.tile_width}
            shards = None
            if level.shard > 1:
                shard = {axis: sides[axis] * (1 if axis == "c" else level.shard) for axis in sides}
                shards = self._per_axis(shard)
            self._create_array(
                group,
                str(index),
                self._per_axis({"c": plan.channels, "y": level.height, "x": level.width} | stack),
                self._per_axis(sides),
                plan.dtype,
                axes=self._axes,
                shards=shards,
                fill_value=plan.dtype.type(plan.background),
            )
        for image in self._output.associated:
            self._write_associated(group, image)
        if self._output.icc is not None:
            profile = np.frombuffer(self._output.icc, np.uint8)
            array = group.create_array("icc_profile", shape=profile.shape, dtype=profile.dtype)
            array[...] = profile

    def jobs(self, block: Block) -> Iterator[Job]:
        """Yield one job, which writes the missing chunks of a block."""
        height, width, _ = block.pixels.shape
        level = self._plan.levels[block.level]
        done = self._journal.is_done(block.level)[block.row :, block.column :]
        rows, columns = -(-height // level.tile_height), -(-width // level.tile_width)
        yield partial(self._write_block, block, done[:rows, :columns])

    def write(self, segments: Sequence[Segment]) -> None:
        """Record written chunks in the journal."""
        for level, plane, row, column, _, check in segments:
            self._journal.add(level, plane, row, column, 0, 0, check)

    def sync(self) -> None:
        """Do nothing: an fsync per chunk file would take too long.

        A resumed conversion checks CRC-32s, which reveal chunks damaged by a power failure.
        """

    def finish(self) -> None:
        """Write the OME-Zarr attributes, which make the group an image."""
        plan = self._plan
        size, position = plan.mpp or (1.0, 1.0), dict(plan.position)
        if "region" in self._output.record:
            whole = plan.levels[0].width, plan.levels[0].height
            size, first = first_pixel(self._output.record["region"], whole, plan.mpp)
            position = dict(zip("xy", first, strict=True)) | position
        if plan.mpp is None and "x" in plan.position:  # the plan counts pixels of the result
            position |= {"x": position["x"] * size[0], "y": position["y"] * size[1]}
        scales = [[level.downsample * side for side in size[::-1]] for level in plan.pyramid]
        steps = {"t": plan.time_step, "z": plan.z_spacing}
        known = {axis for axis, step in steps.items() if step is not None}
        known |= set() if plan.mpp is None else {"y", "x"}
        image = image_attributes("slide", self._axes, scales, position, known, steps)
        attributes = {"ome": image | {"omero": self._omero()}, "wsigpu": self._output.record}
        self._zarr.open_group(self._path, mode="r+").update_attributes(attributes)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _forget_damaged(self, index: int, checked: Callable[[int], None]) -> None:
        """Remove the files of a level that do not match the journal, and their journal entries."""
        level, journal = self._plan.levels[index], self._journal
        done = journal.is_done(index)
        needed = ~self._plan.blank_tiles(index)
        lost = np.zeros_like(done)
        for row, column in product(*(range(0, n, level.shard) for n in done.shape)):
            square = np.s_[row : row + level.shard, column : column + level.shard]
            check = self._check(index, row, column) if done[square].any() else 0
            intact = done[square] & (journal.checks[index][0][square] == check)
            if intact[needed[square]].all():
                checked(int(done[square].sum()))
                continue
            for path in self._files(index, row, column):
                path.unlink(missing_ok=True)
            lost[square] = True
        journal.forget(index, lost)

    def _files(self, index: int, row: int, column: int) -> list[Path]:
        """Return the files that contain a tile: one, or one per channel."""
        array, shard = self._array(index), self._plan.levels[index].shard
        chunk_channels = array.chunks[self._axes.index("c")]
        key = self._stack_index(index) | {"y": row // shard, "x": column // shard}
        keys = (
            array.metadata.encode_chunk_key(self._per_axis(key | {"c": channel}))
            for channel in range(self._plan.channels // chunk_channels)
        )
        return [self._path / str(index % self._plan.levels_per_plane) / key for key in keys]

    def _array(self, index: int) -> zarr.Array:
        """Return the array of a planned level."""
        return self._arrays[index % self._plan.levels_per_plane]

    def _per_axis(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the value for each axis in order, 1 for axes without one."""
        return tuple(values.get(axis, 1) for axis in self._axes)

    def _stack_index(self, index: int) -> dict[str, int]:
        """Return the index along "t" and "z" of the plane of a planned level."""
        plane = self._plan.levels[index].plane._asdict()
        return {axis: at.index(plane[axis]) for axis, at in self._plan.stack_axes.items()}

    def _check(self, index: int, row: int, column: int) -> int:
        """Return the CRC-32 of the files that contain a tile."""
        check = 0
        for path in self._files(index, row, column):
            if path.is_file():
                check = crc32(path.read_bytes(), check)
        return check

    def _write_block(self, block: Block, done: NDArray[np.bool_]) -> list[Segment]:
        tiles = np.argwhere(~done).tolist()
        sharded = self._plan.levels[block.level].shard > 1
        checks = (self._write_shards if sharded else self._write_chunks)(block, tiles)
        return [
            Segment(block.level, 0, block.row + row, block.column + column, b"", check)
            for (row, column), check in zip(tiles, checks, strict=True)
        ]

    def _write_shards(self, block: Block, tiles: list[list[int]]) -> Iterator[int]:
        """Write a whole block; yield the CRC-32 of each tile's shard.

        Blocks are multiples of shards, so two encoding threads never write to the same file.
        """
        level = self._plan.levels[block.level]
        top, left = block.row * level.tile_height, block.column * level.tile_width
        height, width, _ = block.pixels.shape
        pixels = np.moveaxis(block.pixels, -1, 0)
        region: dict[str, int | slice] = {
            **self._stack_index(block.level),
            "c": slice(None),
            "y": slice(top, top + height),
            "x": slice(left, left + width),
        }
        self._array(block.level)[self._per_axis(region)] = pixels
        check = cache(partial(self._check, block.level))
        for row, column in tiles:
            tile = block.row + row, block.column + column
            yield check(*(number - number % level.shard for number in tile))

    def _write_chunks(self, block: Block, tiles: list[list[int]]) -> Iterator[int]:
        """Write tiles of a block and yield their CRC-32; zarr itself would take twice as long."""
        array = self._array(block.level)
        sizes = dict(zip(self._axes, array.chunks, strict=True))
        chunk_channels, height, width = shape = tuple(sizes[axis] for axis in AXES)
        chunk = np.full(shape, array.fill_value, array.dtype.newbyteorder("<"))
        blank = chunk.tobytes()
        for row, column in tiles:
            top, left = row * height, column * width
            part = block.pixels[top : top + height, left : left + width]
            check = 0
            paths = self._files(block.level, block.row + row, block.column + column)
            for plane, path in enumerate(paths):
                if part.shape[:2] != (height, width):
                    chunk[...] = array.fill_value
                for index in range(chunk_channels):
                    inside = chunk[index, : part.shape[0], : part.shape[1]]
                    inside[...] = part[..., plane * chunk_channels + index]
                data = chunk.tobytes()
                if data != blank:
                    encoded = self._encode(data)
                    put_chunk(path, encoded)
                    check = crc32(encoded, check)
            yield check

    def _write_associated(self, group: zarr.Group, image: AssociatedPixels) -> None:
        pixels = np.moveaxis(image.pixels, -1, 0)
        subgroup = group.create_group(f"associated/{image.name}")
        chunks = (len(pixels), *(min(PICTURE_CHUNK, side) for side in pixels.shape[1:]))
        array = self._create_array(subgroup, "0", pixels.shape, chunks, pixels.dtype)
        array[...] = pixels
        subgroup.update_attributes({"ome": image_attributes(image.name, AXES, [[1.0, 1.0]])})

    def _create_array(
        self,
        group: zarr.Group,
        name: str,
        shape: tuple[int, ...],
        chunks: tuple[int, ...],
        dtype: DType,
        axes: str = AXES,
        **options: Any,
    ) -> zarr.Array:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return group.create_array(
                name,
                shape=shape,
                chunks=chunks,
                dtype=dtype,
                compressors=_compressors(self._compression),
                dimension_names=tuple(axes),
                **options,
            )

    def _omero(self) -> dict[str, object]:
        """Return the "omero" attribute: names, colors and display windows of the channels.

        Windows of integer RGB span the whole sample range; all others are computed from the
        coarsest level.
        """
        plan = self._plan
        if plan.rgb:
            named = list(RGB_CHANNELS[: plan.channels])
        else:
            channels = self._output.record["channels"]
            stated = [Channel(item["name"], item["color"]) for item in channels]
            colors = [(color or WHITE)[1:].upper() for color in channel_colors(stated)]
            named = [(item["name"], color) for item, color in zip(channels, colors, strict=True)]
        whole = _range(plan.dtype)
        encoding = plan.levels[0].source.layout.encoding
        white_is_zero = plan.channels == 1 and encoding.white_is_zero
        found = []
        for (name, color), pixels in zip(named, self._samples(), strict=True):
            start, end = whole if plan.rgb and whole else contrast_limits(pixels)
            least, most = whole or (start, end)
            window = {"min": least, "max": most, "start": start, "end": end}
            channel = {"label": name, "color": color, "active": True, "window": window}
            found.append(channel | ({"inverted": True} if white_is_zero else {}))
        return {"channels": found, "rdefs": {"model": "color"} | self._shown}

    def _samples(self) -> Array:
        """Return the coarsest level of up to SAMPLED planes per axis, channels first."""
        axes = self._plan.stack_axes.items()
        some = {axis: slice(None, None, -(-len(numbers) // SAMPLED)) for axis, numbers in axes}
        picked = dict.fromkeys(self._axes, slice(None)) | some
        pixels = self._arrays[-1][self._per_axis(picked)]
        found: Array = np.moveaxis(pixels, self._axes.index("c"), 0)
        return found


def _compressors(name: str) -> ZstdCodec | LZ4 | None:
    """Return zarr's codec for a compression; for LZ4, numcodecs' codec, which nvCOMP can read."""
    if name == "raw":
        return None
    if name == "zstd":
        from zarr.codecs import ZstdCodec

        return ZstdCodec(level=1)
    from zarr.codecs.numcodecs import LZ4

    return LZ4()


def chunk_encoder(name: str) -> Callable[[bytes], bytes]:
    """Return a function that encodes a chunk as the codec of `_compressors` does."""
    if name == "raw":
        return bytes
    import numcodecs

    codec = numcodecs.Zstd(level=1) if name == "zstd" else numcodecs.LZ4()
    encode: Callable[[bytes], bytes] = codec.encode
    return encode


def _range(dtype: DType) -> tuple[int, int] | None:
    if dtype.kind not in "iu":
        return None
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)
