"""Annotations of a slide as layers of shapes and points, and layers as annotations."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from napari.layers import Points, Shapes
from napari.utils.colormaps.standardize_color import transform_color

from napari_wsigpu.annotations.annotation import Annotation
from napari_wsigpu.annotations.masks import WITH_AREA
from napari_wsigpu.annotations.rings import ellipse, joined, split
from napari_wsigpu.annotations.tracing import outlines
from napari_wsigpu.model.errors import AnnotationError
from napari_wsigpu.viewer.layers import slide_name, slide_of
from napari_wsigpu.viewer.object_labels import object_labels
from napari_wsigpu.viewer.region import on_slide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from napari import Viewer
    from napari.layers import Layer
    from numpy.typing import NDArray

    from napari_wsigpu.annotations.annotation import Color, Kind
    from napari_wsigpu.slide.slide import Slide

    LayerData = tuple[Any, Mapping[str, Any], str]
    MutableLayerData = tuple[Any, dict[str, Any], str]
    # From data coordinates of a layer, (points, axes), to (y, x) in pixels of level 0.
    ToPixels = Callable[[NDArray[Any]], NDArray[np.float64]]

CLASS, NAME, TYPE, LOCKED, ID = COLUMNS = ("class", "name", "object_type", "locked", "id")
SLIDE = "slide"
OBJECTS = "objects"  # that a layer of labels draws
MOST_SHAPES = 20_000  # of which napari makes a layer of shapes within seconds
MANY = (
    f"Shown as labels, since of more than {MOST_SHAPES:,} outlines napari's shapes are slow; "
    "what is exported are the outlines."
)
FOR_EXPORT = "for export"  # of shapes that tell what is exported, and are no annotations
REST = "annotations"  # what a table has no place for, by id
RED: Color = (255, 0, 0)  # of what has no class, as in QuPath
LIGHT = 0x26  # opacity of fills, of 255: the slide is seen through them
ELLIPSE_VERTICES = 128
CENTRE = 0.5  # napari counts from the centre of the first pixel, QuPath from its corner
OF_ALL = 1 / 500  # width of outlines until the zoom is known, as a part of what is drawn
POINT, SMALLEST_POINT = 20, 8  # pixels of level 0, and of the screen
MOST_PIXELS = 1 << 28
SAME = 1e-3  # pixels
PLACEMENT = ("scale", "translate", "rotate", "shear", "affine", "units", "axis_labels")
AFFINE = ("rotate", "shear", "affine")


def placement(layer: Layer) -> dict[str, Any]:
    """Return the attributes that lay another layer's data onto a layer's pixels of level 0."""
    return {name: getattr(layer, name) for name in PLACEMENT}


def flat_placement(layer: Layer) -> dict[str, Any]:
    """Return `placement` for flat data, which lie on all planes of a slide's layer."""
    place, last = placement(layer), slice(-2, None)
    if layer.ndim == 2:
        return place
    rotate, shear = np.asarray(layer.rotate), np.asarray(layer.shear)
    return place | {
        "rotate": rotate[last, last],
        "shear": shear[-1:] if shear.ndim == 1 else shear[last, last],
        "affine": layer.affine.set_slice([layer.ndim - 2, layer.ndim - 1]),
        **{name: place[name][last] for name in ("scale", "translate", "units", "axis_labels")},
    }


def annotation_layers(
    annotations: Sequence[Annotation], name: str, slide_layer: Layer | None = None
) -> list[MutableLayerData]:
    """Return a layer of shapes, and one of points, as far as there are any.

    More than `MOST_SHAPES` polygons and ellipses become a layer of labels.

    Parameters
    ----------
    annotations : sequence of Annotation
        Objects of a slide.
    name : str
        The layers' name.
    slide_layer : Layer, optional
        A layer of the slide, over which they shall lie; without it a pixel is a unit of the world.

    Returns
    -------
    list of (data, attributes, "labels", "shapes" or "points")
        The table of features has the columns `COLUMNS`, and one for each measurement.
    """
    common: dict[str, Any] = {"name": name}
    metadata: dict[str, Any] = {}
    slide = slide_of(slide_layer)
    if slide_layer is not None:
        common |= flat_placement(slide_layer)
        metadata[SLIDE] = None if slide is None else slide.path
    metadata[REST] = _rest(annotations)
    common["metadata"] = metadata
    shapes = [annotation for annotation in annotations if annotation.kind != "points"]
    objects = [annotation for annotation in shapes if annotation.kind in WITH_AREA]
    if len(objects) > MOST_SHAPES:
        shapes = [annotation for annotation in shapes if annotation.kind not in WITH_AREA]
    else:
        objects = []
    points = [annotation for annotation in annotations if annotation.kind == "points"]
    return [
        *([_labels(objects, common, slide)] if objects else []),
        *([_shapes(shapes, common, slide)] if shapes else []),
        *([_points(points, common)] if points else []),
    ]


