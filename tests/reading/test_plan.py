"""A plan, carried out, is slicing; of mosaics, painting one picture after another."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu.model.geometry import Rect, Span
from napari_wsigpu.model.layout import AxisMapping, Encoding, LevelLayout, Part, TileGrid
from napari_wsigpu.reading.plan import ReadOptions, Regions
from napari_wsigpu.reading.planning import plan_regions

GRAY = Encoding(1, 1, 1, 1, "<", "uint8", 1)
BACKGROUND, BEYOND, UNTOUCHED = -1, -2, -3


def level_of(height, width, tile=(16, 16), absent=(), missing="background"):
    """Describe a level whose tiles of these numbers are missing, and what these show."""
    rows, columns = -(-height // tile[0]), -(-width // tile[1])
    counts = np.ones((1, rows, columns), np.int64)
    counts.ravel()[list(absent)] = 0
    grid = TileGrid(*tile, np.zeros_like(counts), counts)
    return LevelLayout(width, height, 1, GRAY, grid, missing=missing)


def picture(image, seed=0):
    """Number the pixels of an image; those of missing tiles show the background."""
    pixels = 10_000 * seed + np.arange(image.height * image.width).reshape(image.height, -1)
    if image.missing == "background" and not image.parts:
        for row, column in np.argwhere(image.grid.byte_counts[0] == 0).tolist():
            top, left, height, width = image.tile_rect(row, column)
            pixels[top : top + height, left : left + width] = BACKGROUND
    return pixels


def tile_of(image, pixels, row, column):
    """A tile as it is decoded; what lies beyond the level is not to be shown."""
    grid = image.grid
    top, left, height, width = image.tile_rect(row, column)
    tile = np.full((grid.tile_height, grid.tile_width), BEYOND)
    tile[:height, :width] = pixels[top : top + height, left : left + width]
    return tile


def carried_out(plans, images, pictures, regions):
    """Do what plans say, and return the regions and how often each pixel was pasted."""
    found = [np.full(shape, UNTOUCHED) for shape in regions.shapes]
    times = [np.zeros(shape, int) for shape in regions.shapes]
    covered = np.any([plan.covered for plan in plans], axis=0) if plans else [False] * len(regions)
    for region, is_covered in zip(found, covered, strict=True):
        if not is_covered:
            region[...] = BACKGROUND
    down, across = regions.step
    for plan in plans:
        assert plan.regions is regions
        for part in parts(plan.blanks):
            found[part.region][part.place] = BACKGROUND
            times[part.region][part.place] += 1
        for number, tile in enumerate(plan.tiles.tolist()):
            pixels = tile_of(images[plan.image], pictures[plan.image], *tile)
            for part in parts(plan.pastes[plan.starts[number] : plan.starts[number + 1]]):
                assert part.tile == number
                source = pixels[part.top :: down, part.left :: across]
                source = source[: part.height, : part.width]
                assert source.shape == (part.height, part.width)
                found[part.region][part.place] = source
                times[part.region][part.place] += 1
        assert plan.starts[-1] == len(plan.pastes)
    return found, times


class PlacedPart:
    def __init__(self, values):
        self.tile, self.region, self.y, self.x, self.top, self.left = values[:6]
        self.height, self.width = values[6:]
        assert self.height > 0
        assert self.width > 0
        assert min(values) >= 0
        self.place = slice(self.y, self.y + self.height), slice(self.x, self.x + self.width)


def parts(pastes):
    names = ("tile", "region", "y", "x", "top", "left", "height", "width")
    columns = [getattr(pastes, name).tolist() for name in names]
    return [PlacedPart(values) for values in zip(*columns, strict=True)]


def sliced(pixels, regions):
    """Slice and pad an array, position by position."""
    found = []
    places = zip(regions.tops.tolist(), regions.lefts.tolist(), regions.shapes, strict=True)
    for top, left, (height, width) in places:
        region = np.full((height, width), BACKGROUND)
        for y in range(height):
            for x in range(width):
                row, column = top + y * regions.step[0], left + x * regions.step[1]
                if 0 <= row < pixels.shape[0] and 0 <= column < pixels.shape[1]:
                    region[y, x] = pixels[row, column]
        found.append(region)
    return found


PLACES = st.integers(-25, 60)
LENGTHS = st.one_of(st.just(0), st.integers(0, 30))
RECTS = st.builds(Rect, PLACES, PLACES, LENGTHS, LENGTHS)
FAR = st.sampled_from([Rect(2**40, 3, 5, 4), Rect(3, -(2**40), 4, 5)])


@st.composite
def some_regions(draw, *, whole=False):
    """Any regions, and one larger than all images."""
    rects = draw(st.lists(st.one_of(RECTS, RECTS, RECTS, FAR), min_size=1, max_size=6))
    rects += [Rect(-1, -1, 60, 60)] * whole
    step = draw(st.one_of(st.just((1, 1)), st.tuples(st.integers(1, 25), st.integers(1, 25))))
    return replace(Regions.of(rects), step=step)


@st.composite
def levels(draw, missing=("background", "finer")):
    height, width = draw(st.tuples(st.integers(1, 45), st.integers(1, 45)))
    tile = draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    tiles = -(-height // tile[0]) * -(-width // tile[1])
    absent = draw(st.one_of(st.just([]), st.lists(st.integers(0, tiles - 1), max_size=9)))
    return level_of(height, width, tile, absent, draw(st.sampled_from(missing)))


def same(found, expected):
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_array_equal(one, other, f"region {index}")


class TestOneImage:
    @given(image=levels(), regions=some_regions())
    def test_it_is_slicing_and_padding(self, image, regions):
        pixels = picture(image)
        (plan,) = plan_regions(0, {0: image}, regions)
        found, times = carried_out([plan], {0: image}, {0: pixels}, regions)
        same(found, sliced(pixels, regions))
        inside = sliced(np.ones_like(pixels), regions)
        same(times, [np.maximum(region, 0) for region in inside])
        assert plan.covered.tolist() == [bool((region == 1).all()) for region in inside]

    @given(image=levels(), regions=some_regions())
    def test_each_tile_that_is_needed_once_and_row_by_row(self, image, regions):
        (plan,) = plan_regions(7, {7: image}, regions)
        assert plan.image == 7
        owner = np.repeat(np.arange(image.grid.rows), image.grid.tile_height)[: image.height, None]
        owner = owner * image.grid.columns + np.repeat(
            np.arange(image.grid.columns), image.grid.tile_width
        )
        shown = sliced(owner[:, : image.width], regions)
        needed = sorted({*np.concatenate([region.ravel() for region in shown]).tolist()} - {-1})
        stored = image.grid.byte_counts[0].ravel() > 0
        if image.missing == "background":
            needed = [number for number in needed if stored[number]]
        numbers = (plan.tiles[:, 0] * image.grid.columns + plan.tiles[:, 1]).tolist()
        assert numbers == needed
        assert plan.computed.tolist() == [not stored[number] for number in numbers]
        for index, number in enumerate(numbers):
            expected = [i for i, region in enumerate(shown) if (region == number).any()]
            assert plan.regions_of(index) == expected

    @given(image=levels(), regions=some_regions())
    def test_what_only_one_region_needs_it_alone_would_need(self, image, regions):
        """One region is planned by a way of its own, which is shorter."""
        (plan,) = plan_regions(0, {0: image}, regions)
        for index in range(len(regions)):
            chosen = slice(index, index + 1)
            alone = Regions(
                regions.tops[chosen],
                regions.lefts[chosen],
                regions.heights[chosen],
                regions.widths[chosen],
                regions.step,
            )
            (single,) = plan_regions(0, {0: image}, alone)
            mine = [t for t in range(len(plan.tiles)) if index in plan.regions_of(t)]
            np.testing.assert_array_equal(single.tiles, plan.tiles[mine])
            assert len(single.pastes) == (plan.pastes.region == index).sum()
            assert len(single.blanks) == (plan.blanks.region == index).sum()

    @given(image=levels(), data=st.data())
    def test_whole_tiles(self, image, data):
        places = st.tuples(
            st.integers(0, image.grid.rows - 1), st.integers(0, image.grid.columns - 1)
        )
        tiles = data.draw(st.lists(places, min_size=1, max_size=5))
        pixels = picture(image)
        regions = Regions.of(image.tile_rect(*tile) for tile in tiles)
        (plan,) = plan_regions(0, {0: image}, regions)
        found, _ = carried_out([plan], {0: image}, {0: pixels}, plan.regions)
        for region, tile in zip(found, tiles, strict=True):
            top, left, height, width = image.tile_rect(*tile)
            np.testing.assert_array_equal(region, pixels[top : top + height, left : left + width])
        assert plan.covered.all()
        assert len(plan.pastes) + len(plan.blanks) == len(tiles)

    @given(image=levels(), regions=some_regions(whole=True))
    def test_which_tiles_no_region_takes_whole(self, image, regions):
        (plan,) = plan_regions(0, {0: image}, regions)
        numbers = np.arange(image.height * image.width).reshape(image.height, -1)
        shown = [{*region.ravel().tolist()} for region in sliced(numbers, regions)]
        expected = []
        for tile in plan.tiles.tolist():
            top, left, height, width = image.tile_rect(*tile)
            mine = {*numbers[top : top + height, left : left + width].ravel().tolist()}
            expected.append(not any(mine <= region for region in shown))
        kept = ReadOptions(keep="partly").kept(plan, image, np.arange(len(plan.tiles)))
        assert kept.tolist() == expected


@st.composite
def pieces(draw, length):
    """Lay an axis of so many pixels down in some pieces, which may leave pixels of it out."""
    count = draw(st.integers(1, min(4, length)))
    cuts = sorted(draw(st.sets(st.integers(1, length), min_size=count, max_size=count)))
    start = draw(st.integers(-length, 20))
    starts, sources, begin = [], [], 0
    for cut in cuts:
        skipped = draw(st.integers(0, cut - begin - 1))
        starts.append(start)
        sources.append(begin + skipped)
        start, begin = start + cut - begin - skipped, cut
    return AxisMapping(np.array(starts, np.int64), np.array(sources, np.int64), start)


@st.composite
def mosaics(draw):
    """A mosaic and the numbers of its pictures, some of which lie there more than once."""
    pictures = draw(st.lists(levels(missing=("background",)), min_size=2, max_size=3))
    chosen = [*pictures, *draw(st.lists(st.sampled_from(pictures), max_size=2))]
    laid = [Part(image, draw(pieces(image.height)), draw(pieces(image.width))) for image in chosen]
    mosaic = LevelLayout.mosaic(draw(st.integers(9, 50)), draw(st.integers(9, 50)), laid)
    return {0: mosaic, **dict(enumerate(pictures, 1))}


def source_of(pieces, position):
    """The pixel of a picture's axis that lies at a position, or None."""
    if position >= pieces.end:
        return None
    found = None
    for start, source in zip(pieces.starts.tolist(), pieces.sources.tolist(), strict=True):
        if start <= position:
            found = source + position - start
    return found


