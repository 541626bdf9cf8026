"""Management of a viewer's annotations: thin outlines, undo, and recovery after a crash."""

from __future__ import annotations

import importlib
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import numpy as np
from napari.layers import Image, Labels, Points, Shapes
from napari.utils.events import EventEmitter
from napari.utils.interactions import mouse_move_callbacks
from qtpy.QtCore import QEvent, QObject, QTimer
from qtpy.QtWidgets import QApplication, QMessageBox, QProgressDialog

from napari_wsigpu.annotations import recovery, write_geojson
from napari_wsigpu.annotations.rings import areas, mended, split
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.storage.remote.url import file_name
from napari_wsigpu.viewer.annotations.annotation_layers import (
    FOR_EXPORT,
    REST,
    SLIDE,
    annotations_in,
    contents_of,
    draws,
    flat_placement,
    holds_annotations,
)
from napari_wsigpu.viewer.annotations.empty_labels import LEVEL
from napari_wsigpu.viewer.annotations.undo_history import History
from napari_wsigpu.viewer.drawing.outlines import OutlineDrawing
from napari_wsigpu.viewer.layers.slide_layers import slide_name, slide_of, stem_of
from napari_wsigpu.viewer.napari_internals import (
    SHAPES_VISUAL,
    drop_leftovers,
    edit_shape,
    end_drag,
    finish_drawing,
    is_being_drawn,
    main_window,
    move_end,
    unwrapped,
)
from napari_wsigpu.viewer.view.arrangement import (
    cell_at,
    is_shown,
    lower_images,
    slides_of,
    take_tool,
)
from napari_wsigpu.viewer.view.navigation import screen_pixels
from napari_wsigpu.viewer.window.main_window import single_shot, soon
from napari_wsigpu.viewer.window.notifications import show_info, show_warning
from napari_wsigpu.viewer.window.saving import GEOJSON, ask_where_to_save, start_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from napari import Viewer
    from napari.layers import Layer
    from napari.utils.events import Event
    from qtpy.QtWidgets import QMainWindow

    from napari_wsigpu.annotations import Annotation
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.annotations.undo_history import AnnotationLayer

EDGE = 2  # width of outlines in pixels of the screen
SETTLED_MS = 100  # pause after which changes become one undo step
ZOOMED_MS = 150  # pause after which outlines are fitted to a new zoom
KEEP_MS = 5000  # pause after which unsaved annotations are written to a recovery file
POLL_S = 0.1  # pause between looks at a file that is being written
FAR = 10_000  # pixels of the screen
# Pixels of the screen: a shorter drag, or an outline that is thinner on average, is an accident.
LEAST_DRAG, LEAST_WIDTH = 5, 2
UNSAVED = "Unsaved annotations"
UNKEPT = "Annotations of {} are not saved automatically; export them. {}"
MOST_NAMED = 4  # slides, or labels layers, that a question lists by name
NEEDED = ("pandas", "scipy.linalg", "cffi.cparser", SHAPES_VISUAL.owner)
CHANGING = "direct", "vertex_insert", "vertex_remove"  # modes that change vertices
DRAWN_BY_DRAGGING = ("add_rectangle", "add_ellipse", "add_line", "add_polygon_lasso")

_annotators: WeakKeyDictionary[Viewer, Annotator] = WeakKeyDictionary()


def annotator_of(viewer: Viewer) -> Annotator:
    """Return the annotator of a viewer; create it if there is none."""
    viewer = unwrapped(viewer)
    if viewer not in _annotators:
        _annotators[viewer] = Annotator(viewer)
    return _annotators[viewer]


def has_annotator(viewer: Viewer) -> bool:
    """Whether a viewer has an annotator."""
    return unwrapped(viewer) in _annotators


