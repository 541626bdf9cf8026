"""What a slide's file says, as immutable, picklable descriptions: no pixels, no handles.

Sizes are in pixels, offsets and counts in bytes. A *tile* is the unit in which a level's
pixels are encoded; a TIFF strip is a tile as wide as its level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from napari_wsigpu.model.geometry import Rect, Rects
from napari_wsigpu.model.tags import PHOTOMETRIC

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import stat_result

    from numpy.typing import NDArray

JpegColor = Literal["gray", "stored", "ycbcr", "auto", "cmyk"]
# The axes of a Zarr array that lie in its tiles, in their order.
SHOWN = "yxc"
DIGEST = "sha256:"
ZARR_DOCUMENTS = frozenset({"zarr.json", ".zarray", ".zattrs", ".zgroup"})
NO_STARTS: Mapping[str, float] = {}
COMPUTED_TILE = 512
LARGEST_COMPUTED_TILE, LARGEST_COMPUTED_BYTES = 2048, 64 << 20
LARGEST_STEP = 2.1


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the bytes of one level's tiles become samples.

    Attributes
    ----------
    compression, photometric, predictor, fill_order : int
        Values of the TIFF tags of those names.
    byte_order : {"<", ">"}
        Byte order of uncompressed samples.
    dtype : str
        Numpy name of a decoded sample, for example ``"uint8"``.
    samples : int
        Interleaved samples a pixel in one encoded segment (1 where channels are separate).
    jpeg_color : str
        Colours that a JPEG segment stores and that its decoder returns.
    jpeg_tables : tuple of (bytes or None)
        Shared JPEG tables, one entry a plane.
    jpeg_header : bytes or None
        Header that turns a restart interval of a large JPEG into a JPEG of its own. The planes of
        a tile are such intervals then, one below the other.
    lerc_wrapping : int
        Compression around LERC: 0 none, 1 deflate, 2 zstd.
    jpeg_scale : int
        How many times smaller than it is stored libjpeg decodes a JPEG: 1, 2, 4 or 8.
    blue_first : bool
        Whether bytes of samples hold them in the order blue, green, red.
    bits : int
        Of a sample: 8 or more as `dtype` says, or 1, 2 or 4, several of them in a byte.
    table : bytes or None
        What each stored value is shown as: one byte of gray, or three of a colour.
    """

    compression: int
    photometric: int
    predictor: int
    fill_order: int
    byte_order: Literal["<", ">"]
    dtype: str
    samples: int
    jpeg_color: JpegColor = "auto"
    jpeg_tables: tuple[bytes | None, ...] = (None,)
    jpeg_header: bytes | None = None
    lerc_wrapping: int = 0
    jpeg_scale: int = 1
    blue_first: bool = False
    bits: int = 8
    table: bytes | None = None

    @property
    def white_is_zero(self) -> bool:
        """Whether the least value of gray pixels is white, not black."""
        return self.photometric == PHOTOMETRIC.MINISWHITE


