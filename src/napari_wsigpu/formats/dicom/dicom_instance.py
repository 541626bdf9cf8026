"""Describe one file of a DICOM slide: its frames, their encoding and its attributes.

wsidicom locates the frames, and pydicom reads the attributes; the extra ``dicom`` installs both.
"""

from __future__ import annotations

import errno
import math
import struct
import threading
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pydicom.dataelem import RawDataElement
from pydicom.filereader import dcmread, read_dataset, read_partial, read_preamble
from pydicom.multival import MultiValue
from pydicom.pixels import apply_color_lut
from pydicom.sequence import Sequence as DicomSequence
from pydicom.tag import BaseTag
from pydicom.uid import (
    HTJ2K,
    JPEG2000,
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    HTJ2KLossless,
    HTJ2KLosslessRPCL,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLSLossless,
    JPEGLSNearLossless,
    RLELossless,
    VLWholeSlideMicroscopyImageStorage,
)
from pydicom.valuerep import BYTES_VR
from upath import UPath
from wsidicom.errors import WsiDicomNotSupportedError
from wsidicom.file.io import WsiDicomReader, WsiDicomReadIO
from wsidicom.file.io.deferred_dataset_reader import FileDeferredDatasetReader
from wsidicom.file.io.frame_index import OffsetTableType
from wsidicom.instance import TileType, WsiDataset
from wsidicom.tags import ExtendedOffsetTableTag
from wsidicom.uid import JPEGXL, JPEGXLJPEGRecompression, JPEGXLLossless

from napari_wsigpu.formats.fields import positive_number
from napari_wsigpu.formats.pictures import plain_encoding
from napari_wsigpu.formats.tiff.tiff import JFIF, JFIF_OFFSET, LARGEST_SIDE
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    SlideError,
    UnsupportedSlideError,
    file_error,
)
from napari_wsigpu.model.layout import Encoding, JpegColor, SlideFile
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.reasons import parser_reason
from napari_wsigpu.model.tags import COMPRESSION, DICOM_RLE, JPEG_LS, PHOTOMETRIC
from napari_wsigpu.model.tags import HTJ2K as HIGH_THROUGHPUT
from napari_wsigpu.storage.bounded import BoundedReader
from napari_wsigpu.storage.remote.served import ServedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import BinaryIO, Protocol

    from numpy.typing import NDArray
    from pydicom import Dataset

    from napari_wsigpu.formats.fields import Metadata
    from napari_wsigpu.model.arrays import Integers

    File = Path | ServedFile

    class Named(Protocol):
        """A file or an instance on a server; its text is a path or URL for messages."""

        @property
        def name(self) -> str:
            """The last component."""

    Profile = tuple[int, int] | bytes | Callable[[], bytes | None] | None
    Positions = tuple[Integers, Integers, NDArray[np.float64], NDArray[np.str_]]

