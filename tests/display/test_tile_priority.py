import numpy as np
import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.display.available_tiles import AvailableTiles
from napari_wsigpu.display.blocks import touched
from napari_wsigpu.display.drawing import View
from napari_wsigpu.display.picture import Picture
from napari_wsigpu.display.tile_priority import next_likely, on_screen
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading.cache import TileCache
from napari_wsigpu.storage.buffers import PictureMemory
from tests.writers import slides

TILE = 16


@pytest.fixture(scope="module")
def slide(tmp_path_factory):
    """Levels of 512 x 640, 256 x 320, 128 x 160, 64 x 80 and 32 x 40 pixels in tiles of 16."""
    path = tmp_path_factory.mktemp("wanted") / "slide.tif"
    slides.write_pyramid(path, slides.picture(512, 640), (2, 2, 2, 2), tile=(TILE, TILE))
    with open_slide(path) as opened:
        yield opened


@pytest.fixture
def picture(slide):
    levels = dict(enumerate(slide.layout.levels))
    overview = slide.levels[-1][...]
    cache = TileCache(1 << 20)
    number = slide.displayed.slide
    return Picture(AvailableTiles(number, levels, overview, 0, None, cache), PictureMemory())


def have(picture, level, tiles):
    for row, column in tiles:
        key = picture.tiles.key_of(level, row, column)
        picture.tiles._cache.put(key, np.zeros((TILE, TILE, 3), np.uint8))


def test_nothing_is_wanted_before_there_is_a_view(picture):
    assert on_screen(picture) == []
    assert next_likely(picture, (0, 0), 1 << 20, at_rest=True) == []


def test_a_coarse_preview_comes_first_then_the_view_from_its_centre(picture):
    view = View(0, Rect.between(128, 256, 160, 320))
    picture.compose(view)
    wanted = on_screen(picture)
    preview = [key for key in wanted if key.image == 2]
    assert wanted[: len(preview)] == preview
    assert {(key.row, key.column) for key in preview} == {
        (row, column) for row in (2, 3) for column in (2, 3, 4)
    }
    own = wanted[len(preview) :]
    assert {(key.row, key.column) for key in own} == set(
        touched(picture.levels[0], view.rect).cells()
    )
    assert {key.image for key in own} == {0}
    distances = [np.hypot(key.row - 11.5, key.column - 14.5) for key in own]
    assert distances == sorted(distances)


def test_what_is_at_hand_is_not_wanted(picture):
    view = View(0, Rect.between(128, 256, 160, 320))
    have(picture, 2, [(2, 2), (2, 3)])
    have(picture, 0, [(row, column) for row in range(8, 12) for column in range(10, 20)])
    picture.compose(view)
    wanted = {(key.image, key.row, key.column) for key in on_screen(picture)}
    assert wanted == {(2, 3, column) for column in (2, 3, 4)} | {
        (0, row, column) for row in range(12, 16) for column in range(10, 20)
    }


def test_a_preview_that_can_not_be_kept_is_wanted_once_a_view(picture):
    """Else the view's own tiles, which come after it, might never have their turn."""
    view = View(0, Rect.between(128, 256, 160, 320))
    picture.compose(view)
    preview = {key for key in on_screen(picture) if key.image == 2}
    tile = np.zeros((TILE, TILE, 3), np.uint8)
    for key in preview:
        picture.add({key: tile})
        picture.compose(view)
    assert {key.image for key in on_screen(picture)} == {0}
    picture.compose(View(0, Rect.between(128, 256, 160, 321)))
    assert {key for key in on_screen(picture) if key.image == 2} >= preview


def test_no_preview_where_few_tiles_are_lacking(picture):
    view = View(0, Rect.between(128, 256, 160, 320))
    inside = set(touched(picture.levels[0], view.rect).cells())
    have(picture, 0, inside - {(8, 10), (15, 19)})
    picture.compose(view)
    found = {(key.image, key.row, key.column) for key in on_screen(picture)}
    assert found == {(0, 8, 10), (0, 15, 19)}


def test_no_preview_where_the_overview_is_as_good(picture):
    picture.compose(View(2, Rect.between(0, 64, 0, 64)))
    assert {key.image for key in on_screen(picture)} == {2}


@pytest.mark.parametrize(
    ("motion", "rows", "columns"),
    [
        ((0, 0), range(7, 17), range(9, 21)),
        ((5, 0), range(8, 17), range(10, 20)),
        ((-1, 3), range(7, 16), range(10, 21)),
        ((0, -9), range(8, 16), range(9, 20)),
    ],
)
def test_the_ring_lies_where_the_view_moves_to(picture, motion, rows, columns):
    view = View(0, Rect.between(128, 256, 160, 320))
    picture.compose(view)
    found = next_likely(picture, motion, 1 << 30, at_rest=True)
    ring = {(key.row, key.column) for key in found if key.image == 0}
    inside = set(touched(picture.levels[0], view.rect).cells())
    assert ring == {(row, column) for row in rows for column in columns} - inside


@pytest.mark.parametrize("motion", [(0, 0), (-1, 3)])
def test_a_view_that_moves_wants_only_what_lies_ahead(picture, motion):
    picture.compose(View(1, Rect.between(64, 128, 80, 160)))
    found = next_likely(picture, motion, 1 << 30, at_rest=False)
    at_rest = next_likely(picture, motion, 1 << 30, at_rest=True)
    ring = [key for key in at_rest if key.image == 1]
    assert found == (ring if any(motion) else [])
    assert len(at_rest) > len(ring) > 0


def test_the_next_coarser_and_finer_levels_follow(picture):
    picture.compose(View(1, Rect.between(64, 128, 80, 160)))
    found = next_likely(picture, (0, 0), 1 << 30, at_rest=True)
    levels = [key.image for key in found]
    assert levels == sorted(levels, key=[1, 2, 0].index)
    centre = {level: next(key for key in found if key.image == level) for level in (2, 0)}
    assert (centre[2].row, centre[2].column) in {(r, c) for r in (2, 3) for c in (3, 4)}
    assert (centre[0].row, centre[0].column) in {(r, c) for r in (11, 12) for c in (14, 15)}
    finer = {(key.row, key.column) for key in found if key.image == 0}
    assert finer == {(row, column) for row in range(10, 14) for column in range(12, 18)}


def test_prefetch_stays_within_its_budget_and_the_slide(picture):
    picture.compose(View(0, Rect.between(0, 64, 0, 64)))
    found = next_likely(picture, (0, 0), 5 * TILE * TILE * 3, at_rest=True)
    assert len(found) == 5
    for key in next_likely(picture, (0, 0), 1 << 30, at_rest=True):
        image = picture.levels[key.image]
        assert 0 <= key.row < image.grid.rows
        assert 0 <= key.column < image.grid.columns
