"""Pictures are held against the slide's own pixels, and against nearest pixels by hand."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_wsigpu import open_slide
from napari_wsigpu.display.available_tiles import AvailableTiles
from napari_wsigpu.display.blocks import touched
from napari_wsigpu.display.drawing import View
from napari_wsigpu.display.picture import Picture
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading.cache import TileCache
from napari_wsigpu.storage.buffers import PictureMemory
from tests.writers import slides, tiffbytes

TILE = 32


@pytest.fixture(scope="module")
def slide(tmp_path_factory):
    """Levels of 301 x 403, 151 x 202, 76 x 101 and 38 x 51 pixels."""
    path = tmp_path_factory.mktemp("picture") / "slide.tif"
    slides.write_pyramid(path, slides.picture(301, 403), steps=(2, 2, 2), tile=(TILE, TILE))
    with open_slide(path) as opened:
        yield opened


def picture_of(slide, channel=None, budget=1 << 20, *, labels=False):
    levels = {
        number: replace(level, categorical=labels)
        for number, level in enumerate(slide.layout.levels)
    }
    overview = slide.levels[-1][...] if channel is None else slide.levels[-1][..., channel]
    tiles = AvailableTiles(
        slide.displayed.slide, levels, overview, slide.layout.background, channel,
        TileCache(budget),
    )  # fmt: skip
    return Picture(tiles, PictureMemory())


def own_pixels(slide, view, channel=None):
    level = slide.level_array(view.level, channel)
    return level[view.rect.top : view.rect.bottom, view.rect.left : view.rect.right]


def fetch(slide, picture, level, tiles, *, land=True):
    """Decode tiles as the fetcher does: into the picture's cache, and to the picture."""
    keys = [picture.tiles.key_of(level, *tile) for tile in tiles]
    if keys:
        found = slide.displayed.read_tiles(keys)
        for key, tile in found.items():
            picture.tiles._cache.put(key, tile)
        if land:
            picture.add(found)


def nearest(slide, view, level):
    """Return a view as the nearest pixels of another level."""
    own, other = slide.layout.levels[view.level], slide.layout.levels[level]
    pixels = slide.levels[level][...]
    y = ((np.arange(view.rect.top, view.rect.bottom) + 0.5) * (other.height / own.height)).astype(
        int
    )
    x = ((np.arange(view.rect.left, view.rect.right) + 0.5) * (other.width / own.width)).astype(int)
    return pixels[np.ix_(np.minimum(y, other.height - 1), np.minimum(x, other.width - 1))]


def shown(slide, picture, view):
    """Compose a view; of another one that stands in for it, return its nearest pixels."""
    found, pixels, _ = picture.compose(view)
    own, other = slide.layout.levels[view.level], slide.layout.levels[found.level]
    places = []
    for first, last, begin, shape, factor in (
        (
            view.rect.top,
            view.rect.bottom,
            found.rect.top,
            pixels.shape[0],
            own.height / other.height,
        ),
        (
            view.rect.left,
            view.rect.right,
            found.rect.left,
            pixels.shape[1],
            own.width / other.width,
        ),
    ):
        place = ((np.arange(first, last) + 0.5) / factor).astype(int) - begin
        assert place[0] >= 0
        places.append(np.minimum(place, shape - 1))
    return pixels[np.ix_(*places)]


def test_with_nothing_at_hand_the_overview_is_shown(slide):
    picture = picture_of(slide)
    view = View(1, Rect.between(10, 140, 20, 190))
    np.testing.assert_array_equal(shown(slide, picture, view), nearest(slide, view, 3))
    assert len(picture.missing) == 5 * 6


def test_a_coarse_view_has_few_pixels_and_covers_the_fine_one(slide):
    picture = picture_of(slide)
    view = View(0, Rect.between(33, 301, 70, 401))
    found, pixels, _ = picture.compose(view)
    assert found.level == 2
    assert pixels.shape == (found.rect.height, found.rect.width, 3)
    image = slide.layout.levels[2]
    down, across = image.height / 301, image.width / 403
    assert found.rect.contains(
        Rect.between(int(33 * down), int(301 * down), int(70 * across), int(401 * across))
    )
    assert pixels.size < view.rect.height * view.rect.width * 3 / 12


def test_far_coarser_pixels_are_smoothed(slide):
    picture = picture_of(slide)
    pixels = shown(slide, picture, View(0, Rect.between(0, 301, 0, 403)))
    exact = slide.levels[0][...].astype(float)
    blocky = nearest(slide, View(0, Rect.between(0, 301, 0, 403)), 3)
    assert np.abs(pixels - exact).mean() < np.abs(blocky - exact).mean()


def test_far_coarser_labels_are_never_mixed(slide):
    pixels = shown(slide, picture_of(slide, labels=True), View(0, Rect.between(0, 301, 0, 403)))
    held = {tuple(pixel) for pixel in slide.levels[3][...].reshape(-1, 3).tolist()}
    assert {tuple(pixel) for pixel in pixels.reshape(-1, 3).tolist()} <= held


