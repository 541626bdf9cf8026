"""Comparison of annotations, so that objects that are already there are not added again."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from napari_wsigpu.annotations.annotation import Annotation
    from napari_wsigpu.annotations.rings import Ring

    Part = tuple[Ring, ...]
    Key = tuple[object, ...]

TOLERANCE = 0.05  # pixels; files contain rounded coordinates


def without_known(
    annotations: Sequence[Annotation], known: Iterable[Annotation]
) -> tuple[list[Annotation], int]:
    """Leave out objects that have the geometry and the class of a known object.

    Parameters
    ----------
    annotations, known : iterable of Annotation
        The objects, and those to compare them with. Each of several points and each part of a line
        is compared by itself, because napari's layers hold them one by one.

    Returns
    -------
    new : list of Annotation
        The other objects. One with the id of a known object, which was changed since, has no id.
    skipped : int
        Number of outlines, points and parts of lines that were left out.
    """
    parts: dict[Key, list[Part]] = defaultdict(list)
    ids: set[str] = set()
    for annotation in known:
        ids.add(annotation.id)
        for part in _parts(annotation):
            parts[_key(annotation, part, 0, 0)].append(part)
    if not parts:
        return list(annotations), 0

    def is_known(annotation: Annotation, part: Part) -> bool:
        shifts = product((-TOLERANCE, TOLERANCE), repeat=2)
        keys = {_key(annotation, part, *shift) for shift in shifts}
        return any(_equal(part, other) for key in keys for other in parts.get(key, ()))

    new, skipped = [], 0
    for annotation in annotations:
        found = _parts(annotation)
        rest = [part for part in found if not is_known(annotation, part)]
        skipped += len(found) - len(rest)
        if len(rest) == len(found):
            new.append(annotation)
        elif rest:
            rings = tuple(ring for part in rest for ring in part)
            new.append(
                replace(
                    annotation,
                    rings=(np.concatenate(rings),) if annotation.kind == "points" else rings,
                )
            )
    ids.discard("")
    return [replace(each, id="") if each.id in ids else each for each in new], skipped


def skipped_sentence(count: int) -> str:
    """Say how many objects were left out."""
    verbs = " is already there and was" if count == 1 else "s are already there and were"
    return f"{count:,} object{verbs} skipped."


def _parts(annotation: Annotation) -> list[Part]:
    if annotation.kind == "points":
        return [(spot[None],) for ring in annotation.rings for spot in ring]
    if annotation.kind == "line":
        return [(ring,) for ring in annotation.rings]
    if annotation.kind == "ellipse":  # the number of vertices and the first one may differ
        points = np.concatenate(annotation.rings)
        return [(np.stack([points.min(axis=0), points.max(axis=0)]),)]
    return [annotation.rings]


def _key(annotation: Annotation, part: Part, dx: float, dy: float) -> Key:
    """Return a key that only objects with similar outlines share, to compare few of them."""
    x, y = np.min([ring.min(axis=0) for ring in part], axis=0)
    sizes = tuple(sorted(map(len, part)))
    return annotation.kind, annotation.classification, sizes, int(x + dx), int(y + dy)


def _equal(part: Part, other: Part) -> bool:
    """Whether each ring equals one of another object, which may list its rings in other order."""
    return all(
        any(len(ring) == len(each) and np.abs(ring - each).max() <= TOLERANCE for each in other)
        for ring in part
    )
