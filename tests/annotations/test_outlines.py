"""Rings, outlines of label images, masks and measurements."""

import math
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import ellipe
from skimage.draw import polygon
from skimage.measure import points_in_poly

from napari_wsigpu import Annotation, label_image, measure
from napari_wsigpu.annotations import masks
from napari_wsigpu.annotations.masks import rings_mask
from napari_wsigpu.annotations.rings import (
    areas,
    ellipse,
    joined,
    mended,
    polygons,
    split,
    uncrossed,
)
from napari_wsigpu.annotations.tracing import outlines
from napari_wsigpu.model.errors import AnnotationError
from napari_wsigpu.model.geometry import Rect

small_labels = arrays(np.uint16, st.tuples(st.integers(1, 9), st.integers(1, 9)),
                      elements=st.integers(0, 3))  # fmt: skip


def filled(rings, shape):
    """Which pixels have their centre inside of an odd number of rings."""
    rows, columns = np.indices(shape)
    centres = np.stack([columns.ravel() + 0.5, rows.ravel() + 0.5], axis=1)
    inside = np.zeros(len(centres), int)
    for ring in rings:
        inside += points_in_poly(centres, ring)
    return (inside % 2 == 1).reshape(shape)


@given(labels=small_labels)
def test_outlines_hold_the_pixels_of_each_object(labels):
    found = outlines(labels)
    assert set(found) == set(np.unique(labels)) - {0}
    for label, rings in found.items():
        np.testing.assert_array_equal(filled(rings, labels.shape), labels == label)
        assert measure(Annotation("polygon", tuple(rings)), (1, 1)).area == (labels == label).sum()
        for outer, *holes in polygons(rings):
            inside = filled([outer], labels.shape)
            assert all((filled([hole], labels.shape) <= inside).all() for hole in holes)


@given(labels=small_labels)
def test_split_inverts_joined(labels):
    for rings in outlines(labels).values():
        again = split(joined(rings))
        np.testing.assert_array_equal(filled(again, labels.shape), filled(rings, labels.shape))
        lengths = [measure(Annotation("polygon", tuple(each)), (1, 1)) for each in (rings, again)]
        assert lengths[0] == lengths[1]


def test_rings_that_do_not_touch_come_back_as_they_were():
    square = np.array([(0, 0), (10, 0), (10, 10), (0, 10)], float)
    rings = [square * 3, square + 5, square + 100]
    for before, after in zip(rings, split(joined(rings)), strict=True):
        np.testing.assert_array_equal(after, before)
    assert split(square) == [square]
    [point] = split(np.ones((4, 2)))
    np.testing.assert_array_equal(point, np.ones((4, 2)))


def test_an_island_in_a_lake():
    labels = np.ones((9, 9), int)
    labels[2:7, 2:7] = 0
    labels[4, 4] = 1
    found = polygons(outlines(labels)[1])
    assert sorted(len(polygon) for polygon in found) == [1, 2]


def test_pixels_that_meet_at_a_corner_are_apart():
    assert len(outlines(np.eye(3, dtype=int))[1]) == 3


def test_no_objects():
    assert outlines(np.zeros((4, 4), int)) == {}


def test_changed_vertices_leave_rings_joined():
    square = np.array([(0, 0), (10, 0), (10, 10), (0, 10)], float)
    before = joined([10 * square, square[::-1] + 20, square + 60])
    count = len(before)

    def sizes(after):
        return sorted(map(len, split(mended(before, after))))

    for index in range(count):
        moved = before.copy()
        moved[index] += 0.5, -0.25
        assert sizes(moved) == [4, 4, 4]
        assert (mended(before, moved) == moved[index]).all(axis=1).any()
        assert sizes(np.delete(before, index, axis=0)) == [3, 4, 4]
        last, following = before[index], before[(index + 1) % count]
        inserted = np.insert(before, index + 1, (last + following) / 2, axis=0)
        on_path = {tuple(last), tuple(following)} <= {(0, 0), (20, 30), (60, 60)}
        assert sizes(inserted) == ([4, 4, 4] if on_path else [4, 4, 5])


