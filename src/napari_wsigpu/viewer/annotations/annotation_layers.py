"""Conversion between annotations and napari shapes, points and labels layers."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4, uuid5

import numpy as np
from napari.layers import Labels, Points, Shapes
from napari.utils.colormaps.standardize_color import transform_color

from napari_wsigpu.annotations.annotation import Annotation
from napari_wsigpu.annotations.dicom_annotations import DICOM
from napari_wsigpu.annotations.masks import WITH_AREA
from napari_wsigpu.annotations.rings import ellipse, joined, split
from napari_wsigpu.annotations.tracing import outlines
from napari_wsigpu.model.errors import AnnotationError
from napari_wsigpu.storage.remote.url import file_name
from napari_wsigpu.viewer.annotations.object_labels import object_labels
from napari_wsigpu.viewer.layers.slide_layers import slide_name, slide_of
from napari_wsigpu.viewer.view.region import to_slide

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import UnionType

    from napari import Viewer
    from napari.layers import Layer

    from napari_wsigpu.annotations.annotation import Color, Kind
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.layers.placement import Attributes
    from napari_wsigpu.viewer.view.region import ToPixels

    # Data, attributes and kind, as `Layer.as_layer_data_tuple` returns them.
    LayerData = tuple[Any, Attributes, str]

CLASS, NAME, TYPE, LOCKED, ID = COLUMNS = ("class", "name", "object_type", "locked", "id")
NEW = {NAME: "", TYPE: "annotation", LOCKED: False}  # values of a new object
SLIDE = "slide"
OBJECTS = "objects"  # metadata key: the annotations that a labels layer draws
MOST_SHAPES = 20_000  # napari needs seconds for a layer of this many shapes
MANY = (
    f"Shown as labels, because napari draws more than {MOST_SHAPES:,} outlines too slowly; "
    "exports contain the outlines."
)
PADDING = "padding"  # metadata key: shapes that fill a cell of the grid; see `is_padding`
FOR_EXPORT = "for export"  # metadata key: shapes that select a region, not annotations
REST = "annotations"  # metadata key: properties without a table column, by id
PARTS = "parts"  # metadata key: number of rings of each object that has several, by id
DRAWN = "drawn"  # metadata key: UUID from which objects without an id of their own derive one
CODES = "codes"  # metadata key: `extra` with the DICOM codes of each class
RED: Color = (255, 0, 0)  # color of objects without a class, as in QuPath
RIM = 0.5  # brightness of the border of a point, relative to the point
LIGHT = 0x26  # opacity of fills, out of 255, which keeps the slide visible
ELLIPSE_VERTICES = 128
CENTER = 0.5  # napari's origin is the center of the first pixel, QuPath's its corner
OF_ALL = 1 / 500  # width of outlines relative to the slide, until the zoom is known
POINT, SMALLEST_POINT = 20, 14  # size in pixels of level 0, and smallest size on screen
TRIDENT = "_patches"  # ending of the names of TRIDENT's files of coordinates
MOST_PIXELS = 1 << 28
SAME = 1e-3  # pixels
PAINTS = ("paint", "fill", "erase", "polygon")  # modes of labels
PLACEMENT = ("scale", "translate", "rotate", "shear", "affine", "units", "axis_labels")


def placement(layer: Layer) -> Attributes:
    """Return the attributes that align another layer's data with a layer's pixels of level 0."""
    return {name: getattr(layer, name) for name in PLACEMENT}


def flat_placement(layer: Layer) -> Attributes:
    """Return `placement` for two-dimensional data, which is shown on all planes of a slide."""
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


def image_placement(
    layer: Layer, step: tuple[float, float], corner: tuple[float, float] = (0, 0)
) -> Attributes:
    """Return the attributes that place an image with larger pixels on a slide's layer.

    Parameters
    ----------
    layer : Layer
        A layer of the slide.
    step, corner : tuple of float
        Size of a pixel and position of the upper left corner, (x, y) in pixels of level 0.
    """
    # napari places a layer by the center of its first pixel.
    first = np.zeros(layer.ndim)
    first[-2:] = np.array(corner[::-1]) + (np.array(step[::-1]) - 1) / 2
    place = layer.affine.inverse(layer.data_to_world(first))
    scale = np.array(layer.scale)[-2:] * step[::-1]
    return flat_placement(layer) | {"scale": scale, "translate": place[-2:]}


def layer_name(slide: Slide | None, title: str, kind: str) -> str:
    """Return a layer's name: its slide, the part of a title that adds to it, and what it holds."""
    name = "" if slide is None else slide_name(slide)
    if slide is not None:
        title = title.replace(file_name(slide.path), name)
    extends = title.startswith(name) and not title[len(name) : len(name) + 1].isalnum()
    rest = title[len(name) :].strip(" _-.") if extends else title
    return " ".join(part for part in (name, rest.removesuffix(kind).rstrip(" _-."), kind) if part)


