import contextlib
import json

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from napari_wsigpu import native, open_slide
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.model.errors import CorruptSlideError, TileError, UnsupportedSlideError
from napari_wsigpu.model.privacy import MASK, masked
from tests import oracles
from tests.conftest import shared_slide
from tests.writers import ndpi, slides

WIDTH, HEIGHT = 384, 320


def picture(height, width):
    """Shapes so large that a scaled level still shows them."""
    y, x, c = np.ogrid[:height, :width, :3]
    return (127.5 + 120 * np.sin(y / 90 + c) * np.cos(x / (70 + 9 * c))).astype(np.uint8)


def pyramid(steps=(1, 2, 4)):
    pixels = picture(HEIGHT, WIDTH)
    return [pixels if step == 1 else slides.average(pixels, step) for step in steps]


def write(path, *, blocks=(12, 12, 0), subsampling="4:4:4", macro=True, first=12, **options):
    """Write a pyramid whose two finer levels have restart markers."""
    levels = pyramid()
    pages = [
        ndpi.level(level, count, subsampling=subsampling, **options)
        for level, count in zip(levels, blocks, strict=True)
    ]
    if macro:
        pages.append(ndpi.level(picture(40, 120), lens=-1.0))
    pages.append(ndpi.level(picture(20, 60), lens=-2.0))
    ndpi.write(path, pages, first=first)
    return levels


def test_barcode_of_newer_scanners(tmp_path):
    """It has a tag of its own, is private, and comes before the reference."""
    level = ndpi.level(picture(64, 64), tags={65468: (ndpi.ASCII, "BC-0815")})
    ndpi.write(tmp_path / "a.ndpi", [level])
    with open_slide(tmp_path / "a.ndpi", "cpu") as slide:
        assert slide.metadata["barcode"] == slide.metadata["hamamatsu"]["Barcode"] == "BC-0815"
        assert "BC-0815" not in json.dumps(masked(slide.metadata))
        assert masked(slide.metadata)["hamamatsu"]["Barcode"] == MASK


def same_as_openslide(path, *, mean_difference=1.5):
    """Compare all that OpenSlide reports; averages are made in another way."""
    properties = oracles.openslide_properties(path)
    with open_slide(path, "cpu") as slide, oracles.openslide.OpenSlide(path) as other:
        assert slide.vendor == properties["openslide.vendor"] == "hamamatsu"
        assert slide.level_dimensions == other.level_dimensions
        assert slide.level_downsamples == other.level_downsamples
        assert slide.mpp == tuple(float(properties[f"openslide.mpp-{axis}"]) for axis in "xy")
        assert slide.objective == float(properties["openslide.objective-power"])
        for index, level in enumerate(slide.levels):
            expected = oracles.openslide_level(path, index)
            if level.computed:
                difference = np.abs(level[...].astype(int) - expected)
                assert difference.mean() <= mean_difference
            else:
                np.testing.assert_array_equal(level[...], expected)
        for name, value in properties.items():
            vendor, _, key = name.partition(".")
            if vendor == "hamamatsu":
                assert slide.metadata[vendor][key] == value
        for key, value in oracles.openslide_tiff_tags(path).items():
            assert oracles.as_property(slide.metadata["tiff"][key]) == value
        assert set(slide.associated_images) == set(other.associated_images)
        for name, image in other.associated_images.items():
            pixels = slide.associated_images[name].read()
            np.testing.assert_array_equal(pixels, np.asarray(image)[..., :3])
        return slide.layout


def scales(layout):
    """Return how much smaller each level is decoded; 0 for an average of the one above it."""
    return [0 if level.computed else level.encoding.jpeg_scale for level in layout.levels]