@pytest.mark.parametrize("wrong", [np.zeros((2, 2, 2), int), np.zeros((2, 2))])
def test_invalid_label_images_are_refused(wrong):
    with pytest.raises(AnnotationError, match="not a label image"):
        outlines(wrong)


def test_measures_lines_and_areas_by_each_axis():
    line = Annotation("line", (np.array([(0, 0), (30, 0), (30, 40)], float),))
    assert measure(line, (0.5, 0.25))[:3] == (30 * 0.5 + 40 * 0.25, None, None)
    box = Annotation("polygon", (np.array([(5, 5), (25, 5), (25, 15), (5, 15)], float),))
    assert measure(box, (0.5, 0.25))[:3] == (None, 2 * (10 + 2.5), 25)
    assert measure(Annotation("points", (np.zeros((2, 2)),)), (1, 1))[:3] == (None, None, None)


def test_measures_holes():
    square = np.array([(0, 0), (1, 0), (1, 1), (0, 1)], float)
    ring = Annotation("polygon", (10 * square, 2 * square + 3))
    assert measure(ring, (2, 2))[:3] == (None, 80 + 16, 400 - 16)


@given(labels=small_labels)
def test_centroids_are_those_of_the_pixels(labels):
    for label, rings in outlines(labels).items():
        middle = np.argwhere(labels == label).mean(axis=0) + 0.5
        found = measure(Annotation("polygon", tuple(rings)), (2, 3)).center
        np.testing.assert_allclose(found, middle[::-1] * (2, 3))


@given(a=st.floats(1, 1e4), b=st.floats(1, 1e4))
def test_measures_ellipses(a, b):
    corners = np.array([(-a, -b), (a, -b), (a, b), (-a, b)])
    found = measure(Annotation("ellipse", (ellipse(corners, 128),)), (1, 1))
    assert found.area == pytest.approx(math.pi * a * b, rel=1e-9)
    assert found.perimeter == pytest.approx(
        4 * max(a, b) * ellipe(1 - min(a, b) ** 2 / max(a, b) ** 2), rel=1e-3
    )


@given(labels=small_labels)
def test_masks_hold_the_pixels_of_each_object(labels):
    for label, rings in outlines(labels).items():
        found = rings_mask(rings, Rect(0, 0, *labels.shape))
        np.testing.assert_array_equal(found, labels == label)


def on_an_edge(points, ring):
    """Return which points lie on an edge of a ring."""
    found = np.zeros(len(points), bool)
    for begin, end in zip(ring, np.roll(ring, -1, axis=0), strict=True):
        along, (x, y) = end - begin, (points - begin).T
        beside = np.abs(along[0] * y - along[1] * x) < 1e-9 * max(1.0, np.abs(along).max())
        part = x * along[0] + y * along[1]
        found |= beside & (part >= 0) & (part <= along @ along)
    return found


# No vertex is at a pixel's centre, where rasterisers disagree about the pixel.
coordinates = st.integers(-40, 240).map(lambda value: value + 0.26)


@example(corners=[(0.26, 0.26), (0.26, 1.26), (2.26, 2.26)], top=0, left=0, downsample=1.0)
@given(
    corners=st.lists(st.tuples(coordinates, coordinates), min_size=3, max_size=6),
    top=st.integers(0, 20),
    left=st.integers(0, 20),
    downsample=st.sampled_from([1.0, 2.0, 3.7]),
)
def test_masks_of_a_part_of_a_level(corners, top, left, downsample):
    ring = np.array(corners)
    rows, columns = np.indices((30, 40))
    centres = np.stack([columns.ravel() + left + 0.5, rows.ravel() + top + 0.5], axis=1)
    expected = points_in_poly(centres * downsample, ring).reshape(30, 40)
    found = rings_mask([ring], Rect(top, left, 30, 40), downsample)
    # Rasterisers disagree about pixels whose centre is on an edge.
    assert not (found != expected)[~on_an_edge(centres * downsample, ring).reshape(30, 40)].any()


