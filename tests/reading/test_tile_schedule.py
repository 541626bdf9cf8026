"""Which tiles are worth keeping for regions that are read later."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu import open_slide
from napari_wsigpu.reading import tile_schedule as module
from napari_wsigpu.reading.plan import Regions
from napari_wsigpu.reading.tile_schedule import TileSchedule
from tests.test_vendors import write_ventana
from tests.writers import slides

SIZE = 96
SIDE = 64  # of a stored tile


@pytest.fixture(scope="module")
def slide(tmp_path_factory):
    path = tmp_path_factory.mktemp("uses") / "slide.svs"
    slides.write_aperio(path, slides.picture(600, 800), tile=(SIDE, SIDE))
    with open_slide(path, device="cpu") as slide:
        yield slide


def tiles_of(slide, corner):
    """Return the tiles, (row, column), that a region at (top, left) shows."""
    grid = slide.layout.levels[0].grid
    spans = (range(begin // SIDE, (begin + SIZE - 1) // SIDE + 1) for begin in corner)
    return {
        (row, column)
        for rows, columns in [spans]
        for row in rows
        for column in columns
        if 0 <= row < grid.rows and 0 <= column < grid.columns
    }


corners = st.lists(st.tuples(st.integers(-200, 700), st.integers(-200, 900)), max_size=30)


@given(corners, st.integers(0, 30), st.integers(0, 30))
def test_what_is_used_again_is_wanted(slide, corners, first, past):
    tops, lefts = np.array(corners, np.int64).reshape(-1, 2).T
    image = slide.layout.levels[0]
    uses = TileSchedule.of(image, Regions.alike(tops, lefts, SIZE, SIZE), 1 << 30)
    begin = min(first + past, len(corners))
    read = set().union(*(tiles_of(slide, corner) for corner in corners[:begin]))
    coming = set().union(*(tiles_of(slide, corner) for corner in corners[begin:]))
    tiles = np.array(sorted(read), np.int64).reshape(-1, 2)
    assert uses.after(first)(past, tiles).tolist() == [
        tuple(tile) in coming for tile in sorted(read)
    ]


@given(corners, st.integers(0, 40))
def test_what_is_kept_has_room(slide, corners, room):
    tops, lefts = np.array(corners, np.int64).reshape(-1, 2).T
    image = slide.layout.levels[0]
    uses = TileSchedule.of(image, Regions.alike(tops, lefts, SIZE, SIZE), room * image.tile_bytes)
    kept, most = set(), 0
    for place, corner in enumerate(corners):
        tiles = sorted(tiles_of(slide, corner))
        wanted = uses.after(place)(1, np.array(tiles, np.int64).reshape(-1, 2))
        kept = kept - set(tiles) | {
            tile for tile, stays in zip(tiles, wanted, strict=True) if stays
        }
        most += len(kept)
    assert most <= room * len(corners)


@pytest.mark.parametrize("options", [{}, {"mpp": 0.7}])
def test_each_tile_is_decoded_once(slide, options):
    """In order, though batches end in the middle of a row of regions."""
    locations = slide.tile_locations(48, **options).tolist()
    with open_slide(slide.path, device="cpu") as own:
        uses = own.tile_uses(locations, (48, 48), **options)
        found = [
            own.read_batch(
                locations[first : first + 5], (48, 48), wanted=uses.after(first), **options
            )
            for first in range(0, len(locations), 5)
        ]
        grid = own.layout.levels[0].grid
        assert own.stats()["decoded"]["cpu"] == grid.rows * grid.columns
        assert own.runtime.tiles.used == 0
    expected = slide.read_batch(locations, (48, 48), **options)
    np.testing.assert_array_equal(np.concatenate(found), expected)


def test_of_nothing_and_of_too_much_nothing_is_foretold(slide, monkeypatch):
    assert slide.tile_uses([], (48, 48)) is None
    monkeypatch.setattr(module, "MAX_ACCESSES", 49)
    assert slide.tile_uses([(0, 0)] * 50, (SIDE, SIDE)) is None


def test_of_tiles_that_lie_on_each_other_nothing_is_foretold(tmp_path):
    write_ventana(tmp_path / "slide.bif")
    with open_slide(tmp_path / "slide.bif", device="cpu") as overlapping:
        assert overlapping.tile_uses([(0, 0)], (48, 48)) is None
