"""What napari is given for a slide."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from napari.layers.utils.layer_utils import compute_multiscale_level_and_corners

from napari_wsigpu import convert, open_slide
from napari_wsigpu.model.privacy import masked
from napari_wsigpu.slide.slide import LARGEST_OVERVIEW
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.layers.slide_layers import slide_layers
from tests.test_display_color import in_srgb, with_profile, write
from tests.viewer.shared import wait_for_layout
from tests.writers import leica, philips, slides
from tests.writers.icc import ADOBE


def test_rgb_slide_is_one_layer_in_micrometres():
    with open_slide(sample_path()) as slide:
        [(levels, attributes, kind)] = slide_layers(slide)
        assert kind == "image"
        assert attributes["name"] == "he_phantom"
        assert attributes["rgb"] is True
        assert attributes["multiscale"] is True
        assert attributes["scale"] == (0.499, 0.499)
        assert attributes["units"] == ("micrometer", "micrometer")
        assert json.loads(json.dumps(attributes["metadata"]))["aperio"]["AppMag"] == "20"
        sizes = [level.shape[1::-1] for level in levels]
        assert sizes == list(slide.level_dimensions)


def test_metadata_masks_identifying_fields():
    with open_slide(sample_path()) as slide:
        [(_, attributes, _)] = slide_layers(slide)
        assert attributes["metadata"] == masked(slide.metadata)
        text = json.dumps(attributes["metadata"])
        for key in ("Filename", "Date", "User", "Title"):
            assert slide.metadata["aperio"][key] not in text


def test_layers_follow_the_display_color(tmp_path):
    with with_profile(write(tmp_path / "slide.tif"), ADOBE) as slide:
        [(levels, _, _)] = slide_layers(slide)
        stored = [np.asarray(level) for level in levels]
        slide.display_color = "srgb"
        for level, pixels in zip(levels, stored, strict=True):
            np.testing.assert_array_equal(np.asarray(level), in_srgb(pixels, ADOBE))


def test_channels_are_layers_with_names_and_limits(write_channels):
    path, pixels, names = write_channels(3)
    with open_slide(path) as slide:
        layers = slide_layers(slide)
        assert [attributes["name"] for _, attributes, _ in layers] == [
            f"channels3 {name}" for name in names
        ]
        for index, (levels, attributes, _) in enumerate(layers):
            low, high = attributes["contrast_limits"]
            assert pixels[index].min() <= low < high <= pixels[index].max()
            assert attributes["scale"] == (0.25, 0.5)
            np.testing.assert_array_equal(
                levels[0][100:400:3, 50:900], pixels[index, 100:400:3, 50:900]
            )


def test_channels_of_a_canvas_are_layers_with_an_overview(tmp_path):
    pixels = slides.picture(90, 120, dtype="uint16")
    item = leica.Scan(
        [[pixels[..., :1], pixels[..., 1:2]]],
        10_000,
        15_500,
        illumination="fluorescence",
        channels=[{"name": "L5", "rgb": "#00FF00"}, {"name": "TX2"}],
    )
    path = leica.write(tmp_path / "slide.scn", [item], (1_000_000, 600_000))
    with open_slide(path) as slide:
        layers = slide_layers(slide)
        assert [attributes["name"] for _, attributes, _ in layers] == ["slide L5", "slide TX2"]
        assert layers[0][1]["colormap"] == "green"
        for index, (levels, attributes, _) in enumerate(layers):
            assert [level.shape for level in levels] == [(1200, 2000), (600, 1000)]
            assert attributes["contrast_limits"][0] == 0
            np.testing.assert_array_equal(levels[0][31:121, 20:140], pixels[..., index])
            assert levels[1][16:60, 10:70].any()


def test_channels_without_colours_get_different_ones(write_channels):
    path, _, _ = write_channels(4)
    with open_slide(path) as slide:
        colours = [attributes["colormap"] for _, attributes, _ in slide_layers(slide)]
    assert len(set(colours)) == 4
    assert "gray" not in colours


@pytest.mark.parametrize("dtype", ["int16", "uint32", "float64"])
def test_rgb_that_napari_cannot_show_is_three_layers(tmp_path, dtype):
    path = tmp_path / "rgb.tif"
    pixels = np.arange(64 * 4200 * 3).reshape(64, 4200, 3).astype(dtype)
    tifffile.imwrite(path, pixels, tile=(64, 64), photometric="rgb")
    with open_slide(path) as slide:
        layers = slide_layers(slide)
        assert [attributes["colormap"] for _, attributes, _ in layers] == [
            "red",
            "green",
            "blue",
        ]
        for channel, (levels, *_) in enumerate(layers):
            np.testing.assert_array_equal(levels[0][:9], pixels[:9, :, channel])


@pytest.mark.parametrize(
    ("corner", "limits"), [(np.nan, (1, 2)), (np.inf, (1, 2)), (1, (1, 2)), (None, (0, 1))]
)
def test_contrast_limits_are_finite(tmp_path, corner, limits):
    path = tmp_path / "float.tif"
    pixels = np.ones((64, 4200), np.float32)
    pixels[32:, :] = 2
    if corner is None:
        pixels[...] = np.nan
    else:
        pixels[:16, :16] = corner
    tifffile.imwrite(path, pixels, tile=(64, 64))
    with open_slide(path) as slide:
        [(_, attributes, _)] = slide_layers(slide)
    assert attributes["contrast_limits"] == limits


def test_white_is_zero_is_shown_inverted(tmp_path):
    path = tmp_path / "inverted.tif"
    pixels = np.zeros((64, 4200), np.uint8)
    tifffile.imwrite(path, pixels, tile=(64, 64), photometric="miniswhite")
    converted = tmp_path / "converted.ome.tif"  # states that its channel is white
    convert(path, converted)
    for each in path, converted:
        with open_slide(each) as slide:
            [(_, attributes, _)] = slide_layers(slide)
        assert attributes["colormap"] == "gray_r"


def test_gray_slide_is_one_layer(write_channels):
    path, pixels, _ = write_channels(1)
    with open_slide(path) as slide:
        [(levels, attributes, _)] = slide_layers(slide)
        assert attributes["name"] == "channels1"
        assert attributes["rgb"] is False
        np.testing.assert_array_equal(levels[0][:], pixels[0])


@pytest.mark.parametrize("size", [(1024, 1024), (1025, 300), (700, 5001)])
def test_coarsest_level_is_small_and_an_area_average(tmp_path, size):
    path = tmp_path / "single.tif"
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    tifffile.imwrite(path, pixels, tile=(256, 256), photometric="rgb", compression="zlib")
    with open_slide(path) as slide:
        [(levels, _, _)] = slide_layers(slide)
        assert slide.level_count == 1
        assert max(levels[-1].shape[:2]) <= 1024
        expected = pixels.astype(np.float64)
        for level in levels[1:]:
            expected = area_average(expected)
            np.testing.assert_array_equal(level[...], expected)


def test_stored_levels_are_found_among_those_shown(tmp_path):
    path = tmp_path / "slide.tif"
    slides.write_pyramid(
        path, slides.picture(1100, 4300, 1)[..., 0], (8,), photometric="minisblack"
    )
    with open_slide(path) as slide:
        [(levels, _, _)] = slide_layers(slide)
        assert [level.shape for level in levels] == [
            (1100, 4300),
            (550, 2150),
            (275, 1075),
            (138, 538),
        ]
        assert [level.computed for level in levels] == [False, True, True, False]
        stored = [level for level in levels if level.number < slide.level_count]
        assert [level.shape for level in stored] == [level.shape[:2] for level in slide.levels]
        for level, own in zip(stored, slide.levels, strict=True):
            np.testing.assert_array_equal(level[...], own[..., 0])


@pytest.mark.parametrize("steps", [(1, 4, 16), (1, 4, 16, 32), (1, 16), (1, 3, 9, 27), (1, 2, 8)])
@given(
    zoom=st.floats(-8, 3).map(lambda power: 2**power),
    place=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_napari_loads_little_more_than_its_canvas_has(steps, zoom, place):
    """Wherever the slide fills the canvas, or the middle of it."""
    size, canvas = np.array([32_914, 46_000]), np.array([950, 1200])
    with open_slide(sample_path()) as slide:
        [first, *_] = slide.layout.levels
        levels = [
            replace(first, width=-(-46_000 // step), height=-(-32_914 // step)) for step in steps
        ]
        pyramid = replace(slide.layout, levels=tuple(levels)).pyramid(LARGEST_OVERVIEW)
    shapes = np.array([(level.layout.height, level.layout.width) for level in pyramid])
    start = np.maximum(size - canvas / zoom, 0) * place
    seen = np.array([start, np.minimum(start + canvas / zoom, size)])
    _, (start, stop) = compute_multiscale_level_and_corners(seen, canvas, size / shapes)
    assert np.prod(stop - start) <= 4.5 * np.prod(canvas)


def area_average(pixels):
    """2 x 2 blocks, at the edges what there is of them, rounded half up."""
    height, width, _ = pixels.shape
    padded = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), constant_values=np.nan)
    blocks = padded.reshape(padded.shape[0] // 2, 2, padded.shape[1] // 2, 2, 3)
    return np.floor(np.nanmean(blocks, axis=(1, 3)) + 0.5)


def test_levels_of_a_philips_slide_have_no_padding(tmp_path):
    path = tmp_path / "slide.tiff"
    philips.write(path, slides.picture(200, 300), (1, 2, 4), tile=64)
    with open_slide(path) as slide:
        [(levels, attributes, _)] = slide_layers(slide)
    assert [level.shape for level in levels] == [(200, 300, 3), (100, 150, 3), (50, 75, 3)]
    assert attributes["scale"] == (1e3 * philips.ROW, 1e3 * philips.COLUMN)


def test_a_speck_does_not_turn_fluorescence_black(viewer, tmp_path):
    rng = np.random.default_rng(1)
    pixels = rng.integers(200, 1000, (2, 1500, 1500), np.uint16)
    pixels[:, 40:61, 40:61] = 65535  # 0.02 %
    path = tmp_path / "speck.ome.tif"
    metadata = {"axes": "CYX", "Channel": {"Name": ["DAPI", "AF488"]}}
    options = {"tile": (256, 256), "photometric": "minisblack"}
    with tifffile.TiffWriter(path, ome=True) as file:
        file.write(pixels, subifds=1, metadata=metadata, **options)
        file.write(pixels[:, ::2, ::2], subfiletype=1, **options)
    layers = viewer.open(path, plugin="napari-wsigpu")
    assert [layer.colormap.name for layer in layers] == ["blue", "green"]
    for layer in layers:
        low, high = layer.contrast_limits
        assert 200 <= low < 400
        assert 800 < high <= 1000
        assert layer.contrast_limits_range == [0, 65535]
    wait_for_layout(viewer)
    picture = viewer.screenshot(flash=False)[..., :3]
    middle = picture[picture.shape[0] // 2 - 50 :, picture.shape[1] // 2 - 50 :][:100, :100]
    assert middle[..., 1].mean() > 80
    assert middle[..., 2].mean() > 80
    assert middle[..., 0].mean() < 20
