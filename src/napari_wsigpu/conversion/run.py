"""`convert`: a slide into another file, tile by tile, and never half a file under its name."""

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
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_URL, UUID, uuid5

from napari_wsigpu.codecs.color import srgb_profile
from napari_wsigpu.codecs.libraries import load
from napari_wsigpu.conversion.checksum import CHECKED_BY, checksum
from napari_wsigpu.conversion.options import Options, checked_number, kind_of
from napari_wsigpu.conversion.paths import check_space, check_target, refused, remove, working_on
from napari_wsigpu.conversion.pixels import copied_segments, read_blocks
from napari_wsigpu.conversion.plan import PlaneNumber
from napari_wsigpu.conversion.planning import make_plan
from napari_wsigpu.conversion.png import write_png
from napari_wsigpu.conversion.record import make_record, notes_on, pictures
from napari_wsigpu.conversion.tiff import TiffTarget
from napari_wsigpu.conversion.zarr import ZarrTarget
from napari_wsigpu.model.errors import ConversionCancelledError, ConversionError
from napari_wsigpu.slide.slide import Slide, open_slide
from napari_wsigpu.storage.remote.url import is_url, public_url

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.conversion.options import Compression, Region
    from napari_wsigpu.conversion.paths import Work
    from napari_wsigpu.conversion.pixels import Segment
    from napari_wsigpu.conversion.plan import Plan

COMMIT_SECONDS = 1.0
MOST_WORKERS = 1024


