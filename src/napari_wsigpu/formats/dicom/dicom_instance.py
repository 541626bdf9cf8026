"""One file of a DICOM slide: where its frames lie, how they are encoded, what it says.

wsidicom finds the frames, and pydicom reads the attributes; both are the extra ``dicom``.
"""

from __future__ import annotations

import errno
import math
import struct
import threading
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydicom.dataelem import RawDataElement
from pydicom.filereader import read_dataset, read_partial, read_preamble
from pydicom.multival import MultiValue
from pydicom.sequence import Sequence as DicomSequence
from pydicom.tag import BaseTag
from pydicom.uid import (
    JPEG2000,
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLSLossless,
    JPEGLSNearLossless,
)
from pydicom.valuerep import BYTES_VR
from upath import UPath
from wsidicom.errors import WsiDicomNotSupportedError
from wsidicom.file.io import WsiDicomReader, WsiDicomReadIO
from wsidicom.file.io.frame_index import OffsetTableType
from wsidicom.instance import TileType

from napari_wsigpu.formats.fields import positive_number
from napari_wsigpu.formats.tiff.tiff import LARGEST_SIDE
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    SlideError,
    UnsupportedSlideError,
    file_error,
)
from napari_wsigpu.model.layout import Encoding, JpegColor, SlideFile
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.tags import COMPRESSION, FILLORDER, JPEG_LS, PHOTOMETRIC, PREDICTOR
from napari_wsigpu.storage.bounded import BoundedReader
from napari_wsigpu.storage.remote.served import ServedFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

    from numpy.typing import NDArray
    from pydicom import Dataset
    from wsidicom.instance import WsiDataset

    File = Path | ServedFile
    Positions = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]

COMPRESSIONS = {
    ImplicitVRLittleEndian: COMPRESSION.NONE,
    ExplicitVRLittleEndian: COMPRESSION.NONE,
    JPEGBaseline8Bit: COMPRESSION.JPEG,
    JPEGExtended12Bit: COMPRESSION.JPEG,
    JPEG2000Lossless: COMPRESSION.JPEG2000,
    JPEG2000: COMPRESSION.JPEG2000,
    JPEGLSLossless: JPEG_LS,
    JPEGLSNearLossless: JPEG_LS,
}
# By compression and photometric interpretation: what the codecs call colours of JPEG.
COLORS: dict[tuple[int, str], JpegColor] = {
    (COMPRESSION.NONE, "RGB"): "auto",
    (JPEG_LS, "RGB"): "auto",
    (COMPRESSION.JPEG, "RGB"): "stored",
    (COMPRESSION.JPEG, "YBR_FULL"): "ycbcr",
    (COMPRESSION.JPEG, "YBR_FULL_422"): "ycbcr",
    (COMPRESSION.JPEG2000, "RGB"): "auto",
    (COMPRESSION.JPEG2000, "YBR_ICT"): "auto",
    (COMPRESSION.JPEG2000, "YBR_RCT"): "auto",
    (COMPRESSION.JPEG2000, "YBR_FULL"): "auto",
    (COMPRESSION.JPEG2000, "YBR_FULL_422"): "auto",
}
PER_FRAME_GROUPS = 0x52009230
MOST_FRAMES = 1 << 22
# By how much of it the size of the whole image may contradict the spacing of pixels.
UNLIKE = 0.01
ITEM, ITEM_HEADER = 0xE000FFFE, 8
Z_DECIMALS = 6
LONGEST_VALUE = 1 << 16
NEEDED = (
    "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "ImageType", "Rows", "Columns",
    "TotalPixelMatrixColumns", "TotalPixelMatrixRows", "SamplesPerPixel",
    "PhotometricInterpretation", "BitsStored",
)  # fmt: skip
COUNTS = (
    "Rows", "Columns", "TotalPixelMatrixColumns", "TotalPixelMatrixRows", "NumberOfFrames",
    "NumberOfOpticalPaths", "TotalPixelMatrixFocalPlanes",
)  # fmt: skip
MOST_COUNTED = 1 << 32
FLAVORS = "VOLUME", "LABEL", "OVERVIEW", "THUMBNAIL"
DEEPEST = 16
FILE_META = 2
# wsidicom opens a file anew to read it in larger parts, if its path is that of one.
NO_PATH = "memory:///no file"
# Without a table of frames each one's begin is read: on a server that is most of the file.
LARGEST_WALK = 64 << 20

