"""Slides as Philips' software exports them, written by the tests themselves."""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import imagecodecs
import numpy as np

from tests.writers import slides, tiffbytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

ROW, COLUMN = 0.000226891, 0.000226907
TEXT, NUMBER, LIST = "IString", "IUInt16", "IStringArray"


def attribute(name: str, value: str, kind: str = TEXT) -> str:
    """Return one attribute; `value` is XML."""
    tag = f'Attribute Name="{name}" Group="0x301D" Element="0x1003" PMSVR="{kind}"'
    return f"<{tag}>{value}</Attribute>\n"


def data_object(kind: str, *attributes: str) -> str:
    return f'<DataObject ObjectType="{kind}">\n{"".join(attributes)}</DataObject>\n'


def sequence(name: str, *objects: str) -> str:
    return attribute(name, f"\n<Array>\n{''.join(objects)}</Array>\n", "IDataObjectArray")


def spacing_text(row: float, column: float) -> str:
    return f"&quot;{row:.6g}&quot; &quot;{column:.6g}&quot;"


def spacing(row: float = ROW, column: float = COLUMN) -> str:
    return attribute("DICOM_PIXEL_SPACING", spacing_text(row, column), "IDoubleArray")


def spacings(steps: Sequence[float]) -> list[str]:
    """Return the pixel spacing of each level, rounded as such files have it."""
    return [spacing_text(2.27273e-4 * step, 2.27273e-4 * step) for step in steps]


def representation(number: int, text: str, columns: int, rows: int) -> str:
    return data_object(
        "PixelDataRepresentation",
        attribute("DICOM_PIXEL_SPACING", text, "IDoubleArray"),
        attribute(
            "PIIM_DP_PIXEL_DATA_REPRESENTATION_POSITION",
            "&quot;0&quot; &quot;0&quot; &quot;0&quot;",
        ),
        attribute("PIIM_PIXEL_DATA_REPRESENTATION_COLUMNS", str(columns), "IUInt32"),
        attribute("PIIM_PIXEL_DATA_REPRESENTATION_NUMBER", str(number), NUMBER),
        attribute("PIIM_PIXEL_DATA_REPRESENTATION_ROWS", str(rows), "IUInt32"),
    )


def representations(texts: Sequence[str], sizes: Sequence[tuple[int, int]]) -> str:
    """Return the sequence of levels, sizes given as (width, height)."""
    objects = [
        representation(number, text, *sizes[min(number, len(sizes) - 1)])
        for number, text in enumerate(texts)
    ]
    return sequence("PIIM_PIXEL_DATA_REPRESENTATION_SEQUENCE", *objects)


def whole_slide_image(*attributes: str, derivation: str = "tiff-levels=40,10000-q80") -> str:
    return data_object(
        "DPScannedImage",
        attribute("PIM_DP_IMAGE_TYPE", "WSI"),
        attribute("DICOM_BITS_ALLOCATED", "8", NUMBER),
        attribute("DICOM_DERIVATION_DESCRIPTION", escape(derivation)),
        attribute("DICOM_LOSSY_IMAGE_COMPRESSION_METHOD", "&quot;PHILIPS_TIFF_1_0&quot;", LIST),
        attribute("DICOM_PHOTOMETRIC_INTERPRETATION", "RGB"),
        *attributes,
        sequence(
            "UFS_IMAGE_GENERAL_HEADERS",
            data_object(
                "UFSImageGeneralHeader", attribute("UFS_IMAGE_NUMBER_OF_BLOCKS", "3", NUMBER)
            ),
        ),
        attribute("PIM_DP_SOURCE_FILE", "%FILENAME%"),
    )


def picture_object(kind: str, data: str) -> str:
    """Return a label or macro image of the type `kind`."""
    return data_object(
        "DPScannedImage",
        attribute("PIM_DP_IMAGE_TYPE", kind),
        attribute("PIM_DP_IMAGE_DATA", data),
        attribute("DICOM_MANUFACTURER", f"maker of the {kind}"),
    )


