"""Rings of polygons: grouping them into polygons with holes, and joining them into one outline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ring = NDArray[np.float64]

LEAST = 3  # vertices of a ring


def joined(rings: Sequence[Ring]) -> Ring:
    """Join rings into one outline that runs from the first vertex to every other ring and back.

    By the even-odd rule, the outline encloses the same area as the rings, because the paths there
    and back cancel out. `split` is the inverse.
    """
    if len(rings) == 1:
        return rings[0]
    start = rings[0][:1]
    parts = [rings[0]]
    for ring in rings[1:]:
        parts += [start, ring, ring[:1]]
    return np.concatenate(parts)


def split(outline: Ring) -> list[Ring]:
    """Split an outline into its rings by cutting it at each repeated vertex."""
    corners = list(map(tuple, outline.tolist()))
    if len(set(corners)) == len(corners):
        return [outline]
    rings: list[list[tuple[float, ...]]] = []
    walk: list[tuple[float, ...]] = []
    at: dict[tuple[float, ...], int] = {}  # index of each vertex in `walk`
    for corner in [*corners, corners[0]]:
        if corner in at:
            ring = walk[at[corner] :]
            if len(ring) >= LEAST:
                rings.append(ring)
            for seen in ring[1:]:
                del at[seen]
            del walk[at[corner] + 1 :]
        else:
            at[corner] = len(walk)
            walk.append(corner)
    return [np.array(ring) for ring in rings] or [outline]  # which may have shrunk to a point


def mended(before: Ring, after: Ring) -> Ring:
    """Return an outline whose rings are still joined after a change.

    Parameters
    ----------
    before : ndarray, shape (vertices, 2)
        The result of `joined`.
    after : ndarray
        The outline with moved vertices, or with one more or fewer. All copies of a vertex follow
        the one that was moved or removed; none can be inserted into the path between two rings.
    """
    _, copies, counts = np.unique(before, axis=0, return_inverse=True, return_counts=True)
    copies = copies.ravel()
    if len(after) == len(before):
        # Vertices that have moved come first.
        order = np.argsort((before == after).all(axis=1), kind="stable")
        _, first = np.unique(copies[order], return_index=True)
        return after[order[first]][copies]
    shared = min(len(before), len(after))
    differs = (before[:shared] != after[:shared]).any(axis=1)
    index = int(np.argmax([*differs, True]))
    if len(after) == len(before) + 1:
        is_path = (counts[copies[[index - 1, index % len(before)]]] > 1).all()
        return before if is_path else after
    rings = [ring[(ring != before[index]).any(axis=1)] for ring in split(before)]
    return joined([ring for ring in rings if len(ring) >= LEAST] or [after])


def without_repeated_end(ring: Ring) -> Ring:
    """Remove the last vertex if it repeats the first one."""
    return ring[:-1] if len(ring) > 1 and (ring[0] == ring[-1]).all() else ring


def uncrossed(ring: Ring) -> list[Ring]:
    """Split a ring whose edges cross into loops that may touch, but don't cross.

    By the even-odd rule, the loops enclose the same area as the ring.
    """
    if _is_star(ring):
        return [ring]
    one, other, shares, points = _crossings(ring)
    if not len(one):
        return [ring]
    # Walk along the ring. Each crossing is passed twice; both times, the walk goes on along the
    # other edge. Such loops cannot cross.
    count = len(one)
    edges = np.concatenate([np.arange(len(ring)), one, other])
    order = np.lexsort((np.concatenate([np.zeros(len(ring)), shares]), edges))
    places = np.concatenate([ring, points, points])[order]
    place_of = np.empty_like(order)
    place_of[order] = np.arange(len(order))
    after = np.roll(np.arange(len(order)), -1)
    passes = place_of[len(ring) :].reshape(2, count)
    after[passes] = after[passes[::-1]]
    loops, left = [], dict.fromkeys(range(len(order)))
    following: list[int] = after.tolist()
    while left:
        loop = [next(iter(left))]
        while following[loop[-1]] != loop[0]:
            loop.append(following[loop[-1]])
        for place in loop:
            del left[place]
        if len(loop) >= LEAST:
            loops.append(places[loop])
    return loops


def _is_star(ring: Ring) -> bool:
    """Whether a ring runs once around the middle of its box, always in the same direction."""
    x, y = (ring - (ring.min(axis=0) + ring.max(axis=0)) / 2).T
    turns = x * np.roll(y, -1) - y * np.roll(x, -1)
    return bool(
        ((turns > 0).all() or (turns < 0).all())
        and np.count_nonzero((y < 0) & (np.roll(y, -1) >= 0)) == 1
    )


def _crossings(ring: Ring) -> tuple[NDArray[np.int64], NDArray[np.int64], Ring, Ring]:
    """Return the pairs of edges that cross, the share of each edge before the point, and points.

    The shares on the first edges precede those on the second ones.
    """
    steps = np.roll(ring, -1, axis=0) - ring
    low, high = np.minimum(ring, ring + steps), np.maximum(ring, ring + steps)
    # Only edges whose extents overlap can cross: in x, these follow each other if sorted.
    order = np.argsort(low[:, 0], kind="stable")
    ends = np.searchsorted(low[order, 0], high[order, 0], "right")
    counts = ends - np.arange(1, len(ring) + 1)
    first = np.repeat(np.arange(len(ring)), counts)
    second = first + 1 + np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    one, other = order[first], order[second]
    near = (low[one, 1] <= high[other, 1]) & (low[other, 1] <= high[one, 1])
    one, other = one[near], other[near]
    gap, (x, y), (u, v) = ring[other] - ring[one], steps[one].T, steps[other].T
    area = x * v - y * u
    with np.errstate(divide="ignore", invalid="ignore"):  # of parallel edges
        shares = np.array([gap[:, 0] * v - gap[:, 1] * u, gap[:, 0] * y - gap[:, 1] * x]) / area
    crosses = ((shares > 0) & (shares < 1)).all(axis=0)
    one, other, shares = one[crosses], other[crosses], shares[:, crosses]
    return one, other, shares.ravel(), ring[one] + shares[0][:, None] * steps[one]


def areas(rings: Sequence[Ring]) -> list[float]:
    """Return the area of each ring, in squared units of its coordinates."""
    return [abs(_signed_area(ring)) for ring in rings]


def area_and_centroid(rings: Sequence[Ring]) -> tuple[float, Ring]:
    """Return the area that rings enclose and its center; without an area, that of their box."""
    every = np.concatenate(rings)
    middle: Ring = (every.min(axis=0) + every.max(axis=0)) / 2
    area, moment = 0.0, np.zeros(2)
    for polygon in polygons(rings):
        for index, ring in enumerate(polygon):
            points = ring - middle  # coordinates far from the origin would lose digits
            following = np.roll(points, -1, axis=0)
            cross = points[:, 0] * following[:, 1] - following[:, 0] * points[:, 1]
            sign = np.sign(cross.sum()) * (-1 if index else 1)  # the first ring is the outer one
            area += sign * float(cross.sum()) / 2
            moment += sign * cross @ (points + following) / 6
    return float(area), middle + moment / area if area else middle


def polygons(rings: Sequence[Ring]) -> list[list[Ring]]:
    """Group rings into polygons: each is a list of its outer ring and its holes."""
    if len(rings) == 1:
        return [[rings[0]]]
    sizes = areas(rings)
    order = sorted(range(len(rings)), key=lambda index: -sizes[index])
    around: dict[int, list[int]] = {}
    for rank, index in enumerate(order):
        around[index] = [other for other in order[:rank] if _is_within(rings[index], rings[other])]
    # A ring within an even number of others is an outer ring; otherwise it is a hole.
    found = {index: [rings[index]] for index in order if len(around[index]) % 2 == 0}
    for index in order:
        if index not in found:
            # A hole belongs to the smallest outer ring around it.
            found[_innermost(around[index], found)].append(rings[index])
    return list(found.values())


def _innermost(around: Sequence[int], outer: dict[int, list[Ring]]) -> int:
    return next(index for index in reversed(around) if index in outer)


def _signed_area(ring: Ring) -> float:
    x, y = (ring - ring[0]).T  # coordinates far from the origin would lose digits
    return float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2


def _is_within(ring: Ring, other: Ring) -> bool:
    """Whether the midpoints of most edges of a ring are inside another ring; the two may touch."""
    if np.any(ring.min(axis=0) < other.min(axis=0)) or np.any(ring.max(axis=0) > other.max(axis=0)):
        return False
    middles = (ring + np.roll(ring, -1, axis=0)) / 2
    inside = [_contains(other, point) for point in middles]
    return sum(inside) * 2 > len(inside)


def _contains(ring: Ring, point: Ring) -> bool:
    """Whether a point is inside a ring: a ray from it crosses an odd number of edges."""
    x, y = point
    x0, y0 = ring.T
    x1, y1 = np.roll(x0, -1), np.roll(y0, -1)
    spans = (y0 > y) != (y1 > y)
    crossings = x0[spans] + (y - y0[spans]) / (y1[spans] - y0[spans]) * (x1 - x0)[spans]
    return bool(np.count_nonzero(crossings > x) % 2)


def ellipse(corners: Ring, vertices: int) -> Ring:
    """Return the outline of an ellipse inscribed in a parallelogram, given by its four corners."""
    middle = corners.mean(axis=0)
    along, across = (corners[1] - corners[0]) / 2, (corners[3] - corners[0]) / 2
    turn = np.linspace(0, 2 * np.pi, vertices, endpoint=False)[:, None]
    outline: Ring = middle + np.cos(turn) * along + np.sin(turn) * across
    return outline
