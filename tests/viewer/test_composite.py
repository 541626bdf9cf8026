"""Slides with many channels, which are one layer in a real napari window."""

from dataclasses import replace

import numpy as np
import pytest
import tifffile

from napari_wsigpu import wait
from napari_wsigpu.display import composite_source
from napari_wsigpu.display.source import hatched
from napari_wsigpu.gpu.jpeg.nvimagecodec import NvImageCodecDecoder
from napari_wsigpu.slide import runtime
from napari_wsigpu.viewer.drawing import slice_request
from napari_wsigpu.viewer.drawing.progressive import display_of
from napari_wsigpu.viewer.layers.slide_layers import show_composite, shown_composite, slide_of
from tests.viewer.shared import wait_for_layout

PLUGIN = "napari-wsigpu"


ON_BOTH = pytest.mark.parametrize("layer", ["the host", "a device"], indirect=True)


@pytest.fixture
def layer(request, viewer, write_channels):
    """A layer whose channels are composed on the host, or on host memory that poses as a GPU."""
    on_device = getattr(request, "param", "") == "a device"
    if on_device:
        request.getfixturevalue("host_gpu")
    # Host memory can decode JPEG 2000, which takes long to write.
    options = {"compression": "jpeg2000", "size": (600, 750)} if on_device else {}
    [layer] = viewer.open(write_channels(5, **options)[0], plugin=PLUGIN)
    slide_of(layer).device = "cuda" if on_device else "cpu"
    wait_for_layout(viewer)
    yield layer
    drawn_by = "on" if on_device else "the CPU decodes"
    assert display_of(layer).interop in (drawn_by, "only the overview is shown")


def assert_shown(layer, slide, tolerance=0):
    """Check that the slice is the composite, and return the composite."""
    wait(layer)
    settings, level = shown_composite(layer), layer.data_level
    whole = slide.read_region((0, 0), slide.level_dimensions[level], level, composite=settings)
    (top, left), (bottom, right) = layer.corner_pixels[:, -2:]
    pixels = np.asarray(layer._slice.image.raw).squeeze()
    expected = whole[top : bottom + 1, left : right + 1].astype(int)
    np.testing.assert_allclose(pixels.astype(int), expected, rtol=0, atol=tolerance)
    return settings


def test_changes_of_one_of_many_channels_show(layer, monkeypatch):
    monkeypatch.setattr(composite_source, "MANY_CHANNELS", 5)
    slide = slide_of(layer)
    show_composite(layer, slide.composite(range(5)))
    wait(layer)
    for index, high in ((3, 900), (3, 2500), (1, 1500)):
        composite = shown_composite(layer)
        style = replace(composite.channels[index], window=(150, high))
        show_composite(layer, composite.styled(index, style))
        assert_shown(layer, slide, tolerance=1)


@pytest.mark.parametrize("layer", ["a device"], indirect=True)
def test_a_device_keeps_the_tiles_of_one_composite(viewer, layer, host_gpu):
    viewer.scene.camera.zoom *= 4
    slide = slide_of(layer)
    settings = assert_shown(layer, slide)
    [tiles] = [runtime.default().devices.tiles(host_gpu)]
    kept = tiles_kept(tiles)
    for high in (900, 1100, 1300):
        style = replace(settings.channels[0], window=(100, high))
        show_composite(layer, settings.styled(0, style))
        assert display_of(layer).exact
    assert tiles_kept(tiles) == kept
    assert_shown(layer, slide)


@pytest.mark.parametrize("layer", ["a device"], indirect=True)
def test_a_device_decodes_tiles_of_all_channels_together(layer, monkeypatch):
    slide, batches = slide_of(layer), []
    schedule = NvImageCodecDecoder.schedule

    def counted(decoder, batch, *arguments, **options):
        batches.append(len(batch))
        return schedule(decoder, batch, *arguments, **options)

    wait(layer)
    slide.clear_cache()
    monkeypatch.setattr(NvImageCodecDecoder, "schedule", counted)
    tiles = slide.displayed_on_device().tiles
    images = [image for image, _ in slide._channel_reader.sources(0, [0, 2, 3])]
    for places in ([(0, 0), (2, 2)], [(0, 0), (1, 1), (2, 2)]):
        tiles.decode(images, places)
    assert batches == [6, 3]
    assert all(tiles.read(image, places) == set() for image in images)
    assert batches == [6, 3]


def tiles_kept(tiles):
    return sum((pool.owners[:, 0] >= 0).sum() for pool in tiles._pools.values())


def test_a_tile_damaged_in_one_channel_is_hatched_by_a_device(viewer, host_gpu, write_channels):
    path = write_channels(5, compression="jpeg2000", size=(600, 750))[0]
    with tifffile.TiffFile(path) as tif:
        place = tif.pages[1].dataoffsets[0]
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes(100))
    [layer] = viewer.open(path, plugin=PLUGIN)
    slide_of(layer).device = "cuda"
    wait_for_layout(viewer)
    viewer.scene.camera.zoom *= 4
    viewer.scene.camera.center = 0, 0, 0
    wait(layer)
    display = display_of(layer)
    assert display.exact
    drawn = np.asarray(layer._slice.image.raw)
    expected = hatched((256, 256, 3), display._picture.tiles.blank, np.dtype(np.uint8))
    (top, left), (bottom, right) = np.minimum(layer.corner_pixels, 255)
    expected = expected[top : bottom + 1, left : right + 1]
    height, width, _ = expected.shape
    np.testing.assert_array_equal(drawn[:height, :width], expected)
    assert min(height, width) > 100


