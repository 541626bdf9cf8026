"""`History`: undo and redo of what is drawn, deleted and classified on a slide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from napari.layers import Points, Shapes

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_STEPS = 100


@dataclass(frozen=True, eq=False)
class State:
    """What a layer of annotations holds: outlines or points, their types, colors and texts."""

    data: tuple[NDArray[Any], ...]
    types: tuple[str, ...]
    edges: NDArray[Any]
    faces: NDArray[Any]
    features: Any

    def equals(self, other: State) -> bool:
        """Whether it holds the same; equal outlines are the same objects, see `state_of`."""
        return (
            len(self.data) == len(other.data)
            and all(map(_is, self.data, other.data))
            and np.array_equal(self.edges, other.edges)
            and np.array_equal(self.faces, other.faces)
            and bool(self.features.equals(other.features))
        )


class Step(NamedTuple):
    """A change of one layer."""

    layer: Shapes | Points
    before: State
    after: State


class History:
    """The changes of a slide's layers of annotations.

    Attributes
    ----------
    unsaved : bool
        Whether something has changed since it was saved.
    """

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[Shapes | Points, State] = WeakKeyDictionary()
        self._done: list[Step] = []
        self._undone: list[Step] = []
        self.unsaved = False

    def watch(self, layer: Shapes | Points) -> None:
        """Take note of a layer as it is now: what it holds can't be undone."""
        if layer not in self._states:
            self._states[layer] = state_of(layer)

    def note(self, layer: Shapes | Points) -> bool:
        """Take note of what has changed in a layer; whether there is any."""
        before = self._states.get(layer)
        after = state_of(layer, before)
        self._states[layer] = after
        if before is None or before.equals(after):
            return False
        self._done = [*self._done, Step(layer, before, after)][-MOST_STEPS:]
        self._undone.clear()
        self.unsaved = True
        return True

    def forget(self, layer: Shapes | Points) -> None:
        """Undo nothing in a layer that has left the viewer."""
        self._states.pop(layer, None)
        self._done = [step for step in self._done if step.layer is not layer]
        self._undone = [step for step in self._undone if step.layer is not layer]

    def undo(self) -> bool:
        """Take the last change back; whether there was one."""
        if not self._done:
            return False
        step = self._done.pop()
        self._undone.append(step)
        self._put(step.layer, step.before)
        return True

    def redo(self) -> bool:
        """Make the change again that was taken back last; whether there was one."""
        if not self._undone:
            return False
        step = self._undone.pop()
        self._done.append(step)
        self._put(step.layer, step.after)
        return True

    def _put(self, layer: Shapes | Points, state: State) -> None:
        restore(layer, state)
        self._states[layer] = state
        self.unsaved = True


def state_of(layer: Shapes | Points, before: State | None = None) -> State:
    """Return what a layer holds; outlines that are equal to those before are the same objects."""
    known = () if before is None else before.data
    data = tuple(
        known[index]
        if index < len(known) and np.array_equal(known[index], each)
        else np.array(each)
        for index, each in enumerate(layer.data)
    )
    is_points = isinstance(layer, Points)
    types = () if is_points else tuple(map(str, layer.shape_type))
    edges = layer.border_color if is_points else layer.edge_color
    return State(data, types, np.array(edges), np.array(layer.face_color), layer.features.copy())


def restore(layer: Shapes | Points, state: State) -> None:
    """Give a layer what it held; costs time by what differs."""
    layer.selected_data = set()
    now = state_of(layer, state).data
    common = min(len(now), len(state.data))
    if not all(map(_is, now[:common], state.data[:common])):
        common = 0
    # Shapes are triangulated when they are added, which takes long for many.
    if isinstance(layer, Points):
        layer.data = np.array(state.data).reshape(-1, layer.ndim)
    elif common or not now:
        if len(now) > common:
            layer.remove(list(range(common, len(now))))
        if len(state.data) > common:
            layer.add(list(state.data[common:]), shape_type=list(state.types[common:]))
    elif state.data:
        layer.data = list(zip(state.data, state.types, strict=True))
    else:
        layer.remove(list(range(len(now))))
    if len(state.data):
        layer.features = state.features
        layer.face_color = state.faces
        if isinstance(layer, Points):
            layer.border_color = state.edges
        else:
            layer.edge_color = state.edges
    layer.refresh()


def _is(one: object, other: object) -> bool:
    return one is other