@pytest.mark.parametrize("at_hand", [0, 2])
def test_the_best_other_level_at_hand_is_shown(slide, at_hand):
    picture = picture_of(slide)
    for level in {2, at_hand}:
        image = slide.layout.levels[level]
        rows, columns = -(-image.height // TILE), -(-image.width // TILE)
        tiles = [(row, column) for row in range(rows) for column in range(columns)]
        fetch(slide, picture, level, tiles, land=False)
    view = View(1, Rect.between(5, 151, 0, 202))
    np.testing.assert_array_equal(shown(slide, picture, view), nearest(slide, view, at_hand))


def test_better_pixels_replace_worse_ones_while_the_view_stays(slide):
    picture = picture_of(slide)
    view = View(0, Rect.between(64, 120, 64, 120))
    picture.compose(view)
    fetch(slide, picture, 2, [(0, 0)])
    np.testing.assert_array_equal(shown(slide, picture, view), nearest(slide, view, 2))
    fetch(slide, picture, 1, [(1, 1)])
    np.testing.assert_array_equal(shown(slide, picture, view), nearest(slide, view, 1))
    fetch(slide, picture, 0, [(2, 2)])
    mixed = nearest(slide, view, 1)
    mixed[:32, :32] = own_pixels(slide, View(0, Rect.between(64, 96, 64, 96)))
    assert picture.compose(view).pixels is picture.compose(view).pixels
    np.testing.assert_array_equal(picture.compose(view).pixels, mixed)
    assert set(picture.missing) == {(2, 3), (3, 2), (3, 3)}
    fetch(slide, picture, 2, [(0, 1)])
    np.testing.assert_array_equal(picture.compose(view).pixels, mixed)


@pytest.mark.parametrize("budget", [0, 1 << 20])
@pytest.mark.parametrize("channel", [None, 1])
def test_all_tiles_landed_show_the_levels_own_pixels(slide, channel, budget):
    picture = picture_of(slide, channel, budget)
    view = View(0, Rect.between(3, 301, 7, 403))
    picture.compose(view)
    fetch(slide, picture, 0, list(picture.missing))
    assert not picture.missing
    np.testing.assert_array_equal(picture.compose(view).pixels, own_pixels(slide, view, channel))


views = st.tuples(
    st.integers(0, 2), *[st.floats(0, 1) for _ in range(4)], st.floats(0, 1), st.randoms()
)


@settings(max_examples=60, deadline=None)
@given(st.lists(views, min_size=1, max_size=8))
def test_whatever_the_walk_tiles_that_are_not_missing_are_exact(slide, walk):
    picture = picture_of(slide, budget=40 * TILE * TILE * 3)
    for level, a, b, c, d, share, random in walk:
        image = slide.layout.levels[level]
        top, bottom = sorted((int(a * image.height), int(b * image.height)))
        left, right = sorted((int(c * image.width), int(d * image.width)))
        bottom, right = max(bottom, top + 1), max(right, left + 1)
        if bottom > image.height or right > image.width:
            continue
        view = View(level, Rect.between(top, bottom, left, right))
        for _ in range(2):
            pixels = shown(slide, picture, view)
            exact = own_pixels(slide, view)
            assert pixels.shape == exact.shape
            if picture.compose(view).view != view:
                assert len(picture.missing) > 0.5 * len(list(touched(image, view.rect).cells()))
                continue
            for row, column in touched(image, view.rect).cells():
                if (row, column) not in picture.missing:
                    part = np.s_[
                        max(0, row * TILE - view.rect.top) : (row + 1) * TILE - view.rect.top,
                        max(0, column * TILE - view.rect.left) : (column + 1) * TILE
                        - view.rect.left,
                    ]
                    np.testing.assert_array_equal(pixels[part], exact[part])
            some = [tile for tile in picture.missing if random.random() < share]
            fetch(slide, picture, level, some)
        fetch(slide, picture, level, picture.missing)
        np.testing.assert_array_equal(picture.compose(view).pixels, own_pixels(slide, view))


def test_moving_keeps_what_was_shown_exactly_though_the_cache_is_too_small(slide):
    picture = picture_of(slide, budget=0)
    first, second = View(0, Rect.between(0, 100, 0, 100)), View(0, Rect.between(20, 120, 10, 110))
    picture.compose(first)
    fetch(slide, picture, 0, list(picture.missing))
    picture.compose(first)
    pixels = picture.compose(second).pixels
    np.testing.assert_array_equal(
        pixels[:80, :90], own_pixels(slide, View(0, Rect.between(20, 100, 10, 100)))
    )


def test_a_picture_handed_out_is_not_changed_by_the_next_view(slide):
    picture = picture_of(slide)
    first = picture.compose(View(0, Rect.between(0, 100, 0, 100))).pixels
    before = first.copy()
    for shift in range(1, 6):
        picture.compose(View(0, Rect.between(shift, 100 + shift, 0, 100)))
    np.testing.assert_array_equal(first, before)


def test_tiles_that_the_file_lacks_are_not_missing(tmp_path):
    pixels = slides.picture(128, 192)
    pages = [
        tiffbytes.page(pixels, bytes, tile=(32, 32), missing={1 * 6 + 1}),
        tiffbytes.page(np.ascontiguousarray(pixels[::2, ::2]), bytes, tile=(32, 32)),
    ]
    with open_slide(tiffbytes.write(tmp_path / "sparse.tif", pages)) as sparse:
        picture = picture_of(sparse)
        view = View(0, Rect.between(32, 64, 32, 96))
        pixels = picture.compose(view).pixels
        np.testing.assert_array_equal(pixels[:, :32], own_pixels(sparse, view)[:, :32])
        assert set(picture.missing) == {(1, 2)}


def test_tiles_that_the_file_lacks_have_each_channels_own_background(tmp_path):
    page = tiffbytes.page(slides.picture(64, 64), bytes, tile=(32, 32), missing={3})
    small = tiffbytes.page(slides.picture(32, 32), bytes, tile=(32, 32))
    with open_slide(tiffbytes.write(tmp_path / "sparse.tif", [page, small])) as sparse:
        tiles = AvailableTiles(
            sparse.displayed.slide, dict(enumerate(sparse.layout.levels)),
            sparse.levels[1][..., 1], np.array([1, 2, 3], np.uint8), 1, TileCache(0),
        )  # fmt: skip
        picture = Picture(tiles, PictureMemory())
        pixels = picture.compose(View(0, Rect.between(0, 64, 0, 64))).pixels
        assert (pixels[32:, 32:] == 2).all()


def test_tiles_of_other_slides_colours_and_far_levels_do_not_land(slide):
    picture = picture_of(slide)
    assert not picture.add({picture.tiles.key_of(0, 0, 0): np.zeros((32, 32, 3), np.uint8)})
    picture.compose(View(2, Rect.between(0, 32, 0, 32)))
    tile = np.zeros((32, 32, 3), np.uint8)
    key = picture.tiles.key_of(2, 0, 0)
    assert not picture.add({key._replace(color="srgb"): tile})
    assert not picture.add({key._replace(slide=key.slide + 1): tile})
    assert not picture.add({picture.tiles.key_of(0, 0, 0): tile})
    assert not picture.add({picture.tiles.key_of(2, 2, 2): tile})
    assert picture.add({key: tile})


def test_what_lands_in_time_is_waited_for(slide):
    picture = picture_of(slide)
    view = View(0, Rect.between(40, 200, 40, 200))
    threads = []

    def fetch_soon():
        tiles = list(picture.missing)
        halves = tiles[::2], tiles[1::2]
        threads.extend(
            threading.Timer(0.05 * turn, fetch, (slide, picture, 0, half))
            for turn, half in enumerate(halves)
        )
        for thread in threads:
            thread.start()
        return time.perf_counter() + 20

    begin = time.perf_counter()
    pixels = picture.compose(view, fetch_soon).pixels
    assert time.perf_counter() - begin < 10
    np.testing.assert_array_equal(pixels, own_pixels(slide, view))
    for thread in threads:
        thread.join()


def test_what_does_not_land_in_time_is_not_waited_for(slide):
    picture = picture_of(slide)
    view = View(0, Rect.between(40, 200, 40, 200))
    begin = time.perf_counter()
    assert picture.compose(view, lambda: begin + 0.05).view.level > 0
    assert 0.05 <= time.perf_counter() - begin < 5
    assert picture.compose(view, lambda: begin).view.level > 0


def test_tiles_land_while_the_view_moves_on(slide):
    """Whatever thread draws, and whenever: what is not missing is exact."""
    picture = picture_of(slide, budget=0)
    stop = threading.Event()

    def keep_landing():
        while not stop.is_set():
            fetch(slide, picture, 0, list(picture.missing)[:3])

    thread = threading.Thread(target=keep_landing)
    thread.start()
    try:
        for step in range(60):
            view = View(0, Rect(step * 2, step * 3, 150, 200))
            for _ in range(3):
                found, pixels, _ = picture.compose(view)
                exact = own_pixels(slide, view)
                if found != view:
                    continue
                missing = set(picture.missing)
                for row, column in touched(slide.layout.levels[0], view.rect).cells():
                    part = np.s_[
                        max(0, row * TILE - view.rect.top) : (row + 1) * TILE - view.rect.top,
                        max(0, column * TILE - view.rect.left) : (column + 1) * TILE
                        - view.rect.left,
                    ]
                    if (row, column) not in missing:
                        np.testing.assert_array_equal(pixels[part], exact[part])
    finally:
        stop.set()
        thread.join()