class TestAgainstOpenSlide:
    def test_a_real_slide(self):
        layout = same_as_openslide(shared_slide("ndpi-test3-DAPI-387.ndpi"))
        assert scales(layout) == [1, 1, 1, 1, 2, 4, 8]
        assert layout.scanner == "Hamamatsu C9600-12"
        assert layout.scan_date == "2017-02-07T13:06:43"
        assert layout.background == 0
        assert not layout.problems

    @pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2"])
    @pytest.mark.parametrize("across", [1, 2, 4])
    def test_intervals_of_any_width(self, tmp_path, across, subsampling):
        path = tmp_path / "slide.ndpi"
        unit = 8 if subsampling == "4:4:4" else 16
        blocks = [level // unit // across for level in (WIDTH, WIDTH // 2)]
        write(path, blocks=(*blocks, 0), subsampling=subsampling)
        layout = same_as_openslide(path, mean_difference=1.5 if subsampling == "4:4:4" else 8)
        assert layout.levels[0].grid.columns == across
        assert layout.levels[0].grid.tile_height > 8
        assert layout.barcode == "S-12 \xb5m"
        assert layout.background == 255

    @pytest.mark.parametrize("text", ["ABC", "B"])
    def test_short_texts_outside_the_directory(self, tmp_path, text):
        path = tmp_path / "slide.ndpi"
        write(path, tags={65427: (ndpi.ASCII, text), 65442: (ndpi.ASCII, "77")})
        layout = same_as_openslide(path)
        assert layout.barcode == text
        assert layout.metadata["hamamatsu"]["ScannerSerialNumber"] == "77"

    def test_a_level_without_restart_markers(self, tmp_path):
        path = tmp_path / "slide.ndpi"
        write(path, blocks=(0, 0, 0))
        layout = same_as_openslide(path)
        assert layout.levels[0].grid.tile_height == HEIGHT
        assert scales(layout) == [1, 1, 1, 0, 0, 0]

    def test_levels_between_stored_ones(self, tmp_path):
        path = tmp_path / "slide.ndpi"
        pages = [ndpi.level(level, 6) for level in pyramid((1, 4))]
        ndpi.write(path, pages)
        layout = same_as_openslide(path)
        assert scales(layout) == [1, 2, 1, 2, 4, 8]

    def test_a_file_beyond_4_gib(self, tmp_path):
        path = tmp_path / "slide.ndpi"
        write(path, first=(1 << 32) + 4096)
        layout = same_as_openslide(path)
        assert int(layout.levels[0].grid.offsets.min()) > 1 << 32
        renamed = describe(path.rename(tmp_path / "slide.tif"))
        assert repr(renamed.levels) == repr(layout.levels)

    def test_the_central_focal_plane(self, tmp_path):
        path = tmp_path / "slide.ndpi"
        pages = [
            ndpi.level(np.ascontiguousarray(level[::turn]), 6, plane=plane)
            for level in pyramid((1, 2))
            for plane, turn in ((1500, -1), (0, 1), (-1500, -1))
        ]
        ndpi.write(path, pages)
        layout = same_as_openslide(path)
        assert layout.other_planes == 2
        assert layout.problems == ()

    def test_focal_plane_without_level_0_is_left_out(self, tmp_path):
        path = tmp_path / "slide.ndpi"
        full, half, quarter = pyramid()
        ndpi.write(path, [ndpi.level(full), ndpi.level(half, plane=7), ndpi.level(quarter)])
        [problem] = describe(path).problems
        assert problem == "1 level(s) of focal planes without level 0 are left out."

    def test_size_of_the_jpeg_takes_precedence(self, tmp_path):
        path = tmp_path / "slide.ndpi"
        levels = pyramid()
        tags = {256: (ndpi.LONG, 95), 257: (ndpi.LONG, 81), 278: (ndpi.LONG, 81)}
        pages = [ndpi.level(levels[0], 12), ndpi.level(levels[2], tags=tags)]
        ndpi.write(path, pages)
        same_as_openslide(path)


@pytest.mark.parametrize("text", ["ABC", "B", ""])
def test_short_texts_inside_the_directory(tmp_path, text):
    path = tmp_path / "slide.ndpi"
    pages = [ndpi.level(picture(HEIGHT, WIDTH), tags={65427: (ndpi.ASCII, text)})]
    ndpi.write(path, pages, short_texts_inside=True)
    assert describe(path).barcode == (text or None)


def test_intervals_of_two_rows_of_blocks_are_tifffiles(tmp_path):
    """Chroma of half the height is smoothed across intervals, but not across tiles."""
    path = tmp_path / "slide.ndpi"
    write(path, blocks=(24, 12, 0), subsampling="4:2:0")
    with open_slide(path, "cpu") as slide, tifffile.TiffFile(path) as file:
        for level, page in zip(slide.levels[:3], file.pages, strict=False):
            assert level.chunks[0] == level.shape[0]
            np.testing.assert_array_equal(level[...], page.asarray())


def test_parts_of_tiles(tmp_path):
    """Tiles of a width that does not go into the level's height."""
    path = tmp_path / "slide.ndpi"
    pixels = picture(1000, 1024)
    ndpi.write(path, [ndpi.level(pixels, 64)])
    expected = oracles.openslide_level(path)
    with open_slide(path, "cpu") as slide:
        assert slide.levels[0].chunks[:2] == (256, 512)
        np.testing.assert_array_equal(slide.levels[0][...], expected)
        for top, left in ((250, 500), (990, 0), (0, 1000)):
            found = slide.read_region((left, top), (60, 50))
            inside = expected[top : top + 50, left : left + 60]
            np.testing.assert_array_equal(found[: len(inside), : inside.shape[1]], inside)
            assert (found[len(inside) :] == 255).all()


@pytest.mark.parametrize(
    "tags",
    [
        {65426: (ndpi.LONG, (700, 900)), 65432: (ndpi.LONG, (0, 0))},  # too few
        {65426: (ndpi.LONG, tuple(range(3000, 3000 - 80, -1)))},  # backwards
    ],
)
def test_wrong_marker_positions(tmp_path, tags):
    path = tmp_path / "slide.ndpi"
    pixels = picture(HEIGHT, WIDTH)
    ndpi.write(path, [ndpi.level(pixels, 24, tags=tags)])
    with open_slide(path, "cpu") as slide:
        (problem,) = slide.layout.problems
        assert "restart markers" in problem
        np.testing.assert_array_equal(slide.levels[0][...], oracles.tifffile_page(path))


def test_gray_levels_of_16_bits(tmp_path):
    """Stored as JPEG XR; tags still say RGB of 8 bits."""
    path = tmp_path / "slide.ndpi"
    levels = [slides.picture(HEIGHT // step, WIDTH // step, 1, "uint16") for step in (1, 2)]
    pages = []
    for pixels in levels:
        data = imagecodecs.jpegxr_encode(pixels[..., 0], level=1.0)
        _, tags = ndpi.level(np.zeros((*pixels.shape[:2], 3), np.uint8))
        more = {259: (ndpi.SHORT, 22610), 279: (ndpi.LONG, len(data)), 65441: (ndpi.LONG, 17)}
        pages.append((data, tags | more))
    ndpi.write(path, pages)
    with open_slide(path, "cpu") as slide, tifffile.TiffFile(path) as file:
        assert [channel.name for channel in slide.channels] == ["gray"]
        assert slide.layout.background == 0
        for page, level, expected in zip(file.pages, slide.levels, levels, strict=False):
            np.testing.assert_array_equal(page.asarray(), expected[..., 0])
            np.testing.assert_array_equal(level[...], expected)


def test_an_interval_that_does_not_end_at_a_marker(tmp_path):
    path = tmp_path / "slide.ndpi"
    data, tags = ndpi.level(picture(HEIGHT, WIDTH), 48)
    places = list(tags[65426][1])
    places[1] += 3
    ndpi.write(path, [(data, tags | {65426: (ndpi.LONG, tuple(places))})])
    with open_slide(path, "cpu") as slide, pytest.raises(TileError, match="is truncated"):
        slide.read_region((0, 0), (10, 10))


def test_an_interval_that_ends_early(tmp_path):
    path = tmp_path / "slide.ndpi"
    data, tags = ndpi.level(picture(HEIGHT, WIDTH), 48)
    places = tags[65426][1]
    start, end = places[1], places[2] - 2
    middle = (start + end) // 2
    while data[middle - 1] == 255:
        middle -= 1
    cut = data[:middle] + data[places[2] - 2 :]
    moved = tuple(place if place <= start else place - len(data) + len(cut) for place in places)
    ndpi.write(path, [(cut, tags | {65426: (ndpi.LONG, moved), 279: (ndpi.LONG, len(cut))})])
    with open_slide(path, "cpu") as slide:
        if native.core is not None:
            with pytest.raises(TileError, match="ends within a row"):
                slide.read_region((0, 0), (10, 10))
        assert slide.check_tiles().damaged or native.core is None


def test_a_plain_jpeg_that_is_too_large(tmp_path):
    path = tmp_path / "slide.ndpi"
    tags = {256: (ndpi.LONG, 60000), 257: (ndpi.LONG, 60000), 278: (ndpi.LONG, 60000)}
    ndpi.write(path, [ndpi.level(picture(64, 64), tags=tags)])
    with pytest.raises(UnsupportedSlideError, match="too large to decode"):
        open_slide(path)


def test_computed_levels_show_what_the_others_show(tmp_path):
    """Of levels of 384 and 150 pixels, none of 96 can be averaged from the one above it."""
    path = tmp_path / "slide.ndpi"
    pixels = picture(HEIGHT, WIDTH)
    small = np.asarray(Image.fromarray(pixels).resize((150, 125), Image.Resampling.BOX))
    ndpi.write(path, [ndpi.level(pixels, 12), ndpi.level(small)])
    with open_slide(path, "cpu") as slide:
        assert {384, 192, 150} <= {width for width, _ in slide.level_dimensions}
        for level in slide.levels:
            step = slide.dimensions[0] / level.shape[1]
            rows, columns = (
                ((np.arange(length) + 0.5) * step).astype(int) for length in level.shape[:2]
            )
            expected = pixels[rows.clip(max=HEIGHT - 1)][:, columns.clip(max=WIDTH - 1)]
            assert np.abs(level[...].astype(int) - expected).mean() < 6


def test_a_plain_jpeg_that_claims_to_be_huge(tmp_path):
    path = tmp_path / "slide.ndpi"
    data, tags = ndpi.level(picture(64, 64))
    frame = data.index(b"\xff\xc0") + 5
    ndpi.write(path, [(data[:frame] + b"\xff" * 4 + data[frame + 4 :], tags)])
    with pytest.raises(UnsupportedSlideError, match="tiles of 65535 x 65535 pixels"):
        open_slide(path)


def test_a_broken_macro_image_is_left_out(tmp_path):
    path = tmp_path / "slide.ndpi"
    tags = {256: (ndpi.LONG, 0)}
    ndpi.write(
        path,
        [
            ndpi.level(picture(HEIGHT, WIDTH), 24),
            ndpi.level(picture(40, 120), lens=-1.0, tags=tags),
        ],
    )
    with open_slide(path) as slide:
        assert not slide.associated_images
        (problem,) = slide.layout.problems
        assert problem.startswith("The macro image is left out:")


@pytest.mark.parametrize("lens", [-1.0, 0.0, float("nan"), float("inf")])
def test_no_level(tmp_path, lens):
    path = tmp_path / "slide.ndpi"
    ndpi.write(path, [ndpi.level(picture(64, 64), lens=lens)])
    with pytest.raises(CorruptSlideError, match="without a level"):
        open_slide(path)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (65422, (ndpi.ASCII, "x")),
        (65422, (ndpi.FLOAT, float("nan"))),
        (65424, (ndpi.ASCII, "x")),
        (65426, (ndpi.ASCII, "x" * 39)),
        (65426, (ndpi.LONG, (0,) * 40)),
        (65426, (ndpi.LONG, (1 << 31,) * 40)),
        (65427, (ndpi.LONG, 7)),
        (65427, (ndpi.LONG, (7,) * 40)),
        (65449, (ndpi.LONG, (7,) * 40)),
        (65449, (ndpi.ASCII, "=\r\n" * 10_000)),
        (65434, (ndpi.LONG, (7,) * 40)),
        (282, (ndpi.RATIONAL, (0, 0))),
    ],
)
def test_impossible_tags(tmp_path, code, value):
    path = tmp_path / "slide.ndpi"
    data, tags = ndpi.level(picture(HEIGHT, WIDTH), 48)
    ndpi.write(path, [(data, tags | {code: value})])
    with open_slide(path, "cpu") as slide:
        json.dumps(slide.metadata, allow_nan=False)
        np.testing.assert_array_equal(slide.levels[0][...], oracles.tifffile_page(path))


def test_damage_at_a_smaller_scale_is_reported(tmp_path):
    path = tmp_path / "slide.ndpi"
    data, tags = ndpi.level(picture(256, 256), 16)
    middle = ndpi.starts(data)[8]
    ndpi.write(path, [(data[:middle] + bytes(64) + data[middle + 64 :], tags)])
    with open_slide(path, "cpu") as slide:
        assert scales(slide.layout) == [1, 2, 4, 8]
        for level in slide.levels:
            with contextlib.suppress(TileError):  # or libjpeg bridged it
                assert level[...].shape[2] == 3
    ndpi.write(path, [(data[:middle], tags)])
    with open_slide(path, "cpu") as slide:
        for level in slide.levels:
            with pytest.raises(TileError, match="level"):
                level[...]
