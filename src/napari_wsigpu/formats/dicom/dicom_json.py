"""Describe an instance on a DICOMweb server from its attributes as JSON (PS3.18, annex F).

pydicom reads the attributes, and wsidicom interprets them; the extra ``dicom`` installs both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
from pydicom import Dataset
from pydicom.dataset import FileMetaDataset
from pydicom.uid import (
    HTJ2K,
    JPEG2000,
    UID,
    ExplicitVRLittleEndian,
    JPEGBaseline8Bit,
    JPEGLSLossless,
    RLELossless,
    VLWholeSlideMicroscopyImageStorage,
)
from pydicom.valuerep import BYTES_VR
from wsidicom.instance import WsiDataset
from wsidicom.instance.per_frame_group_positions import PerFrameGroupPositions
from wsidicom.uid import JPEGXL

from napari_wsigpu.formats.dicom.dicom_instance import (
    COMPRESSIONS,
    Contents,
    as_slide_errors,
    check_attributes,
    check_syntax,
    described,
    without_warnings,
)
from napari_wsigpu.model.errors import CorruptSlideError, NotASlideError, UnsupportedSlideError
from napari_wsigpu.model.layout import SlideFile
from napari_wsigpu.model.tags import COMPRESSION

if TYPE_CHECKING:
    from napari_wsigpu.formats.dicom.dicom_instance import Instance
    from napari_wsigpu.model.arrays import Integers
    from napari_wsigpu.storage.remote.multipart import Part

    Fetch = Callable[[str], bytes | None]

Attributes = Mapping[str, Any]

# Tags as they are written in JSON.
SYNTAX, CLASS, INSTANCE, AVAILABLE_SYNTAXES = "00020010", "00080016", "00080018", "00083002"
OPTICAL_PATHS, PROFILE, PER_FRAME_GROUPS = "00480105", "00282000", "52009230"
PALETTE = re.compile(r"0028[12]20[1-3]")
# In the groups of a frame: its position, and its optical path.
POSITION, COLUMN, ROW, Z_OFFSET = "0048021A", "0048021E", "0048021F", "0040074A"
OPTICAL_PATH, OPTICAL_PATH_NAME = "00480207", "00480106"
UID_TEXT = re.compile(r"[0-9.]{1,64}")
MOST_INSTANCES = 256
# The media types of compressed frames (PS3.18, section 8.7.3.3), each with a transfer syntax that
# is decoded like all others of the type.
SYNTAXES = {
    "image/jpeg": JPEGBaseline8Bit,
    "image/jls": JPEGLSLossless,
    "image/jp2": JPEG2000,
    "image/jphc": HTJ2K,
    "image/jxl": JPEGXL,
    "image/dicom-rle": RLELossless,
    "image/x-dicom-rle": RLELossless,
}
# Bytes for the headers of a compressed frame, which may contain a profile.
RESERVED_HEADER = 64 << 10


@dataclass(frozen=True, eq=False)
class WebInstance:
    """A whole-slide instance on a DICOMweb server.

    Attributes
    ----------
    url : str
        Its URL without secrets.
    attributes : Mapping
        Its attributes, as the server sends them.
    """

    url: str
    attributes: Attributes

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """Its UID."""
        return self.url.rpartition("/")[2]

    @property
    def version(self) -> str:
        """A hash that changes with any attribute."""
        return sha256(json.dumps(self.attributes, sort_keys=True).encode()).hexdigest()


def slide_instances(name: str, data: memoryview) -> list[WebInstance]:
    """Return the whole-slide instances that the metadata of a series list.

    Parameters
    ----------
    name : str
        The URL of the series without secrets.
    data : memoryview
        The metadata.

    Raises
    ------
    NotASlideError
        If there are none.
    CorruptSlideError, UnsupportedSlideError
        If the metadata are damaged, or list too many.
    """
    try:
        found = [
            WebInstance(f"{name}/instances/{_first(item, INSTANCE)}", item)
            for item in json.loads(bytes(data))
            if _first(item, CLASS) == VLWholeSlideMicroscopyImageStorage
        ]
    except MemoryError:
        raise
    except Exception:  # a damaged value can cause any exception
        raise _damaged(name) from None  # the error contains the metadata
    if not all(UID_TEXT.fullmatch(each.name) for each in found):
        raise _damaged(name)
    if not found:
        raise NotASlideError(
            f"'{name}' is a DICOM series, but not of whole-slide images; open it with a radiology "
            "viewer."
        )
    if len(found) > MOST_INSTANCES:
        raise UnsupportedSlideError(
            f"'{name}' has {len(found)} instances, more than a slide can have; check the series."
        )
    return found


def read(instance: WebInstance, first: Part, fetch: Fetch) -> tuple[Instance, int]:
    """Describe an instance.

    Parameters
    ----------
    instance : WebInstance
        The instance.
    first : Part
        Its first frame, which shows how all frames are encoded.
    fetch : callable
        Returns the bytes at a BulkDataURI, or None if they can't be read.

    Returns
    -------
    Instance
        Frames have virtual byte ranges; see `storage.remote.dicom_frames`.
    int
        Bytes reserved for a frame.

    Raises
    ------
    CorruptSlideError, UnsupportedSlideError
        If it is damaged or can't be shown.
    """
    with as_slide_errors(instance), without_warnings():
        return _read(instance, first, fetch)


def _read(instance: WebInstance, first: Part, fetch: Fetch) -> tuple[Instance, int]:
    def bulk(tag: str, vr: str, uri: str) -> bytes | None:
        if PALETTE.fullmatch(tag):
            return fetch(uri)
        return b"" if vr in BYTES_VR else None

    attributes = instance.attributes
    syntax = _syntax(first, attributes)
    check_syntax(instance, syntax)
    # Leave out group 2, which belongs to files, and the pixels, which follow the groups of frames.
    own = {tag: item for tag, item in attributes.items() if "0003" < tag < PER_FRAME_GROUPS}
    header = Dataset.from_json(own, bulk)
    header.file_meta = FileMetaDataset()
    header.file_meta.TransferSyntaxUID = syntax
    check_attributes(instance, header)
    groups = attributes.get(PER_FRAME_GROUPS, {}).get("Value") or []
    dataset = WsiDataset(header, _positions(groups))
    count = int(dataset.frame_count)
    bits = int(header.get("BitsAllocated", header.BitsStored))
    size = header.Rows * header.Columns * header.SamplesPerPixel * bits // 8
    reserved = size
    if COMPRESSIONS[syntax] != COMPRESSION.NONE:
        reserved = size + size // 2 + RESERVED_HEADER
    elif len(first.data) < size:
        raise UnsupportedSlideError(
            f"The server does not state how the frames of '{instance}' are encoded; download the "
            "series and open its folder."
        )

    def first_groups() -> Dataset:
        return Dataset.from_json({PER_FRAME_GROUPS: {"vr": "SQ", "Value": groups[:1]}})

    def locate() -> Integers:
        starts = np.arange(count, dtype=np.int64) * reserved
        return np.column_stack([starts, np.full(count, reserved, np.int64)])

    path: Dataset = next(iter(header.get("OpticalPathSequence") or []), Dataset())
    icc = path.get("ICCProfile") or _profile(attributes, fetch)
    contents = Contents(header, dataset, syntax, icc, locate, first_groups)
    file = SlideFile(instance.url, count * reserved, 0)
    return described(instance, file, contents), reserved


def _syntax(first: Part, attributes: Attributes) -> UID:
    """Return the transfer syntax of a frame from the response, else from the attributes."""
    available = attributes.get(AVAILABLE_SYNTAXES, {}).get("Value") or []
    return UID(
        first.transfer_syntax
        or SYNTAXES.get(first.media_type)
        or _first(attributes, SYNTAX)
        or (str(available[0]) if len(available) == 1 else ExplicitVRLittleEndian)
    )


def _positions(groups: Sequence[Attributes]) -> PerFrameGroupPositions | None:
    """Return the positions of frames, given the groups of each; None if they are implied.

    pydicom would take a millisecond for each frame.
    """
    if not groups or POSITION not in groups[0]:
        return None
    positions = [group[POSITION]["Value"][0] for group in groups]
    paths: list[Attributes] = [
        next(iter(group.get(OPTICAL_PATH, {}).get("Value") or []), {}) for group in groups
    ]
    depths = [position[Z_OFFSET]["Value"][0] for position in positions if Z_OFFSET in position]
    names = [_first(path, OPTICAL_PATH_NAME) for path in paths if OPTICAL_PATH_NAME in path]
    if not {len(depths), len(names)} <= {0, len(groups)}:
        raise ValueError("only some of its frames have a depth or an optical path")
    return PerFrameGroupPositions(
        np.array([int(position[COLUMN]["Value"][0]) for position in positions], np.int64),
        np.array([int(position[ROW]["Value"][0]) for position in positions], np.int64),
        np.array(depths, np.float64) if depths else None,
        np.array(names, np.str_) if names else None,
    )


def _profile(attributes: Attributes, fetch: Fetch) -> Callable[[], bytes | None] | None:
    """Return a function that reads the first optical path's ICC profile, if the server has it."""
    path: Attributes = next(iter(attributes.get(OPTICAL_PATHS, {}).get("Value") or []), {})
    uri = path.get(PROFILE, {}).get("BulkDataURI")
    return (lambda: fetch(uri)) if isinstance(uri, str) else None


def _first(attributes: Attributes, tag: str) -> str:
    """Return the first value of an attribute as text; empty if it has none."""
    return str(next(iter(attributes.get(tag, {}).get("Value") or []), ""))


def _damaged(name: str) -> CorruptSlideError:
    return CorruptSlideError(f"The server sent damaged metadata for '{name}'; try again later.")
