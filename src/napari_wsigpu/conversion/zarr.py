"""OME-Zarr 0.5: a Zarr v3 group, an array a level, chunks as tiles."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.conversion.checksum import crc32
from napari_wsigpu.conversion.ngff import image_attributes, import_zarr
from napari_wsigpu.conversion.paths import HEAD, remove
from napari_wsigpu.conversion.pixels import Segment
from napari_wsigpu.formats.wsigpu import first_pixel
from napari_wsigpu.model.appearance import WHITE, channel_colors, shown_limits
from napari_wsigpu.model.layout import Channel
from napari_wsigpu.storage.zarr.writer import put_chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from napari_wsigpu.conversion.journal import Journal
    from napari_wsigpu.conversion.options import Options
    from napari_wsigpu.conversion.pixels import Block, Job
    from napari_wsigpu.conversion.plan import Plan
    from napari_wsigpu.conversion.record import Picture

AXES = "cyx"
RGB_CHANNELS = (("red", "FF0000"), ("green", "00FF00"), ("blue", "0000FF"), ("alpha", "FFFFFF"))
PICTURE_CHUNK = 1024
SAMPLED = 4


@dataclass(eq=False, repr=False)
class ZarrTarget:
    """An OME-Zarr image.

    Levels are the arrays ``0``, ``1``, ... with the axes c, y, x, and t and z of stacks; chunks
    that hold nothing but the background are not written. Beside them lie the arrays of associated
    images
    (``associated/NAME/0``, OME-Zarr images too), the ICC profile's bytes as the array
    ``icc_profile``, and the record of the slide as the group's attribute ``wsigpu``, whose
    fields are those of `formats.wsigpu`.

    Parameters
    ----------
    path : Path
        The folder.
    plan : Plan
        What to write.
    journal : Journal
        Which chunks are there.
    record : Mapping
        What is said of the slide.
    pictures : sequence of Picture
        Its associated images.
    icc : bytes or None
        Its ICC profile.
    options : Options
        Compression and shards.

    Raises
    ------
    MissingPackageError
        If zarr is not installed.
    """

    _path: Path
    _plan: Plan
    _journal: Journal
    _record: Mapping[str, Any]
    _pictures: Sequence[Picture]
    _icc: bytes | None
    _options: Options

    def __post_init__(self) -> None:
        self._zarr = import_zarr()
        self._compression = self._options.compression or "zstd"
        self._encode = _encoder(self._compression)
        self._arrays: list[Any] = []  # one a level of the pyramid
        along = self._plan.along
        self._axes = "".join(axis for axis in "tczyx" if axis in along or axis in AXES)
        shown = self._plan.shown._asdict()
        self._shown = {
            f"default{axis.upper()}": numbers.index(shown[axis]) for axis, numbers in along.items()
        }

    def begin(self, checked: Callable[[int], None]) -> None:
        """Write all but chunks of levels, and remove and forget chunks that are not whole."""
        head = self._path.with_name(HEAD)
        remove(head)
        self._write_head(head)
        shutil.copytree(head, self._path, dirs_exist_ok=True)
        remove(head)
        for unfinished in list(self._path.rglob("*.partial")):
            unfinished.unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that LZ4 is no part of Zarr itself
            group = self._zarr.open_group(self._path, mode="r+")
            self._arrays = [group[str(index)] for index in range(self._plan.depth)]
        for index in range(len(self._plan.levels)):
            self._forget_damaged(index, checked)

    def _write_head(self, path: Path) -> None:
        plan = self._plan
        group = self._zarr.create_group(path, zarr_format=3, overwrite=True)
        together = plan.channels if plan.rgb else 1
        stack = {axis: len(numbers) for axis, numbers in plan.along.items()}
        for index, level in enumerate(plan.pyramid):
            sides = {"c": together, "y": level.tile_height, "x": level.tile_width}
            shards = None
            if level.shard > 1:
                file = {axis: sides[axis] * (1 if axis == "c" else level.shard) for axis in sides}
                shards = self._lengths(file)
            self._create_array(
                group,
                str(index),
                self._lengths({"c": plan.channels, "y": level.height, "x": level.width} | stack),
                self._lengths(sides),
                plan.dtype,
                axes=self._axes,
                shards=shards,
                fill_value=plan.dtype.type(plan.background),
            )
        for picture in self._pictures:
            self._write_picture(group, picture)
        if self._icc is not None:
            profile = np.frombuffer(self._icc, np.uint8)
            array = group.create_array("icc_profile", shape=profile.shape, dtype=profile.dtype)
            array[...] = profile

    def jobs(self, block: Block) -> Iterator[Job]:
        """Yield what writes those of a block's chunks that are not there yet."""
        height, width, _ = block.pixels.shape
        level = self._plan.levels[block.level]
        done = self._journal.is_done(block.level)[block.row :, block.column :]
        rows, columns = -(-height // level.tile_height), -(-width // level.tile_width)
        yield partial(self._write_block, block, done[:rows, :columns])

    def write(self, segments: Sequence[Segment]) -> None:
        """Note written chunks in the journal."""
        for level, plane, row, column, _, check in segments:
            self._journal.note(level, plane, row, column, 0, 0, check)

    def secure(self) -> None:
        """Leave that to the file system: chunks are too many files to wait for each.

        Those that a failure of power has damaged are found by their checks.
        """

    def finish(self) -> None:
        """Write what OME-Zarr says of the image."""
        plan = self._plan
        size, first = plan.mpp or (1.0, 1.0), (0.0, 0.0)
        if "region" in self._record:
            whole = plan.levels[0].width, plan.levels[0].height
            size, first = first_pixel(self._record["region"], whole, plan.mpp)
        scales = [[level.downsample * side for side in size[::-1]] for level in plan.pyramid]
        steps = {"t": plan.time_step, "z": plan.z_spacing}
        known = {axis for axis, step in steps.items() if step is not None}
        known |= set() if plan.mpp is None else {"y", "x"}
        image = image_attributes("slide", self._axes, scales, first[::-1], known, steps)
        attributes = {
            "ome": image | {"omero": self._omero()},
            "wsigpu": dict(self._record),
        }
        self._zarr.open_group(self._path, mode="r+").update_attributes(attributes)

    def close(self) -> None:
        """Hold no handles."""

    def _forget_damaged(self, index: int, checked: Callable[[int], None]) -> None:
        """Remove files of a level that are not as they were noted, and forget their chunks."""
        level, journal = self._plan.levels[index], self._journal
        noted = journal.is_done(index)
        wanted = ~self._plan.blank_tiles(index)
        lost = np.zeros_like(noted)
        for row, column in product(*(range(0, n, level.shard) for n in noted.shape)):
            square = np.s_[row : row + level.shard, column : column + level.shard]
            check = self._check(index, row, column) if noted[square].any() else 0
            whole = noted[square] & (journal.checks[index][0][square] == check)
            if whole[wanted[square]].all():
                checked(int(noted[square].sum()))
                continue
            for path in self._files(index, row, column):
                path.unlink(missing_ok=True)
            lost[square] = True
        journal.forget(index, lost)

    def _files(self, index: int, row: int, column: int) -> list[Path]:
        """Return the files that hold a tile: one, or one a channel."""
        array, shard = self._array(index), self._plan.levels[index].shard
        together = array.chunks[self._axes.index("c")]
        place = self._stack_place(index) | {"y": row // shard, "x": column // shard}
        keys = (
            array.metadata.encode_chunk_key(self._lengths(place | {"c": channel}))
            for channel in range(self._plan.channels // together)
        )
        return [self._path / str(index % self._plan.depth) / key for key in keys]

    def _array(self, index: int) -> Any:
        """Return the array of a planned level."""
        return self._arrays[index % self._plan.depth]

    def _lengths(self, of: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what is said of each axis in their order; 1 of those of which nothing is."""
        return tuple(of.get(axis, 1) for axis in self._axes)

    def _stack_place(self, index: int) -> dict[str, int]:
        """Return the position along "t" and "z" of the plane that a planned level is of."""
        plane = self._plan.levels[index].plane._asdict()
        return {axis: at.index(plane[axis]) for axis, at in self._plan.along.items()}

    def _check(self, index: int, row: int, column: int) -> int:
        """Return the CRC-32 of the files that hold a tile."""
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
        """Write all of a block; yield the check of each tile's shard."""
        level = self._plan.levels[block.level]
        top, left = block.row * level.tile_height, block.column * level.tile_width
        height, width, _ = block.pixels.shape
        pixels = np.moveaxis(block.pixels, -1, 0)
        place: dict[str, Any] = {"y": slice(top, top + height), "x": slice(left, left + width)}
        place |= {"c": slice(None)} | self._stack_place(block.level)
        self._array(block.level)[self._lengths(place)] = pixels
        check = cache(partial(self._check, block.level))
        for row, column in tiles:
            places = block.row + row, block.column + column
            yield check(*(place - place % level.shard for place in places))

    def _write_chunks(self, block: Block, tiles: list[list[int]]) -> Iterator[int]:
        """Write tiles of a block without zarr, which takes twice as long; yield their checks."""
        array = self._array(block.level)
        sizes = dict(zip(self._axes, array.chunks, strict=True))
        together, height, width = (sizes[axis] for axis in AXES)
        shape = together, height, width
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
                for index in range(together):
                    inside = chunk[index, : part.shape[0], : part.shape[1]]
                    inside[...] = part[..., plane * together + index]
                data = chunk.tobytes()
                if data != blank:
                    encoded = self._encode(data)
                    put_chunk(path, encoded)
                    check = crc32(encoded, check)
            yield check

    def _write_picture(self, group: Any, picture: Picture) -> None:
        pixels = np.moveaxis(picture.pixels, -1, 0)
        own = group.create_group(f"associated/{picture.name}")
        chunks = (len(pixels), *(min(PICTURE_CHUNK, side) for side in pixels.shape[1:]))
        array = self._create_array(own, "0", pixels.shape, chunks, pixels.dtype)
        array[...] = pixels
        own.update_attributes({"ome": image_attributes(picture.name, AXES, [[1.0, 1.0]])})

    def _create_array(
        self,
        group: Any,
        name: str,
        shape: tuple[int, ...],
        chunks: tuple[int, ...],
        dtype: np.dtype[Any],
        axes: str = AXES,
        **options: Any,
    ) -> Any:
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

    def _omero(self) -> dict[str, Any]:
        """Return names, colours and windows of channels; windows by the coarsest level."""
        plan = self._plan
        if plan.rgb:
            named = list(RGB_CHANNELS[: plan.channels])
        else:
            stated = [Channel(item["name"], item["color"]) for item in self._record["channels"]]
            named = [
                (channel.name, (color or WHITE)[1:].upper())
                for channel, color in zip(stated, channel_colors(stated), strict=True)
            ]
        whole = _range(plan.dtype)
        encoding = plan.levels[0].source.layout.encoding
        white_is_zero = plan.channels == 1 and encoding.white_is_zero
        channels = []
        for (name, color), pixels in zip(named, self._samples(), strict=True):
            start, end = whole if plan.rgb and whole else shown_limits(pixels)
            least, most = whole or (start, end)
            window = {"min": least, "max": most, "start": start, "end": end}
            channel = {"label": name, "color": color, "active": True, "window": window}
            channels.append(channel | ({"inverted": True} if white_is_zero else {}))
        return {"channels": channels, "rdefs": {"model": "color"} | self._shown}

    def _samples(self) -> NDArray[Any]:
        """Return pixels of each channel at the coarsest level, of at most some planes."""
        some = {
            axis: slice(None, None, -(-len(numbers) // SAMPLED))
            for axis, numbers in self._plan.along.items()
        }
        picked = dict.fromkeys(self._axes, slice(None)) | some
        pixels = self._arrays[-1][self._lengths(picked)]
        found: NDArray[Any] = np.moveaxis(pixels, self._axes.index("c"), 0)
        return found


def _compressors(name: str) -> Any:
    """Return Zarr's codecs of a compression; nvCOMP reads numcodecs' LZ4."""
    if name == "raw":
        return None
    if name == "zstd":
        from zarr.codecs import ZstdCodec

        return ZstdCodec(level=1)
    from zarr.codecs.numcodecs import LZ4

    return LZ4()


def _encoder(name: str) -> Callable[[bytes], Any]:
    """Return what makes of a chunk's samples what `_compressors` decode."""
    if name == "raw":
        return bytes
    import numcodecs

    codec = numcodecs.Zstd(level=1) if name == "zstd" else numcodecs.LZ4()
    encode: Callable[[bytes], Any] = codec.encode
    return encode


def _range(dtype: np.dtype[Any]) -> tuple[int, int] | None:
    if dtype.kind not in "iu":
        return None
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)