class Annotator:
    """Tracks changes of a viewer's annotations, and keeps their outlines thin.

    Parameters
    ----------
    viewer : Viewer
        The viewer.

    Attributes
    ----------
    recorded : EventEmitter
        Emitted when changes have become an undo step.
    """

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = ref(viewer)
        self.recorded = EventEmitter(self, "recorded")
        self._histories: dict[str, History] = {}  # by the slide's path: it may be opened again
        self._touched: dict[int, AnnotationLayer] = {}
        self._settled = single_shot(self._record, SETTLED_MS)
        self._zoomed = single_shot(self.fit_outlines, ZOOMED_MS)
        self._kept = single_shot(self.keep, KEEP_MS)
        self._unkept: set[str] = set()
        self._warned: set[str] = set()  # slides whose recovery file could not be written
        self._modes: WeakKeyDictionary[Shapes, str] = WeakKeyDictionary()  # the current ones
        self._strokes: WeakKeyDictionary[Labels, int] = WeakKeyDictionary()  # since the last save
        # Number of changes to each slide's recovery file, so that an outdated one is not written.
        self._versions: Counter[str] = Counter()
        self._writing = threading.Lock()
        self._is_dragging = False
        self._guard: _Guard | None = None
        self._drawings: WeakValueDictionary[int, OutlineDrawing] = WeakValueDictionary()
        # Last, when napari has already created the layer's visual.
        viewer.layers.events.inserted.connect(self._on_inserted, position="last")
        viewer.layers.events.removing.connect(self._record)
        viewer.layers.events.removed.connect(self._on_removed)
        viewer.layers.selection.events.active.connect(self._on_active)
        viewer.scene.camera.events.zoom.connect(self._on_zoom)
        viewer.mouse_drag_callbacks.extend(
            (aim_tool, activate_clicked, finish_drags, keep_holes, self._on_drag)
        )
        for layer in viewer.layers:
            self._watch_labels(layer)
            if self._watch(layer):
                self.history(layer.metadata[SLIDE]).watch(layer)

    def close(self) -> None:
        """Disconnect from the viewer."""
        viewer = self._viewer()
        for timer in (self._settled, self._zoomed, self._kept):
            timer.stop()
        if viewer is not None:
            viewer.layers.events.inserted.disconnect(self._on_inserted)
            viewer.layers.events.removing.disconnect(self._record)
            viewer.layers.events.removed.disconnect(self._on_removed)
            viewer.layers.selection.events.active.disconnect(self._on_active)
            viewer.scene.camera.events.zoom.disconnect(self._on_zoom)
            viewer.mouse_drag_callbacks.remove(aim_tool)
            viewer.mouse_drag_callbacks.remove(activate_clicked)
            viewer.mouse_drag_callbacks.remove(finish_drags)
            viewer.mouse_drag_callbacks.remove(keep_holes)
            viewer.mouse_drag_callbacks.remove(self._on_drag)
            _annotators.pop(viewer, None)

    def history(self, path: str) -> History:
        """Return the history of the annotations of the slide at `path`."""
        return self._histories.setdefault(path, History())

    def undo(self, slide: Slide, *, again: bool = False) -> None:
        """Undo a slide's last change if there is one, or redo it if `again`.

        Undo removes a shape that is still being drawn, and changes nothing else.
        """
        viewer, history = self._viewer(), self.history(slide.path)
        drawn = [layer for layer in viewer.layers if is_being_drawn(layer)] if viewer else []
        if drawn:
            for layer in drawn:
                if not (again or self._is_dragging):
                    remove_from(layer, len(layer.data) - 1)
            return
        self._record()
        self._record()
        move = history.redo if again else history.undo
        if viewer is not None and move(viewer.layers):
            self._keep_soon(slide.path)
            self.fit_outlines()

    def saved(self, path: str) -> None:
        """Mark the annotations of the slide at `path` as saved; delete their recovery file."""
        self.history(path).unsaved = False
        self._unkept.discard(path)
        self._versions[path] += 1
        recovery.discard(path)

    def restored(self, slide: Slide, copies: Sequence[Path]) -> None:
        """Mark a slide's annotations as unsaved, and replace the copies they were read from."""
        self.history(slide.path).unsaved = True
        self._write_copy(slide.path, copies)

    def unsaved(self) -> list[str]:
        """Return the paths of the slides with unsaved annotations."""
        self._record()
        found = self._histories.items()
        return [path for path, history in found if history.unsaved and not history.is_empty]

    def strokes(self, labels: Labels) -> int:
        """Return how often the user has painted on labels for a level since the last save."""
        return self._strokes.get(unwrapped(labels), 0)

    def saved_labels(self, labels: Labels, strokes: int) -> None:
        """Mark that many strokes on labels as saved; the user may have painted more since then."""
        self._strokes[unwrapped(labels)] = self.strokes(labels) - strokes

    def unsaved_labels(self, path: str | None = None) -> list[str]:
        """Return the names of labels layers on which the user has painted since the last save.

        With a path, only the labels of that slide are listed.
        """
        viewer = self._viewer()
        layers = [] if viewer is None else viewer.layers
        own = [each for each in layers if path in (None, each.metadata.get(SLIDE))]
        return [each.name for each in own if isinstance(each, Labels) and self.strokes(each)]

    def may_leave(self, window: QMainWindow, path: str | None = None) -> bool:
        """Ask until everything, or everything of one slide, is saved, or the user discards it.

        Returns
        -------
        bool
            False if the user wants to keep it.
        """
        while True:
            paths = [each for each in self.unsaved() if path in (None, each)]
            labels = self.unsaved_labels(path)
            answer = ask_to_leave(window, paths, labels) if paths or labels else QMessageBox.Discard
            if answer == QMessageBox.Discard:
                return True
            if answer != QMessageBox.Save or not all(self._save(window, each) for each in paths):
                return False

    def _save(self, window: QMainWindow, path: str) -> bool:
        """Ask where to save the annotations of the slide at `path`; return whether they are."""
        name = file_name(path)
        start = start_folder(path) / f"{stem_of(path)}.geojson"
        target = ask_where_to_save(window, f"Save annotations of {name}", start, GEOJSON)
        if not target:
            return False
        convert = self.snapshot(path)
        try:
            run_modally(
                window,
                f"Saving the annotations of {name}…",
                lambda: write_geojson(target, convert()),
            )
            self.saved(path)
        except SlideError as error:
            _answer(QMessageBox(QMessageBox.Warning, UNSAVED, str(error), QMessageBox.Ok, window))
            return False
        return True

    def annotations(self, slide: Slide, others: Sequence[Layer] = ()) -> list[Annotation]:
        """Return the annotations of a slide and of other given layers."""
        return self.snapshot(slide.path, others)()

    def snapshot(self, path: str, others: Sequence[Layer] = ()) -> Callable[[], list[Annotation]]:
        """Copy what `annotations` converts, which another thread may do by calling the result."""
        viewer = self._viewer()
        contents = [] if viewer is None else contents_of(viewer, path, others)
        return partial(annotations_in, contents)

    def keep(self) -> None:
        """Write unsaved annotations to a recovery file, in another thread."""
        for path in self._unkept:
            self._write_copy(path)
        self._unkept.clear()

    def _write_copy(self, path: str, replaced: Sequence[Path] = ()) -> None:
        """Write a slide's recovery file in another thread, then delete the copies it replaces."""
        # Converting many annotations takes seconds, so only their content is copied here.
        convert = self.snapshot(path)
        self._versions[path] += 1
        version = self._versions[path]

        def work() -> None:
            annotations = convert()
            with self._writing:
                if version != self._versions[path]:
                    return
                problem = recovery.save(path, annotations) if annotations else ""
                if annotations and not problem:
                    for copy in replaced:
                        copy.unlink(missing_ok=True)
                elif problem and path not in self._warned:
                    self._warned.add(path)
                    show_warning(UNKEPT.format(file_name(path), problem))
                if not annotations or version != self._versions[path]:  # saved in the meantime
                    recovery.discard(path)

        threading.Thread(target=work, name="slide-annotations").start()

    def adopt(self, slide_layer: Layer) -> None:
        """Place annotations that were read before their slide on it."""
        viewer, slide = self._viewer(), slide_of(slide_layer)
        if viewer is None or slide is None:
            return
        for layer in viewer.layers:
            if REST in layer.metadata and SLIDE not in layer.metadata:
                layer.metadata[SLIDE] = slide.path
                for name, value in flat_placement(slide_layer).items():
                    setattr(layer, name, value)
                if self._watch(layer):
                    self._touch_layer(layer)
                show_info(f"'{layer.name}' was placed on '{slide_name(slide)}'.")

    def fit_outlines(self) -> None:
        """Give all outlines the same width on screen at any zoom."""
        viewer = self._viewer()
        for layer in () if viewer is None else viewer.layers:
            if isinstance(layer, Shapes) and {SLIDE, FOR_EXPORT} & layer.metadata.keys():
                drawing = self._drawings.get(id(layer))
                if drawing is not None and drawing.is_active:
                    continue  # draws a constant width at any zoom
                width = outline_width(viewer, layer)
                if layer.current_edge_width != width:
                    with layer.block_update_properties():
                        layer.current_edge_width = width
                if any(each != width for each in layer.edge_width):
                    layer.edge_width = width
                    layer.events.edge_width()

    def _on_inserted(self, event: Event) -> None:
        layer, viewer = event.value, self._viewer()
        self._zoomed.start()
        if isinstance(layer, Image) and viewer is not None and slides_of(viewer):
            lower_images(viewer)
        self._watch_labels(layer)
        if self._watch(layer):
            if len(layer.data):
                self._touch_layer(layer)
            else:
                self.history(layer.metadata[SLIDE]).watch(layer)

    def _watch(self, layer: Layer) -> bool:
        """Follow a layer if it holds annotations of a slide; return whether it does."""
        viewer = self._viewer()
        if viewer is None or not _is_of_slide(layer):
            return False
        if isinstance(layer, Shapes):
            self._modes[layer] = layer.mode
            layer.events.mode.connect(self._on_mode)
            with suppress(AttributeError, KeyError):  # napari draws it
                self._drawings[id(layer)] = OutlineDrawing(viewer, layer)
        if not isinstance(layer, Labels):
            layer.events.data.connect(self._touch)
            layer.events.features.connect(self._touch)
        self._guard_window(viewer)
        return True

    def _watch_labels(self, layer: Layer) -> None:
        """Count what the user paints on labels for a level of a slide."""
        viewer = self._viewer()
        if viewer is not None and isinstance(layer, Labels) and LEVEL in layer.metadata:
            self._guard_window(viewer)
            if layer not in self._strokes:  # else it has come back
                self._strokes[layer] = 0
                layer.events.paint.connect(self._on_paint)

    def _on_paint(self, event: Event) -> None:
        self._strokes[event.source] += 1

    def _guard_window(self, viewer: Viewer) -> None:
        window = main_window(viewer)
        if self._guard is None and window is not None:
            self._guard = _Guard(window, self)

    def _on_removed(self, event: Event) -> None:
        layer = event.value
        drawing = self._drawings.pop(id(layer), None)
        if drawing is not None:
            drawing.close()
        if _is_of_slide(layer):
            history, viewer = self.history(layer.metadata[SLIDE]), self._viewer()
            window = None if viewer is None else main_window(viewer)
            if window is not None and history.unsaved and history.holds(layer):
                soon(window, partial(_report_removal, window, layer.name))
            self._touch_layer(layer)

    def _on_active(self, event: Event) -> None:
        """Finish a shape whose layer is no longer active; it would keep `_record` waiting."""
        viewer = self._viewer()
        for layer in () if viewer is None else viewer.layers:
            if layer != event.value:
                finish_drawing(layer)

    def _on_mode(self, event: Event) -> None:
        """Finish the shape that was drawn with the previous tool."""
        layer = event.source
        finish_drawing(layer, self._modes[layer])
        self._modes[layer] = layer.mode

    def _on_zoom(self, event: Event) -> None:
        self._zoomed.start()

    def _on_drag(self, viewer: Viewer, event: Event) -> Generator[None, None, None]:
        """Delay undo steps until the button is released, so that a drag is one step."""
        self._record()  # what was drawn before is a step of its own, however fast the user draws
        self._is_dragging = True
        yield
        while event.type == "mouse_move":
            yield
        self._is_dragging = False

    def _touch(self, event: Event) -> None:
        self._touch_layer(event.source)

    def _touch_layer(self, layer: AnnotationLayer) -> None:
        self._touched[id(layer)] = layer
        self._settled.start()

    def _record(self, event: Event | None = None) -> None:
        """Record the changes of each slide's layers since the last call as one undo step."""
        viewer = self._viewer()
        if viewer is None:
            return
        if self._is_dragging or any(map(is_being_drawn, self._touched.values())):
            self._settled.start()  # wait until the shape is finished or moved
            return
        touched, self._touched = list(filter(_is_of_slide, self._touched.values())), {}
        for layer in touched:
            if isinstance(layer, Shapes):
                drop_leftovers(layer)
        shown = {slide.path for slide in slides_of(viewer)}
        for path in dict.fromkeys(layer.metadata[SLIDE] for layer in touched):
            changed = [layer for layer in touched if layer.metadata[SLIDE] == path]
            history = self.history(path)
            if history.record(changed, viewer.layers) and history.unsaved and path in shown:
                self._keep_soon(path)
        if touched:
            self.recorded()

    def _keep_soon(self, path: str) -> None:
        self._unkept.add(path)
        self._kept.start()


