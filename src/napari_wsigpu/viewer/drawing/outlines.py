"""Drawing of layers with very many shapes.

napari draws every triangle of every shape in each frame, and recomputes the triangles of all
outlines when their width changes. For layers of at least `LEAST` shapes, `OutlineDrawing` uploads
all outlines once. It draws the visible ones with a constant width on screen, and outlines of a few
pixels as points. napari still selects and edits the shapes.

Outlines have a dark rim, without which pale colors are invisible on glass and stained tissue. In
layers of fewer shapes, `OutlineDrawing` draws only the outlines with their rim, over napari's.
"""

from __future__ import annotations

from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
from vispy.gloo import IndexBuffer, VertexBuffer
from vispy.scene.visuals import create_visual_node
from vispy.visuals import CompoundVisual, Visual

from napari_wsigpu.annotations.rings import ellipse, mended, split
from napari_wsigpu.viewer.napari_internals import SHAPE_LIST, SHAPES, SHAPES_LAYER, layer_visual

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from napari import Viewer
    from napari.layers import Shapes
    from napari.utils.events import Event
    from numpy.typing import NDArray

    from napari_wsigpu.model.arrays import Array

    Indices = NDArray[np.int64]
    Floats = NDArray[np.float32]

LEAST = 1000  # shapes; napari draws fewer without a noticeable delay
WIDTH = 2  # pixels of the screen
RIM = 1  # the same, on each side of an outline
RIM_OPACITY = 0.6
MOST_RIMS = 20_000  # segments with a rim; more would delay frames without a graphics card
DOT = 4  # pixels of the screen; smaller rings are drawn as points
STEP = 3  # pixels of the screen: length of the segments of a simplified outline
FEWEST = 8  # vertices that a simplified closed outline keeps
CURVE = 96  # vertices of an ellipse
OPEN = "line", "path"
TRANSFORMS = "scale", "rotate", "flip"  # methods of napari's list of shapes
UPDATE = "_update_mesh_triangles"

VERTEX = """
attribute vec2 position;
attribute vec4 color;
KIND float size;
uniform float zoom;
varying vec4 v_color;
void main() {
    v_color = color;
    gl_Position = $transform(vec4(position, 0.0, 1.0));
    gl_PointSize = clamp(size * zoom, 1.5, 4.0);
}
"""
FRAGMENT = """
varying vec4 v_color;
void main() { gl_FragColor = v_color; }
"""


