"""GeoJSON as QuPath reads and writes it: one feature an object, in pixels of level 0."""

from __future__ import annotations

import gzip
import json
import math
import os
import stat
import uuid
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.annotations.annotation import Annotation
from napari_wsigpu.annotations.rings import polygons
from napari_wsigpu.model.errors import (
    AnnotationError,
    SlideError,
    TargetWriteError,
    file_error,
)
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.units import byte_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.annotations.annotation import Color, Kind

DIGITS = 2
ENDINGS = (".geojson", ".geojson.gz", ".json")
# What a geometry is, and how deep its coordinates are nested.
GEOMETRIES: dict[str, tuple[Kind, int]] = {
    "Point": ("points", 1),
    "MultiPoint": ("points", 2),
    "LineString": ("line", 2),
    "MultiLineString": ("line", 3),
    "Polygon": ("polygon", 3),
    "MultiPolygon": ("polygon", 4),
}
# Names of the types before QuPath 0.4, which had them as ids before 0.3.
OLD_TYPES = {
    "PathAnnotationObject": "annotation",
    "PathDetectionObject": "detection",
    "PathCellObject": "cell",
    "PathTileObject": "tile",
    "TMACoreObject": "tmaCore",
    "tma_core": "tmaCore",
}
KNOWN = {
    "objectType", "object_type", "type", "name", "color", "classification", "isLocked",
    "measurements", "childObjects", "children",
}  # fmt: skip
DEEPEST = 64
# How many points a shape has at least, and how far from the corner of a slide one can lie.
LEAST = {"points": 1, "line": 2, "polygon": 3}
FARTHEST = 1e12
GZIP, HALF = b"\x1f\x8b", b"\\ud"


def read_geojson(path: str | os.PathLike[str]) -> list[Annotation]:
    """Read the objects of a GeoJSON file, as QuPath exports it.

    Parameters
    ----------
    path : str or PathLike
        A file, which may be compressed by gzip (``.gz``): a FeatureCollection, a list of features,
        a feature or a geometry. Objects within others come after these.

    Returns
    -------
    list of Annotation
        Coordinates are as in the file: pixels of the slide's level 0. What an old version of
        QuPath calls an object otherwise has its new name.

    Raises
    ------
    AnnotationError
        If it holds something else.
    SlideError
        If it can't be read.

    Examples
    --------
    >>> [tumor, *_] = read_geojson("slide.geojson")  # doctest: +SKIP
    >>> tumor.classification, tumor.rings[0]  # doctest: +SKIP
    """
    name = os.fspath(path)
    text = _text_of(name)
    count = _Count(name)
    try:
        found = json.loads(text, object_hook=count.with_arrays)
    except SlideError:
        raise
    except (ValueError, RecursionError, OverflowError, MemoryError) as error:
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else error
        raise AnnotationError(
            f"'{name}' is no GeoJSON ({why}); choose a file that QuPath exported."
        ) from error
    # Halves of characters can be neither shown nor saved; only such an escape makes them.
    may_be_halves = HALF in text.lower()
    del text
    annotations: list[Annotation] = []
    for number, feature in enumerate(_features(found, name)):
        try:
            objects = list(_objects(feature, DEEPEST))
            if may_be_halves:
                for each in objects:
                    _feature_text(each).encode()
        except (
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            OverflowError,
            RecursionError,
        ) as error:
            raise AnnotationError(
                f"'{name}' is no GeoJSON that can be read: of feature {number + 1}, {_said(error)}."
            ) from error
        annotations += objects
    return annotations