COMPRESSIONS = {
    ImplicitVRLittleEndian: COMPRESSION.NONE,
    ExplicitVRLittleEndian: COMPRESSION.NONE,
    JPEGBaseline8Bit: COMPRESSION.JPEG,
    JPEGExtended12Bit: COMPRESSION.JPEG,
    JPEG2000Lossless: COMPRESSION.JPEG2000,
    JPEG2000: COMPRESSION.JPEG2000,
    JPEGLSLossless: JPEG_LS,
    JPEGLSNearLossless: JPEG_LS,
    HTJ2KLossless: HIGH_THROUGHPUT,
    HTJ2KLosslessRPCL: HIGH_THROUGHPUT,
    HTJ2K: HIGH_THROUGHPUT,
    RLELossless: DICOM_RLE,
    JPEGXLLossless: COMPRESSION.JPEGXL,
    JPEGXLJPEGRecompression: COMPRESSION.JPEGXL,
    JPEGXL: COMPRESSION.JPEGXL,
}
JPEG_2000 = COMPRESSION.JPEG2000, HIGH_THROUGHPUT
# The supported pairs of compression and photometric interpretation (PS3.3, C.7.6.3.1.2), and the
# `jpeg_color` of each pair.
COLORS: dict[tuple[int, str], JpegColor] = {
    (COMPRESSION.NONE, "RGB"): "auto",
    (JPEG_LS, "RGB"): "auto",
    (COMPRESSION.JPEG, "RGB"): "stored",
    (COMPRESSION.JPEG, "YBR_FULL"): "ycbcr",
    (COMPRESSION.JPEG, "YBR_FULL_422"): "ycbcr",
    (DICOM_RLE, "RGB"): "auto",
    (DICOM_RLE, "YBR_FULL"): "auto",
    # The decoder of JPEG XL always returns RGB. Only frames transcoded from JPEG are labeled YBR.
    (COMPRESSION.JPEGXL, "RGB"): "auto",
    (COMPRESSION.JPEGXL, "XYB"): "auto",
    (COMPRESSION.JPEGXL, "YBR_FULL"): "auto",
    (COMPRESSION.JPEGXL, "YBR_FULL_422"): "auto",
    **{
        (compression, color): "auto"
        for compression in JPEG_2000
        for color in ("RGB", "YBR_ICT", "YBR_RCT", "YBR_FULL", "YBR_FULL_422")
    },
}
GRAYS = {"MONOCHROME1": PHOTOMETRIC.MINISWHITE, "MONOCHROME2": PHOTOMETRIC.MINISBLACK}
PALETTE = "PALETTE COLOR"
PER_FRAME_GROUPS = 0x52009230
MOST_FRAMES = 1 << 22
# Relative difference that is tolerated between the stated image size and the pixel spacing.
TOLERANCE = 0.01
ITEM, ITEM_HEADER = 0xE000FFFE, 8
Z_DECIMALS = 6
LONGEST_VALUE, LONGEST_SYNTAX = 1 << 16, 128
NEEDED = (
    "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "ImageType", "Rows", "Columns",
    "TotalPixelMatrixColumns", "TotalPixelMatrixRows", "SamplesPerPixel",
    "PhotometricInterpretation", "BitsStored",
)  # fmt: skip
COUNTS = (
    "Rows", "Columns", "TotalPixelMatrixColumns", "TotalPixelMatrixRows", "NumberOfFrames",
    "NumberOfOpticalPaths", "TotalPixelMatrixFocalPlanes",
)  # fmt: skip
LARGEST_COUNT = 1 << 32
FLAVORS = "VOLUME", "LABEL", "OVERVIEW", "THUMBNAIL"
DEEPEST = 16
FILE_META_GROUP = 2
# wsidicom would reopen a file by its path to read larger blocks; a remote file has no path.
NO_PATH = "memory:///no file"
# Without an offset table, wsidicom reads the header of every frame; on a server, that means most
# of the file.
LARGEST_WALK = 64 << 20

# Held while the process-wide warning filters are changed; see `without_warnings`.
_warning_filters = threading.Lock()


class Frames(NamedTuple):
    """The frames of an instance, as arrays of shape (frames,).

    Attributes
    ----------
    offsets, byte_counts : ndarray of int64
        Byte ranges in the file.
    rows, columns : ndarray of int64
        Row and column of each frame's tile in the level.
    z : ndarray of float64
        Focal plane: micrometers above the glass if `Instance.has_depths`, else an index.
    paths : ndarray of str
        Identifier of the optical path.
    """

    offsets: Integers
    byte_counts: Integers
    rows: Integers
    columns: Integers
    z: NDArray[np.float64]
    paths: NDArray[np.str_]


@dataclass(frozen=True)
class Instance:
    """The contents of one file, which DICOM calls a SOP instance.

    Attributes
    ----------
    path : Path, ServedFile or other object with a name
        The file.
    file : SlideFile
        Its path, size and modification time.
    uid, series : str
        SOPInstanceUID and SeriesInstanceUID.
    flavor : {"VOLUME", "LABEL", "OVERVIEW", "THUMBNAIL"}
        The third value of ImageType (PS3.3, C.8.12.4.1.1).
    width, height, tile_width, tile_height : int
        Size of the whole image and of one frame, in pixels.
    encoding : Encoding
        Encoding of the frames.
    is_planar : bool
        Whether the samples of an uncompressed frame are stored plane by plane.
    frames : Frames
        The frames.
    has_depths : bool
        Whether the focal planes in `frames` are in micrometers.
    icc : tuple of (int, int), bytes, callable or None
        Offset and length of the ICC profile in the file, the profile itself, or a function that
        returns it.
    spacing : tuple of float or None
        Millimeters from one row of pixels to the next, and from one column to the next.
    metadata : dict
        All attributes by keyword, JSON-serializable.
    problems : tuple of str
        Non-fatal problems, one sentence each.
    """

    path: Named
    file: SlideFile
    uid: str
    series: str
    flavor: str
    width: int
    height: int
    tile_width: int
    tile_height: int
    encoding: Encoding
    is_planar: bool
    frames: Frames
    has_depths: bool
    icc: Profile
    spacing: tuple[float, float] | None
    metadata: Metadata
    problems: tuple[str, ...]


