"""A TIFF that grows tile by tile: tifffile writes its pages, then tiles follow, then offsets."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import tifffile

from napari_wsigpu.conversion.checksum import crc32
from napari_wsigpu.conversion.coding import encoder
from napari_wsigpu.conversion.journal import no_link
from napari_wsigpu.conversion.ome import described, image_metadata
from napari_wsigpu.conversion.pixels import Segment
from napari_wsigpu.formats.wsigpu import VERSION
from napari_wsigpu.model.tags import COMPRESSION, DATATYPE, FILETYPE, PHOTOMETRIC, PREDICTOR, Tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from uuid import UUID

    from numpy.typing import NDArray

    from napari_wsigpu.conversion.coding import Coding
    from napari_wsigpu.conversion.journal import Journal
    from napari_wsigpu.conversion.pixels import Block, Job
    from napari_wsigpu.conversion.plan import Plan, PlannedLevel
    from napari_wsigpu.conversion.record import Picture

RAW_ALIGNMENT = 4096
STRIP_BYTES = 1 << 18
CENTIMETRE = 10_000.0


@dataclass(eq=False, repr=False)
class TiffTarget:
    """A tiled BigTIFF pyramid, or an OME-TIFF.

    Levels of a TIFF are pages of the main chain; those of an OME-TIFF are SubIFDs, and channels
    that are not RGB, and planes, are pages. Associated images are further pages, in strips.

    Parameters
    ----------
    path : Path
        The file.
    plan : Plan
        What to write.
    journal : Journal
        Which tiles are there.
    record : Mapping
        What is said of the slide.
    pictures : sequence of Picture
        Its associated images.
    icc : bytes or None
        Its ICC profile.
    uuid : UUID or None
        Name of an OME-TIFF; None to write a plain one.
    """

    _path: Path
    _plan: Plan
    _journal: Journal
    _record: Mapping[str, Any]
    _pictures: Sequence[Picture]
    _icc: bytes | None
    _uuid: UUID | None
    _handle: int = field(default=-1, init=False)
    _end: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        plan = self._plan
        self._ome = self._uuid is not None
        self._encoders = [
            None if level.copied else encoder(_coding(level), plan.dtype) for level in plan.pyramid
        ]
        self._pages_a_level = len(plan.planes) * plan.levels[0].planes

    def begin(self, checked: Callable[[int], None]) -> None:
        """Write all but tiles, and go on after the last one before the first damaged one.

        `checked` is told how many more tiles that the journal knows were looked at.
        """
        levels = self._plan.pyramid
        head = BytesIO()
        with tifffile.TiffWriter(head, bigtiff=True, byteorder="<", ome=self._ome) as file:
            for index, level in enumerate(levels):
                self._write_level(file, index, level)
            for picture in self._pictures:
                self._write_picture(file, picture)
        head.seek(0)
        with tifffile.TiffFile(head, mode="r+") as file:
            for level, pages in zip(levels, self._pages(file), strict=True):
                for page in pages:
                    page.tags[Tag.COMPRESSION].overwrite(_coding(level).compression)
            if self._ome:
                first = file.pages.first
                first.tags[Tag.DESCRIPTION].overwrite(described(first.description, self._record))
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._handle = no_link(self._path, flags)
        self._forget_damaged(checked)
        _write_at(self._handle, head.getbuffer(), 0)
        self._end = max(self._journal.end, len(head.getbuffer()))

    def jobs(self, block: Block) -> Iterator[Job]:
        """Yield what encodes the tiles of a block that are not there yet."""
        level = self._plan.levels[block.level]
        done = self._journal.is_done(block.level)
        height, width = level.tile_height, level.tile_width
        for y in range(0, block.pixels.shape[0], height):
            for x in range(0, block.pixels.shape[1], width):
                row, column = block.row + y // height, block.column + x // width
                if not done[row, column]:
                    pixels = block.pixels[y : y + height, x : x + width]
                    yield partial(self._encoded, block.level, row, column, pixels)

    def write(self, segments: Sequence[Segment]) -> None:
        """Append encoded tiles."""
        for level, plane, row, column, data, check in segments:
            if not len(data):
                self._journal.note(level, plane, row, column, 0, 0, check)
                continue
            if _coding(self._plan.levels[level]).compression == COMPRESSION.NONE:
                self._end += -self._end % RAW_ALIGNMENT
            _write_at(self._handle, data, self._end)
            self._journal.note(level, plane, row, column, self._end, len(data), check)
            self._end += len(data)

    def secure(self) -> None:
        """Return when what was written outlasts a failure of power."""
        os.fsync(self._handle)

    def finish(self) -> None:
        """Write where tiles lie."""
        os.ftruncate(self._handle, self._end)
        with tifffile.TiffFile(self._path, mode="r+") as file:
            for level, pages in enumerate(self._pages(file)):
                indices, parts = self._plan.of_planes(level), len(pages)
                offsets, counts = (
                    np.concatenate([values[index] for index in indices])
                    for values in (self._journal.offsets, self._journal.counts)
                )
                for page, starts, lengths in zip(
                    pages, np.split(offsets, parts), np.split(counts, parts), strict=True
                ):
                    self._overwrite(page, Tag.TILE_OFFSETS, starts)
                    self._overwrite(page, Tag.TILE_BYTE_COUNTS, lengths)
        self.secure()

    def close(self) -> None:
        """Let go of the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _encoded(self, index: int, row: int, column: int, pixels: NDArray[Any]) -> list[Segment]:
        """Encode a tile."""
        level = self._plan.levels[index]
        missing = level.tile_height - pixels.shape[0], level.tile_width - pixels.shape[1]
        if any(missing):
            pixels = np.pad(pixels, ((0, missing[0]), (0, missing[1]), (0, 0)), mode="edge")
        encode = self._encoders[index % self._plan.depth]
        assert encode is not None
        planes = np.split(pixels, level.planes, axis=2) if level.planes > 1 else [pixels]
        found = (encode(np.ascontiguousarray(part)) for part in planes)
        return [
            Segment(index, plane, row, column, data, crc32(data))
            for plane, data in enumerate(found)
        ]

    def _forget_damaged(self, checked: Callable[[int], None]) -> None:
        """Forget what begins with the first tile that is not as it was written.

        Later ones lie behind it; so the result is the same as if it was written at once.
        """
        journal = self._journal
        end = self._whole_until(checked)
        for level, counts in enumerate(journal.counts):
            ends = (journal.offsets[level] + counts).max(axis=0)
            journal.forget(level, (ends > end) | ~journal.is_done(level))

    def _whole_until(self, checked: Callable[[int], None]) -> int:
        """Return where the first tile begins that is not as it was written."""
        journal = self._journal
        offsets, counts, checks = (
            np.concatenate([tiles.ravel() for tiles in levels])
            for levels in (journal.offsets, journal.counts, journal.checks)
        )
        last_planes = np.concatenate(
            [
                np.repeat(np.arange(len(tiles)) == len(tiles) - 1, tiles[0].size)
                for tiles in journal.counts
            ]
        )
        written = np.flatnonzero(counts > 0)
        for index in written[np.argsort(offsets[written])].tolist():
            os.lseek(self._handle, offsets[index], os.SEEK_SET)
            data = os.read(self._handle, counts[index])
            if len(data) < counts[index] or crc32(data) != checks[index]:
                return int(offsets[index])
            checked(int(last_planes[index]))
        return journal.end

    def _pages(self, file: tifffile.TiffFile) -> Iterator[list[tifffile.TiffPage]]:
        """Yield the pages of each level: one a plane, or one a channel of each."""
        levels = self._plan.pyramid
        if not self._ome:
            yield from ([file.pages[index].aspage()] for index in range(len(levels)))
            return
        mains = [file.pages[index].aspage() for index in range(self._pages_a_level)]
        yield mains
        for index in range(len(levels) - 1):
            found = []
            for main in mains:
                assert main.pages is not None
                found.append(main.pages[index].aspage())
            yield found

    def _overwrite(self, page: tifffile.TiffPage, code: int, values: NDArray[np.int64]) -> None:
        tag = page.tags[code]
        kind = {DATATYPE.SHORT: "<u2", DATATYPE.LONG: "<u4", DATATYPE.LONG8: "<u8"}[
            DATATYPE(tag.dtype)
        ]
        tag.overwrite(values.astype(kind).tobytes())

    def _write_level(self, file: tifffile.TiffWriter, index: int, level: PlannedLevel) -> None:
        coding = _coding(level)
        channels, size = self._plan.channels, (level.height, level.width)
        stack = tuple(map(len, self._plan.along.values()))
        planar, raw = coding.planes > 1, coding.compression == COMPRESSION.NONE
        options: dict[str, Any] = {}
        if planar:
            shape: tuple[int, ...] = (*stack, channels, *size)
        else:
            shape = (*stack, *size, channels) if channels > 1 else (*stack, *size)
        if channels > 1 and not (planar and self._ome):
            options["planarconfig"] = "separate" if planar else "contig"
        if coding.compression == COMPRESSION.JPEG:
            options["jpegtables"] = coding.jpeg_tables
            options["subsampling"] = coding.subsampling
            options["compressionargs"] = {"outcolorspace": coding.photometric}
        blank = (self._plan.blank_tiles(each).any() for each in self._plan.of_planes(index))
        if self._plan.background and any(blank):
            text = f"{self._plan.background:.17g}"
            options["extratags"] = [(Tag.NO_DATA, DATATYPE.ASCII, 0, text, False)]
        first = index == 0
        if self._plan.mpp is not None:
            options["resolution"] = tuple(
                CENTIMETRE / (size * level.downsample) for size in self._plan.mpp
            )
            options["resolutionunit"] = "centimeter"
        if self._ome:
            options["subifds"] = self._plan.depth - 1 if first else 0
            metadata = image_metadata(self._plan, self._record) | {"UUID": str(self._uuid)}
            options["metadata"] = metadata if first else None
        else:
            options["metadata"] = None
            options["description"] = json.dumps(self._record) if first else None
        file.write(
            iter([(b"", 0)] * (level.tiles * level.planes * len(self._plan.planes))),
            shape=shape,
            dtype=self._plan.dtype,
            tile=(level.tile_height, level.tile_width),
            photometric=coding.photometric,
            # Of a raw image of one tile tifffile wants the pixels now.
            compression=COMPRESSION.ADOBE_DEFLATE if raw else coding.compression,
            predictor=coding.predictor,
            subfiletype=0 if first else FILETYPE.REDUCEDIMAGE,
            software="napari-wsigpu",
            iccprofile=self._icc if first else None,
            **options,
        )

    def _write_picture(self, file: tifffile.TiffWriter, picture: Picture) -> None:
        pixels = picture.pixels
        several = pixels.shape[2] > 1
        integers = pixels.dtype.kind in "iu" and pixels.dtype.itemsize <= 4
        name: dict[str, Any] = {"Name": picture.name}
        if not self._ome:
            text = json.dumps({"wsigpu": VERSION, "associated": picture.name})
            options: dict[str, Any] = {"metadata": None, "description": text}
        else:
            options = {"metadata": name | {"axes": "YXS" if several else "YX"}}
        file.write(
            pixels if several else pixels[..., 0],
            photometric=PHOTOMETRIC.RGB if picture.rgb else PHOTOMETRIC.MINISBLACK,
            planarconfig="contig" if several else None,
            compression=COMPRESSION.ADOBE_DEFLATE,
            predictor=PREDICTOR.HORIZONTAL if integers else None,
            rowsperstrip=max(1, STRIP_BYTES // (pixels[0].nbytes or 1)),
            software="napari-wsigpu",
            iccprofile=picture.icc,
            **options,
        )


def _coding(level: PlannedLevel) -> Coding:
    assert level.coding is not None
    return level.coding


def _write_at(handle: int, data: bytes | memoryview, offset: int) -> None:
    os.lseek(handle, offset, os.SEEK_SET)
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