def annotation_layers(
    annotations: Sequence[Annotation], name: str, slide_layer: Layer | None = None
) -> list[LayerData]:
    """Return the data of a shapes layer and a points layer, leaving out empty layers.

    More than `MOST_SHAPES` polygons and ellipses become a labels layer.

    Parameters
    ----------
    annotations : sequence of Annotation
        Annotations of a slide.
    name : str
        A title for the layers, such as the file's name. Their names also state the slide.
    slide_layer : Layer, optional
        A layer of the slide to place them on; without it, world units are pixels.

    Returns
    -------
    list of (data, attributes, "labels", "shapes" or "points")
        The features have the columns `COLUMNS` and one column per measurement.
    """
    annotations = _with_ids(annotations)
    common: Attributes = {"name": name}
    metadata: Attributes = {}
    slide = slide_of(slide_layer)
    if slide_layer is not None:
        common |= flat_placement(slide_layer)
        metadata[SLIDE] = None if slide is None else slide.path
    metadata[REST], metadata[DRAWN] = _rest(annotations), uuid4().hex
    metadata[PARTS] = {each.id: len(each.rings) for each in annotations if len(each.rings) > 1}
    metadata[CODES] = {
        each.classification: {DICOM: each.extra[DICOM]}
        for each in annotations
        if DICOM in each.extra
    }
    common["metadata"] = metadata
    of_points = dict(common)
    common["name"] = layer_name(slide, name, "annotations")
    of_points["name"] = layer_name(slide, name, "points")
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
        *([_points(points, of_points)] if points else []),
    ]


def _with_ids(annotations: Iterable[Annotation]) -> list[Annotation]:
    """Give an id to objects without one, and to those whose id an earlier object has.

    Properties without a table column are found by the id, which is the same in every export.
    """
    used: set[str] = set()
    found = []
    for each in annotations:
        is_own = each.id and each.id not in used
        found.append(each if is_own else replace(each, id=str(uuid4())))
        used.add(found[-1].id)
    return found


def _shapes(
    annotations: Sequence[Annotation], common: Attributes, slide: Slide | None
) -> LayerData:
    drawn = [
        (annotation, ring)
        for annotation in annotations
        for ring in (annotation.rings if annotation.kind == "line" else [None])
    ]
    shapes = [_shape(annotation, ring) for annotation, ring in drawn]
    ends = np.array([edge for outline, _ in shapes for edge in (outline.min(0), outline.max(0))])
    side = np.ptp(ends, axis=0).max() if slide is None else max(slide.dimensions)
    owners = [annotation for annotation, _ in drawn]
    edges = _edge_colors(owners)
    attributes = {
        **common,
        "shape_type": [kind for _, kind in shapes],
        "edge_color": edges,
        "edge_width": max(float(side) * OF_ALL, 1.0),
        "face_color": np.concatenate([edges[:, :3], np.full((len(edges), 1), LIGHT / 255)], axis=1),
        "features": _table(owners),
    }
    return [outline for outline, _ in shapes], attributes, "shapes"


