"""`convert`: write a slide to another file, which appears only when it is complete."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, astuple, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import NAMESPACE_URL, UUID, uuid5

from napari_wsigpu.codecs.color import srgb_profile
from napari_wsigpu.codecs.libraries import load
from napari_wsigpu.conversion.checksum import CHECKED_BY, checksum
from napari_wsigpu.conversion.conversion_plan import PlaneNumber
from napari_wsigpu.conversion.forecast import Forecast, forecast
from napari_wsigpu.conversion.make_plan import make_plan
from napari_wsigpu.conversion.options import DEFAULT_IN_ZARR, Options, checked_number, kind_of
from napari_wsigpu.conversion.paths import check_space, check_target, partial_result, remove
from napari_wsigpu.conversion.pixels import copied_segments, read_blocks
from napari_wsigpu.conversion.png import write_png
from napari_wsigpu.conversion.slide_record import (
    Output,
    associated_pixels,
    conversion_notes,
    make_record,
)
from napari_wsigpu.conversion.tiff_target import TiffTarget
from napari_wsigpu.conversion.zarr_target import ZarrTarget
from napari_wsigpu.model.errors import ConversionCancelledError, ConversionError, write_errors
from napari_wsigpu.slide.slide import Slide, open_slide
from napari_wsigpu.storage.remote.url import is_url, public_url

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import ArrayLike

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.conversion.conversion_plan import Plan
    from napari_wsigpu.conversion.options import Compression, Region
    from napari_wsigpu.conversion.paths import PartialResult
    from napari_wsigpu.conversion.pixels import Segment
    from napari_wsigpu.model.composite import Composite
    from napari_wsigpu.model.geometry import Mask

    Progress = Callable[[int, int], None]

COMMIT_SECONDS = 1.0
MOST_WORKERS = 1024


@dataclass(frozen=True, slots=True)
class Conversion:
    """The result of `convert`.

    Attributes
    ----------
    path : str
        Absolute path of the result.
    checksum : str
        SHA-256 of the result; `napari_wsigpu.conversion.checksum` defines it for folders.
    tiles_copied, tiles_encoded : int
        Number of tiles that this call copied without decoding, and number that it encoded.
    tiles_found : int
        Number of tiles that an earlier, interrupted call had written.
    seconds : float
        Duration in seconds.
    notes : tuple of str
        One-sentence messages about parts that were not converted, work that was repeated, and
        problems with the slide.
    """

    path: str
    checksum: str
    tiles_copied: int
    tiles_encoded: int
    tiles_found: int
    seconds: float
    notes: tuple[str, ...] = ()


def convert(
    source: str | os.PathLike[str] | Slide,
    target: str | os.PathLike[str],
    *,
    compression: Compression | None = None,
    tile_size: int | None = None,
    levels: int | None = None,
    region: Region | None = None,
    level: int = 0,
    workers: int | None = None,
    quality: int | None = None,
    private: bool = False,
    shard: int | None = None,
    color: Color = "stored",
    outline: Sequence[ArrayLike] | None = None,
    z: int | None = None,
    t: int | None = None,
    lossless: bool = False,
    composite: Composite | None = None,
    overwrite: bool = False,
    keep: bool = True,
    announce: Callable[[Forecast], None] | None = None,
    progress: Progress | None = None,
    cancelled: threading.Event | None = None,
) -> Conversion:
    """Write a slide, or a part of it, to another file, without its label images.

    The unfinished result is kept in a folder next to the target (``TARGET.part``). If the
    conversion fails or is interrupted, or the process is killed, the same call resumes it. It
    starts from scratch if the source or the options have changed, and always for PNG.

    Parameters
    ----------
    source : str, PathLike or Slide
        Path or URL of the slide, as for `open_slide`, or an open slide, which stays open.
    target : str or PathLike
        Path of the result; its suffix selects the format: ``.tif`` or ``.tiff`` for a tiled BigTIFF
        pyramid that OpenSlide can read too, ``.ome.tif`` or ``.ome.tiff`` for OME-TIFF, ``.zarr``
        for OME-Zarr 0.5, ``.png`` for an image of one level.
    compression : {"raw", "jpeg", "deflate", "zstd", "lz4"}, optional
        Tile compression: raw, JPEG, deflate or zstd in TIFF; raw, zstd or LZ4 (which nvCOMP can
        read) in OME-Zarr. TIFF tiles that already have this compression and the right size are
        copied. By default every tile that can be copied is copied, averages of copied JPEG tiles
        are compressed with JPEG, and all other tiles losslessly: with deflate in TIFF, with zstd
        in OME-Zarr.
    tile_size : int, optional
        Width and height of tiles, a multiple of 16. By default the tile size of the source, or
        512 if the target does not support that size.
    levels : int, optional
        Maximum number of levels. Levels of `Slide.pyramid` that the file does not store are
        averaged from finer ones.
    region : tuple of int, optional
        (x, y, width, height) in pixels of the slide's level 0. A coarser level is read from the
        slide, or averaged if the region's edges fall within its pixels. Except in PNG, the result
        records the region as ``metadata["wsigpu"]["region"]``. The slide's thumbnail is left out,
        because it shows more than the region.
    level : int
        Number of the `Slide.pyramid` level that becomes level 0 of the result.
    workers : int, optional
        Number of encoding threads; by default one per core.
    quality : int, optional
        JPEG quality, 1 to 100; 90 by default. Allowed only with `compression` "jpeg"; existing
        JPEG tiles are then encoded again instead of copied.
    private : bool
        Whether to keep data that may identify a patient: metadata fields, dates, the barcode,
        comments inside encoded tiles, and the label and macro images.
    shard : int, optional
        In OME-Zarr, store `shard` x `shard` tiles per file.
    color : {"stored", "srgb"}
        Keep pixels as stored, or convert them to sRGB with the slide's ICC profile.
    outline : sequence of array-like, shape (vertices, 2), optional
        Rings of (x, y) in pixels of the slide's level 0, as in `Annotation.rings`. Pixels whose
        center is inside an even number of rings become background.
    z, t : int, optional
        Plane to write, from 0 (see `Slide.planes`). By default OME-TIFF and OME-Zarr get all
        planes, and TIFF and PNG the plane that the slide shows. If some planes are left out, a
        note lists the converted ones.
    lossless : bool
        Compress the averages of copied JPEG tiles losslessly too.
    composite : Composite, optional
        In PNG, write the RGB image of several channels, see `Slide.composite`; a conversion to
        sRGB does not apply to it.
    overwrite : bool
        Replace an existing target once the result is complete. A folder is replaced only if it
        contains nothing but an OME-Zarr that this function could have written.
    keep : bool
        Whether a failed conversion leaves ``TARGET.part`` so that the same call can resume; a note
        on the error says so. The partial result of a damaged slide is always removed.
    announce : callable, optional
        Called with the `Forecast` of the result before anything is written.
    progress : callable, optional
        Called with (tiles done, total tiles) in the calling thread. Tiles from an interrupted call
        count once they have been verified.
    cancelled : threading.Event, optional
        Set it to stop the conversion and remove the partial result.

    Returns
    -------
    Conversion

    Raises
    ------
    ConversionError
        If the options do not fit the slide or the target, or another conversion is writing to it.
    TargetExistsError
        If the target exists, or was created during the conversion, and `overwrite` is false or it
        contains other files; or if ``TARGET.part`` is not an unfinished conversion.
    TargetWriteError
        If the target cannot be written or the disk is full.
    ConversionCancelledError
        If `cancelled` was set.
    LevelError, PlaneError
        If the slide has no such level or plane.
    RegionError, UnsupportedSlideError
        If PNG cannot hold the region, or `color` is "srgb" and the slide has no ICC profile.
    SlideError
        If the slide cannot be read; the error names the tile.

    Examples
    --------
    >>> convert("slide.svs", "slide.zarr", compression="zstd")  # doctest: +SKIP
    """
    started = time.perf_counter()
    name = os.fsdecode(target)
    if not name:
        raise ConversionError("The path of the target is empty; name a file or folder.")
    if is_url(name):
        name = public_url(name)
        raise ConversionError(f"'{name}' is a URL; convert to a local path and upload the result.")
    if "\0" in name:
        raise ConversionError(f"{name!r} is not a valid path; choose another target.")
    path = Path(name).absolute()
    options = Options(
        kind_of(path),
        compression,
        tile_size,
        levels,
        region,
        level,
        quality,
        private,
        shard,
        color,
        outline,  # type: ignore[arg-type]  # Options converts it to tuples
        z,
        t,
        lossless,
        composite,
    )
    load([CHECKED_BY])
    threads = checked_number("workers", workers, 1, MOST_WORKERS) or os.cpu_count() or 1
    with ExitStack() as stack:
        slide = source if isinstance(source, Slide) else open_slide(source, "cpu")
        if slide is not source:
            stack.enter_context(slide)
        check_target(slide, path, overwrite=overwrite)
        if options.kind == "png":
            plane = slide.plane(options.z, options.t)
            if announce is not None:
                announce(forecast(slide, make_plan(slide, options), options))
            with write_errors(path):
                write_png(plane, path, options, progress, cancelled, overwrite=overwrite)
                digest = checksum(path)
            shown = PlaneNumber(plane.planes.t, plane.planes.z)
            counts, notes = (0, 0, 0), conversion_notes(slide, options, [shown])
        else:
            # Raises if sRGB needs a profile that the slide lacks.
            slide.level_array(options.level, color=color)
            plan = make_plan(slide, options)
            if announce is not None:
                announce(forecast(slide, plan, options))
            with partial_result(
                path,
                _identity(slide, options),
                [(level.planes, level.rows, level.columns) for level in plan.levels],
                overwrite=overwrite,
                keep=keep,
                cancelled=cancelled,
            ) as work:
                with closing(_Conversion(slide, plan, options, work)) as job:
                    job.run(threads, progress, cancelled)
                digest = work.finish()
            counts, notes = (job.copied, job.encoded, job.found), work.notes + job.notes
    return Conversion(str(path), digest, *counts, time.perf_counter() - started, tuple(notes))


class _Conversion:
    """A running conversion.

    Reader threads prefetch from the slide, and a pool encodes tiles. Only the calling thread writes
    the journal and a TIFF file, so neither needs a lock. The pool also writes the chunks of an
    OME-Zarr, each of which is in a file that no other job writes.
    """

    def __init__(self, slide: Slide, plan: Plan, options: Options, work: PartialResult) -> None:
        data, journal = work.data, work.journal
        self._slide = slide
        self._plan = plan
        self._work = work
        record = make_record(slide, plan, private=options.private)
        images, problems = associated_pixels(slide, plan, private=options.private)
        self.notes = conversion_notes(slide, options, plan.planes, plan.missing) + problems
        icc = slide.icc_profile if plan.color == "stored" else srgb_profile()
        output = Output(data, plan, journal, record, images, icc)
        self._target: TiffTarget | ZarrTarget
        if options.kind == "ome-zarr":
            self._target = ZarrTarget(output, options.compression or DEFAULT_IN_ZARR)
        else:
            uuid = _uuid(slide, options, record) if options.kind == "ome-tiff" else None
            self._target = TiffTarget(output, uuid)
        check_space(data.parent, plan, options, journal.end)
        if not journal.found:
            remove(data)
        self.copied = self.encoded = self.found = 0

    def run(
        self, threads: int, progress: Progress | None, cancelled: threading.Event | None
    ) -> None:
        """Write all tiles that are not done yet, and complete the result."""
        total = sum(level.tiles for level in self._plan.levels)
        count = 0

        def report(tiles: int) -> None:
            nonlocal count
            if cancelled is not None and cancelled.is_set():
                raise ConversionCancelledError
            count += tiles
            if progress is not None:
                progress(count, total)

        def advance(tiles: int) -> None:
            if time.monotonic() - self._committed > COMMIT_SECONDS:
                self._commit()
            report(tiles)

        done = self._prepare(report)
        count = sum(int(tiles.sum()) for tiles in done)
        self._committed = time.monotonic()
        report(0)
        try:
            for index, level in enumerate(self._plan.levels):
                if level.copied and not level.missing:
                    self._copy(index, done[index], advance)
            self._encode(done, threads, advance)
        finally:
            self._commit()
        self._target.finish()

    def close(self) -> None:
        """Close the files of the target."""
        self._target.close()

    def _prepare(self, checked: Callable[[int], None]) -> list[Mask]:
        """Write everything but tiles; return the mask of finished tiles of each level."""
        journal, levels = self._work.journal, range(len(self._plan.levels))
        known = journal.tiles_done
        self._target.prepare(checked)
        self._work.resumable = True
        self.found = journal.tiles_done
        if self.found < known:
            self.notes.append(
                f"{known - self.found} tiles in '{self._work.data.parent}' were damaged or "
                "followed damaged ones, so they were written again."
            )
        for index in levels:
            journal.skip(index, self._plan.blank_tiles(index))
        return [journal.is_done(index) for index in levels]

    def _copy(self, index: int, done: Mask, advance: Callable[[int], None]) -> None:
        batches = copied_segments(self._slide, self._plan, index, done)
        with closing(batches):
            for batch in batches:
                self._target.write(batch)
                tiles = len(batch) // self._plan.levels[index].planes
                self.copied += tiles
                advance(tiles)

    def _encode(self, done: list[Mask], threads: int, advance: Callable[[int], None]) -> None:
        waiting: deque[Future[Sequence[Segment]]] = deque()

        def write() -> None:
            segments = waiting.popleft().result()
            self._target.write(segments)
            tiles = len(segments) // self._plan.levels[segments[0].level].planes
            self.encoded += tiles
            advance(tiles)

        with ThreadPoolExecutor(threads, "wsigpu-encode") as pool:
            try:
                for group in self._plan.groups:
                    if self._plan.levels[group.start].missing:
                        continue
                    blocks = read_blocks(self._slide, self._plan, group, done)
                    with closing(blocks):
                        for block in blocks:
                            for job in self._target.jobs(block):
                                waiting.append(pool.submit(job))
                                if len(waiting) > 2 * threads:
                                    write()
                while waiting:
                    write()
            finally:
                # On an error, drop queued tiles; the pool then waits only for running ones.
                for future in waiting:
                    future.cancel()

    def _commit(self) -> None:
        # Data before journal: the journal must not list tiles that a power failure could lose.
        self._target.sync()
        self._work.journal.commit()
        self._committed = time.monotonic()


def _identity(slide: Slide, options: Options) -> dict[str, object]:
    """Return the identity of a conversion: its source files, options and package version."""
    layout = slide.layout
    return {
        "source": [list(astuple(file)) for file in layout.files],
        "options": asdict(options),
        "version": version("napari-wsigpu"),
    }


def _uuid(slide: Slide, options: Options, record: Mapping[str, object]) -> UUID:
    """Return a reproducible UUID of a result, which does not depend on paths."""
    identity = _identity(slide, options)
    files = [[file.size, file.modified_ns] for file in slide.layout.files]
    text = json.dumps(identity | {"source": files, "record": record}, sort_keys=True)
    return uuid5(NAMESPACE_URL, text)
