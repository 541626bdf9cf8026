from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu.display.blocks import Block, blocks

tiles = st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)))


@given(tiles)
def test_blocks_hold_each_tile_once_and_no_other(wanted):
    held = [tile for block in blocks(wanted) for tile in block.tiles()]
    assert sorted(held) == sorted(wanted)


@given(st.integers(0, 5), st.integers(1, 5), st.integers(0, 5), st.integers(1, 5))
def test_a_rectangle_is_one_block(top, height, left, width):
    block = Block(top, top + height, left, left + width)
    assert blocks(set(block.tiles())) == [block]


def test_a_ring_is_four_blocks():
    ring = set(Block(0, 5, 0, 6).tiles()) - set(Block(1, 4, 1, 5).tiles())
    assert len(blocks(ring)) == 4
