"""Immutable, picklable layouts of slides: the position and encoding of each tile.

A layout holds neither pixels nor handles. Sizes are in pixels, offsets and counts in bytes. A
*tile* is the unit in which a level's pixels are encoded; a TIFF strip is a tile as wide as its
level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from napari_wsigpu.model.geometry import Rect, Rects
from napari_wsigpu.model.tags import PHOTOMETRIC

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import stat_result

    from numpy.typing import NDArray

    from napari_wsigpu.model.arrays import DType

    Integers: TypeAlias = NDArray[np.int64]
    Indices: TypeAlias = Sequence[int] | Integers

JpegColor = Literal["gray", "stored", "ycbcr", "auto", "cmyk"]
# Axes of a Zarr array that its tiles hold, in this order.
SHOWN = "yxc"
# Prefix of a path that `SlideFile.without_path` has replaced by its hash.
DIGEST = "sha256:"
# Metadata files of Zarr v3 and v2. Their names say nothing about the slide.
ZARR_DOCUMENTS = frozenset({"zarr.json", ".zarray", ".zattrs", ".zgroup"})
NO_STARTS: Mapping[str, float] = {}
# Tiles of computed levels: preferred and largest side in pixels, and largest size in bytes.
COMPUTED_TILE = 256
LARGEST_COMPUTED_TILE, LARGEST_COMPUTED_BYTES = 2048, 64 << 20
# Ratio between two stored levels above which levels are computed between them. It is a little
# more than 2, because levels of odd sizes are rounded.
LARGEST_STEP = 2.1


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the bytes of a level's tiles are decoded to samples.

    Attributes
    ----------
    compression, photometric, predictor, fill_order : int
        Values of the TIFF tags of those names.
    byte_order : {"<", ">"}
        Byte order of uncompressed samples.
    dtype : str
        NumPy name of the type of a decoded sample, for example ``"uint8"``.
    samples : int
        Number of interleaved samples per pixel in one encoded segment; 1 if each channel has its
        own segments.
    jpeg_color : str
        Color space of a JPEG segment. "ycbcr" is decoded to RGB, "stored" is RGB that must not be
        converted, and for "auto" the segment's markers decide.
    jpeg_tables : tuple of (bytes or None)
        Shared JPEG tables, one entry per plane.
    jpeg_header : bytes or None
        Header that turns a restart interval of a large JPEG into a complete JPEG. If it is set, the
        planes of a tile are such intervals, stacked from top to bottom.
    lerc_wrapping : int
        Compression applied to LERC data: 0 none, 1 deflate, 2 zstd.
    jpeg_scale : int
        Factor by which libjpeg reduces a JPEG while it decodes: 1, 2, 4 or 8.
    blue_first : bool
        Whether the samples of a pixel are stored in the order blue, green, red.
    bits : int
        1, 2 or 4 if samples are packed into bytes. For 8 or more, `dtype` gives the sample size.
    table : bytes or None
        Lookup table from stored values to shown values: one byte (gray) or three (RGB) per value.
    kept_sample : int or None
        Index of the only sample of a pixel that the level shows; None for all.
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
    kept_sample: int | None = None

    @property
    def white_is_zero(self) -> bool:
        """Whether the lowest value of gray pixels is white, not black."""
        return self.photometric == PHOTOMETRIC.MINISWHITE


@dataclass(frozen=True, slots=True, eq=False)
class TileGrid:
    """The positions of a level's tiles in the file.

    Attributes
    ----------
    tile_height, tile_width : int
        Size of one tile.
    offsets, byte_counts : ndarray of int64, shape (planes, rows, columns)
        Byte range of each encoded segment; a byte count of 0 marks a missing one. Planes are
        channels, or restart intervals if the encoding has a `jpeg_header`.
    sizes : ndarray of int64, shape (2, rows, columns), or None
        Height and width of the stored part of each tile; None if all tiles are stored whole.
    """

    tile_height: int
    tile_width: int
    offsets: Integers
    byte_counts: Integers
    sizes: Integers | None = None

    @property
    def planes(self) -> int:
        """Number of segments per tile."""
        return int(self.offsets.shape[0])

    @property
    def rows(self) -> int:
        """Number of tile rows."""
        return int(self.offsets.shape[1])

    @property
    def columns(self) -> int:
        """Number of tile columns."""
        return int(self.offsets.shape[2])

    def ranges(self, rows: Indices, columns: Indices) -> tuple[Integers, Integers]:
        """Look up the byte ranges of many tiles at once.

        Returns
        -------
        offsets, byte_counts : ndarray of int64, shape (planes, tiles)
            As in the attributes of the same names.
        """
        return self.offsets[:, rows, columns], self.byte_counts[:, rows, columns]

    def segments(self, rows: Indices, columns: Indices) -> list[list[tuple[int, int]]]:
        """Look up the byte ranges of many tiles at once, grouped by tile.

        Returns
        -------
        list of list of (int, int)
            For each tile, (offset, byte count) of each plane.
        """
        offsets, byte_counts = self.ranges(rows, columns)
        pairs = zip(offsets.T.tolist(), byte_counts.T.tolist(), strict=True)
        return [list(zip(starts, lengths, strict=True)) for starts, lengths in pairs]

    def holds_any(self, top: int, left: int, height: int, width: int) -> bool:
        """Whether the file stores any of the tiles that overlap a region, given in pixels."""
        rows = slice(top // self.tile_height, -(-(top + height) // self.tile_height))
        columns = slice(left // self.tile_width, -(-(left + width) // self.tile_width))
        return bool(self.byte_counts[:, rows, columns].any())


@dataclass(frozen=True, slots=True, eq=False)
class AxisMapping:
    """Mapping of an axis of an image to an axis of a mosaic, as a list of segments.

    Attributes
    ----------
    starts : ndarray of int64
        Pixel of the mosaic at which each segment starts, in ascending order.
    sources : ndarray of int64
        Pixel of the image that is shown at the start of each segment.
    end : int
        Pixel of the mosaic at which the last segment ends; each other segment ends where the next
        one starts.
    """

    starts: Integers
    sources: Integers
    end: int

    @property
    def start(self) -> int:
        """Pixel of the mosaic at which the first segment starts."""
        return int(self.starts[0])

    @classmethod
    def whole(cls, start: int, length: int) -> AxisMapping:
        """Map a whole axis of an image as a single segment."""
        return cls(np.array([start], np.int64), np.zeros(1, np.int64), start + length)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """An image in a mosaic.

    Attributes
    ----------
    image : LevelLayout
        The image as it is stored.
    rows, columns : AxisMapping
        Position of its rows and columns in the mosaic; they may extend beyond its edges.
    """

    image: LevelLayout
    rows: AxisMapping
    columns: AxisMapping

    @classmethod
    def at(cls, left: int, top: int, image: LevelLayout) -> Part:
        """Place a whole image with its upper left corner at (left, top)."""
        rows = AxisMapping.whole(top, image.height)
        return cls(image, rows, AxisMapping.whole(left, image.width))

    @property
    def bounds(self) -> Rect:
        """Rectangle that the image covers, in pixels of the mosaic; may extend beyond its edges."""
        rows, columns = self.rows, self.columns
        return Rect.between(rows.start, rows.end, columns.start, columns.end)

    def touches(self, rect: Rect) -> bool:
        """Whether the image overlaps a region of the mosaic."""
        return self.bounds.intersection(rect) is not None


@dataclass(frozen=True, slots=True, eq=False)
class Scattered:
    """Tiles, or parts of tiles, at arbitrary positions of a mosaic; they do not overlap.

    Attributes
    ----------
    image : LevelLayout
        The tiles, arranged in a regular grid.
    rows, columns : ndarray of int64, shape (parts,)
        Row and column, in that grid, of the tile that each part is taken from.
    tops, lefts : ndarray of int64, shape (parts,)
        First row and column of pixels of the part within its tile.
    on : Rects
        Rectangle of each part in the mosaic.
    first : int
        First channel of the mosaic that the tiles hold. Other channels keep their pixels.
    """

    image: LevelLayout
    rows: Integers
    columns: Integers
    tops: Integers
    lefts: Integers
    on: Rects
    first: int = 0

    @classmethod
    def stacked(
        cls, image: LevelLayout, tiles: Integers, corners: Integers, rects: Rects
    ) -> Scattered:
        """Place parts of tiles so that later ones cover earlier ones.

        Parameters
        ----------
        image : LevelLayout
            The tiles.
        tiles, corners : ndarray of int64, shape (parts, 2)
            For each part, (row, column) of its tile, and (row, column) of its first pixel within
            that tile.
        rects : Rects
            Rectangle of each part in the mosaic.

        Raises
        ------
        ValueError
            If far too many parts overlap.
        """
        owner, on = rects.visible()
        tops = corners[owner, 0] + on.tops - rects.tops[owner]
        lefts = corners[owner, 1] + on.lefts - rects.lefts[owner]
        return cls(image, tiles[owner, 0], tiles[owner, 1], tops, lefts, on)

    @property
    def bounds(self) -> Rect:
        """Smallest rectangle around all parts; may extend beyond the edges of the mosaic."""
        tops, lefts, bottoms, rights = self.on.edges
        return Rect.between(*map(int, (tops.min(), bottoms.max(), lefts.min(), rights.max())))

    def touches(self, rect: Rect) -> bool:
        """Whether any part overlaps a region of the mosaic."""
        edges = (rect.top, rect.left, rect.bottom, rect.right)
        one = Rects(*(np.array([edge], np.int64) for edge in edges))
        return bool(len(self.on.touching(one)[0]))


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """The Zarr array that the tiles of a level are cut from.

    Attributes
    ----------
    path : str
        Absolute path of its folder, or URL without secrets.
    axes : str
        One letter per axis. Tiles hold y, x and c (channels), but no other axis.
    position : tuple of int
        Index of the plane that the level shows, one entry per axis; 0 for y and x. The entry for c
        is the first channel.
    channels_apart : bool
        Whether each channel has chunks of its own.
    """

    path: str = field(repr=False)  # a label image's folder may be named after a patient
    axes: str
    position: tuple[int, ...]
    channels_apart: bool = False


@dataclass(frozen=True, slots=True)
class LibraryImage:
    """An image that a third-party library decodes, region by region.

    Attributes
    ----------
    name : str
        Name of the library.
    image : int or str
        Number of the level in the library, or name of the associated image.
    """

    name: str
    image: int | str


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LevelLayout:
    """One resolution of a slide, or one associated image.

    Attributes
    ----------
    width, height : int
        Size without the padding of edge tiles.
    channels : int
        Samples per pixel over all planes.
    missing : {"background", "finer"}
        Content of a missing tile: the background, or the area average of the next finer level.
    computed : bool
        Whether the file does not store this level, so that all its tiles are missing.
    parts : tuple of Part or Scattered
        Images that make up a mosaic; earlier ones cover later ones. All have the level's sample
        type and, unless they are `Scattered`, all its channels. `encoding` is taken from the first
        part, and so is `grid` unless that part is `Scattered`.
    reduction : float or None
        Pixels of level 0 per pixel of this level; None if the file doesn't state it.
    array : ZarrArray or None
        The Zarr array that `grid` divides into tiles, if there is one. Offsets then refer to a
        virtual file that holds all tiles uncompressed.
    library : LibraryImage or None
        The third-party library that decodes the level, if any. Offsets are then virtual too.
    categorical : bool
        Whether samples are object numbers: computed levels take one pixel of each 2 x 2 block
        instead of averaging.
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
        """Build a mosaic; earlier parts cover later ones and may lack some of the `channels`."""
        first = parts[0].image
        grid = first.grid
        if isinstance(parts[0], Scattered):
            tile = _display_side(grid.tile_height), _display_side(grid.tile_width)
            grid = _empty_grid(width, height, *tile)
        channels = channels or first.channels
        return cls(
            width, height, channels, first.encoding, grid, parts=tuple(parts), reduction=reduction
        )

    @property
    def stored(self) -> tuple[LevelLayout, ...]:
        """Images that the file stores for this level: its parts' images, or the level itself."""
        return tuple(dict.fromkeys(part.image for part in self.parts)) or (self,)

    @property
    def part_bounds(self) -> list[dict[str, int]]:
        """Bounds of the parts of a mosaic: x, y, width and height in pixels of the level."""
        return [
            {"x": at.left, "y": at.top, "width": at.width, "height": at.height}
            for at in (part.bounds for part in self.parts)
        ]

    @property
    def dtype(self) -> DType:
        """Type of one sample."""
        return np.dtype(self.encoding.dtype)

    @property
    def longer_side(self) -> int:
        """The larger of width and height."""
        return max(self.width, self.height)

    @property
    def tile_bytes(self) -> int:
        """Size of one decoded tile in bytes, all channels together."""
        grid = self.grid
        return grid.tile_height * grid.tile_width * self.channels * self.dtype.itemsize

    def tile_rect(self, row: int, column: int) -> Rect:
        """Return the pixels of this level that a tile covers."""
        grid = self.grid
        top, left = row * grid.tile_height, column * grid.tile_width
        height, width = self.height - top, self.width - left
        return Rect(top, left, min(grid.tile_height, height), min(grid.tile_width, width))

    def downsample(self, base: LevelLayout) -> float:
        """Return the number of pixels of `base` per pixel of this level, along one axis.

        A value stated in the file takes precedence over the mean of both axes' ratios.
        """
        if self.reduction is not None and base.reduction is not None:
            return self.reduction / base.reduction
        return (base.width / self.width + base.height / self.height) / 2


