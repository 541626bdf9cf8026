"""Tiles that consist of restart intervals of one large JPEG, decoded by a device."""

import contextlib
import random

import numpy as np
import pytest
from PIL import Image

from napari_wsigpu import open_slide
from napari_wsigpu.display.drawing import View
from napari_wsigpu.formats.tiff import hamamatsu
from napari_wsigpu.model.errors import TileError
from napari_wsigpu.model.limits import limits
from tests.reading import test_on_device as on_device
from tests.writers import ndpi, slides

pytest.importorskip("nvidia.nvimgcodec")

# Intervals of 128 pixels: blocks of the decoder in each, and the height of a block.
SAMPLINGS = {"4:4:4": (16, 8), "4:2:2": (8, 8), "4:2:0": (8, 16)}
WIDTH = 640


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of four intervals of 128 x 16 pixels, or eight of 128 x 8."""
    monkeypatch.setattr(hamamatsu, "TILE_PIXELS", 128 * 64)


def write(path, subsampling="4:2:0", extra=0):
    """Write a slide, and return its pixels as the CPU decodes them.

    `extra` is the number of rows of blocks in an incomplete tile at the bottom.
    """
    blocks, high = SAMPLINGS[subsampling]
    pixels = slides.picture(64 * 4 + extra * high, WIDTH)
    ndpi.write(path, [ndpi.level(pixels, blocks, subsampling=subsampling)])
    with open_slide(path, device="cpu") as slide:
        assert slide.layout.levels[0].grid.planes == 64 // high
        return slide.levels[0][...]


def decoded(slide):
    return {key: count for key, count in slide.stats()["decoded"].items() if count}


@pytest.mark.parametrize("extra", [0, 1, 3])
@pytest.mark.parametrize("subsampling", SAMPLINGS)
def test_pixels_match_the_cpu(tmp_path, host_gpu, subsampling, extra):
    expected = write(tmp_path / "slide.ndpi", subsampling, extra)
    with open_slide(tmp_path / "slide.ndpi", device="cuda") as slide:
        for _ in range(2):  # the second time, they are joined while they are read
            slide.clear_cache()
            whole = slide.read_region((0, 0), (WIDTH, len(expected)), device="cuda")
            np.testing.assert_array_equal(whole, expected)
        # The CPU decodes incomplete tiles, and the device all others but those that are compared.
        assert slide.stats()["decoded"]["nvimagecodec"] == 2 * 20
        assert slide.stats()["decoded"]["cpu"] == (2 * 5 if extra else 0)
        slide.clear_cache()
        part = slide.read_region((100, 50), (300, 90), device="cuda")
        np.testing.assert_array_equal(part, expected[50:140, 100:400])
        batches = slide.read_regions(
            [(7, 9), (129, 65), (500, 200)], (64, 40), batch_size=3, device="cuda"
        )
        for (x, y), region in zip([(7, 9), (129, 65), (500, 200)], next(batches), strict=True):
            np.testing.assert_array_equal(region, expected[y : y + 40, x : x + 64])
        batches.close()


def test_without_the_core(tmp_path, host_gpu, monkeypatch):
    from napari_wsigpu import native

    expected = write(tmp_path / "slide.ndpi")
    monkeypatch.setattr(native, "core", None)
    with open_slide(tmp_path / "slide.ndpi", device="cuda") as slide:
        whole = slide.read_region((0, 0), (WIDTH, len(expected)), device="cuda")
        np.testing.assert_array_equal(whole, expected)
        assert decoded(slide) == {"nvimagecodec": 20}


def test_a_plain_jpeg(tmp_path, host_gpu, monkeypatch):
    monkeypatch.setattr(limits, "tile_bytes", 200_000)
    pixels = slides.picture(512, 640)
    Image.fromarray(pixels).save(
        tmp_path / "large.jpg", quality=90, subsampling="4:2:0", restart_marker_blocks=8
    )
    with open_slide(tmp_path / "large.jpg", device="cpu") as slide:
        assert slide.layout.levels[0].encoding.jpeg_header
        expected = slide.levels[0][...]
    with open_slide(tmp_path / "large.jpg", device="cuda") as slide:
        found = slide.read_region((0, 0), (640, 512), device="cuda")
        assert decoded(slide)["nvimagecodec"] > 0
    np.testing.assert_array_equal(found, expected)


def test_smaller_scales_are_left_to_the_cpu(tmp_path, host_gpu):
    write(tmp_path / "slide.ndpi")
    with open_slide(tmp_path / "slide.ndpi", device="cpu") as slide:
        assert slide.layout.levels[1].encoding.jpeg_scale == 2
        expected = slide.levels[1][...]
    with open_slide(tmp_path / "slide.ndpi", device="cuda") as slide:
        found = slide.read_region((0, 0), expected.shape[1::-1], level=1, device="cuda")
        assert decoded(slide).keys() == {"cpu"}
    np.testing.assert_array_equal(found, expected)


def read_all(path, device):
    """Read each tile alone; return its pixels, or why it failed."""
    found = []
    with open_slide(path, device=device) as slide:
        target = {} if device == "cpu" else {"device": device}
        for y in range(0, 256, 64):
            for x in range(0, WIDTH, 128):
                try:
                    found.append(slide.read_region((x, y), (128, 64), **target))
                except TileError as error:
                    found.append(error.failures[0][1])
    return found


@pytest.mark.parametrize("seed", range(12))
def test_damaged_intervals_are_those_of_the_cpu(tmp_path, host_gpu, seed):
    path, dice = tmp_path / "slide.ndpi", random.Random(seed)
    write(path)
    with open_slide(path, device="cpu") as slide:
        grid = slide.layout.levels[0].grid
    data = bytearray(path.read_bytes())
    for _ in range(dice.randrange(1, 4)):
        plane, row, column = (dice.randrange(size) for size in grid.offsets.shape)
        start, length = (int(each[plane, row, column]) for each in (grid.offsets, grid.byte_counts))
        place = start + dice.randrange(length)
        data[place] = dice.choice([0xFF, 0xD3, 0xD9, 0, data[place] ^ 1 << dice.randrange(8)])
    path.write_bytes(data)
    expected, found = read_all(path, "cpu"), read_all(path, "cuda")
    places = [(x, y) for y in range(0, 256, 64) for x in range(0, WIDTH, 128)]
    with open_slide(path, device="cuda") as slide:
        for _ in range(2):  # the second time, they are joined while they are read
            slide.clear_cache()
            with contextlib.suppress(TileError):
                slide.read_region((0, 0), (WIDTH, 256), device="cuda")
        fine = [
            place for place, one in zip(places, expected, strict=True) if not isinstance(one, str)
        ]
        slide.clear_cache()
        (batch,) = slide.read_regions(fine, (128, 64), batch_size=20, device="cuda")
    in_batch = iter(batch)
    for by_cpu, by_device in zip(expected, found, strict=True):
        if isinstance(by_cpu, str):
            assert by_device == by_cpu
        else:
            np.testing.assert_array_equal(by_device, by_cpu)
            np.testing.assert_array_equal(next(in_batch), by_cpu)


def test_all_levels_are_drawn_on_the_device(tmp_path, host_gpu):
    """Stored levels, levels that the CPU decodes at a fraction of their size, and averages."""
    path = tmp_path / "slide.ndpi"
    write(path, extra=1)
    with open_slide(path, device="cuda") as slide, open_slide(path, device="cpu") as other:
        source = slide.displayed_on_device()
        picture = on_device.picture_of(slide, source)
        levels = on_device.arrays(other)[:-1]
        assert {level.layout.encoding.jpeg_scale for level in levels} >= {1, 2}
        for index, level in enumerate(levels):
            view = View(index, on_device.all_of(level.layout))
            picture.compose(view)
            landed = source.read_tiles(on_device.keys_of(picture))
            assert all(landed.values())
            assert picture.add(landed)
            drawn = picture.compose(view)
            np.testing.assert_array_equal(np.asarray(drawn.pixels), np.asarray(level))