def _text_of(name: str) -> bytes:
    """Return what a file holds, unpacked.

    Raises
    ------
    AnnotationError
        If it is no regular file, damaged, or larger than the limits say.
    SlideError
        If it can't be read.
    """
    most = limits.geojson_bytes
    try:
        if not stat.S_ISREG(Path(name).stat().st_mode):  # to open a pipe would wait
            raise AnnotationError(f"'{name}' is no regular file; choose a GeoJSON file.")
        with Path(name).open("rb") as file:
            packed = file.read(2) == GZIP
            file.seek(0)
            text = (gzip.GzipFile(fileobj=file) if packed else file).read(most + 1)
    except SlideError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise AnnotationError(f"'{name}' is damaged ({error}); export it again.") from error
    except OSError as error:
        raise file_error(name, error) from error
    except ValueError as error:  # a path with a null character
        raise AnnotationError(f"{name!r} is no path; choose a GeoJSON file.") from error
    if len(text) > most:
        raise AnnotationError(
            f"'{name}' is a text of more than {byte_size(most)}: {limits.advice('geojson_bytes')}."
        )
    return text


def write_geojson(path: str | os.PathLike[str], annotations: Iterable[Annotation]) -> None:
    """Write objects as a FeatureCollection that QuPath imports (*File > Import objects*).

    Parameters
    ----------
    path : str or PathLike
        The file, which is replaced if it exists; a name that ends with ``.gz`` is compressed.
    annotations : iterable of Annotation
        Objects in pixels of level 0; their coordinates are rounded to 1/100 pixel, as QuPath's
        are. Those without an id get one.

    Raises
    ------
    TargetWriteError
        If the file can't be written; then it is as it was before.

    Examples
    --------
    >>> write_geojson("slide.geojson", annotations)  # doctest: +SKIP
    """
    target = Path(path)
    work = target.with_name(f"{target.name}.part")
    features = ",\n".join(_feature_text(annotation) for annotation in annotations)
    text = f'{{"type":"FeatureCollection","features":[\n{features}\n]}}\n'
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise TargetWriteError(
            f"'{target}' can't be written: a name holds half of a character; correct the names."
        ) from None
    if target.suffix.lower() == ".gz":
        data = gzip.compress(data, mtime=0)
    try:
        work.write_bytes(data)
        work.replace(target)
    except OSError as error:
        work.unlink(missing_ok=True)
        raise TargetWriteError(
            f"'{target}' can't be written ({error.strerror or error}); choose another folder."
        ) from error


# Reading


def _features(found: Any, name: str) -> Sequence[Any]:
    if isinstance(found, dict):
        kind = found.get("type")
        if kind == "FeatureCollection":
            found = found.get("features")
        elif kind == "Feature":
            found = [found]
        elif _geometry_type(found) or kind == "GeometryCollection":
            found = [{"type": "Feature", "geometry": found}]
    if not isinstance(found, list):
        raise AnnotationError(
            f"'{name}' is JSON, but no GeoJSON: it has no features; export objects from QuPath "
            "by File > Export objects as GeoJSON."
        )
    return found


