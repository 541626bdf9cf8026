"""`FormDecoder`: launches our kernels for JPEG 2000 code streams with the same headers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib import resources
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.gpu.device.kernel_tables import preamble
from napari_wsigpu.gpu.jpeg2000.geometry import plan
from napari_wsigpu.gpu.jpeg2000.jpeg2000_tables import (
    BLOCK_STATE,
    BUCKETS,
    BYPASS,
    CONSTANTS,
    LIFT,
    PATCH_HEIGHT,
    PATCH_WIDTH,
    RECORD,
    STREAMS,
    STRUCTURES,
    TERMINATE_ALL,
    THREADS,
    THREADS_OF_BLOCKS,
    THREADS_OF_MAGNITUDES,
    tables,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.interfaces import Stream
    from napari_wsigpu.gpu.jpeg2000.geometry import Geometry
    from napari_wsigpu.gpu.jpeg2000.jpeg2000_header import Header
    from napari_wsigpu.model.arrays import Array, DType, Integers

# Source files, which are compiled in parallel as separate programs.
PROGRAMS = (
    ("packets.cu", "blocks.cu"),
    ("high_throughput.cu",),
    ("wavelet.cu",),
    ("pixels.cu",),
)
# A warp executes the paths of all its threads, so code blocks share a warp only if there are more
# than enough to keep the device busy.
WARP, MANY_BLOCKS, MANY_LANES = 32, 49152, 2
# With as many code blocks in a tile, it takes long to read the packet headers.
LONG_TO_READ = 256
# Rows of a tile for each block of threads of `finish_pixels`.
ROWS = 8
ALIGNED = 256  # bytes


@dataclass(frozen=True)
class Form:
    """Headers that all code streams of a batch share, and the geometry that follows from them.

    Attributes
    ----------
    header : Header
        Contents of the headers.
    geometry : Geometry
        Geometry of a tile, derived from `header`.
    """

    header: Header
    geometry: Geometry = field(compare=False)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the pixels: (height, width, components)."""
        return *self.geometry.edges[:2], len(self.header.components)

    @cached_property
    def ycbcr(self) -> bool:
        """Whether the components are YCbCr with subsampled chroma, to be converted to RGB."""
        return any(one.across > 1 or one.down > 1 for one in self.header.components)

    @cached_property
    def pixel_bytes(self) -> int:
        """Bytes of a pixel with all components."""
        return len(self.header.components) * self.dtype.itemsize

    @cached_property
    def dtype(self) -> DType:
        """Type of the pixels."""
        first = self.header.components[0]
        size = 1 if first.bits <= 8 else 2
        return np.dtype(f"{'i' if first.signed else 'u'}{size}")


@lru_cache(maxsize=64)
def form_of(header: Header) -> Form | str:
    """Return the form of code streams with these headers, or why it cannot be decoded here."""
    geometry = plan(header)
    return geometry if isinstance(geometry, str) else Form(header, geometry)


@lru_cache(maxsize=1)
def programs() -> tuple[str, ...]:
    """Return the CUDA sources of the kernels, with constants and structures."""
    folder = resources.files("napari_wsigpu.gpu.jpeg2000")
    start = preamble(CONSTANTS, STRUCTURES) + folder.joinpath("shared.cu").read_text("utf-8")
    return tuple(
        start + "".join(folder.joinpath(name).read_text("utf-8") for name in names)
        for names in PROGRAMS
    )


def offsets_of(sizes: Mapping[str, int]) -> dict[str, int]:
    """Lay out parts of device memory in order; return their offsets, and the total as "size"."""
    offsets = accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes.values()), initial=0)
    return dict(zip((*sizes, "size"), offsets, strict=True))