class _Guard(QObject):  # type: ignore[misc]
    """Asks before a window with unsaved annotations is closed by its button or its menu."""

    def __init__(self, window: QMainWindow, owner: Annotator) -> None:
        super().__init__(window)
        self._owner = owner
        window.installEventFilter(self)
        close = window.close

        def close_by_menu(quit_app: bool = False, confirm_need: bool = False) -> bool | None:
            if confirm_need and self._unsaved:
                return self._ask(window, quit_app=quit_app)
            closed: bool | None = close(quit_app, confirm_need)
            return closed

        window.close = close_by_menu

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Ask first; if the user leaves, close the window later, without napari's question."""
        asks = bool(event.type() == QEvent.Close and event.spontaneous() and self._unsaved)
        if asks:
            event.ignore()
            soon(watched, partial(self._ask, watched))
        return asks

    @property
    def _unsaved(self) -> bool:
        return bool(self._owner.unsaved() or self._owner.unsaved_labels())

    def _ask(self, window: QMainWindow, *, quit_app: bool = False) -> bool:
        """Ask what to do with unsaved work; return whether the window closed."""
        if not self._owner.may_leave(window):
            return False
        discarded = self._owner.unsaved()
        # Without its own question, which would be the second one.
        closed = bool(window.close(quit_app, False))
        for path in discarded if closed else ():
            self._owner.saved(path)
        return closed


