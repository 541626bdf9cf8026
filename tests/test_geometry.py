import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu.geometry import Rect

numbers = st.integers(0, 6)
rects = st.builds(Rect, numbers, numbers, numbers, numbers)


@given(rects, rects)
def test_what_two_share(first, second):
    shared = first.intersection(second)
    cells = set(first.cells()) & set(second.cells())
    assert set(shared.cells() if shared is not None else ()) == cells
    assert (shared is None) == (not cells)


@given(rects, rects)
def test_one_that_lies_in_another(whole, inner):
    if inner.height and inner.width:
        assert whole.contains(inner) == (set(inner.cells()) <= set(whole.cells()))


@given(rects, rects)
def test_where_one_lies_in_another(whole, other):
    inner = whole.intersection(other)
    if inner is not None:
        places = np.array(list(whole.cells())).reshape(whole.height, whole.width, 2)
        found = places[whole.slices(inner)].reshape(-1, 2)
        assert [*map(tuple, found.tolist())] == list(inner.cells())


def test_edges_and_centre():
    rect = Rect.between(1, 4, 2, 8)
    assert rect == Rect(1, 2, 3, 6)
    assert (rect.bottom, rect.right) == (4, 8)
    assert rect.centre == (2.5, 5)