def painted(mosaic, pixels_of):
    """Paint a mosaic pixel by pixel, from the picture that lies lowest to that on top."""
    pixels = np.full((mosaic.height, mosaic.width), BACKGROUND)
    for part in reversed(mosaic.parts):
        for y in range(mosaic.height):
            for x in range(mosaic.width):
                row, column = source_of(part.rows, y), source_of(part.columns, x)
                if row is not None and column is not None:
                    pixels[y, x] = pixels_of[part.image][row, column]
    return pixels


class TestMosaics:
    @given(images=mosaics(), regions=some_regions(whole=True))
    def test_regions_of_a_mosaic_are_those_of_the_painting(self, images, regions):
        pictures = {number: picture(image, number) for number, image in images.items() if number}
        plans = plan_regions(0, images, regions)
        found, _ = carried_out(plans, images, pictures, regions)
        pixels = painted(images[0], {images[number]: pictures[number] for number in pictures})
        same(found, sliced(pixels, regions))

    @given(images=mosaics(), regions=some_regions())
    def test_no_plan_is_for_nothing(self, images, regions):
        for plan in plan_regions(0, images, regions):
            assert len(plan.pastes) + len(plan.blanks) > 0
            tiles = [*map(tuple, plan.tiles.tolist())]
            assert tiles == sorted(set(tiles))

    def test_a_thinned_out_read_takes_no_more_parts_than_pixels(self):
        image = level_of(9000, 9000, (16, 16))
        starts = np.arange(0, 9000, 3)
        many = AxisMapping(starts, starts, 9000)
        images = {0: LevelLayout.mosaic(9000, 9000, [Part(image, many, many)]), 1: image}
        (plan,) = plan_regions(0, images, Regions.slice(Span(5, 1000, 9), Span(0, 900, 10)))
        assert len(plan.pastes) == 90