def ask_to_leave(
    window: QMainWindow, paths: Sequence[str], labels: Sequence[str]
) -> QMessageBox.StandardButton:
    """Ask what to do with unsaved annotations and labels before they go; return the answer.

    Parameters
    ----------
    window : QMainWindow
        The window.
    paths : sequence of str
        Paths of the slides whose annotations are not saved.
    labels : sequence of str
        Names of the labels layers that are not saved, which the question does not offer to save.
    """
    parts = []
    if paths:
        slides = _listed([file_name(path) for path in paths], "more slides")
        parts.append(f"the annotations of {slides}")
    if labels:
        parts.append(f"the labels {_listed(labels, 'more')}")
    unsaved = " and ".join(parts)
    text = f"T{unsaved[1:]} are not saved."
    if labels:
        text += " Save labels in the Annotate dock."
    buttons = QMessageBox.Discard | QMessageBox.Cancel
    box = QMessageBox(QMessageBox.Warning, UNSAVED, text, buttons, window)
    box.setDefaultButton(QMessageBox.Cancel)  # Enter loses nothing
    if paths:
        box.addButton(QMessageBox.Save).setText("Save…")
    return _answer(box)


def run_modally(window: QMainWindow, title: str, work: Callable[[], object]) -> None:
    """Call a function in another thread; block the window, and show the title, until it returns."""
    with ThreadPoolExecutor(1, "slide-annotations") as executor:
        future = executor.submit(work)
        dialog = QProgressDialog(title, "", 0, 0, window)
        dialog.setCancelButton(None)
        dialog.setModal(True)
        while wait([future], POLL_S).not_done:
            dialog.show()  # again if the user has pressed Escape
            QApplication.processEvents()
        # Hide it now, and stop its timer, which would show it over the next question.
        dialog.reset()
        dialog.deleteLater()
    future.result()  # raises what the function has raised


