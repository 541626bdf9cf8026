"""Batches of JPEG 2000 code streams of one form, decoded by our own kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib import resources
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.gpu.device.tables import structure
from napari_wsigpu.gpu.jpeg2000.geometry import plan
from napari_wsigpu.gpu.jpeg2000.tables import (
    BLOCK_STATE,
    BUCKETS,
    BYPASS,
    CONSTANTS,
    LINE_SAMPLES,
    RECORD,
    STRUCTURES,
    TERMINATE_ALL,
    THREADS,
    THREADS_OF_BLOCKS,
    tables,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.device import Stream
    from napari_wsigpu.gpu.jpeg2000.geometry import Geometry
    from napari_wsigpu.gpu.jpeg2000.header import Header

# Programs, which are compiled side by side.
PROGRAMS = ("packets.cu", "blocks.cu", "wavelet.cu", "pixels.cu")
# A warp does what any of its threads has to do: code blocks share one only where there are so many
# that they keep the device busy.
WARP, MANY_BLOCKS, MANY_LANES = 32, 49152, 2
# Of a tile, that a block of threads makes pixels of.
ROWS = 8
ALIGNED = 256


@dataclass(frozen=True)
class Form:
    """What the code streams of a batch have in common.

    Attributes
    ----------
    header : Header
        Their main header.
    reduce : int
        How many of the finest levels of the wavelet are left out.
    geometry : Geometry
        Where what lies in a tile; follows from these.
    """

    header: Header
    reduce: int
    geometry: Geometry = field(compare=False)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Of the pixels: (height, width, components)."""
        return *self.geometry.edges[:2], len(self.header.components)

    @cached_property
    def ycbcr(self) -> bool:
        """Whether it has fewer samples of chroma than of luma, and becomes RGB."""
        return any(one.across > 1 or one.down > 1 for one in self.header.components)

    @cached_property
    def pixel_bytes(self) -> int:
        """Of all components of a pixel."""
        return len(self.header.components) * self.dtype.itemsize

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Type of the pixels."""
        first = self.header.components[0]
        size = 1 if first.bits <= 8 else 2
        return np.dtype(f"{'i' if first.signed else 'u'}{size}")


@lru_cache(maxsize=64)
def form_of(header: Header, reduce: int = 0) -> Form | str:
    """Return the form that a main header tells, or why it can't be decoded here.

    Parameters
    ----------
    header : Header
        The main header.
    reduce : int
        How many of the finest levels of the wavelet to leave out.
    """
    geometry = plan(header, reduce)
    return geometry if isinstance(geometry, str) else Form(header, reduce, geometry)


@lru_cache(maxsize=1)
def programs() -> tuple[str, ...]:
    """Return the texts of the kernels."""
    folder = resources.files("napari_wsigpu.gpu.jpeg2000")
    begin = "".join(f"#define {name} {value}\n" for name, value in CONSTANTS.items())
    begin += "".join(structure(name, dtype) for name, dtype in STRUCTURES.items())
    begin += folder.joinpath("shared.cu").read_text("utf-8")
    return tuple(begin + folder.joinpath(name).read_text("utf-8") for name in PROGRAMS)


def placed(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return where parts of device memory begin, one after another; under "size" all they take."""
    begins = accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes.values()), initial=0)
    return dict(zip((*sizes, "size"), begins, strict=True))


