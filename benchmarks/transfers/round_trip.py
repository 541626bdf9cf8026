"""``round-trip``: a level is read while it is written to raw Zarr of its tile size."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.transfers import reading
from benchmarks.transfers.chunk_writer import ChunkWriter
from benchmarks.transfers.device_chunks import DeviceChunkWriter, KvikioChunkWriter
from benchmarks.transfers.kvikio_process import KvikioModes
from benchmarks.transfers.read import region_case
from benchmarks.transfers.readers import OURS, Reader, peers
from benchmarks.transfers.reference import Region
from benchmarks.transfers.timing import Absent, way
from benchmarks.transfers.zarr_arrays import create, require_zarr, stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from benchmarks.transfers.session import Session
    from benchmarks.transfers.target import Target
    from benchmarks.transfers.timing import Way
    from napari_wsigpu.slide.slide import Slide

BAND_BYTES = 64 << 20


def run(session: Session, path: Path, level: int) -> None:
    """Measure a level of a slide.

    Parameters
    ----------
    session : Session
        The run.
    path : Path
        The slide.
    level : int
        Index of the level.
    """
    require_zarr()
    target = session.target(path, level, whole=True)
    folder = session.folder / "copy.zarr"
    modes = KvikioModes(target.no_gpu, session.stack)
    ways = [
        own(f"{OURS}, CPU", target, target.slide, folder),
        own(f"{OURS}, GPU", target, target.by_gpu, folder),
        *modes.ways(
            copy_by_kvikio,
            lambda item: (target.path, level, str(folder)),
            "" if target.raw else reading.KVIKIO_ONLY_RAW,
        ),
        *(by_zarr(reader, target, folder) for reader in peers(target, session.stack)),
    ]
    items = [target.whole] * (1 + session.rounds)
    session.run(region_case("read and written to raw Zarr", target, items, ways))


def own(name: str, target: Target, slide: Slide | None, folder: Path) -> Way | Absent:
    """Return our way, by the CPU or the GPU."""
    if slide is None:
        return Absent(name, target.no_gpu)
    by_gpu = slide is target.by_gpu
    return way(
        name,
        lambda item: copy(target, slide, folder, DeviceChunkWriter if by_gpu else ChunkWriter),
        slide.clear_cache,
        lambda nothing: stored(folder),
    )


def copy(target: Target, slide: Slide, folder: Path, writer: type[ChunkWriter]) -> None:
    """Read a level ahead, band by band, and write each."""
    array = _empty(target, folder)
    todo = list(bands(target))
    locations = [target.location(band) for band in todo]
    device = "cpu" if writer is ChunkWriter else "cuda"
    size = todo[0].width, todo[0].height
    with writer(folder, array) as output:
        read = slide.read_regions(locations, size, target.level, device=device)
        for band, pixels in zip(todo, read, strict=True):
            output.write(pixels[: band.height], band.top, band.left)


def copy_by_kvikio(wants_pixels: bool, path: str, level: int, folder: str) -> NDArray[Any] | float:
    """Copy a level through kvikio; return what was stored, or seconds."""
    target = reading.opened(path, level, cold=False)
    slide = target.gpu_slide()
    slide.clear_cache()
    begin = time.perf_counter()
    copy(target, slide, Path(folder), KvikioChunkWriter)
    seconds = time.perf_counter() - begin
    reading.check_kvikio()
    return stored(Path(folder)) if wants_pixels else seconds


def by_zarr(reader: Reader | Absent, target: Target, folder: Path) -> Way | Absent:
    """Return a peer's reading, with writing by zarr-python."""
    name = f"{reader.name}, zarr-python"
    if isinstance(reader, Absent):
        return Absent(name, reader.reason)

    def work(item: Region) -> None:
        array = _empty(target, folder)
        for band in bands(target):
            array[band.top : band.top + band.height] = reader.read(band)

    return way(name, work, reader.prepare, lambda nothing: stored(folder), peer=True)


def bands(target: Target) -> Iterator[Region]:
    """Yield the level's tile rows, some at once, from the top."""
    width, height = target.image.width, target.image.height
    row = target.size(Region(0, 0, width, target.image.grid.tile_height))
    band = target.image.grid.tile_height * max(1, BAND_BYTES // row)
    for top in range(0, height, band):
        yield Region(0, top, width, min(band, height - top))


def _empty(target: Target, folder: Path) -> Any:
    image, grid = target.image, target.image.grid
    shape = image.height, image.width, image.channels
    return create(folder, shape, image.dtype, (grid.tile_height, grid.tile_width), "none")