@dataclass(frozen=True, slots=True)
class Conversion:
    """What `convert` has done.

    Attributes
    ----------
    path : str
        Absolute path of the result.
    checksum : str
        Its SHA-256; see `napari_wsigpu.conversion.checksum` for that of a folder.
    tiles_copied, tiles_encoded : int
        How many tiles were copied as they are encoded, and how many were encoded anew, by this
        call.
    tiles_found : int
        How many tiles an earlier call had written that was interrupted.
    seconds : float
        How long it took.
    notes : tuple of str
        What did not travel, had to be done again, or is wrong with the slide, one sentence each.
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
    overwrite: bool = False,
    keep: bool = True,
    progress: Callable[[int, int], None] | None = None,
    cancelled: threading.Event | None = None,
) -> Conversion:
    """Write a slide, or a part of it, as another file; its label images stay behind.

    Until it is whole, the result lies in a folder beside the target (``TARGET.part``). If the
    conversion fails or is interrupted, even killed, the same call goes on where it ended; it
    begins anew if the source or the options are others. A picture always begins anew.

    Parameters
    ----------
    source : str, PathLike or Slide
        A path, as `open_slide` takes it, or an open slide, which stays open.
    target : str or PathLike
        What to write, told by the end of its name: ``.tif`` or ``.tiff`` for a tiled BigTIFF
        pyramid that OpenSlide reads too, ``.ome.tif`` or ``.ome.tiff`` for OME-TIFF, ``.zarr``
        for OME-Zarr 0.5, ``.png`` for a picture of one level.
    compression : {"raw", "jpeg", "deflate", "zstd", "lz4"}, optional
        How tiles are encoded: raw, JPEG, deflate or zstd in TIFF; raw, zstd or LZ4 (as nvCOMP
        reads it) in OME-Zarr. TIFF tiles that are encoded so already are copied, if their size is
        kept. By default all tiles are copied that can be, and others are compressed without
        loss: by deflate in TIFF, by zstd in OME-Zarr.
    tile_size : int, optional
        Width and height of tiles, a multiple of 16; by default the source's, or 512 where the
        target can't have those.
    levels : int, optional
        Write so many levels at most. Levels that the slide lacks are averaged, as
        `Slide.pyramid` defines them.
    region : tuple of int, optional
        (x, y, width, height) in pixels of the slide's level 0. Coarser levels are the slide's
        own where the region's edges do not lie within their pixels, and averages otherwise. The
        result remembers its place as ``metadata["wsigpu"]["region"]`` (PNG does not); the slide's
        thumbnail, which shows more than that, stays behind.
    level : int
        Number of the level of `Slide.pyramid` that becomes level 0 of the result.
    workers : int, optional
        How many threads encode tiles; by default one a core.
    quality : int, optional
        Of JPEG tiles, 1 to 100; 90 by default. If it is given, which only `compression` "jpeg"
        allows, tiles that are JPEG already are not copied.
    private : bool
        Whether fields that can name a patient, dates, the barcode, comments and the like in
        encoded tiles, and the label and macro images travel too.
    shard : int, optional
        In OME-Zarr, keep the chunks of a square of so many by so many tiles in one file.
    color : {"stored", "srgb"}
        Pixels as they are, or in sRGB by the slide's ICC profile.
    outline : sequence of array-like, shape (vertices, 2), optional
        Rings, (x, y) in pixels of the slide's level 0, as `Annotation.rings`. Pixels become
        background whose centre lies within an even number of them.
    z, t : int, optional
        Which of the slide's `planes` to write, counted from 0. By default OME-TIFF and OME-Zarr get
        all of them, whichever an open slide shows; TIFF and PNG, which hold one, that one. If not
        all are written, a note says which.
    overwrite : bool
        Replace the target if it exists, once the result is whole; but never a folder that holds
        anything else than an OME-Zarr as this function writes it.
    keep : bool
        Whether a conversion that fails leaves ``TARGET.part``, so that the same call goes on; a
        note of the error says so. What is written of a slide that is damaged is never kept.
    progress : callable, optional
        Told how many tiles are done, and of how many; from the thread that called. Those that an
        interrupted call left count when they have been checked.
    cancelled : threading.Event, optional
        Set it to end the conversion; what was written is removed then.

    Returns
    -------
    Conversion

    Raises
    ------
    ConversionError
        If what is asked for can't be, or another conversion is writing to the target.
    TargetExistsError
        If the target exists, or came meanwhile, and `overwrite` is false or it holds other files;
        or if ``TARGET.part`` holds something else than an unfinished conversion.
    TargetWriteError
        If the target can't be written, or there is no room for it.
    ConversionCancelledError
        If `cancelled` was set.
    PlaneError
        If there is no such plane.
    RegionError, UnsupportedSlideError
        If PNG can't hold it, or sRGB is asked for without a profile that can be applied.
    SlideError
        If the slide can't be read: the error names the tile.

    Examples
    --------
    >>> convert("slide.svs", "slide.zarr", compression="zstd")  # doctest: +SKIP
    """
    begin = time.perf_counter()
    name = os.fsdecode(target)
    if is_url(name):
        raise ConversionError(
            f"'{public_url(name)}' is a URL; convert to a path of this machine, and copy that."
        )
    if "\0" in name:
        raise ConversionError(f"{name!r} is no path; choose another target.")
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
        outline,  # type: ignore[arg-type]  # checked, and made tuples, there
        z,
        t,
    )
    load([CHECKED_BY])
    threads = checked_number("workers", workers, 1, MOST_WORKERS) or os.cpu_count() or 1
    with ExitStack() as stack:
        slide = (
            source if isinstance(source, Slide) else stack.enter_context(open_slide(source, "cpu"))
        )
        check_target(slide, path, overwrite=overwrite)
        if options.kind == "png":
            with refused(path):
                plane = slide.plane(options.z, options.t)
                write_png(plane, path, options, progress, cancelled, overwrite=overwrite)
                digest = checksum(path)
            shown = PlaneNumber(plane.planes.t, plane.planes.z)
            counts, notes = (0, 0, 0), notes_on(slide, [shown], private=private)
        else:
            slide.level_array(options.level, color=color)  # refuses sRGB without a profile
            plan = make_plan(slide, options)
            with working_on(
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
    return Conversion(str(path), digest, *counts, time.perf_counter() - begin, tuple(notes))


class _Conversion:
    """A conversion that runs: a reading thread ahead, encoding threads, one that writes."""

    def __init__(self, slide: Slide, plan: Plan, options: Options, work: Work) -> None:
        data, journal = work.data, work.journal
        self._slide = slide
        self._plan = plan
        self._work = work
        record = make_record(slide, plan, private=options.private)
        images, problems = pictures(slide, plan, private=options.private)
        self.notes = notes_on(slide, plan.planes, plan.missing, private=options.private) + problems
        icc = slide.icc_profile if plan.color == "stored" else srgb_profile()
        self._target: TiffTarget | ZarrTarget
        if options.kind == "ome-zarr":
            self._target = ZarrTarget(data, plan, journal, record, images, icc, options)
        else:
            uuid = _uuid(slide, options, record) if options.kind == "ome-tiff" else None
            self._target = TiffTarget(data, plan, journal, record, images, icc, uuid)
        check_space(data.parent, plan, options, journal.end)
        if not journal.found:
            remove(data)
        self.copied = self.encoded = self.found = 0

    def run(
        self,
        threads: int,
        progress: Callable[[int, int], None] | None,
        cancelled: threading.Event | None,
    ) -> None:
        """Write all tiles that are missing, and make the result whole."""
        total = sum(level.tiles for level in self._plan.levels)
        count = 0

        def checked(tiles: int) -> None:
            nonlocal count
            if cancelled is not None and cancelled.is_set():
                raise ConversionCancelledError
            count += tiles
            if progress is not None:
                progress(count, total)

        def advance(tiles: int) -> None:
            if time.monotonic() - self._committed > COMMIT_SECONDS:
                self._commit()
            checked(tiles)

        done = self._begin(checked)
        count = sum(int(tiles.sum()) for tiles in done)
        self._committed = time.monotonic()
        checked(0)
        try:
            for index, level in enumerate(self._plan.levels):
                if level.copied and not level.missing:
                    self._copy(index, done[index], advance)
            self._encode(done, threads, advance)
        finally:
            self._commit()
        self._target.finish()

    def close(self) -> None:
        """Let go of the target's handles."""
        self._target.close()

    def _begin(self, checked: Callable[[int], None]) -> list[NDArray[np.bool_]]:
        """Write all but tiles; return which tiles of each level are there."""
        journal, levels = self._work.journal, range(len(self._plan.levels))
        known = journal.tiles_done
        self._target.begin(checked)
        self._work.begun = True
        self.found = journal.tiles_done
        if self.found < known:
            self.notes.append(
                f"{known - self.found} tiles in '{self._work.data.parent}' were damaged, or came "
                "after those, and were written again."
            )
        for index in levels:
            journal.leave_out(index, self._plan.blank_tiles(index))
        return [journal.is_done(index) for index in levels]

    def _copy(self, index: int, done: Any, advance: Callable[[int], None]) -> None:
        batches = copied_segments(self._slide, self._plan, index, done)
        with closing(batches):
            for batch in batches:
                self._target.write(batch)
                tiles = len(batch) // self._plan.levels[index].planes
                self.copied += tiles
                advance(tiles)

    def _encode(self, done: list[Any], threads: int, advance: Callable[[int], None]) -> None:
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
                for future in waiting:
                    future.cancel()

    def _commit(self) -> None:
        self._target.secure()
        self._work.journal.commit()
        self._committed = time.monotonic()


def _identity(slide: Slide, options: Options) -> dict[str, Any]:
    """Say what a journal is about: the source as it is now, and what decides what is written."""
    layout = slide.layout
    return {
        "source": [list(astuple(file)) for file in layout.files],
        "options": asdict(options),
        "version": version("napari-wsigpu"),
    }


def _uuid(slide: Slide, options: Options, record: Mapping[str, Any]) -> UUID:
    """Name a result by what it is made of, so that it is the same each time, but not by paths."""
    identity = _identity(slide, options)
    files = [[file.size, file.modified_ns] for file in slide.layout.files]
    text = json.dumps(identity | {"source": files, "record": record}, sort_keys=True)
    return uuid5(NAMESPACE_URL, text)
