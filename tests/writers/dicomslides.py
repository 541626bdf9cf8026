"""DICOM whole-slide instances that the tests write themselves."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate, encapsulate_extended
from pydicom.pixels.encoders.native import _encode_frame
from pydicom.uid import (
    HTJ2K,
    JPEG2000,
    ExplicitVRLittleEndian,
    HTJ2KLossless,
    HTJ2KLosslessRPCL,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLSLossless,
    RLELossless,
    VLWholeSlideMicroscopyImageStorage,
    generate_uid,
)
from wsidicom.uid import JPEGXL, JPEGXLJPEGRecompression, JPEGXLLossless

from tests.writers import slides

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

STUDY, SERIES, FRAME_OF_REFERENCE = (generate_uid(entropy_srcs=[name]) for name in "abc")
ICC = imagecodecs.cms_profile("srgb")
SIDE = 64


def jpeg_rgb(tile: NDArray[Any]) -> bytes:
    return slides.jpeg(tile)


def jpeg_ycbcr(tile: NDArray[Any]) -> bytes:
    return slides.jpeg_ycbcr(tile, "422")


def jpegls(tile: NDArray[Any]) -> bytes:
    return imagecodecs.jpegls_encode(tile.squeeze())


def jpeg2000(tile: NDArray[Any]) -> bytes:
    return imagecodecs.jpeg2k_encode(tile.squeeze(), codecformat="j2k", level=0, mct=True)


# Name: transfer syntax, photometric interpretation, encoder of a frame.
KINDS: dict[str, tuple[str, str, Any]] = {
    "raw": (ExplicitVRLittleEndian, "RGB", lambda tile: tile.tobytes()),
    "raw gray": (ExplicitVRLittleEndian, "MONOCHROME2", lambda tile: tile.tobytes()),
    "jpeg rgb": (JPEGBaseline8Bit, "RGB", jpeg_rgb),
    "jpeg ycbcr": (JPEGBaseline8Bit, "YBR_FULL_422", jpeg_ycbcr),
    "jpeg gray": (JPEGBaseline8Bit, "MONOCHROME2", slides.jpeg),
    "jpeg-ls": (JPEGLSLossless, "RGB", jpegls),
    "jpeg-ls gray": (JPEGLSLossless, "MONOCHROME2", jpegls),
    "jpeg 2000 ict": (JPEG2000, "YBR_ICT", jpeg2000),
    "jpeg 2000 rct": (JPEG2000Lossless, "YBR_RCT", jpeg2000),
}


def rle(tile: NDArray[Any]) -> bytes:
    height, width, samples = tile.shape
    options = {"rows": height, "columns": width, "samples_per_pixel": samples}
    bits = 8 * tile.itemsize
    runner = SimpleNamespace(
        **options,
        bits_allocated=bits,
        get_option=lambda name, default=None: {"byteorder": "<"}.get(name, default),
    )
    return bytes(_encode_frame(tile.tobytes(), runner))


def htj2k(tile: NDArray[Any]) -> bytes:
    return imagecodecs.htj2k_encode(tile.squeeze(), rgb=False)


def htj2k_transformed(tile: NDArray[Any]) -> bytes:
    return imagecodecs.htj2k_encode(tile, rgb=True, reversible=True)


def jpegxl(tile: NDArray[Any]) -> bytes:
    return imagecodecs.jpegxl_encode(tile.squeeze(), lossless=True)


def planar(tile: NDArray[Any]) -> bytes:
    return tile.transpose(2, 0, 1).tobytes()


# Kinds that OpenSlide doesn't read.
FURTHER: dict[str, tuple[str, str, Any]] = {
    "rle": (RLELossless, "RGB", rle),
    "rle gray": (RLELossless, "MONOCHROME2", rle),
    "htj2k": (HTJ2KLossless, "RGB", htj2k),
    "htj2k gray": (HTJ2KLossless, "MONOCHROME2", htj2k),
    "htj2k rpcl": (HTJ2KLosslessRPCL, "YBR_RCT", htj2k_transformed),
    "htj2k general": (HTJ2K, "YBR_ICT", htj2k_transformed),
    "jpeg xl": (JPEGXLLossless, "RGB", jpegxl),
    "jpeg xl gray": (JPEGXLLossless, "MONOCHROME2", jpegxl),
    "jpeg xl lossy": (
        *(JPEGXL, "XYB"),
        lambda tile: imagecodecs.jpegxl_encode(tile, distance=1.0),
    ),
    "jpeg xl of jpeg": (
        *(JPEGXLJPEGRecompression, "YBR_FULL_422"),
        lambda tile: imagecodecs.jpegxl_encode_jpeg(jpeg_ycbcr(tile)),
    ),
}


def tiles_of(pixels: NDArray[Any], side: int = SIDE) -> list[NDArray[Any]]:
    """Cut a picture into full tiles, row by row; edge tiles are padded with white."""
    height, width = pixels.shape[:2]
    rows, columns = math.ceil(height / side), math.ceil(width / side)
    padding = ((0, rows * side - height), (0, columns * side - width), (0, 0))
    padded = np.pad(pixels, padding, constant_values=255)
    return [
        padded[y : y + side, x : x + side]
        for y in range(0, rows * side, side)
        for x in range(0, columns * side, side)
    ]


def instance(
    pixels: NDArray[Any],
    kind: str = "jpeg ycbcr",
    *,
    flavor: str = "VOLUME",
    side: int = SIDE,
    spacing: tuple[float, float] = (0.0005, 0.00025),
    missing: Collection[int] = (),
    sparse: bool = False,
    part: tuple[int, int, int] | None = None,
    table: str = "basic",
    fragments: int = 1,
    **attributes: Any,
) -> Dataset:
    """Describe and encode one instance.

    `spacing` is in mm, (row, column). `missing` are tiles left out of a sparse instance. `part`
    says which frames (first, past) of which number of a concatenation it holds. `table` is
    "basic", "extended" or "none".
    """
    syntax, photometric, encode = (FURTHER | KINDS)[kind]
    height, width, samples = pixels.shape
    tiles = tiles_of(pixels, side)
    columns = math.ceil(width / side)
    chosen = [index for index in range(len(tiles)) if index not in missing]
    dataset = Dataset()
    if part is not None:
        first, past, number = part
        chosen = chosen[first:past]
        dataset.ConcatenationUID = dataset.SOPInstanceUIDOfConcatenationSource = generate_uid(
            entropy_srcs=[SERIES, flavor, str(pixels.shape)]
        )
        dataset.InConcatenationNumber = number
        dataset.ConcatenationFrameOffsetNumber = first
    frames = [encode(tiles[index]) for index in chosen]

    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.file_meta.MediaStorageSOPClassUID = VLWholeSlideMicroscopyImageStorage
    dataset.SOPClassUID = VLWholeSlideMicroscopyImageStorage
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID = generate_uid()
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID = STUDY, SERIES
    dataset.FrameOfReferenceUID = FRAME_OF_REFERENCE
    dataset.ImageType = ["DERIVED", "PRIMARY", flavor, "NONE"]
    dataset.Modality = "SM"
    dataset.SpecificCharacterSet = "ISO_IR 192"
    dataset.PatientName, dataset.PatientID = "Müller^Ada", "P-1"
    dataset.Manufacturer, dataset.ManufacturerModelName = "Acme", "Scan 9"
    dataset.AcquisitionDateTime = "20240229131415.5"
    dataset.BarcodeValue = "S24-0001"
    dataset.NumberOfFrames = len(frames)
    dataset.Rows = dataset.Columns = side
    dataset.TotalPixelMatrixRows, dataset.TotalPixelMatrixColumns = height, width
    dataset.TotalPixelMatrixFocalPlanes = 1
    dataset.SamplesPerPixel = samples
    dataset.PhotometricInterpretation = photometric
    if samples > 1:
        dataset.PlanarConfiguration = 0
    bits = 8 * pixels.dtype.itemsize
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = bits, bits, bits - 1
    dataset.PixelRepresentation = 0
    dataset.ImagedVolumeWidth = width * spacing[1]
    dataset.ImagedVolumeHeight = height * spacing[0]
    dataset.DimensionOrganizationType = "TILED_SPARSE" if sparse else "TILED_FULL"
    dataset.SharedFunctionalGroupsSequence = [
        item(PixelMeasuresSequence=[item(PixelSpacing=list(spacing), SliceThickness=0.001)])
    ]
    dataset.OpticalPathSequence = [
        item(OpticalPathIdentifier="0", ObjectiveLensPower=20, ICCProfile=ICC)
    ]
    dataset.NumberOfOpticalPaths = 1
    dataset.TotalPixelMatrixOriginSequence = [
        item(XOffsetInSlideCoordinateSystem=0, YOffsetInSlideCoordinateSystem=0)
    ]
    dataset.ImageOrientationSlide = [0, -1, 0, -1, 0, 0]
    if sparse:
        dataset.PerFrameFunctionalGroupsSequence = [
            item(
                PlanePositionSlideSequence=[
                    item(
                        ColumnPositionInTotalImagePixelMatrix=1 + side * (index % columns),
                        RowPositionInTotalImagePixelMatrix=1 + side * (index // columns),
                        XOffsetInSlideCoordinateSystem=0,
                        YOffsetInSlideCoordinateSystem=0,
                        ZOffsetInSlideCoordinateSystem=0,
                    )
                ]
            )
            for index in chosen
        ]
    for name, value in attributes.items():
        if value is None:
            delattr(dataset, name)
        else:
            setattr(dataset, name, value)
    if kind.startswith("raw"):
        data = b"".join(frames)
        dataset.PixelData = data + bytes(len(data) % 2)
    elif table == "extended":
        dataset.PixelData, offsets, lengths = encapsulate_extended(frames)
        dataset.ExtendedOffsetTable, dataset.ExtendedOffsetTableLengths = offsets, lengths
    else:
        dataset.PixelData = encapsulate(
            frames, fragments_per_frame=fragments, has_bot=table == "basic"
        )
    dataset["PixelData"].VR = "OB" if bits == 8 else "OW"
    dataset["PixelData"].is_undefined_length = not kind.startswith("raw")
    return dataset


def item(**attributes: Any) -> Dataset:
    dataset = Dataset()
    for name, value in attributes.items():
        setattr(dataset, name, value)
    return dataset


def save(path: Path, dataset: Dataset) -> Path:
    dataset.save_as(path, enforce_file_format=True)
    return path


def write_slide(
    folder: Path, pixels: NDArray[Any], steps: Sequence[int] = (2, 2), **options: Any
) -> list[NDArray[Any]]:
    """Write a pyramid, one file a level, and return its levels."""
    folder.mkdir(exist_ok=True)
    levels = [pixels]
    for step in steps:
        levels.append(slides.average(levels[-1], step))
    scale = 1
    for index, level in enumerate(levels):
        # File names say nothing of the order.
        name = f"{9 - index}.dcm"
        spacing = (0.0005 * scale, 0.00025 * scale)
        save(folder / name, instance(level, **({"spacing": spacing} | options)))
        scale *= steps[index] if index < len(steps) else 1
    return levels