class Contents(NamedTuple):
    """The parsed header of an instance, before `described` checks and interprets it.

    Attributes
    ----------
    header : Dataset
        The attributes, except those of individual frames.
    dataset : WsiDataset
        wsidicom's view of all attributes.
    syntax : UID
        The transfer syntax, one of `COMPRESSIONS`.
    icc
        See `Instance`.
    locate : callable
        Returns the byte ranges of the frames, shape (frames, 2).
    frame_groups : callable
        Returns the attributes of individual frames.
    """

    header: Dataset
    dataset: WsiDataset
    syntax: UID
    icc: Profile
    locate: Callable[[], Integers]
    frame_groups: Callable[[], Dataset]


def read(path: File, series: str | None = None) -> Instance | None:
    """Describe one DICOM whole-slide file.

    Parameters
    ----------
    path : Path or ServedFile
        The file.
    series : str, optional
        UID of a series; files of other series are not described.

    Returns
    -------
    Instance or None
        None for a file of another series.

    Raises
    ------
    CorruptSlideError, UnsupportedSlideError
        If it is damaged or can't be shown.
    SlideError
        If it can't be read.
    """
    with as_slide_errors(path), _opened(path) as (stream, file), without_warnings():
        return _read(path, stream, file, series)


@contextmanager
def as_slide_errors(path: Named) -> Iterator[None]:
    """Convert any error of a parser to a `SlideError` that names the file."""
    try:
        yield
    except SlideError:
        raise
    except OSError as error:
        if error.errno == errno.EINVAL:  # the parser used a negative offset
            raise _damaged(path, error) from error
        raise file_error(str(path), error) from error
    except WsiDicomNotSupportedError as error:
        raise UnsupportedSlideError(
            f"'{path}' can't be shown: its image type, colors or samples are not supported; "
            "convert it to 8-bit RGB or gray."
        ) from error
    except MemoryError:
        raise
    except Exception as error:
        # On a damaged file, the parsers raise whatever exception the damaged value causes.
        raise _damaged(path, error) from error


class _Reader(WsiDicomReader):  # type: ignore[misc] # wsidicom is untyped
    """wsidicom's reader without its color checks, since it is not used to decode frames.

    Parameters
    ----------
    stream : WsiDicomReadIO
        The file.
    header : Dataset
        The attributes that precede the per-frame functional groups or, without such groups, the
        frames.
    position : int
        Offset of the next attribute.
    """

    def __init__(self, stream: WsiDicomReadIO, header: Dataset, position: int) -> None:
        self._stream = stream
        self._transfer_syntax_uid = UID(stream.file_meta_info.TransferSyntaxUID)
        stream.seek(position)
        has_groups = stream.read_tag() == PER_FRAME_GROUPS
        if not has_groups:
            stream.read_dataset_from(position, ExtendedOffsetTableTag, header)
        positions = (position, None) if has_groups else (None, stream.tell())
        self._deferred_reader = FileDeferredDatasetReader(stream, header, [], [], *positions)
        self._dataset = WsiDataset(header, deferred_reader=self._deferred_reader)
        self._frame_index_parser = None
        self._frame_index = None


def listed_files(path: Path) -> list[Path]:
    """Return the paths of the whole-slide files that a DICOMDIR lists (PS3.3, annex F).

    Raises
    ------
    CorruptSlideError
        If it is damaged.
    SlideError
        If it can't be read.
    """
    try:
        with _opened(path) as (stream, _), without_warnings():
            records = dcmread(stream).get("DirectoryRecordSequence") or []
            named = [
                record.get("ReferencedFileID")
                for record in records
                if record.get("ReferencedSOPClassUIDInFile") == VLWholeSlideMicroscopyImageStorage
            ]
    except (SlideError, MemoryError):
        raise
    except OSError as error:
        raise file_error(str(path), error) from error
    except Exception as error:
        raise _damaged(path, error) from error
    return [
        _existing(path.parent, parts)
        for name in named
        if (parts := [name] if isinstance(name, str) else list(name or ()))
        # A list must not name files outside its own folder.
        and all(part not in ("", "..") and Path(part).name == part for part in parts)
    ]