def _patches(lifts: NDArray[np.void]) -> list[int]:
    """Return the number of patches of a tile that each step of the inverse wavelet transforms."""
    across = -(-(lifts["left"] + lifts["width"]) // PATCH_WIDTH)
    down = -(-(lifts["upper"] + lifts["height"]) // PATCH_HEIGHT)
    patches: list[int] = (across * down * lifts["planes"]).tolist()
    return patches


class FormDecoder:
    """Decodes code streams of one form on a device.

    It owns device memory with the form's tables, and must be kept until all streams that decode
    with it are synchronized.

    Parameters
    ----------
    device : CudaDevice
        Device to decode on.
    form : Form
        Form of the code streams.
    """

    def __init__(self, device: CudaDevice, form: Form) -> None:
        self.form = form
        self._device = device
        self._kernels = device.compile(*programs())
        header, geometry = form.header, form.geometry
        # With these styles, a coding pass can end a codeword segment (T.800, D.4.2 and D.6).
        segments = any(one.style & (BYPASS | TERMINATE_ALL) for one in header.coding)
        most = header.layers + (3 * geometry.planes if segments else 0) + header.fast
        self._records = len(geometry.blocks) * most
        # Quads of a code block, with an even number in each row.
        width, height = geometry.blocks["width"], geometry.blocks["height"]
        self._quads = int(((width + 3) // 4 * 2 * ((height + 1) // 2)).max())
        self._patches = _patches(geometry.lifts)
        self._layouts: dict[int, dict[str, int]] = {}
        self._tables = self._upload_tables()

    def _upload_tables(self) -> dict[str, np.uint64]:
        """Copy the form's tables to the device; return the address of each."""
        geometry = self.form.geometry
        parts: dict[str, Array] = {
            "header": np.frombuffer(self.form.header.text, np.uint8),
            "packets": geometry.packets,
            "bands": geometry.bands,
            "blocks": geometry.blocks,
            "components": geometry.components,
            "lifts": geometry.lifts,
            "tables": tables(),
        }
        offsets = offsets_of({name: part.nbytes for name, part in parts.items()})
        table = np.zeros(offsets["size"], np.uint8)
        for name, part in parts.items():
            table[offsets[name] : offsets[name] + part.nbytes] = np.ascontiguousarray(part).view(
                np.uint8
            )
        address, self._memory = self._device.allocate(offsets["size"])
        with self._device.active():
            stream = self._device.new_stream()
            self._device.upload(address, table, stream)
            # `table` is freed on return, and batches may use any stream.
            stream.synchronize()
        return {name: np.uint64(address + offset) for name, offset in offsets.items()}

    def _step(self, tiles: int) -> int:
        """Return how many threads of a warp decode a code block each; a power of 2."""
        return MANY_LANES if tiles * len(self.form.geometry.blocks) > MANY_BLOCKS else 1

    def sizes(self, tiles: int) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Return the sizes of all parts of the device memory for decoding a batch, in bytes.

        The parts in the second dictionary are no longer used when those in the third are.
        """
        geometry, step = self.form.geometry, self._step(tiles)
        blocks = tiles * len(geometry.blocks)
        work = -(-blocks // step) * step
        whole = {
            "states": blocks * BLOCK_STATE.itemsize,
            "records": tiles * self._records * RECORD.itemsize,
            "nodes": tiles * 2 * geometry.nodes * 4,
            "buckets": BUCKETS * 4,
            "work": work * 4,
            "status": tiles * 4,
            "coefficients": tiles * geometry.coefficients * 4,
        }
        groups = work * geometry.groups
        planes = {
            "state": groups * 16,
            "refining": groups * 8,
            "planes": groups * 4 * geometry.planes,
        }
        quads = {"quads": blocks * self._quads * 4}
        lifted = {
            "lifted": tiles * geometry.coefficients * 4,
            "halves": tiles * geometry.halves * 4,
        }
        return whole, quads if self.form.header.fast else planes, lifted

    def layout(self, tiles: int) -> dict[str, int]:
        """Lay out the device memory for decoding a batch of `tiles` tiles; see `offsets_of`."""
        if tiles in self._layouts:
            return self._layouts[tiles]
        whole, *either = map(offsets_of, self.sizes(tiles))
        size = whole["size"]
        for part in either:
            whole |= {name: size + offset for name, offset in part.items() if name != "size"}
        whole["size"] += max(part["size"] for part in either)
        return self._layouts.setdefault(tiles, whole)

    def decode(
        self,
        encoded: int,
        starts: Integers,
        lengths: Integers,
        targets: Integers,
        pixel_bytes: int,
        memory: int,
        status: NDArray[np.int32],
        stream: Stream,
    ) -> None:
        """Submit all kernels that decode a batch to a stream.

        Parameters
        ----------
        encoded : int
            Device address of the code streams.
        starts, lengths : ndarray of int64, shape (tiles,)
            Offset and length of each code stream, in bytes.
        targets : ndarray of int64, shape (tiles,)
            Device address of each tile's first sample.
        pixel_bytes : int
            Bytes from one pixel to the next.
        memory : int
            Device address of memory of the size in `layout`; nothing else may use it until the
            stream is synchronized.
        status : ndarray of int32, shape (tiles,)
            Page-locked memory, in which a kernel sets 0 for each tile that was decoded.
        stream : Stream
            Stream to which the kernels are submitted.
        """
        tiles, geometry, header = len(starts), self.form.geometry, self.form.header
        tables = self._tables
        at = {name: np.uint64(memory + offset) for name, offset in self.layout(tiles).items()}
        table = np.concatenate([starts, lengths, targets]).astype(np.uint64)
        # Freed on return, but the pool reuses the memory only for later work on this stream.
        held = self._device.table(table, stream)
        source, base, flags = map(
            np.uint64, (encoded, self._device.address(held), status.ctypes.data)
        )
        size = np.int64(geometry.coefficients)
        count, step = len(geometry.blocks), self._step(tiles)

        def launch(
            name: str,
            threads: int,
            *arguments: int | np.generic | NDArray[np.void],
            block: int = THREADS,
        ) -> None:
            # Kernels declare sizes as `int`; addresses are NumPy scalars already.
            typed = (np.int32(each) if isinstance(each, int) else each for each in arguments)
            self._kernels.launch(name, -(-threads // block), block, tuple(typed), stream)

        items = tiles * count
        streams = np.array(
            (
                *(source, base, base + 8 * tiles, tables["header"], tables["packets"]),
                *(tables["bands"], at["states"], at["records"], at["nodes"], at["status"]),
                *(tiles, len(header.text), len(geometry.packets), len(geometry.bands), count),
                *(header.style, header.layers, geometry.nodes, self._records, 0),
            ),
            STREAMS,
        )
        nodes = tiles * 2 * geometry.nodes
        launch(
            "clear_batch",
            items,
            *(at["states"], at["work"], items, at["nodes"], nodes, at["buckets"]),
        )
        queued = not header.fast and step == 1 and count >= LONG_TO_READ
        if not queued:
            launch("read_packets", tiles * WARP, streams, block=WARP)
            # Sort code blocks by the amount of work, so that the code blocks of a warp take
            # equally long.
            launch("count_work", items, at["states"], items, at["buckets"])
            launch("start_buckets", THREADS, at["buckets"])
            launch("sort_work", items, at["states"], items, at["buckets"], at["work"])
        states = at["states"], at["records"], self._records, at["work"], items
        if header.fast:
            launch(
                "read_quads",
                items,
                *(source, tables["blocks"], count, *states, tables["tables"], self._quads),
                *(at["quads"], at["status"]),
                block=THREADS_OF_BLOCKS,
            )
            launch(
                "read_samples",
                items * THREADS_OF_MAGNITUDES,
                *(source, tables["blocks"], count, *states, self._quads, at["quads"]),
                *(size, at["coefficients"], at["status"]),
                block=THREADS_OF_MAGNITUDES,
            )
        else:
            shape = (step, geometry.groups, geometry.planes)
            launch(
                "decode_blocks",
                -(-items // step) * WARP + queued * tiles * THREADS_OF_BLOCKS,
                *(streams, tables["blocks"], at["work"], items),
                at["buckets"] if queued else np.uint64(0),
                *(*shape, tables["tables"], at["state"], at["refining"], at["planes"]),
                block=THREADS_OF_BLOCKS,
            )
            launch(
                "assemble_coefficients",
                -(-items // step) * step * geometry.groups,
                *(tables["blocks"], count, at["states"], at["work"], items, *shape, at["state"]),
                *(at["planes"], size, at["coefficients"]),
            )
        # Lowest resolution first.
        for index, count in enumerate(self._patches):
            launch(
                "invert_wavelet",
                tiles * count * THREADS,
                *(tables["lifts"] + np.uint64(index * LIFT.itemsize), at["coefficients"]),
                *(at["lifted"], at["halves"], tiles, size, np.int64(geometry.halves)),
            )
        height, width, *corner = geometry.edges
        launch(
            "finish_pixels",
            tiles * -(-height // ROWS) * THREADS,
            *(at["coefficients"], at["lifted"], size, tables["components"]),
            len(header.components),
            *(height, width, *corner, 2 if self.form.ycbcr else int(header.transform)),
            *(self.form.dtype.itemsize, pixel_bytes, base + 16 * tiles, at["status"], flags, ROWS),
        )
