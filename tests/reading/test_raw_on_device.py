"""Uncompressed tiles on a device: the host reads them to page-locked memory, which is uploaded."""

import threading

import imagecodecs
import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from napari_wsigpu.codecs.color import ColorProfile
from napari_wsigpu.model.errors import RegionError, SlideChangedError, TileError
from tests.test_display_color import PROFILE, in_srgb, with_profile
from tests.writers import slides, tiffbytes

pytest.importorskip("nvidia.nvimgcodec")

HEIGHT, WIDTH = 131, 203  # not a multiple of a tile
GRAY = {"channels": 1, "photometric": 1}
KINDS = {
    "RGB": {},
    "RGBA": {"channels": 4},
    "gray": GRAY,
    "16 bit": {**GRAY, "dtype": "uint16"},
    "16 bit of big-endian": {**GRAY, "dtype": "uint16", "byteorder": ">"},
    "RGB of 16 bit of big-endian": {"dtype": "uint16", "byteorder": ">"},
    "32 bit with a sign": {**GRAY, "dtype": "int32", "byteorder": ">"},
    "floating point": {**GRAY, "channels": 2, "dtype": "float32", "byteorder": ">"},
    "doubles": {**GRAY, "dtype": "float64"},
    "separate planes": {"planar": True},
    "separate planes of 16 bit": {**GRAY, "channels": 4, "dtype": "uint16", "planar": True},
    "separate planes of big-endian": {"dtype": "uint16", "planar": True, "byteorder": ">"},
    "strips": {"tile": None, "rows_per_strip": 30},
    "one strip": {"tile": None},
    "strips of planes": {"tile": None, "rows_per_strip": 30, "planar": True},
    "cut tiles": {"cut_edges": True},
    "cut planes": {"cut_edges": True, "planar": True, "byteorder": ">", "dtype": "uint16"},
    "missing tiles": {"missing": (0, 7, 24)},
    "missing parts": {"planar": True, "missing": (3, 30, 31, 55)},
}
WINDOWS = [
    ((0, 0), (WIDTH, HEIGHT)),
    ((17, 31), (90, 70)),
    ((-20, -9), (WIDTH + 40, HEIGHT + 30)),
    ((190, 120), (60, 50)),
    ((48, 32), (48, 32)),
    ((3, 5), (1, 1)),
]


def raw(byteorder="<"):
    return lambda tile: tile.astype(tile.dtype.newbyteorder(byteorder)).tobytes()


def write(path, *, channels=3, dtype="uint8", byteorder="<", encode=None, **options):
    pixels = slides.picture(HEIGHT, WIDTH, channels, dtype)
    page = tiffbytes.page(pixels, encode or raw(byteorder), **options)
    return tiffbytes.write(path, [page], byteorder=byteorder), pixels


def read(slide, place=(0, 0), size=(WIDTH, HEIGHT), **options):
    return slide.read_region(place, size, device="cuda", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_match_the_file(tmp_path, host_gpu, kind):
    path, pixels = write(tmp_path / "slide.tif", **KINDS[kind])
    with open_slide(path, device="cpu") as slide:
        expected = [slide.read_region(*window) for window in WINDOWS]
    if "missing" not in KINDS[kind]:
        np.testing.assert_array_equal(expected[0], pixels)
        stored = tifffile.imread(path)
        stored = np.moveaxis(stored, 0, -1) if KINDS[kind].get("planar") else stored
        np.testing.assert_array_equal(expected[0].squeeze(), stored)
    with open_slide(path, device="cuda") as slide:
        for window, region in zip(WINDOWS, expected, strict=True):
            np.testing.assert_array_equal(read(slide, *window), region)
        assert slide.stats()["failed"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {
            "more": {266: (tiffbytes.SHORT, 2)},
            "encode": lambda t: imagecodecs.bitorder_encode(bytes(t)),
        },
        {"compression": 8, "encode": tiffbytes.deflate},
    ],
    ids=["bits in the other order", "deflate"],
)
def test_cpu_decodes_compressed_tiles(tmp_path, host_gpu, options):
    path, pixels = write(tmp_path / "slide.tif", **options)
    with open_slide(path, device="cuda") as slide:
        np.testing.assert_array_equal(read(slide), pixels)