_filtering = threading.Lock()


class Frames(NamedTuple):
    """The frames of an instance, one entry each.

    Attributes
    ----------
    offsets, byte_counts : ndarray of int64
        Where they lie in the file.
    rows, columns : ndarray of int64
        Which tile of the level they are.
    z : ndarray of float64
        Their focal plane: micrometres above the slide if the instance says so, else a number.
    paths : ndarray of str
        Their optical path.
    """

    offsets: NDArray[np.int64]
    byte_counts: NDArray[np.int64]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    z: NDArray[np.float64]
    paths: NDArray[np.str_]


@dataclass(frozen=True)
class Instance:
    """What one file says.

    Attributes
    ----------
    path : Path or ServedFile
        The file.
    file : SlideFile
        The same with its size and age.
    uid, series : str
        Its own UID and its series'.
    flavor : {"VOLUME", "LABEL", "OVERVIEW", "THUMBNAIL"}
        What it shows.
    width, height, tile_width, tile_height : int
        Sizes of the whole picture and of one frame.
    encoding : Encoding
        How its frames are encoded.
    frames : Frames
        Its frames.
    has_depths : bool
        Whether `frames` says focal planes in micrometres.
    icc : tuple of (int, int) or None
        Offset and length of the ICC profile in the file.
    spacing : tuple of float or None
        Millimetres from one row of pixels to the next, and from one column to the next.
    metadata : dict
        All attributes by keyword, JSON-serialisable.
    problems : tuple of str
        What is wrong with it, one sentence each.
    """

    path: File
    file: SlideFile
    uid: str
    series: str
    flavor: str
    width: int
    height: int
    tile_width: int
    tile_height: int
    encoding: Encoding
    frames: Frames
    has_depths: bool
    icc: tuple[int, int] | None
    spacing: tuple[float, float] | None
    metadata: dict[str, Any]
    problems: tuple[str, ...]


def read(path: File, series: str | None = None) -> Instance | None:
    """Describe one DICOM whole-slide file.

    Parameters
    ----------
    path : Path or ServedFile
        The file.
    series : str, optional
        UID of the only series that is wanted; of a file of another one all returned is None.

    Raises
    ------
    CorruptSlideError, UnsupportedSlideError
        If it is damaged, or holds what can't be shown.
    SlideError
        If it can't be read.
    """
    try:
        with _opened(path) as (stream, file), _without_warnings():
            return _read(path, stream, file, series)
    except SlideError:
        raise
    except OSError as error:
        if error.errno == errno.EINVAL:  # an offset before the file's begin
            raise _damaged(path, error) from error
        raise file_error(str(path), error) from error
    except WsiDicomNotSupportedError as error:
        raise UnsupportedSlideError(
            f"'{path}' can't be shown: its kind of image, its colours or its samples are not "
            "supported; convert it to RGB, or gray, of 8 bit."
        ) from error
    except MemoryError:
        raise
    except Exception as error:
        # On damaged files the parsers raise whatever the damaged value happened to break.
        raise _damaged(path, error) from error


@contextmanager
def _opened(path: File) -> Iterator[tuple[BinaryIO, SlideFile]]:
    if isinstance(path, ServedFile):
        with path.open() as served:
            yield served, path.file
    else:
        with BoundedReader(path.open("rb", buffering=0)) as stream:
            yield stream, SlideFile.of(str(path), path.stat())