def _labels(
    annotations: Sequence[Annotation], common: Attributes, slide: Slide | None
) -> LayerData:
    size = None if slide is None else slide.dimensions
    levels, attributes, numbers = object_labels(annotations, size, RED)
    attributes |= {
        **common,
        "features": {"index": numbers, **_table(annotations)},
        "metadata": {**common["metadata"], OBJECTS: tuple(annotations)},
    }
    return levels, attributes, "labels"


def _points(annotations: Sequence[Annotation], common: Attributes) -> LayerData:
    spots = [
        (annotation, spot)
        for annotation in annotations
        for ring in annotation.rings
        for spot in ring
    ]
    owners = [annotation for annotation, _ in spots]
    colors = _edge_colors(owners)
    attributes = {
        **common,
        "face_color": colors,
        "border_color": rims(colors),
        "size": POINT,
        "canvas_size_limits": (SMALLEST_POINT, 10_000),
        "features": _table(owners),
    }
    return np.array([spot for _, spot in spots])[:, ::-1] - CENTER, attributes, "points"


def _shape(annotation: Annotation, ring: Array | None) -> tuple[Array, str]:
    if ring is not None:
        return ring[:, ::-1] - CENTER, "path" if len(ring) > 2 else "line"
    if annotation.kind == "ellipse":
        [outline] = annotation.rings
        (left, top), (right, bottom) = outline.min(axis=0), outline.max(axis=0)
        corners = np.array([[top, left], [top, right], [bottom, right], [bottom, left]])
        return corners - CENTER, "ellipse"
    kind = "rectangle" if _is_rectangle(annotation.rings) else "polygon"
    return joined(annotation.rings)[:, ::-1] - CENTER, kind


def _is_rectangle(rings: Sequence[Array]) -> bool:
    """Return whether an outline is an upright rectangle, as napari draws and other tools write."""
    if len(rings) != 1 or len(rings[0]) != 4:
        return False
    sides = np.diff(rings[0], axis=0, append=rings[0][:1]) != 0
    # Each side changes only one coordinate, and the next side the other one.
    return bool((sides.sum(axis=1) == 1).all() and (sides[:, 0] != np.roll(sides[:, 0], 1)).all())


def _edge_colors(annotations: Sequence[Annotation]) -> Array:
    colors = [(*(annotation.color or RED), 255) for annotation in annotations]
    return np.array(colors) / 255


def rims(colors: Array) -> Array:
    """Return darker shades of RGBA colors, for points.

    vispy fills half of the smallest points with the border, so it has to show the color, too.
    """
    return colors * (*[RIM] * 3, 1)


