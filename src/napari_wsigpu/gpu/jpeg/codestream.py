"""Tiles as code streams for nvImageCodec: which it can take, how, and where their pixels go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from napari_wsigpu.codecs.jpeg import LONGEST_HEADER
from napari_wsigpu.codecs.table import storage_name
from napari_wsigpu.gpu.jpeg.library_handles import ImageFormat
from napari_wsigpu.model.tags import COMPRESSION, JPEG_2000

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from napari_wsigpu.codecs.decoder import EncodedBatch
    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.device import Slots, Stream
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.gpu.device.workspace import Workspace
    from napari_wsigpu.model.layout import LevelLayout

FORGOTTEN = (b"\xff\xdd", b"\xff\xee")
SIZE_HEADER, MOST_COMPONENTS = 42, 3
# Of JPEG 2000: what our kernels take, and what nvImageCodec is asked for.
KERNEL_TYPES, MOST_INTERLEAVED = ("uint8", "uint16", "int16"), 4
LIBRARY_TYPES = ("uint8", "uint16")
COLORS = {1: ("I_Y", "GRAY"), 3: ("I_RGB", "SRGB")}


class Recipe(NamedTuple):
    """How a GPU has to decode the tiles of a level.

    Attributes
    ----------
    kind : {"jpeg", "jpeg2000"}
        The decoder.
    sample_format, color_spec : str
        Names of what to ask nvImageCodec for, so that stored samples come out as they are meant;
        empty if only our kernels decode them.
    convert : bool
        Whether the samples are YCbCr afterwards.
    """

    kind: str
    sample_format: str
    color_spec: str
    convert: bool = False

    @property
    def by_library(self) -> bool:
        """Whether nvImageCodec can decode them."""
        return bool(self.sample_format)


# Asked for YCbCr, nvImageCodec leaves the stored components alone, whatever they are.
JPEG_RECIPES = {
    "gray": Recipe("jpeg", "I_Y", "GRAY"),
    "stored": Recipe("jpeg", "P_YUV", "SYCC"),
    "ycbcr": Recipe("jpeg", "P_YUV", "SYCC", convert=True),
}


# A level's tables of tiles take megabytes: none is kept longer than its slide.
_recipes: WeakKeyDictionary[LevelLayout, Recipe | str] = WeakKeyDictionary()


def recipe(level: LevelLayout) -> Recipe | str:
    """Return how a GPU decodes tiles of a level, or why it can't."""
    found = _recipes.get(level)
    if found is None:
        found = _recipes[level] = _recipe(level)
    return found


def _recipe(level: LevelLayout) -> Recipe | str:
    encoding = level.encoding
    name = storage_name(level)
    if level.library is not None:
        return "it reads what has no decoder here"
    if level.array is None and encoding.compression == COMPRESSION.NONE:
        return "its tiles are uncompressed"
    if encoding.compression not in (COMPRESSION.JPEG, *JPEG_2000):
        return f"{name} is decoded on the CPU only"
    if encoding.jpeg_header is not None:
        return "its tiles are parts of one large JPEG"
    if encoding.table is not None:
        return "its pixels are numbers of a palette's colours, or share bytes"
    if level.grid.sizes is not None:
        return "its tiles are of different sizes"
    if encoding.compression in JPEG_2000:
        return _recipe_jpeg2000(level, name)
    if level.grid.planes > 1:
        return "its planes are stored separately"
    if level.channels not in (1, 3):
        return f"{name} of {level.channels} channels is decoded on the CPU only"
    if encoding.dtype != "uint8":
        return f"JPEG of {encoding.dtype} is decoded on the CPU only"
    if encoding.jpeg_color not in JPEG_RECIPES:
        return f"JPEG of these colours ({encoding.jpeg_color}) is decoded on the CPU only"
    tables = encoding.jpeg_tables[0] or b""
    if any(marker in tables for marker in FORGOTTEN):
        return "its JPEG tables hold what a decoder forgets before each tile"
    if len(tables) > LONGEST_HEADER:
        return "its JPEG tables are too long"
    found = JPEG_RECIPES[encoding.jpeg_color]
    if (level.channels == 1) != (found.sample_format == "I_Y"):
        return "its JPEG colours contradict its channels"
    return found


def _recipe_jpeg2000(level: LevelLayout, name: str) -> Recipe | str:
    encoding = level.encoding
    if encoding.dtype not in KERNEL_TYPES:
        return f"JPEG 2000 of {encoding.dtype} is decoded on the CPU only"
    if encoding.samples > MOST_INTERLEAVED:
        return f"{name} of {encoding.samples} channels is decoded on the CPU only"
    ycbcr = encoding.compression == COMPRESSION.APERIO_JP2000_YCBC and encoding.samples == 3
    if ycbcr and encoding.dtype != "uint8":
        return "YCbCr in JPEG 2000 of more than 8 bits is decoded on the CPU only"
    by_library = encoding.dtype in LIBRARY_TYPES and level.grid.planes == 1
    colors = COLORS.get(level.channels, ("", "")) if by_library else ("", "")
    return Recipe("jpeg2000", *colors, convert=ycbcr)


