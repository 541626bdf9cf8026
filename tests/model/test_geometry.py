import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu.model.geometry import Rect, Rects

numbers = st.integers(0, 6)
rects = st.builds(Rect, numbers, numbers, numbers, numbers)


@given(rects, rects)
def test_intersection(first, second):
    shared = first.intersection(second)
    cells = set(first.cells()) & set(second.cells())
    assert set(shared.cells() if shared is not None else ()) == cells
    assert (shared is None) == (not cells)


@given(rects, rects)
def test_contains(whole, inner):
    if inner.height and inner.width:
        assert whole.contains(inner) == (set(inner.cells()) <= set(whole.cells()))


@given(rects, rects)
def test_slices(whole, other):
    inner = whole.intersection(other)
    if inner is not None:
        places = np.array(list(whole.cells())).reshape(whole.height, whole.width, 2)
        found = places[whole.slices(inner)].reshape(-1, 2)
        assert [*map(tuple, found.tolist())] == list(inner.cells())


def test_edges_and_centre():
    rect = Rect.between(1, 4, 2, 8)
    assert rect == Rect(1, 2, 3, 6)
    assert (rect.bottom, rect.right) == (4, 8)
    assert rect.center == (2.5, 5)


sides = st.integers(1, 30)
many = st.lists(st.builds(Rect, st.integers(-20, 20), st.integers(-20, 20), sides, sides))


def as_rects(rects):
    edges = [(each.top, each.left, each.bottom, each.right) for each in rects]
    return Rects(*np.array(edges, np.int64).reshape(-1, 4).T)


@given(many, many)
def test_touching(rects, others):
    found = as_rects(rects).touching(as_rects(others))
    expected = [
        (i, j)
        for i, other in enumerate(others)
        for j, rect in enumerate(rects)
        if rect.intersection(other) is not None
    ]
    assert list(zip(*(indices.tolist() for indices in found), strict=True)) == expected


@given(many)
def test_visible_parts_of_a_stack(rects):
    painted = np.full((100, 100), -1)
    for number, rect in enumerate(rects):
        painted[rect.top + 30 : rect.bottom + 30, rect.left + 30 : rect.right + 30] = number
    owner, parts = as_rects(rects).visible()
    found = np.full_like(painted, -1)
    for number, top, left, bottom, right in zip(owner, *parts.edges, strict=True):
        part = found[top + 30 : bottom + 30, left + 30 : right + 30]
        assert part.size
        assert (part == -1).all()
        part[...] = number
    np.testing.assert_array_equal(found, painted)


def test_too_many_overlaps_are_refused():
    with pytest.raises(ValueError, match="images overlap"):
        as_rects([Rect(0, 0, 2, 2)] * 5000).visible()
