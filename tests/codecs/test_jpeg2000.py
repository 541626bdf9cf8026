"""Colours of JPEG 2000, which depend on the file's tags, its writer and the code stream."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import imagecodecs
import numpy as np
import pytest
import tifffile
from pydicom.uid import HTJ2K, JPEG2000, HTJ2KLossless, HTJ2KLosslessRPCL, JPEG2000Lossless

from napari_wsigpu import convert, open_slide
from napari_wsigpu.codecs.jpeg2000 import decode_jpeg2000, use_threads
from tests import oracles
from tests.fakes.host_device import level_of
from tests.writers import dicomslides, slides, tiffbytes

PIXELS = slides.picture(90, 130)
SIDE = 64


def ycbcr(tile):
    """Convert RGB to full-range YCbCr."""
    red, green, blue = np.moveaxis(tile.astype(float), -1, 0)
    y = 0.299 * red + 0.587 * green + 0.114 * blue
    planes = np.stack([y, 128 + (blue - y) / 1.772, 128 + (red - y) / 1.402], -1)
    return np.clip(np.round(planes), 0, 255).astype(np.uint8)


def encode(tile, *, transform):
    return imagecodecs.jpeg2k_encode(tile.squeeze(), level=0, codecformat="J2K", mct=transform)


def transformed(tile):
    return encode(tile, transform=True)


def plain(tile):
    return encode(tile, transform=False)


def plain_ycbcr(tile):
    return encode(ycbcr(tile), transform=False)


def written(folder, pixels, encoded, *, compression=33003, photometric=2, description=""):
    page = tiffbytes.page(
        *(pixels, encoded),
        **{"tile": (SIDE, SIDE), "compression": compression, "photometric": photometric},
        description=description,
    )
    return tiffbytes.write(folder / "slide.tif", [page])


def read(path):
    with open_slide(path, device="cpu") as slide:
        return slide.levels[0][...]


@pytest.mark.parametrize("compression", [33003, 33004, 33005, 34712])
@pytest.mark.parametrize("encoded", [plain, transformed])
@pytest.mark.parametrize("description", ["", "QuPath", "OME Bio-Formats 7.0"])
def test_rgb_of_other_writers_than_aperio(tmp_path, compression, encoded, description):
    path = written(tmp_path, PIXELS, encoded, compression=compression, description=description)
    np.testing.assert_array_equal(read(path), tifffile.imread(path))


@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_other_numbers_of_components_are_never_converted(tmp_path, samples, dtype):
    pixels = slides.picture(90, 130, samples, dtype)
    path = written(tmp_path, pixels, plain, photometric=2 if samples == 4 else 1)
    found = tifffile.imread(path)
    np.testing.assert_array_equal(read(path), found.reshape(*found.shape[:2], samples))


@pytest.mark.parametrize("compression", [33003, 34712])
@pytest.mark.parametrize("encoded", [plain_ycbcr, transformed])
def test_component_transform_overrides_photometric_tag(tmp_path, compression, encoded):
    path = written(tmp_path, PIXELS, encoded, compression=compression, photometric=6)
    assert abs(read(path).astype(int) - PIXELS).max() <= (0 if encoded is transformed else 2)


@pytest.mark.parametrize("photometric", [2, 6])
@pytest.mark.parametrize(("compression", "encoded"), [(33003, plain_ycbcr), (33005, plain)])
def test_aperio_compressions_define_colours(tmp_path, photometric, compression, encoded):
    options = {"compression": compression, "photometric": photometric}
    description = slides.aperio_text(PIXELS.shape[1], PIXELS.shape[0])
    path = written(tmp_path, PIXELS, encoded, **options, description=description)
    assert abs(read(path).astype(int) - oracles.openslide_level(path)).max() <= 1


@pytest.mark.parametrize("bits", [10, 12, 16])
def test_ycbcr_of_more_than_8_bits(tmp_path, bits):
    half = 1 << (bits - 1)
    pixels = np.full((SIDE, SIDE, 3), half, np.uint16)
    pixels[:32, :, 0] = 1

    def deep(tile):
        return imagecodecs.jpeg2k_encode(
            tile, level=0, codecformat="J2K", mct=False, bitspersample=bits
        )

    # Chroma in the middle of its range is gray.
    gray = np.repeat(pixels[..., :1], 3, axis=2)
    np.testing.assert_array_equal(read(written(tmp_path, pixels, deep, photometric=6)), gray)


YBR = "YBR_ICT", "YBR_RCT", "YBR_FULL", "YBR_FULL_422"


@pytest.mark.parametrize(
    ("photometric", "encoded"),
    [
        ("RGB", plain),
        *((photometric, transformed) for photometric in ("RGB", *YBR)),
        *((photometric, plain_ycbcr) for photometric in YBR),
    ],
)
@pytest.mark.parametrize("syntax", [JPEG2000, JPEG2000Lossless])
def test_dicom_that_contradicts_its_code_streams(
    tmp_path, monkeypatch, photometric, syntax, encoded
):
    monkeypatch.setitem(dicomslides.KINDS, "tested", (syntax, photometric, encoded))
    dicomslides.save(tmp_path / "a.dcm", dicomslides.instance(PIXELS, "tested"))
    found = read(tmp_path / "a.dcm").astype(int)
    assert abs(found - PIXELS).max() <= (2 if encoded is plain_ycbcr else 0)


@pytest.mark.parametrize(
    ("photometric", "form"),
    [
        ("RGB", "plain"),
        *((photometric, "transformed") for photometric in ("RGB", *YBR)),
        *((photometric, "plain ycbcr") for photometric in YBR),
    ],
)
@pytest.mark.parametrize("syntax", [HTJ2K, HTJ2KLossless, HTJ2KLosslessRPCL])
def test_high_throughput_code_streams_that_contradict_dicom(
    tmp_path, monkeypatch, photometric, syntax, form
):
    encoders = {
        "plain": dicomslides.htj2k,
        "transformed": dicomslides.htj2k_transformed,
        "plain ycbcr": lambda tile: dicomslides.htj2k(ycbcr(tile)),
    }
    monkeypatch.setitem(dicomslides.KINDS, "tested", (syntax, photometric, encoders[form]))
    dicomslides.save(tmp_path / "a.dcm", dicomslides.instance(PIXELS, "tested"))
    found = read(tmp_path / "a.dcm").astype(int)
    assert abs(found - PIXELS).max() <= (2 if form == "plain ycbcr" else 0)


@pytest.mark.parametrize("suffix", [".tif", ".ome.tif"])
@pytest.mark.parametrize("encoded", [plain_ycbcr, transformed])
def test_a_copy_without_aperio_has_the_same_colours(tmp_path, suffix, encoded):
    path = tmp_path / "slide.svs"
    options = {"compression": 33003, "encode": encoded, "tile": (SIDE, SIDE)}
    slides.write_aperio(path, PIXELS, steps=(), **options)
    copy = tmp_path / f"copy{suffix}"
    convert(path, copy)
    with tifffile.TiffFile(copy) as tiff:
        assert tiff.pages.first.compression == 33003
    np.testing.assert_array_equal(read(copy), read(path))


@pytest.mark.parametrize(("side", "expected"), [(64, 1), (1024, 4)])
def test_threads_for_large_tiles(monkeypatch, side, expected):
    """Decoding of a tile that the GPU's is compared with, and for which a reader waits."""
    decode, used = imagecodecs.jpeg2k_decode, []

    def noted(*args, numthreads, **options):
        used.append(numthreads)
        return decode(*args, numthreads=numthreads, **options)

    monkeypatch.setattr(imagecodecs, "jpeg2k_decode", noted)
    pixels = np.resize(PIXELS, (side, side, 3))
    stream = memoryview(transformed(pixels))
    encoding = level_of(3, tile=(side, side), compression=33005).encoding
    found = []
    for start in (None, lambda: use_threads(4)):
        with ThreadPoolExecutor(1, initializer=start) as pool:
            found.append(np.empty_like(pixels))
            pool.submit(decode_jpeg2000, stream, encoding, 0, found[-1]).result()
    assert used == [1, expected]
    np.testing.assert_array_equal(found, [pixels, pixels])
