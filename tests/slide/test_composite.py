"""Composites of a slide's channels, for scripts."""

from dataclasses import replace

import numpy as np
import pytest
import tifffile
import zarr

from napari_wsigpu import open_slide
from napari_wsigpu.display import composite_source
from napari_wsigpu.display.compose import compose
from napari_wsigpu.display.composite_source import CompositeView
from napari_wsigpu.model.composite import ChannelStyle, Composite
from napari_wsigpu.model.errors import LevelError, RegionError, TileError
from napari_wsigpu.model.layout import Channel
from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.channels import ChannelReader, composite_of
from napari_wsigpu.viewer.contributions.sample_slide import sample_path

NAMES = ["DAPI", "CD3", "CD8", "PanCK Cy5", "FoxP3", "PD1"]
SIDE = 600


def write(path, pixels, **options):
    with tifffile.TiffWriter(path, ome=True) as file:
        options = {"tile": (256, 256), "compression": "zlib", **options}
        metadata = {"axes": "CYX", "Channel": {"Name": NAMES}}
        file.write(pixels, photometric="minisblack", metadata=metadata, subifds=1, **options)
        file.write(pixels[:, ::2, ::2], photometric="minisblack", subfiletype=1, **options)


@pytest.fixture
def pixels():
    return np.random.default_rng(5).integers(0, 5000, (6, SIDE, SIDE), np.uint16)


@pytest.fixture
def slide(tmp_path, pixels):
    write(tmp_path / "six.ome.tif", pixels)
    with open_slide(tmp_path / "six.ome.tif", "cpu") as slide:
        yield slide


def test_composite_shows_four_channels_in_the_colors_of_their_dyes(slide):
    composite = slide.composite()
    assert composite.visible == (0, 1, 2, 3)
    assert [style.name for style in composite.channels] == NAMES
    assert composite.channels[0].color == "#0000ff"
    assert composite.channels[3].color == "#ff00ff"
    assert all(composite.channels[index].window for index in range(4))


@pytest.mark.parametrize("where", [{"level": 0}, {"level": 1}])
def test_region_equals_the_composed_channels(slide, pixels, where):
    composite = slide.composite([1, 4])
    found = slide.read_region((30, 50), (200, 120), composite=composite, **where)
    whole = pixels if where["level"] == 0 else pixels[:, ::2, ::2]
    left, top = (30, 50) if where["level"] == 0 else (15, 25)
    shown = [whole[index, top : top + 120, left : left + 200] for index in (1, 4)]
    np.testing.assert_array_equal(found, compose(shown, composite, (120, 200)))


def test_only_visible_channels_are_decoded(slide):
    composite = slide.composite([2])
    before = slide.stats()["decoded"]["cpu"]
    slide.read_region((0, 0), (256, 256), composite=composite)
    assert slide.stats()["decoded"]["cpu"] == before + 1


@pytest.mark.parametrize("level", [0, 1])
def test_one_channel_of_a_level_is_decoded_alone(slide, pixels, level):
    stored = pixels[4] if level == 0 else pixels[4, ::2, ::2]
    before = slide.stats()["bytes_decoded"]
    np.testing.assert_array_equal(slide.levels[level][10:250, 20:240, 4], stored[10:250, 20:240])
    assert slide.stats()["bytes_decoded"] == before + 256 * 256 * 2
    np.testing.assert_array_equal(slide.levels[level][300:, ::3, 4], stored[300:, ::3])


def test_a_channel_of_a_damaged_tile_is_named(tmp_path, pixels):
    path = tmp_path / "six.ome.tif"
    write(path, pixels, compression="zlib")
    with tifffile.TiffFile(path) as file:
        start = file.pages[3].dataoffsets[0]
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(20))
    with open_slide(path, "cpu") as slide:
        np.testing.assert_array_equal(slide.levels[0][:200, :200, 2], pixels[2, :200, :200])
        with pytest.raises(TileError, match="channel 3"):
            slide.levels[0][:200, :200, 3]


@pytest.mark.parametrize("key", [slice(1, 3), slice(None, None, 2), slice(4, 1, -2), slice(3, 3)])
def test_some_channels_of_a_level_are_decoded_alone(slide, pixels, key):
    before = slide.stats()["bytes_decoded"]
    expected = np.moveaxis(pixels, 0, -1)[250:5:-3, 20:240, key]
    np.testing.assert_array_equal(slide.levels[0][250:5:-3, 20:240, key], expected)
    decoded = slide.stats()["bytes_decoded"] - before
    assert decoded == expected.shape[2] * 256 * 256 * 2 or not expected.size