def test_many_channels_are_one_layer(layer):
    assert layer.rgb
    assert layer.data[0].shape == (1200, 1500, 3)
    settings = assert_shown(layer, slide_of(layer))
    assert [style.name for style in settings.channels] == ["DAPI", "CD3", "CD8", "PanCK", "AF"]
    assert settings.visible == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("layer", "zoom"), [("the host", 1), ("the host", 4), ("a device", 4)], indirect=["layer"]
)
def test_changed_composite_is_drawn_without_decoding(viewer, layer, zoom):
    viewer.scene.camera.zoom *= zoom
    slide = slide_of(layer)
    settings = assert_shown(layer, slide)
    decoded = slide.stats()["decoded"]
    style = replace(settings.channels[0], color="#ffffff", window=(500, 1500), gamma=0.5)
    show_composite(layer, replace(settings.styled(0, style), inverted=True))
    assert display_of(layer).exact  # already in the first slice
    assert slide.stats()["decoded"] == decoded
    assert_shown(layer, slide)
    show_composite(layer, shown_composite(layer).showing([0, 2, 4]))
    assert assert_shown(layer, slide).visible == (0, 2, 4)


def test_thumbnail_follows_a_changed_composite(viewer, layer, qtbot):
    viewer.scene.camera.zoom *= 4
    assert_shown(layer, slide_of(layer))
    assert layer.data_level < len(layer.data) - 1
    assert layer.thumbnail[..., :3].any()
    show_composite(layer, shown_composite(layer).showing([]))
    qtbot.wait_until(lambda: not layer.thumbnail[..., :3].any())


@ON_BOTH
def test_overview_shows_a_composite_that_was_changed_before(viewer, layer):
    viewer.scene.camera.zoom *= 4
    assert_shown(layer, slide_of(layer))
    show_composite(layer, shown_composite(layer).showing([4]))
    viewer.scene.camera.zoom /= 16
    assert_shown(layer, slide_of(layer))
    assert layer.data_level == len(layer.data) - 1


@pytest.mark.parametrize("most_pixels", [1, slice_request.MOST_PIXELS])
def test_overview_replaces_views_in_the_changed_colors(viewer, layer, monkeypatch, most_pixels):
    viewer.scene.camera.zoom *= 4
    assert_shown(layer, slide_of(layer))
    slide_of(layer).clear_cache()
    monkeypatch.setattr(slice_request, "MOST_PIXELS", most_pixels)
    monkeypatch.setattr(runtime.default().fetcher, "request", lambda *_, **__: None)
    settings = shown_composite(layer).showing([4])
    red = replace(settings.channels[4], color="#ff0000", window=(0, 1))
    show_composite(layer, settings.styled(4, red))
    assert (np.asarray(layer._slice.image.raw) == (255, 0, 0)).all()


def test_prefetching_keeps_the_channels_of_the_view(viewer, write_channels, monkeypatch, qtbot):
    fetcher = runtime.default().fetcher
    monkeypatch.setattr(runtime.default().tiles, "budget", 16_000_000)
    [layer] = viewer.open(write_channels(5)[0], plugin=PLUGIN)
    wait_for_layout(viewer)
    viewer.scene.camera.zoom *= 4
    slide = slide_of(layer)
    settings = assert_shown(layer, slide)
    qtbot.wait_until(lambda: fetcher.stats(slide.displayed.slide)["prefetched"] > 0)
    before = 0
    while before != (before := fetcher.stats(slide.displayed.slide)["prefetched"]):
        qtbot.wait(300)
    decoded = slide.stats()["decoded"]
    style = replace(settings.channels[0], window=(500, 1500))
    show_composite(layer, settings.styled(0, style))
    assert display_of(layer).exact
    assert slide.stats()["decoded"] == decoded


@ON_BOTH
def test_composite_without_channels_is_black(layer):
    show_composite(layer, shown_composite(layer).showing([]))
    wait(layer)
    assert not np.asarray(layer._slice.image.raw).any()


def test_planes_share_the_composite(viewer, tmp_path):
    pixels = np.random.default_rng(3).integers(0, 4000, (3, 5, 300, 400), np.uint16)
    path = tmp_path / "stack.ome.tif"
    axes = {"axes": "ZCYX", "Channel": {"Name": list("abcde")}}
    tifffile.imwrite(path, pixels, metadata=axes, tile=(128, 128), photometric="minisblack")
    [layer] = viewer.open(path, plugin=PLUGIN)
    assert layer.data[0].shape == (3, 300, 400, 3) if layer.multiscale else layer.rgb
    for plane in (0, 2):
        viewer.dims.set_point(0, plane)
        assert_shown(layer, slide_of(layer).plane(z=plane))
    show_composite(layer, shown_composite(layer).showing([4]))
    for plane in (2, 1):
        viewer.dims.set_point(0, plane)
        assert_shown(layer, slide_of(layer).plane(z=plane))
