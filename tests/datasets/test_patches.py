"""`Patches`: grids, areas and lists of locations."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from napari_wsigpu import Annotation, open_slide, write_geojson
from napari_wsigpu.annotations.masks import rings_mask
from napari_wsigpu.datasets import Patches
from napari_wsigpu.model.errors import LevelError, PlaneError, RegionError, SlideNotFoundError
from napari_wsigpu.model.geometry import Rect


@pytest.mark.parametrize(
    "options", [{}, {"level": 1}, {"mpp": 0.7}, {"mpp": 0.998, "overlap": 5}, {"overlap": 16}]
)
def test_grids_are_those_of_tiles(two_slides, options):
    patches = Patches.grid(two_slides, (48, 32), **options)
    for number, path in enumerate(two_slides):
        with open_slide(path) as slide:
            tiles = [
                corner for _, corners in slide.tiles((48, 32), **options) for corner in corners
            ]
        found = patches.locations[patches.slides == number]
        assert sorted(map(tuple, found.tolist())) == sorted(tiles)


@pytest.mark.parametrize("chosen", [0, [5], "a"])
def test_patches_are_selected_as_a_table(two_slides, chosen):
    patches = Patches.at({two_slides[0]: [(0, 0), (30, 50)]}, 24)
    assert len(patches[1:]) == len(patches[[True, False]]) == len(patches[[1]]) == 1
    with pytest.raises(RegionError, match="selects none of the 2 patches"):
        patches[chosen]


def test_one_slide_needs_no_list(two_slides):
    for path in (two_slides[0], str(two_slides[0])):
        np.testing.assert_array_equal(
            Patches.grid(path, 32).locations, Patches.grid([path], 32).locations
        )


def test_areas_are_found_by_any_path_of_their_slide(two_slides):
    nothing = np.zeros((3, 3), np.bool_)
    assert len(Patches.grid(two_slides[:1], 50, inside={Path(two_slides[0]): nothing})) == 0
    with pytest.raises(RegionError, match=r"other.svs', which is not one of the slides"):
        Patches.grid(two_slides, 50, inside={"other.svs": nothing})


def test_listed_locations(two_slides):
    patches = Patches.at({two_slides[0]: [(5, 6), (7, 8)], two_slides[1]: [(-9, 1)]}, 32, mpp=1.0)
    assert (len(patches), patches.paths, patches.size) == (3, tuple(two_slides), (32, 32))
    assert patches.slides.tolist() == [0, 0, 1]
    chosen = patches[[2, 0]]
    assert chosen.locations.tolist() == [[-9, 1], [5, 6]]
    copy = pickle.loads(pickle.dumps(chosen))
    np.testing.assert_array_equal(copy.locations, chosen.locations)
    assert "2 of 32 x 32 at 1 µm per pixel from 2 slides" in repr(chosen)
    assert len(Patches.at({two_slides[0]: []}, 32)) == 0


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_inside_outlines(two_slides, tmp_path, share):
    ring = np.array([(37.0, 21), (310, 60), (260, 280), (90, 200)])
    path = tmp_path / "areas.geojson"
    write_geojson(path, [Annotation("polygon", (ring,)), Annotation("points", (ring,))])
    patches = Patches.grid(two_slides, 32, overlap=8, inside={two_slides[0]: path}, share=share)
    everything = Patches.grid(two_slides, 32, overlap=8)
    # A slide without an area is used completely.
    assert np.sum(patches.slides == 1) == np.sum(everything.slides == 1)
    whole = rings_mask([ring], Rect(0, 0, 300, 400))
    found = {tuple(each) for each in patches.locations[patches.slides == 0].tolist()}
    for x, y in everything.locations[everything.slides == 0].tolist():
        part = whole[y : y + 32, x : x + 32].mean()
        # The mask is coarser than the outline.
        if abs(part - share) > 0.1:
            assert ((x, y) in found) == (part > share), (x, y, part)


def test_inside_masks(two_slides):
    mask = np.zeros((3, 4), np.uint8)
    mask[1, 2] = 7  # 100 x 100 pixels of the first slide
    patches = Patches.grid(two_slides[:1], 50, inside={two_slides[0]: mask}, share=1)
    assert patches.locations.tolist() == [[200, 100], [250, 100], [200, 150], [250, 150]]
    again = Patches.grid(two_slides[:1], 50, inside=lambda slide: mask > 0, share=1)
    np.testing.assert_array_equal(again.locations, patches.locations)


def test_invalid_arguments(two_slides, tmp_path):
    with pytest.raises(RegionError, match="not pairs"):
        Patches.at({two_slides[0]: [(1.5, 2)]}, 32)
    for locations in ([two_slides[0]], {two_slides[0]: 5}, {two_slides[0]: [(1, 2), 3]}):
        with pytest.raises(RegionError, match="not a mapping of paths to pairs"):
            Patches.at(locations, 32)
    with pytest.raises(RegionError, match=r"mask of .* the shape"):
        Patches.grid(two_slides, 32, inside=lambda slide: np.zeros((3, 3, 3)))
    with pytest.raises(LevelError):
        Patches.grid(two_slides, 32, level=9)
    with pytest.raises(SlideNotFoundError):
        Patches.grid([tmp_path / "none.svs"], 32)


@pytest.mark.parametrize("size", [0, -3, 2.5, None, "48", (48,), (48, 0), (1, 2, 3), (8.0, 8)])
def test_invalid_sizes(two_slides, size):
    with pytest.raises(RegionError):
        Patches.at({two_slides[0]: [(0, 0)]}, size)
    with pytest.raises(RegionError):
        Patches.grid(two_slides, size)


@pytest.mark.parametrize("size", [[48, 32], np.array([48, 32]), (np.int64(48), 32)])
def test_valid_sizes(two_slides, size):
    assert Patches.at({two_slides[0]: [(0, 0)]}, size).size == (48, 32)


def test_planes(two_stacks):
    paths, pixels = two_stacks
    one = Patches.grid(paths, 48)
    assert (one.planes == -1).all()
    found = Patches.grid(paths, 48, z="all", t=[1])
    corners = {tuple(corner) for corner in one.locations.tolist()}
    for number, stack in enumerate(pixels):
        mine = found[found.slides == number]
        assert {tuple(plane) for plane in mine.planes.tolist()} == {
            (z, 1) for z in range(stack.shape[1])
        }
        for plane in np.unique(mine.planes, axis=0):
            held = mine.locations[(mine.planes == plane).all(axis=1)]
            assert sorted(map(tuple, held.tolist())) == sorted(corners)
    listed = Patches.at({paths[0]: [(1, 2), (3, 4)]}, 8, z=(4, 0), t=1)
    assert listed.planes.tolist() == [[4, 1], [4, 1], [0, 1], [0, 1]]
    assert listed[1:3].locations.tolist() == [[3, 4], [1, 2]]
    with pytest.raises(PlaneError, match=r"three\.ome\.tif' has no plane z = 4"):
        Patches.grid(paths, 48, z=4)
    for wrong in (-1, 1.5, [], "all"):
        with pytest.raises(RegionError, match=r"z is .* whole numbers >= 0"):
            Patches.at({paths[0]: [(1, 2)]}, 8, z=wrong)