class TestRegions:
    def test_where_pixels_of_all_lie_one_after_another(self):
        regions = Regions.of([Rect(0, 0, 3, 4), Rect(9, 9, 0, 7), Rect(-2, 5, 1, 2)])
        assert len(regions) == 3
        assert regions.shapes == [(3, 4), (0, 7), (1, 2)]
        assert regions.offsets.tolist() == [0, 12, 12, 14]

    def test_of_one_size(self):
        regions = Regions.alike(np.array([1, 2]), np.array([3, 4]), 5, 6)
        assert regions.shapes == [(5, 6)] * 2
        assert regions.step == (1, 1)

    def test_of_a_slice(self):
        regions = Regions.slice(Span(3, 2, 10), Span(4, 5, 20))
        assert (regions.tops.tolist(), regions.lefts.tolist()) == ([3], [4])
        assert (regions.shapes, regions.step) == ([(10, 20)], (2, 5))


@pytest.mark.parametrize(
    ("rects", "missing", "expected"),
    [
        (
            [Rect(0, 0, 20, 20)],
            "background",
            "<ReadPlan image 3: 1 regions of 20 x 20, 3 tiles (0 computed), 3 pastes, 1 blank>",
        ),
        (
            [Rect(0, 0, 20, 20), Rect(0, 0, 1, 2)],
            "finer",
            "<ReadPlan image 3: 2 regions of several sizes, "
            "4 tiles (1 computed), 5 pastes, 0 blank>",
        ),
    ],
)
def test_a_plan_can_be_printed(rects, missing, expected):
    image = level_of(50, 50, absent=[0], missing=missing)
    (plan,) = plan_regions(3, {3: image}, Regions.of(rects))
    assert repr(plan) == expected