@dataclass(frozen=True, slots=True, eq=False)
class TileGrid:
    """Where a level's tiles lie in the file.

    Attributes
    ----------
    tile_height, tile_width : int
        Size of one tile.
    offsets, byte_counts : ndarray of int64, shape (planes, rows, columns)
        Place of each encoded segment; a byte count of 0 says that it is missing. Planes are
        channels, or restart intervals where the encoding has a `jpeg_header`.
    sizes : ndarray of int64, shape (2, rows, columns), or None
        Height and width of what is stored of each tile, where these differ.
    """

    tile_height: int
    tile_width: int
    offsets: NDArray[np.int64]
    byte_counts: NDArray[np.int64]
    sizes: NDArray[np.int64] | None = None

    @property
    def planes(self) -> int:
        """Number of segments that make up a tile."""
        return int(self.offsets.shape[0])

    @property
    def rows(self) -> int:
        """Number of tile rows."""
        return int(self.offsets.shape[1])

    @property
    def columns(self) -> int:
        """Number of tile columns."""
        return int(self.offsets.shape[2])

    def ranges(
        self, rows: Sequence[int] | NDArray[Any], columns: Sequence[int] | NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Look up the byte ranges of many tiles at once.

        Returns
        -------
        offsets, byte_counts : ndarray of int64, shape (planes, tiles)
            As in the grid.
        """
        return self.offsets[:, rows, columns], self.byte_counts[:, rows, columns]

    def segments(
        self, rows: Sequence[int] | NDArray[Any], columns: Sequence[int] | NDArray[Any]
    ) -> list[list[tuple[int, int]]]:
        """Look up the byte ranges of many tiles at once, for use tile by tile.

        Returns
        -------
        list of list of (int, int)
            For each tile (offset, byte count) of each plane.
        """
        offsets, byte_counts = self.ranges(rows, columns)
        pairs = zip(offsets.T.tolist(), byte_counts.T.tolist(), strict=True)
        return [list(zip(starts, lengths, strict=True)) for starts, lengths in pairs]

    def holds_any(self, top: int, left: int, height: int, width: int) -> bool:
        """Whether the file holds a byte of any tile in a region of pixels."""
        rows = slice(top // self.tile_height, -(-(top + height) // self.tile_height))
        columns = slice(left // self.tile_width, -(-(left + width) // self.tile_width))
        return bool(self.byte_counts[:, rows, columns].any())


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """How a picture lies along one axis of a mosaic: pieces of it, in ascending order.

    Attributes
    ----------
    starts : ndarray of int64
        The mosaic's pixel at which each piece begins.
    sources : ndarray of int64
        The picture's pixel that is shown there.
    end : int
        Where the last piece ends in the mosaic; each other one ends where the next begins.
    """

    starts: NDArray[np.int64]
    sources: NDArray[np.int64]
    end: int

    @property
    def start(self) -> int:
        """The mosaic's pixel at which the first piece begins."""
        return int(self.starts[0])

    @classmethod
    def whole(cls, start: int, length: int) -> Pieces:
        """Lay down a picture's axis in one piece."""
        return cls(np.array([start], np.int64), np.zeros(1, np.int64), start + length)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A picture in a mosaic.

    Attributes
    ----------
    image : LevelLayout
        The picture as it is stored.
    rows, columns : Pieces
        Where its rows and columns lie; they may reach beyond the mosaic.
    """

    image: LevelLayout
    rows: Pieces
    columns: Pieces

    @classmethod
    def at(cls, left: int, top: int, image: LevelLayout) -> Part:
        """Lay down a whole picture."""
        return cls(image, Pieces.whole(top, image.height), Pieces.whole(left, image.width))

    @property
    def bounds(self) -> Rect:
        """The part of the mosaic, and beyond it, on which the picture lies."""
        rows, columns = self.rows, self.columns
        return Rect.between(rows.start, rows.end, columns.start, columns.end)

    def touches(self, rect: Rect) -> bool:
        """Whether the picture lies in a region of the mosaic."""
        return self.bounds.intersection(rect) is not None


@dataclass(frozen=True, slots=True, eq=False)
class Scattered:
    """Tiles that lie anywhere on a mosaic, whole or in parts, none of which covers another.

    Attributes
    ----------
    image : LevelLayout
        The tiles, as if they lay side by side.
    rows, columns : ndarray of int64, shape (parts,)
        Which tile each part is of.
    tops, lefts : ndarray of int64, shape (parts,)
        Its first row and column of pixels in the tile.
    on : Rects
        Where it lies on the mosaic.
    first : int
        First channel of the mosaic that the tiles show; they leave those alone that they lack.
    """

    image: LevelLayout
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    tops: NDArray[np.int64]
    lefts: NDArray[np.int64]
    on: Rects
    first: int = 0

    @classmethod
    def stacked(
        cls,
        image: LevelLayout,
        tiles: NDArray[np.int64],
        corners: NDArray[np.int64],
        rects: Rects,
    ) -> Scattered:
        """Lay down parts of tiles, each on top of those before it.

        Parameters
        ----------
        image : LevelLayout
            The tiles.
        tiles, corners : ndarray of int64, shape (parts, 2)
            Row and column of each one's tile, and its first row and column of pixels there.
        rects : Rects
            Where they are laid.

        Raises
        ------
        ValueError
            If far too many of them overlap.
        """
        owner, on = rects.visible()
        tops = corners[owner, 0] + on.tops - rects.tops[owner]
        lefts = corners[owner, 1] + on.lefts - rects.lefts[owner]
        return cls(image, tiles[owner, 0], tiles[owner, 1], tops, lefts, on)

    @property
    def bounds(self) -> Rect:
        """The part of the mosaic, and beyond it, on which tiles lie."""
        tops, lefts, bottoms, rights = self.on.edges
        return Rect.between(
            int(tops.min()), int(bottoms.max()), int(lefts.min()), int(rights.max())
        )

    def touches(self, rect: Rect) -> bool:
        """Whether any tile lies in a region of the mosaic."""
        edges = (rect.top, rect.left, rect.bottom, rect.right)
        one = Rects(*(np.array([edge], np.int64) for edge in edges))
        return bool(len(self.on.touching(one)[0]))


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """The Zarr array that the tiles of a level are cut from.

    Attributes
    ----------
    path : str
        Absolute path of its folder.
    axes : str
        A letter an axis: y, x and c (channels) lie in the tiles, any others don't.
    position : tuple of int
        Which plane along each of the other axes the level shows; 0 for y, x and c.
    """

    path: str
    axes: str
    position: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LibraryImage:
    """An image whose pixels a library decodes, region by region.

    Attributes
    ----------
    name : str
        The library's name.
    image : int or str
        Number of the level there, or name of the associated image.
    """

    name: str
    image: int | str


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LevelLayout:
    """One resolution of a slide, or one associated image.

    Attributes
    ----------
    width, height : int
        True size, without the padding of edge tiles.
    channels : int
        Samples a pixel, over all planes.
    missing : {"background", "finer"}
        What a missing tile shows: the background, or the finer level, area averaged.
    computed : bool
        Whether the file lacks this level, so that all its tiles are "missing".
    parts : tuple of Part or Scattered
        The pictures that lie on this level where it is a mosaic, earlier ones on top; all have
        its type, and its channels or, if `Scattered`, some of them. `encoding` is the first
        one's then, and so is `grid` unless that is `Scattered`.
    reduction : float or None
        How many pixels of level 0 one of this level spans, where the file says so.
    array : ZarrArray or None
        The array that `grid` cuts into tiles, where that is how the level is stored. Offsets
        are those in a file that holds these tiles uncompressed, and that does not exist.
    library : LibraryImage or None
        What decodes the level, if that is no decoder of ours; offsets are as for arrays.
    categorical : bool
        Whether samples are numbers of objects: computed levels take one pixel of each 2 x 2
        instead of their average.
    """

    width: int
    height: int
    channels: int
    encoding: Encoding
    grid: TileGrid
    missing: Literal["background", "finer"] = "background"
    computed: bool = False
    parts: tuple[Part | Scattered, ...] = ()
    reduction: float | None = None
    array: ZarrArray | None = None
    library: LibraryImage | None = None
    categorical: bool = False

    @classmethod
    def mosaic(
        cls,
        width: int,
        height: int,
        parts: Sequence[Part | Scattered],
        reduction: float | None = None,
        channels: int | None = None,
    ) -> LevelLayout:
        """Make a mosaic of pictures, earlier ones on top; `channels` if a picture may lack some."""
        first = parts[0].image
        grid = first.grid
        if isinstance(parts[0], Scattered):
            tile = _handy_side(grid.tile_height), _handy_side(grid.tile_width)
            grid = _empty_grid(width, height, *tile)
        return cls(
            width,
            height,
            channels or first.channels,
            first.encoding,
            grid,
            parts=tuple(parts),
            reduction=reduction,
        )

    @property
    def stored(self) -> tuple[LevelLayout, ...]:
        """The pictures that the file holds of it: itself, or those of its parts."""
        return tuple(dict.fromkeys(part.image for part in self.parts)) or (self,)

    @property
    def places(self) -> list[dict[str, int]]:
        """Where the parts of a mosaic lie: x, y, width and height in its pixels."""
        return [
            {"x": at.left, "y": at.top, "width": at.width, "height": at.height}
            for at in (part.bounds for part in self.parts)
        ]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of one sample."""
        return np.dtype(self.encoding.dtype)

    @property
    def longer_side(self) -> int:
        """The larger one of width and height."""
        return max(self.width, self.height)

    @property
    def tile_bytes(self) -> int:
        """Size of one decoded tile, all channels, in bytes."""
        grid = self.grid
        return grid.tile_height * grid.tile_width * self.channels * self.dtype.itemsize

    def downsample(self, base: LevelLayout) -> float:
        """Return how many pixels of `base` one of these spans.

        It is what the file says, else the mean of both axes' ratios.
        """
        if self.reduction is not None and base.reduction is not None:
            return self.reduction / base.reduction
        return (base.width / self.width + base.height / self.height) / 2


@dataclass(frozen=True, slots=True, eq=False)
class AssociatedLayout:
    """A picture that travels with the slide: thumbnail, label or macro.

    Attributes
    ----------
    name : str
        Its name.
    image : LevelLayout
        How it is encoded.
    data : bytes or None
        Its encoded bytes, if the metadata holds them; `image` has one tile then, of offset 0.
    icc : tuple of (int, int) or None
        Offset and length of its ICC profile in the file.
    frame : tuple of float or None
        What it covers, (x, y, width, height) in pixels of the slide's level 0; None where the file
        doesn't say.
    """

    name: str
    image: LevelLayout
    data: bytes | None = None
    icc: tuple[int, int] | None = None
    frame: tuple[float, float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class Channel:
    """One channel of a slide that is not RGB.

    Attributes
    ----------
    name : str
        Name for people.
    color : str or None
        Display colour as ``"#rrggbb"``.
    window : tuple of float or None
        Values that are shown darkest and brightest.
    visible : bool
        Whether viewers show it at first.
    """

    name: str
    color: str | None = None
    window: tuple[float, float] | None = None
    visible: bool = True


@dataclass(frozen=True, slots=True)
class SlideFile:
    """A file of a slide.

    Attributes
    ----------
    path : str
        Its absolute path.
    size, modified_ns : int
        Its size in bytes and its modification time when it was described.
    changed_ns, inode : int or None
        When it was changed in any way, and its number in its file system; None if that is unknown.
        Programs that copy files set modification times, but not these.
    """

    path: str
    size: int
    modified_ns: int
    changed_ns: int | None = None
    inode: int | None = None

    @classmethod
    def of(cls, path: str, status: stat_result) -> SlideFile:
        """Describe a file as it is now."""
        return cls(
            path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino or None
        )

    def unnamed(self, own: str) -> SlideFile:
        """Return it without its path, which can name a patient, unless the slide's own tells it."""
        is_own = self.path == own or PurePath(self.path).name in ZARR_DOCUMENTS
        return self if is_own else replace(self, path=digest(self.path))

    def is_still(self, status: stat_result) -> bool:
        """Whether a file is the one that was described, as far as its status says."""
        # Each read asks: one comparison after the other is the quickest.
        return (
            self.size == status.st_size
            and self.modified_ns == status.st_mtime_ns
            and self.changed_ns in (None, status.st_ctime_ns)
            and self.inode in (None, status.st_ino or None)
        )


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """Where the file of a slide on a server is.

    Attributes
    ----------
    url : str
        Its URL with all that is needed to read it, which may be secret: for no one's eyes.
    version : str
        What the server calls this version of the file; empty if it does not say.
    folder : str
        The URL of the folder in which several files lie; as secret.
    parts : tuple of (str, str)
        Name and version of each of these, in the order of the slide's `files`; none of one file.
    """

    url: str = field(repr=False)
    version: str
    folder: str = field(default="", repr=False)
    parts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Planes:
    """The planes of a slide that can be chosen: what it shows along z and t.

    Attributes
    ----------
    z, t : int
        Which plane a layout describes.
    size_z, size_t : int
        How many there are.
    z_spacing : float or None
        Micrometres from one plane along z to the next.
    time_step : float or None
        Seconds from one plane along t to the next.
    starts : Mapping of str to float
        Where the first plane along "z" and "t" lies, in the same units; 0 where it doesn't say.
    """

    z: int = 0
    t: int = 0
    size_z: int = 1
    size_t: int = 1
    z_spacing: float | None = None
    time_step: float | None = None
    starts: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes along which there is more than one plane: of "t" and "z"."""
        return tuple(self.sizes)

    @property
    def count(self) -> int:
        """How many planes there are in all."""
        return self.size_z * self.size_t

    @property
    def sizes(self) -> dict[str, int]:
        """How many planes there are along each of `names`."""
        sizes = {"t": self.size_t, "z": self.size_z}
        return {axis: size for axis, size in sizes.items() if size > 1}

    @classmethod
    def along(
        cls,
        positions: Mapping[str, tuple[int, int]],
        z_spacing: float | None = None,
        time_step: float | None = None,
        starts: Mapping[str, float] = NO_STARTS,
    ) -> Planes:
        """Make them of the plane and the number of planes along "z" and "t", where they are."""
        (z, size_z), (t, size_t) = (positions.get(axis, (0, 1)) for axis in "zt")
        return cls(z, t, size_z, size_t, z_spacing, time_step, starts)


@dataclass(frozen=True, slots=True, eq=False)
class SlideLayout:
    """All that is known of a slide without decoding a pixel.

    Attributes
    ----------
    path : str
        Absolute path of the file, or its URL without secrets.
    file_size, modified_ns : int
        Size and modification time when it was described, to notice another file.
    vendor : str
        Vendor as OpenSlide names it, for example ``"aperio"`` or ``"generic-tiff"``.
    levels : tuple of LevelLayout
        Levels, finest first: the stored ones, and computed ones where the format has them.
    associated : tuple of AssociatedLayout
        Associated images.
    rgb : bool
        Whether the channels are red, green, blue (and alpha).
    channels : tuple of Channel
        One entry a channel where ``rgb`` is false.
    background : int or float
        Value of pixels that the file does not hold.
    mpp : tuple of float or None
        Micrometres a pixel of level 0, (x, y).
    first : tuple of float
        Where the centre of the first pixel of level 0 lies, (x, y): in micrometres, or in pixels
        where their size is unknown.
    objective : float or None
        Magnification of the objective.
    metadata : Mapping
        Everything else the file says, under its vendor's name; JSON-serialisable.
    hidden_planes : int
        How many further planes of the same size (z, time) the file holds, unshown.
    planes : Planes
        Which of the planes that can be chosen is described.
    scanner, scan_date, barcode : str or None
        The scanner's make and model, when it scanned (ISO 8601, or as the file has it where that
        is ambiguous), and what the label's code says.
    icc : tuple of (int, int), bytes or None
        Offset and length of the ICC profile in the file, or the profile that the metadata hold.
    problems : tuple of str
        What is wrong with the file although it can be shown, one sentence each; files are named
        without their folder.
    files : tuple of SlideFile
        The slide's files; offsets count from the first one's begin through all of them.
    remote : RemoteFile or None
        Where a slide lies that is no local file.
    labels : tuple of LabelLayout
        Label images.
    """

    path: str
    file_size: int
    modified_ns: int
    vendor: str
    levels: tuple[LevelLayout, ...]
    associated: tuple[AssociatedLayout, ...] = ()
    rgb: bool = True
    channels: tuple[Channel, ...] = ()
    background: float = 0
    mpp: tuple[float, float] | None = None
    first: tuple[float, float] = (0.0, 0.0)
    objective: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    hidden_planes: int = 0
    planes: Planes = Planes()
    scanner: str | None = None
    scan_date: str | None = None
    barcode: str | None = None
    icc: tuple[int, int] | bytes | None = None
    problems: tuple[str, ...] = ()
    files: tuple[SlideFile, ...] = ()
    remote: RemoteFile | None = None
    labels: tuple[LabelLayout, ...] = ()

    @property
    def further_planes(self) -> int:
        """How many planes of the same size there are that can't be chosen."""
        return max(0, self.hidden_planes + 1 - self.planes.count)

    @property
    def downsamples(self) -> tuple[float, ...]:
        """Downsample of each level."""
        return tuple(level.downsample(self.levels[0]) for level in self.levels)

    def without_words(self) -> SlideLayout:
        """Return what pixels need of it, but nothing of what can name a patient.

        Whoever compares it with the slide as it is described again compares both without words.
        """
        return replace(
            self,
            files=self.files if self.remote else tuple(f.unnamed(self.path) for f in self.files),
            metadata={},
            scan_date=None,
            barcode=None,
            problems=(),
            labels=(),
            scanner=None,
            channels=tuple(replace(channel, name="") for channel in self.channels),
        )

    def pyramid(self, largest_side: int) -> tuple[PyramidLevel, ...]:
        """Return the levels, and computed ones so that each is about half as large as the last.

        What is computed halves the one before it, rounded up: between two levels whose longer
        sides differ by more than `LARGEST_STEP`, and beyond the coarsest. There is none below a
        level whose sides are no longer than `largest_side`.
        """
        found = [PyramidLevel(0, self.levels[0])]
        numbers = count(len(self.levels))
        for number, level in enumerate(self.levels[1:], 1):
            enough = max(largest_side, LARGEST_STEP * level.longer_side)
            while found[-1].layout.longer_side > enough:
                found.append(found[-1].halved(next(numbers), inserted=True))
            found.append(PyramidLevel(number, level, number - 1))
        while found[-1].layout.longer_side > largest_side:
            found.append(found[-1].halved(next(numbers)))
        return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class LabelLayout:
    """A label image that lies on the slide: its pixels are numbers of objects, 0 is none.

    Attributes
    ----------
    name : str
        Its name.
    layout : SlideLayout
        The image, of one channel of whole numbers.
    step : tuple of float
        How many pixels of the slide's level 0 one of its pixels spans, (x, y).
    offset : tuple of float
        Where its upper left corner lies, (x, y) in pixels of the slide's level 0.
    colors : Mapping of int to str
        Display colours of objects as ``"#rrggbbaa"``.
    properties : tuple of Mapping
        What is said of objects; each has its number as ``"label-value"``.
    """

    name: str
    layout: SlideLayout
    step: tuple[float, float] = (1.0, 1.0)
    offset: tuple[float, float] = (0.0, 0.0)
    colors: Mapping[int, str] = field(default_factory=dict)
    properties: tuple[Mapping[str, Any], ...] = ()


class PyramidLevel(NamedTuple):
    """A level as viewers show it.

    Attributes
    ----------
    number : int
        Its number: the index of the slide's own levels; those computed for viewers count on.
    layout : LevelLayout
        The level.
    finer : int or None
        Number of the level that tiles which the file lacks are averaged from, if there is one.
    inserted : bool
        Whether it is computed because the slide's next coarser level is much smaller.
    """

    number: int
    layout: LevelLayout
    finer: int | None = None
    inserted: bool = False

    def halved(self, number: int, *, inserted: bool = False) -> PyramidLevel:
        """Return a level of that number that is computed from this one by 2 x 2 averages."""
        size = -(-self.layout.width // 2), -(-self.layout.height // 2)
        return PyramidLevel(number, computed_level(self.layout, *size), self.number, inserted)


def digest(name: str) -> str:
    """Return what tells a name from others, and nothing else of it; again, it stays."""
    if name.startswith(DIGEST):
        return name
    return DIGEST + sha256(name.encode("utf-8", "surrogateescape")).hexdigest()


def computed_level(finer: LevelLayout, width: int, height: int) -> LevelLayout:
    """Return a level of that size that the file lacks, averaged from the next finer one."""
    tile = _computed_side(finer.grid.tile_height), _computed_side(finer.grid.tile_width)
    pixel = finer.channels * finer.dtype.itemsize
    while math.prod(tile) * pixel > LARGEST_COMPUTED_BYTES:  # of very many channels
        tile = -(-tile[0] // 2), -(-tile[1] // 2)
    return replace(
        finer,
        width=width,
        height=height,
        grid=_empty_grid(width, height, *tile),
        missing="finer",
        computed=True,
        parts=(),
        reduction=None,
        array=None,
        library=None,
    )


def _empty_grid(width: int, height: int, tile_height: int, tile_width: int) -> TileGrid:
    """Cut into tiles that the file does not hold."""
    shape = (1, math.ceil(height / tile_height), math.ceil(width / tile_width))
    nothing = np.broadcast_to(np.zeros((), np.int64), shape)
    return TileGrid(tile_height, tile_width, nothing, nothing)


def _handy_side(stored: int) -> int:
    """Return a side of the tiles in which displays ask for a mosaic of such tiles."""
    return min(max(stored, COMPUTED_TILE // 2), 2 * COMPUTED_TILE)


def _computed_side(finer: int) -> int:
    """Return a side of a tile that is averaged from 2 x 2 times as many whole finer tiles.

    Otherwise the finer tiles at its edges would be decoded for its neighbours again.
    """
    twice = finer * max(1, round(2 * COMPUTED_TILE / finer))
    return COMPUTED_TILE if twice % 2 or twice > 2 * LARGEST_COMPUTED_TILE else twice // 2
