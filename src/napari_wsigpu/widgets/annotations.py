"""The dock "Annotate": what is drawn on a slide, measured, and exchanged with QuPath."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from magicgui.widgets import LineEdit, PushButton
from napari.layers import Labels, Points, Shapes
from qtpy.QtCore import QTimer
from qtpy.QtGui import QColor, QIcon, QKeySequence, QPixmap
from qtpy.QtWidgets import QApplication, QShortcut

from napari_wsigpu.annotations import read_geojson, recovery, write_geojson
from napari_wsigpu.conversion.labels import save_labels
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.slide.facts import level_names
from napari_wsigpu.slide.pictures import save_text
from napari_wsigpu.viewer.annotating import annotating, is_looked_after, preload
from napari_wsigpu.viewer.annotations import (
    MANY,
    SLIDE,
    annotation_layers,
    annotation_layers_of,
    drawing_layer,
)
from napari_wsigpu.viewer.layers import slide_name
from napari_wsigpu.viewer.navigation import look_at_all_of
from napari_wsigpu.viewer.new_labels import LEVEL, add_labels, best_level
from napari_wsigpu.widgets.annotation_table import EDITABLE, AnnotationTable
from napari_wsigpu.widgets.classes import NONE, classes_of, classify, new_color, set_texts
from napari_wsigpu.widgets.kit.parts import (
    Heading,
    Panel,
    Text,
    button,
    choice,
    flow,
    offer,
    row,
)
from napari_wsigpu.widgets.kit.saving import ask_what_to_open, ask_where_to_save, start_folder
from napari_wsigpu.widgets.kit.table import Table
from napari_wsigpu.widgets.slide_dock import SlideDock

if TYPE_CHECKING:
    from napari import Viewer

    from napari_wsigpu.annotations import Annotation
    from napari_wsigpu.slide.slide import Slide

NO_SLIDE = "Open a slide, or select its layer, to annotate it."
NO_SHAPES = "Nothing is drawn yet: choose a tool, and draw on the slide."
LOST = "An earlier session ended without saving its annotations of this slide."
TOOLS = {
    "Rectangle": ("add_rectangle", "Draw rectangles on the slide"),
    "Outline": ("add_polygon_lasso", "Draw around objects on the slide with the button held down"),
    "Line": ("add_line", "Draw lines on the slide"),
    "Point": ("add", "Set points on the slide"),
}
PATIENCE_MS = 100
KEYS = 9  # classes that have one, Alt+1 to Alt+9
SWATCH = 10  # pixels
GEOJSON = "GeoJSON (*.geojson *.geojson.gz *.json)"
ZARR = "OME-Zarr (*.zarr)"
CSV = "Comma-separated values (*.csv)"


class Annotations(SlideDock):
    """Draws, measures, imports and exports what lies on a slide.

    Parameters
    ----------
    napari_viewer : Viewer
        The viewer whose layers of annotations are shown.
    """

    title_in_tabs = "Annotate"

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer, NO_SLIDE)
        self._folder: Path | None = None
        self._leave: list[Any] = []
        self._lost: list[Path] = []
        self._shortcuts: list[QShortcut] = []
        self._classes: dict[str, str] = {}
        self._class = ""
        self._syncing = False
        alone = not is_looked_after(napari_viewer)  # in a viewer without a window
        self.keeper = annotating(napari_viewer)
        if alone:
            self.at_end.append(self.keeper.close)
        self._patience = QTimer(self.native)
        self._patience.setSingleShot(True)
        self._patience.setInterval(PATIENCE_MS)
        self._patience.timeout.connect(self._refresh)

        self.tools = {
            name: button(name, tip, partial(self._draw, name)) for name, (_, tip) in TOOLS.items()
        }
        self.undo = button("Undo", "Take the last change back (Ctrl+Z)", self._undo)
        self.redo = button("Redo", "Make it again (Ctrl+Shift+Z)", partial(self._undo, again=True))
        self.recover = button("Restore", "Show them on the slide", self._recover)
        self.forget = button("Discard", "Delete them for good", partial(self._recover, show=False))
        self.lost = Panel(Text("Lost annotations", LOST), row(self.recover, self.forget))
        self.chips: dict[str, PushButton] = {}
        self.chip_box = flow()
        self.own_class = LineEdit(tooltip="Another class: write its name, and press Enter")
        self.own_class.native.setPlaceholderText("Another class")
        self.own_class.native.setAccessibleName("Class")
        self.classify = button(
            "Set", "Give this class to what is selected, or is drawn next", self._set_own_class
        )
        self.rows = AnnotationTable()
        self.table = Table("Annotations", self.rows, self._on_rows, self._jump, self._edit)
        self.nothing = Text("Nothing", NO_SHAPES)
        self.summary = Text("Sum")
        self.copy = button("Copy", "Copy the selected rows, or all, for a spreadsheet", self._copy)
        self.save = button("Save…", "Save all rows as CSV", self._save)
        self.load = button(
            "Import…", "Open objects that QuPath exported (GeoJSON)", self._import, "Import GeoJSON"
        )
        self.export = button(
            "Export…",
            "Save shapes, points and labels on this slide for QuPath (GeoJSON)",
            self._export,
            "Export GeoJSON",
        )
        self.level = choice(
            "Level of new labels",
            "The level whose pixels are painted; a finer one takes more memory",
        )
        self.add_labels = button(
            "New",
            "Paint on the slide with the pixels of this level",
            self._add_labels,
            "New labels",
        )
        self.save_labels = button(
            "Save…",
            "Save the layer of labels that is selected as OME-Zarr, with its level of the slide",
            self._save_labels,
            "Save labels",
        )
        self.status = Text("Status")
        page = Panel(
            self.lost,
            Heading("Draw"),
            row(*self.tools.values(), narrow=True, spacing=3),
            Heading("Classes"),
            self.chip_box,
            row(self.own_class, self.classify),
            Heading("Measure"),
            self.nothing,
            self.table,
            self.summary,
            row(self.undo, self.redo, self.copy, self.save, narrow=True, spacing=3),
            row(self.load, self.export, narrow=True),
            Heading("Labels"),
            self.level,
            row(self.add_labels, self.save_labels, narrow=True),
            self.status,
        )
        page.stretch(self.table)
        page.stretch()
        self.add_details(page, scrolled=True)

        self.own_class.native.returnPressed.connect(self._set_own_class)
        self.jobs.slow.connect(self._on_slow)
        self.listen(self.viewer.layers.events.inserted, self._hear_layers)
        self.listen(self.viewer.layers.events.removed, self._hear_layers)
        self.at_end.append(partial(_leave, self._leave))
        self.follow()

    def _add_keys(self) -> None:
        """Let keys work in all of the window, also while the dock is behind others."""
        reactions: dict[Any, Any] = {
            f"Alt+{key}": partial(self._use_key, key) for key in range(1, KEYS + 1)
        }
        reactions[QKeySequence.Undo] = self._undo_by_key
        reactions[QKeySequence.Redo] = partial(self._undo_by_key, again=True)
        for keys, react in reactions.items():
            made = QShortcut(QKeySequence(keys), self.native.window())
            made.activated.connect(react)
            self._shortcuts.append(made)
            self.at_end.append(made.deleteLater)

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
        self.status.say("")
        if slide is not None:
            offer(self.level, [(name, number) for number, name in level_names(slide)])
            self.level.value = best_level(slide)
        self._lost = [] if slide is None else recovery.lost(slide.path)
        self.lost.visible = bool(self._lost)
        self._hear_layers()

    def on_shown(self, event: Any) -> None:
        """Look soon at how wide columns must be: only napari's style, which comes now, tells."""
        super().on_shown(event)
        self._soon()
        preload()
        if not self._shortcuts:
            self._add_keys()

    # What is shown

    def layers(self) -> list[Shapes | Points]:
        """Return the slide's layers of shapes and points."""
        found = [] if self.slide is None else annotation_layers_of(self.viewer, self.slide)
        return [layer for layer in found if isinstance(layer, Shapes | Points)]

    def active_layer(self) -> Shapes | Points | None:
        """Return the active layer if it is one of them."""
        active = self.viewer.layers.selection.active
        # napari hands proxies to docks: no two of them are the same object.
        return next((layer for layer in self.layers() if layer == active), None)

    def _hear_layers(self, event: Any = None) -> None:
        """Follow what happens in the slide's layers."""
        _leave(self._leave)
        for layer in self.layers():
            for signal in (layer.events.data, layer.events.features, layer.events.set_data):
                self._hear(signal, self._soon)
            self._hear(layer.selected_data.events.items_changed, self._on_objects)
        self._refresh()

    def _hear(self, signal: Any, slot: Any) -> None:
        signal.connect(slot)
        self._leave.append(partial(signal.disconnect, slot))

    def _soon(self, event: Any = None) -> None:
        self._patience.start()

    def _refresh(self) -> None:
        layer, slide = self.layer_of_slide(), self.slide
        self.rows = AnnotationTable()
        if slide is not None and layer is not None:
            self.rows = AnnotationTable.of(self.viewer, self.layers(), layer, slide.mpp)
        self.table.show_rows(self.rows)
        empty = not len(self.rows)
        self.nothing.visible = empty
        self.table.visible = self.summary.visible = not empty
        self.copy.enabled = self.save.enabled = not empty
        self._offer_classes()
        self._on_objects()

    def _offer_classes(self) -> None:
        classes = classes_of(self.layers())
        if self._class and self._class not in classes:
            classes[self._class] = self._classes.get(self._class) or new_color(list(classes))
        if classes == self._classes:
            return
        self._classes = classes
        for chip in self.chips.values():
            chip.native.deleteLater()
        self.chips = {}
        for number, (name, color) in enumerate(classes.items(), 1):
            key = f" (Alt+{number})" if number <= KEYS else ""
            tip = f"Give the class {name} to what is selected, or is drawn next{key}"
            self.chips[name] = chip = button(name, tip, partial(self.set_class, name), name)
            swatch = QPixmap(SWATCH, SWATCH)
            swatch.fill(QColor(color))
            chip.native.setIcon(QIcon(swatch))
            chip.native.setCheckable(True)
            self.chip_box.native.layout().addWidget(chip.native)
        self._mark_class()

    def _mark_class(self) -> None:
        for name, chip in self.chips.items():
            chip.native.setChecked(name == self._class)

    def _on_objects(self, *_: Any) -> None:
        """Select the rows of the objects that are selected."""
        if self._syncing:
            return
        rows = [
            number
            for layer in self.layers()
            for number in self.rows.rows_of(layer, layer.selected_data)
        ]
        self.table.select(rows)
        self.summary.value = self.rows.summary(self.table.selection)

    def _on_rows(self) -> None:
        """Select the objects of the rows that are selected, in the layer that they are in."""
        selected = self.table.selection
        chosen: dict[int, set[int]] = {}
        for number, index in map(self.rows.place, selected):
            chosen.setdefault(number, set()).add(index)
        if chosen and self.active_layer() not in [self.rows.layers[number] for number in chosen]:
            self.viewer.layers.selection.active = self.rows.layers[next(iter(chosen))]
        self._syncing = True
        for number, layer in enumerate(self.rows.layers):
            layer.selected_data = chosen.get(number, set())
        self._syncing = False
        self.summary.value = self.rows.summary(selected)

    def _jump(self, number: int) -> None:
        """Have the viewer show an object."""
        layer = self.layer_of_slide()
        if layer is not None:
            look_at_all_of(self.viewer, layer, self.rows.box(number))

    # What is drawn

    def _draw(self, tool: str) -> None:
        """Let the user draw in the slide's own layer, or a new one over the slide."""
        layer = self.layer_of_slide()
        if layer is None or self.slide is None:
            return
        mode, tip = TOOLS[tool]
        kind = Points if tool == "Point" else Shapes
        active, own = (
            self.active_layer(),
            [each for each in self.layers() if isinstance(each, kind)],
        )
        drawn = active if isinstance(active, kind) else own[-1] if own else None
        if drawn is None:
            drawn = drawing_layer(self.viewer, layer, self.slide, points=kind is Points)
        self.draw_in(drawn, mode)
        drawn.selected_data = set()
        classify(drawn, (), self._class, self._classes.get(self._class, NONE))
        self.status.say(f"{tip}.")

    def set_class(self, name: str) -> None:
        """Give a class to what is selected in the active layer, and to what is drawn next."""
        self._class = name
        self._offer_classes()
        active = self.active_layer()
        if active is not None:
            classify(active, active.selected_data, name, self._classes.get(name, NONE))
            self._refresh()
        self._mark_class()

    def _set_own_class(self) -> None:
        self.set_class(self.own_class.value.strip())

    def _use_key(self, key: int) -> None:
        names = list(self.chips)
        if self.slide is not None and key <= len(names):
            self.set_class(names[key - 1])

    def _edit(self, number: int, at: int, text: str) -> None:
        place, index = self.rows.place(number)
        layer, text = self.rows.layers[place], text.strip()
        if at == 0:
            color = (self._classes.get(text) or new_color(list(self._classes))) if text else NONE
            defaults = layer.feature_defaults
            classify(layer, [index], text, color)
            layer.feature_defaults = defaults
        else:
            set_texts(layer, EDITABLE[at], [index], text)
        self._refresh()

    def _undo(self, *, again: bool = False) -> None:
        if self.slide is not None:
            done = self.keeper.undo(self.slide, again=again)
            what = "made again" if again else "undone"
            self.status.say("" if done else f"There is nothing to be {what}.")
            self._refresh()

    def _undo_by_key(self, *, again: bool = False) -> None:
        active = self.viewer.layers.selection.active
        if isinstance(active, Labels):  # napari's own key, which this one takes
            (active.redo if again else active.undo)()
        else:
            self._undo(again=again)

    # What is exchanged

    def _copy(self) -> None:
        text = self.rows.table(self.table.selection, "\t")
        QApplication.clipboard().setText(text)
        rows = text.count("\n") - 1
        self.status.say(f"Copied {rows:,} row{'' if rows == 1 else 's'}.")

    def _save(self) -> None:
        path = self._ask_where("Save table", ".csv", CSV)
        if path:
            self._write(path, partial(save_text, self.rows.table(), path))

    def _import(self) -> None:
        slide = self.slide
        if slide is None:
            return
        folder = start_folder(self._folder, slide)
        path = ask_what_to_open(self.native, "Import annotations", folder, GEOJSON)
        if path:
            self._folder = Path(path).parent
            self.jobs.start(
                f"Reading {Path(path).name}",
                slide,
                partial(read_geojson, path),
                partial(self._add, Path(path).name),
                self.status.say,
                owner=self,
            )

    def _add(self, name: str, annotations: list[Annotation]) -> None:
        layers = annotation_layers(annotations, name.partition(".")[0], self.layer_of_slide())
        for data, attributes, kind in layers:
            getattr(self.viewer, f"add_{kind}")(data, **attributes)
        plural = "" if len(annotations) == 1 else "s"
        many = f" {MANY}" if any(kind == "labels" for *_, kind in layers) else ""
        self.status.say(f"'{name}': {len(annotations):,} object{plural}.{many}")

    def _recover(self, *, show: bool = True) -> None:
        """Show what an earlier session left, or drop it."""
        try:
            for path in self._lost:
                found = recovery.take(path)
                if show and self.slide is not None:
                    self._add("Recovered", found)
                    self.keeper.history(self.slide).unsaved = True
        except SlideError as error:
            self.status.say(str(error))
        self._lost = []
        self.lost.visible = False

    def _export(self) -> None:
        slide, layer = self.slide, self.layer_of_slide()
        if slide is None or layer is None:
            return
        labels = [each for each in self.viewer.layers.selection if isinstance(each, Labels)]
        annotations = self.keeper.annotations(slide, labels)
        if not annotations:
            self.status.say("There is nothing to export: draw shapes, or select a layer of labels.")
            return
        path = self._ask_where("Export annotations", ".geojson", GEOJSON)
        if path:
            done = partial(self.keeper.saved, slide)
            self._write(path, partial(write_geojson, path, annotations), done)

    def _add_labels(self) -> None:
        layer, slide = self.layer_of_slide(), self.slide
        if layer is None or slide is None:
            return
        try:
            labels = add_labels(self.viewer, layer, slide, self.level.value)
        except SlideError as error:
            self.status.say(str(error))
            return
        labels.mode = "paint"

    def _save_labels(self) -> None:
        slide, labels = self.slide, self.viewer.layers.selection.active
        if slide is None:
            return
        level = labels.metadata.get(LEVEL) if isinstance(labels, Labels) else None
        if level is None or labels.metadata.get(SLIDE) != slide.path:
            self.status.say("Select a layer of labels that 'New' has made for this slide.")
            return
        path = self._ask_where("Save labels", " labels.zarr", ZARR)
        if path:
            pixels = np.array(labels.data)
            self._write(
                path, partial(save_labels, slide, path, pixels, level=level, name=labels.name)
            )

    def _on_slow(self, what: str) -> None:
        """Say what takes long; what became of it is said when it is done."""
        if what:
            self.status.say(f"{what}…")

    def _write(self, path: str, work: Any, then: Any = None) -> None:
        name = Path(path).name

        def done(_: Any) -> None:
            self.status.say(f"Saved '{name}'.")
            if then is not None:
                then()

        if self.slide is not None:
            self.jobs.start(f"Writing {name}", self.slide, work, done, self.status.say)

    def _ask_where(self, title: str, ending: str, filters: str) -> str:
        slide = self.slide
        if slide is None:
            return ""
        start = start_folder(self._folder, slide) / f"{slide_name(slide)}{ending}"
        path = ask_where_to_save(self.native, title, start, filters)
        if path:
            self._folder = Path(path).parent
        return path


def _leave(signals: list[Any]) -> None:
    for leave in signals:
        leave()
    signals.clear()