class Prepared(ABC):
    """Code streams of a batch's tiles, and the way of their pixels to the tiles' places.

    Attributes
    ----------
    kind : {"jpeg", "jpeg2000"}
        The decoder.
    work : Workspace
        What they lie in.
    groups : list of list of int
        Indices of the tiles in each code stream. Tiles that are in none are for the CPU.
    joins : bool
        Whether tiles are joined, so that one can lead the decoder astray for others.
    """

    kind: ClassVar[str]
    joins: ClassVar[bool] = False
    work: Workspace
    groups: list[list[int]]

    @abstractmethod
    def describe(self, addresses: Sequence[int], stream: Stream) -> None:
        """Say where each stream has to be decoded to.

        Parameters
        ----------
        addresses : sequence of int
            Places of the batch's tiles.
        stream : Stream
            Which has the pixels.
        """

    def decode(self, worker: DecodeWorker) -> list[bool]:
        """Decode, after `describe`; say of each code stream whether that worked."""
        return worker.decode(self.kind, self.work.streams.used, self.work.images.used)

    def engine(self, worker: DecodeWorker) -> str:
        """Return the name of what decodes: a key of `gpu.device.verify.TOLERANCES`."""
        return worker.engine(self.kind) or ""

    @abstractmethod
    def finish(self, worked: list[bool], slots: Slots, device: CudaDevice, stream: Stream) -> None:
        """Give the stream what makes decoded samples the tiles' pixels.

        Parameters
        ----------
        worked : list of bool
            Whether each code stream was decoded.
        slots : Slots
            Where the pixels of the batch's tiles are to lie.
        device, stream
            What does it.
        """

    def doubtful(self, decoded: Sequence[int]) -> list[int]:
        """Return tiles that may be wrong, of those that were decoded; after `finish` is done."""
        return []


class Jpeg2000Streams:
    """Makes a code stream of each JPEG 2000 tile, which decodes to the tile's place.

    A stream's header is compared with the level before a decoder sees it: nvImageCodec would
    refuse a whole batch for one tile that is too large, and fill in a smaller one in part.

    Parameters
    ----------
    level : LevelLayout
        The level.
    how : Recipe
        Its recipe.
    """

    def __init__(self, level: LevelLayout, how: Recipe) -> None:
        grid = level.grid
        self._shape = (grid.tile_height, grid.tile_width, level.channels)
        self._bits = 8 * level.dtype.itemsize
        self._image = ImageFormat(
            (self._shape,), level.encoding.dtype, how.sample_format, how.color_spec
        )
        self._convert = how.convert

    def prepare(self, batch: EncodedBatch, count: int, work: Workspace) -> Prepared:
        """Make code streams of the first `count` tiles of a batch, in its buffer."""
        return self.prepare_these(batch, range(count), work)

    def prepare_these(
        self, batch: EncodedBatch, indices: Iterable[int], work: Workspace
    ) -> Prepared:
        """Make code streams of some tiles of a batch."""
        taken = []
        starts, lengths = batch.starts[0].tolist(), batch.lengths[0].tolist()
        for index in indices:
            start, length = starts[index], lengths[index]
            head = bytes(batch.view[start : start + min(length, SIZE_HEADER + 3 * MOST_COMPONENTS)])
            if self._fits(head) and work.streams.add(batch.address + start, length):
                taken.append(index)
        return _SingleTiles(taken, self._image, work, convert=self._convert)

    def _fits(self, head: bytes) -> bool:
        """Whether the size header is as the level says."""
        if not head.startswith(b"\xff\x4f\xff\x51") or len(head) < SIZE_HEADER:
            return False
        right, lower, left, upper, tile_width, tile_height = (
            int.from_bytes(head[place : place + 4], "big") for place in (8, 12, 16, 20, 24, 28)
        )
        components = int.from_bytes(head[40:42], "big")
        end = SIZE_HEADER + 3 * components
        depths = {head[place : place + 3] for place in range(SIZE_HEADER, end, 3)}
        return (
            # nvImageCodec divides by the extent of the stream's own tiles.
            tile_width > 0
            and tile_height > 0
            and (lower - upper, right - left, components) == self._shape
            and len(head) >= end
            and depths == {bytes((self._bits - 1, 1, 1))}
        )


class _SingleTiles(Prepared):
    kind = "jpeg2000"

    def __init__(
        self, tiles: list[int], image: ImageFormat, work: Workspace, *, convert: bool
    ) -> None:
        self.groups = [[index] for index in tiles]
        self.work, self._image, self._convert = work, image, convert

    def describe(self, addresses: Sequence[int], stream: Stream) -> None:
        for (index,) in self.groups:
            self.work.images.add(addresses[index], self._image, stream.ptr)

    def finish(self, worked: list[bool], slots: Slots, device: CudaDevice, stream: Stream) -> None:
        if self._convert:
            indices = [index for (index,), good in zip(self.groups, worked, strict=True) if good]
            device.ycbcr_to_rgb(slots.addresses[indices], slots.tile, stream)
