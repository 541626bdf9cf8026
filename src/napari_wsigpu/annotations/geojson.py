"""GeoJSON in QuPath's dialect: one feature per object, coordinates in pixels of level 0."""

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
from typing import TYPE_CHECKING
from zipfile import BadZipFile, ZipFile

import numpy as np

from napari_wsigpu.annotations.annotation import Annotation
from napari_wsigpu.annotations.rings import polygons, without_repeated_end
from napari_wsigpu.model.errors import (
    AnnotationError,
    SlideError,
    TargetWriteError,
    file_error,
    write_errors,
)
from napari_wsigpu.model.limits import limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import BinaryIO

    from napari_wsigpu.annotations.annotation import Color, Kind
    from napari_wsigpu.annotations.rings import Ring

DIGITS = 2  # after the decimal point, as in QuPath
ENDINGS = (".geojson", ".geojson.gz", ".json")
# Kind of object and nesting depth of the coordinates, by type of geometry (RFC 7946, 3.1).
GEOMETRIES: dict[str, tuple[Kind, int]] = {
    "Point": ("points", 1),
    "MultiPoint": ("points", 2),
    "LineString": ("line", 2),
    "MultiLineString": ("line", 3),
    "Polygon": ("polygon", 3),
    "MultiPolygon": ("polygon", 4),
}
# Object types as QuPath wrote them before 0.4; before 0.3, it wrote them as feature ids.
OLD_TYPES = {
    "PathAnnotationObject": "annotation",
    "PathDetectionObject": "detection",
    "PathCellObject": "cell",
    "PathTileObject": "tile",
    "TMACoreObject": "tmaCore",
    "tma_core": "tmaCore",
}
# Properties that are read; all others are kept in `Annotation.extra`.
KNOWN = {
    "objectType", "object_type", "type", "name", "color", "classification", "isLocked",
    "measurements", "childObjects", "children",
}  # fmt: skip
DEEPEST = 64  # levels of nested objects or geometry collections
# Minimum number of points per shape, and maximum absolute coordinate in pixels.
LEAST = {"points": 1, "line": 2, "polygon": 3}
MAX_COORDINATE = 1e12
# First bytes of a gzip file, and of a JSON escape for a surrogate.
GZIP, ZIP, HALF = b"\x1f\x8b", b"PK\x03\x04", b"\\ud"
IN_ARCHIVES = ".geojson", ".json"
# RuntimeError is raised for encrypted archives, NotImplementedError for unusual compressions.
DAMAGE = EOFError, gzip.BadGzipFile, zlib.error, BadZipFile, RuntimeError


def read_geojson(path: str | os.PathLike[str]) -> list[Annotation]:
    """Read the objects of a GeoJSON file in QuPath's dialect.

    Parameters
    ----------
    path : str or PathLike
        A file, optionally compressed by gzip (``.gz``) or alone in a ``.zip`` archive. It holds a
        FeatureCollection, a list of features, a feature or a geometry.

    Returns
    -------
    list of Annotation
        The objects in the order of the file, each followed by the objects nested in it. Coordinates
        are as in the file: pixels of the slide's level 0. Type names of old QuPath versions are
        replaced by the current ones.

    Raises
    ------
    AnnotationError
        If the file is not valid GeoJSON.
    SlideError
        If the file cannot be read.

    Examples
    --------
    >>> [tumor, *_] = read_geojson("slide.geojson")  # doctest: +SKIP
    >>> tumor.classification, tumor.rings[0]  # doctest: +SKIP
    """
    return read_features(path)[0]


