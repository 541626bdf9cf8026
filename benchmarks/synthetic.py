"""Make large slides within seconds from a few hundred encoded tiles of tissue, shuffled.

The tiles are crops of the sample slide that comes with napari-wsigpu, flipped and slightly
noisy, so that their bitstreams are as long and as hard to decode as those of a scanner.
Neighbouring tiles don't match, and neither do levels: the slides are for timing only.
"""

from __future__ import annotations

import io
import re
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import imagecodecs
import numpy as np
import PIL.Image
import tifffile
from numpy.typing import NDArray

from napari_wsigpu.codecs.jpeg import header_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

Codec: TypeAlias = Literal[
    "jpeg",
    "jpeg2000",
    "htj2k",
    "none",
    "deflate",
    "lzw",
    "zstd",
    "packbits",
    "webp",
    "lerc",
    "jpegxl",
]
Image: TypeAlias = NDArray[np.uint8]

UNIQUE_TILES = 256
CANDIDATES = 8 * UNIQUE_TILES
GLASS = 215
DOWNSAMPLE = 4
SMALLEST_SIDE = 1024
JPEG_QUALITY = 75
JPEG2000_PSNR = 34
TAGS: dict[Codec, dict[str, Any]] = {
    "jpeg": {"compression": "jpeg", "photometric": "ycbcr", "subsampling": (2, 2)},
    "jpeg2000": {"compression": "aperio_jp2000_rgb", "photometric": "rgb"},
    "htj2k": {"compression": "jpeg2000", "photometric": "rgb"},
    "none": {"compression": "none", "photometric": "rgb"},
    **{
        codec: {"compression": codec, "photometric": "rgb"}
        for codec in ("deflate", "lzw", "zstd", "packbits", "webp", "lerc", "jpegxl")
    },
}
LOSSLESS: dict[Codec, Callable[[Image], bytes | bytearray]] = {
    "none": lambda pixels: pixels.tobytes(),
    "htj2k": imagecodecs.htj2k_encode,
    "deflate": lambda pixels: imagecodecs.zlib_encode(pixels.tobytes()),
    "lzw": lambda pixels: imagecodecs.lzw_encode(pixels.tobytes()),
    "zstd": lambda pixels: imagecodecs.zstd_encode(pixels.tobytes()),
    "packbits": lambda pixels: imagecodecs.packbits_encode(pixels.tobytes()),
    "webp": lambda pixels: imagecodecs.webp_encode(pixels, lossless=True, method=0),
    "lerc": imagecodecs.lerc_encode,
    "jpegxl": lambda pixels: imagecodecs.jpegxl_encode(pixels, lossless=True, effort=3),
}
INTERVAL = 2048, 8  # pixels of a restart interval, across and down


def make_slide(path: Path, width: int, height: int, tile: int = 256, codec: Codec = "jpeg") -> None:
    """Write an Aperio SVS of random tissue tiles.

    Parameters
    ----------
    path : Path
        Path of the BigTIFF.
    width, height : int
        Size of level 0; each further level is 4 times smaller, down to 1024 pixels per side.
    tile : int
        Side of a tile in pixels.
    codec : str
        JPEG of quality 75 with 4:2:0 chroma, JPEG 2000 at 34 dB, or a lossless compression.
    """
    rng = np.random.default_rng(0)
    count = -(-width // tile) * -(-height // tile)
    tiles = [encode(crop, codec) for crop in tissue(rng, tile, min(count, UNIQUE_TILES))]
    name = f"Aperio Image Library v12.0.15 \r\n{width}x{height}"
    description = f"{name} ({tile}x{tile}) {codec}|AppMag = 40|MPP = 0.2520"
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        while True:
            count = -(-width // tile) * -(-height // tile)
            file.write(
                shuffled(rng, tiles, count),
                shape=(height, width, 3),
                dtype=np.uint8,
                tile=(tile, tile),
                description=description,
                metadata=None,
                **TAGS[codec],
            )
            width, height = width // DOWNSAMPLE, height // DOWNSAMPLE
            if max(width, height) < SMALLEST_SIDE:
                break
            description = f"{name} -> {width}x{height}"


def make_large_jpeg(path: Path, side: int) -> None:
    """Write one large JPEG with restart markers, as the levels of NDPI are."""
    rng, (wide, high) = np.random.default_rng(0), INTERVAL
    scans, header = [], b""
    for rows in tissue(rng, 512, 16):
        strip = np.concatenate([rows] * (wide // 512), axis=1)
        file = io.BytesIO()
        options = {"quality": JPEG_QUALITY, "restart_marker_blocks": wide // 16}
        PIL.Image.fromarray(strip).save(file, "jpeg", subsampling="4:2:2", **options)
        data = file.getvalue()
        start = header_length(data)
        header = data[:start]
        scans += re.split(rb"\xff[\xd0-\xd7]", data[start:-2])
    size = data.index(b"\xff\xc0") + 5
    header = header[:size] + 2 * side.to_bytes(2, "big") + header[size + 4 :]
    count = side // wide * (side // high)
    with path.open("wb") as out:
        out.write(header)
        for number, scan in enumerate(shuffled(rng, scans, count)):
            last = number == count - 1
            out.write(scan + (b"\xff\xd9" if last else bytes((0xFF, 0xD0 + number % 8))))


def tissue(rng: np.random.Generator, tile: int, count: int = UNIQUE_TILES) -> Iterator[Image]:
    """Yield the crops of the sample slide with the most tissue, flipped and with noise."""
    with (
        resources.as_file(resources.files("napari_wsigpu") / "resources/he_phantom.svs") as path,
        tifffile.TiffFile(path) as file,
    ):
        slide: Image = file.pages.first.asarray()
    rows = rng.integers(0, slide.shape[0] - tile, CANDIDATES)
    columns = rng.integers(0, slide.shape[1] - tile, CANDIDATES)
    crops = [slide[y : y + tile, x : x + tile] for y, x in zip(rows, columns, strict=True)]
    shares = [np.mean(crop[::8, ::8, 1] < GLASS) for crop in crops]
    for index in np.argsort(shares)[-count:]:
        flipped = crops[index][:: rng.choice((-1, 1)), :: rng.choice((-1, 1))]
        noisy = flipped + rng.integers(-2, 3, flipped.shape, np.int16)
        yield noisy.clip(0, 255).astype(np.uint8)


def encode(pixels: Image, codec: Codec) -> bytes:
    """Encode one tile as a scanner would."""
    if codec in LOSSLESS:
        return bytes(LOSSLESS[codec](pixels))
    if codec == "jpeg2000":
        return bytes(imagecodecs.jpeg2k_encode(pixels, level=JPEG2000_PSNR, codecformat="j2k"))
    return bytes(
        imagecodecs.jpeg8_encode(
            pixels,
            level=JPEG_QUALITY,
            colorspace="rgb",
            outcolorspace="ycbcr",
            subsampling="420",
        )
    )


def shuffled(rng: np.random.Generator, tiles: Sequence[Any], count: int) -> Iterator[Any]:
    """Yield `count` tiles in random order."""
    for index in rng.integers(0, len(tiles), count):
        yield tiles[index]