def _existing(folder: Path, parts: list[str]) -> Path:
    """Return the path of a listed file; copies of media often have names in lower case."""
    stated = folder.joinpath(*parts)
    lower = folder.joinpath(*(part.lower() for part in parts))
    return lower if lower.exists() and not stated.exists() else stated


@contextmanager
def _opened(path: File) -> Iterator[tuple[BinaryIO, SlideFile]]:
    if isinstance(path, ServedFile):
        with path.open() as served:
            yield served, path.file
    else:
        with BoundedReader(path.open("rb", buffering=0)) as stream:
            yield stream, SlideFile.of(str(path), path.stat())


def _file_meta(stream: BinaryIO) -> Dataset:
    """Return the file meta information (PS3.10, section 7.1), which names the transfer syntax."""
    read_preamble(stream, force=False)
    found: Dataset = read_dataset(
        stream, False, True, stop_when=lambda tag, *_: int(tag) >> 16 != FILE_META_GROUP
    )
    stream.seek(0)
    return found


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress pydicom's warnings about values; relevant ones become errors or problems."""
    # `catch_warnings` saves and restores the filters of the whole process. Without the lock, a
    # thread could restore the filters that another thread has changed.
    with _warning_filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _damaged(path: Named, error: Exception) -> CorruptSlideError:
    reason = parser_reason(getattr(error, "error", error))
    return CorruptSlideError(
        f"The DICOM file '{path}' is damaged ({reason}); get a fresh copy of it."
    )


def _read(path: File, stream: BinaryIO, file: SlideFile, series: str | None) -> Instance | None:
    syntax = UID(str(_file_meta(stream).get("TransferSyntaxUID", "")))
    # A deflated header (PS3.5, A.5) could inflate to any size.
    header = None
    if syntax != DeflatedExplicitVRLittleEndian:
        header = read_partial(stream, lambda tag, *_: int(tag) >= PER_FRAME_GROUPS)
    if header is not None and stream.tell() >= file.size:
        raise CorruptSlideError(
            f"'{path}' is truncated: its {file.size} bytes end before its first frame; "
            "get a fresh copy of it."
        )
    if header is not None and series not in (None, header.get("SeriesInstanceUID")):
        return None
    check_syntax(path, syntax, is_readable=header is not None)
    assert header is not None
    check_attributes(path, header)
    position = stream.tell()
    icc = _icc_range(header, stream)
    location = UPath(NO_PATH if isinstance(path, ServedFile) else path)
    reader = _Reader(WsiDicomReadIO(stream, location), header, position)

    def locate() -> Integers:
        if isinstance(path, ServedFile):
            _check_table(path, reader)
        return np.array(list(reader.frame_index), np.int64).reshape(-1, 2)

    def frame_groups() -> Dataset:
        stream.seek(0)
        return read_partial(
            stream,
            lambda tag, *_: int(tag) > PER_FRAME_GROUPS,
            specific_tags=[BaseTag(PER_FRAME_GROUPS)],
        )

    contents = Contents(header, reader.dataset, syntax, icc, locate, frame_groups)
    instance = described(path, file, contents)
    _check_fragments(path, stream, reader, instance.frames)
    encoding = instance.encoding
    if encoding.jpeg_color == "stored" and _is_jfif(stream, instance.frames):
        return replace(instance, encoding=replace(encoding, jpeg_color="ycbcr"))
    return instance


def check_syntax(path: Named, syntax: UID, *, is_readable: bool = True) -> None:
    """Refuse a transfer syntax whose frames can't be decoded."""
    if not is_readable or syntax not in COMPRESSIONS:
        name = " ".join(str(syntax.name).split())[:LONGEST_SYNTAX]
        raise UnsupportedSlideError(
            f"'{path}' can't be decoded: its transfer syntax, {name or 'none'}, is not "
            "supported; convert it to JPEG or JPEG 2000."
        )