def _answer(box: QMessageBox) -> QMessageBox.StandardButton:
    answer = box.exec()
    box.deleteLater()  # otherwise it would live as long as the window
    return answer


def _listed(names: Sequence[str], others: str) -> str:
    quoted = [f"'{name}'" for name in names]
    if len(quoted) > MOST_NAMED:
        quoted[MOST_NAMED:] = [f"{len(quoted) - MOST_NAMED} {others}"]
    *first, last = quoted
    return f"{', '.join(first)} and {last}" if first else last


def _report_removal(window: QMainWindow, name: str) -> None:
    if window.isVisible():  # a closed window has lost its layers too
        show_info(
            f"The layer '{name}' with unsaved annotations was removed; undo this in the Annotate "
            "dock if you still need them."
        )


def preload() -> None:
    """Import the modules for the first shape in another thread, because this takes seconds."""
    names = [name for name in NEEDED if name not in sys.modules]
    if names:

        def work() -> None:
            for name in names:
                with suppress(ImportError):
                    importlib.import_module(name)

        threading.Thread(target=work, name="slide-preload", daemon=True).start()


def _is_of_slide(layer: Layer) -> bool:
    return holds_annotations(layer) and bool(layer.metadata.get(SLIDE))


def outline_width(viewer: Viewer, layer: Layer) -> float:
    """Return the width of a layer's outlines in the layer's coordinates."""
    return EDGE / screen_pixels(viewer, layer)