def test_some_channels_are_read_alone_to_a_device(tmp_path, pixels, host_gpu):
    write(tmp_path / "six.ome.tif", pixels)
    with open_slide(tmp_path / "six.ome.tif") as slide:
        found = slide.levels[0].read((slice(0, 200), slice(20, 240), slice(1, 6, 2)), "cuda")
        np.testing.assert_array_equal(found, np.moveaxis(pixels, 0, -1)[:200, 20:240, 1:6:2])
        assert slide.stats()["bytes_decoded"] == 3 * 256 * 256 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": (float("nan"), 1)}, "its window is .*; it must be a tuple of two finite"),
        ({"window": (0, float("inf"))}, "its window is"),
        ({"window": (1,)}, "its window is"),
        ({"window": (0, 10**400)}, "its window is .{30,60};"),
        ({"window": (5, 1)}, r"its window is \(5, 1\); its lower limit must come first"),
        ({"window": "x"}, "its window is"),
        ({"gamma": 0}, "its gamma is 0; it must be a number greater than 0"),
        ({"gamma": "x"}, "its gamma is"),
        ({"gamma": float("nan")}, "its gamma is"),
        ({"color": "red"}, "its color is 'red'; it must be like '#ff8000'"),
        ({"color": None}, "its color is"),
        ({"color": (1, 0, 0)}, "its color is"),
    ],
)
def test_wrong_values_of_a_composite_are_named(slide, change, message):
    composite = slide.composite([2])
    composite = composite.styled(2, replace(composite.channels[2], **change))
    with pytest.raises(RegionError, match=f"Channel 2 of the composite can't be shown: {message}"):
        slide.read_region((0, 0), (10, 10), composite=composite)


@pytest.mark.parametrize("wrong", [1, "yes", [1], np.ones(2)])
def test_only_true_and_false_show_and_invert(slide, wrong):
    composite = slide.composite([2])
    inverted = replace(composite, inverted=wrong)
    shown = composite.styled(3, replace(composite.channels[3], visible=wrong))
    for changed in (inverted, shown):
        with pytest.raises(RegionError, match="it must be True or False"):
            slide.composite(settings=changed)


def test_zero_is_in_the_middle_of_all_floats(slide):
    composite = slide.composite([2])
    style = replace(composite.channels[2], window=(-(10**308), 10**308), color="#ffffff")
    shown = slide.read_region((0, 0), (9, 9), composite=composite.styled(2, style))
    assert (np.abs(shown.astype(int) - 127.5) <= 1).all()


def test_a_narrow_window_is_a_threshold(slide, pixels):
    composite = slide.composite([2])
    style = replace(composite.channels[2], window=(0, 5e-324), color="#ffffff")
    shown = slide.read_region((0, 0), (600, 600), composite=composite.styled(2, style))
    np.testing.assert_array_equal(shown[..., 0], 255 * (pixels[2] > 0))


def test_composite_of_another_slide_is_refused(slide):
    composite = slide.composite([1])
    composite = replace(composite, channels=composite.channels[:3])
    with pytest.raises(RegionError, match=r"has 3 channels, but .* has 6"):
        slide.composite(settings=composite)


@pytest.mark.parametrize("composite", [[0, 1], 5, "a"])
def test_only_composites_are_composed(slide, composite):
    with pytest.raises(RegionError, match="is not a composite; pass"):
        slide.read_region((0, 0), (10, 10), composite=composite)


def test_a_channel_that_is_read_at_last_shows(slide, monkeypatch):
    monkeypatch.setattr(composite_source, "MANY_CHANNELS", 3)
    composite = slide.composite([0, 1, 2, 3])
    view = CompositeView(composite)
    source = slide.composite_level(0, view).source
    read, damaged = ChannelReader.tiles, {(0, 0)}

    def tiles(*args):
        found, _ = read(*args)
        for tile in damaged:
            found[tile] = [found[tile][0], *(np.zeros_like(each) for each in found[tile][1:])]
        return found, damaged

    monkeypatch.setattr(ChannelReader, "tiles", tiles)
    source.read_tiles([TileKey(source.slide, 0, 0, 0, source.key_color("stored"))])
    damaged = set()
    view.settings = composite.styled(0, replace(composite.channels[0], gamma=0.5))
    [pixels] = source.read_tiles(
        [TileKey(source.slide, 0, 0, 0, source.key_color("stored"))]
    ).values()
    expected = slide.read_region((0, 0), (256, 256), composite=view.settings)
    assert np.abs(pixels.astype(int) - expected).max() <= 1


def write_zarr(path, pixels, chunks):
    group = zarr.open_group(path, mode="w", zarr_format=2)
    datasets = []
    for number, step in enumerate((1, 2)):
        group.create_array(str(number), data=pixels[:, ::step, ::step], chunks=chunks)
        scale = {"type": "scale", "scale": [1, step, step]}
        datasets.append({"path": str(number), "coordinateTransformations": [scale]})
    axes = [{"name": "c", "type": "channel"}, *({"name": n, "type": "space"} for n in "yx")]
    group.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets}]


