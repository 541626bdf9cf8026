"""DICOM segmentations of slides (PS3.3, C.8.20), read as label images."""

from __future__ import annotations

import math
import os
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.annotations.dicom_annotations import (
    CENTER,
    PixelTransform,
    damage_errors,
    data_set,
    display_color,
    pixel_size,
    read_data_set,
)
from napari_wsigpu.codecs.compressions import BY_CODE, ImageCompression
from napari_wsigpu.model.errors import AnnotationError
from napari_wsigpu.model.layout import Encoding
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.tags import (
    COMPRESSION,
    DICOM_RLE,
    FILLORDER,
    HTJ2K,
    JPEG_LS,
    PHOTOMETRIC,
    PREDICTOR,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from pydicom import Dataset

    from napari_wsigpu.annotations.annotation import Color

    Pair = tuple[float, float]

SEGMENTATION = "1.2.840.10008.5.1.4.1.1.66.4"
LARGEST_NUMBER = 0xFFFF  # of a segment
ROUNDED = 1e-3  # tolerance for rotation, as a fraction of the segmentation's pixel size
# Compression of the frames, by transfer syntax.
ENCAPSULATED = {
    f"1.2.840.10008.1.2.{syntax}": code
    for code, syntaxes in (
        (DICOM_RLE, ("5",)),
        (JPEG_LS, ("4.80", "4.81")),
        (COMPRESSION.JPEG2000, ("4.90", "4.91")),
        (HTJ2K, ("4.201", "4.202", "4.203")),
    )
    for syntax in syntaxes
}


class Segment(NamedTuple):
    """One segment, such as a tissue class.

    Attributes
    ----------
    name, kind : str
        Label of the segment, and meaning of its property type.
    color : tuple of int or None
        Red, green and blue from 0 to 255.
    """

    name: str
    kind: str
    color: Color | None


class Segmentation(NamedTuple):
    """A label image.

    Attributes
    ----------
    labels : ndarray of uint8 or uint16, shape (height, width)
        Segment number of each pixel: 0 outside all segments, the highest number where several
        overlap.
    segments : dict of int to Segment
        The segments by number.
    pixel_size : tuple of float
        Width and height of a pixel in millimeters.
    transform : PixelTransform or None
        Position of the pixels on the glass; None if the file does not state it.
    """

    labels: NDArray[np.unsignedinteger]
    segments: dict[int, Segment]
    pixel_size: Pair
    transform: PixelTransform | None

    def place_on(self, slide: Mapping[str, Any]) -> tuple[Pair, Pair]:
        """Locate the label image on a DICOM slide, given the slide's metadata.

        Returns
        -------
        tuple of ((float, float), (float, float))
            Size of a pixel and position of the upper left corner, (x, y) in pixels of level 0.

        Raises
        ------
        AnnotationError
            If the slide or the segmentation has no position on the glass, or one is rotated
            relative to the other.
        """
        if self.transform is None:
            raise AnnotationError(
                "The segmentation does not state its position on the glass; export it again."
            )
        try:
            to_slide = PixelTransform(data_set(slide))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise AnnotationError(
                f"The slide does not state its position on the glass ({error}); open the "
                "segmentation without the slide."
            ) from error
        corners = np.array([[0, 0], [1, 0], [0, 1]]) + CENTER
        first, right, below = to_slide(self.transform.on_glass(corners))
        across, down = right - first, below - first
        tolerance = ROUNDED * max(np.abs(across).max(), np.abs(down).max())
        if not (across[0] > tolerance > abs(across[1]) and down[1] > tolerance > abs(down[0])):
            raise AnnotationError(
                "The segmentation is rotated relative to the slide, which is not supported; open "
                "it without the slide."
            )
        step = float(across[0]), float(down[1])
        return step, (float(first[0]) - step[0] * CENTER, float(first[1]) - step[1] * CENTER)


def read_dicom_segmentation(path: str | os.PathLike[str]) -> Segmentation:
    """Read a binary or fractional DICOM segmentation of a slide, TILED_FULL or TILED_SPARSE.

    Parameters
    ----------
    path : str or PathLike
        The file. It may be deflated, and the frames of fractional segmentations may be compressed
        with RLE, JPEG-LS, JPEG 2000 or HTJ2K.

    Returns
    -------
    Segmentation
        The label image, as large as the segmented level. In a fractional segmentation, pixels with
        at least half of the maximum value belong to the segment.

    Raises
    ------
    AnnotationError
        If the file is not valid or has too many pixels, or pydicom is not installed.
    SlideError
        If the file cannot be read.

    Examples
    --------
    >>> labels = read_dicom_segmentation("tissue.dcm").labels  # doctest: +SKIP
    """
    name = os.fspath(path)
    found = read_data_set(name, ENCAPSULATED)
    if found.get("SOPClassUID") != SEGMENTATION or "TotalPixelMatrixColumns" not in found:
        raise AnnotationError(
            f"'{name}' is a DICOM file but not a slide segmentation; choose another file."
        )
    with damage_errors(f"The segmentation in '{name}' is damaged"):
        return _segmentation(found, name)


def _segmentation(found: Dataset, name: str) -> Segmentation:
    segments = {
        int(each.SegmentNumber): Segment(
            str(each.get("SegmentLabel", "")),
            str(each.SegmentedPropertyTypeCodeSequence[0].CodeMeaning),
            display_color(each),
        )
        for each in found.SegmentSequence
    }
    if not segments or min(segments) < 1 or max(segments) > LARGEST_NUMBER:
        raise ValueError("a segment number is out of range")
    height, width = int(found.TotalPixelMatrixRows), int(found.TotalPixelMatrixColumns)
    rows, columns = int(found.Rows), int(found.Columns)
    if min(height, width, rows, columns) < 1:
        raise ValueError("it has no pixels")
    dtype = np.dtype(np.uint8 if max(segments) <= 0xFF else np.uint16)
    for limit, count in (
        ("geojson_bytes", height * width * dtype.itemsize),
        ("tile_bytes", rows * columns),
    ):
        if count > getattr(limits, limit):
            raise AnnotationError(
                f"'{name}' is too large ({width} x {height} pixels in frames of {columns} x "
                f"{rows}): {limits.advice(limit)}."
            )
    labels = np.zeros((height, width), dtype)
    positions, masks = _positions(found, list(segments)), _masks(found)
    for (number, top, left), mask in zip(positions, masks, strict=True):
        if number not in segments or top < 0 or left < 0:
            raise ValueError(
                f"a frame of segment {number} at row {top}, column {left} is not valid"
            )
        part = labels[top : top + rows, left : left + columns]
        inside = mask[: part.shape[0], : part.shape[1]]
        part[inside & (part < number)] = number
    is_located = "TotalPixelMatrixOriginSequence" in found
    transform = PixelTransform(found) if is_located else None
    sizes = pixel_size(found)
    if not all(0 < size < math.inf for size in sizes):
        raise ValueError("its pixel size is not valid")
    return Segmentation(labels, segments, sizes, transform)


def _positions(found: Dataset, segments: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the segment, top row and left column of each frame (PS3.3, C.7.6.17.3)."""
    if found.get("DimensionOrganizationType") == "TILED_FULL":
        tops = range(0, int(found.TotalPixelMatrixRows), int(found.Rows))
        lefts = range(0, int(found.TotalPixelMatrixColumns), int(found.Columns))
        yield from product(segments, tops, lefts)
        return
    [shared] = found.SharedFunctionalGroupsSequence
    for frame in found.PerFrameFunctionalGroupsSequence:
        [segment] = frame.get("SegmentIdentificationSequence") or (
            shared.SegmentIdentificationSequence
        )
        [position] = frame.PlanePositionSlideSequence
        yield (
            int(segment.ReferencedSegmentNumber),
            int(position.RowPositionInTotalImagePixelMatrix) - 1,
            int(position.ColumnPositionInTotalImagePixelMatrix) - 1,
        )


def _masks(found: Dataset) -> Iterator[NDArray[np.bool_]]:
    """Yield a mask per frame, shape (rows, columns), that is true for pixels of its segment."""
    from pydicom.encaps import generate_frames  # pydicom is optional

    shape = int(found.Rows), int(found.Columns)
    size, count = math.prod(shape), int(found.NumberOfFrames)
    is_fractional = found.SegmentationType == "FRACTIONAL"
    bits = 8 if is_fractional else 1
    least = max(1, -(-int(found.MaximumFractionalValue) // 2)) if is_fractional else 1
    compression = ENCAPSULATED.get(found.file_meta.TransferSyntaxUID)
    if compression is not None and int(found.BitsAllocated) == bits == 8:
        for data in generate_frames(found.PixelData, number_of_frames=count):
            yield _decoded(data, compression, shape) >= least
        return
    stored = np.frombuffer(found.PixelData, np.uint8)
    if int(found.BitsAllocated) != bits or len(stored) * 8 < count * size * bits or compression:
        raise ValueError(f"it does not hold {count} frames of {shape[1]} x {shape[0]} pixels")
    for frame in range(count):
        start = frame * size
        if is_fractional:
            yield (stored[start : start + size] >= least).reshape(shape)
        else:  # a frame may start within a byte (PS3.5, section 8.1.1)
            part = np.unpackbits(stored[start // 8 : -(-(start + size) // 8)], bitorder="little")
            yield part[start % 8 :][:size].reshape(shape) == 1


def _decoded(data: bytes, compression: int, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """Decode a compressed frame."""
    encoding = Encoding(
        compression=compression,
        photometric=PHOTOMETRIC.MINISBLACK,
        predictor=PREDICTOR.NONE,
        fill_order=FILLORDER.MSB2LSB,
        byte_order="<",
        dtype="uint8",
        samples=1,
    )
    codec = BY_CODE[compression]
    assert isinstance(codec, ImageCompression)
    found = np.empty((*shape, 1), np.uint8)
    codec.decode(data, encoding, 0, found)
    return found[..., 0]
