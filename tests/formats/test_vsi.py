import os
import tracemalloc
from contextlib import suppress

import imagecodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_wsigpu import open_slide
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    SlideError,
    TileError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.privacy import masked
from tests.conftest import shared_slide
from tests.writers import slides, vsis
from tests.writers.vsis import Tile

slideio = pytest.importorskip("slideio")

SIDE = 64


def jpeg(pixels):
    return imagecodecs.jpeg8_encode(np.ascontiguousarray(pixels), level=90)


def jpeg_2000(pixels):
    return imagecodecs.jpeg2k_encode(np.ascontiguousarray(pixels), level=0, codecformat="j2k")


def cut(pixels, encode, *rest):
    """Cut a level into tiles of full size, with the coordinates beyond column and row."""
    height, width = pixels.shape[:2]
    padding = [(0, -height % SIDE), (0, -width % SIDE), *[(0, 0)] * (pixels.ndim - 2)]
    padded = np.pad(pixels, padding, "edge")
    return [
        Tile((column, row, *rest), encode(padded[y : y + SIDE, x : x + SIDE]))
        for row, y in enumerate(range(0, height, SIDE))
        for column, x in enumerate(range(0, width, SIDE))
    ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "slide.vsi"


def write_brightfield(path, encode=jpeg, **options):
    """Write a pyramid of three levels, whose pixels before they are encoded are returned."""
    base = slides.picture(300, 410)
    levels = [base[:: 1 << k, :: 1 << k][: 300 >> k, : 410 >> k] for k in range(3)]
    tiles = [tile for k, level in enumerate(levels) for tile in cut(level, encode, k)]
    vsis.ets(
        path.parent / f"_{path.stem}_" / "stack1" / "frame_t.ets", tiles, (SIDE, SIDE), **options
    )
    vsis.vsi(path, vsis.image((410, 300)))
    return levels


def check_by_slideio(path):
    random = np.random.default_rng(2)
    scene = slideio.open_slide(str(path), "VSI").get_scene(0)
    with open_slide(path, "cpu") as slide:
        assert slide.dimensions == scene.size
        middle = scene.num_z_slices // 2
        blocks = {"slices": (middle, middle + 1)} if scene.num_z_slices > 1 else {}
        expected = np.squeeze(scene.read_block(**blocks))
        found = slide.levels[0][...]
        np.testing.assert_array_equal(found, expected.reshape(found.shape))
        for _ in range(10):
            x, y = (int(random.integers(0, side - 20)) for side in slide.dimensions)
            part = expected[y : y + 50, x : x + 60].reshape(-1, *found.shape[2:])
            size = min(60, found.shape[1] - x), min(50, found.shape[0] - y)
            read = slide.read_region((x, y), size)
            np.testing.assert_array_equal(read.reshape(part.shape), part)


@pytest.mark.parametrize("side", [410.0, float("nan"), float("inf"), 1e300])
def test_a_size_in_floating_point(path, side):
    write_brightfield(path)
    vsis.vsi(path, vsis.image((410, 300), boundary=(0.0, 0.0, side, 300.0)))
    with open_slide(path, "cpu") as slide:
        # Without a possible size, the tiles of 64 x 64 pixels give it.
        assert slide.dimensions == ((410, 300) if side == 410 else (448, 320))
        assert len(slide.layout.problems) == (side != 410)


def test_a_real_slide():
    path = shared_slide("found/vsi-ets-test-jpg2k.vsi")
    check_by_slideio(path)
    with open_slide(path, "cpu") as slide:
        assert [channel.name for channel in slide.channels] == ["C405", "C488"]
        assert slide.mpp == pytest.approx((0.108333, 0.108333), rel=1e-4)
        assert slide.objective == 60
        assert slide.layout.other_planes == 10
        assert slide.layout.problems == ()


def test_jpegs(path):
    """Their pixels are libjpeg's; slideio has another decoder."""
    levels = write_brightfield(path)
    with open_slide(path, "cpu") as slide:
        for level, stored in zip(slide.levels, levels, strict=True):
            expected = np.zeros((800, 800, 3), np.uint8)
            for tile in cut(stored, jpeg):
                x, y = (SIDE * each for each in tile.coordinates)
                expected[y : y + SIDE, x : x + SIDE] = imagecodecs.jpeg8_decode(tile.data)
            height, width = stored.shape[:2]
            np.testing.assert_array_equal(level[...], expected[:height, :width])


def test_a_pyramid(path):
    write_brightfield(path, jpeg_2000, compression=vsis.JPEG_2000)
    check_by_slideio(path)
    with open_slide(path, "cpu") as slide:
        assert slide.vendor == "olympus"
        assert slide.level_dimensions == ((410, 300), (205, 150), (102, 75))
        assert slide.level_downsamples == (1, 2, 4)
        assert (slide.mpp, slide.objective) == ((0.25, 0.26), 20)
        assert slide.metadata["olympus"]["Product name"] == "cellSens"
        shown = str(masked(slide.metadata))
        assert "Dr Who" not in shown
        assert "patient" not in shown


@pytest.mark.parametrize("color", [3, 4], ids=["rgb", "bgr"])
def test_uncompressed_levels(path, color):
    order = slice(None, None, -1 if color == 4 else 1)
    options = {"compression": vsis.RAW, "color": color}
    levels = write_brightfield(path, lambda tile: tile[..., order].tobytes(), **options)
    with open_slide(path, "cpu") as slide:
        for level, expected in zip(slide.levels, levels, strict=True):
            np.testing.assert_array_equal(level[...], expected)


def test_jpeg_2000(path):
    levels = write_brightfield(path, jpeg_2000, compression=vsis.JPEG_2000)
    with open_slide(path, "cpu") as slide:
        for level, expected in zip(slide.levels, levels, strict=True):
            np.testing.assert_array_equal(level[...], expected)


def test_channels_and_planes(path):
    """The dimensions are in the order that the tags say; the middle z is shown."""
    stack = slides.picture(100, 130, 15, "uint16").reshape(100, 130, 3, 5)
    tiles = []
    for z in range(5):
        for c in range(3):
            tiles += cut(stack[:, :, c, z], lambda tile: tile.tobytes(), 0, z, c, 0)
    folder = path.parent / f"_{path.stem}_" / "stack1"
    options = {"compression": vsis.RAW, "samples": 1, "kind": 4, "color": 1}
    vsis.ets(folder / "frame_t.ets", tiles, (SIDE, SIDE), **options)
    vsis.vsi(path, vsis.image((130, 100), (2, 1, 4), ("DAPI", "Cy3", "Cy5")))
    with open_slide(path, "cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], stack[..., 2])
        assert [channel.name for channel in slide.channels] == ["DAPI", "Cy3", "Cy5"]
        assert slide.layout.other_planes == 4
    check_by_slideio(path)


def test_opening_it_takes_little_memory(path):
    """Python makes room for what is asked for before it reads."""
    write_brightfield(path)
    tracemalloc.start()
    try:
        describe(path)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_the_overview_is_no_slide(path):
    write_brightfield(path)
    overview = slides.picture(700, 900)
    folder = path.parent / f"_{path.stem}_"
    vsis.ets(folder / "stack0" / "frame_t.ets", cut(overview, jpeg, 0), (SIDE, SIDE))
    vsis.vsi(path, vsis.image((900, 700), kind=1), vsis.image((410, 300)))
    with open_slide(path, "cpu") as slide:
        assert slide.dimensions == (410, 300)
        macro = slide.associated_images["macro"].read()
        assert macro.shape == overview.shape
        assert np.abs(macro.astype(int) - overview).mean() < 8


def test_a_gpu(path, host_gpu):
    write_brightfield(path)
    with open_slide(path, "cpu") as slide, open_slide(path, "cuda") as by_gpu:
        for level, other in zip(slide.levels, by_gpu.levels, strict=True):
            assert np.abs(level[...].astype(int) - other[...]).max() <= 2
        assert by_gpu.stats()["decoded"].get("nvimagecodec")


def test_pixels_in_tiff_files(path):
    """Newer scanners can store them so; the message says what to open."""
    write_brightfield(path)
    stack = path.parent / "_slide_" / "stack1"
    (stack / "frame_t_0.tif").write_bytes(b"")
    with open_slide(path, "cpu") as slide:
        [problem] = slide.layout.problems
    assert problem.startswith("1 TIFF file(s) of the slide are not read")
    (stack / "frame_t.ets").unlink()
    with pytest.raises(UnsupportedSlideError, match=r"open a TIFF file in .*'_slide_'"):
        describe(path)
    (stack / "frame_t_0.tif").unlink()
    with pytest.raises(CorruptSlideError, match="is missing"):
        describe(path)


def test_missing_tiles_are_background(path):
    tiles = cut(slides.picture(128, 128), jpeg, 0)
    folder = path.parent / f"_{path.stem}_" / "stack1"
    vsis.ets(folder / "frame_t.ets", tiles[:1] + tiles[3:], (SIDE, SIDE))
    vsis.vsi(path, vsis.image((128, 128)))
    with open_slide(path, "cpu") as slide:
        pixels = slide.levels[0][...]
        assert (pixels[:SIDE, SIDE:] == 255).all()
        assert (pixels[SIDE:, SIDE:] != 255).any()


def test_files_of_later_scanners_that_hold_no_picture(path):
    write_brightfield(path, jpeg_2000, compression=vsis.JPEG_2000)
    blob = path.parent / "_slide_" / "stack10000" / "blob_21_f_Frame#0.ets"
    blob.parent.mkdir()
    blob.write_bytes(b"SIS\0" + bytes(300))
    check_by_slideio(path)
    with open_slide(path) as slide:
        assert slide.layout.problems == ()


def test_a_folder_left_behind(path):
    write_brightfield(path)
    (path.parent / "_slide_").rename(path.parent / "elsewhere")
    with pytest.raises(CorruptSlideError, match="whose folder '_slide_'"):
        open_slide(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_holds_no_tiles(path):
    levels = write_brightfield(path)
    pipe = path.parent / "_slide_" / "stack2" / "frame_t.ets"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    holder = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # so that none waits to open it
    os.write(holder, bytes(4096))
    try:
        with open_slide(path, "cpu") as slide:
            assert slide.level_dimensions[0] == levels[0].shape[1::-1]
            assert not slide.layout.problems
    finally:
        os.close(holder)


def test_unknown_compression(path):
    write_brightfield(path, compression=77)
    with pytest.raises((UnsupportedSlideError, CorruptSlideError), match="unsupported kind"):
        open_slide(path)


@given(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=8), st.booleans())
def test_damage(tmp_path_factory, place, data, tags):
    path = tmp_path_factory.getbasetemp() / "damaged.vsi"
    write_brightfield(path)
    damaged = path if tags else path.parent / "_damaged_" / "stack1" / "frame_t.ets"
    content = bytearray(damaged.read_bytes())
    if tags:
        place %= len(content)
    else:
        place = place % 300 if place % 2 else len(content) - 1 - place % 2000
    content[place : place + len(data)] = data
    damaged.write_bytes(content)
    with suppress(SlideError), open_slide(path, "cpu") as slide, suppress(TileError):
        slide.read_region((0, 0), (64, 64))


@settings(max_examples=20, deadline=None)
@given(st.integers(-200, 200), st.integers(-200, 200), st.booleans(), st.booleans())
def test_tiles_with_an_origin(tmp_path_factory, x, y, named, sparse):
    """Their rows and columns count from an origin, and may be negative."""
    folder = tmp_path_factory.mktemp("vsi")
    path = folder / "a.vsi"
    levels = [slides.picture(300, 410), slides.picture(150, 205)]
    tiles = []
    for number, pixels in enumerate(levels):
        height, width = pixels.shape[:2]
        left, top = (round_to_zero(at / 2**number) for at in (x, y))
        for row in range(-top // SIDE - 1, -(-(height - top) // SIDE) + 1):
            for column in range(-left // SIDE - 1, -(-(width - left) // SIDE) + 1):
                place = top + SIDE * row, left + SIDE * column
                rows, columns = (np.arange(at, at + SIDE) for at in place)
                within = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
                if not (within[0].any() and within[1].any()):
                    continue
                if sparse and columns[-1] >= width:
                    pixels[rows[within[0]], columns[within[1]][0] :] = 255
                    continue
                tile = np.zeros((SIDE, SIDE, 3), np.uint8)
                tile[np.ix_(*within)] = pixels[np.ix_(rows[within[0]], columns[within[1]])]
                tiles.append(vsis.Tile((column, row, number), tile[..., ::-1].tobytes()))
    vsis.ets(folder / "_a_" / "stack7" / "frame_t.ets", tiles, (SIDE, SIDE), compression=vsis.RAW)
    others = [vsis.image((411, 301), number=3)] if named or sparse else []
    image = vsis.image((410, 300), origin=(x, y), number=7 if named or sparse else 0)
    vsis.vsi(path, *others, image)
    with open_slide(path, "cpu") as slide:
        assert (slide.dimensions, slide.mpp) == ((410, 300), (0.25, 0.26))
        for level, expected in zip(slide.levels, levels, strict=True):
            np.testing.assert_array_equal(level[...], expected)


def round_to_zero(value):
    """Round halves towards 0."""
    return int(np.copysign(np.ceil(abs(value) - 0.5), value))