class Jpeg2000:
    """Decodes code streams of one form on a device.

    Parameters
    ----------
    device : CudaDevice
        The device.
    form : Form
        The form.
    """

    def __init__(self, device: CudaDevice, form: Form) -> None:
        self.form = form
        self._device = device
        self._kernels = device.compile(*programs())
        header, geometry = form.header, form.geometry
        segments = any(one.style & (BYPASS | TERMINATE_ALL) for one in header.coding)
        most = header.layers + (3 * geometry.planes if segments else 0)
        self._records = len(geometry.blocks) * most
        self._tables = self._upload_tables()

    def _upload_tables(self) -> dict[str, int]:
        """Copy all that does not change from batch to batch."""
        geometry = self.form.geometry
        parts: dict[str, NDArray[Any]] = {
            "header": np.frombuffer(self.form.header.text, np.uint8),
            "packets": geometry.packets,
            "precincts": geometry.precincts,
            "bands": geometry.bands,
            "blocks": geometry.blocks,
            "used": geometry.used,
            "components": geometry.components,
            "tables": tables(),
        }
        begins = placed({name: part.nbytes for name, part in parts.items()})
        table = np.zeros(begins["size"], np.uint8)
        for name, part in parts.items():
            table[begins[name] : begins[name] + part.nbytes] = np.ascontiguousarray(part).view(
                np.uint8
            )
        address, self._memory = self._device.allocate(begins["size"])
        with self._device.active():
            stream = self._device.new_stream()
            self._device.upload(address, table, stream)
            stream.synchronize()
        return {name: address + begin for name, begin in begins.items()}

    def _step(self, tiles: int) -> int:
        """Return how many threads of a warp have a code block each."""
        return MANY_LANES if tiles * len(self.form.geometry.used) > MANY_BLOCKS else 1

    def layout(self, tiles: int) -> dict[str, int]:
        """Return what memory a batch of so many tiles is decoded in; see `placed`."""
        geometry, step = self.form.geometry, self._step(tiles)
        work = -(-tiles * len(geometry.used) // step) * step
        blocks = tiles * len(geometry.blocks)
        return placed(
            {
                "states": blocks * BLOCK_STATE.itemsize,
                "records": tiles * self._records * RECORD.itemsize,
                "nodes": tiles * 2 * geometry.nodes * 4,
                "buckets": BUCKETS * 4,
                "work": work * 4,
                "state": work * geometry.groups * 16,
                "refining": work * geometry.groups * 16,
                "planes": work * geometry.groups * 4 * geometry.planes,
                "coefficients": tiles * geometry.coefficients * 4,
                "status": tiles * 4,
            }
        )

    def decode(
        self,
        encoded: int,
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        targets: NDArray[np.int64],
        pixel_bytes: int,
        memory: int,
        status: NDArray[np.int32],
        stream: Stream,
    ) -> None:
        """Give a stream all that decodes a batch.

        Parameters
        ----------
        encoded : int
            Address of the code streams, in device memory.
        starts, lengths : ndarray of int64, shape (tiles,)
            Of each code stream.
        targets : ndarray of int64, shape (tiles,)
            Addresses of the tiles' first pixels.
        pixel_bytes : int
            How far apart pixels lie.
        memory : int
            Address of as much device memory as `layout` says.
        status : ndarray of int32, shape (tiles,)
            Memory that the device shares; is set to 0 for each tile that was decoded.
        stream : Stream
            Which does it.
        """
        tiles, geometry, header = len(starts), self.form.geometry, self.form.header
        tables = self._tables
        at = {name: memory + begin for name, begin in self.layout(tiles).items()}
        table = np.concatenate([starts, lengths, targets]).astype(np.uint64)
        held = self._device.table(table, stream)
        first = self._device.address(held)
        flags = status.ctypes.data
        count, step = len(geometry.blocks), self._step(tiles)

        def launch(name: str, threads: int, *arguments: Any, block: int = THREADS) -> None:
            grid = -(-threads // block)
            self._kernels.launch(name, grid, block, arguments, stream)

        def whole(*numbers: int) -> tuple[np.int32, ...]:
            return tuple(map(np.int32, numbers))

        def places(*addresses: int) -> tuple[np.uint64, ...]:
            return tuple(map(np.uint64, addresses))

        launch(
            "read_packets",
            tiles * WARP,
            *places(encoded, first, first + 8 * tiles),
            *whole(tiles),
            *places(tables["header"]),
            *whole(len(header.text)),
            *places(tables["packets"]),
            *whole(len(geometry.packets)),
            *places(tables["precincts"], tables["bands"], tables["blocks"]),
            *whole(count, header.style, geometry.nodes, self._records),
            *places(at["states"], at["records"], at["nodes"], at["status"], at["buckets"]),
            block=WARP,
        )
        used = (*places(tables["used"]), *whole(len(geometry.used)))
        items = tiles * len(geometry.used)
        all_blocks = (*places(at["states"]), *whole(tiles, count), *used)
        launch("count_work", items, *all_blocks, *places(at["buckets"]))
        launch("begin_buckets", THREADS, *places(at["buckets"]))
        launch("sort_work", items, *all_blocks, *places(at["buckets"], at["work"]))
        shape = whole(items, step, geometry.groups, geometry.planes)
        launch(
            "decode_blocks",
            -(-items // step) * WARP,
            *places(encoded, tables["blocks"]),
            *whole(count),
            *places(at["states"], at["records"]),
            *whole(self._records),
            *places(at["work"]),
            *shape,
            *places(tables["tables"], at["state"], at["refining"], at["planes"]),
            block=THREADS_OF_BLOCKS,
        )
        launch(
            "put_together",
            -(-items // step) * step * geometry.groups,
            *places(tables["blocks"]),
            *whole(count),
            *places(at["states"], at["work"]),
            *shape,
            *places(at["state"], at["planes"]),
            np.int64(geometry.coefficients),
            *places(at["coefficients"]),
        )
        for lift in geometry.lifts:
            at_once = max(1, min(lift.lines, WARP, LINE_SAMPLES // lift.length))
            jobs = tiles * lift.planes * -(-lift.lines // at_once)
            launch(
                "invert_wavelet",
                jobs * THREADS,
                *places(at["coefficients"] + 4 * lift.plane),
                *whole(tiles, lift.planes),
                *map(np.int64, (geometry.coefficients, lift.plane_size)),
                *whole(lift.pitch, lift.lines, lift.length, lift.low, lift.first, lift.down),
                *whole(at_once, lift.reversible),
            )
        height, width, *corner = geometry.edges
        launch(
            "finish_pixels",
            tiles * -(-height // ROWS) * THREADS,
            *places(at["coefficients"]),
            np.int64(geometry.coefficients),
            *places(tables["components"]),
            *whole(len(header.components), height, width, *corner),
            *whole(2 if self.form.ycbcr else int(header.transform)),
            *whole(self.form.dtype.itemsize, pixel_bytes),
            *places(first + 16 * tiles, at["status"], flags),
            *whole(ROWS),
        )