class Outlines:
    """The outlines and fills of shapes as arrays, which can be restricted to a view.

    Attributes
    ----------
    vertices, fill_vertices : ndarray of float32, shape (vertices, 2)
        (x, y) of the vertices of all outlines, and of the triangles that fill them.
    owners, fill_owners : ndarray of int
        Index of the shape that each vertex belongs to.
    centers, sizes : ndarray of float32, shape (rings, 2) and (rings,)
        Center and longest side of the bounding box of each ring.
    ring_owners : ndarray of int
        Index of the shape that each ring belongs to.
    """

    def __init__(self, layer: Shapes) -> None:
        content = SHAPES.get(layer)
        shapes, mesh = content.shapes, SHAPE_LIST.get(content)
        rings = [_rings(*each) for each in zip(layer.data, layer.shape_type, strict=True)]
        counts = np.array([len(each) for each in rings])
        all_rings = [ring for each in rings for ring in each]
        self.vertices = _reversed(np.concatenate(all_rings))
        self._lengths = np.array([len(ring) for ring in all_rings])
        self._starts = _offsets(self._lengths)[:-1]
        self.ring_owners = np.repeat(np.arange(len(counts)), counts)
        self.owners = np.repeat(self.ring_owners, self._lengths)
        closed = np.array([kind not in OPEN for kind in layer.shape_type])
        self._closed = closed[self.ring_owners]
        self._measure()
        # In napari's mesh, the triangles of each shape's fill precede its outline's.
        points = np.array([each.face_vertices_count for each in shapes])
        self._triangles = np.array([each.face_triangles_count for each in shapes])
        taken = _ranges(mesh.vertices_index[:-1], points)
        self.fill_vertices = _reversed(mesh.vertices[taken])
        self.fill_owners = np.repeat(np.arange(len(points)), points)
        shift = np.repeat(_offsets(points)[:-1] - mesh.vertices_index[:-1], self._triangles)
        faces = mesh.triangles[_ranges(mesh.triangles_index[:-1], self._triangles)]
        self._faces = (faces + shift[:, None]).astype(np.uint32)
        self._first_face = _offsets(self._triangles)[:-1]

    def _measure(self) -> None:
        low = np.minimum.reduceat(self.vertices, self._starts)
        high = np.maximum.reduceat(self.vertices, self._starts)
        self.centers: Floats = np.mean([low, high], axis=0, dtype=np.float32)
        self.sizes: Floats = (high - low).max(axis=1)
        self._box = low, high

    def update(self, layer: Shapes, moved: Iterable[int]) -> None:
        """Move the vertices of shapes that were moved, resized or rotated."""
        mesh = SHAPE_LIST.get(SHAPES.get(layer))
        for index in moved:
            rings = _rings(layer.data[index], layer.shape_type[index])
            self.vertices[self.owners == index] = _reversed(np.concatenate(rings))
            filled, first = self.fill_owners == index, mesh.vertices_index[index]
            fill = mesh.vertices[first : first + np.count_nonzero(filled)]
            self.fill_vertices[filled] = _reversed(fill)
        self._measure()

    def seen(self, low: Array, high: Array, zoom: float) -> tuple[Array, Array, Array]:
        """Return vertex indices of visible triangles and segments, and indices of small rings.

        Parameters
        ----------
        low, high : ndarray, shape (2,)
            (x, y) of the corners of the view.
        zoom : float
            Pixels of the screen per unit of the data.
        """
        margin = WIDTH / zoom
        first, last = self._box
        seen = np.flatnonzero(np.all((last >= low - margin) & (first <= high + margin), axis=1))
        small = self.sizes[seen] * zoom < DOT
        dots, rings = seen[small], seen[~small]
        shapes = np.unique(self.ring_owners[rings])
        faces = self._faces[_ranges(self._first_face[shapes], self._triangles[shapes])]
        return faces, self._lines(rings, zoom), dots.astype(np.uint32)

    def _lines(self, rings: Indices, zoom: float) -> NDArray[np.uint32]:
        """Return pairs of vertex indices; closed outlines skip vertices when small on screen."""
        lengths, closed = self._lengths[rings], self._closed[rings]
        enough = np.maximum(self.sizes[rings] * (np.pi * zoom / STEP), FEWEST).astype(np.int64)
        counts = np.where(closed, np.minimum(lengths, enough), lengths - 1)
        part = _ranges(np.zeros_like(counts), counts)
        length, total = np.repeat(lengths, counts), np.repeat(counts + ~closed, counts)
        start = np.repeat(self._starts[rings], counts)
        ends = [(part + step) % total * length // total + start for step in (0, 1)]
        return np.stack(ends, axis=1).astype(np.uint32)


def _rings(vertices: Array, kind: str) -> Sequence[Array]:
    """Return a shape's rings; the outline of a polygon with holes joins several."""
    if kind == "ellipse":
        return [ellipse(vertices, CURVE)]
    return split(vertices) or [vertices] if kind == "polygon" else [vertices]


def _reversed(points: Array) -> Floats:
    """Convert points from napari's (y, x) to vispy's (x, y)."""
    return np.ascontiguousarray(points[:, ::-1], np.float32)


def _offsets(lengths: Indices) -> Indices:
    """Return the start of each of several consecutive parts, and the end of the last one."""
    return np.concatenate([[0], np.cumsum(lengths)])


def _ranges(starts: Indices, lengths: Indices) -> Indices:
    """Return the concatenation of ``range(start, start + length)``."""
    return np.repeat(starts - _offsets(lengths)[:-1], lengths) + np.arange(lengths.sum())


def _set_color(content: Any, colors: Array, kind: str) -> None:
    """Set the colors of all shapes; napari's method also colors the triangles of each shape."""
    SHAPE_LIST.get(content, f"_{kind}_color")[:] = colors


def repair(content: Any) -> None:
    """Correct how napari's list of shapes replaces the triangles of a shape that is changed.

    Otherwise, changes of outlines with holes disturb how the shapes after them are drawn.
    """
    for name in TRANSFORMS:
        SHAPE_LIST.override(content, name, partial(_transform, content, name))
    update = partial(SHAPE_LIST.get(type(content), UPDATE), content)
    SHAPE_LIST.override(content, UPDATE, partial(_update_triangles, content, update))


def _transform(content: Any, name: str, index: int, *arguments: Any, **named: Any) -> None:
    """Resize, rotate or mirror a shape; napari's methods don't update its triangles.

    They also draw the paths between the rings of a polygon, and may separate copies of a vertex.
    """
    shape = content.shapes[index]
    before = np.array(shape.data)
    getattr(shape, name)(*arguments, **named)
    if shape.name == "polygon" and len(split(before)) > 1:
        shape.data = mended(before, shape.data)
    content.update(index)


def _update_triangles(content: Any, update: Callable[[int], None], index: int) -> None:
    """Update a shape's triangles with napari's method.

    If the shape now has more triangles but fewer vertices, the method renumbers the vertices of all
    triangles that follow, although napari keeps the unused vertices.
    """
    mesh, shape = SHAPE_LIST.get(content), content.shapes[index]
    first, last = mesh.vertices_index[index : index + 2]
    begin, end = mesh.triangles_index[index : index + 2]
    update(index)
    unused = last - first - shape.vertices_count
    if unused > 0 and shape.triangles_count > end - begin:
        mesh.triangles[mesh.triangles_index[index + 1] :] += unused


class _Part(Visual):  # type: ignore[misc]
    """Triangles, lines or points with a color per vertex."""

    def __init__(self, mode: str, width: int = WIDTH) -> None:
        # In napari's grid, vispy refuses an attribute that has one value for all vertices.
        kind = "attribute" if mode == "points" else "uniform"
        super().__init__(VERTEX.replace("KIND", kind), FRAGMENT)
        self._draw_mode, self._width = mode, width
        self._index_buffer = IndexBuffer()
        self.set_gl_state("translucent", depth_test=False, cull_face=False)
        self.shared_program["size"] = 1.0
        self.shared_program["zoom"] = 1.0
        self.empty = True

    def set_vertices(self, positions: Floats, sizes: Floats | None = None) -> None:
        self.shared_program["position"] = VertexBuffer(positions)
        if sizes is not None:
            self.shared_program["size"] = VertexBuffer(np.ascontiguousarray(sizes, np.float32))

    def set_colors(self, colors: Array) -> None:
        self.shared_program["color"] = VertexBuffer(np.ascontiguousarray(colors, np.float32))

    def set_seen(self, indices: Array, zoom: float) -> None:
        self.empty = not indices.size
        if not self.empty:
            self._index_buffer.set_data(np.ravel(indices))
        self.shared_program["zoom"] = zoom

    def _prepare_transforms(self, view: Visual) -> None:
        view.view_program.vert["transform"] = view.transforms.get_transform()

    def _prepare_draw(self, view: Visual) -> bool:
        if self._draw_mode == "lines":
            self.update_gl_state(line_width=self._width * view.transforms.pixel_scale)
        return not self.empty


class _OutlinesVisual(CompoundVisual):  # type: ignore[misc]
    def __init__(self) -> None:
        self._outlines: Outlines | None = None
        self._view: tuple[object, ...] = ()
        self._fills, self._lines, self._dots = map(_Part, ("triangles", "lines", "points"))
        self._rims = _Part("lines", WIDTH + 2 * RIM)
        super().__init__([self._fills, self._rims, self._lines, self._dots])

    def set_outlines(self, outlines: Outlines) -> None:
        self._outlines, self._view = outlines, ()
        self._fills.set_vertices(outlines.fill_vertices)
        self._lines.set_vertices(outlines.vertices)
        self._rims.set_vertices(outlines.vertices)
        self._dots.set_vertices(outlines.centers, outlines.sizes)

    def set_colors(self, edges: Array, faces: Array) -> None:
        outlines = self._outlines
        if outlines is not None:
            self._fills.set_colors(faces[outlines.fill_owners])
            self._lines.set_colors(edges[outlines.owners])
            rims = edges * (0, 0, 0, RIM_OPACITY)
            self._rims.set_colors(rims[outlines.owners])
            self._dots.set_colors(edges[outlines.ring_owners])

    def _prepare_draw(self, view: Any) -> bool:
        outlines = self._outlines
        if outlines is None:
            return False
        to_canvas = view.transforms.get_transform("visual", "canvas")
        width, height = view.canvas.size
        corners = to_canvas.imap([[0, 0], [width, 0], [0, height], [width, height]])[:, :2]
        (x, y), *_ = np.diff(corners[:2], axis=0)
        low, high, zoom = corners.min(axis=0), corners.max(axis=0), width / np.hypot(x, y)
        key = (*low.tolist(), *high.tolist(), zoom)
        if key != self._view:
            self._view = key
            faces, lines, dots = outlines.seen(low, high, zoom)
            self._fills.set_seen(faces, zoom)
            self._rims.set_seen(lines if len(lines) <= MOST_RIMS else lines[:0], zoom)
            self._lines.set_seen(lines, zoom)
            self._dots.set_seen(dots, zoom)
        return True


_OutlinesNode = create_visual_node(_OutlinesVisual)


class OutlineDrawing:
    """Replaces napari's drawing of a shapes layer while it has at least `LEAST` shapes.

    The layer holds a reference to this object; other objects should only hold weak references.

    Parameters
    ----------
    viewer : Viewer
        A viewer with a window.
    layer : Shapes
        One of its layers.

    Raises
    ------
    AttributeError, KeyError
        If this version of napari lacks what the drawing needs; napari then draws the layer.
    """

    def __init__(self, viewer: Viewer, layer: Shapes) -> None:
        self._layer, self._visual = layer, layer_visual(viewer, layer)
        self._data: list[Array] = []
        self._values: list[Array] = []  # copies of the same
        self._outlines: Outlines | None = None
        self._colors: tuple[Array, Array] | None = None
        self._node: Any = None
        self._napari_draws = SHAPES_LAYER.get(self._visual)
        self._update_matrix = SHAPES_LAYER.get(self._visual, "_on_matrix_change")
        for attribute in SHAPE_LIST.attributes:
            SHAPE_LIST.get(SHAPES.get(layer), attribute)
        for attribute in ("_highlight_color", "_highlight_visible"):
            SHAPES.get(layer, attribute)
        # napari calls these methods by name.
        SHAPES_LAYER.override(self._visual, "_on_data_change", self._on_data)
        SHAPES.override(layer, "_outline_shapes", self._no_outlines)
        layer.events.highlight.connect(self._on_highlight)
        self._on_data()

    def close(self) -> None:
        """Let napari draw the layer again."""
        content = SHAPES.get(self._layer)
        self._color_mesh(content)
        SHAPE_LIST.restore(content, *TRANSFORMS, UPDATE)
        self._layer.events.highlight.disconnect(self._on_highlight)
        SHAPES.restore(self._layer, "_outline_shapes")
        SHAPES_LAYER.restore(self._visual, "_on_data_change")

    @property
    def is_active(self) -> bool:
        """Whether this object currently replaces napari's drawing."""
        return bool(self._layer.ndim == 2 and self._layer.nshapes >= LEAST)

    def _on_data(self, event: Event | None = None) -> None:
        active, content = self.is_active, SHAPES.get(self._layer)
        self._visual.node.shape_faces.visible = not active
        # napari creates a new shape list for new data.
        repair(content)
        if active:
            SHAPE_LIST.override(content, "_set_color", partial(_set_color, content))
        else:
            self._color_mesh(content)
            self._napari_draws()
        is_shown = bool(self._layer.ndim == 2 and self._layer.nshapes)
        if self._node is not None:
            self._node.visible = is_shown
        if not is_shown:
            return
        if self._node is None:
            self._node = _OutlinesNode(parent=self._visual.node)
        data = self._layer.data
        # napari creates a new vertex array for each shape that changes, but it moves, resizes and
        # rotates selected shapes in place, also the one that is being drawn.
        if len(data) != len(self._data) or not all(map(is_, data, self._data)):
            self._data, self._colors = data, None
            self._values = [*map(np.array, data)]
            self._outlines = Outlines(self._layer)
            self._node.set_outlines(self._outlines)
        self._follow_selected(data)
        self._set_colors()
        self._update_matrix()
        self._visual.node.update()

    def _follow_selected(self, data: list[Array]) -> None:
        """Update the outlines of selected shapes that napari has changed in place."""
        selected = [each for each in self._layer.selected_data if each in range(len(data))]
        now, before = ([some[each] for each in selected] for some in (data, self._values))
        # One comparison of all takes a fraction of the time of many.
        if not selected or np.array_equal(np.concatenate(now), np.concatenate(before)):
            return
        same = map(np.array_equal, now, before)
        changed = [each for each, equal in zip(selected, same, strict=True) if not equal]
        for each in changed:
            self._values[each] = np.array(data[each])
        if self._outlines is not None:
            self._outlines.update(self._layer, changed)
            self._node.set_outlines(self._outlines)

    def _color_mesh(self, content: Any) -> None:
        """Color napari's triangles like their shapes; `_set_color` has colored only the shapes."""
        if "_set_color" in vars(content):
            SHAPE_LIST.restore(content, "_set_color")
            for kind in ("edge", "face"):
                colors = SHAPE_LIST.get(content, f"_{kind}_color").copy()
                SHAPE_LIST.get(content, "_set_color")(colors, kind)

    def _on_highlight(self, event: Event | None = None) -> None:
        if self._node is not None and len(self._data) == self._layer.nshapes > 0:
            self._set_colors()

    def _set_colors(self) -> None:
        edges, faces = np.array(self._layer.edge_color), np.array(self._layer.face_color)
        highlighted = set()
        if SHAPES.get(self._layer, "_highlight_visible"):  # while the layer is active
            highlighted |= set(self._layer.selected_data)
            if self._layer.mode == "select" and not self.is_active:
                highlighted.add((SHAPES.get(self._layer, "_value") or (None,))[0])
        # While napari removes shapes, it still highlights them.
        known = [each for each in highlighted if each in range(len(edges))]
        edges[known] = SHAPES.get(self._layer, "_highlight_color")
        if not self.is_active:  # napari draws the fills
            faces[:, 3] = 0
        now = edges, faces
        if self._colors is None or not all(map(np.array_equal, now, self._colors)):
            self._colors = now
            self._node.set_colors(*now)
            self._node.update()

    def _no_outlines(self) -> tuple[None, None]:
        """Return no outlines for napari to highlight; `_set_colors` keeps their width and rim."""
        return None, None
