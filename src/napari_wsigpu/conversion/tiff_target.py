"""TIFF targets: tifffile writes the pages, tiles are appended, and their offsets are set last."""

from __future__ import annotations

import json
import os
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import tifffile

from napari_wsigpu.conversion.checksum import crc32
from napari_wsigpu.conversion.coding import encoder
from napari_wsigpu.conversion.journal import no_link
from napari_wsigpu.conversion.ome_xml import add_instrument, image_metadata
from napari_wsigpu.conversion.pixels import Segment
from napari_wsigpu.formats.wsigpu import VERSION
from napari_wsigpu.model.tags import COMPRESSION, DATATYPE, FILETYPE, PHOTOMETRIC, PREDICTOR, Tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from uuid import UUID

    from numpy.typing import NDArray

    from napari_wsigpu.conversion.coding import Coding
    from napari_wsigpu.conversion.conversion_plan import PlannedLevel
    from napari_wsigpu.conversion.pixels import Block, Job
    from napari_wsigpu.conversion.slide_record import AssociatedPixels, Output
    from napari_wsigpu.model.arrays import Array

RAW_ALIGNMENT = 4096
STRIP_BYTES = 1 << 18
CENTIMETER = 10_000.0


class TiffTarget:
    """Writes a tiled BigTIFF pyramid or an OME-TIFF; owns the open file.

    In a plain TIFF, levels are pages of the main chain. In an OME-TIFF, planes and non-RGB channels
    are pages, and their coarser levels are SubIFDs. Associated images are stored as additional
    pages, in strips.

    Parameters
    ----------
    output : Output
        The contents to write.
    uuid : UUID or None
        UUID of an OME-TIFF; None for a plain TIFF.
    """

    def __init__(self, output: Output, uuid: UUID | None) -> None:
        self._output, self._uuid, self._ome = output, uuid, uuid is not None
        self._plan, self._journal = output.plan, output.journal
        self._handle, self._end = -1, 0
        plan = output.plan
        self._encoders = [
            None if level.copied else encoder(_coding(level), plan.dtype) for level in plan.pyramid
        ]
        self._pages_per_level = len(plan.planes) * plan.levels[0].planes

    def prepare(self, checked: Callable[[int], None]) -> None:
        """Write everything but tiles; keep already written tiles up to the first damaged one.

        `checked` is called with the number of tiles that were verified since its last call.
        """
        levels = self._plan.pyramid
        head = BytesIO()
        with tifffile.TiffWriter(head, bigtiff=True, byteorder="<", ome=self._ome) as file:
            for index, level in enumerate(levels):
                self._write_level(file, index, level)
            for image in self._output.associated:
                self._write_associated(file, image)
        head.seek(0)
        with tifffile.TiffFile(head, mode="r+") as file:
            for level, pages in zip(levels, self._pages(file), strict=True):
                for page in pages:
                    page.tags[Tag.COMPRESSION].overwrite(_coding(level).compression)
            if self._ome:
                first = file.pages.first
                xml = add_instrument(first.description, self._output.record)
                first.tags[Tag.DESCRIPTION].overwrite(xml)
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._handle = no_link(self._output.path, flags)
        self._forget_damaged(checked)
        data = head.getvalue()  # not `getbuffer`, as in `write_dicom_annotations`
        _write_at(self._handle, data, 0)
        self._end = max(self._journal.end, len(data))

    def jobs(self, block: Block) -> Iterator[Job]:
        """Yield a job for each tile of a block that is not written yet."""
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
                self._journal.add(level, plane, row, column, 0, 0, check)
                continue
            if _coding(self._plan.levels[level]).compression == COMPRESSION.NONE:
                self._end += -self._end % RAW_ALIGNMENT
            _write_at(self._handle, data, self._end)
            self._journal.add(level, plane, row, column, self._end, len(data), check)
            self._end += len(data)

    def sync(self) -> None:
        """Wait until the written data would survive a power failure."""
        os.fsync(self._handle)

    def finish(self) -> None:
        """Write the offsets and byte counts of the tiles into the pages."""
        os.ftruncate(self._handle, self._end)
        with tifffile.TiffFile(self._output.path, mode="r+") as file:
            for level, pages in enumerate(self._pages(file)):
                indices, parts = self._plan.indices_of(level), len(pages)
                offsets, counts = (
                    np.concatenate([values[index] for index in indices])
                    for values in (self._journal.offsets, self._journal.counts)
                )
                for code, values in ((Tag.TILE_OFFSETS, offsets), (Tag.TILE_BYTE_COUNTS, counts)):
                    for page, part in zip(pages, np.split(values, parts), strict=True):
                        self._overwrite(page, code, part)
        self.sync()

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _encoded(self, index: int, row: int, column: int, pixels: Array) -> list[Segment]:
        """Encode a tile."""
        level = self._plan.levels[index]
        missing = level.tile_height - pixels.shape[0], level.tile_width - pixels.shape[1]
        if any(missing):
            pixels = np.pad(pixels, ((0, missing[0]), (0, missing[1]), (0, 0)), mode="edge")
        encode = self._encoders[index % self._plan.levels_per_plane]
        assert encode is not None
        planes = np.split(pixels, level.planes, axis=2) if level.planes > 1 else [pixels]
        found = (encode(np.ascontiguousarray(part)) for part in planes)
        tile = row, column
        return [Segment(index, i, *tile, data, crc32(data)) for i, data in enumerate(found)]

    def _forget_damaged(self, checked: Callable[[int], None]) -> None:
        """Mark the first damaged tile, and all that follow it in the file, as not written.

        This makes the resumed file identical to one written without interruption.
        """
        journal = self._journal
        end = self._whole_until(checked)
        for level, counts in enumerate(journal.counts):
            ends = (journal.offsets[level] + counts).max(axis=0)
            journal.forget(level, (ends > end) | ~journal.is_done(level))

    def _whole_until(self, checked: Callable[[int], None]) -> int:
        """Return the offset of the first tile that does not match its CRC-32, or the end."""
        journal = self._journal
        offsets, counts, checks = (
            np.concatenate([tiles.ravel() for tiles in levels])
            for levels in (journal.offsets, journal.counts, journal.checks)
        )
        last_plane = [np.arange(len(tiles)) == len(tiles) - 1 for tiles in journal.counts]
        sizes = [tiles[0].size for tiles in journal.counts]
        last_planes = np.concatenate(list(map(np.repeat, last_plane, sizes)))
        written = np.flatnonzero(counts > 0)
        for index in written[np.argsort(offsets[written])].tolist():
            os.lseek(self._handle, offsets[index], os.SEEK_SET)
            data = os.read(self._handle, counts[index])
            if len(data) < counts[index] or crc32(data) != checks[index]:
                return int(offsets[index])
            checked(int(last_planes[index]))
        return journal.end

    def _pages(self, file: tifffile.TiffFile) -> Iterator[list[tifffile.TiffPage]]:
        """Yield the pages of each level: one per plane, or one per plane and channel."""
        levels = self._plan.pyramid
        if not self._ome:
            yield from ([file.pages[index].aspage()] for index in range(len(levels)))
            return
        mains = [file.pages[index].aspage() for index in range(self._pages_per_level)]
        yield mains
        for index in range(len(levels) - 1):
            found = []
            for main in mains:
                assert main.pages is not None
                found.append(main.pages[index].aspage())
            yield found

    def _overwrite(self, page: tifffile.TiffPage, code: int, values: NDArray[np.int64]) -> None:
        tag = page.tags[code]
        kinds = {DATATYPE.SHORT: "<u2", DATATYPE.LONG: "<u4", DATATYPE.LONG8: "<u8"}
        tag.overwrite(values.astype(kinds[DATATYPE(tag.dtype)]).tobytes())

    def _write_level(self, file: tifffile.TiffWriter, index: int, level: PlannedLevel) -> None:
        coding = _coding(level)
        channels, size = self._plan.channels, (level.height, level.width)
        stack = tuple(map(len, self._plan.stack_axes.values()))
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
        blank = (self._plan.blank_tiles(each).any() for each in self._plan.indices_of(index))
        if self._plan.background and any(blank):
            text = f"{self._plan.background:.17g}"
            options["extratags"] = [(Tag.NO_DATA, DATATYPE.ASCII, 0, text, False)]
        first = index == 0
        if self._plan.mpp is not None:
            mpp = (side * level.downsample for side in self._plan.mpp)
            options["resolution"] = tuple(CENTIMETER / side for side in mpp)
            options["resolutionunit"] = "centimeter"
        if self._ome:
            options["subifds"] = self._plan.levels_per_plane - 1 if first else 0
            metadata = image_metadata(self._plan, self._output.record) | {"UUID": str(self._uuid)}
            options["metadata"] = metadata if first else None
        else:
            options["metadata"] = None
            options["description"] = json.dumps(self._output.record) if first else None
        file.write(
            iter([(b"", 0)] * (level.tiles * level.planes * len(self._plan.planes))),
            shape=shape,
            dtype=self._plan.dtype,
            tile=(level.tile_height, level.tile_width),
            photometric=coding.photometric,
            # tifffile insists on pixels for an uncompressed image of one tile; `prepare` corrects
            # the tag afterwards.
            compression=COMPRESSION.ADOBE_DEFLATE if raw else coding.compression,
            predictor=coding.predictor,
            subfiletype=0 if first else FILETYPE.REDUCEDIMAGE,
            software="napari-wsigpu",
            iccprofile=self._output.icc if first else None,
            **options,
        )

    def _write_associated(self, file: tifffile.TiffWriter, image: AssociatedPixels) -> None:
        pixels = image.pixels
        several = pixels.shape[2] > 1
        integers = pixels.dtype.kind in "iu" and pixels.dtype.itemsize <= 4
        name: dict[str, object] = {"Name": image.name}
        if not self._ome:
            text = json.dumps({"wsigpu": VERSION, "associated": image.name})
            options: dict[str, Any] = {"metadata": None, "description": text}
        else:
            options = {"metadata": name | {"axes": "YXS" if several else "YX"}}
        file.write(
            pixels if several else pixels[..., 0],
            photometric=PHOTOMETRIC.RGB if image.rgb else PHOTOMETRIC.MINISBLACK,
            planarconfig="contig" if several else None,
            compression=COMPRESSION.ADOBE_DEFLATE,
            predictor=PREDICTOR.HORIZONTAL if integers else None,
            rowsperstrip=max(1, STRIP_BYTES // (pixels[0].nbytes or 1)),
            software="napari-wsigpu",
            iccprofile=image.icc,
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
