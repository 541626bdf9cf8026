"""Objects that are already there are found again."""

import numpy as np
import pytest

from napari_wsigpu import Annotation
from napari_wsigpu.annotations.duplicates import without_known

SQUARE = np.array([(100, 200), (400, 200), (400, 500), (100, 500)], float)
HOLE = SQUARE / 10 + 200


def rings(annotations):
    return [ring.tolist() for each in annotations for ring in each.rings]


@pytest.mark.parametrize("shift", [0, 0.01, -0.01])
@pytest.mark.parametrize(
    ("kind", "outline", "count"),
    [("polygon", (SQUARE, HOLE), 1), ("ellipse", (SQUARE,), 1), ("line", (SQUARE, HOLE), 2),
     ("points", (SQUARE,), 4)],
)  # fmt: skip
def test_rounded_copies_are_left_out(kind, outline, count, shift):
    there = Annotation(kind, outline, "old", "Tumor")
    again = Annotation(kind, tuple(ring + shift for ring in outline), "", "Tumor")
    assert without_known([again], [there]) == ([], count)
    other = Annotation(kind, outline, "old", "Stroma")
    assert without_known([other], [there]) == ([other], 0)
    moved = Annotation(kind, tuple(ring + 1 for ring in outline), "", "Tumor")
    assert without_known([moved, again, moved], [there]) == ([moved, moved], count)


def test_order_of_rings_is_not_compared():
    there = Annotation("polygon", (HOLE, SQUARE))
    assert without_known([Annotation("polygon", (SQUARE, HOLE))], [there]) == ([], 1)
    without_hole = Annotation("polygon", (SQUARE,))
    assert without_known([without_hole], [there]) == ([without_hole], 0)


def test_missing_points_and_parts_are_new():
    there = [Annotation("points", (SQUARE[:1],)), Annotation("points", (SQUARE[2:],))]
    new, skipped = without_known([Annotation("points", (SQUARE,))], there)
    assert (rings(new), skipped) == ([SQUARE[1:2].tolist()], 3)
    new, skipped = without_known(
        [Annotation("line", (SQUARE, HOLE))], [Annotation("line", (SQUARE,))]
    )
    assert (rings(new), skipped) == ([HOLE.tolist()], 1)


def test_no_id_is_used_twice():
    """The slide has an object of the file that was moved since it was read."""
    number = "0f0e0d0c-1111-4222-8333-444455556666"
    stated = Annotation("polygon", (SQUARE,), id=number, name="cell")
    other = Annotation("polygon", (SQUARE + 90,), id=number.replace("0f", "1f"))
    moved = Annotation("polygon", (SQUARE + 5,), id=number, name="cell")
    new, skipped = without_known([stated, other], [moved])
    assert [(each.id, each.name) for each in new] == [("", "cell"), (other.id, "")]
    assert skipped == 0
