from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu.display.blocks import blocks
from napari_wsigpu.model.geometry import Rect

tiles = st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)))


@given(tiles)
def test_blocks_hold_each_tile_once_and_no_other(wanted):
    held = [tile for block in blocks(wanted) for tile in block.cells()]
    assert sorted(held) == sorted(wanted)


@given(st.integers(0, 5), st.integers(1, 5), st.integers(0, 5), st.integers(1, 5))
def test_a_rectangle_is_one_block(top, height, left, width):
    block = Rect(top, left, height, width)
    assert blocks(set(block.cells())) == [block]


def test_a_ring_is_four_blocks():
    ring = set(Rect(0, 0, 5, 6).cells()) - set(Rect(1, 1, 3, 4).cells())
    assert len(blocks(ring)) == 4