@pytest.mark.parametrize("length", [0, 1, 4607, 1000])
def test_tiles_of_a_wrong_length(tmp_path, host_gpu, length):
    page = tiffbytes.page(slides.picture(HEIGHT, WIDTH), raw())
    page.segments[8] = page.segments[8][:length] or b""
    if not length:  # a tile that lies beyond the end of the file
        page.tags[324] = (tiffbytes.LONG, [8 + 4608 * i if i != 8 else 10**8 for i in range(25)])
        page.segments[8] = bytes(4608)
    path = tiffbytes.write(tmp_path / "slide.tif", [page])
    with open_slide(path, device="cpu") as slide, pytest.raises(TileError) as by_cpu:
        slide.levels[0][...]
    with open_slide(path, device="cuda") as slide:
        with pytest.raises(TileError) as by_device:
            read(slide)
        assert by_device.value.failures == by_cpu.value.failures
        assert slide.stats()["failed"] == 1
        read(slide, (0, 0), (WIDTH, 32))


def test_overlong_tile_is_truncated(tmp_path, host_gpu):
    pixels = slides.picture(HEIGHT, WIDTH)
    page = tiffbytes.page(pixels, lambda tile: tile.tobytes() + b"more")
    path = tiffbytes.write(tmp_path / "slide.tif", [page])
    with open_slide(path, device="cuda") as slide:
        np.testing.assert_array_equal(read(slide), pixels)


@pytest.fixture
def table():
    """Cached, so that it is made only once."""
    return ColorProfile(PROFILE, "slide").table()


@pytest.mark.usefixtures("scanner_colours")
@pytest.mark.usefixtures("table")
def test_colors(tmp_path, host_gpu):
    path, pixels = write(tmp_path / "slide.tif")
    with with_profile(path, device="cuda") as slide:
        np.testing.assert_array_equal(read(slide, color="srgb"), in_srgb(pixels))
        around = read(slide, (-20, -20), (60, 60), color="srgb")
    with with_profile(path) as slide:
        expected = slide.read_region((-20, -20), (60, 60), color="srgb")
    np.testing.assert_array_equal(around, expected)


def test_read_into_the_callers_array_and_stream(tmp_path, host_gpu):
    path, pixels = write(tmp_path / "slide.tif")
    out = np.zeros((50, 70, 3), np.uint8)
    with open_slide(path, device="cuda") as slide:
        assert read(slide, (11, 12), (70, 50), out=out, stream=7) is out
    np.testing.assert_array_equal(out, pixels[12:62, 11:81])
    assert host_gpu.given_stream == 7


def test_no_memory_for_the_region(tmp_path, host_gpu):
    path, _ = write(tmp_path / "slide.tif")
    with open_slide(path, device="cuda") as slide, pytest.raises(RegionError, match="memory"):
        read(slide, (0, 0), (1 << 40, 1 << 40))


def test_file_that_changes(tmp_path, host_gpu):
    path, _ = write(tmp_path / "slide.tif")
    with open_slide(path, device="cuda") as slide:
        read(slide, (0, 0), (9, 9))
        path.write_bytes(path.read_bytes() + b"more")
        with pytest.raises(SlideChangedError):
            read(slide)


def test_many_threads(tmp_path, host_gpu):
    path, pixels = write(tmp_path / "slide.tif", dtype="uint16", byteorder=">")
    wrong = []

    def work(slide, number):
        wrong.extend(
            x
            for x in range(number, 100, 20)
            if not np.array_equal(read(slide, (x, 9), (80, 90)), pixels[9:99, x : x + 80])
        )

    with open_slide(path, device="cuda") as slide:
        threads = [threading.Thread(target=work, args=(slide, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_no_handle_is_left(tmp_path, host_gpu, handles_of):
    path, _ = write(tmp_path / "slide.tif")
    with open_slide(path, device="cuda") as slide:
        read(slide)
    assert handles_of(path) == 0