@pytest.mark.parametrize(("chunks", "channels"), [((1, 256, 256), 2), ((2, 256, 256), 6)])
def test_channels_of_arrays_are_read_apart_if_they_have_chunks_of_their_own(
    tmp_path, pixels, chunks, channels
):
    write_zarr(tmp_path / "a.zarr", pixels, chunks)
    with open_slide(tmp_path / "a.zarr", "cpu") as slide:
        composite = slide.composite([1, 4])
        before = slide.stats()["bytes_decoded"]
        found = slide.read_region((30, 50), (200, 120), composite=composite)
        assert slide.stats()["bytes_decoded"] - before == channels * 2 * 256 * 256
        shown = [pixels[index, 50:170, 30:230] for index in (1, 4)]
        np.testing.assert_array_equal(found, compose(shown, composite, (120, 200)))
        # The stored tiles are still found at their own offsets.
        whole = slide.read_region((500, 300), (100, 300))
        np.testing.assert_array_equal(whole, pixels[:, 300:, 500:].transpose(1, 2, 0))


def test_region_at_a_resolution_is_averaged_before_it_is_composed(tmp_path, pixels):
    path = tmp_path / "mpp.ome.tif"
    tifffile.imwrite(
        path,
        pixels,
        tile=(256, 256),
        metadata={"axes": "CYX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5},
        photometric="minisblack",
    )
    with open_slide(path, "cpu") as slide:
        composite = slide.composite([0, 5])
        stored = slide.read_region((0, 0), (100, 100), mpp=1.0)
        expected = compose([stored[..., 0], stored[..., 5]], composite, (100, 100))
        found = slide.read_region((0, 0), (100, 100), mpp=1.0, composite=composite)
        np.testing.assert_array_equal(found, expected)


def test_channels_of_one_tile_are_composed_too(tmp_path, pixels):
    path = tmp_path / "interleaved.tif"
    tifffile.imwrite(
        path,
        np.moveaxis(pixels, 0, -1),
        tile=(256, 256),
        planarconfig="contig",
        photometric="minisblack",
        metadata={"axes": "YXS"},
    )
    with open_slide(path, "cpu") as slide:
        composite = slide.composite([0, 2])
        found = slide.read_region((10, 20), (300, 200), composite=composite)
        shown = [pixels[index, 20:220, 10:310] for index in (0, 2)]
        np.testing.assert_array_equal(found, compose(shown, composite, (200, 300)))


def test_missing_channels_and_rgb_slides_are_refused(slide):
    with pytest.raises(LevelError, match="no channel 9; the channels are 0 to 5"):
        slide.composite([9])
    out = np.zeros((9, 9, 3), np.uint8)
    for option in ({"color": "srgb"}, {"out": out}, {"stream": 3}):
        with pytest.raises(RegionError, match="omit device, color, out and stream"):
            slide.read_region((0, 0), (9, 9), composite=slide.composite(), **option)
    with open_slide(sample_path()) as rgb, pytest.raises(LevelError, match="RGB"):
        rgb.composite()


@pytest.mark.parametrize(
    "channels", [3, 3.5, np.int64(3), "DAPI", ["DAPI"], [[0]], np.array([[0, 2]]), slice(0, 3)]
)
def test_channels_are_a_list_of_numbers(slide, channels):
    for chosen in (slide.composite, slide.composite().showing):
        with pytest.raises(LevelError, match="is not a list of channel numbers"):
            chosen(channels)


def test_a_composite_in_place_of_numbers_is_named(slide):
    with pytest.raises(LevelError, match=r"^.{9,60} is not a list .* is passed as `settings`\.$"):
        slide.composite(slide.composite())


@pytest.mark.parametrize("index", [6, -1])
def test_style_of_a_missing_channel_is_refused(slide, index):
    with pytest.raises(LevelError, match=f"There is no channel {index}"):
        slide.composite().styled(index, ChannelStyle("new"))


@pytest.mark.parametrize("wrong", [Composite(None), Composite(("red",) * 6)])
def test_composites_of_something_else_are_refused(slide, wrong):
    with pytest.raises(RegionError, match=r"has 0 channels|must be a ChannelStyle"):
        slide.read_region((0, 0), (9, 9), composite=wrong)


def test_damaged_tile_of_a_visible_channel_is_named(tmp_path, pixels):
    path = tmp_path / "damaged.ome.tif"
    write(path, pixels)
    with tifffile.TiffFile(path) as file:
        offset = file.pages[3].dataoffsets[0]
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x00" * 40)
    with open_slide(path, "cpu") as slide:
        sound, damaged = slide.composite([0, 1]), slide.composite([0, 3])
        assert slide.read_region((0, 0), (50, 50), composite=sound).any()
        with pytest.raises(TileError, match="channel 3 of level 0, row 0, column 0"):
            slide.read_region((0, 0), (50, 50), composite=damaged)


def test_some_channels_are_shown_if_the_file_marks_none():
    hidden = [Channel(name, visible=False) for name in NAMES]
    assert composite_of(hidden, lambda _: np.arange(9), None, None).visible == (0, 1, 2, 3)


def test_style_without_window_gets_one(slide):
    composite = slide.composite([0])
    style = replace(composite.channels[4], visible=True)
    assert style.window is None
    found = slide.read_region((0, 0), (64, 64), composite=composite.styled(4, style))
    assert found[..., 1].any()
