"""Pictures and slides that the tests write themselves."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np
import tifffile

from tests.writers import tiffbytes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

APERIO = "Aperio Image Library v11.2.1\r\n{} ({}x{}) JPEG/RGB Q=70"


def picture(height: int, width: int, channels: int = 3, dtype: str = "uint8") -> NDArray[Any]:
    """Smooth shapes with noise over the type's whole range; each channel differs."""
    return _picture(height, width, channels, dtype).copy()


@lru_cache(32)
def _picture(height: int, width: int, channels: int, dtype: str) -> NDArray[Any]:
    kind = np.dtype(dtype)
    rng = np.random.default_rng([height, width, channels])
    y, x, c = np.ogrid[:height, :width, :channels]
    low, high = (np.iinfo(kind).min, np.iinfo(kind).max) if kind.kind in "iu" else (-1e3, 1e3)
    # In place: to get memory takes longer than to compute.
    values: NDArray[Any] = rng.normal(0, 0.05, (height, width, channels))
    values += np.sin(y / 9 + c) * np.cos(x / (7 + c))
    np.clip(values, -1, 1, out=values)
    values += 1
    values /= 2
    values *= float(high) - float(low)
    values += low
    np.clip(values, low, float(np.nextafter(np.float64(high), 0)), out=values)
    return values.astype(kind)


def write_pyramid(
    path: Path,
    pixels: NDArray[Any],
    steps: Sequence[int] = (2, 2),
    *,
    subifds: bool = False,
    reduced: bool = True,
    metadata: dict[str, Any] | None = None,
    **options: Any,
) -> list[NDArray[Any]]:
    """Write a pyramid with tifffile and return its levels. (Y, X, S) or (C, Y, X) by axes."""
    axes = (metadata or {}).get("axes", "YXS")
    pick = (slice(None),) * axes.index("Y")
    levels = [pixels]
    for step in steps:
        levels.append(levels[-1][*pick, ::step, ::step])
    options = {"tile": (64, 64), "compression": "zlib"} | options
    with tifffile.TiffWriter(
        path,
        ome=metadata is not None,
        bigtiff=options.pop("bigtiff", False),
        byteorder=options.pop("byteorder", "<"),
    ) as file:
        file.write(pixels, subifds=len(steps) if subifds else 0, metadata=metadata, **options)
        for level in levels[1:]:
            file.write(level, subfiletype=int(reduced), metadata=None, **options)
    return levels


def jpeg(tile: NDArray[Any], **options: Any) -> bytes:
    """Encode a tile whose components are stored as they are."""
    stored = {"colorspace": "RGB", "outcolorspace": "RGB"} if tile.shape[-1] == 3 else {}
    return bytes(imagecodecs.jpeg8_encode(tile.squeeze(), **({"level": 90} | stored | options)))


def jpeg_ycbcr(tile: NDArray[Any], subsampling: str = "420") -> bytes:
    """Encode a tile as YCbCr."""
    return jpeg(tile, outcolorspace="YCBCR", subsampling=subsampling)


def split_tables(data: bytes) -> tuple[bytes, bytes]:
    """Split a JPEG into its tables (as TIFF's JPEGTables has them) and the rest."""
    tables, rest, place = b"\xff\xd8", b"\xff\xd8", 2
    while data[place + 1] != 0xDA:
        length = 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        marker = data[place : place + length]
        if marker[1] in (0xDB, 0xC4):
            tables += marker
        else:
            rest += marker
        place += length
    return tables + b"\xff\xd9", rest + data[place:]


def average(pixels: NDArray[Any], step: int) -> NDArray[Any]:
    """Mean of blocks of pixels in double precision, halves rounded up."""
    height, width, *samples = pixels.shape
    rows, columns = -(-height // step), -(-width // step)
    whole = np.zeros((rows * step, columns * step, *samples))
    whole[:height, :width] = pixels
    sums = whole.reshape(rows, step, columns, step, *samples).sum((1, 3))
    counts = np.outer(
        np.minimum(step, height - step * np.arange(rows)),
        np.minimum(step, width - step * np.arange(columns)),
    )
    means = sums / counts.reshape(rows, columns, *(1 for _ in samples))
    found = np.floor(means + 0.5) if pixels.dtype.kind in "iu" else means
    averaged: NDArray[Any] = found.astype(pixels.dtype)
    return averaged


def aperio_text(width: int, height: int, *fields: str) -> str:
    """Return an ImageDescription of an Aperio level."""
    return "|".join([APERIO.format("46000x32914", width, height), *fields])


def write_aperio(
    path: Path,
    pixels: NDArray[Any],
    steps: Sequence[int] = (2, 2),
    *,
    fields: Sequence[str] = ("AppMag = 20", "MPP = 0.4990"),
    description: str | bytes | None = None,
    missing: Sequence[Collection[int]] = ((), (), ()),
    thumbnail: bool = True,
    reduced: bool = False,
    associated: Sequence[tuple[int, str]] = ((1, "label 8x8"), (9, "macro 8x8")),
    tile: tuple[int, int] = (48, 64),
    compression: int = 7,
    encode: Any = jpeg,
) -> list[NDArray[Any]]:
    """Write a slide as Aperio's software does; missing tiles are given level by level.

    `associated` holds the subfile type and the second line of the description of each picture.
    """
    levels = [pixels]
    for step in steps:
        levels.append(average(levels[-1], step))
    pages = []
    for index, level in enumerate(levels):
        height, width = level.shape[:2]
        text = aperio_text(width, height, *(fields if index == 0 else ()))
        pages.append(
            tiffbytes.page(
                level,
                encode,
                compression=compression,
                tile=tile,
                missing=missing[index],
                description=description if index == 0 and description is not None else text,
                subfile_type=int(reduced and index > 0),
            )
        )
    if thumbnail:
        small = pixels[::4, ::4]
        text = APERIO.format("46000x32914", small.shape[1], small.shape[0])
        pages.insert(1, tiffbytes.page(small, bytes, tile=None, rows_per_strip=8, description=text))
    for subfile_type, line in associated:
        text = f"Aperio Image Library v11.2.1\r\n{line}" if line else ""
        pages.append(
            tiffbytes.page(
                picture(20, 30 + subfile_type),
                lambda tile: bytes(imagecodecs.lzw_encode(tile.tobytes())),
                compression=5,
                tile=None,
                description=text,
                subfile_type=subfile_type,
            )
        )
    tiffbytes.write(path, pages)
    return levels