def described(path: Named, file: SlideFile, contents: Contents) -> Instance:
    """Check the header of an instance and describe it.

    Raises
    ------
    CorruptSlideError, UnsupportedSlideError
        If it is damaged or can't be shown.
    """
    header, dataset, syntax, icc, locate, frame_groups = contents
    problems: list[str] = []
    metadata = _plain(header.file_meta, problems) | _plain(header, problems)
    _count_own_planes(header)
    width, height = int(dataset.image_size.width), int(dataset.image_size.height)
    tile_width, tile_height = int(dataset.tile_size.width), int(dataset.tile_size.height)
    encoding = _encoding(path, dataset, syntax, header)
    is_planar = encoding.compression == COMPRESSION.NONE and header.get("PlanarConfiguration") == 1
    _check_sizes(path, width, height, tile_width, tile_height, encoding, dataset.frame_count)
    grid = (math.ceil(height / tile_height), math.ceil(width / tile_width))
    ranges = locate()
    if dataset.tile_type == TileType.FULL:
        positions = _full_positions(dataset, grid, header)
    else:
        positions = _sparse_positions(path, dataset, (tile_height, tile_width))
        hidden = len(positions[0]) - len(
            {*zip(*(each.tolist() for each in positions), strict=True)}
        )
        if hidden:
            problems.append(f"Later frames of '{path.name}' hide {hidden} at the same positions.")
    frames = _frames(path, ranges, positions, grid, problems)
    if _is_one_plane(header, frames) and np.ptp(frames.z):
        # The scanner focused each frame separately, so their depths differ. All parts of a
        # concatenation must get the same depth, which they share as `z_offset`.
        part = "ConcatenationUID" in header
        depth = dataset.z_offset if part else float(np.median(frames.z))
        frames = frames._replace(z=np.full_like(frames.z, depth))
    spacing = _pixel_spacing(header, frame_groups)
    sizes = (height, tile_height), (width, tile_width)
    volume = [positive_number(header.get(f"ImagedVolume{side}")) for side in ("Height", "Width")]
    if spacing is None and None not in volume:
        found = [(length or 0) / size for length, (size, _) in zip(volume, sizes, strict=True)]
        spacing = found[0], found[1]
    elif spacing is not None and not all(
        # Some writers include the padding of the last tiles.
        length is None or abs(length / step - size) <= max(tile, TOLERANCE * size)
        for length, step, (size, tile) in zip(volume, spacing, sizes, strict=True)
    ):
        problems.append(
            f"The size of the whole image in '{path.name}' contradicts its pixel spacing; the "
            "spacing is used."
        )
    return Instance(
        path=path,
        file=file,
        uid=str(dataset.uids.instance),
        series=str(dataset.uids.slide.series_instance),
        flavor=str(dataset.image_type.value),
        width=width,
        height=height,
        tile_width=tile_width,
        tile_height=tile_height,
        encoding=encoding,
        is_planar=is_planar and encoding.samples > 1,
        frames=frames,
        has_depths=(
            dataset.tile_type != TileType.FULL
            or _spacing(dataset) is not None
            or not np.ptp(frames.z)
        ),
        icc=icc,
        spacing=spacing,
        metadata=metadata,
        problems=tuple(problems),
    )


def _count_own_planes(header: Dataset) -> None:
    """Replace the number of focal planes by that of this file if others hold the rest.

    Some writers save each plane as a file that states the number of planes in all files. wsidicom
    would compare that number with the frames of the file.
    """
    stated, frames = header.get("TotalPixelMatrixFocalPlanes"), header.get("NumberOfFrames")
    sides = [
        (header.get("TotalPixelMatrixRows"), header.get("Rows")),
        (header.get("TotalPixelMatrixColumns"), header.get("Columns")),
    ]
    if not stated or not frames or "ConcatenationUID" in header or not all(map(all, sides)):
        return
    tiles = math.prod(math.ceil(size / tile) for size, tile in sides)
    held, rest = divmod(int(frames), tiles * int(header.get("NumberOfOpticalPaths") or 1))
    if header.get("DimensionOrganizationType") == "TILED_FULL" and not rest and 0 < held < stated:
        header.TotalPixelMatrixFocalPlanes = held


