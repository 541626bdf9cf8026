"""Tiles that stay in device memory for displays; the device is host memory."""

import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from napari_wsigpu.display.device_picture import AvailableDeviceTiles, DevicePicture
from napari_wsigpu.display.drawing import View
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading.plan import Cancellation, CancelledError


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A pyramid whose levels differ by eight, so that others lie between them."""
    rng = np.random.default_rng(5)
    small = rng.integers(0, 255, (110, 80, 3), np.uint8)
    pixels = small.repeat(30, axis=0).repeat(30, axis=1)
    path = tmp_path_factory.mktemp("on_device") / "slide.tif"
    options = {"tile": (256, 256), "photometric": "rgb", "compression": "jpeg"}
    with tifffile.TiffWriter(path) as file:
        file.write(pixels, subifds=1, **options)
        file.write(pixels[::8, ::8], subfiletype=1, **options)
    return path


@pytest.fixture
def source(path, host_gpu):
    with open_slide(path, device="cuda") as slide:
        yield slide, slide.displayed_on_device()


def arrays(slide):
    return [slide.level_array(level.number) for level in slide.pyramid]


def picture_of(slide, source):
    levels = arrays(slide)
    layouts = {level.number: level.layout for level in levels}
    overview = np.asarray(levels[-1])
    blank = source.background("stored")
    at_hand = AvailableDeviceTiles(source.tiles, source.slide, layouts, overview, blank, None)
    return DevicePicture(at_hand, None)


def all_of(image):
    return Rect.between(0, image.height, 0, image.width)


def keys_of(picture):
    return [picture.tiles.key_of(picture.view.level, *tile) for tile in sorted(picture.missing)]


def corner_of(slide, found):
    """A picture of level 0 that was asked for its upper left corner: it, the view, and its keys."""
    picture = picture_of(slide, found)
    view = View(0, Rect.between(0, 1024, 0, 1024))
    picture.compose(view)
    return picture, view, keys_of(picture)


def test_levels_are_drawn_as_the_cpu_reads_them(source, path):
    slide, found = source
    assert any(level.layout.computed for level in arrays(slide)[:-1])
    picture = picture_of(slide, found)
    with open_slide(path, device="cpu") as other:
        for index, level in enumerate(arrays(other)[:-1]):
            view = View(index, all_of(level.layout))
            picture.compose(view)
            landed = found.read_tiles(keys_of(picture))
            assert all(landed.values())
            assert picture.add(landed)
            assert not picture.missing
            drawn = picture.compose(view)
            assert drawn.view == view
            np.testing.assert_array_equal(np.asarray(drawn.pixels), np.asarray(level))


def test_averaged_tiles_stay_on_the_device(source, host_gpu, monkeypatch):
    slide, found = source
    picture = picture_of(slide, found)
    index, *_ = [i for i, level in enumerate(arrays(slide)[:-1]) if level.layout.computed]
    copied = []
    copy = host_gpu.copy
    monkeypatch.setattr(
        host_gpu, "copy", lambda address, *given: copied.append(address) or copy(address, *given)
    )
    view = View(index, Rect.between(0, 768, 0, 768))
    picture.compose(view)
    keys = keys_of(picture)
    with monkeypatch.context() as patch:
        patch.delattr(type(host_gpu), "download")
        landed = found.read_tiles(keys)
        assert all(landed.values())
    assert len(copied) == 2  # to the result, and to their slots, which lie side by side
    # Every other slot is used again.
    dropped = keys[1::2]
    tiles = np.array([(key.row, key.column) for key in dropped])
    found.tiles.backend.drop_tiles(keys[0].image, tiles)
    assert all(found.read_tiles(dropped).values())
    assert len(copied) == 3 + len(dropped)
    picture.add(landed)
    exact = np.asarray(slide.level_array(keys[0].image))[:768, :768]
    np.testing.assert_array_equal(np.asarray(picture.compose(view).pixels), exact)


def test_tiles_that_are_missing_are_shown_by_the_best_others(source):
    slide, found = source
    picture = picture_of(slide, found)
    fine = picture.levels[0]
    whole = View(0, all_of(fine))
    picture.compose(whole)
    keys = keys_of(picture)
    half = found.read_tiles(keys[: 3 * len(keys) // 4])
    picture.add(half)
    drawn = np.asarray(picture.compose(whole).pixels)
    exact = np.asarray(slide.level_array(0))
    assert set(picture.missing) == {(key.row, key.column) for key in keys[3 * len(keys) // 4 :]}
    for key in keys:
        place = np.s_[
            key.row * 256 : (key.row + 1) * 256, key.column * 256 : (key.column + 1) * 256
        ]
        if key in half:
            np.testing.assert_array_equal(drawn[place], exact[place])
        else:  # blurred, but of the same place
            assert np.abs(drawn[place].mean((0, 1)) - exact[place].mean((0, 1))).max() < 40


def test_tiles_that_went_while_others_were_decoded_are_missing(source):
    slide, found = source
    picture, view, keys = corner_of(slide, found)
    found.read_tiles(keys[:8])
    asked = []

    def fetch():
        asked.append(keys_of(picture))
        picture.add(found.read_tiles(asked[-1]))
        if len(asked) == 1:
            went = np.array([(key.row, key.column) for key in keys[:8]])
            found.tiles.backend.drop_tiles(0, went)
        return 0.0

    pixels = np.asarray(picture.compose(view, fetch).pixels)
    assert asked == [keys[8:], keys[:8]]
    assert not picture.missing
    np.testing.assert_array_equal(pixels, np.asarray(slide.level_array(0))[:1024, :1024])


def test_a_cancelled_read_is_not_an_error_of_the_device(source):
    slide, found = source
    _, _, keys = corner_of(slide, found)
    cancellation = Cancellation()
    cancellation.cancel()
    places = [(key.row, key.column) for key in keys]
    with pytest.raises(CancelledError):
        slide._reader.read_tiles(keys[0].image, places, None, cancellation)
    assert slide.device == "cuda"


def test_tiles_that_go_again_and_again_stay_missing_and_wanted(source):
    slide, found = source
    picture, view, keys = corner_of(slide, found)
    went = np.array([(key.row, key.column) for key in keys[:2]])
    asked = []

    def fetch():
        asked.append(keys_of(picture))
        if len(asked) < 3:
            picture.add(found.read_tiles(asked[-1]))
            found.tiles.backend.drop_tiles(0, went)
        return 0.0

    pixels = np.asarray(picture.compose(view, fetch).pixels)
    assert asked == [keys, keys[:2], keys[:2]]
    assert set(picture.missing) == {*map(tuple, went.tolist())}
    exact = np.asarray(slide.level_array(0))[:1024, :1024]
    np.testing.assert_array_equal(pixels[256:], exact[256:])


def test_tiles_that_fail_are_hatched(path, host_gpu, tmp_path):
    spoilt = tmp_path / "spoilt.tif"
    data = bytearray(path.read_bytes())
    with tifffile.TiffFile(path) as file:
        offset, size = (v[0] for v in (file.pages[0].dataoffsets, file.pages[0].databytecounts))
    data[offset : offset + size] = bytes(size)
    spoilt.write_bytes(data)
    with open_slide(spoilt, device="cuda") as slide:
        found = slide.displayed_on_device()
        picture = picture_of(slide, found)
        view = View(0, Rect.between(0, 512, 0, 512))
        picture.compose(view)
        landed = found.read_tiles(keys_of(picture))
        assert sorted(landed.values()) == [False, True, True, True]
        picture.add(landed)
        drawn = np.asarray(picture.compose(view).pixels)
        assert not picture.missing
        with open_slide(spoilt, device="cpu") as other:
            host = other.displayed
            key = picture.tiles.key_of(0, 0, 0)._replace(slide=host.slide)
            [expected] = host.read_tiles([key]).values()
        assert len(np.unique(expected)) == 2
        np.testing.assert_array_equal(drawn[:256, :256], expected)
        exact = np.asarray(slide.level_array(0, tolerant=True))[:512, :512]
        assert (exact[:256, :256] == found.background("stored")).all()  # scripts get no hatching
        np.testing.assert_array_equal(drawn[256:], exact[256:])


def test_tiles_that_the_file_lacks_are_background(path, host_gpu, tmp_path):
    sparse = tmp_path / "sparse.tif"
    sparse.write_bytes(path.read_bytes())
    with tifffile.TiffFile(sparse, mode="r+b") as file:
        for name in ("TileOffsets", "TileByteCounts"):
            tag = file.pages[0].tags[name]
            tag.overwrite(
                [0 if index in (0, 3, 12) else each for index, each in enumerate(tag.value)]
            )
    with open_slide(sparse, device="cuda") as slide, open_slide(sparse, device="cpu") as other:
        found = slide.displayed_on_device()
        picture = picture_of(slide, found)
        view = View(0, Rect.between(0, 1024, 0, 1024))
        picture.compose(view)
        assert len(picture.missing) == 13
        picture.add(found.read_tiles(keys_of(picture)))
        drawn = np.asarray(picture.compose(view).pixels)
        np.testing.assert_array_equal(drawn, np.asarray(other.level_array(0))[:1024, :1024])
        assert (drawn[:256, :256] == found.background("stored")).all()


def test_slides_that_go_give_their_tiles_back(path, host_gpu):
    for _ in range(3):
        with open_slide(path, device="cuda") as slide:
            found = slide.displayed_on_device()
            picture = picture_of(slide, found)
            picture.compose(View(0, all_of(picture.levels[0])))
            found.read_tiles(keys_of(picture))
            assert host_gpu.live > 0
        assert host_gpu.live == 0


def test_the_cpu_has_no_tiles_on_a_device(path, host_gpu):
    with open_slide(path, device="cpu") as slide:
        assert slide.displayed_on_device() is None
