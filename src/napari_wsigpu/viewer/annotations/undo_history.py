"""Undo and redo for a slide's annotations: changes of objects, and of layers in the viewer."""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from napari.layers import Labels, Points, Shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeAlias

    from napari.components import LayerList
    from pandas import DataFrame

    from napari_wsigpu.model.arrays import Array

    # Labels are recorded only as a whole, when they enter or leave the viewer.
    AnnotationLayer: TypeAlias = Shapes | Points | Labels

MOST_STEPS = 100


@dataclass(frozen=True, eq=False)
class State:
    """Content of an annotation layer: outlines or points with types, colors and features."""

    data: tuple[Array, ...]
    types: tuple[str, ...]
    edges: Array
    faces: Array
    features: DataFrame

    def equals(self, other: State) -> bool:
        """Whether the content is equal. Compares outlines by identity, which `state_of` keeps."""
        return (
            len(self.data) == len(other.data)
            and all(map(is_, self.data, other.data))
            and self.types == other.types
            and np.array_equal(self.edges, other.edges)
            and np.array_equal(self.faces, other.faces)
            # napari also changes the type of a column.
            and bool(self.features.astype(object).equals(other.features.astype(object)))
        )


class Change(NamedTuple):
    """Change of one layer; its state is None while it is not in the viewer."""

    layer: AnnotationLayer
    before: State | None
    after: State | None


class Step(NamedTuple):
    """Changes that are undone together; `then` is called after that, and `again` after redo."""

    changes: list[Change]
    then: Callable[[], None] | None = None
    again: Callable[[], None] | None = None


class History:
    """The changes of a slide's annotation layers.

    Attributes
    ----------
    unsaved : bool
        Whether there are changes since the last save; adding and removing layers do not count.
    """

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[AnnotationLayer, State | None] = WeakKeyDictionary()
        self._done: list[Step] = []
        self._undone: list[Step] = []
        self._attached: tuple[Callable[[], None], Callable[[], None]] | tuple[()] = ()
        self.unsaved = False

    @property
    def has_steps(self) -> tuple[bool, bool]:
        """Whether there is a step to undo, and one to redo."""
        return bool(self._done), bool(self._undone)

    @property
    def is_empty(self) -> bool:
        """Whether the layers in the viewer hold no objects."""
        return not any(state and state.data for state in self._states.values())

    def holds(self, layer: AnnotationLayer) -> bool:
        """Whether the history records a layer as being in the viewer and holding objects."""
        state = self._states.get(layer)
        return bool(state and state.data)

    def watch(self, layer: AnnotationLayer) -> None:
        """Record a layer's current content as the state that undo leads back to."""
        self._states[layer] = state_of(layer)

    def attach(self, then: Callable[[], None], again: Callable[[], None]) -> None:
        """Attach functions to the next step, see `Step`."""
        self._attached = then, again

    def record(self, layers: Iterable[AnnotationLayer], present: LayerList) -> bool:
        """Record the changes of some layers as one step; return False if there are none.

        Parameters
        ----------
        layers : iterable of Shapes, Points or Labels
            The layers.
        present : LayerList
            The layers of the viewer.
        """
        step = []
        for layer in layers:
            before = self._states.get(layer)
            after = state_of(layer, before) if layer in present else None
            self._states[layer] = after
            if before and after:
                if not before.equals(after):
                    step.append(Change(layer, before, after))
                    self.unsaved = True
            elif any(state and state.data for state in (before, after)):
                step.append(Change(layer, before, after))
        if step:
            self._done = [*self._done, Step(step, *self._attached)][-MOST_STEPS:]
            self._attached = ()
            self._undone.clear()
        return bool(step)

    def undo(self, present: LayerList) -> bool:
        """Undo the last step; return False if there is none."""
        return self._move(self._done, self._undone, present)

    def redo(self, present: LayerList) -> bool:
        """Redo the last undone step; return False if there is none."""
        return self._move(self._undone, self._done, present)

    def _move(self, source: list[Step], target: list[Step], present: LayerList) -> bool:
        """Move the last step to another list, and restore the content that it leads to."""
        if not source:
            return False
        step = source.pop()
        target.append(step)
        for layer, before, after in step.changes:
            state = before if target is self._undone else after
            # Store the state first, so that restoring it does not count as the user's change.
            self._states[layer] = state
            if state is None and layer in present:
                present.remove(layer)
            elif state is not None:
                if layer not in present:
                    layer.visible = True  # it may have been hidden with its slide
                    present.append(layer)
                restore(layer, state)
        self.unsaved = True
        follow = step.then if target is self._undone else step.again
        if follow is not None:
            follow()
        return True


def state_of(layer: AnnotationLayer, before: State | None = None) -> State:
    """Copy a layer's content; outlines that equal an outline of `before` are shared with it."""
    if isinstance(layer, Labels):
        nothing = np.empty(0)
        return before or State((nothing,), (), nothing, nothing, layer.features)
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


def restore(layer: AnnotationLayer, state: State) -> None:
    """Restore a layer's content; this is quick if it differs only in the last shapes."""
    if isinstance(layer, Labels):
        return
    selected = set(layer.selected_data)
    layer.selected_data = set()
    now = state_of(layer, state).data
    common = min(len(now), len(state.data))
    if not all(map(is_, now[:common], state.data[:common])):
        common = 0
    # Keep the common shapes: napari triangulates shapes when they are added, which is slow.
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
    if common == len(now) == len(state.data):  # the objects themselves have not changed
        layer.selected_data = selected
    layer.refresh()