def read_features(path: str | os.PathLike[str]) -> tuple[list[Annotation], int]:
    """Read objects as `read_geojson` does, and count the features that hold none.

    Returns
    -------
    annotations : list of Annotation
        The objects.
    empty : int
        Number of features without a point, or with too few for their type of geometry.
    """
    name = os.fspath(path)
    text = read_limited(name)
    parser = _GeometryParser(name)
    try:
        found = json.loads(text, object_hook=parser.convert)
    except SlideError:
        raise
    except (ValueError, RecursionError, OverflowError, MemoryError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error
        raise AnnotationError(
            f"'{name}' is not valid GeoJSON ({reason}); choose a file that QuPath exported."
        ) from error
    # A lone surrogate can be neither displayed nor saved. Only an escape can produce one, so files
    # without such escapes skip the slow check below.
    may_hold_halves = HALF in text.lower()
    del text
    annotations: list[Annotation] = []
    empty = 0
    for number, feature in enumerate(_features(found, name)):
        try:
            objects = list(_objects(feature, DEEPEST))
            if may_hold_halves:
                for each in objects:
                    _feature_text(each).encode()
        except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise AnnotationError(
                f"Feature {number + 1} of '{name}' is not valid GeoJSON: {_reason(error)}; export "
                "the objects from QuPath again."
            ) from error
        annotations += objects
        empty += not objects
    return annotations, empty


def empty_sentence(count: int) -> str:
    """Say how many features of a file hold no object."""
    return f"{count:,} without an outline {'was' if count == 1 else 'were'} left out."


def read_limited(name: str) -> bytes:
    """Read a file of at most `limits.geojson_bytes`, and decompress it if necessary.

    Raises
    ------
    AnnotationError
        If the path is not a regular file, or the file is damaged or exceeds the limit.
    SlideError
        If the file cannot be read.
    """
    limit = limits.geojson_bytes
    if not name:
        raise file_error(name, FileNotFoundError())
    try:
        if not stat.S_ISREG(Path(name).stat().st_mode):  # opening a pipe would block
            raise AnnotationError(f"'{name}' is not a regular file; choose another file.")
        with Path(name).open("rb") as file:
            start = file.read(len(ZIP))
            file.seek(0)
            if start == ZIP:
                text = _unzipped(name, file, limit + 1)
            else:
                is_gzip = start.startswith(GZIP)
                text = (gzip.GzipFile(fileobj=file) if is_gzip else file).read(limit + 1)
    except SlideError:
        raise
    except DAMAGE as error:
        raise AnnotationError(f"'{name}' is damaged ({error}); export it again.") from error
    except OSError as error:
        raise file_error(name, error) from error
    except ValueError as error:  # a path with a null character
        raise AnnotationError(f"{name!r} is not a valid path; choose another file.") from error
    check_bytes(name, text)
    return text


def _unzipped(name: str, file: BinaryIO, most: int) -> bytes:
    """Return up to `most` bytes of the only GeoJSON file in a ZIP archive, as QuPath writes it."""
    with ZipFile(file) as archive:
        members = [each for each in archive.namelist() if each.lower().endswith(IN_ARCHIVES)]
        if len(members) != 1:
            raise AnnotationError(
                f"'{name}' contains {len(members)} GeoJSON files; unzip it and choose one."
            )
        with archive.open(members[0]) as member:
            return member.read(most)


def check_bytes(name: str, content: bytes) -> None:
    """Raise an `AnnotationError` if decompressed content exceeds `limits.geojson_bytes`."""
    if len(content) > limits.geojson_bytes:
        raise AnnotationError(f"'{name}' is too large: {limits.advice('geojson_bytes')}.")


def write_geojson(path: str | os.PathLike[str], annotations: Iterable[Annotation]) -> None:
    """Write objects as a FeatureCollection, which QuPath imports with *File > Import objects*.

    Parameters
    ----------
    path : str or PathLike
        The file, which is replaced if it exists. If the name ends in ``.gz``, it is compressed.
    annotations : iterable of Annotation
        Objects in pixels of level 0. Coordinates are rounded to 1/100 pixel, as in QuPath. Objects
        without an id get a new one.

    Raises
    ------
    TargetWriteError
        If the file cannot be written, or `Annotation.extra` holds what JSON can't express; an
        existing file is then unchanged.

    Examples
    --------
    >>> write_geojson("slide.geojson", annotations)  # doctest: +SKIP
    """
    target = Path(path)
    try:
        features = ",\n".join(_feature_text(annotation) for annotation in annotations)
    except (TypeError, ValueError, RecursionError) as error:
        raise TargetWriteError(
            f"'{target}' can't be written: JSON can't express a property ({error}); remove it."
        ) from error
    text = f'{{"type":"FeatureCollection","features":[\n{features}\n]}}\n'
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise TargetWriteError(
            f"'{target}' can't be written: a name contains an invalid character; correct it."
        ) from None
    if target.suffix.lower() == ".gz":
        data = gzip.compress(data, mtime=0)
    replace_file(target, data)


def replace_file(target: Path, data: bytes) -> None:
    """Replace a file's contents, or leave the file unchanged if writing fails.

    Raises
    ------
    TargetWriteError
        If it cannot be written.
    """
    if not target.name:
        raise TargetWriteError(f"'{target}' is a folder; name a file in it.")
    work = target.with_name(f"{target.name}.part")
    with write_errors(target):
        try:
            work.write_bytes(data)
            work.replace(target)
        except OSError:
            work.unlink(missing_ok=True)
            raise


# Reading


def _features(found: object, name: str) -> list[object]:
    """Return the features of a file in any of the forms that `read_geojson` accepts."""
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
            f"'{name}' is JSON, but has no features; export objects from QuPath with "
            "File > Export objects as GeoJSON."
        )
    return found