def _table(annotations: Sequence[Annotation]) -> Attributes:
    columns: Attributes = {
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


def _rest(
    annotations: Sequence[Annotation],
) -> dict[str, tuple[tuple[Array, ...], Mapping[str, object], Array]]:
    """Return nucleus, further properties and box of annotations, by id."""
    return {
        annotation.id: (annotation.nucleus, annotation.extra, _box(annotation))
        for annotation in annotations
        if annotation.nucleus or annotation.extra
    }


def _box(annotation: Annotation) -> Array:
    points = np.concatenate(annotation.rings)
    return np.stack([points.min(axis=0), points.max(axis=0)])


def is_padding(layer: Layer) -> bool:
    """Whether a layer only fills a cell of the grid, and nothing has been drawn in it."""
    return PADDING in layer.metadata and not len(layer.data)


def layer_to_draw_in(layers: Iterable[Layer], kind: type | UnionType) -> Layer | None:
    """Return the last layer of a kind; one that fills a cell of the grid is the last resort."""
    suitable = [each for each in layers if isinstance(each, kind)]
    drawn = [each for each in suitable if not is_padding(each)]
    return next(reversed(drawn or suitable), None)


def drawing_layer(viewer: Viewer, slide_layer: Layer, slide: Slide, *, points: bool) -> Layer:
    """Add an empty layer for shapes or points above a slide's layer."""
    attributes: Attributes = {
        "name": f"{slide_name(slide)} {'points' if points else 'annotations'}",
        "ndim": 2,
        "metadata": {SLIDE: slide.path, DRAWN: uuid4().hex},
        "features": {column: np.array([], object) for column in (CLASS, NAME, ID)},
        "feature_defaults": {CLASS: "", NAME: "", ID: ""},
        **flat_placement(slide_layer),
    }
    if points:
        limits = (SMALLEST_POINT, 10_000)
        return viewer.add_points(**attributes, size=POINT, canvas_size_limits=limits)
    return viewer.add_shapes(**attributes)


# From layers


def annotation_layers_of(viewer: Viewer, path: str) -> list[Layer]:
    """Return the shapes, points and labels layers that hold annotations of the slide at `path`.

    A layer without a slide in its metadata belongs to the slide if no other one is open.
    """
    slides = {_path(layer) for layer in viewer.layers} - {""}
    return [
        layer
        for layer in viewer.layers
        if (layer.metadata.get(SLIDE) == path or (_is_free(layer) and slides == {path}))
        and holds_annotations(layer)
    ]


def contents_of(
    viewer: Viewer, path: str, others: Iterable[Layer] = ()
) -> list[tuple[LayerData, ToPixels]]:
    """Copy a slide's layers of annotations, and other given layers, for `annotations_in`."""
    slide_layer = next((each for each in viewer.layers if _path(each) == path), None)
    found = []
    for layer in dict.fromkeys([*annotation_layers_of(viewer, path), *others]):
        data = layer.as_layer_data_tuple()
        found.append((data, to_pixels(viewer, data[1], layer.ndim, slide_layer)))
    return found


def annotations_in(contents: Iterable[tuple[LayerData, ToPixels]]) -> list[Annotation]:
    """Convert the result of `contents_of`, perhaps in another thread."""
    return [each for data, pixels_of in contents for each in annotations_of(data, pixels_of)]


def set_new_objects(
    layer: Shapes | Points, texts: Mapping[str, str], colors: Mapping[str, Any]
) -> None:
    """Set texts of new objects, by column of the features, and colors, by part of the object."""
    defaults = {name: values.iloc[0] for name, values in layer.feature_defaults.items()}
    # By default, new objects would take the values of the last one, perhaps a locked detection,
    # with its identity and measurements.
    new = {**NEW, ID: "" if isinstance(layer, Points) else str(uuid4())}
    own = {
        name: new.get(name, np.nan)
        for name, value in defaults.items()
        if name in new or (name not in COLUMNS and _is_number([value]))
    }
    layer.feature_defaults = {**defaults, **own, **texts}
    with layer.block_update_properties():
        for part, color in colors.items():
            setattr(layer, f"current_{part}_color", color)


def colored_parts(layer: Shapes | Points) -> tuple[str, ...]:
    """Return the parts of objects whose colors show their class."""
    return ("face", "border") if isinstance(layer, Points) else ("edge", "face")


def draws(layer: Layer) -> bool:
    """Whether a press of the mouse changes the layer by drawing."""
    mode = str(layer.mode)
    if isinstance(layer, Labels):
        return mode in PAINTS
    return isinstance(layer, Shapes | Points) and mode.startswith("add")


def holds_annotations(layer: Layer) -> bool:
    """Whether a layer is for annotations of any slide."""
    is_for_them = isinstance(layer, Shapes | Points) or OBJECTS in layer.metadata
    return is_for_them and FOR_EXPORT not in layer.metadata


def _is_free(layer: Layer) -> bool:
    return SLIDE not in layer.metadata


def slide_layer_for(
    viewer: Viewer | None, attributes: Attributes, file_name: str = ""
) -> Layer | None:
    """Return a layer of the slide that annotations belong to; None if no slide is open.

    This is the slide in the annotations' metadata, else the slide of the active layer (which may
    hold annotations or a heat map), else the only visible slide, else the only one. A file that
    bears the name of one open slide, as `file_name` passes it, belongs to that slide.

    Parameters
    ----------
    viewer : Viewer or None
        The viewer.
    attributes : dict
        Attributes of the annotations' layer.
    file_name : str, optional
        Name of the file that holds the annotations, without its suffix.

    Raises
    ------
    AnnotationError
        If several slides are possible.
    """
    if viewer is None:
        return None
    shown = [layer for layer in viewer.layers if slide_of(layer) is not None]
    by_path = {_path(layer): layer for layer in reversed(shown)}
    path = (attributes.get("metadata") or {}).get(SLIDE)
    if path in by_path:
        return by_path[path]
    namesakes = [layer for layer in by_path.values() if _is_named(layer, file_name)]
    if len(namesakes) == 1:
        return namesakes[0]
    active = viewer.layers.selection.active
    if active in shown:
        return active
    if active is not None and active.metadata.get(SLIDE) in by_path:
        return by_path[active.metadata[SLIDE]]
    visible = {_path(layer) for layer in shown if layer.visible}
    found = [by_path[path] for path in visible or by_path]
    if len(found) > 1:
        raise AnnotationError(
            f"'{attributes.get('name')}' could belong to any of several open slides; show only its "
            "slide, and try again."
        )
    return found[0] if found else None


def _is_named(layer: Layer, name: str) -> bool:
    slide = slide_of(layer)
    return slide is not None and slide_name(slide) in (name, name.removesuffix(TRIDENT))


def _path(layer: Layer) -> str:
    slide = slide_of(layer)
    return "" if slide is None else slide.path


def to_pixels(
    viewer: Viewer | None, attributes: Attributes, ndim: int, slide_layer: Layer | None
) -> ToPixels:
    """Return a function from a layer's data coordinates to pixels of a slide."""
    if viewer is None or slide_layer is None:
        return lambda points: np.asarray(points, np.float64)[:, -2:]
    place = {name: attributes[name] for name in PLACEMENT if attributes.get(name) is not None}
    stand_in = Points(ndim=ndim, **place)
    return to_slide(viewer, stand_in, slide_layer)


def annotations_of(data: LayerData, pixels_of: ToPixels) -> list[Annotation]:
    """Return the annotations in a layer's data tuple, as from `Layer.as_layer_data_tuple`.

    Parameters
    ----------
    data : (data, attributes, "shapes" or "points" or "labels")
        Points with the same id, class, name and type form one object; so do points without ids.
    pixels_of : callable
        The function that `to_pixels` returns.

    Raises
    ------
    AnnotationError
        If the layer is of another kind, or its labels do not have two axes or are too large.
    """
    content, attributes, kind = data
    if kind == "shapes":
        return _of_shapes(content, attributes, pixels_of)
    if kind == "points":
        return _of_points(np.asarray(content), attributes, pixels_of)
    if kind == "labels":
        return _of_labels(content, attributes, pixels_of)
    raise AnnotationError(
        f"The layer '{attributes.get('name')}' holds no shapes, points or labels; choose another "
        "layer."
    )


def shape_annotations(
    vertices: Sequence[Array],
    types: Sequence[str],
    pixels_of: ToPixels,
    rows: Sequence[Attributes] = (),
) -> list[Annotation]:
    """Convert shapes to annotations.

    Parameters
    ----------
    vertices : sequence of ndarray, shape (vertices, axes)
        Vertices as in `Shapes.data`.
    types : sequence of str
        Types as in `Shapes.shape_type`.
    pixels_of : callable
        The function that `to_pixels` returns.
    rows : sequence of dict, optional
        Further fields of each annotation.
    """
    if not len(vertices):
        return []
    ends = np.cumsum([len(each) for each in vertices])[:-1]
    moved = np.split(pixels_of(np.concatenate(vertices))[:, ::-1] + CENTER, ends)
    return [
        Annotation(*_outline(kind, outline), **row)
        for kind, outline, row in zip(types, moved, rows or [{}] * len(moved), strict=True)
    ]


def _of_shapes(
    content: Sequence[Array], attributes: Attributes, pixels_of: ToPixels
) -> list[Annotation]:
    types = attributes["shape_type"]
    types = [types] * len(content) if isinstance(types, str) else [str(each) for each in types]
    rows = _rows(attributes, len(content), "edge_color")
    found = shape_annotations(content, types, pixels_of, rows)
    metadata = attributes.get("metadata") or {}
    rest, parts = metadata.get(REST, {}), metadata.get(PARTS, {})
    stated = map(_text, _columns(attributes).get(ID, [""] * len(content)))
    objects: list[Annotation] = []
    lines: dict[str, int] = {}  # index of the object of each line of several parts
    for each, id_ in zip(found, stated, strict=True):
        whole = objects[lines[id_]] if id_ in lines else None
        if (
            whole is not None
            and len(whole.rings) < parts[id_]
            and (each.kind, each.classification, each.name)
            == (whole.kind, whole.classification, whole.name)
        ):
            objects[lines[id_]] = replace(whole, rings=(*whole.rings, *each.rings))
            continue
        if each.kind == "line" and id_ in parts:
            lines.setdefault(id_, len(objects))
        objects.append(_with_nucleus(each, rest[each.id][2]) if each.nucleus else each)
    return objects


def _with_nucleus(cell: Annotation, before: Array) -> Annotation:
    """Return a cell with its nucleus, moved and scaled as the box of the cell has been."""
    now = _box(cell)
    if np.allclose(before, now, rtol=0, atol=SAME):
        return cell
    scale = np.ptp(now, axis=0) / np.maximum(np.ptp(before, axis=0), SAME)
    return replace(
        cell, nucleus=tuple((ring - before[0]) * scale + now[0] for ring in cell.nucleus)
    )


def _outline(kind: str, vertices: Array) -> tuple[Kind, tuple[Array, ...]]:
    if kind in ("line", "path"):
        return "line", (vertices,)
    if kind == "ellipse":
        sides = vertices[1] - vertices[0], vertices[3] - vertices[0]
        upright = all(min(abs(side)) <= 1e-3 * max(abs(side)) for side in sides)
        return "ellipse" if upright else "polygon", (ellipse(vertices, ELLIPSE_VERTICES),)
    return "polygon", tuple(split(vertices))


def _of_points(content: Array, attributes: Attributes, pixels_of: ToPixels) -> list[Annotation]:
    if not len(content):
        return []
    moved = pixels_of(content)[:, ::-1] + CENTER
    columns = _columns(attributes)
    texts = [map(_text, columns.get(name, [""] * len(content))) for name in (ID, CLASS, NAME, TYPE)]
    objects = list(zip(*texts, strict=True))
    # If some points of an object were changed, its larger part keeps the identity.
    owners = {key[0]: key for key, _ in reversed(Counter(objects).most_common())}
    owns = [owners[key[0]] == key or not key[0] for key in objects]
    rows = _rows(attributes, len(content), "face_color", owns)
    by_object: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, key in enumerate(objects):
        by_object[key].append(index)
    drawn = (attributes.get("metadata") or {}).get(DRAWN)
    for key, found in by_object.items():
        if not (key[0] and owns[found[0]]):
            rows[found[0]]["id"] = _derived(drawn, *key)
    return [Annotation("points", (moved[found],), **rows[found[0]]) for found in by_object.values()]


def _of_labels(content: Array, attributes: Attributes, pixels_of: ToPixels) -> list[Annotation]:
    objects = (attributes.get("metadata") or {}).get(OBJECTS)
    if objects:
        return _moved(objects, pixels_of)
    if attributes.get("multiscale"):
        content = content[0]
    if content.ndim == 2 and content.shape[0] * content.shape[1] > MOST_PIXELS:
        raise AnnotationError(
            f"The labels '{attributes.get('name')}' have {content.size:,} pixels, too many to "
            "trace; create a labels layer at a coarser level."
        )
    found = outlines(np.asarray(content))
    rows = attributes.get("features")
    known = {} if rows is None or "index" not in rows else rows.set_index("index").to_dict("index")
    colormap = attributes.get("colormap")
    annotations = []
    for label, rings in sorted(found.items()):
        moved = tuple(pixels_of(ring[:, ::-1] - CENTER)[:, ::-1] + CENTER for ring in rings)
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
    """Move annotations to the current position of their layer."""
    rings = [ring for annotation in annotations for ring in annotation.rings]
    ends = np.cumsum([len(ring) for ring in rings])[:-1]
    vertices = np.concatenate(rings)
    moved = pixels_of(vertices[:, ::-1] - CENTER)[:, ::-1] + CENTER
    if np.allclose(moved, vertices, rtol=0, atol=SAME):
        return list(annotations)
    found = iter(np.split(moved, ends))
    return [
        replace(annotation, rings=tuple(next(found) for _ in annotation.rings))
        for annotation in annotations
    ]


def _derived(drawn: str | None, *parts: object) -> str:
    """Return an id that is the same in each file, for an object without one."""
    return str(uuid5(UUID(drawn), repr(parts))) if drawn else ""


def _columns(attributes: Attributes) -> dict[str, list[Any]]:
    table = attributes.get("features")
    return {} if table is None else {name: list(table[name]) for name in table}


def _rows(
    attributes: Attributes, count: int, color: str, owns: Sequence[bool] = ()
) -> list[Attributes]:
    """Return the fields of each annotation, from the table of features and the colors.

    owns: whether each object keeps its id, and what belongs to it; by default, the first with it.
    """
    columns = _columns(attributes)
    metadata = attributes.get("metadata") or {}
    rest, codes, drawn = metadata.get(REST, {}), metadata.get(CODES, {}), metadata.get(DRAWN)
    colors = [_bytes(each) for each in _colors(attributes.get(color), count)]
    measured = [name for name in columns if name not in COLUMNS and _is_number(columns[name])]
    used = Counter[str]()
    rows = []
    for index in range(count):
        cells = {name: column[index] for name, column in columns.items()}
        name, classification = _text(cells.get(NAME)), _text(cells.get(CLASS))
        stated = _text(cells.get(ID))
        # napari copies features to a new shape; a repeated id belongs to the first shape.
        own = stated if (owns[index] if owns else stated not in used) else ""
        used[stated] += 1
        nucleus, extra, _ = rest.get(own, ((), {}, None))
        shown = colors[index]
        rows.append(
            {
                "name": name,
                "classification": classification,
                "color": shown if classification or shown != RED else None,
                "object_type": _text(cells.get(TYPE)) or "annotation",
                "locked": cells.get(LOCKED) in (True, "True"),
                "measurements": {
                    key: float(cells[key]) for key in measured if np.isfinite(cells[key])
                }
                if own or not stated
                else {},
                "id": own or _derived(drawn, stated, used[stated]) if stated else "",
                "nucleus": nucleus,
                "extra": {**codes.get(classification, {}), **extra},
            }
        )
    return rows


def _colors(stated: object, count: int) -> Iterator[Array]:
    if stated is None:
        return iter(np.tile((1.0, 0, 0, 1), (count, 1)))
    found = transform_color(stated)
    return iter(found if len(found) == count else np.repeat(found[:1], count, axis=0))


def _bytes(color: Array) -> Color:
    red, green, blue = (round(float(value) * 255) for value in color[:3])
    return red, green, blue


def _is_number(column: Sequence[object]) -> bool:
    return all(isinstance(value, int | float | np.number) for value in column)


def _text(value: object) -> str:
    """Return the text of a table's cell; an empty cell may hold None or NaN instead."""
    return value if isinstance(value, str) else ""
