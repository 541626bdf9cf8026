"""The dock "Annotations": what is drawn on a slide, measured, and exchanged with QuPath."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from napari.layers import Labels, Points, Shapes
from qtpy.QtCore import QItemSelection, QItemSelectionModel, Qt, QTimer
from qtpy.QtWidgets import (
    QAbstractItemView,
    QApplication,
    QComboBox,
    QGridLayout,
    QHBoxLayout,
    QHeaderView,
    QLabel,
    QPushButton,
    QSizePolicy,
    QTableView,
    QVBoxLayout,
    QWidget,
)

from napari_wsigpu.annotations import read_geojson, write_geojson
from napari_wsigpu.conversion.labels import save_labels
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.viewer.annotations import (
    CENTRE,
    FOR_EXPORT,
    MANY,
    OBJECTS,
    SLIDE,
    annotation_layers,
    annotations_of,
    flat_placement,
    placement,
    to_pixels,
)
from napari_wsigpu.viewer.layers import slide_name, slide_of
from napari_wsigpu.viewer.navigation import look_at_all_of, screen_pixels
from napari_wsigpu.viewer.new_labels import LEVEL, add_labels
from napari_wsigpu.widgets.annotation_model import SQUARE_MM, AnnotationModel
from napari_wsigpu.widgets.classes import USUAL, classes_of, classify, set_texts
from napari_wsigpu.widgets.jobs import Jobs
from napari_wsigpu.widgets.labels_panel import LabelsPanel
from napari_wsigpu.widgets.pictures import save_text
from napari_wsigpu.widgets.saving import ask_what_to_open, ask_where_to_save
from napari_wsigpu.widgets.slide_dock import SlideDock

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Layer

    from napari_wsigpu.annotations import Annotation
    from napari_wsigpu.slide.slide import Slide

NO_SLIDE = "Open a slide, or select its layer, to annotate it."
NO_SHAPES = "Nothing is drawn yet: choose a tool, and draw on the slide."
TOOLS = {
    "Rectangle": "add_rectangle",
    "Outline": "add_polygon_lasso",
    "Line": "add_line",
    "Point": "add",
}
TIPS = {
    "Rectangle": "Draw rectangles on the slide",
    "Outline": "Draw around objects on the slide with the button held down",
    "Line": "Draw lines on the slide",
    "Point": "Set points on the slide",
}
PATIENCE_MS = 100
EDGE = 2  # pixels of the screen
SPOT = 10  # pixels of the screen
GEOJSON = "GeoJSON (*.geojson *.geojson.gz *.json)"
ZARR = "OME-Zarr (*.zarr)"
CSV = "Comma-separated values (*.csv)"
MOST_SUMMED = 5000
MEASURED = 20  # rows by which columns are as wide as their texts


class Annotations(SlideDock):
    """Draws, measures, imports and exports what lies on a slide.

    Parameters
    ----------
    napari_viewer : Viewer
        The viewer whose layers of shapes are shown.
    """

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer, NO_SLIDE)
        self._jobs = Jobs()
        self._folder: Path | None = None
        self._shapes: Shapes | None = None
        self._leave: list[Any] = []
        self._syncing = False
        self._patience = QTimer(self)
        self._patience.setSingleShot(True)
        self._patience.setInterval(PATIENCE_MS)

        self.tools = {name: _button(name, TIPS[name]) for name in TOOLS}
        self.model = AnnotationModel()
        self.table = _table(self.model)
        self.nothing = _label("Nothing", NO_SHAPES)
        self.summary = _label("Sum")
        self.classes = QComboBox()
        self.classes.setEditable(True)
        self.classes.setSizePolicy(QSizePolicy.Ignored, QSizePolicy.Fixed)
        self.classes.setInsertPolicy(QComboBox.NoInsert)
        self.classes.setAccessibleName("Class")
        self.classes.lineEdit().setPlaceholderText("Class")
        self.classify = _button(
            "Set", "Give the selected shapes this class, or those that are drawn next"
        )
        self.copy = _button("Copy table", "Copy the selected rows, or all, for a spreadsheet")
        self.save = _button("Save table…", "Save all rows as CSV")
        self.load = _button("Import GeoJSON…", "Open objects that QuPath exported (GeoJSON)")
        self.export = _button(
            "Export GeoJSON…", "Save shapes, points and labels on this slide for QuPath (GeoJSON)"
        )
        self.labels = LabelsPanel()
        self.status = _label("Status")
        self._arrange()

        for name, button in self.tools.items():
            button.clicked.connect(partial(self._draw, name))
        self._patience.timeout.connect(self._refresh)
        self.model.edited.connect(self._edit)
        self.table.selectionModel().selectionChanged.connect(self._on_rows)
        self.table.clicked.connect(lambda index: self._jump(index.row()))
        self.classify.clicked.connect(self._classify)
        self.classes.lineEdit().returnPressed.connect(self._classify)
        self.copy.clicked.connect(self._copy)
        self.save.clicked.connect(self._save)
        self.load.clicked.connect(self._import)
        self.export.clicked.connect(self._export)
        self.labels.add.clicked.connect(self._add_labels)
        self.labels.save.clicked.connect(self._save_labels)
        self._jobs.slow.connect(self._on_slow)
        self.listen(self.viewer.layers.selection.events.active, self._choose)
        self.listen(self.viewer.layers.events.removed, self._choose)
        self.at_end += [self._jobs.close, partial(_leave, self._leave)]
        self.follow()
        self._choose()

    def _arrange(self) -> None:
        self.details = QWidget()
        inner = QVBoxLayout(self.details)
        inner.setContentsMargins(0, 0, 0, 0)
        grid = QGridLayout()
        for place, button in enumerate(self.tools.values()):
            grid.addWidget(button, *divmod(place, 2))
        inner.addLayout(grid)
        inner.addWidget(self.nothing)
        inner.addWidget(self.table, 1)
        inner.addWidget(self.summary)
        naming = _row(self.classes, self.classify)
        naming.setStretch(0, 3)
        naming.setStretch(1, 2)
        inner.addLayout(naming)
        inner.addLayout(_row(self.copy, self.save))
        for button in (self.load, self.export):  # too long to lie side by side in a narrow dock
            inner.addWidget(button)
        inner.addWidget(self.labels)
        inner.addWidget(self.status)
        outer = QVBoxLayout(self)
        outer.addWidget(self.empty)
        outer.addWidget(self.details, 1)

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
        self.details.setVisible(slide is not None)
        self._say("")
        if slide is not None:
            self.labels.show_slide(slide)
        self._refresh()

    def showEvent(self, event: Any) -> None:  # noqa: N802
        """Look soon at how wide columns must be: only napari's style, which comes now, tells."""
        super().showEvent(event)
        self._soon()

    def let_go(self, slide: Slide) -> None:
        """Work on a slide that has left the viewer no more."""
        self._jobs.let_go(slide)

    # What is shown

    def _layer(self) -> Layer | None:
        """Return a layer of the slide, the active one if it is."""
        layers = [self.viewer.layers.selection.active, *self.viewer.layers]
        return next((each for each in layers if each and slide_of(each) is self.slide), None)

    def _choose(self, event: Any = None) -> None:
        """Show the active layer of shapes; else the one before, or the last one there is."""
        active = self.viewer.layers.selection.active
        there = [layer for layer in self.viewer.layers if isinstance(layer, Shapes)]
        shapes = self._shapes if self._shapes in there else None
        shapes = active if isinstance(active, Shapes) else shapes or (there[-1] if there else None)
        if shapes is not self._shapes:
            _leave(self._leave)
            self._shapes = shapes
            if shapes is not None:
                for signal in (shapes.events.data, shapes.events.features, shapes.events.set_data):
                    self._hear(signal, self._soon)
                self._hear(shapes.selected_data.events.items_changed, self._on_shapes)
            self._refresh()

    def _hear(self, signal: Any, slot: Any) -> None:
        signal.connect(slot)
        self._leave.append(partial(signal.disconnect, slot))

    def _soon(self, event: Any = None) -> None:
        self._patience.start()

    def _refresh(self) -> None:
        layer, shapes = self._layer(), self._shapes
        if self.slide is None or layer is None:
            self.model.show_shapes(None, np.asarray, None)
            return
        pixels_of: Any = np.asarray
        if shapes is not None:
            pixels_of = to_pixels(self.viewer, placement(shapes), shapes.ndim, layer)
        self.model.show_shapes(shapes, pixels_of, self.slide.mpp)
        self.table.resizeColumnsToContents()
        empty = not self.model.rowCount()
        self.nothing.setVisible(empty)
        for part in (self.table, self.summary):
            part.setVisible(not empty)
        for button in (self.copy, self.save):
            button.setEnabled(not empty)
        self._offer_classes()
        self._on_shapes()

    def _offer_classes(self) -> None:
        own = [] if self._shapes is None else classes_of(self._shapes)
        names = list(dict.fromkeys([*own, *USUAL]))
        if names != [self.classes.itemText(row) for row in range(self.classes.count())]:
            text = self.classes.currentText()
            self.classes.clear()
            self.classes.addItems(names)
            self.classes.setCurrentText(text)

    def _on_shapes(self, *_: Any) -> None:
        """Select the rows of the shapes that are selected."""
        if self._syncing or self._shapes is None:
            return
        rows = [row for row in self._shapes.selected_data if row < self.model.rowCount()]
        selection = QItemSelection()
        for row in rows:
            index = self.model.index(row, 0)
            selection.select(index, index)
        self._syncing = True
        flags = QItemSelectionModel.ClearAndSelect | QItemSelectionModel.Rows
        self.table.selectionModel().select(selection, flags)
        self._syncing = False
        if rows:
            self.table.scrollTo(self.model.index(min(rows), 0))
        self._sum()

    def _on_rows(self, *_: Any) -> None:
        """Select the shapes of the rows that are selected."""
        if not self._syncing and self._shapes is not None:
            self._syncing = True
            self._shapes.selected_data = set(self._rows())
            self._syncing = False
            self._sum()

    def _rows(self) -> list[int]:
        return sorted(index.row() for index in self.table.selectionModel().selectedRows())

    def _sum(self) -> None:
        rows = self._rows() or range(self.model.rowCount())
        many = f"{len(rows):,} shape{'' if len(rows) == 1 else 's'}"
        if len(rows) > MOST_SUMMED:
            self.summary.setText(many)
            return
        found = [self.model.measurement(row) for row in rows]
        area, length = (
            sum(each.area or 0 for each in found),
            sum(each.length or 0 for each in found),
        )
        parts = [f"{many}{' selected' if self._rows() else ''}"]
        known = self.slide is not None and self.slide.mpp is not None
        if area:
            parts.append(f"area {area * SQUARE_MM:.4g} mm²" if known else f"area {area:,.0f} px²")
        if length:
            parts.append(f"length {length:,.1f} {'µm' if known else 'px'}")
        self.summary.setText(", ".join(parts))

    def _jump(self, row: int) -> None:
        """Have the viewer show a shape."""
        layer, shapes = self._layer(), self._shapes
        if layer is None or shapes is None:
            return
        pixels_of = to_pixels(self.viewer, placement(shapes), shapes.ndim, layer)
        outline = pixels_of(shapes.data[row])[:, ::-1] + CENTRE
        box = np.stack([outline.min(axis=0), outline.max(axis=0)])
        look_at_all_of(self.viewer, layer, box)

    # What is drawn

    def _draw(self, tool: str) -> None:
        """Let the user draw, in the layer that is shown or a new one over the slide."""
        layer = self._layer()
        if layer is None or self.slide is None:
            return
        on_screen = 1 / screen_pixels(self.viewer, layer)
        common = {"name": "Annotations", "ndim": 2, **flat_placement(layer)}
        drawn: Layer | None
        if tool == "Point":
            active = self.viewer.layers.selection.active
            points = [each for each in self.viewer.layers if isinstance(each, Points)]
            drawn = active if active in points else (points[-1] if points else None)
            if drawn is None:
                drawn = self.viewer.add_points(
                    **{**common, "name": "Points"}, size=SPOT * on_screen, face_color="red"
                )
        else:
            drawn = self._own_shapes()
            if drawn is None:
                drawn = self.viewer.add_shapes(
                    **common,
                    face_color="transparent",
                    edge_color="red",
                    edge_width=EDGE * on_screen,
                )
        self.draw_in(drawn, TOOLS[tool])
        self._say(f"{TIPS[tool]}.")

    def _own_shapes(self) -> Shapes | None:
        """Return the layer that is shown, or the last one, if it is for annotations."""
        shapes = [each for each in self.viewer.layers if isinstance(each, Shapes)]
        own = [
            each
            for each in [*shapes, self._shapes]
            if each is not None and not _is_for_export(each)
        ]
        return own[-1] if own else None

    def _classify(self) -> None:
        if self._shapes is not None:
            classify(self._shapes, self._shapes.selected_data, self.classes.currentText().strip())
            self._refresh()

    def _edit(self, row: int, column: str, text: str) -> None:
        if self._shapes is None:
            return
        if column == "class":
            classify(self._shapes, [row], text.strip())
        else:
            set_texts(self._shapes, column, [row], text)
        self._refresh()

    # What is exchanged

    def _copy(self) -> None:
        text = self.model.table(self._rows() or None, "\t")
        QApplication.clipboard().setText(text)
        rows = text.count("\n") - 1
        self._say(f"Copied {rows:,} row{'' if rows == 1 else 's'}.")

    def _save(self) -> None:
        path = self._ask_where("Save table", ".csv", CSV)
        if path and self.slide is not None:
            text = self.model.table()
            self._start(f"Saving {Path(path).name}", path, partial(save_text, text, path))

    def _import(self) -> None:
        slide = self.slide
        if slide is None:
            return
        path = ask_what_to_open(self, "Import annotations", self._start_folder(slide), GEOJSON)
        if path:
            self._folder = Path(path).parent
            self._jobs.start(
                f"Reading {Path(path).name}",
                slide,
                partial(read_geojson, path),
                partial(self._add, Path(path)),
                self._say,
                owner=self,
            )

    def _add(self, path: Path, annotations: list[Annotation]) -> None:
        layer = self._layer()
        name = path.name.partition(".")[0]
        layers = annotation_layers(annotations, name, layer)
        for data, attributes, kind in layers:
            getattr(self.viewer, f"add_{kind}")(data, **attributes)
        plural = "" if len(annotations) == 1 else "s"
        many = f" {MANY}" if any(kind == "labels" for *_, kind in layers) else ""
        self._say(f"'{path.name}': {len(annotations):,} object{plural}.{many}")

    def _export(self) -> None:
        slide, layer = self.slide, self._layer()
        if slide is None or layer is None:
            return
        chosen = [
            each
            for each in self.viewer.layers
            if isinstance(each, Shapes | Points | Labels)
            and (each in self.viewer.layers.selection or _is_annotation(each))
        ]
        if not any(len(each.data) for each in chosen):
            self._say("There is nothing to export: draw shapes, or select a layer of labels.")
            return
        path = self._ask_where("Export annotations", ".geojson", GEOJSON)
        if not path:
            return
        annotations: list[Annotation] = []
        for each in chosen:
            data = each.as_layer_data_tuple()
            annotations += annotations_of(data, to_pixels(self.viewer, data[1], each.ndim, layer))
        self._start(f"Writing {Path(path).name}", path, partial(write_geojson, path, annotations))

    def _add_labels(self) -> None:
        layer, slide = self._layer(), self.slide
        if layer is None or slide is None:
            return
        try:
            labels = add_labels(self.viewer, layer, slide, self.labels.level.currentData())
        except SlideError as error:
            self._say(str(error))
            return
        labels.mode = "paint"

    def _save_labels(self) -> None:
        slide, labels = self.slide, self.viewer.layers.selection.active
        if slide is None:
            return
        level = labels.metadata.get(LEVEL) if isinstance(labels, Labels) else None
        if level is None or labels.metadata.get(SLIDE) != slide.path:
            self._say("Select a layer of labels that 'New labels' has made for this slide.")
            return
        path = self._ask_where("Save labels", " labels.zarr", ZARR)
        if path:
            pixels = np.asarray(labels.data)
            write = partial(save_labels, slide, path, pixels.copy(), level=level, name=labels.name)
            self._start(f"Writing {Path(path).name}", path, write)

    def _on_slow(self, what: str) -> None:
        """Say what takes long; what became of it is said when it is done."""
        if what:
            self._say(f"{what}…")

    def _start(self, what: str, path: str, work: Any) -> None:
        if self.slide is not None:
            saved = f"Saved '{Path(path).name}'."
            done = lambda _: self._say(saved)  # noqa: E731
            self._jobs.start(what, self.slide, work, done, self._say)

    def _ask_where(self, title: str, ending: str, filters: str) -> str:
        slide = self.slide
        if slide is None:
            return ""
        start = self._start_folder(slide) / f"{slide_name(slide)}{ending}"
        path = ask_where_to_save(self, title, start, filters)
        if path:
            self._folder = Path(path).parent
        return path

    def _start_folder(self, slide: Slide) -> Path:
        folder = self._folder or Path(slide.path).parent
        return folder if folder.is_dir() else Path.home()

    def _say(self, text: str) -> None:
        self.status.setText(text)
        self.status.setVisible(bool(text))