class _Count:
    """Makes arrays of coordinates, and counts what a file holds while it is parsed.

    Parameters
    ----------
    name : str
        The file.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._objects = self._points = 0

    def with_arrays(self, said: dict[str, Any]) -> dict[str, Any]:
        """Make arrays of a geometry's coordinates as soon as they are parsed.

        Lists of all the numbers of a large file would take many times its size, and most of the
        time. What is wrong with them is said later, when it is known of which feature they are.

        Raises
        ------
        AnnotationError
            If there are more objects or points than the limits say.
        """
        kind = _geometry_type(said)
        if kind and isinstance(said.get("coordinates"), list):
            with suppress(TypeError, ValueError, OverflowError):
                rings = tuple(_rings(said["coordinates"], GEOMETRIES[kind][1]))
                said["coordinates"] = rings
                self._points += sum(map(len, rings))
            self._objects += 1
            for what, count in (("objects", self._objects), ("points", self._points)):
                if count > getattr(limits, what):
                    raise AnnotationError(
                        f"'{self._name}' holds more {what} than are read: {limits.advice(what)}."
                    )
        return said


def _geometry_type(said: Mapping[str, Any]) -> str:
    kind = said.get("type")
    return kind if isinstance(kind, str) and kind in GEOMETRIES else ""


def _objects(feature: Any, depth: int) -> Iterator[Annotation]:
    """Yield the object of a feature, and those within it."""
    if not isinstance(feature, dict):
        raise TypeError("which is no object")
    stated = feature.get("properties")
    said = stated if isinstance(stated, dict) else {}
    geometry = feature.get("geometry")
    if geometry is not None:
        for kind, rings in _shapes(geometry, depth):
            yield Annotation(
                kind=kind,
                rings=rings,
                name=str(said.get("name") or ""),
                classification=_class_name(said.get("classification")),
                color=_color(said),
                object_type=_object_type(feature, said),
                locked=bool(said.get("isLocked", False)),
                measurements=_measurements(said.get("measurements")),
                id=_id(feature.get("id")),
                nucleus=_nucleus(feature.get("nucleusGeometry"), depth),
                extra=_extra(feature, said),
            )
    children = said.get("childObjects", said.get("children"))
    if isinstance(children, list) and depth:
        for child in children:
            yield from _objects(child, depth - 1)


def _shapes(geometry: Any, depth: int) -> Iterator[tuple[Kind, tuple[NDArray[np.float64], ...]]]:
    if not isinstance(geometry, dict):
        raise TypeError("the geometry is no object")
    if geometry["type"] == "GeometryCollection" and depth:
        for part in list(geometry["geometries"]):
            yield from _shapes(part, depth - 1)
        return
    name = _geometry_type(geometry)
    if not name:
        raise ValueError(f"its geometry is {geometry['type']!r}, which GeoJSON does not know")
    kind, nested = GEOMETRIES[name]
    rings = geometry["coordinates"]
    if not isinstance(rings, tuple):  # so something is wrong with them
        rings = tuple(_rings(rings, nested))
    if kind == "polygon":
        rings = tuple(map(_open, rings))
    rings = tuple(ring for ring in rings if len(ring) >= LEAST[kind])
    if rings:
        is_ellipse = geometry.get("isEllipse") is True
        yield ("ellipse" if is_ellipse else kind), rings


def _rings(coordinates: Any, depth: int) -> Iterator[NDArray[np.float64]]:
    if not isinstance(coordinates, list):
        raise TypeError("the coordinates are no list")
    if depth > 2:
        for part in coordinates:
            yield from _rings(part, depth - 1)
        return
    found = np.array(coordinates if depth == 2 else [coordinates], np.float64)
    if not found.size:
        return
    if found.ndim != 2 or found.shape[1] < 2 or not np.isfinite(found).all():
        raise ValueError("the coordinates are no pairs of numbers")
    if abs(found).max() > FARTHEST:
        raise ValueError("the coordinates lie beyond any slide")
    yield found[:, :2]


def _open(ring: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a ring without the repetition of its first vertex."""
    return ring[:-1] if len(ring) > 1 and (ring[0] == ring[-1]).all() else ring


def _object_type(feature: Mapping[str, Any], said: Mapping[str, Any]) -> str:
    old = feature.get("id")
    kind = said.get("objectType") or said.get("object_type") or said.get("type")
    kind = str(kind or (old if isinstance(old, str) and old in OLD_TYPES else "annotation"))
    return OLD_TYPES.get(kind, kind)


def _id(stated: Any) -> str:
    try:
        return str(uuid.UUID(str(stated)))
    except ValueError:
        return ""


def _class_name(stated: Any) -> str:
    if isinstance(stated, dict):
        names = stated.get("names")
        if isinstance(names, list) and names:
            return ": ".join(map(str, names))
        return str(stated.get("name") or "")
    return stated if isinstance(stated, str) else ""