@dataclass(frozen=True, slots=True, eq=False)
class AssociatedLayout:
    """An image stored with the slide: thumbnail, label or macro.

    Attributes
    ----------
    name : str
        Name of the image, for example ``"label"``.
    image : LevelLayout
        Layout of the image.
    data : bytes or None
        The encoded image if the metadata hold it; `image` then has one tile at offset 0.
    icc : tuple of (int, int), bytes or None
        Offset and length of its ICC profile in the file, or the profile itself.
    frame : tuple of float or None
        Area that the image covers, (x, y, width, height) in pixels of the slide's level 0; None if
        the file doesn't state it.
    """

    name: str
    image: LevelLayout
    data: bytes | None = field(default=None, repr=False)
    icc: tuple[int, int] | bytes | None = None
    frame: tuple[float, float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class Channel:
    """One channel of a slide that is not RGB.

    Attributes
    ----------
    name : str
        Name to display.
    color : str or None
        Display color as ``"#rrggbb"``.
    window : tuple of float or None
        Values shown as black and as full brightness.
    visible : bool
        Whether viewers initially show it.
    """

    name: str
    color: str | None = None
    window: tuple[float, float] | None = None
    visible: bool = True


@dataclass(frozen=True, slots=True)
class SlideFile:
    """One of the files that make up a slide.

    Attributes
    ----------
    path : str
        Absolute path.
    size, modified_ns : int
        Size in bytes and modification time when the slide was opened.
    changed_ns, inode : int or None
        Status change time (ctime) and inode number; None if unknown. Programs that copy files can
        set the modification time, but not these.
    """

    path: str
    size: int
    modified_ns: int
    changed_ns: int | None = None
    inode: int | None = None

    @classmethod
    def of(cls, path: str, status: stat_result) -> SlideFile:
        """Record a file's current size, times and inode."""
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(path, status.st_size, *times, status.st_ino or None)

    def without_path(self, own: str) -> SlideFile:
        """Return a copy with its path hashed, unless it is `own`, the slide's main path.

        Paths may identify a patient.
        """
        is_own = self.path == own or PurePath(self.path).name in ZARR_DOCUMENTS
        return self if is_own else replace(self, path=digest(self.path))

    def matches(self, status: stat_result) -> bool:
        """Whether a file's status still equals the recorded one."""
        # Every read calls this. Comparing field by field is the fastest way.
        return (
            self.size == status.st_size
            and self.modified_ns == status.st_mtime_ns
            and self.changed_ns in (None, status.st_ctime_ns)
            and self.inode in (None, status.st_ino or None)
        )


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """Location of a slide on a server.

    Attributes
    ----------
    url : str
        URL with everything needed to read it, possibly credentials: never show it.
    version : str
        The server's identifier of this version of the file; empty if it sends none.
    folder : str
        URL of the folder if the slide has several files; equally confidential.
    parts : tuple of (str, str)
        (name, version) of each file in `folder`, in the order of the slide's `files`; empty for a
        single file. On a DICOMweb server, (UID, version) of each instance.
    frame_bytes : tuple of int
        Upper bound on the size of a frame in bytes, for each instance on a DICOMweb server, where
        byte ranges of frames are virtual; empty on other servers.
    """

    url: str = field(repr=False)
    version: str
    folder: str = field(default="", repr=False)
    parts: tuple[tuple[str, str], ...] = ()
    frame_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Planes:
    """The planes of a slide along z and t, and the plane that a layout describes.

    Attributes
    ----------
    z, t : int
        Index of the plane that the layout describes.
    size_z, size_t : int
        Number of planes along each axis.
    z_spacing : float or None
        Distance between neighboring planes along z in micrometers.
    time_step : float or None
        Time between neighboring planes along t in seconds.
    starts : Mapping of str to float
        Position of the first plane along "z" and "t", in the same units; 0 for an axis that is
        missing.
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
        """Axes with more than one plane: "t", "z", both or none."""
        return tuple(self.sizes)

    @property
    def count(self) -> int:
        """Total number of planes."""
        return self.size_z * self.size_t

    @property
    def sizes(self) -> dict[str, int]:
        """Number of planes along each of `names`."""
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
        """Build from (index, number of planes) along "z" and "t"; either axis may be missing."""
        (z, size_z), (t, size_t) = (positions.get(axis, (0, 1)) for axis in "zt")
        return cls(z, t, size_z, size_t, z_spacing, time_step, starts)


@dataclass(frozen=True, slots=True, eq=False)
class SlideLayout:
    """Everything known about a slide without decoding a pixel.

    Attributes
    ----------
    path : str
        Absolute path of the file, or its URL without secrets.
    vendor : str
        Vendor in OpenSlide's notation, for example ``"aperio"`` or ``"generic-tiff"``.
    levels : tuple of LevelLayout
        Levels, finest first: the stored ones, and the computed ones that the format implies.
    associated : tuple of AssociatedLayout
        Associated images.
    rgb : bool
        Whether the channels are red, green, blue (and alpha).
    channels : tuple of Channel
        One entry per channel if `rgb` is false.
    background : int or float
        Value of pixels that the file does not hold.
    mpp : tuple of float or None
        Micrometers per pixel of level 0, (x, y).
    first : tuple of float
        Position of the center of the first pixel of level 0, (x, y): in micrometers, or in pixels
        if their size is unknown.
    objective : float or None
        Magnification of the objective.
    metadata : Mapping
        All other fields of the file, under the vendor's name; JSON-serializable.
    other_planes : int
        Number of further planes (z, time) of the same size in the file, selectable or not.
    planes : Planes
        The selectable planes, and the plane that this layout describes.
    scanner, scan_date, barcode : str or None
        The scanner's make and model, the time of the scan (ISO 8601, or as in the file if that is
        ambiguous), and the text of the label's barcode.
    icc : tuple of (int, int), bytes or None
        Offset and length of the ICC profile in the file, or the profile itself if the metadata
        hold it.
    problems : tuple of str
        Defects of a file that can still be shown, one sentence each; files are named without their
        folder.
    files : tuple of SlideFile
        The slide's files. Offsets count bytes as if the files were concatenated in this order.
    remote : RemoteFile or None
        Location of a slide that is not a local file.
    labels : tuple of LabelLayout
        Label images.
    """

    path: str
    vendor: str
    levels: tuple[LevelLayout, ...]
    associated: tuple[AssociatedLayout, ...] = ()
    rgb: bool = True
    # Fields that may name a patient are left out of the representation.
    channels: tuple[Channel, ...] = field(default=(), repr=False)
    background: float = 0
    mpp: tuple[float, float] | None = None
    first: tuple[float, float] = (0.0, 0.0)
    objective: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    other_planes: int = 0
    planes: Planes = Planes()
    scanner: str | None = field(default=None, repr=False)
    scan_date: str | None = field(default=None, repr=False)
    barcode: str | None = field(default=None, repr=False)
    icc: tuple[int, int] | bytes | None = field(default=None, repr=False)
    problems: tuple[str, ...] = field(default=(), repr=False)
    files: tuple[SlideFile, ...] = field(default=(), repr=False)
    remote: RemoteFile | None = None
    labels: tuple[LabelLayout, ...] = field(default=(), repr=False)

    @property
    def file_size(self) -> int:
        """Total size of the slide's files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def has_tile_sizes(self) -> bool:
        """Whether byte counts are the sizes of compressed tiles, not only upper limits."""
        return self.remote is None or not self.remote.frame_bytes

    @property
    def unselectable_planes(self) -> int:
        """Number of planes of the same size that cannot be selected."""
        return max(0, self.other_planes + 1 - self.planes.count)

    @property
    def downsamples(self) -> tuple[float, ...]:
        """Downsample of each level relative to level 0."""
        return tuple(level.downsample(self.levels[0]) for level in self.levels)

    def without_private_data(self) -> SlideLayout:
        """Return a copy for reading pixels, without metadata that may identify a patient.

        The copy keeps `path`, which is needed to open the slide again. To compare layouts after a
        slide has been opened again, call this method on both.
        """
        hashed = tuple(file.without_path(self.path) for file in self.files)
        return replace(
            self,
            files=self.files if self.remote else hashed,
            metadata={},
            scan_date=None,
            barcode=None,
            problems=(),
            labels=(),
            scanner=None,
            channels=tuple(replace(channel, name="") for channel in self.channels),
        )

    def pyramid(self, largest_side: int) -> tuple[PyramidLevel, ...]:
        """Return all levels, with computed ones that fill large gaps or follow the coarsest level.

        A computed level has half the width and height of the level before it, rounded up. Levels
        are computed between two stored ones whose longer sides differ by more than a factor of
        `LARGEST_STEP`, and after the coarsest one. No level is computed from one whose sides are
        both within `largest_side`.
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
    """A label image on the slide: its pixels are object numbers, 0 where there is no object.

    Attributes
    ----------
    name : str
        Name of the label image.
    layout : SlideLayout
        The image: one channel of integers.
    step : tuple of float
        Pixels of the slide's level 0 per pixel of the label image, (x, y).
    offset : tuple of float
        Position of its upper left corner, (x, y) in pixels of the slide's level 0.
    colors : Mapping of int to str
        Display colors of objects as ``"#rrggbbaa"``.
    properties : tuple of Mapping
        Properties of objects; ``"label-value"`` is the object's number.
    """

    name: str
    layout: SlideLayout
    step: tuple[float, float] = (1.0, 1.0)
    offset: tuple[float, float] = (0.0, 0.0)
    colors: Mapping[int, str] = field(default_factory=dict)
    properties: tuple[Mapping[str, Any], ...] = ()


class PyramidLevel(NamedTuple):
    """A level in the pyramid that viewers show.

    Attributes
    ----------
    number : int
        Index in the slide's own levels; computed levels continue the count.
    layout : LevelLayout
        The level.
    finer : int or None
        Number of the level from which missing tiles are averaged, if there is one.
    inserted : bool
        Whether it fills a large gap before the slide's next coarser level.
    """

    number: int
    layout: LevelLayout
    finer: int | None = None
    inserted: bool = False

    def halved(self, number: int, *, inserted: bool = False) -> PyramidLevel:
        """Return a level with this number, computed from this one by averaging 2 x 2 pixels."""
        size = -(-self.layout.width // 2), -(-self.layout.height // 2)
        return PyramidLevel(number, computed_level(self.layout, *size), self.number, inserted)


def digest(name: str) -> str:
    """Return a hash that identifies a name without revealing it; a hash is returned unchanged."""
    if name.startswith(DIGEST):
        return name
    return DIGEST + sha256(name.encode("utf-8", "surrogateescape")).hexdigest()


def computed_level(finer: LevelLayout, width: int, height: int) -> LevelLayout:
    """Return a level of this size that is computed from the next finer one."""
    tile = _computed_side(finer.grid.tile_height), _computed_side(finer.grid.tile_width)
    pixel = finer.channels * finer.dtype.itemsize
    while math.prod(tile) * pixel > LARGEST_COMPUTED_BYTES:  # with very many channels
        tile = -(-tile[0] // 2), -(-tile[1] // 2)
    grid = _empty_grid(width, height, *tile)
    plain = replace(finer, parts=(), reduction=None, array=None, library=None)
    return replace(plain, width=width, height=height, grid=grid, missing="finer", computed=True)


def _empty_grid(width: int, height: int, tile_height: int, tile_width: int) -> TileGrid:
    """Return a grid whose tiles are all missing in the file."""
    shape = (1, math.ceil(height / tile_height), math.ceil(width / tile_width))
    nothing = np.broadcast_to(np.zeros((), np.int64), shape)
    return TileGrid(tile_height, tile_width, nothing, nothing)


def _display_side(stored: int) -> int:
    """Return the side of a mosaic's display tiles, given the side of its stored tiles."""
    return min(max(stored, COMPUTED_TILE), 4 * COMPUTED_TILE)


def _computed_side(finer: int) -> int:
    """Return the side of a computed tile that covers whole tiles of the finer level, if possible.

    Finer tiles that a computed tile covers only partly are decoded again for its neighbors.
    """
    twice = finer * max(1, round(2 * COMPUTED_TILE / finer))
    return COMPUTED_TILE if twice % 2 or twice > 2 * LARGEST_COMPUTED_TILE else twice // 2
