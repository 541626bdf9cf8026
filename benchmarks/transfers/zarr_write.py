"""``zarr-write`` and ``zarr-write-lz4``: arrays to Zarr, by the size of chunks."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tifffile

from benchmarks.machine import check_memory
from benchmarks.synthetic import make_picture
from benchmarks.transfers.chunk_writer import ChunkWriter
from benchmarks.transfers.device_chunks import (
    LARGEST_BLOCK,
    DeviceChunkWriter,
    KvikioChunkWriter,
    Lz4Encoder,
)
from benchmarks.transfers.kvikio_process import KvikioModes
from benchmarks.transfers.readers import OURS
from benchmarks.transfers.reference import largest_difference
from benchmarks.transfers.timing import Absent, Case, way
from benchmarks.transfers.zarr_arrays import create, require_zarr, stored
from napari_wsigpu.model.errors import DeviceError, MissingPackageError
from napari_wsigpu.slide import runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from benchmarks.transfers.session import Session
    from benchmarks.transfers.timing import Way
    from benchmarks.transfers.zarr_arrays import ZarrCodec

TIFF_TILE = 16
CODECS: dict[str, ZarrCodec] = {"zarr-write": "none", "zarr-write-lz4": "lz4"}


def run(session: Session, side: int, chunks: Sequence[int], codec: ZarrCodec) -> None:
    """Measure a square picture of tissue, 8-bit RGB.

    Parameters
    ----------
    session : Session
        The run.
    side : int
        Its side in pixels.
    chunks : sequence of int
        Sides of chunks; those that are larger than the picture are left out, which is said.
    codec : {"none", "lz4"}
        Uncompressed chunks or LZ4.
    """
    require_zarr()
    check_memory(3 * side * side, f"A picture of {side} x {side}", "choose a smaller --size")
    picture = make_picture(side)
    no_gpu = _no_gpu()
    session.say(
        f"{side} x {side} of 8-bit RGB tissue; written to the page cache, not awaited on the disk",
        side=side,
        bytes=picture.nbytes,
        codec=codec,
        zarr_format=2 if codec == "lz4" else 3,
        right_pixels_by="zarr-python on the CPU",
    )
    modes = KvikioModes(no_gpu, session.stack)
    folder = session.folder / "written.zarr"
    device = None if no_gpu else import_module("cupy").asarray(picture)

    def case(chunk: int) -> Case:
        given = chunk, codec, folder
        against = _against(chunk, codec)
        by_kvikio = modes.ways(
            write_by_kvikio, lambda item: (side, chunk, codec, str(folder)), against
        )
        ways = [
            by_own_cpu(picture, *given),
            _unless(no_gpu or against, f"{OURS}, CuPy", by_own_gpu, device, *given),
            *by_kvikio,
            by_zarr("zarr-python, NumPy", picture, *given),
            _unless(
                no_gpu, "zarr-python, CuPy", partial(by_zarr, "zarr-python, CuPy"), device, *given
            ),
            by_tifffile(picture, *given),
            Absent("OpenSlide", "it writes no files"),
        ]
        items = [None] * (1 + session.rounds)
        return Case(_case_name(chunk), items, ways, picture.nbytes, apart)

    def apart(item: object, found: NDArray[Any]) -> float:
        return largest_difference(found, picture)

    for chunk in chunks:
        if chunk > side:
            session.leave_out(_case_name(chunk), "the picture is smaller")
        else:
            session.run(case(chunk))


def _case_name(chunk: int) -> str:
    return f"chunks of {chunk} x {chunk}"


def by_own_cpu(pixels: NDArray[Any], chunk: int, codec: ZarrCodec, folder: Path) -> Way:
    """Return our writing from host memory."""
    encode = import_module("numcodecs").LZ4().encode if codec == "lz4" else None
    arrays = _Fresh(pixels, chunk, codec, folder)

    def work(item: object) -> None:
        with ChunkWriter(folder, arrays.array, encode) as output:
            output.write(pixels, 0, 0)

    return way(f"{OURS}, NumPy", work, arrays.create, lambda nothing: stored(folder))


def by_own_gpu(pixels: Any, chunk: int, codec: ZarrCodec, folder: Path) -> Way:
    """Return our writing from device memory."""
    encode = Lz4Encoder() if codec == "lz4" else None
    arrays = _Fresh(pixels, chunk, codec, folder)

    def work(item: object) -> None:
        write_bands(DeviceChunkWriter(folder, arrays.array, encode), pixels, chunk)

    return way(f"{OURS}, CuPy", work, arrays.create, lambda nothing: stored(folder))


def by_zarr(name: str, pixels: Any, chunk: int, codec: ZarrCodec, folder: Path) -> Way:
    """Return writing by zarr-python, from the host or with its buffers for devices."""
    arrays = _Fresh(pixels, chunk, codec, folder)
    on_device = not isinstance(pixels, np.ndarray)

    def work(item: object) -> None:
        with require_zarr().config.enable_gpu() if on_device else nullcontext():
            arrays.array[...] = pixels

    return way(name, work, arrays.create, lambda nothing: stored(folder), peer=True)


def by_tifffile(pixels: NDArray[Any], chunk: int, codec: ZarrCodec, folder: Path) -> Way | Absent:
    """Return writing of a TIFF file of the same tiles."""
    name = "tifffile, TIFF"
    if codec == "lz4" or chunk % TIFF_TILE:
        return Absent(name, "TIFF has no such tiles")
    path = folder.with_suffix(".tif")

    def work(item: object) -> None:
        tifffile.imwrite(path, pixels, tile=(chunk, chunk), photometric="rgb", bigtiff=True)

    return way(name, work, host=lambda nothing: tifffile.imread(path), peer=True)


def write_by_kvikio(
    wants_pixels: bool, side: int, chunk: int, codec: ZarrCodec, folder: str
) -> NDArray[Any] | float:
    """Write the picture through kvikio; return what was stored, or seconds."""
    pixels, encode = _on_device(side), _encoder(codec)
    array = create(Path(folder), pixels.shape, pixels.dtype, (chunk, chunk), codec)
    begin = time.perf_counter()
    write_bands(KvikioChunkWriter(Path(folder), array, encode), pixels, chunk)
    seconds = time.perf_counter() - begin
    return stored(Path(folder)) if wants_pixels else seconds


def write_bands(writer: DeviceChunkWriter, pixels: Any, chunk: int) -> None:
    """Write a picture in rows of chunks, so that the first are stored while others are laid out."""
    with writer:
        for top in range(0, pixels.shape[0], chunk):
            writer.write(pixels[top : top + chunk], top, 0)


class _Fresh:
    """An empty array for each writing."""

    def __init__(self, pixels: Any, chunk: int, codec: ZarrCodec, folder: Path) -> None:
        self._given = folder, pixels.shape, pixels.dtype, (chunk, chunk), codec
        self.array: Any = None

    def create(self) -> None:
        """Make another one."""
        self.array = create(*self._given)


def _unless(against: str, name: str, make: Callable[..., Way], *given: Any) -> Way | Absent:
    if against:
        return Absent(name, against)
    try:
        return make(*given)
    except MissingPackageError as error:
        return Absent(name, str(error))


def _against(chunk: int, codec: ZarrCodec) -> str:
    size = 3 * chunk * chunk
    if codec == "lz4" and size > LARGEST_BLOCK:
        return f"nvCOMP's LZ4 takes at most 16 MiB a chunk, not {size / 2**20:.1f}"
    return ""


def _no_gpu() -> str:
    try:
        runtime.default().devices.worker(0)
    except DeviceError as error:
        return str(error).partition(";")[0].removesuffix(".")
    return ""


@cache
def _on_device(side: int) -> Any:
    return import_module("cupy").asarray(make_picture(side))


@cache
def _encoder(codec: ZarrCodec) -> Lz4Encoder | None:
    return Lz4Encoder() if codec == "lz4" else None