triangle = st.lists(st.tuples(coordinates, coordinates), min_size=3, max_size=3)


@pytest.mark.parametrize("room", [1, 1 << 20])
@given(
    corners=st.lists(triangle, max_size=6),
    downsample=st.sampled_from([1.0, 2.0, 3.7]),
)
def test_label_images_are_what_scikit_image_draws(corners, downsample, room):
    rings = [np.array(each) for each in corners]
    kinds = ["polygon", "ellipse", "points", "polygon", "line", "polygon"]
    objects = [Annotation(kind, (ring,)) for kind, ring in zip(kinds, rings, strict=False)]
    expected, sure = np.zeros((30, 40), int), np.ones((30, 40), bool)
    rows, columns = np.indices(expected.shape)
    centres = (np.stack([columns.ravel(), rows.ravel()], axis=1) + 0.5) * downsample
    for number, item in enumerate(objects, 1):
        if item.kind in ("polygon", "ellipse"):
            x, y = item.rings[0].T / downsample - 0.5
            expected[polygon(y, x, expected.shape)] = number
            sure &= ~on_an_edge(centres, item.rings[0]).reshape(sure.shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "MOST_VERTICES", room)
        patch.setattr(masks, "MOST_PIXELS", room)
        found = label_image(objects, expected.shape, downsample)
    np.testing.assert_array_equal(found[sure], expected[sure])


@given(labels=small_labels)
def test_label_images_invert_tracing(labels):
    """The objects have holes and several parts."""
    found = outlines(labels)
    drawn = label_image([Annotation("polygon", tuple(found[each])) for each in found], labels.shape)
    numbers = np.array([0, *found])
    np.testing.assert_array_equal(numbers[drawn], labels)


def test_label_image_larger_than_memory_is_refused():
    with pytest.raises(AnnotationError, match="coarser level"):
        label_image([], (1 << 31, 1 << 31))


def test_a_hundred_thousand_objects_are_drawn_within_seconds():
    turn = np.linspace(0, 2 * np.pi, 20, endpoint=False)
    circle = 15 * np.stack([np.cos(turn), np.sin(turn)], axis=1)
    places = np.random.default_rng(0).uniform(20, 12_000, (100_000, 2))
    cells = [Annotation("polygon", (circle + place,)) for place in places]
    begin = time.process_time()
    labels = label_image(cells, (1500, 1500), 8)
    assert time.process_time() - begin < 5
    assert labels.max() == 100_000


def even_odd_area(ring, lines=2000):
    """Add up what each of many horizontal lines has inside a ring."""
    low, high = ring.min(axis=0), ring.max(axis=0)
    following, inside = np.roll(ring, -1, axis=0), 0.0
    for y in low[1] + (np.arange(lines) + 0.5) / lines * (high - low)[1]:
        cut = (ring[:, 1] > y) != (following[:, 1] > y)
        start, step = ring[cut], (following - ring)[cut]
        x = np.sort(start[:, 0] + (y - start[:, 1]) / step[:, 1] * step[:, 0])
        inside += (x[1::2] - x[::2]).sum()
    return inside * (high - low)[1] / lines


@pytest.mark.parametrize("vertices", [4, 5, 6, 9, 20])
def test_the_area_of_an_outline_that_crosses_itself_follows_the_even_odd_rule(vertices):
    random = np.random.default_rng(vertices)
    for _ in range(8):
        ring = random.random((vertices, 2)) * 100
        found = measure(Annotation("polygon", (ring,)), (1, 1)).area
        assert found == pytest.approx(even_odd_area(ring), rel=0.01, abs=1)
        assert sum(areas(uncrossed(ring))) >= found - 1e-6


def test_an_eight_has_the_area_of_both_loops():
    eight = np.array([(0, 0), (10, 10), (10, 0), (0, 10)], float)
    measured = measure(Annotation("polygon", (eight,)), (0.5, 2))
    assert measured.area == pytest.approx(50)
    assert measured.center == pytest.approx((2.5, 10))
