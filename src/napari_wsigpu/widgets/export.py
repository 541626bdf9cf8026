"""The dock "Export region": what is drawn or seen of a slide, as a file."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari.layers import Shapes
from qtpy.QtCore import QEvent, Qt, QTimer
from qtpy.QtWidgets import (
    QHBoxLayout,
    QLabel,
    QProgressBar,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from napari_wsigpu.conversion import convert
from napari_wsigpu.model.errors import ConversionCancelledError, SlideError
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.viewer.annotations import FOR_EXPORT, flat_placement
from napari_wsigpu.viewer.layers import slide_name, slide_of
from napari_wsigpu.viewer.notifications import show_warning
from napari_wsigpu.viewer.pieces import Piece, pieces
from napari_wsigpu.viewer.planes import shown_plane
from napari_wsigpu.viewer.progressive import open_viewers
from napari_wsigpu.viewer.region import Region, drawn, seen, whole
from napari_wsigpu.widgets.column import Column
from napari_wsigpu.widgets.export_form import MASKED, ONE, VIEW, WHOLE, ExportForm
from napari_wsigpu.widgets.export_plan import ENDINGS, Plan, named, paths_of, summary
from napari_wsigpu.widgets.jobs import Jobs
from napari_wsigpu.widgets.saving import ask_where_to_save
from napari_wsigpu.widgets.slide_dock import SlideDock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari import Viewer
    from napari.layers import Layer

    from napari_wsigpu.slide.slide import Slide

INTERVAL_MS = 200
FINE = 1000  # parts of the bar
EDGE = 2  # pixels of the screen
NO_SLIDE = "Open a slide, or select its layer, to export a region of it."
CANCELLED = "Cancelled; nothing was written."
SLIDE_CLOSED, DOCK_CLOSED = "whose slide was closed", "whose dock was closed"

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Export:
    """Files that are being written, one after another."""

    files: Sequence[tuple[Plan, Path]]
    written: int = 0
    part: float = 0  # of the one that is being written
    cancelled: threading.Event = field(default_factory=threading.Event)
    why: str = ""  # it was cancelled, other than by its button

    def cancel(self, why: str = "") -> None:
        """End it; if it is not the user who asks for that, say why."""
        if not self.cancelled.is_set():
            self.why = why
            self.cancelled.set()

    def write(self, *, overwrite: bool) -> str:
        """Write them, and return what became of them; called off the main thread.

        It is told elsewhere, too, if the dock that waits for it may be gone.
        """
        notes: dict[str, None] = {}
        for plan, path in self.files:
            try:
                done = convert(
                    plan.slide,
                    path,
                    region=plan.region[:4],
                    level=plan.level,
                    color=plan.color,
                    outline=plan.outline,
                    z=plan.plane.get("z"),
                    t=plan.plane.get("t"),
                    overwrite=overwrite,
                    keep=False,
                    progress=self._note,
                    cancelled=self.cancelled,
                )
            except ConversionCancelledError:
                some = f"Cancelled; {self.written} of {len(self.files)} files were written."
                return self._told(some if self.written else CANCELLED)
            notes.update(dict.fromkeys(done.notes))
            self.written, self.part = self.written + 1, 0
        (_, first), *others = self.files
        more = f" and {len(others)} more" if others else ""
        return self._told(" ".join([f"Saved '{first.name}'{more}.", *notes]))

    def _told(self, sentence: str) -> str:
        if self.why:
            _tell(f"Export of '{self.path.name}', {self.why}: {sentence}")
        return sentence

    @property
    def path(self) -> Path:
        """The file that is being written."""
        return self.files[min(self.written, len(self.files) - 1)][1]

    @property
    def done(self) -> tuple[float, int]:
        """Which part of all files is written, and how many bytes of pixels are left."""
        sizes = [plan.bytes for plan, _ in self.files]
        written = sum(sizes[: self.written]) + self.part * sum(sizes[self.written :][:1])
        return written / max(sum(sizes), 1), round(sum(sizes) - written)

    def _note(self, done: int, total: int) -> None:
        self.part = done / total if total else 0


class RegionExport(SlideDock):
    """Writes a region of a slide to OME-TIFF, PNG or OME-Zarr.

    Parameters
    ----------
    napari_viewer : Viewer
        The viewer whose slides and shapes are offered.
    """

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer, NO_SLIDE)
        self._jobs = Jobs()
        self._running: list[Export] = []  # one at most
        self._folder: Path | None = None
        self.timer = QTimer(self)  # looks a little later, once for all that happens meanwhile
        self.timer.setSingleShot(True)
        self.timer.setInterval(INTERVAL_MS)

        self.form = ExportForm()
        self.draw = _button("Draw a rectangle", "Draw what is to be exported in a layer of shapes")
        self.summary = _label("Size of the export")
        self.notes = _label("Notes")
        self.export = _button("Export…", "Choose a file, and write the region to it")
        self.cancel = _button("Cancel", "Write no further, and leave no file")
        self.progress = QProgressBar()
        self.progress.setRange(0, FINE)
        self.progress.setAccessibleName("Progress")
        self.status = _label("Status")
        self._arrange()

        self.timer.timeout.connect(self._look)
        self.form.slide.changed.connect(self._choose_slide)
        self.form.changed.connect(self._look)
        self.draw.clicked.connect(self._draw)
        self.export.clicked.connect(self._ask)
        self.cancel.clicked.connect(self._cancel)
        self.listen(self.viewer.layers.events.removed, self._look)
        for changes in (
            self.viewer.layers.events,  # of each layer, too
            self.viewer.scene.camera.events,
            self.viewer.canvas.events.size,
            self.viewer.dims.events,
        ):
            self.listen(changes, self._look_soon)
        self.listen(self.viewer.layers.selection.events.active, self._use_shapes)
        self.at_end += [partial(_cancel, self._running, DOCK_CLOSED), self._jobs.close]
        self.follow()

    def _arrange(self) -> None:
        page = QWidget()
        inner = QVBoxLayout(page)
        inner.setContentsMargins(0, 0, 0, 0)
        inner.addWidget(self.form)
        inner.addLayout(_row(self.draw))
        inner.addWidget(self.summary)
        inner.addWidget(self.notes)
        inner.addLayout(_row(self.export, self.cancel))
        inner.addWidget(self.progress)
        inner.addWidget(self.status)
        inner.addStretch()
        self.details = Column(page)
        outer = QVBoxLayout(self)
        outer.addWidget(self.empty)
        outer.addWidget(self.details, 1)
        outer.addStretch()

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
        self.details.setVisible(slide is not None)
        self._offer()
        if slide is None:
            self.form.show_slide(None, 0)
        else:
            self.form.show_slide(slide, slide.pyramid[0].number)
            _say(self.status, "")
        self._look()

    def let_go(self, slide: Slide) -> None:
        """Cancel what is being written of a slide that has left the viewer."""
        for export in [export for export in self._running if export.files[0][0].slide is slide]:
            export.cancel(SLIDE_CLOSED)
            self._end(export, CANCELLED)
        self._jobs.let_go(slide)

    def showEvent(self, event: Any) -> None:  # noqa: N802
        """Follow the view and the shapes from now on."""
        super().showEvent(event)
        self._look()

    def hideEvent(self, event: Any) -> None:  # noqa: N802
        """Follow them no longer."""
        super().hideEvent(event)
        self.timer.stop()

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Cancel when the dock is closed, which takes it out of the window."""
        super().changeEvent(event)
        if event.type() == QEvent.ParentChange and self.parent() is None:
            _cancel(self._running, DOCK_CLOSED)

    # What is chosen

    def _layer(self, slide: Slide) -> Layer:
        """Return the active layer if it shows the slide, else the first one that does."""
        layers = [self.viewer.layers.selection.active, *self.viewer.layers]
        return next(layer for layer in layers if slide_of(layer) is slide)

    def _offer(self) -> None:
        self.form.offer_slides(list(dict.fromkeys(self.slides())))
        self.form.offer_regions(
            [layer for layer in self.viewer.layers if isinstance(layer, Shapes)]
        )

    def _choose_slide(self, slide: Slide | None) -> None:
        if slide is not None and slide is not self.slide:
            self.slide = slide
            self.show_slide(slide)

    def _use_shapes(self, event: Any) -> None:
        """Choose a layer of shapes when it becomes active."""
        if isinstance(event.value, Shapes):
            self._offer()
            self.form.region.value = event.value

    def _draw(self) -> None:
        """Let the user draw in a layer of what is to be exported, and not among annotations."""
        if self.slide is None:
            return
        own = [each for each in self.viewer.layers if FOR_EXPORT in each.metadata]
        chosen = self.form.region.value
        shapes = chosen if chosen in own else own[-1] if own else None
        if shapes is None:
            layer = self._layer(self.slide)
            shapes = self.viewer.add_shapes(
                name="Regions",
                ndim=2,
                **flat_placement(layer),
                face_color="transparent",
                edge_color="lime",
                metadata={FOR_EXPORT: True},
                edge_width=EDGE / (self.viewer.scene.camera.zoom * layer.scale[-1]),
            )
        self.draw_in(shapes, "add_rectangle")
        self._offer()
        self.form.region.value = shapes  # though it may have been active before

    def _pieces(self, slide: Slide) -> list[Piece]:
        """Return the shapes of which each shall be a file; none if it shall be one file."""
        chosen = self.form.region.value
        if self.form.pieces.value == ONE or not isinstance(chosen, Shapes):
            return []
        return pieces(self.viewer, chosen, self._layer(slide), slide)

    def _region(self, slide: Slide) -> Region:
        chosen = self.form.region.value
        if chosen == WHOLE:
            return whole(slide)
        if chosen == VIEW:
            return seen(self.viewer, self._layer(slide), slide)
        return drawn(self.viewer, chosen, self._layer(slide), slide)

    def _plans(self, slide: Slide) -> list[Plan]:
        """Return what the choices stand for now: at least one file.

        Raises
        ------
        SlideError
            If there is nothing to be exported, or such a file can't hold it.
        """
        form = self.form
        choices = form.level.value, form.color.value, form.kind.value
        masked = form.pieces.value == MASKED
        plane = shown_plane(self.viewer, self._layer(slide), slide)
        plans = [
            Plan(
                slide,
                piece.region,
                *choices,
                piece.number,
                piece.outline if masked else None,
                plane,
            )
            for piece in self._pieces(slide)
        ] or [Plan(slide, self._region(slide), *choices, plane=plane)]
        for plan in plans:
            plan.check()
        return plans

    def _look_soon(self, event: Any) -> None:
        if self.isVisible() and not self.timer.isActive():
            self.timer.start()

    def _look(self, event: Any = None) -> None:
        """Say what would be exported now, and how far the running export is."""
        self._offer()
        if self.slide is None or self.slide not in self.slides():
            return
        try:
            plans = self._plans(self.slide)
        except SlideError as error:
            size, notes = "", str(error)
        else:
            said = dict.fromkeys(note for plan in plans for note in plan.region.notes)
            plane = ", ".join(f"{axis} = {at}" for axis, at in plans[0].plane.items())
            size = summary(plans)
            notes = " ".join([*([f"It is the plane {plane}."] if plane else []), *said])
        _say(self.summary, size)
        _say(self.notes, notes)
        self.export.setEnabled(bool(size) and not self._running)
        for export in self._running:
            part, left = export.done
            self.progress.setValue(round(FINE * part))
            rest = f"{byte_size(left)} left" if left else "the file is being finished"
            _say(self.status, f"Writing '{export.path.name}': {rest}")
        self.cancel.setEnabled(bool(self._running))
        self.progress.setVisible(bool(self._running))
        if self._running:
            self.timer.start()

    # Exports

    def _ask(self) -> None:
        """Ask for the file, and write it."""
        if self.slide is None:
            return
        plans = self._plans(self.slide)
        plan = plans[0]
        endings = ENDINGS[plan.kind]
        name = f"{slide_name(plan.slide)} x{plan.region.x} y{plan.region.y}{endings[0]}"
        if len(plans) > 1:
            name = f"{slide_name(plan.slide)} shape{endings[0]}"
        patterns = " ".join(f"*{ending}" for ending in endings)
        answer = ask_where_to_save(
            self,
            "Export region",
            self._start_folder(plan.slide) / name,
            f"{plan.kind} ({patterns})",
        )
        if answer:
            # Only of the very name that the dialog returned the user was asked.
            path = Path(named(answer, plan.kind))
            paths = paths_of(plans, path)
            self._write(list(zip(plans, paths, strict=True)), overwrite=paths == [Path(answer)])

    def _start_folder(self, slide: Slide) -> Path:
        folder = self._folder or Path(slide.path).parent
        return folder if folder.is_dir() else Path.home()

    def _write(self, files: Sequence[tuple[Plan, Path]], *, overwrite: bool) -> None:
        plan, path = files[0]
        self._folder = path.parent
        export = Export(files)
        self._running.append(export)
        self._jobs.start(
            f"Exporting {path.name}",
            plan.slide,
            partial(export.write, overwrite=overwrite),
            partial(self._end, export),
            partial(self._end, export),
            owner=self,
        )
        self._look()

    def _cancel(self) -> None:
        _cancel(self._running)

    def _end(self, export: Export, sentence: str) -> None:
        if export in self._running:
            self._running.remove(export)
            _say(self.status, sentence)
            self._look()


def _cancel(running: Sequence[Export], why: str = "") -> None:
    for export in running:
        export.cancel(why)


def _tell(sentence: str) -> None:
    """Say what became of an export whose dock may be gone: in a window if there is one."""
    if open_viewers():
        with suppress(RuntimeError):  # the application ends, and Qt's part is gone already
            show_warning(sentence)
    else:
        logger.warning(sentence)


def _label(name: str) -> QLabel:
    label = QLabel()
    label.setWordWrap(True)
    label.setAccessibleName(name)
    label.setTextFormat(Qt.PlainText)
    label.setTextInteractionFlags(Qt.TextSelectableByMouse)
    label.hide()
    return label


def _say(label: QLabel, text: str) -> None:
    if label.text() != text:
        label.setText(text)
    label.setVisible(bool(text))


def _button(text: str, tip: str) -> QPushButton:
    button = QPushButton(text)
    button.setToolTip(tip)
    return button


def _row(*widgets: QWidget) -> QHBoxLayout:
    row = QHBoxLayout()
    for widget in widgets:
        row.addWidget(widget)
    row.addStretch()
    return row