def description(*images: str, barcode: str = "MzMxMTk0MA==", more: str = "") -> str:
    """Return the whole XML around scanned images."""
    return '<?xml version="1.0" encoding="UTF-8" ?>\n' + data_object(
        "DPUfsImport",
        attribute("DICOM_ACQUISITION_DATETIME", "20150706081855.000000"),
        attribute("DICOM_MANUFACTURER", "PHILIPS"),
        attribute("DICOM_MANUFACTURERS_MODEL_NAME", "UFS Scanner"),
        sequence("PIM_DP_SCANNED_IMAGES", *images),
        attribute("PIM_DP_UFS_BARCODE", barcode),
        attribute("PIM_DP_UFS_INTERFACE_VERSION", "3.0"),
        attribute("PIIM_DP_SCANNER_RACK_NUMBER", ""),
        attribute(
            "DICOM_SOFTWARE_VERSIONS",
            "&quot;1.6.6186&quot; &quot;20140402_R48&quot; &quot;µ &lt;4.0.3&gt;&quot;",
            LIST,
        ),
        more,
    )


def base64_jpeg(pixels: NDArray[Any]) -> str:
    """Return a picture as XML holds it: base64 in lines."""
    data = imagecodecs.jpeg8_encode(np.ascontiguousarray(pixels.squeeze()), level=90)
    return base64.encodebytes(data).decode()


def true_size(width: int, height: int, step: int) -> tuple[int, int]:
    return max(1, width // step), max(1, height // step)


def padded_size(size: tuple[int, int], tile: int) -> tuple[int, int]:
    return math.ceil(size[0] / tile) * tile, math.ceil(size[1] / tile) * tile


def write(
    path: Path,
    pixels: NDArray[Any],
    steps: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128),
    *,
    tile: int = 128,
    xml: str | bytes | None = None,
    level_spacings: Sequence[str] | None = None,
    images: Sequence[str] = (),
    pages: Mapping[str, NDArray[Any]] | None = None,
    missing: Mapping[int, Collection[int]] | None = None,
    software: str = "Philips DP v1.0",
    encode: Any = slides.jpeg_ycbcr,
    reduced: bool = True,
    more: dict[int, tuple[int, Any]] | None = None,
) -> list[NDArray[Any]]:
    """Write a slide and return its levels, without the padding that the file has.

    Level 0 has the size of `pixels`; each other level is padded with magenta to whole tiles.
    `pages` holds associated images by the description of their page, `missing` the tiles of
    each level that the file lacks, `images` further scanned images of the XML.
    """
    height, width = pixels.shape[:2]
    levels, stored = [], []
    for step in steps:
        true_width, true_height = true_size(width, height, step)
        level = pixels[::step, ::step][:true_height, :true_width]
        canvas_size = (width, height) if step == 1 else padded_size((true_width, true_height), tile)
        canvas = np.full((canvas_size[1], canvas_size[0], 3), (255, 0, 255), np.uint8)
        canvas[:true_height, :true_width] = level
        levels.append(level)
        stored.append(canvas)
    if xml is None:
        sizes = [(canvas.shape[1], canvas.shape[0]) for canvas in stored]
        texts = spacings(steps) if level_spacings is None else level_spacings
        main = whole_slide_image(spacing(), representations(texts, sizes))
        xml = description(main, *images)
    written = [
        tiffbytes.page(
            canvas,
            encode,
            compression=7,
            photometric=6,
            tile=(tile, tile),
            missing=(missing or {}).get(index, ()),
            description=xml if index == 0 else f"level={index} mag={44 / step:g} quality=80",
            subfile_type=int(reduced and index > 0),
            more={530: (tiffbytes.SHORT, (2, 2))}
            | ({305: (tiffbytes.ASCII, software), **(more or {})} if index == 0 else {}),
        )
        for index, (step, canvas) in enumerate(zip(steps, stored, strict=True))
    ]
    for text, picture in (pages or {}).items():
        written.append(
            tiffbytes.page(
                picture,
                slides.jpeg_ycbcr,
                compression=7,
                photometric=6,
                tile=None,
                description=text,
                more={530: (tiffbytes.SHORT, (2, 2))},
            )
        )
    tiffbytes.write(path, written)
    return levels