def _file_meta(stream: BinaryIO) -> Dataset:
    """Return the attributes in front of all others, which say how these are encoded."""
    read_preamble(stream, force=False)
    found: Dataset = read_dataset(
        stream, False, True, stop_when=lambda tag, *_: int(tag) >> 16 != FILE_META
    )
    stream.seek(0)
    return found


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep to ourselves what pydicom says of values; what matters becomes an error or a problem."""
    # The list of filters belongs to the process: two threads that put it back would mix it up.
    with _filtering, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _damaged(path: File, error: Exception) -> CorruptSlideError:
    reason = str(getattr(error, "error", error)).split("\n")[0].rstrip(".")[:120]
    return CorruptSlideError(
        f"The DICOM file '{path}' is damaged ({reason or type(error).__name__}); "
        "get a fresh copy of it."
    )


def _read(path: File, stream: BinaryIO, file: SlideFile, series: str | None) -> Instance | None:
    syntax = UID(str(_file_meta(stream).get("TransferSyntaxUID", "")))
    # A deflated header might be of any size.
    header = None if syntax == DeflatedExplicitVRLittleEndian else read_partial(stream, _is_frames)
    if header is not None and stream.tell() >= file.size:
        raise CorruptSlideError(
            f"'{path}' is cut off: its {file.size} bytes end before its first frame; "
            "get a fresh copy of it."
        )
    if header is not None and series not in (None, header.get("SeriesInstanceUID")):
        return None
    if header is None or syntax not in COMPRESSIONS:
        name = " ".join(str(syntax.name).split())[:64]
        raise UnsupportedSlideError(
            f"'{path}' can't be decoded: its transfer syntax, {name or 'none'}, is not "
            "supported; convert it to JPEG or JPEG 2000."
        )
    _check_attributes(path, header)
    icc = _icc_range(header, stream)
    problems: list[str] = []
    metadata = _plain(header.file_meta, problems) | _plain(header, problems)
    reader = WsiDicomReader(
        WsiDicomReadIO(stream, UPath(NO_PATH if isinstance(path, ServedFile) else path))
    )
    dataset = reader.dataset
    width, height = int(dataset.image_size.width), int(dataset.image_size.height)
    tile_width, tile_height = int(dataset.tile_size.width), int(dataset.tile_size.height)
    encoding = _encoding(path, reader, header)
    _check_sizes(path, width, height, tile_width, tile_height, encoding, dataset.frame_count)
    grid = (math.ceil(height / tile_height), math.ceil(width / tile_width))
    if isinstance(path, ServedFile):
        _check_table(path, reader)
    places = np.array(list(reader.frame_index), np.int64).reshape(-1, 2)
    if dataset.tile_type == TileType.FULL:
        stated = _full_positions(dataset, grid, header)
    else:
        stated = _sparse_positions(path, dataset, (tile_height, tile_width))
    frames = _frames(path, places, stated, grid, problems)
    if _is_one_plane(header, frames) and np.ptp(frames.z):
        # Each frame tells where it was in focus; the parts of a concatenation need one number.
        part = "ConcatenationUID" in header
        depth = dataset.z_offset if part else float(np.median(frames.z))
        frames = frames._replace(z=np.full_like(frames.z, depth))
    _check_fragments(path, stream, reader, frames)
    spacing = _pixel_spacing(header, stream)
    sizes = (height, tile_height), (width, tile_width)
    volume = [positive_number(header.get(f"ImagedVolume{side}")) for side in ("Height", "Width")]
    if spacing is None and None not in volume:
        found = [(length or 0) / size for length, (size, _) in zip(volume, sizes, strict=True)]
        spacing = found[0], found[1]
    elif spacing is not None and not all(
        # The last tiles may be counted as a whole.
        length is None or abs(length / step - size) <= max(tile, UNLIKE * size)
        for length, step, (size, tile) in zip(volume, spacing, sizes, strict=True)
    ):
        problems.append(
            f"'{path.name}' states a pixel spacing, which counts, and a size of the whole image "
            "that contradicts it."
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


def _check_attributes(path: File, header: Dataset) -> None:
    """Refuse what lacks an attribute without which no slide can be read, or is no part of one."""
    missing = [keyword for keyword in NEEDED if header.get(keyword) is None]
    if missing:
        raise UnsupportedSlideError(
            f"'{path}' lacks {', '.join(missing)}, which every DICOM slide states; export it again."
        )
    numbers = [keyword for keyword in COUNTS if not _is_count(header.get(keyword, 1))]
    if numbers:
        raise CorruptSlideError(
            f"'{path}' is damaged: its {', '.join(numbers)} is no number of that; "
            "get a fresh copy of it."
        )
    stated = header.get("ImageType")
    flavor = str(stated[2]) if isinstance(stated, MultiValue) and len(stated) > 2 else "none"
    if flavor not in FLAVORS:
        raise UnsupportedSlideError(
            f"'{path}' is said to be an image of the kind {flavor[:16]!r}, which no part of a "
            f"slide is ({', '.join(FLAVORS)}); open another file of the slide."
        )


def _is_count(value: Any) -> bool:
    """Whether a value can be a number of pixels, planes or frames; the parser multiplies these."""
    return value is None or (isinstance(value, int) and 0 <= value <= MOST_COUNTED)


def _check_table(path: ServedFile, reader: WsiDicomReader) -> None:
    """Refuse a file on a server of which most had to be read to find its frames."""
    if reader.offset_table_type == OffsetTableType.EMPTY and path.file.size > LARGEST_WALK:
        raise UnsupportedSlideError(
            f"'{path}' has no table of where its frames lie, without which it can only be read "
            "from a disk; download the slide's whole folder."
        )


def _is_frames(tag: BaseTag, vr: str | None, length: int) -> bool:
    return int(tag) >= PER_FRAME_GROUPS


def _encoding(path: File, reader: WsiDicomReader, header: Dataset) -> Encoding:
    dataset = reader.dataset
    samples, bits = int(dataset.samples_per_pixel), int(dataset.bits)
    allocated = int(header.get("BitsAllocated", bits))
    photometric = str(dataset.photometric_interpretation)
    compression = COMPRESSIONS.get(reader.transfer_syntax)
    color: JpegColor | None = None
    if compression is not None and samples == 1:
        color = "gray" if compression == COMPRESSION.JPEG else "auto"
    elif compression is not None and samples == 3:
        color = COLORS.get((compression, photometric))
    possible = {
        COMPRESSION.NONE: bits == allocated and bits in (8, 16),
        COMPRESSION.JPEG: bits == 8,
        COMPRESSION.JPEG2000: 8 <= bits <= 16,
        JPEG_LS: 8 <= bits <= 16,
    }
    if color is None or compression is None or not possible[compression]:
        raise UnsupportedSlideError(
            f"'{path}' can't be decoded: {samples} sample(s) of {bits} bit as {photometric} in "
            f"{UID(reader.transfer_syntax).name} are not supported; "
            "convert it to JPEG or JPEG 2000."
        )
    # Whatever JPEG 2000 is said to be, components that a code stream does not transform are stored
    # by it: YBR_ICT without a transform, as converters of Aperio's 33003 write it, is plain YCbCr.
    ycbcr = compression == COMPRESSION.JPEG2000 and photometric.startswith("YBR")
    colors = PHOTOMETRIC.YCBCR if ycbcr else PHOTOMETRIC.RGB
    return Encoding(
        compression=compression,
        photometric=PHOTOMETRIC.MINISBLACK if samples == 1 else colors,
        predictor=PREDICTOR.NONE,
        fill_order=FILLORDER.MSB2LSB,
        byte_order="<",
        dtype="uint8" if bits == 8 else "uint16",
        samples=samples,
        jpeg_color=color,
    )


def _check_sizes(
    path: File,
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
    path: File,
    places: NDArray[np.int64],
    stated: Positions,
    grid: tuple[int, int],
    problems: list[str],
) -> Frames:
    """Join where the frames lie in the file and where in the image."""
    rows, columns, z, paths = stated
    if len(rows) != len(places):
        raise CorruptSlideError(
            f"'{path}' states places for {len(rows)} frames but holds {len(places)}; "
            "get a fresh copy of the file."
        )
    inside = (rows >= 0) & (rows < grid[0]) & (columns >= 0) & (columns < grid[1])
    if not inside.all():
        problems.append(f"{int((~inside).sum())} frames of '{path.name}' lie outside of its image.")
    if not inside.any():
        raise CorruptSlideError(
            f"No frame of '{path}' lies in its image; get a fresh copy of the file."
        )
    return Frames(
        places[inside, 0],
        places[inside, 1],
        rows[inside],
        columns[inside],
        np.round(z[inside], Z_DECIMALS).astype(np.float64),
        paths[inside],
    )


def _full_positions(dataset: WsiDataset, grid: tuple[int, int], header: Dataset) -> Positions:
    """Tiles lie row by row, planes of tiles by focal plane, then by optical path."""
    stated = header.get("OpticalPathSequence") or []
    names = np.array([str(item.get("OpticalPathIdentifier", "0")) for item in stated] or ["0"])
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
    """Return micrometres from one focal plane to the next, where that is stated."""
    spacing = positive_number(dataset.spacing_between_slices)  # in millimetres
    return None if spacing is None else spacing * 1000


def _pixel_spacing(header: Dataset, stream: BinaryIO) -> tuple[float, float] | None:
    """Return the spacing of rows and columns that all frames share, or else the first one's."""
    shared = _measures(header.get("SharedFunctionalGroupsSequence"))
    if shared is None:
        stream.seek(0)
        frames = read_partial(
            stream,
            lambda tag, *_: int(tag) > PER_FRAME_GROUPS,
            specific_tags=[BaseTag(PER_FRAME_GROUPS)],
        )
        shared = _measures(frames.get("PerFrameFunctionalGroupsSequence"))
    values = shared.get("PixelSpacing") if shared is not None else None
    found = [positive_number(value) for value in (values if isinstance(values, MultiValue) else ())]
    return (found[0], found[1]) if len(found) == 2 and found[0] and found[1] else None