class _Coordinates:
    """Coordinates of a geometry as arrays.

    Parameters
    ----------
    rings : tuple of ndarray, shape (vertices, 2)
        The arrays.
    nesting : int
        Depth of the lists in the file.
    """

    def __init__(self, rings: tuple[Ring, ...], nesting: int) -> None:
        self.rings = rings
        self._nesting = nesting

    def tolist(self) -> list[object]:
        """Return the nested lists of the file, without altitudes."""
        lists: list[list[object]] = [ring.tolist() for ring in self.rings]
        if self._nesting > 3:
            return [[ring.tolist() for ring in polygon] for polygon in polygons(self.rings)]
        if self._nesting == 3 or not lists:
            return [*lists]
        return lists[0] if self._nesting == 2 else lists[0][0]  # type: ignore[return-value]


class _GeometryParser:
    """Converts coordinates to arrays and checks the limits while a file is parsed.

    Parameters
    ----------
    name : str
        The file's name, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts = {"objects": 0, "points": 0}

    def convert(self, value: dict[str, object]) -> dict[str, object]:
        """Convert a geometry's coordinates as soon as they are parsed; keep other values.

        Keeping all coordinates of a large file as lists would take many times its size in memory,
        and most of the parsing time. Invalid coordinates are kept and reported later, with the
        number of the feature.

        Raises
        ------
        AnnotationError
            If there are more objects or points than the limits allow.
        """
        kind, coordinates = _geometry_type(value), value.get("coordinates")
        if kind and isinstance(coordinates, list):
            with suppress(TypeError, ValueError, OverflowError):
                nesting = GEOMETRIES[kind][1]
                rings = tuple(_rings(coordinates, nesting))
                value["coordinates"] = _Coordinates(rings, nesting)
                self._counts["points"] += sum(map(len, rings))
            self._counts["objects"] += 1
            check_counts(self._name, **self._counts)
        return value


def check_counts(name: str, objects: int, points: int) -> None:
    """Raise an `AnnotationError` if a file has more objects or points than the limits allow."""
    for noun, count in (("objects", objects), ("points", points)):
        if count > getattr(limits, noun):
            raise AnnotationError(f"'{name}' holds too many {noun}: {limits.advice(noun)}.")


def _geometry_type(geometry: Mapping[str, object]) -> str:
    """Return the type of a geometry that has coordinates; an empty string for others."""
    kind = geometry.get("type")
    return kind if isinstance(kind, str) and kind in GEOMETRIES else ""


def _objects(feature: object, depth: int) -> Iterator[Annotation]:
    """Yield the object of a feature, and the objects nested in it."""
    if not isinstance(feature, dict):
        raise TypeError("it is not a JSON object")
    properties = feature.get("properties")
    if not isinstance(properties, dict):
        properties = {}
    geometry = feature.get("geometry")
    if geometry is not None:
        for kind, rings in _shapes(geometry, depth):
            yield Annotation(
                kind=kind,
                rings=rings,
                name=str(properties.get("name") or ""),
                classification=_class_name(properties.get("classification")),
                color=_color(properties),
                object_type=_object_type(feature, properties),
                locked=bool(properties.get("isLocked", False)),
                measurements=_measurements(properties.get("measurements")),
                id=_id(feature.get("id")),
                nucleus=_nucleus(feature.get("nucleusGeometry"), depth),
                extra=_extra(feature, properties),
            )
    children = properties.get("childObjects", properties.get("children"))
    if isinstance(children, list) and depth:
        for child in children:
            yield from _objects(child, depth - 1)


def _shapes(geometry: object, depth: int) -> Iterator[tuple[Kind, tuple[Ring, ...]]]:
    """Yield the kind and rings of a geometry, and of each part of a collection."""
    if not isinstance(geometry, dict):
        raise TypeError("its geometry is not an object")
    if geometry["type"] == "GeometryCollection" and depth:
        for part in list(geometry["geometries"]):
            yield from _shapes(part, depth - 1)
        return
    name = _geometry_type(geometry)
    if not name:
        raise ValueError(f"its geometry has the unknown type {geometry['type']!r}")
    kind, nesting = GEOMETRIES[name]
    parsed = geometry["coordinates"]
    # If the parser could not convert them, this raises its error again.
    is_parsed = isinstance(parsed, _Coordinates)
    rings = parsed.rings if is_parsed else tuple(_rings(parsed, nesting))
    if kind == "polygon":
        rings = tuple(map(without_repeated_end, rings))
    rings = tuple(ring for ring in rings if len(ring) >= LEAST[kind])
    if rings:
        is_ellipse = geometry.get("isEllipse") is True
        yield ("ellipse" if is_ellipse else kind), rings


def _rings(coordinates: object, depth: int) -> Iterator[Ring]:
    if not isinstance(coordinates, list):
        raise TypeError("its coordinates are not a list")
    if depth > 2:
        for part in coordinates:
            yield from _rings(part, depth - 1)
        return
    found = np.array(coordinates if depth == 2 else [coordinates], np.float64)
    if not found.size:
        return
    if found.ndim != 2 or found.shape[1] < 2 or not np.isfinite(found).all():
        raise ValueError("its coordinates are not pairs of finite numbers")
    if abs(found).max() > MAX_COORDINATE:
        raise ValueError("its coordinates are too large for a slide")
    yield found[:, :2]  # a third coordinate is an altitude


def _object_type(feature: Mapping[str, object], properties: Mapping[str, object]) -> str:
    old = feature.get("id")
    kind = next(filter(None, map(properties.get, ("objectType", "object_type", "type"))), None)
    kind = str(kind or (old if isinstance(old, str) and old in OLD_TYPES else "annotation"))
    return OLD_TYPES.get(kind, kind)


def _id(stated: object) -> str:
    try:
        return str(uuid.UUID(str(stated)))
    except ValueError:
        return ""


def _class_name(stated: object) -> str:
    if isinstance(stated, dict):
        names = stated.get("names")
        if isinstance(names, list) and names:
            return ": ".join(map(str, names))
        return str(stated.get("name") or "")
    return stated if isinstance(stated, str) else ""


def _color(properties: Mapping[str, object]) -> Color | None:
    classification = properties.get("classification")
    for holder in (classification if isinstance(classification, dict) else {}, properties):
        stated = holder.get("color", holder.get("colorRGB"))
        if isinstance(stated, int):  # packed as 0xRRGGBB, as in QuPath before 0.4
            return stated >> 16 & 0xFF, stated >> 8 & 0xFF, stated & 0xFF
        if isinstance(stated, list) and len(stated) >= 3:
            red, green, blue = (min(max(int(value), 0), 255) for value in stated[:3])
            return red, green, blue
    return None


def _measurements(stated: object) -> dict[str, float]:
    if isinstance(stated, list):  # as in QuPath before 0.4
        stated = {each["name"]: each["value"] for each in stated}
    if not isinstance(stated, dict):
        return {}
    return {str(key): float(value) for key, value in stated.items() if value is not None}


def _nucleus(geometry: object, depth: int) -> tuple[Ring, ...]:
    shapes = [] if geometry is None else _shapes(geometry, depth)
    return tuple(ring for kind, rings in shapes if kind == "polygon" for ring in rings)


def _extra(
    feature: Mapping[str, Mapping[str, object]], properties: Mapping[str, object]
) -> dict[str, object]:
    extra: dict[str, object] = {}
    plane = feature["geometry"].get("plane")
    if plane is not None:
        extra["plane"] = plane
    # `Annotation.color` is that of the class; QuPath's objects may also have one of their own.
    known = KNOWN - {"color"} if _class_name(properties.get("classification")) else KNOWN
    others = {key: value for key, value in properties.items() if key not in known}
    return extra | ({"properties": others} if others else {})


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "a string contains an invalid character"
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


# Writing


def _feature_text(annotation: Annotation) -> str:
    extra = annotation.extra
    geometry = _geometry(annotation)
    if "plane" in extra:
        geometry["plane"] = extra["plane"]
    identity = annotation.id or str(uuid.uuid4())
    feature: dict[str, object] = {"type": "Feature", "id": identity, "geometry": geometry}
    if annotation.nucleus:
        feature["nucleusGeometry"] = _polygon(annotation.nucleus)
    others = extra.get("properties")
    feature["properties"] = _properties(annotation) | (others if isinstance(others, dict) else {})
    return json.dumps(feature, separators=(",", ":"), ensure_ascii=False, default=_as_list)


def _as_list(value: object) -> object:
    """Return geometries in properties, and values of NumPy, as JSON can express them."""
    if isinstance(value, (_Coordinates, np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(type(value).__name__)


def _properties(annotation: Annotation) -> dict[str, object]:
    properties: dict[str, object] = {"objectType": annotation.object_type}
    if annotation.name:
        properties["name"] = annotation.name
    color = None if annotation.color is None else list(annotation.color)
    if annotation.classification:
        classification: dict[str, object] = {"name": annotation.classification}
        properties["classification"] = classification
        if color is not None:
            classification["color"] = color
    elif color is not None:
        properties["color"] = color
    if annotation.locked:
        properties["isLocked"] = True
    # JSON has no NaN and no infinity.
    pairs = annotation.measurements.items()
    measurements = {key: value for key, value in pairs if math.isfinite(value)}
    if measurements:
        properties["measurements"] = measurements
    return properties


def _geometry(annotation: Annotation) -> dict[str, object]:
    if annotation.kind in ("polygon", "ellipse"):
        outline = _polygon(annotation.rings)
        return outline | ({"isEllipse": True} if annotation.kind == "ellipse" else {})
    rings = [np.round(ring, DIGITS) for ring in annotation.rings]
    if annotation.kind == "points":
        points = np.concatenate(rings)
        if len(points) == 1:
            return {"type": "Point", "coordinates": points[0].tolist()}
        return {"type": "MultiPoint", "coordinates": points.tolist()}
    lines = [ring.tolist() for ring in rings]
    if len(lines) == 1:
        return {"type": "LineString", "coordinates": lines[0]}
    return {"type": "MultiLineString", "coordinates": lines}


def _polygon(rings: Iterable[Ring]) -> dict[str, object]:
    rounded = [np.round(ring, DIGITS) for ring in rings]
    found = [[_closed(ring) for ring in polygon] for polygon in polygons(rounded)]
    if len(found) == 1:
        return {"type": "Polygon", "coordinates": found[0]}
    return {"type": "MultiPolygon", "coordinates": found}


def _closed(ring: Ring) -> list[list[float]]:
    vertices: list[list[float]] = ring.tolist()
    return [*vertices, vertices[0]]