def _is_for_export(layer: Layer) -> bool:
    return bool(layer.metadata.get(FOR_EXPORT))


def _is_annotation(layer: Layer) -> bool:
    """Whether a layer is exported though it is not selected."""
    own = isinstance(layer, Shapes | Points) or OBJECTS in layer.metadata
    return own and not _is_for_export(layer)


def _leave(signals: list[Any]) -> None:
    for leave in signals:
        leave()
    signals.clear()


def _table(model: AnnotationModel) -> QTableView:
    table = QTableView()
    table.setModel(model)
    table.setAccessibleName("Annotations")
    table.setSelectionBehavior(QAbstractItemView.SelectRows)
    table.setWordWrap(False)
    table.horizontalHeader().setSectionResizeMode(QHeaderView.Interactive)
    table.horizontalHeader().setHighlightSections(False)
    table.horizontalHeader().setResizeContentsPrecision(MEASURED)
    table.verticalHeader().setDefaultSectionSize(table.fontMetrics().lineSpacing() + 6)
    return table


def _label(name: str, text: str = "") -> QLabel:
    label = QLabel(text)
    label.setWordWrap(True)
    label.setAccessibleName(name)
    label.setTextFormat(Qt.PlainText)
    return label


def _button(text: str, tip: str) -> QPushButton:
    button = QPushButton(text)
    button.setToolTip(tip)
    button.setSizePolicy(QSizePolicy.Ignored, QSizePolicy.Fixed)  # the slide needs the room
    return button


def _row(*widgets: QWidget) -> QHBoxLayout:
    row = QHBoxLayout()
    for widget in widgets:
        row.addWidget(widget)
    return row
