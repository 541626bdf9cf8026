"""Colours by a palette, and gray of 1, 2 and 4 bits; OpenSlide and Pillow are the oracles."""

import numpy as np
import pytest
import tifffile
from PIL import Image

from napari_wsigpu import convert, open_slide
from tests import oracles
from tests.writers import slides

RANDOM = np.random.default_rng(6)
PALETTE = RANDOM.integers(0, 1 << 16, (3, 256), np.uint16)
NUMBERS = slides.picture(300, 410, 1)[..., 0]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "slide.tif"


def write_palette(path, palette=PALETTE, **options):
    with tifffile.TiffWriter(path) as file:
        for step in (1, 2):
            file.write(
                NUMBERS[::step, ::step],
                photometric="palette",
                colormap=palette,
                subfiletype=int(step > 1),
                metadata=None,
                **options,
            )


@pytest.mark.parametrize("compression", [None, "deflate", "lzw"])
@pytest.mark.parametrize("tile", [(128, 128), None])
def test_a_palette(path, compression, tile):
    write_palette(path, compression=compression, tile=tile)
    with open_slide(path, "cpu") as slide:
        assert slide.layout.rgb
        assert slide.layout.problems == ()
        shades = (PALETTE >> 8).T.astype(np.uint8)
        for level, step in zip(slide.levels, (1, 2), strict=True):
            np.testing.assert_array_equal(level[...], shades[NUMBERS[::step, ::step]])
            part = level[7:90:3, 5:130:2]
            np.testing.assert_array_equal(part, level[...][7:90:3, 5:130:2])
        if tile:
            np.testing.assert_array_equal(slide.levels[0][...], oracles.openslide_level(path))


def test_a_palette_of_8_bits(path):
    write_palette(path, PALETTE >> 8, tile=(128, 128))
    with open_slide(path, "cpu") as slide:
        expected = (PALETTE >> 8).T.astype(np.uint8)[NUMBERS]
        np.testing.assert_array_equal(slide.levels[0][...], expected)


@pytest.mark.parametrize("ending", ["tif", "ome.zarr"])
def test_converted(path, tmp_path, ending):
    write_palette(path, tile=(128, 128))
    with open_slide(path, "cpu") as slide:
        convert(slide, tmp_path / f"copy.{ending}", compression="zstd")
        with open_slide(tmp_path / f"copy.{ending}") as copy:
            np.testing.assert_array_equal(copy.levels[0][...], slide.levels[0][...])


def test_gpu_falls_back_to_the_cpu(path, host_gpu):
    write_palette(path, tile=(128, 128))
    with open_slide(path, "cpu") as slide, open_slide(path, "cuda") as by_gpu:
        expected = slide.levels[0][...]
        np.testing.assert_array_equal(by_gpu.levels[0][...], expected)
        found = by_gpu.read_region((0, 0), slide.dimensions, 0, "cuda")
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("compression", ["jpeg", "webp"])
@pytest.mark.parametrize("bits", [2, 4])
def test_8_bit_codecs_ignore_the_tags(path, compression, bits):
    channels = {"jpeg": 1, "webp": 3}[compression]
    tifffile.imwrite(path, slides.picture(90, 70, channels).squeeze(), compression=compression)
    expected = tifffile.imread(path)
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages.first.tags["BitsPerSample"].overwrite((bits,) * channels)
    with open_slide(path, "cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][...].squeeze(), expected)


# Of 2 and 4 bits tifffile writes uncompressed samples alone.
KINDS = [(1, None), (1, "deflate"), (1, "packbits"), (2, None), (4, None)]


@pytest.mark.parametrize(("bits", "compression"), KINDS)
@pytest.mark.parametrize("tile", [(64, 80), None])
def test_few_bits(path, bits, compression, tile):
    pixels = NUMBERS >> (8 - bits)
    if bits == 1:
        pixels = pixels.astype(bool)
    options = {} if bits == 1 else {"bitspersample": bits}
    tifffile.imwrite(
        path, pixels, compression=compression, tile=tile, photometric="minisblack", **options
    )
    most = (1 << bits) - 1
    with open_slide(path, "cpu") as slide:
        expected = (NUMBERS >> (8 - bits)) * (255 // most)
        np.testing.assert_array_equal(slide.levels[0][..., 0], expected)
        by_pillow = np.asarray(Image.open(path).convert("L"))
        np.testing.assert_array_equal(by_pillow, expected)


def test_a_palette_of_4_bits(path):
    palette = PALETTE[:, ::16].copy()
    numbers = np.ascontiguousarray(NUMBERS >> 4)
    image = Image.frombytes("P", numbers.shape[::-1], numbers.tobytes())
    image.putpalette((palette >> 8).T.astype(np.uint8).tobytes())
    image.save(path, bits=4)
    with open_slide(path, "cpu") as slide:
        expected = np.asarray(Image.open(path).convert("RGB"))
        np.testing.assert_array_equal(slide.levels[0][...], expected)