def _color(said: Mapping[str, Any]) -> Color | None:
    classed = said.get("classification")
    places = [classed if isinstance(classed, dict) else {}, said]
    for place in places:
        stated = place.get("color", place.get("colorRGB"))
        if isinstance(stated, int):  # packed, as QuPath did before 0.4
            return stated >> 16 & 0xFF, stated >> 8 & 0xFF, stated & 0xFF
        if isinstance(stated, list) and len(stated) >= 3:
            red, green, blue = (min(max(int(value), 0), 255) for value in stated[:3])
            return red, green, blue
    return None


def _measurements(stated: Any) -> dict[str, float]:
    if isinstance(stated, list):  # as before QuPath 0.4
        stated = {each["name"]: each["value"] for each in stated}
    if not isinstance(stated, dict):
        return {}
    return {str(key): float(value) for key, value in stated.items() if value is not None}


def _nucleus(geometry: Any, depth: int) -> tuple[NDArray[np.float64], ...]:
    shapes = [] if geometry is None else _shapes(geometry, depth)
    return tuple(ring for kind, rings in shapes if kind == "polygon" for ring in rings)


def _extra(feature: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    plane = feature["geometry"].get("plane")
    if plane is not None:
        extra["plane"] = plane
    others = {key: value for key, value in said.items() if key not in KNOWN}
    return extra | ({"properties": others} if others else {})


def _said(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "a text holds half of a character"
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


# Writing


def _feature_text(annotation: Annotation) -> str:
    extra = annotation.extra
    geometry = _geometry(annotation)
    if "plane" in extra:
        geometry["plane"] = extra["plane"]
    feature: dict[str, Any] = {
        "type": "Feature",
        "id": annotation.id or str(uuid.uuid4()),
        "geometry": geometry,
    }
    if annotation.nucleus:
        feature["nucleusGeometry"] = _polygon(annotation.nucleus)
    feature["properties"] = _properties(annotation) | extra.get("properties", {})
    return json.dumps(feature, separators=(",", ":"), ensure_ascii=False)


def _properties(annotation: Annotation) -> dict[str, Any]:
    properties: dict[str, Any] = {"objectType": annotation.object_type}
    if annotation.name:
        properties["name"] = annotation.name
    color = None if annotation.color is None else list(annotation.color)
    if annotation.classification:
        properties["classification"] = {"name": annotation.classification}
        if color is not None:
            properties["classification"]["color"] = color
    elif color is not None:
        properties["color"] = color
    if annotation.locked:
        properties["isLocked"] = True
    measurements = {
        key: value for key, value in annotation.measurements.items() if math.isfinite(value)
    }
    if measurements:
        properties["measurements"] = measurements
    return properties


def _geometry(annotation: Annotation) -> dict[str, Any]:
    if annotation.kind in ("polygon", "ellipse"):
        outline = _polygon(annotation.rings)
        return outline | ({"isEllipse": True} if annotation.kind == "ellipse" else {})
    rings = [np.round(ring, DIGITS) for ring in annotation.rings]
    if annotation.kind == "points":
        points = np.concatenate(rings)
        many = len(points) > 1
        coordinates: Any = points.tolist() if many else points[0].tolist()
        return {"type": "MultiPoint" if many else "Point", "coordinates": coordinates}
    coordinates = [ring.tolist() for ring in rings]
    if len(rings) == 1:
        return {"type": "LineString", "coordinates": coordinates[0]}
    return {"type": "MultiLineString", "coordinates": coordinates}


def _polygon(rings: Sequence[NDArray[np.float64]]) -> dict[str, Any]:
    rounded = [np.round(ring, DIGITS) for ring in rings]
    found = [[_closed(ring) for ring in polygon] for polygon in polygons(rounded)]
    if len(found) == 1:
        return {"type": "Polygon", "coordinates": found[0]}
    return {"type": "MultiPolygon", "coordinates": found}


def _closed(ring: NDArray[np.float64]) -> list[Any]:
    corners: list[Any] = ring.tolist()
    return [*corners, corners[0]]
