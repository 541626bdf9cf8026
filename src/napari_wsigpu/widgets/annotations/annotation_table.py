"""The rows of the "Annotate" dock: a slide's annotations with their sizes."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from napari.layers import Points

from napari_wsigpu.annotations import Annotation, measure
from napari_wsigpu.storage.remote.url import file_name
from napari_wsigpu.viewer.annotations.annotation_layers import (
    CENTER,
    CLASS,
    NAME,
    placement,
    shape_annotations,
    to_pixels,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from napari import Viewer
    from napari.layers import Layer, Shapes
    from numpy.typing import NDArray

    from napari_wsigpu.annotations import Measurement
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.view.region import ToPixels

AT_ONCE = 256  # rows that are measured together
SQUARE_MM = 1e-6  # square millimeters in a square micrometer
LARGE = 1e5  # square micrometers; larger areas are shown in square millimeters
MOST_SUMMED = 5000
AREA, LENGTH, SHAPE = 2, 3, 4  # columns; those before are texts
LENGTHS = "Length", "Perimeter", "Centroid X", "Centroid Y"
EDITABLE = {0: CLASS, 1: NAME}


@dataclass
class AnnotationTable:
    """Annotations as rows, which are measured only when needed.

    Attributes
    ----------
    layers : list of Shapes or Points
        The layers that contain the objects, in the order of the rows.
    mpp : tuple of float, optional
        Micrometers per pixel; without it, sizes are in pixels.
    image : str
        File name of the slide.
    """

    layers: list[Shapes | Points] = field(default_factory=list)
    mpp: tuple[float, float] | None = None
    image: str = ""
    _pixels_of: list[ToPixels] = field(default_factory=list)
    _vertices: list[list[Array]] = field(default_factory=list)
    _types: list[list[str]] = field(default_factory=list)
    _texts: list[dict[str, list[object]]] = field(default_factory=list)
    _measured: dict[tuple[int, int], list[Measurement]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        viewer: Viewer,
        layers: Sequence[Shapes | Points],
        slide_layer: Layer,
        slide: Slide,
    ) -> AnnotationTable:
        """Return the objects of layers as rows, measured on `slide`, which `slide_layer` shows."""
        table = cls(list(layers), slide.mpp, file_name(slide.path))
        for layer in layers:
            is_points = isinstance(layer, Points)
            table._pixels_of.append(to_pixels(viewer, placement(layer), layer.ndim, slide_layer))
            table._vertices.append(list(layer.data))
            types = ["point"] * len(layer.data) if is_points else map(str, layer.shape_type)
            table._types.append(list(types))
            features = layer.features
            names = [name for name in (CLASS, NAME) if name in features]
            table._texts.append({name: list(features[name]) for name in names})
        return table

    def __len__(self) -> int:
        return sum(map(len, self._types))

    @property
    def titles(self) -> Sequence[tuple[str, str]]:
        """Title and tooltip of each column."""
        length = "px" if self.mpp is None else "µm"
        area = "mm" if self._has_large_areas else length
        return (
            ("Class", "Class of the object; double-click to change it"),
            ("Name", "Name of the object; double-click to change it"),
            (f"Area {area}²", "Area without holes"),
            (f"Length {length}", "Length of a line, or of an outline including holes"),
            ("Shape", "Kind of shape"),
        )

    @cached_property
    def _has_large_areas(self) -> bool:
        """Whether all areas are large, so that the column is in mm²; too many are not measured."""
        if self.mpp is None or len(self) > MOST_SUMMED:
            return False
        areas = (self.measurement(row).area for row in range(len(self)))
        return all(area >= LARGE for area in filter(None, areas))

    def is_number(self, column: int) -> bool:
        """Whether a column holds numbers."""
        return column in (AREA, LENGTH)

    def is_editable(self, column: int) -> bool:
        """Whether the user may edit a column."""
        return column in EDITABLE

    def position(self, row: int) -> tuple[int, int]:
        """Return the index of a row's layer, and of the row's object in that layer."""
        for number, types in enumerate(self._types):
            if row < len(types):
                return number, row
            row -= len(types)
        raise IndexError(row)

    def rows_of(self, layer: Layer, indices: Iterable[int]) -> list[int]:
        """Return the rows of some objects of a layer."""
        if layer not in self.layers:
            return []
        number = self.layers.index(layer)
        first, count = sum(map(len, self._types[:number])), len(self._types[number])
        return [first + index for index in indices if index < count]

    def text(self, row: int, column: int) -> str:
        """Return the text of a cell."""
        number, index = self.position(row)
        if column in (AREA, LENGTH):
            value = self.key(row, column)
            assert not isinstance(value, str)
            scale = SQUARE_MM if column == AREA and self._has_large_areas else 1
            return "" if value is None else _readable(value * scale)
        if column == SHAPE:
            return self._types[number][index]
        texts = self._texts[number].get(EDITABLE[column], [])
        text = texts[index] if index < len(texts) else ""
        return text if isinstance(text, str) else ""

    def key(self, row: int, column: int) -> float | str | None:
        """Return what a cell is sorted by; None if it is empty."""
        if column not in (AREA, LENGTH):
            return self.text(row, column).casefold() or None
        found = self.measurement(row)
        return found.area if column == AREA else found.length or found.perimeter

    def sizes(self, row: int) -> str:
        """Return an object's sizes on one line; empty for a point."""
        found = self.measurement(row)
        parts = [
            f"{name} {self._size(getattr(found, name), is_area=name == 'area')}"
            for name in ("area", "length", "perimeter")
            if getattr(found, name) is not None
        ]
        return ", ".join(parts).capitalize()

    def measurement(self, row: int) -> Measurement:
        """Measure an object, in micrometers if the pixel size is known."""
        number, index = self.position(row)
        first = index - index % AT_ONCE
        if (number, first) not in self._measured:
            chosen = slice(first, first + AT_ONCE)
            vertices, types = self._vertices[number][chosen], self._types[number][chosen]
            found = (
                [Annotation("points", (self._outline(number, spot),)) for spot in vertices]
                if types[0] == "point"
                else shape_annotations(vertices, types, self._pixels_of[number])
            )
            mpp = self.mpp or (1.0, 1.0)
            self._measured[number, first] = [measure(each, mpp) for each in found]
        return self._measured[number, first][index - first]

    def box(self, row: int) -> NDArray[np.float64]:
        """Return the minimum and maximum (x, y) of an object in pixels of level 0."""
        number, index = self.position(row)
        outline = self._outline(number, self._vertices[number][index])
        return np.stack([outline.min(axis=0), outline.max(axis=0)])

    def _outline(self, number: int, vertices: Array) -> NDArray[np.float64]:
        """Return the (x, y) in pixels of level 0 of vertices of a layer."""
        return self._pixels_of[number](np.atleast_2d(vertices))[:, ::-1] + CENTER

    def summary(self, rows: Sequence[int]) -> str:
        """Summarize the number and total size of the selected rows, or of all rows if none are."""
        chosen = rows or range(len(self))
        text = f"{len(chosen):,} object{'' if len(chosen) == 1 else 's'}"
        if len(chosen) > MOST_SUMMED:
            return text
        found = [self.measurement(row) for row in chosen]
        parts = [f"{text}{' selected' if rows else ''}"]
        for name in ("area", "length"):
            total = sum(getattr(each, name) or 0 for each in found)
            if total:
                parts.append(f"{name} {self._size(total, is_area=name == 'area')}")
        return ", ".join(parts)

    def table(self, rows: Sequence[int] = (), separator: str = ",") -> str:
        """Return rows as text with a header, and numbers with ten significant digits.

        Parameters
        ----------
        rows : sequence of int
            The rows; by default all.
        separator : str
            Separator of cells: a comma for CSV, a tab for spreadsheets.
        """
        unit = "px" if self.mpp is None else "µm"
        text = io.StringIO()
        writer = csv.writer(text, delimiter=separator, lineterminator="\n")
        numbers = [f"Area {unit}²", *(f"{each} {unit}" for each in LENGTHS)]
        writer.writerow(["Image", "Name", "Class", "Shape", *numbers])
        for row in rows or range(len(self)):
            found = self.measurement(row)
            values = (found.area, found.length, found.perimeter, *(found.center or ()))
            cells = ["" if value is None else f"{value:.10g}" for value in values]
            texts = (self.text(row, column) for column in (1, 0, SHAPE))
            writer.writerow([self.image, *texts, *cells])
        return text.getvalue()

    def _size(self, value: float, *, is_area: bool) -> str:
        """Format a size in a readable unit."""
        if self.mpp is None:
            return f"{_readable(value)} px{'²' if is_area else ''}"
        if is_area and value >= LARGE:
            return f"{_readable(value * SQUARE_MM)} mm²"
        return f"{_readable(value)} µm{'²' if is_area else ''}"


def _readable(value: float) -> str:
    """Format a number, rounded to three or more significant digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if value >= 1e-3 or not value else f"{value:.2e}"