def _shapes(
    annotations: Sequence[Annotation], common: Mapping[str, Any], slide: Slide | None
) -> MutableLayerData:
    drawn = [
        (annotation, piece)
        for annotation in annotations
        for piece in (annotation.rings if annotation.kind == "line" else [None])
    ]
    shapes = [_shape(annotation, piece) for annotation, piece in drawn]
    ends = np.array([edge for outline, _ in shapes for edge in (outline.min(0), outline.max(0))])
    side = np.ptp(ends, axis=0).max() if slide is None else max(slide.dimensions)
    of = [annotation for annotation, _ in drawn]
    edges = _edge_colors(of)
    attributes = {
        **common,
        "shape_type": [kind for _, kind in shapes],
        "edge_color": edges,
        "edge_width": max(float(side) * OF_ALL, 1.0),
        "face_color": np.concatenate([edges[:, :3], np.full((len(of), 1), LIGHT / 255)], axis=1),
        "features": _table(of),
    }
    return [outline for outline, _ in shapes], attributes, "shapes"


def _labels(
    annotations: Sequence[Annotation], common: Mapping[str, Any], slide: Slide | None
) -> MutableLayerData:
    size = None if slide is None else slide.dimensions
    levels, attributes, numbers = object_labels(annotations, size, RED)
    attributes |= {
        **common,
        "features": {"index": numbers, **_table(annotations)},
        "metadata": {**common["metadata"], OBJECTS: tuple(annotations)},
    }
    return levels, attributes, "labels"


def _points(annotations: Sequence[Annotation], common: Mapping[str, Any]) -> MutableLayerData:
    spots = [
        (annotation, spot)
        for annotation in annotations
        for ring in annotation.rings
        for spot in ring
    ]
    of = [annotation for annotation, _ in spots]
    attributes = {
        **common,
        "face_color": _edge_colors(of),
        "border_color": "white",
        "size": POINT,
        "canvas_size_limits": (SMALLEST_POINT, 10_000),
        "features": _table(of),
    }
    return np.array([spot for _, spot in spots])[:, ::-1] - CENTRE, attributes, "points"


def _shape(annotation: Annotation, piece: NDArray[Any] | None) -> tuple[NDArray[Any], str]:
    if piece is not None:
        return piece[:, ::-1] - CENTRE, "path" if len(piece) > 2 else "line"
    if annotation.kind == "ellipse":
        [outline] = annotation.rings
        (left, top), (right, bottom) = outline.min(axis=0), outline.max(axis=0)
        corners = np.array([[top, left], [top, right], [bottom, right], [bottom, left]])
        return corners - CENTRE, "ellipse"
    return joined(annotation.rings)[:, ::-1] - CENTRE, "polygon"


def _edge_colors(annotations: Sequence[Annotation]) -> NDArray[Any]:
    colors = [(*(annotation.color or RED), 255) for annotation in annotations]
    return np.array(colors) / 255


def _table(annotations: Sequence[Annotation]) -> dict[str, Any]:
    columns: dict[str, Any] = {
        CLASS: [annotation.classification for annotation in annotations],
        NAME: [annotation.name for annotation in annotations],
        TYPE: [annotation.object_type for annotation in annotations],
        LOCKED: [annotation.locked for annotation in annotations],
        ID: [annotation.id for annotation in annotations],
    }
    keys = dict.fromkeys(key for annotation in annotations for key in annotation.measurements)
    for key in keys:
        if key not in COLUMNS:
            columns[key] = [each.measurements.get(key, np.nan) for each in annotations]
    return columns


def _rest(annotations: Sequence[Annotation]) -> dict[str, tuple[Any, Any]]:
    return {
        annotation.id: (annotation.nucleus, annotation.extra)
        for annotation in annotations
        if annotation.id and (annotation.nucleus or annotation.extra)
    }


def drawing_layer(viewer: Viewer, slide_layer: Layer, slide: Slide, *, points: bool) -> Layer:
    """Add an empty layer for shapes or points of a slide, over the layer that shows it."""
    attributes: dict[str, Any] = {
        "name": f"{slide_name(slide)} {'points' if points else 'annotations'}",
        "ndim": 2,
        "metadata": {SLIDE: slide.path},
        "features": {CLASS: np.array([], object), NAME: np.array([], object)},
        "feature_defaults": {CLASS: "", NAME: ""},
        **flat_placement(slide_layer),
    }
    if points:
        limits = (SMALLEST_POINT, 10_000)
        return viewer.add_points(
            **attributes, size=POINT, border_color="white", canvas_size_limits=limits
        )
    return viewer.add_shapes(**attributes)


# From layers