def aim_tool(viewer: Viewer, event: Event) -> None:
    """Make a tool draw on the slide in the grid cell under the mouse; stop it on a hidden slide."""
    layer = viewer.layers.selection.active
    path = None if layer is None else layer.metadata.get(SLIDE)
    if not path or not draws(layer) or is_being_drawn(layer):
        return
    slides = slides_of(viewer)
    cell = cell_at(viewer, event.viewbox)
    if cell is not None and cell.path != path:
        if isinstance(layer, Labels) or FOR_EXPORT in layer.metadata:
            _stop(layer, f"'{layer.name}' belongs to another slide; select a layer of this slide.")
        else:
            take_tool(viewer, cell, layer, str(layer.mode))
    elif not any(each.path == path and is_shown(viewer, each) for each in slides):
        _stop(layer, f"The slide of '{layer.name}' is not visible; show it before you draw on it.")


def _stop(layer: Layer, reason: str) -> None:
    layer.mode = "pan_zoom"
    show_info(reason)


def activate_clicked(viewer: Viewer, event: Event) -> None:
    """Activate the annotation layer under the mouse if objects of another one are selected.

    napari selects only objects of the active layer. While Shift is held, the layer stays active.
    """
    active = viewer.layers.selection.active
    if active is None or active.mode != "select" or "Shift" in event.modifiers:
        return
    path = active.metadata.get(SLIDE)
    others = [
        layer
        for layer in reversed(viewer.layers)
        if isinstance(layer, Shapes | Points) and layer.visible and _is_of_slide(layer)
    ]
    for layer in [active, *others]:
        if layer.metadata.get(SLIDE) == path and _is_at(layer, event):
            layer.mode = "select"
            viewer.layers.selection.active = layer
            return


def _is_at(layer: Shapes | Points, event: Event) -> bool:
    """Whether an object of a layer is under the mouse."""
    found = layer.get_value(
        event.position,
        view_direction=event.view_direction,
        dims_displayed=event.dims_displayed,
        world=True,
    )
    return (found[0] if isinstance(found, tuple) else found) is not None


