"""Recipes for decoding levels on a GPU, and code streams for nvImageCodec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from napari_wsigpu.codecs.compressions import storage_name
from napari_wsigpu.codecs.jpeg import LONGEST_HEADER
from napari_wsigpu.codecs.jpeg2000 import is_transformed, may_be_ycbcr
from napari_wsigpu.gpu.jpeg.nvimagecodec_handles import ImageFormat
from napari_wsigpu.model.tags import (
    COMPRESSION,
    DEFLATE,
    FILLORDER,
    PREDICTOR,
    WAVELET,
    ZSTD,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from napari_wsigpu.codecs.decoder import EncodedBatch
    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.interfaces import Slots, Stream
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.gpu.device.workspace import Workspace
    from napari_wsigpu.model.layout import LevelLayout

# DRI and APP14 (Adobe). Decoders forget them at each SOI, so they can't be among shared tables.
FORGOTTEN = (b"\xff\xdd", b"\xff\xee")
# Bytes of SOC and SIZ (T.800, A.5.1) up to the components.
SIZE_HEADER, MOST_COMPONENTS = 42, 3
# Sample types and interleaved channels of JPEG 2000 that our kernels decode.
KERNEL_TYPES, MOST_INTERLEAVED = ("uint8", "uint16", "int16"), 4
# The same for nvImageCodec: sample types, and its sample format and color spec for each number of
# channels.
LIBRARY_TYPES = ("uint8", "uint16")
COLORS = {1: ("I_Y", "GRAY"), 3: ("I_RGB", "SRGB")}


class Recipe(NamedTuple):
    """How a GPU decodes the tiles of a level.

    Attributes
    ----------
    kind : {"jpeg", "jpeg2000", "deflate", "LZW", "PackBits", "zstd"}
        Format of the tiles.
    sample_format, color_spec : str
        nvImageCodec's names for the output that leaves the stored samples unchanged; empty if only
        our kernels can decode the tiles.
    convert : bool
        Whether the decoded samples are YCbCr. JPEG 2000 tiles for which `is_transformed` is true
        are still RGB.
    """

    kind: str
    sample_format: str
    color_spec: str
    convert: bool = False

    @property
    def by_library(self) -> bool:
        """Whether nvImageCodec can decode the tiles."""
        return bool(self.sample_format)


# Algorithms of `gpu.compressed`, and the predictors that its kernels undo for each kind of samples.
COMPRESSED: dict[int, str] = {
    COMPRESSION.LZW: "LZW",
    COMPRESSION.PACKBITS: "PackBits",
    **dict.fromkeys(DEFLATE, "deflate"),
    **dict.fromkeys(ZSTD, "zstd"),
}
PREDICTORS = {
    "u": (PREDICTOR.NONE, PREDICTOR.HORIZONTAL),
    "i": (PREDICTOR.NONE, PREDICTOR.HORIZONTAL),
    "f": (PREDICTOR.NONE, PREDICTOR.FLOATINGPOINT),
}

# If YCbCr is requested, nvImageCodec never converts the stored components, not even RGB.
JPEG_RECIPES = {
    "gray": Recipe("jpeg", "I_Y", "GRAY"),
    "stored": Recipe("jpeg", "P_YUV", "SYCC"),
    "ycbcr": Recipe("jpeg", "P_YUV", "SYCC", convert=True),
}


# Weak keys, because the tile tables of a level take megabytes and must be freed with the slide.
_recipes: WeakKeyDictionary[LevelLayout, Recipe | str] = WeakKeyDictionary()


def recipe_for(level: LevelLayout) -> Recipe | str:
    """Return how a GPU decodes the tiles of a level, or the reason why it cannot."""
    found = _recipes.get(level)
    if found is None:
        found = _recipes[level] = _recipe(level)
    return found


def _recipe(level: LevelLayout) -> Recipe | str:
    encoding = level.encoding
    name = storage_name(level)
    if level.library is not None:
        return "this plugin has no decoder for its format"
    if level.array is None and encoding.compression == COMPRESSION.NONE:
        return "its tiles are uncompressed"
    known = level.array is None and encoding.compression in (
        COMPRESSION.JPEG,
        *WAVELET,
        *COMPRESSED,
    )
    if not known:
        return f"{name} is decoded on the CPU only"
    if encoding.jpeg_scale > 1:
        return "the JPEG is decoded at a fraction of its size"
    if encoding.table is not None:
        return "its pixels are palette indices, or share bytes"
    if encoding.kept_sample is not None:
        return "only one of its samples is shown"
    if level.grid.sizes is not None:
        return "its tiles are of different sizes"
    if encoding.compression in WAVELET:
        return _recipe_jpeg2000(level, name)
    if encoding.compression in COMPRESSED:
        return _recipe_compressed(level, name)
    if level.grid.planes > 1 and encoding.jpeg_header is None:
        return "its planes are stored separately"
    if level.channels not in (1, 3):
        return f"{name} of {level.channels} channels is decoded on the CPU only"
    if encoding.dtype != "uint8":
        return f"JPEG of {encoding.dtype} is decoded on the CPU only"
    if encoding.jpeg_color not in JPEG_RECIPES:
        return f"JPEG with these colors ({encoding.jpeg_color}) is decoded on the CPU only"
    tables = encoding.jpeg_tables[0] or b""
    if any(marker in tables for marker in FORGOTTEN):
        return "its JPEG tables contain segments that decoders reset before each tile"
    if len(tables) > LONGEST_HEADER:
        return "its JPEG tables are too long"
    found = JPEG_RECIPES[encoding.jpeg_color]
    if (level.channels == 1) != (found.sample_format == "I_Y"):
        return "its JPEG colors contradict its channels"
    return found


def _recipe_jpeg2000(level: LevelLayout, name: str) -> Recipe | str:
    encoding = level.encoding
    if encoding.dtype not in KERNEL_TYPES:
        return f"JPEG 2000 of {encoding.dtype} is decoded on the CPU only"
    if encoding.samples > MOST_INTERLEAVED:
        return f"{name} of {encoding.samples} channels is decoded on the CPU only"
    ycbcr = may_be_ycbcr(encoding)
    if ycbcr and encoding.dtype != "uint8":
        return "YCbCr in JPEG 2000 of more than 8 bits is decoded on the CPU only"
    by_library = encoding.dtype in LIBRARY_TYPES and level.grid.planes == 1
    colors = COLORS.get(level.channels, ("", "")) if by_library else ("", "")
    return Recipe("jpeg2000", *colors, convert=ycbcr)


def _recipe_compressed(level: LevelLayout, name: str) -> Recipe | str:
    encoding, dtype = level.encoding, level.dtype
    if level.grid.planes > 1 or encoding.samples != level.channels:
        return "its planes are stored separately"
    if encoding.bits < 8 or encoding.blue_first or encoding.fill_order != FILLORDER.MSB2LSB:
        return "its samples share bytes, or are in another order"
    if encoding.predictor not in PREDICTORS.get(dtype.kind, ()):
        return f"{name} of {encoding.dtype} with this predictor is decoded on the CPU only"
    if encoding.predictor == PREDICTOR.FLOATINGPOINT:
        from napari_wsigpu.gpu.compressed.compressed_engine import MOST_ROW

        row = level.grid.tile_width * encoding.samples * dtype.itemsize
        if row > MOST_ROW:
            return f"rows of {row >> 10} KiB with this predictor are decoded on the CPU only"
    return Recipe(COMPRESSED[encoding.compression], "", "")


class PreparedBatch(ABC):
    """Code streams of a batch, and the steps that turn them into the pixels of tiles.

    The steps are called in the order `set_targets`, `decode`, `finish`, `doubtful`.

    Attributes
    ----------
    kind : str
        Format of the tiles: `Recipe.kind`.
    work : Workspace
        Owner of the handles and memory; lent to the batch until its stream is done.
    groups : list of list of int
        Indices of the tiles in each code stream. The CPU decodes tiles that are in none.
    joins : bool
        Whether code streams contain several tiles, so that a damaged tile can spoil its neighbors.
    """

    kind: str
    joins: ClassVar[bool] = False
    work: Workspace
    groups: list[list[int]]

    @abstractmethod
    def set_targets(self, addresses: Sequence[int], stream: Stream) -> None:
        """Set the device memory to which each code stream is decoded.

        Parameters
        ----------
        addresses : sequence of int
            Device addresses of the batch's tiles.
        stream : Stream
            Stream in which the decoded samples become valid.
        """

    def decode(self, worker: DecodeWorker) -> list[bool]:
        """Decode; return for each code stream whether it worked. The caller holds `decoding`."""
        return worker.decode(self.kind, self.work.streams.used, self.work.images.used)

    def engine(self, worker: DecodeWorker) -> str:
        """Return the name of the decoder: a key of `gpu.device.verify.TOLERANCES`."""
        return worker.engine(self.kind) or ""

    @abstractmethod
    def finish(self, worked: list[bool], slots: Slots, device: CudaDevice, stream: Stream) -> None:
        """Submit the work that turns decoded samples into the pixels of tiles.

        Parameters
        ----------
        worked : list of bool
            Result of `decode`.
        slots : Slots
            Device memory for the batch's tiles.
        device : CudaDevice
            Device of the slots.
        stream : Stream
            Stream of `set_targets`.
        """

    def doubtful(self, decoded: Sequence[int]) -> list[int]:
        """Return the decoded tiles that may be wrong, once the stream is synchronized."""
        return []


class Jpeg2000Streams:
    """Passes each JPEG 2000 tile to nvImageCodec as a separate code stream.

    The size in a tile's header is compared with the level first. nvImageCodec would refuse a whole
    batch because of a tile that is too large, and would not set all pixels if one is too small.

    Parameters
    ----------
    level : LevelLayout
        Level of the tiles.
    recipe : Recipe
        How its tiles are decoded.
    """

    def __init__(self, level: LevelLayout, recipe: Recipe) -> None:
        grid = level.grid
        self._shape = (grid.tile_height, grid.tile_width, level.channels)
        self._bits = 8 * level.dtype.itemsize
        self._image = ImageFormat(
            (self._shape,), level.encoding.dtype, recipe.sample_format, recipe.color_spec
        )
        self._convert = recipe.convert

    def prepare(self, batch: EncodedBatch, count: int, work: Workspace) -> PreparedBatch:
        """Make code streams of the first `count` tiles; they stay in the batch's buffer."""
        return self.prepare_these(batch, range(count), work)

    def prepare_these(
        self, batch: EncodedBatch, indices: Iterable[int], work: Workspace
    ) -> PreparedBatch:
        """Make code streams of the tiles with these indices; tiles that do not fit are left out."""
        accepted, converted = [], set[int]()
        starts, lengths = batch.starts[0].tolist(), batch.lengths[0].tolist()
        for index in indices:
            start, length = starts[index], lengths[index]
            head = bytes(batch.view[start : start + min(length, SIZE_HEADER + 3 * MOST_COMPONENTS)])
            if self._fits(head) and work.streams.add(batch.address + start, length):
                accepted.append(index)
                if self._convert and not is_transformed(batch.view[start : start + length]):
                    converted.add(index)
        return _SingleTiles(accepted, converted, self._image, work)

    def _fits(self, head: bytes) -> bool:
        """Return whether SIZ (T.800, A.5.1) describes one image of the level's tile size."""
        if not head.startswith(b"\xff\x4f\xff\x51") or len(head) < SIZE_HEADER:
            return False
        # Xsiz, Ysiz, XOsiz, YOsiz, XTsiz and YTsiz, all 32 bits wide.
        right, lower, left, upper, tile_width, tile_height = (
            int.from_bytes(head[start : start + 4], "big") for start in (8, 12, 16, 20, 24, 28)
        )
        components = int.from_bytes(head[40:42], "big")
        end = SIZE_HEADER + 3 * components
        # Ssiz, XRsiz and YRsiz of each component: unsigned samples without subsampling.
        depths = {head[start : start + 3] for start in range(SIZE_HEADER, end, 3)}
        return (
            # nvImageCodec divides by the size of the stream's own tiles without checking it.
            tile_width > 0
            and tile_height > 0
            and (lower - upper, right - left, components) == self._shape
            and len(head) >= end
            and depths == {bytes((self._bits - 1, 1, 1))}
        )


class _SingleTiles(PreparedBatch):
    kind = "jpeg2000"

    def __init__(
        self, tiles: list[int], converted: set[int], image: ImageFormat, work: Workspace
    ) -> None:
        self.groups = [[index] for index in tiles]
        self.work, self._image, self._converted = work, image, converted

    def set_targets(self, addresses: Sequence[int], stream: Stream) -> None:
        for (index,) in self.groups:
            self.work.images.add(addresses[index], self._image, stream.ptr)

    def finish(self, worked: list[bool], slots: Slots, device: CudaDevice, stream: Stream) -> None:
        if self._converted:
            good = {index for (index,), good in zip(self.groups, worked, strict=True) if good}
            indices = sorted(good & self._converted)
            device.ycbcr_to_rgb(slots.addresses[indices], slots.tile, stream)