def annotation_layers_of(viewer: Viewer, slide: Slide) -> list[Layer]:
    """Return the layers of shapes, points and drawn objects that belong to a slide.

    A layer that says nothing of a slide belongs to the only one there is.
    """
    slides = {slide_of(layer) for layer in viewer.layers} - {None}
    return [
        layer
        for layer in viewer.layers
        if (layer.metadata.get(SLIDE) == slide.path or (_is_free(layer) and len(slides) == 1))
        and (isinstance(layer, Shapes | Points) or OBJECTS in layer.metadata)
        and FOR_EXPORT not in layer.metadata
    ]


def _is_free(layer: Layer) -> bool:
    return SLIDE not in layer.metadata


def slide_layer_for(viewer: Viewer | None, attributes: Mapping[str, Any]) -> Layer | None:
    """Return the layer of the slide that a layer's annotations lie on; None if there is no slide.

    That is the one they were made for, or the active one, or the only one.

    Raises
    ------
    AnnotationError
        If it could be any of several.
    """
    if viewer is None:
        return None
    shown = [layer for layer in viewer.layers if slide_of(layer) is not None]
    by_path = {_path(layer): layer for layer in reversed(shown)}
    said = (attributes.get("metadata") or {}).get(SLIDE)
    if said in by_path:
        return by_path[said]
    active = viewer.layers.selection.active
    if active in shown:
        return active
    if len(by_path) > 1:
        raise AnnotationError(
            f"Several slides are open, and the layer '{attributes.get('name')}' could belong to "
            "any; select the layer of its slide, and export by the dock Annotations."
        )
    return shown[0] if shown else None


def _path(layer: Layer) -> str:
    slide: Any = slide_of(layer)
    return str(slide.path)


def to_pixels(
    viewer: Viewer | None, attributes: Mapping[str, Any], ndim: int, slide_layer: Layer | None
) -> ToPixels:
    """Return what turns data coordinates of a layer with such attributes into a slide's pixels."""
    if viewer is None or slide_layer is None:
        return lambda points: np.asarray(points, np.float64)[:, -2:]
    place = {name: attributes[name] for name in PLACEMENT if attributes.get(name) is not None}
    stand_in = Points(ndim=ndim, **place)
    return lambda points: on_slide(viewer, stand_in, slide_layer, np.asarray(points, np.float64))


def annotations_of(data: LayerData, pixels_of: ToPixels) -> list[Annotation]:
    """Return the objects of a layer's data tuple, as `Layer.as_layer_data_tuple` gives it.

    Parameters
    ----------
    data : (data, attributes, "shapes" or "points" or "labels")
        Points of the same id, or without one of the same class and name, are one object.
    pixels_of : callable
        What `to_pixels` returned.

    Raises
    ------
    AnnotationError
        If it is another kind of layer, or labels of more than two axes or too many pixels.
    """
    content, attributes, kind = data
    if kind == "shapes":
        return _of_shapes(content, attributes, pixels_of)
    if kind == "points":
        return _of_points(np.asarray(content), attributes, pixels_of)
    if kind == "labels":
        return _of_labels(content, attributes, pixels_of)
    raise AnnotationError(
        f"The layer '{attributes.get('name')}' holds no shapes, points or labels; choose one that "
        "does."
    )


def shape_annotations(
    vertices: Sequence[Any], types: Sequence[str], pixels_of: ToPixels, rows: Any = None
) -> list[Annotation]:
    """Return shapes as objects.

    Parameters
    ----------
    vertices : sequence of ndarray, shape (vertices, axes)
        As `Shapes.data`.
    types : sequence of str
        As `Shapes.shape_type`.
    pixels_of : callable
        What `to_pixels` returned.
    rows : sequence of dict, optional
        What else is said of each.
    """
    if not len(vertices):
        return []
    ends = np.cumsum([len(each) for each in vertices])[:-1]
    moved = np.split(pixels_of(np.concatenate(vertices))[:, ::-1] + CENTRE, ends)
    return [
        Annotation(*_outline(kind, outline), **row)
        for kind, outline, row in zip(types, moved, rows or [{}] * len(moved), strict=True)
    ]


def _of_shapes(
    content: Sequence[Any], attributes: Mapping[str, Any], pixels_of: ToPixels
) -> list[Annotation]:
    types = attributes["shape_type"]
    types = [types] * len(content) if isinstance(types, str) else [str(each) for each in types]
    rows = _rows(attributes, len(content), "edge_color")
    return shape_annotations(content, types, pixels_of, rows)


def _outline(kind: str, vertices: NDArray[Any]) -> tuple[Kind, tuple[NDArray[Any], ...]]:
    if kind in ("line", "path"):
        return "line", (vertices,)
    if kind == "ellipse":
        sides = vertices[1] - vertices[0], vertices[3] - vertices[0]
        upright = all(min(abs(side)) <= 1e-3 * max(abs(side)) for side in sides)
        return "ellipse" if upright else "polygon", (ellipse(vertices, ELLIPSE_VERTICES),)
    return "polygon", tuple(split(vertices))