def _measures(groups: Any) -> Dataset | None:
    """Return what the first one of functional groups says of the size of pixels."""
    first = next(iter(groups or ()), None)
    measures = None if first is None else first.get("PixelMeasuresSequence")
    return next(iter(measures or ()), None)


def _is_one_plane(header: Dataset, frames: Frames) -> bool:
    """Whether all frames are of one focal plane, though their depths may differ."""
    stated = header.get("TotalPixelMatrixFocalPlanes")
    if stated != 1 and (stated is not None or "ConcatenationUID" in header):
        return False
    _, paths = np.unique(frames.paths, return_inverse=True)
    places = np.column_stack([frames.rows, frames.columns, paths.reshape(-1)])
    return len(np.unique(places, axis=0)) == len(places)


def _sparse_positions(file: File, dataset: WsiDataset, tile: tuple[int, int]) -> Positions:
    stated = dataset.frame_positions
    top, left = stated.rows - 1, stated.columns - 1
    if (top % tile[0]).any() or (left % tile[1]).any():
        raise UnsupportedSlideError(
            f"The frames of '{file}' lie in no regular grid, which can't be shown yet; "
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
    """Refuse frames that are cut into pieces, by the first one's own length."""
    if not reader.transfer_syntax.is_encapsulated or not len(frames.offsets):
        return
    first = int(np.argmin(frames.offsets))
    stream.seek(int(frames.offsets[first]) - ITEM_HEADER)
    tag, length = struct.unpack("<2I", stream.read(ITEM_HEADER))
    if tag != ITEM or length > frames.byte_counts[first] + ITEM_HEADER:
        raise CorruptSlideError(
            f"The list of frames of '{path}' leads astray; get a fresh copy of the file."
        )
    if length + 1 < frames.byte_counts[first]:
        raise UnsupportedSlideError(
            f"The frames of '{path}' are cut into fragments, which can't be shown yet; "
            "convert it to one fragment a frame."
        )


def _icc_range(header: Dataset, stream: BinaryIO) -> tuple[int, int] | None:
    """Return where the first optical path's profile lies, if its bytes are found."""
    first = next(iter(header.get("OpticalPathSequence") or []), None)
    profile = None if first is None else first.get("ICCProfile")
    if not isinstance(profile, bytes) or not profile:
        return None
    end = stream.tell()
    stream.seek(0)
    offset = stream.read(end).find(profile)
    return (offset, len(profile)) if offset >= 0 else None


def _plain(dataset: Dataset, problems: list[str], depth: int = 0) -> dict[str, Any]:
    """Return the attributes that have a keyword and are no bulk of bytes."""
    plain: dict[str, Any] = {}
    for tag in sorted(dataset.keys()):
        stored = dataset.get_item(tag)
        if isinstance(stored, RawDataElement) and stored.VR != "SQ" and _is_long(stored):
            if stored.VR not in BYTES_VR:
                problems.append(f"The attribute {tag} is left out, as it is too long.")
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


def _scalar(value: Any) -> Any:
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    return None if value is None else str(value)