def check_attributes(path: Named, header: Dataset) -> None:
    """Refuse a file that lacks a required attribute, or is not a slide image."""
    missing = [keyword for keyword in NEEDED if header.get(keyword) is None]
    if missing:
        raise UnsupportedSlideError(
            f"'{path}' lacks {', '.join(missing)}, which a DICOM slide requires; export it again."
        )
    numbers = [keyword for keyword in COUNTS if not _is_count(header.get(keyword, 1))]
    if numbers:
        raise CorruptSlideError(
            f"'{path}' is damaged: the value of {' and '.join(numbers)} is impossible; "
            "get a fresh copy of it."
        )
    stated = header.get("ImageType")
    flavor = str(stated[2]) if isinstance(stated, MultiValue) and len(stated) > 2 else "none"
    if flavor not in FLAVORS:
        raise UnsupportedSlideError(
            f"'{path}' has the image type {flavor[:16]!r}, but slide files have one of "
            f"{', '.join(FLAVORS)}; open another file of the slide."
        )


def _is_count(value: object) -> bool:
    """Whether a value is missing or a plausible count; the parser multiplies such values."""
    return value is None or (isinstance(value, int) and 0 <= value <= LARGEST_COUNT)


def _check_table(path: ServedFile, reader: WsiDicomReader) -> None:
    """Refuse a large remote file whose frames can be located only by reading most of it."""
    if reader.offset_table_type == OffsetTableType.EMPTY and path.file.size > LARGEST_WALK:
        raise UnsupportedSlideError(
            f"'{path}' has no table of frame offsets, so it can be read only from a local disk; "
            "download the slide's whole folder."
        )


def _encoding(path: Named, dataset: WsiDataset, syntax: UID, header: Dataset) -> Encoding:
    samples, bits = int(dataset.samples_per_pixel), int(dataset.bits)
    allocated = int(header.get("BitsAllocated", bits))
    photometric = str(dataset.photometric_interpretation)
    compression = COMPRESSIONS[syntax]
    color: JpegColor | None = None
    if samples == 1 and photometric in (*GRAYS, PALETTE):
        color = "gray" if compression == COMPRESSION.JPEG else "auto"
    elif samples == 3:
        color = COLORS.get((compression, photometric))
    possible = {
        COMPRESSION.NONE: bits in (8, 16),
        DICOM_RLE: bits in (8, 16),
        COMPRESSION.JPEG: bits == 8,
        COMPRESSION.JPEGXL: bits in (8, 16),
    }
    if bits != allocated and compression in (COMPRESSION.NONE, DICOM_RLE):
        raise UnsupportedSlideError(
            f"'{path}' can't be decoded: {syntax.name} samples that use {bits} of {allocated} bits "
            "are not supported; use 8 or 16 bits, or convert it to JPEG 2000."
        )
    signed = header.get("PixelRepresentation") == 1
    indices = photometric == PALETTE and (samples, bits) == (1, 8)
    table = _palette(path, header) if indices else None
    if (
        color is None
        or not possible.get(compression, 8 <= bits <= 16)
        or signed
        or (photometric == PALETTE and (table is None or compression == COMPRESSION.JPEG))
    ):
        advice = "store them unsigned" if signed else "convert it to JPEG or JPEG 2000"
        raise UnsupportedSlideError(
            f"'{path}' can't be decoded: {samples} {'signed ' * signed}{bits}-bit sample(s) as "
            f"{photometric} in {syntax.name} are not supported; {advice}."
        )
    # The decoder undoes the component transform of a JPEG 2000 code stream (ITU-T T.800, annex G).
    # Converters of Aperio's YCbCr tiles (TIFF compression 33003) label them as YBR_ICT although
    # they lack that transform; then the decoded samples are YCbCr.
    ycbcr = compression in (*JPEG_2000, DICOM_RLE) and photometric.startswith("YBR")
    colors = PHOTOMETRIC.YCBCR if ycbcr else PHOTOMETRIC.RGB
    dtype = "uint8" if bits == 8 else "uint16"
    found = plain_encoding(compression, samples, dtype, color, GRAYS.get(photometric, colors))
    return replace(found, table=table)


def _is_jfif(stream: BinaryIO, frames: Frames) -> bool:
    """Whether the first frame is JFIF and thus YCbCr (ITU-T T.871), even if labeled RGB."""
    if not len(frames.offsets):
        return False
    # Read no more than the marker: the picture may be a label, which names a patient.
    stream.seek(int(frames.offsets[0]) + JFIF_OFFSET)
    return stream.read(len(JFIF)) == JFIF