def _of_points(
    content: NDArray[Any], attributes: Mapping[str, Any], pixels_of: ToPixels
) -> list[Annotation]:
    if not len(content):
        return []
    moved = pixels_of(content)[:, ::-1] + CENTRE
    rows = _rows(attributes, len(content), "face_color", unique=False)
    together: dict[Any, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        key = row["id"] or (row["classification"], row["name"], row["object_type"])
        together[key].append(index)
    return [Annotation("points", (moved[found],), **rows[found[0]]) for found in together.values()]


def _of_labels(
    content: Any, attributes: Mapping[str, Any], pixels_of: ToPixels
) -> list[Annotation]:
    objects = (attributes.get("metadata") or {}).get(OBJECTS)
    if objects:
        return _moved(objects, pixels_of)
    if attributes.get("multiscale"):
        content = content[0]
    if content.ndim == 2 and content.shape[0] * content.shape[1] > MOST_PIXELS:
        raise AnnotationError(
            f"The labels '{attributes.get('name')}' have {content.size:,} pixels, too many to be "
            "traced at once; make a labels layer of a coarser level."
        )
    found = outlines(np.asarray(content))
    said = attributes.get("features")
    known = {} if said is None or "index" not in said else said.set_index("index").to_dict("index")
    colormap = attributes.get("colormap")
    annotations = []
    for label, rings in sorted(found.items()):
        moved = tuple(pixels_of(ring[:, ::-1] - CENTRE)[:, ::-1] + CENTRE for ring in rings)
        row = known.get(label, {})
        color = None if colormap is None else _bytes(np.ravel(colormap.map(label)))
        annotations.append(
            Annotation(
                "polygon",
                moved,
                name=_text(row.get(NAME)) or str(label),
                classification=_text(row.get(CLASS)),
                color=color,
                object_type="detection",
            )
        )
    return annotations


def _moved(annotations: Sequence[Annotation], pixels_of: ToPixels) -> list[Annotation]:
    """Return objects where their layer lies now."""
    rings = [ring for annotation in annotations for ring in annotation.rings]
    ends = np.cumsum([len(ring) for ring in rings])[:-1]
    vertices = np.concatenate(rings)
    moved = pixels_of(vertices[:, ::-1] - CENTRE)[:, ::-1] + CENTRE
    if np.allclose(moved, vertices, rtol=0, atol=SAME):
        return list(annotations)
    found = iter(np.split(moved, ends))
    return [
        replace(annotation, rings=tuple(next(found) for _ in annotation.rings))
        for annotation in annotations
    ]


def _rows(
    attributes: Mapping[str, Any], count: int, color: str, *, unique: bool = True
) -> list[dict[str, Any]]:
    """Return what the table of features, and the colours, say of each object."""
    table = attributes.get("features")
    columns = {} if table is None else {name: list(table[name]) for name in table}
    rest = (attributes.get("metadata") or {}).get(REST, {})
    colors = [_bytes(each) for each in _colors(attributes.get(color), count)]
    measured = [name for name in columns if name not in COLUMNS and _is_number(columns[name])]
    used: set[str] = set()
    rows = []
    for index in range(count):
        said = {name: column[index] for name, column in columns.items()}
        name, classification = _text(said.get(NAME)), _text(said.get(CLASS))
        stated = _text(said.get(ID))
        # napari gives a new shape what the one before has.
        own = "" if unique and stated in used else stated
        used.add(own)
        nucleus, extra = rest.get(own, ((), {}))
        shown = colors[index]
        rows.append(
            {
                "name": name,
                "classification": classification,
                "color": shown if classification or shown != RED else None,
                "object_type": _text(said.get(TYPE)) or "annotation",
                "locked": said.get(LOCKED) in (True, "True"),
                "measurements": {
                    key: float(said[key]) for key in measured if np.isfinite(said[key])
                }
                if own or not stated
                else {},
                "id": own,
                "nucleus": nucleus,
                "extra": extra,
            }
        )
    return rows


def _colors(stated: Any, count: int) -> Iterator[NDArray[Any]]:
    if stated is None:
        return iter(np.tile((1.0, 0, 0, 1), (count, 1)))
    found = transform_color(stated)
    return iter(found if len(found) == count else np.repeat(found[:1], count, axis=0))


def _bytes(color: NDArray[Any]) -> Color:
    red, green, blue = (round(float(value) * 255) for value in color[:3])
    return red, green, blue


def _is_number(column: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float | np.number) for value in column)


def _text(value: Any) -> str:
    """Return a cell of a table as text; cells that nobody filled hold no text."""
    return value if isinstance(value, str) else ""
