"""The rows of the dock "Annotate": what is drawn on a slide, and how large on the glass."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from napari.layers import Points

from napari_wsigpu.annotations import Annotation, measure
from napari_wsigpu.viewer.annotations import (
    CENTRE,
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

    from napari_wsigpu.annotations import Measurement
    from napari_wsigpu.viewer.annotations import ToPixels

AT_ONCE = 256  # rows that are measured together
SQUARE_MM = 1e-6  # square micrometres
LARGE = 1e5  # square micrometres, from which areas are said in square millimetres
MOST_SUMMED = 5000
EDITABLE = {0: CLASS, 5: NAME}
TITLES = (
    ("Class", "Class of the object; double-click to change it"),
    ("Area", "Area without holes"),
    ("Length", "Length of a line"),
    ("Perimeter", "Length of the outline, around holes too"),
    ("Shape", "What was drawn"),
    ("Name", "Name of the object; double-click to change it"),
)
NUMBERS = {1: "area", 2: "length", 3: "perimeter"}


@dataclass
class AnnotationTable:
    """Rows are measured when they are first looked at, so that there may be many.

    Attributes
    ----------
    layers : list of Shapes or Points
        The layers whose objects are the rows, one after another.
    mpp : tuple of float, optional
        Micrometres a pixel; without it, sizes are in pixels.
    """

    layers: list[Shapes | Points] = field(default_factory=list)
    mpp: tuple[float, float] | None = None
    _pixels_of: list[ToPixels] = field(default_factory=list)
    _vertices: list[list[Any]] = field(default_factory=list)
    _types: list[list[str]] = field(default_factory=list)
    _texts: list[dict[str, list[Any]]] = field(default_factory=list)
    _measured: dict[tuple[int, int], list[Measurement]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        viewer: Viewer,
        layers: Sequence[Shapes | Points],
        slide_layer: Layer,
        mpp: tuple[float, float] | None,
    ) -> AnnotationTable:
        """Return the objects of layers as they are now, on the slide that a layer shows."""
        made = cls(list(layers), mpp)
        for layer in layers:
            is_points = isinstance(layer, Points)
            made._pixels_of.append(to_pixels(viewer, placement(layer), layer.ndim, slide_layer))
            made._vertices.append(list(layer.data))
            types = ["point"] * len(layer.data) if is_points else map(str, layer.shape_type)
            made._types.append(list(types))
            features = layer.features
            names = [name for name in (CLASS, NAME) if name in features]
            made._texts.append({name: list(features[name]) for name in names})
        return made

    def __len__(self) -> int:
        return sum(map(len, self._types))

    @property
    def titles(self) -> Sequence[tuple[str, str]]:
        """Text and tooltip of each column's head."""
        return TITLES

    def is_number(self, column: int) -> bool:
        """Whether a column holds numbers."""
        return column in NUMBERS

    def is_editable(self, column: int) -> bool:
        """Whether the user may write into a column."""
        return column in EDITABLE

    def place(self, row: int) -> tuple[int, int]:
        """Return the number of a row's layer, and its own number in that layer."""
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
        """Return what a cell shows."""
        number, index = self.place(row)
        if column in NUMBERS:
            value: float | None = getattr(self.measurement(row), NUMBERS[column])
            return "" if value is None else self._size(value, is_area=NUMBERS[column] == "area")
        if column not in EDITABLE:
            return self._types[number][index]
        texts = self._texts[number].get(EDITABLE[column], [])
        found = texts[index] if index < len(texts) else ""
        return found if isinstance(found, str) else ""

    def measurement(self, row: int) -> Measurement:
        """Return how large an object is, in micrometres where the size of a pixel is known."""
        number, index = self.place(row)
        first = index - index % AT_ONCE
        if (number, first) not in self._measured:
            chosen = slice(first, first + AT_ONCE)
            vertices, types = self._vertices[number][chosen], self._types[number][chosen]
            found = (
                [Annotation("points", (np.zeros((1, 2)),))] * len(types)
                if types[0] == "point"
                else shape_annotations(vertices, types, self._pixels_of[number])
            )
            mpp = self.mpp or (1.0, 1.0)
            self._measured[number, first] = [measure(each, mpp) for each in found]
        return self._measured[number, first][index - first]

    def box(self, row: int) -> Any:
        """Return the least and the largest (x, y) of an object in pixels of level 0."""
        number, index = self.place(row)
        points = np.atleast_2d(self._vertices[number][index])
        outline = self._pixels_of[number](points)[:, ::-1] + CENTRE
        return np.stack([outline.min(axis=0), outline.max(axis=0)])

    def summary(self, rows: Sequence[int]) -> str:
        """Say how many objects rows are, all if there is none, and how large together."""
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
        """Return rows, or all, as text with a line of titles, in full precision.

        Parameters
        ----------
        rows : sequence of int
            Which rows.
        separator : str
            Between cells: a comma for CSV, a tab for spreadsheets.
        """
        unit = "px" if self.mpp is None else "µm"
        text = io.StringIO()
        writer = csv.writer(text, delimiter=separator, lineterminator="\n")
        sizes = [f"Area {unit}²", f"Length {unit}", f"Perimeter {unit}"]
        writer.writerow(["Name", "Class", *sizes, "Shape"])
        for row in rows or range(len(self)):
            found = self.measurement(row)
            values = (found.area, found.length, found.perimeter)
            cells = ["" if value is None else f"{value:.10g}" for value in values]
            writer.writerow([self.text(row, 5), self.text(row, 0), *cells, self.text(row, 4)])
        return text.getvalue()

    def _size(self, value: float, *, is_area: bool) -> str:
        """Return a size in a unit that makes it easy to read."""
        if self.mpp is None:
            return f"{_readable(value)} px{'²' if is_area else ''}"
        if is_area and value >= LARGE:
            return f"{_readable(value * SQUARE_MM)} mm²"
        return f"{_readable(value)} µm{'²' if is_area else ''}"


def _readable(value: float) -> str:
    """Return a number with at least three digits, and no more than needed."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if value >= 1e-3 or not value else f"{value:.2e}"