def finish_drags(viewer: Viewer, event: Event) -> Generator[None, None, None]:
    """Make a drag that draws a shape end where the button is released.

    A shape is removed if its drag spans only a few pixels or encloses no area, or if the user
    presses Escape.
    """
    layer = viewer.layers.selection.active
    mode = str(layer.mode) if isinstance(layer, Shapes) else ""
    if mode not in DRAWN_BY_DRAGGING:
        return
    is_outline = mode == "add_polygon_lasso"
    by_clicks = is_outline and is_being_drawn(layer)
    if by_clicks:  # this one ends it
        _close_outline(layer, event)
    path, before = [event.pos], len(layer.data)
    yield
    while event.type == "mouse_move" and (by_clicks or is_being_drawn(layer)):
        path.append(event.pos)
        yield
    if not (by_clicks or is_being_drawn(layer)):
        end_drag(layer)  # napari would go on, and fail
        QTimer.singleShot(0, partial(remove_from, layer, before))
        return
    path.append(event.pos)
    # napari drops moves that arrive while it is busy, so the shape would end too early.
    mouse_move_callbacks(layer, _LastMove(event.__wrapped__))
    if is_outline and is_being_drawn(layer) and np.ptp(path, axis=0).max() >= LEAST_DRAG:
        _close_outline(layer, event)
    if mode == "add_line" and is_being_drawn(layer):
        move_end(layer, layer.world_to_data(event.position), straight="Shift" in event.modifiers)
    points = np.array(path if is_outline else [path[0], path[-1]], float)
    length = np.ptp(points, axis=0).max()
    if length < LEAST_DRAG or (is_outline and areas([points])[0] < LEAST_WIDTH * length):
        # Remove it once napari has finished it.
        QTimer.singleShot(0, partial(remove_from, layer, before))


def keep_holes(viewer: Viewer, event: Event) -> Generator[None, None, None]:
    """Keep the rings of a polygon joined while the user changes its vertices."""
    layer = viewer.layers.selection.active
    if not isinstance(layer, Shapes) or layer.mode not in CHANGING or is_being_drawn(layer):
        return
    data, kinds = layer.data, layer.shape_type
    outlines = {each: data[each] for each in layer.selected_data if kinds[each] == "polygon"}
    before = {each: np.array(held) for each, held in outlines.items() if len(split(held)) > 1}
    yield
    while event.type == "mouse_move":
        if layer.mode == "direct":
            _mend(layer, before)
        yield
    _mend(layer, before)


def _mend(layer: Shapes, before: dict[int, Array]) -> None:
    for index, old in before.items():
        if index < len(layer.data):
            now = layer.data[index]
            new = mended(old, now)
            if not np.array_equal(new, now):
                edit_shape(layer, index, new)
                layer.refresh()
            before[index] = new


def _close_outline(layer: Shapes, event: Event) -> None:
    """Let an outline end where the mouse is.

    napari first simplifies an outline and then drops its last vertex, which follows the mouse, and
    with it the straight line that leads there. So add the last vertex, and let one at the start
    follow the mouse.
    """
    start = layer.data_to_world(layer.data[-1][0])[-2:]
    far = np.add(event.pos, FAR)  # napari adds a vertex if the mouse has moved far enough
    for position in (event.position, (*event.position[:-2], *start)):
        mouse_move_callbacks(layer, _LastMove(event.__wrapped__, position=position, pos=far))


class _LastMove:
    """The release of a mouse button as a move to the same position, or to another one."""

    type = "mouse_move"

    def __init__(self, event: Event, **changed: object) -> None:
        self._event = event
        vars(self).update(changed)

    def __getattr__(self, name: str) -> object:
        return getattr(self._event, name)


def remove_from(layer: Shapes, first: int) -> None:
    """Remove the shapes of a layer from number `first` on, also one that is being drawn."""
    finish_drawing(layer)  # otherwise an outline would follow the mouse
    if len(layer.data) > first:
        layer.remove(list(range(first, len(layer.data))))