def _palette(path: Named, header: Dataset) -> bytes:
    """Return the color of each 8-bit value (PS3.3, C.7.6.3.1.5): red, green, blue.

    The descriptors give the first value that is mapped, and the size of entries.
    """
    try:
        colors: NDArray[np.integer] = apply_color_lut(np.arange(256, dtype=np.uint8), header)
    except Exception as error:
        raise _damaged(path, error) from error
    return (colors if colors.dtype == np.uint8 else colors >> 8).astype(np.uint8).tobytes()


def _check_sizes(
    path: Named,
    width: int,
    height: int,
    tile_width: int,
    tile_height: int,
    encoding: Encoding,
    count: int,
) -> None:
    if min(width, height, tile_width, tile_height, count) < 1:
        raise CorruptSlideError(f"'{path}' holds an image without pixels; get a fresh copy of it.")
    tiles = math.ceil(height / tile_height) * math.ceil(width / tile_width)
    tile_bytes = tile_width * tile_height * encoding.samples * np.dtype(encoding.dtype).itemsize
    if max(width, height) >= LARGEST_SIDE or tile_bytes > limits.tile_bytes:
        raise UnsupportedSlideError(
            f"'{path}' claims {width} x {height} pixels in frames of {tile_width} x {tile_height}, "
            "more than a slide can have; get a fresh copy of the file."
        )
    if max(count, tiles) > MOST_FRAMES:
        raise UnsupportedSlideError(
            f"'{path}' claims {max(count, tiles)} frames, more than a slide can have; "
            "get a fresh copy of the file."
        )


def _frames(
    path: Named, ranges: Integers, positions: Positions, grid: tuple[int, int], problems: list[str]
) -> Frames:
    """Combine the byte ranges of the frames, shape (frames, 2), and their tile positions."""
    rows, columns, z, paths = positions
    if len(rows) != len(ranges):
        raise CorruptSlideError(
            f"'{path}' states positions for {len(rows)} frames but holds {len(ranges)}; get a "
            "fresh copy of the file."
        )
    inside = (rows >= 0) & (rows < grid[0]) & (columns >= 0) & (columns < grid[1])
    if not inside.all():
        problems.append(f"{int((~inside).sum())} frames of '{path.name}' lie outside its image.")
    if not inside.any():
        raise CorruptSlideError(
            f"No frame of '{path}' lies in its image; get a fresh copy of the file."
        )
    return Frames(
        ranges[inside, 0],
        ranges[inside, 1],
        rows[inside],
        columns[inside],
        np.round(z[inside], Z_DECIMALS).astype(np.float64),
        paths[inside],
    )


