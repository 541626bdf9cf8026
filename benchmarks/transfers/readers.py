"""What can read a level: ourselves in several ways, tifffile, OpenSlide and zarr-python."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.transfers.target import ZARR, to_host
from benchmarks.transfers.timing import Absent, way
from benchmarks.transfers.zarr_arrays import require_zarr

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack

    from numpy.typing import NDArray

    from benchmarks.transfers.reference import Region
    from benchmarks.transfers.target import Target
    from benchmarks.transfers.timing import Way
    from napari_wsigpu.slide.slide import Slide

OURS = "napari-wsigpu"


@dataclass(frozen=True, slots=True)
class Reader:
    """One way to read regions of a level.

    Attributes
    ----------
    name : str
        Its name.
    read : callable
        Returns the pixels of a region.
    prepare : callable
        Empties caches.
    host : callable
        Copies what was read to the host.
    peer : bool
        Whether others wrote it.
    """

    name: str
    read: Callable[[Region], Any]
    prepare: Callable[[], object]
    host: Callable[[Any], NDArray[Any]] = np.asarray
    peer: bool = True

    def way(self) -> Way:
        """Return it as a way to read one region."""
        return way(self.name, self.read, self.prepare, self.host, peer=self.peer)


def as_ways(readers: Sequence[Reader | Absent]) -> list[Way | Absent]:
    """Return readers as ways to read one region."""
    return [reader.way() if isinstance(reader, Reader) else reader for reader in readers]


def to_the_host(target: Target, stack: ExitStack) -> list[Reader | Absent]:
    """Return what reads to host memory."""
    return [
        own(f"{OURS}, CPU", target, target.slide, "cpu"),
        by_gpu(target, "cpu"),
        *peers(target, stack),
    ]


def to_the_device(target: Target, stack: ExitStack) -> list[Reader | Absent]:
    """Return what reads to device memory; peers by a copy from the host."""
    return [
        by_gpu(target, "cuda"),
        *(_then_copied(target, peer) for peer in peers(target, stack)),
    ]


def peers(target: Target, stack: ExitStack) -> list[Reader | Absent]:
    """Return what others wrote, to host memory."""
    found = [by_tifffile(target), by_openslide(target, stack)]
    if target.by_zarr is not None:
        found.append(Reader(ZARR, target.by_zarr, target.forget))
    return found


def by_gpu(target: Target, device: str) -> Reader | Absent:
    """Return our reader by the GPU, to the host or to the device."""
    name = f"{OURS}, GPU"
    if target.by_gpu is None:
        return Absent(name, target.no_gpu)
    return own(name, target, target.by_gpu, device)


def own(name: str, target: Target, slide: Slide, device: str) -> Reader:
    """Return our reader of a slide."""

    def read(region: Region) -> Any:
        size = region.width, region.height
        return slide.read_region(target.location(region), size, target.level, device)

    def prepare() -> None:
        slide.clear_cache()
        target.forget()

    return Reader(name, read, prepare, np.asarray if device == "cpu" else to_host, peer=False)


def by_tifffile(target: Target) -> Reader | Absent:
    """Return tifffile: it reads whole pages at once, and parts of them as Zarr arrays."""
    name, pages = "tifffile", target.pages
    if not pages:
        return Absent(name, "it has no pages of this level's tiles")
    arrays: list[Any] = []

    def whole(page: Any, region: Region) -> NDArray[Any]:
        pixels = _channels_last(page, page.asarray(maxworkers=os.cpu_count()))
        return pixels[: region.height, : region.width]

    def part(page: Any, region: Region) -> NDArray[Any]:
        rows = slice(region.top, region.top + region.height)
        columns = slice(region.left, region.left + region.width)
        array = arrays[pages.index(page)]
        return _channels_last(
            page, array[:, rows, columns] if _is_planar(page) else array[rows, columns]
        )

    def read(region: Region) -> NDArray[Any]:
        is_whole = region == target.whole
        if not (is_whole or arrays):
            arrays.extend(require_zarr().open_array(page.aszarr(), mode="r") for page in pages)
        found = [(whole if is_whole else part)(page, region) for page in pages]
        return found[0] if len(found) == 1 else np.concatenate(found, -1)

    return Reader(name, read, target.forget)


def _is_planar(page: Any) -> bool:
    return str(page.axes).startswith("S")


def _channels_last(page: Any, pixels: NDArray[Any]) -> NDArray[Any]:
    """Give a page the shape (height, width, channels)."""
    if pixels.ndim == 2:
        return pixels[..., None]
    return np.moveaxis(pixels, 0, -1) if _is_planar(page) else pixels


def by_openslide(target: Target, stack: ExitStack) -> Reader | Absent:
    """Return OpenSlide without its cache."""
    name, image = "OpenSlide", target.image
    try:
        openslide = import_module("openslide")
    except (ImportError, OSError) as error:
        return Absent(name, f"it can't be imported ({error})")
    if image.channels != 3 or image.dtype != np.uint8:
        return Absent(name, f"it reads 8-bit RGB, not {image.channels} x {image.dtype}")
    try:
        slide = stack.enter_context(openslide.OpenSlide(target.path))
    except openslide.OpenSlideError as error:
        return Absent(name, f"it can't open the slide ({error})")
    size = image.width, image.height
    if size not in slide.level_dimensions:
        return Absent(name, f"it has no level of {size[0]} x {size[1]}")
    level = slide.level_dimensions.index(size)
    slide.set_cache(openslide.OpenSlideCache(0))

    def read(region: Region) -> NDArray[Any]:
        picture = slide.read_region(target.location(region), level, (region.width, region.height))
        return np.asarray(picture)[..., :3]

    return Reader(name, read, target.forget)


def _then_copied(target: Target, reader: Reader | Absent) -> Reader | Absent:
    name = f"{reader.name}, then copied"
    if isinstance(reader, Absent) or target.by_gpu is None:
        reason = reader.reason if isinstance(reader, Absent) else target.no_gpu
        return Absent(name, reason)
    cupy = import_module("cupy")

    def read(region: Region) -> Any:
        pixels = cupy.asarray(reader.read(region))
        cupy.cuda.get_current_stream().synchronize()
        return pixels

    return replace(reader, name=name, read=read, host=to_host)
