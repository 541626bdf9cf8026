"""The "Annotate" dock: drawing, measuring and exchanging annotations of a slide."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from magicgui.widgets import LineEdit, PushButton
from napari.layers import Labels, Points, Shapes
from napari.layers.base import ActionType
from qtpy.compat import isalive
from qtpy.QtCore import Qt
from qtpy.QtGui import QColor, QIcon, QKeySequence, QPixmap
from qtpy.QtWidgets import (
    QAction,
    QApplication,
    QColorDialog,
    QInputDialog,
    QMessageBox,
    QShortcut,
)

from napari_wsigpu.annotations import (
    read_geojson,
    recovery,
    write_dicom_annotations,
    write_geojson,
)
from napari_wsigpu.annotations.duplicates import skipped_sentence, without_known
from napari_wsigpu.annotations.geojson import empty_sentence, read_features
from napari_wsigpu.conversion.label_images import read_labels, save_labels
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.slide.facts import level_names, title
from napari_wsigpu.slide.pictures import save_text
from napari_wsigpu.viewer.annotations.annotation_layers import (
    CLASS,
    FOR_EXPORT,
    MANY,
    OBJECTS,
    SLIDE,
    annotation_layers,
    annotation_layers_of,
    drawing_layer,
    draws,
    layer_to_draw_in,
)
from napari_wsigpu.viewer.annotations.annotator import (
    annotator_of,
    has_annotator,
    preload,
    remove_from,
)
from napari_wsigpu.viewer.annotations.empty_labels import LEVEL, add_labels, best_level
from napari_wsigpu.viewer.layers.slide_layers import slide_name, stem_of
from napari_wsigpu.viewer.napari_internals import is_being_drawn
from napari_wsigpu.viewer.view.navigation import center_on_box
from napari_wsigpu.viewer.window.main_window import may_discard, single_shot, soon
from napari_wsigpu.viewer.window.saving import (
    GEOJSON,
    GEOJSON_TO_READ,
    ask_for_file,
    ask_for_folder,
    ask_where_to_save,
    saved,
    start_folder,
)
from napari_wsigpu.viewer.window.settings import settings
from napari_wsigpu.widgets.annotations.annotation_table import EDITABLE, AnnotationTable
from napari_wsigpu.widgets.annotations.classes import (
    NONE,
    classes_of,
    classify,
    keep_offered,
    new_color,
    offered_classes,
    reclassify,
    set_texts,
)
from napari_wsigpu.widgets.dock.slide_dock import SlideDock
from napari_wsigpu.widgets.kit.parts import Heading, Panel, Text, button, choice, flow, offer, row
from napari_wsigpu.widgets.kit.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from napari import Viewer
    from napari.layers import Layer
    from napari.utils.events import Event
    from numpy.typing import NDArray

    from napari_wsigpu.annotations import Annotation
    from napari_wsigpu.model.arrays import Array, Mask
    from napari_wsigpu.slide.slide import Slide

NO_SLIDE = "Open a slide, or select its layer, to annotate it."
NO_SHAPES = "Nothing has been drawn yet: choose a tool, and draw on the slide."
NOTHING_TO_SELECT = "There is nothing to select yet."
NO_CLASSES = "Labels have no classes; choose the label to paint in napari's layer controls."
BEYOND = "It is not entirely on the slide."
SAVED_AT = "saved at"  # metadata key: the OME-Zarr that holds a labels layer
NOT_SAVED = "Labels are not saved automatically."
LOST = "An earlier session ended without saving its annotations of '{}'."
NEXT_ONES = "The next objects will be '{}'. To change the '{}' just drawn, click its row first."
DELETE = "The lost annotations cannot be restored afterwards. Delete them?"
SELECT = "Select"
TOOLS = {
    SELECT: ("select", "Click objects to select them, then move, change or delete them"),
    "Rectangle": ("add_rectangle", "Draw rectangles on the slide"),
    "Ellipse": ("add_ellipse", "Draw ellipses on the slide"),
    "Outline": ("add_polygon_lasso", "Hold down the mouse button to draw around objects"),
    "Polygon": ("add_polygon", "Click the corners of an outline; a double click ends it"),
    "Line": ("add_line", "Draw lines on the slide"),
    "Point": ("add", "Place points on the slide"),
}
HINTS = {mode: f"{tip}." for mode, tip in TOOLS.values()}
PATIENCE_MS = 100
KEYS = 9  # number of classes with a shortcut, Alt+1 to Alt+9
SWATCH = 10  # pixels
TIGHT = 4  # pixels; some rows of the table are visible in napari's first window
DICOM = "DICOM annotations (*.dcm)"
ZARR = "OME-Zarr (*.zarr)"
MERGE = "There already is a class '{1}'. Make '{0}' and '{1}' one class?"
IN_USE = "Objects have the class '{}'; change their class before you forget it."
OTHER_SLIDES = "Objects of '{}' on other slides keep the change; undo it there, too."
WIDEST_CHIP = 180  # pixels of text
CSV = "Comma-separated values (*.csv)"


class Annotations(SlideDock):
    """Draws, measures, imports and exports annotations of a slide.

    Parameters
    ----------
    napari_viewer : Viewer
        The viewer whose annotation layers are shown.
    """

    title_in_tabs = "Annotate"

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer, NO_SLIDE)
        self._disconnects: list[Callable[[], object]] = []
        self._lost: list[Path] = []
        self._shortcuts: list[QShortcut] = []
        self._classes: dict[str, str] = {}
        self._class = ""
        self._offered = offered_classes()
        self._syncing = False
        self._has_drawn = False  # since the user last chose rows
        # Layers with objects that the user selected together in the table; only the active layer's
        # selection counts otherwise.
        self._together: list[Shapes | Points] = []
        self._problem = ""
        self._is_unmeasured = False  # whether the size of a drawn object has to be shown
        self._size = ""
        creates_annotator = not has_annotator(napari_viewer)  # in a viewer without a window
        self.keeper = annotator_of(napari_viewer)
        if creates_annotator:
            self.at_end.append(self.keeper.close)
        self._refresh_timer = single_shot(self._refresh, PATIENCE_MS, self.native)

        self.tools = {
            name: button(name, tip, partial(self.draw, name)) for name, (_, tip) in TOOLS.items()
        }
        for each in self.tools.values():
            each.native.setCheckable(True)
        self.undo = button("Undo", "Undo the last change (Ctrl+Z)", self._undo)
        redo = partial(self._undo, again=True)
        self.redo = button("Redo", "Redo the last undone change (Ctrl+Shift+Z)", redo)
        self.recover = button("Restore", "Show the lost annotations on the slide", self._recover)
        discard = partial(self._recover, show=False)
        self.forget = button("Discard", "Delete the lost annotations permanently", discard)
        self.loss = Text("Lost annotations")
        self.lost = Panel(self.loss, row(self.recover, self.forget))
        self.chips: dict[str, PushButton] = {}
        self.chip_box = flow()
        self.own_class = LineEdit(tooltip="Type the name of another class and press Enter")
        self.own_class.native.setPlaceholderText("Another class")
        self.own_class.native.setAccessibleName("Class")
        self.classify = button(
            "Set", "Assign this class to selected objects and to new ones", self._set_own_class
        )
        self.unclassify = button(
            "None",
            "Remove the class of selected objects, and give new ones none",
            partial(self.set_class, ""),
        )
        self.rows = AnnotationTable()
        reactions = self._on_rows, self._jump, self._edit, self._delete
        self.table = Table("Annotations", self.rows, *reactions)
        self.nothing = Text("Nothing", NO_SHAPES)
        self.summary = Text("Sum")
        self.copy = button("Copy", "Copy the selected rows, or all rows, as a table", self._copy)
        self.save = button("Save…", "Save all rows as CSV", self._save)
        self.load = button(
            "Import…", "Open objects exported from QuPath (GeoJSON)", self._import, "Import GeoJSON"
        )
        self.export = button(
            "Export…",
            "Save this slide's shapes, points and selected labels as GeoJSON or DICOM",
            self._export,
            "Export GeoJSON",
        )
        self.level = choice(
            "Level of new labels",
            "The level whose resolution new labels get; finer levels take more memory",
        )
        self.add_labels = button(
            "New",
            "Paint on the slide at the resolution of this level",
            self._add_labels,
            "New labels",
        )
        self.open_labels = button(
            "Open…",
            "Go on with labels that were saved for this slide",
            self._open_labels,
            "Open labels",
        )
        self.save_labels = button(
            "Save…",
            "Save the labels layer as OME-Zarr, together with the pixels of the slide level it was "
            "painted on",
            self._save_labels,
            "Save labels",
        )
        self.status = Text("Status")
        page = Panel(
            Heading("Draw"),
            flow(*self.tools.values()),
            Heading("Classes"),
            self.chip_box,
            row(self.own_class, self.classify, self.unclassify),
            Heading("Measure"),
            self.nothing,
            self.table,
            self.summary,
            row(self.undo, self.redo, self.copy, self.save, narrow=True, spacing=3),
            row(self.load, self.export, narrow=True),
            Heading("Labels"),
            self.level,
            row(self.add_labels, self.open_labels, self.save_labels, narrow=True),
            Text("Saving of labels", NOT_SAVED),
        )
        page.native.layout().setSpacing(TIGHT)
        page.stretch(self.table)
        page.stretch()
        self.append(self.lost)  # above the part that scrolls
        self.add_details(page, self.status)

        self.own_class.native.returnPressed.connect(self._set_own_class)
        self.own_class.native.textChanged.connect(self._enable_set)
        self._enable_set("")
        self.jobs.slow.connect(self._on_slow)
        self.listen(self.viewer.layers.events.inserted, self._reconnect)
        self.listen(self.viewer.layers.events.removed, self._reconnect)
        self.listen(self.viewer.layers.selection.events.active, self._on_objects)
        self.listen(self.keeper.recorded, self._enable_undo)
        presses = self.viewer.mouse_drag_callbacks
        presses.append(self._on_press)
        self.at_end.append(partial(presses.remove, self._on_press))
        self.at_end.append(partial(_call_all, self._disconnects))
        self.follow()

    def _add_keys(self) -> None:
        """Add shortcuts for the whole window, which work even while the dock is behind others."""
        reactions: dict[object, Callable[..., object]] = {
            f"Alt+{key}": partial(self._use_key, key) for key in range(1, KEYS + 1)
        }
        reactions[QKeySequence.Undo] = self._undo_by_key
        reactions[QKeySequence.Redo] = partial(self._undo_by_key, again=True)
        for keys, react in reactions.items():
            shortcut = QShortcut(QKeySequence(keys), self.native.window())
            shortcut.activated.connect(react)
            self._shortcuts.append(shortcut)
            self.at_end.append(shortcut.deleteLater)

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
        self.status.say("")
        if slide is not None:
            self.loss.value = LOST.format(title(slide))
            offer(self.level, [(name, number) for number, name in level_names(slide)])
            self.level.value = best_level(slide)
        self._lost = [] if slide is None else recovery.orphans(slide.path)
        self.lost.visible = bool(self._lost)
        soon(self.native, self.on_resized)  # the width of the text is known after the layout
        self._reconnect()

    def on_shown(self, spontaneous: bool = False) -> None:
        """Fit the columns once napari's style, which sets the font, is applied."""
        super().on_shown(spontaneous)
        self._refresh_soon()
        preload()
        if not self._shortcuts:
            self._add_keys()

    def on_resized(self) -> None:
        """Keep room for messages."""
        self.reserve(self.status, 3)
        self.loss.keep_room()

    # Display

    def layers(self, slide: Slide | None = None) -> list[Shapes | Points]:
        """Return the shapes and points layers of a slide, by default the dock's."""
        slide = slide or self.slide
        found = [] if slide is None else annotation_layers_of(self.viewer, slide.path)
        return [layer for layer in found if isinstance(layer, Shapes | Points)]

    def active_layer(self) -> Shapes | Points | None:
        """Return the active layer if it contains annotations of the slide."""
        active = self.viewer.layers.selection.active
        # napari wraps layers in proxies for docks, so compare by equality, not identity.
        return next((layer for layer in self.layers() if layer == active), None)

    def _selected_in(self) -> list[Shapes | Points]:
        """Return the layers whose selected objects get a class, or are deleted."""
        active = self.active_layer()
        return self._together or ([] if active is None else [active])

    def _reconnect(self, event: Event | None = None) -> None:
        """Reconnect to the events of the slide's layers."""
        _call_all(self._disconnects)
        for layer in self.layers():
            for signal in (layer.events.data, layer.events.features):
                self._connect(signal, self._on_changes)
            self._connect(layer.events.set_data, self._refresh_soon)
            self._connect(layer.selected_data.events.items_changed, self._on_objects)
            self._connect(layer.events.mode, self._mark_tool)
        self._forget_problem()
        self._refresh()

    def _connect(self, signal: Event, slot: Callable[..., object]) -> None:
        signal.connect(slot)
        self._disconnects.append(partial(signal.disconnect, slot))

    def _on_changes(self, event: Event | None = None) -> None:
        # Now rather than in `_refresh`, which would erase a problem that arose in the meantime.
        self._forget_problem()
        self._refresh_soon()
        removing = getattr(event, "action", None) == ActionType.REMOVING
        if event is not None and removing and self._together:
            self._delete(event.source)  # napari deletes objects of the active layer only

    def _refresh_soon(self, event: Event | None = None) -> None:
        self._refresh_timer.start()

    def _refresh(self) -> None:
        self._refresh_timer.stop()  # a pending call is no longer needed
        layer, slide = self.layer_of_slide(), self.slide
        self.rows = AnnotationTable()
        if slide is not None and layer is not None:
            self.rows = AnnotationTable.of(self.viewer, self.layers(), layer, slide)
        self.table.show_rows(self.rows)
        empty = not len(self.rows)
        self.nothing.visible = empty
        self.table.visible = self.summary.visible = not empty
        self.copy.enabled = self.save.enabled = not empty
        self._enable_undo()
        self._offer_classes()
        self._select_rows()
        self._show_size()

    def _show_size(self) -> None:
        """Show the size of the object drawn last in place of the tool's hint."""
        active = self.active_layer()
        if self._is_unmeasured and active is not None and self._is_drawn(active):
            self._is_unmeasured = False
            for row in self.rows.rows_of(active, active.selected_data):
                self._size = self.rows.sizes(row)
                if self.slide is not None and _outside(self.rows.box(row), self.slide).any():
                    self._size = f"{self._size}. {BEYOND}" if self._size else BEYOND
                if self._size or self.status.value in HINTS.values():  # points have no size
                    self.status.say(self._size)

    def _enable_undo(self, event: Event | None = None) -> None:
        if self.slide is not None:
            history = self.keeper.history(self.slide.path)
            self.undo.enabled, self.redo.enabled = history.has_steps

    def _offer_classes(self) -> None:
        others = [each for slide in self.slides() for each in self.layers(slide)]
        classes = classes_of([*self.layers(), *others], self._offered)
        if classes == self._classes:
            return
        self._classes = classes
        layout = self.chip_box.native.layout()
        for chip in self.chips.values():
            layout.removeWidget(chip.native)
            chip.native.deleteLater()
        self.chips = {}
        for number, (name, color) in enumerate(classes.items(), 1):
            key = f" (Alt+{number})" if number <= KEYS else ""
            tip = f"Assign the class {name} to selected objects and to new ones{key}"
            metrics = self.chip_box.native.fontMetrics()
            # Qt would underline the letter after an "&".
            text = metrics.elidedText(name, Qt.ElideMiddle, WIDEST_CHIP).replace("&", "&&")
            self.chips[name] = chip = button(text, tip, partial(self.set_class, name), name)
            swatch = QPixmap(SWATCH, SWATCH)
            swatch.fill(QColor(color))
            chip.native.setIcon(QIcon(swatch))
            chip.native.setCheckable(True)
            chip.native.setContextMenuPolicy(Qt.ActionsContextMenu)
            self._add_action(chip, "Color…", partial(self._choose_color, name))
            self._add_action(chip, "Rename…", partial(self._choose_name, name))
            if name in self._offered:
                self._add_action(chip, "Forget", partial(self._forget_class, name))
            layout.addWidget(chip.native)
        self._mark_class()

    def _add_action(self, chip: PushButton, text: str, react: Callable[[], object]) -> None:
        action = QAction(text, chip.native)
        action.triggered.connect(lambda: react())
        chip.native.addAction(action)

    def _choose_color(self, name: str) -> None:
        """Let the user choose the color of a class."""
        old = QColor(self._classes[name])
        color = QColorDialog.getColor(old, self.native, f"Color of {name}")
        if color.isValid():
            self._change_class(name, name, color.name())

    def _choose_name(self, name: str) -> None:
        """Let the user rename a class; if another class has the name, they become one."""
        text, accepted = QInputDialog.getText(self.native, f"Rename {name}", "Name:", text=name)
        new = text.strip()
        if not accepted or new in ("", name):
            return
        is_new, question = new not in self._classes, MERGE.format(name, new)
        if is_new or may_discard(self.native, "Rename class", question, QMessageBox.Yes):
            self._change_class(name, new, self._classes.get(new, self._classes[name]))

    def _change_class(self, name: str, new: str, color: str) -> None:
        """Change name and color of a class, and of its objects on all slides."""
        before, marked = dict(self._offered), self._class
        # Undo marks the old class again, unless the user had marked the one that it became.
        back = new if marked != name and new in self._classes else name
        after = {new if each == name else each: kept for each, kept in before.items()}
        after[new] = color
        self._replace_classes(before, after, name, new)
        self.keeper.unsaved()  # makes a step of what has changed until now
        found = self._with_class(name)
        many = len(found) > 1
        undo = partial(self._replace_classes, after, before, new, back, many=many)
        redo = partial(self._replace_classes, before, after, name, new)
        for path, layers in found.items():
            self.keeper.history(path).attach(undo, redo)
            for layer in layers:
                reclassify(layer, np.flatnonzero(layer.features[CLASS] == name), new, color)
        self._refresh()
        self._mark_class()

    def _with_class(self, name: str) -> dict[str, list[Shapes | Points]]:
        """Return the layers with objects of a class, by the paths of the open slides."""
        found: dict[str, list[Shapes | Points]] = {}
        for slide in self.slides():
            for layer in self.layers(slide):
                if CLASS in layer.features and (layer.features[CLASS] == name).any():
                    found.setdefault(slide.path, []).append(layer)
        return found

    def _replace_classes(
        self, old: dict[str, str], now: dict[str, str], name: str, new: str, *, many: bool = False
    ) -> None:
        """Replace the classes that are offered, and the name of the marked class.

        `many` states that this undoes a change of objects on several slides; undo changes one.
        """
        if name in old and name not in self._offered:
            return  # forgotten since then
        forgotten = old.keys() - self._offered
        later = {each: color for each, color in self._offered.items() if each not in old}
        self._offered = {each: now[each] for each in now if each not in forgotten} | later
        keep_offered(self._offered)
        self._class = new if self._class == name else self._class
        if many:
            self.status.say(OTHER_SLIDES.format(name))

    def _forget_class(self, name: str) -> None:
        """Offer a class no longer, unless objects have it."""
        if self._with_class(name):
            self._refuse(IN_USE.format(name))
            return
        self._offered.pop(name, None)
        keep_offered(self._offered)
        self._class = "" if self._class == name else self._class
        self._offer_classes()

    def _mark_class(self) -> None:
        for name, chip in self.chips.items():
            chip.native.setChecked(name == self._class)

    def _on_objects(self, *_: object) -> None:
        if not self._syncing:
            self._forget_problem()
            active = self.active_layer()
            if active is not None:  # napari activates no layer before another one
                others, self._together = self._together, []
                for layer in others:
                    if layer != active:
                        layer.selected_data = set()
                        layer.update_highlight_visibility(False)
            self._select_rows()

    def _select_rows(self) -> None:
        """Select the rows of the selected objects."""
        if self._syncing:
            return
        chosen = [self.rows.rows_of(each, each.selected_data) for each in self._selected_in()]
        self.table.select(row for rows in chosen for row in rows)
        self.summary.value = self.rows.summary(self.table.selection)
        self._mark_tool()

    def _refuse(self, problem: str) -> None:
        """Show a problem until objects, or the active layer, change."""
        self._problem = problem
        self.status.say(problem)

    def _forget_problem(self) -> None:
        if self.status.value == self._problem:
            self.status.say("")

    def _mark_tool(self, event: Event | None = None) -> None:
        """Check the button of the active layer's mode, however it was chosen."""
        active = self.active_layer()
        for name, (mode, _) in TOOLS.items():
            is_current = active is not None and active.mode == mode
            self.tools[name].native.setChecked(is_current)
            if not is_current and self.status.value == HINTS[mode]:
                self.status.say("")
        is_shown = active is not None and (is_being_drawn(active) or self._is_drawn(active))
        if self._size and self.status.value == self._size and not is_shown:
            self.status.say("" if active is None else HINTS.get(active.mode, ""))

    def _on_rows(self) -> None:
        """Select the objects of the selected rows in their layer."""
        self._has_drawn = False
        places = [self.rows.position(row) for row in self.table.selection]
        current = self.table.current
        before = self.active_layer()
        self._syncing = True
        for each, layer in enumerate(self.rows.layers):
            layer.selected_data = {index for at, index in places if at == each}
        layers = [self.rows.layers[each] for each in sorted({at for at, _ in places})]
        self._together = layers if len(layers) > 1 else []
        if places:
            chosen = current in self.table.selection
            layer = self.rows.layers[self.rows.position(current)[0] if chosen else places[0][0]]
            if layer is not before:  # else the tool that was last used in this layer comes back
                layer.mode = before.mode if isinstance(before, type(layer)) else TOOLS[SELECT][0]
            self.viewer.layers.selection.active = layer
            for each in self._together:  # napari highlights objects of the active layer only
                each.update_highlight_visibility(True)
        self._syncing = False
        self._forget_problem()
        self._select_rows()

    def _jump(self, number: int) -> None:
        """Center the view on an object."""
        self._has_drawn = False  # its row may have been selected before
        layer = self.layer_of_slide()
        if layer is not None:
            center_on_box(self.viewer, layer, self.rows.box(number))

    # Drawing

    def draw(self, tool: str) -> None:
        """Let the user draw in a layer of the slide's annotations; add one if there is none."""
        layer = self.layer_of_slide()
        if layer is None or self.slide is None:
            return
        mode, _ = TOOLS[tool]
        kind = Points if tool == "Point" else Points | Shapes if tool == SELECT else Shapes
        active = self.active_layer()
        target = active if isinstance(active, kind) else layer_to_draw_in(self.layers(), kind)
        if target is None and tool != SELECT:
            target = drawing_layer(self.viewer, layer, self.slide, points=kind is Points)
        if target is None:
            self._refuse(NOTHING_TO_SELECT)
        else:
            self.draw_in(target, mode)
            if tool != SELECT:
                target.selected_data = set()
                self._classify(target)
            self.status.say(HINTS[mode])
        self._mark_tool()  # a click has toggled the button

    def set_class(self, name: str) -> None:
        """Assign a class to the selected objects and to new ones."""
        self._class = name
        self._color_of(name)
        self._offer_classes()
        for layer in self._selected_in():
            # The object that was drawn last keeps its class, if it has one.
            keeps = self._is_drawn(layer) and layer.features[CLASS].iloc[-1]
            self._classify(layer, () if keeps else layer.selected_data)
            if keeps and keeps != name:
                self.status.say(NEXT_ONES.format(name or "None", keeps))
        self._refresh()
        self._mark_class()
        if isinstance(self.viewer.layers.selection.active, Labels):
            self._refuse(NO_CLASSES)

    def _color_of(self, name: str) -> str:
        """Return the color of a class, which is also offered in other sessions from now on."""
        if not name:
            return NONE
        color = self._classes.get(name) or new_color(name, self._classes)
        if name not in self._offered:
            self._offered[name] = color
            keep_offered(self._offered)
        return color

    def _classify(self, layer: Shapes | Points, rows: Iterable[int] = ()) -> None:
        """Assign the marked class to objects of a layer and to new ones."""
        classify(layer, rows, self._class, self._classes.get(self._class, NONE))

    def _is_drawn(self, layer: Shapes | Points) -> bool:
        """Whether a layer's only selected object was drawn last, and selected by napari."""
        return (
            self._has_drawn
            and draws(layer)
            and not is_being_drawn(layer)
            and set(layer.selected_data) == {len(layer.data) - 1}
        )

    def _on_press(self, viewer: Viewer, event: Event) -> None:
        """Give the object that this press starts to draw the marked class.

        napari changes the class and color of new objects with the selection and with each
        assignment of features, as in undo.
        """
        active = self.active_layer()
        if active is not None and draws(active):
            self._classify(active)
            self._has_drawn = self._is_unmeasured = True

    def _delete(self, deleting: Layer | None = None) -> None:
        """Delete the selected objects, except those that napari is deleting already."""
        layers, self._together = self._selected_in(), []
        for layer in layers:
            if layer != deleting:
                layer.remove_selected()

    def _enable_set(self, name: str) -> None:
        self.classify.enabled = bool(name.strip())

    def _set_own_class(self) -> None:
        name = self.own_class.value.strip()
        self.own_class.value = ""
        if name:
            self.set_class(name)

    def _use_key(self, key: int) -> None:
        names = list(self.chips)
        if self.slide is not None and key <= len(names):
            self.set_class(names[key - 1])

    def _edit(self, row: int, column: int, text: str) -> None:
        number, index = self.rows.position(row)
        layer, text = self.rows.layers[number], text.strip()
        if column == 0:
            reclassify(layer, [index], text, self._color_of(text))
        else:
            set_texts(layer, EDITABLE[column], [index], text)
        soon(self.native, self._refresh)  # Qt still uses the row

    def _undo(self, *, again: bool = False) -> None:
        if self.slide is not None:
            self.status.say("")
            # The first change would end a selection in several layers.
            together, self._together = self._together, []
            self.keeper.undo(self.slide, again=again)
            self._select_together(together)
            self._refresh()
            self._mark_class()

    def _select_together(self, layers: Iterable[Shapes | Points]) -> None:
        """Go on with a selection in several layers, as far as their objects are still selected."""
        kept = [each for each in layers if each in self.viewer.layers and each.selected_data]
        self._together = kept if len(kept) > 1 else []
        for each in self._together:
            each.update_highlight_visibility(True)
        for each in kept if not self._together else ():
            if each != self.active_layer():
                each.selected_data = set()

    def _undo_by_key(self, *, again: bool = False) -> None:
        active = self.viewer.layers.selection.active
        if isinstance(active, Labels) and OBJECTS not in active.metadata:
            # Replaces napari's shortcut for labels that can be painted.
            (active.redo if again else active.undo)()
        elif isinstance(active, Shapes) and FOR_EXPORT in active.metadata:
            # Such regions have no history, and the user does not mean the annotations.
            if active.data and not again:
                remove_from(active, len(active.data) - 1)
        else:
            self._undo(again=again)

    # Import and export

    def _copy(self) -> None:
        text = self.rows.table(self.table.selection or self.table.order, "\t")
        QApplication.clipboard().setText(text)
        rows = text.count("\n") - 1
        self.status.say(f"Copied {rows:,} row{'' if rows == 1 else 's'}.")

    def _save(self) -> None:
        path = self._ask_where("Save table", ".csv", CSV)
        if path:
            self._write(path, partial(save_text, self.rows.table(self.table.order), path))

    def _import(self) -> None:
        slide = self.slide
        if slide is None:
            return
        folder = start_folder(slide.path)
        path = ask_for_file(self.native, "Import annotations", folder, GEOJSON_TO_READ)
        if path:
            name = Path(path).name
            known = self.keeper.snapshot(slide.path)

            def work() -> tuple[list[Annotation], int, int]:
                found, empty = read_features(path)
                return *without_known(found, known()), empty

            def done(found: tuple[list[Annotation], int, int]) -> None:
                self._add(name, *found)

            self.jobs.start(f"Reading {name}", slide, work, done, self.status.say, owner=self)

    def _add(
        self, name: str, annotations: list[Annotation], skipped: int = 0, empty: int = 0
    ) -> None:
        """Add objects to the slide; report their number, and those of objects left out."""
        title = stem_of(name.removesuffix(".gz").removesuffix(".zip"))
        layers = annotation_layers(annotations, title, self.layer_of_slide())
        tools = [tool for tool, chosen in self.tools.items() if chosen.native.isChecked()]
        count = 0  # as in the table, which lists each of several points
        for data, attributes, kind in layers:
            getattr(self.viewer, f"add_{kind}")(data, **attributes)
            count += len(attributes["metadata"].get(OBJECTS, data))
        for tool in tools:
            self.draw(tool)
        parts = [f"{count:,} object{'' if count == 1 else 's'}."] if count or not skipped else []
        if any(kind == "labels" for *_, kind in layers):
            parts.append(MANY)
        beyond = 0 if self.slide is None else _beyond(annotations, self.slide)
        if beyond:
            parts.append(f"{beyond:,} not entirely on the slide: is it the right one?")
        locked = sum(each.locked for each in annotations)
        if locked:
            parts.append(f"Locks are kept but not enforced ({locked:,}).")
        if skipped:
            parts.append(skipped_sentence(skipped))
        if empty:
            parts.append(empty_sentence(empty))
        self.status.say(f"'{name}': {' '.join(parts)}")

    def _recover(self, *, show: bool = True) -> None:
        """Show or delete the annotations that an earlier session left unsaved."""
        if not show and not may_discard(self.native, "Lost annotations", DELETE):
            return
        copies, self._lost = self._lost, []
        if show and self.slide is not None:
            known = self.keeper.annotations(self.slide)
            for path in [*copies]:
                try:
                    self._add("Recovered", *without_known(read_geojson(path), known))
                except SlideError as error:
                    copies.remove(path)
                    self.status.say(str(error))
            self.keeper.restored(self.slide, copies)
        else:
            for path in copies:
                path.unlink(missing_ok=True)
        self.lost.visible = False

    def _export(self) -> None:
        slide, layer = self.slide, self.layer_of_slide()
        if slide is None or layer is None:
            return
        labels = [each for each in self.viewer.layers.selection if isinstance(each, Labels)]
        annotations = self.keeper.annotations(slide, labels)
        if not annotations:
            self._refuse("There is nothing to export: draw shapes, or select a labels layer.")
            return
        kinds = f"{GEOJSON};;{DICOM}" if slide.vendor == "dicom" else GEOJSON
        path = self._ask_where("Export annotations", ".geojson", kinds)
        if path:
            work = partial(write_geojson, path, annotations)
            if path.lower().endswith(".dcm"):
                work = partial(
                    write_dicom_annotations,
                    path,
                    annotations,
                    slide,
                    private=settings().show_private,
                )
            self._write(path, work, partial(self.keeper.saved, slide.path))

    def _add_labels(self) -> None:
        layer, slide = self.layer_of_slide(), self.slide
        if layer is None or slide is None:
            return
        try:
            labels = add_labels(self.viewer, layer, slide, self.level.value)
        except SlideError as error:
            self._refuse(str(error))
            return
        labels.mode = "paint"

    def _open_labels(self) -> None:
        layer, slide = self.layer_of_slide(), self.slide
        if layer is None or slide is None:
            return
        path = ask_for_folder(self.native, "Open labels", start_folder(slide.path))
        if not path:
            return

        def done(found: dict[str, tuple[int, Array]]) -> None:
            try:
                for name, (number, pixels) in found.items():
                    labels = add_labels(self.viewer, layer, slide, number, pixels, name)
                    labels.mode, labels.metadata[SAVED_AT] = "paint", path
            except SlideError as error:
                self._refuse(str(error))
            else:
                self.status.say(f"'{Path(path).name}': {', '.join(found)}")

        work = partial(read_labels, slide, path)
        self.jobs.start(
            f"Reading {Path(path).name}", slide, work, done, self.status.say, owner=self
        )

    def _save_labels(self) -> None:
        slide, active = self.slide, self.viewer.layers.selection.active
        if slide is None:
            return
        own = [
            layer
            for layer in self.viewer.layers
            if LEVEL in layer.metadata and layer.metadata.get(SLIDE) == slide.path
        ]
        chosen = [active] if active in own else own
        if len(chosen) != 1:
            self._refuse("Select a labels layer that you created for this slide with 'New'.")
            return
        [labels] = chosen
        level = labels.metadata[LEVEL]
        # A file dialog would enter the folder instead of accepting it again.
        path = labels.metadata.get(SAVED_AT) or self._ask_where("Save labels", " labels.zarr", ZARR)
        if path:
            pixels, strokes = np.array(labels.data), self.keeper.strokes(labels)
            # Without what `add_labels` adds, which would also name the slide in the file.
            name = labels.name.removeprefix(slide_name(slide)).removesuffix("labels").strip()

            def then() -> None:
                labels.metadata[SAVED_AT] = path
                self.keeper.saved_labels(labels, strokes)

            work = partial(save_labels, slide, path, pixels, level=level, name=name or "labels")
            self._write(path, work, then)

    def _on_slow(self, title: str) -> None:
        """Show the title of a slow job until the job replaces it with its result."""
        if title:
            self.status.say(f"{title}…")

    def _write(
        self, path: str, work: Callable[[], object], then: Callable[[], object] | None = None
    ) -> None:
        name = Path(path).name

        def say(sentence: str) -> None:
            if isalive(self.native):  # the file is written even if the dock is closed
                self.status.say(sentence)

        def save() -> str:
            work()
            return saved(Path(path))

        def done(sentence: str) -> None:
            if then is not None:
                then()
            say(sentence)

        if self.slide is not None:
            self.jobs.start(f"Writing {name}", self.slide, save, done, say)

    def _ask_where(self, title: str, ending: str, filters: str) -> str:
        slide = self.slide
        if slide is None:
            return ""
        start = start_folder(slide.path) / f"{slide_name(slide)}{ending}"
        return ask_where_to_save(self.native, title, start, filters)


def _call_all(disconnects: list[Callable[[], object]]) -> None:
    for disconnect in disconnects:
        disconnect()
    disconnects.clear()


def _beyond(annotations: list[Annotation], slide: Slide) -> int:
    """Return the number of objects that are not entirely on a slide."""
    sizes = [sum(map(len, each.rings)) for each in annotations]
    points = [ring for each in annotations for ring in each.rings]
    owners = np.repeat(np.arange(len(sizes)), sizes)
    return len(np.unique(owners[_outside(np.concatenate(points), slide)])) if points else 0


def _outside(points: NDArray[np.float64], slide: Slide) -> Mask:
    """Return the mask of points (x, y), in pixels of level 0, beyond a slide by a pixel."""
    outside: Mask = (points < -1) | (points > np.array(slide.dimensions) + 1)
    return outside[:, 0] | outside[:, 1]