def _full_positions(dataset: WsiDataset, grid: tuple[int, int], header: Dataset) -> Positions:
    """Return the implied positions of TILED_FULL frames (PS3.3, C.7.6.17.3).

    Frames run by optical path, focal plane, row and column, with the column varying fastest.
    """
    items = header.get("OpticalPathSequence") or []
    names = np.array([str(item.get("OpticalPathIdentifier", "0")) for item in items] or ["0"])
    index = np.arange(dataset.frame_count, dtype=np.int64) + dataset.frame_offset
    plane, tile = np.divmod(index, grid[0] * grid[1])
    planes = max(1, int(dataset.number_of_focal_planes))
    if "TotalPixelMatrixFocalPlanes" not in header and "ConcatenationUID" not in header:
        planes = max(1, dataset.frame_count // (grid[0] * grid[1] * len(names)))
    path, z = np.divmod(plane, planes)
    rows, columns = np.divmod(tile, grid[1])
    depths = dataset.z_offset + z * (_spacing(dataset) or 1)
    return rows, columns, depths, names[np.minimum(path, len(names) - 1)]


def _spacing(dataset: WsiDataset) -> float | None:
    """Return the micrometers from one focal plane to the next; None if they are not stated."""
    spacing = positive_number(dataset.spacing_between_slices)  # in millimeters
    return None if spacing is None else spacing * 1000


def _pixel_spacing(
    header: Dataset, frame_groups: Callable[[], Dataset]
) -> tuple[float, float] | None:
    """Return the spacing of rows and columns in mm: the shared one, else the first frame's."""
    shared = _measures(header.get("SharedFunctionalGroupsSequence"))
    if shared is None:
        shared = _measures(frame_groups().get("PerFrameFunctionalGroupsSequence"))
    values = shared.get("PixelSpacing") if shared is not None else None
    found = [positive_number(value) for value in (values if isinstance(values, MultiValue) else ())]
    return (found[0], found[1]) if len(found) == 2 and found[0] and found[1] else None


def _measures(groups: Iterable[Dataset] | None) -> Dataset | None:
    """Return the Pixel Measures of the first item of a functional groups sequence."""
    first = next(iter(groups or ()), None)
    measures = None if first is None else first.get("PixelMeasuresSequence")
    return next(iter(measures or ()), None)


def _is_one_plane(header: Dataset, frames: Frames) -> bool:
    """Whether all frames belong to one focal plane, although their depths may differ."""
    stated = header.get("TotalPixelMatrixFocalPlanes")
    if stated != 1 and (stated is not None or "ConcatenationUID" in header):
        return False
    _, paths = np.unique(frames.paths, return_inverse=True)
    tiles = np.column_stack([frames.rows, frames.columns, paths.reshape(-1)])
    return len(np.unique(tiles, axis=0)) == len(tiles)


def _sparse_positions(file: Named, dataset: WsiDataset, tile: tuple[int, int]) -> Positions:
    stated = dataset.frame_positions
    top, left = stated.rows - 1, stated.columns - 1
    if (top % tile[0]).any() or (left % tile[1]).any():
        raise UnsupportedSlideError(
            f"The frames of '{file}' are not aligned to a regular grid, which is not supported; "
            "convert it to tiled frames."
        )
    count = len(top)
    z, paths = stated.z_offsets, stated.optical_path_identifiers
    if z is None:
        z = np.full(count, dataset.read_z_offset())
    if paths is None:
        paths = np.full(count, dataset.read_optical_path_identifier())
    return top // tile[0], left // tile[1], z, paths


def _check_fragments(path: File, stream: BinaryIO, reader: WsiDicomReader, frames: Frames) -> None:
    """Refuse frames of several fragments (PS3.5, A.4), detected by the first fragment's length."""
    if not reader.transfer_syntax.is_encapsulated or not len(frames.offsets):
        return
    first = int(np.argmin(frames.offsets))
    stream.seek(int(frames.offsets[first]) - ITEM_HEADER)
    tag, length = struct.unpack("<2I", stream.read(ITEM_HEADER))
    if tag != ITEM or length > frames.byte_counts[first] + ITEM_HEADER:
        raise CorruptSlideError(
            f"The frame offsets of '{path}' are wrong; get a fresh copy of the file."
        )
    if length + 1 < frames.byte_counts[first]:
        raise UnsupportedSlideError(
            f"The frames of '{path}' consist of several fragments, which is not supported; "
            "convert it to one fragment per frame."
        )


def _icc_range(header: Dataset, stream: BinaryIO) -> tuple[int, int] | None:
    """Return the offset and length of the first optical path's ICC profile; None if not found."""
    first = next(iter(header.get("OpticalPathSequence") or []), None)
    profile = None if first is None else first.get("ICCProfile")
    if not isinstance(profile, bytes) or not profile:
        return None
    end = stream.tell()
    stream.seek(0)
    offset = stream.read(end).find(profile)
    return (offset, len(profile)) if offset >= 0 else None


def _plain(dataset: Dataset, problems: list[str], depth: int = 0) -> Metadata:
    """Return the attributes that have a keyword, by keyword, without binary data."""
    plain: Metadata = {}
    for tag in sorted(dataset.keys()):
        stored = dataset.get_item(tag)
        if isinstance(stored, RawDataElement) and stored.VR != "SQ" and _is_long(stored):
            if stored.VR not in BYTES_VR:
                problems.append(f"The attribute {tag} is too long and is left out.")
            continue
        try:
            element = dataset[tag]
        except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, struct.error):
            problems.append(f"The attribute {tag} can't be read.")
            continue
        value = element.value
        if not element.keyword or isinstance(value, bytes):
            continue
        if isinstance(value, DicomSequence):
            if depth < DEEPEST:
                plain[element.keyword] = [_plain(item, problems, depth + 1) for item in value]
        elif isinstance(value, MultiValue):
            plain[element.keyword] = [_scalar(each) for each in value]
        else:
            plain[element.keyword] = _scalar(value)
    return plain


def _is_long(stored: RawDataElement) -> bool:
    return stored.value is not None and len(stored.value) > LONGEST_VALUE


def _scalar(value: object) -> int | float | str | None:
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    return None if value is None else str(value)
