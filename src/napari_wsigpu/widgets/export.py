"""The dock "Export": what is drawn or seen of a slide, as a file."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicgui.widgets import ProgressBar
from napari.layers import Shapes
from qtpy.compat import isalive
from qtpy.QtCore import QTimer

from napari_wsigpu.model.errors import ConversionCancelledError
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.slide.facts import level_names, title
from napari_wsigpu.viewer.annotations import FOR_EXPORT, flat_placement
from napari_wsigpu.viewer.layers import slide_name
from napari_wsigpu.viewer.notifications import show_warning
from napari_wsigpu.viewer.progressive import open_viewers
from napari_wsigpu.widgets.export_plan import (
    ENDINGS,
    Choices,
    Files,
    Kind,
    Part,
    Plan,
    announce,
    named,
    paths_of,
)
from napari_wsigpu.widgets.kit.parts import Form, Panel, Text, button, choice, offer, row
from napari_wsigpu.widgets.kit.saving import ask_where_to_save, start_folder
from napari_wsigpu.widgets.slide_dock import SlideDock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari import Viewer

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
                done = plan.write(
                    path, overwrite=overwrite, progress=self._note, cancelled=self.cancelled
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
    def done(self) -> tuple[float, str]:
        """Which part of all files is written, and how that is said."""
        sizes = [plan.bytes for plan, _ in self.files]
        written = sum(sizes[: self.written]) + self.part * sum(sizes[self.written :][:1])
        left = round(sum(sizes) - written)
        rest = f"{byte_size(left)} left" if left else "the file is being finished"
        return written / max(sum(sizes), 1), f"Writing '{self.path.name}': {rest}"

    def _note(self, done: int, total: int) -> None:
        self.part = done / total if total else 0


class RegionExport(SlideDock):
    """Writes a region of a slide to OME-TIFF, PNG or OME-Zarr.

    Parameters
    ----------
    napari_viewer : Viewer
        The viewer whose slides and shapes are offered.
    """

    title_in_tabs = "Export"

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer, NO_SLIDE)
        self._running: list[Export] = []  # one at most
        self._folder: Path | None = None
        self.timer = QTimer(
            self.native
        )  # looks a little later, once for all that happens until then
        self.timer.setSingleShot(True)
        self.timer.setInterval(INTERVAL_MS)
        self.source = choice("Slide", "The slide that is exported from")
        self.region = choice("Region", "The part of the slide that is exported")
        self.files = choice(
            "Files",
            "One file of the box around the selected shapes, or one of each (of all if none is "
            "selected); outside of a mask pixels become background",
            [(each.value, each) for each in Files],
        )
        self.level = choice(
            "Level", "The level that becomes the finest one of the file; all have the same extent"
        )
        self.color = choice(
            "Colors",
            "Pixels as the file stores them, or in sRGB by the slide's ICC profile",
            [("As stored", "stored"), ("sRGB", "srgb")],
        )
        self.kind = choice(
            "Format", "The kind of file that is written", [(each.value, each) for each in Kind]
        )
        fields = (self.source, self.region, self.files, self.level, self.color, self.kind)
        self.form = Form({each.label: each for each in fields})
        self.draw = button(
            "Draw a rectangle", "Draw what is to be exported in a layer of shapes", self._draw
        )
        self.summary = Text("Size of the export")
        self.notes = Text("Notes")
        self.export = button("Export…", "Choose a file, and write the region to it", self._ask)
        self.cancel = button("Cancel", "Write no further, and leave no file", self._cancel)
        self.progress = ProgressBar(min=0, max=FINE)
        self.progress.native.setAccessibleName("Progress")
        self.status = Text("Status")
        page = Panel(
            self.form,
            row(self.draw),
            self.summary,
            self.notes,
            row(self.export, self.cancel),
            self.progress,
            self.status,
        )
        page.stretch()
        self.add_details(page, scrolled=True)
        self.status.say("")

        self.timer.timeout.connect(self._look)
        self.source.changed.connect(self._choose_slide)
        for each in fields[1:]:
            each.changed.connect(self._look)
        self.listen(self.viewer.layers.events.removed, self._look)
        for changes in (
            self.viewer.layers.events,  # of each layer, too
            self.viewer.scene.camera.events,
            self.viewer.canvas.events.size,
            self.viewer.dims.events,
        ):
            self.listen(changes, self._look_soon)
        self.listen(self.viewer.layers.selection.events.active, self._use_shapes)
        closed = partial(_cancel, self._running, DOCK_CLOSED)
        self.native.left.connect(closed)
        self.at_end.insert(0, closed)
        self.follow()

    @property
    def choices(self) -> Choices:
        """What is chosen now."""
        chosen = (self.region, self.files, self.level, self.color, self.kind)
        return Choices(*(each.value for each in chosen))

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
        self._offer()
        offer(self.level, [] if slide is None else [(name, at) for at, name in level_names(slide)])
        has_profile = slide is not None and slide.layout.icc is not None
        self.form.show_row(self.color, has_profile)
        if not has_profile:
            self.color.value = "stored"
        if slide is not None:
            with self.source.changed.blocked():
                self.source.value = slide
            self.level.value = slide.pyramid[0].number
            self.status.say("")
        self._look()

    def let_go(self, slide: Slide) -> None:
        """Cancel what is being written of a slide that has left the viewer."""
        for export in [export for export in self._running if export.files[0][0].slide is slide]:
            export.cancel(SLIDE_CLOSED)
            self._end(export, CANCELLED)
        super().let_go(slide)

    def on_shown(self, event: Any) -> None:
        """Follow the view and the shapes from now on."""
        super().on_shown(event)
        self._look()

    def on_hidden(self) -> None:
        """Follow them no longer."""
        self.timer.stop()

    # What is chosen

    def _offer(self) -> None:
        slides = self.slides()
        names = _told_apart([title(slide) for slide in slides])
        offer(self.source, list(zip(names, slides, strict=True)))
        shapes = [layer for layer in self.viewer.layers if isinstance(layer, Shapes)]
        names = _told_apart([f"Shapes of '{layer.name}'" for layer in shapes])
        parts = [(part.value, part) for part in Part]
        offer(self.region, [*parts, *zip(names, shapes, strict=True)])
        self.form.show_row(self.files, isinstance(self.region.value, Shapes))

    def _choose_slide(self, slide: Slide | None) -> None:
        if slide is not None and slide is not self.slide:
            self.slide = slide
            self.show_slide(slide)

    def _use_shapes(self, event: Any) -> None:
        """Choose a layer of shapes when it becomes active."""
        if isinstance(event.value, Shapes):
            self._offer()
            self.region.value = event.value

    def _draw(self) -> None:
        """Let the user draw in a layer of what is to be exported, and not among annotations."""
        layer = self.layer_of_slide()
        if layer is None:
            return
        own = [each for each in self.viewer.layers if FOR_EXPORT in each.metadata]
        chosen = self.region.value
        shapes = chosen if chosen in own else own[-1] if own else None
        if shapes is None:
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
        self.region.value = shapes  # though it may have been active before

    def _look_soon(self, event: Any) -> None:
        if self.visible and not self.timer.isActive():
            self.timer.start()

    def _look(self, event: Any = None) -> None:
        """Say what would be exported now, and how far the running export is."""
        if not isalive(self.native):
            return
        self._offer()
        if self.slide is None or self.slide not in self.slides():
            return
        said = announce(self.choices, self.viewer, self.slide)
        self.summary.say(said.size)
        self.notes.say(said.notes)
        self.export.enabled = bool(said.size) and not self._running
        for export in self._running:
            part, how = export.done
            self.progress.value = round(FINE * part)
            self.status.say(how)
        self.cancel.enabled = self.progress.visible = bool(self._running)
        if self._running:
            self.timer.start()

    # Exports

    def _ask(self) -> None:
        """Ask for the file, and write it."""
        if self.slide is None:
            return
        plans = self.choices.plans(self.viewer, self.slide)
        plan = plans[0]
        endings = ENDINGS[plan.kind]
        which = "shape" if len(plans) > 1 else f"x{plan.region.x} y{plan.region.y}"
        patterns = " ".join(f"*{ending}" for ending in endings)
        answer = ask_where_to_save(
            self.native,
            "Export region",
            start_folder(self._folder, plan.slide)
            / f"{slide_name(plan.slide)} {which}{endings[0]}",
            f"{plan.kind} ({patterns})",
        )
        if answer:
            # Only of the very name that the dialog returned the user was asked.
            path = Path(named(answer, plan.kind))
            paths = paths_of(plans, path)
            self.write(list(zip(plans, paths, strict=True)), overwrite=paths == [Path(answer)])

    def write(self, files: Sequence[tuple[Plan, Path]], *, overwrite: bool) -> None:
        """Write files in another thread, and say in the dock how far that is."""
        plan, path = files[0]
        self._folder = path.parent
        export = Export(files)
        self._running.append(export)
        self.jobs.start(
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
            if isalive(self.native):  # a window that closes takes its docks first
                self.status.say(sentence)
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


def _told_apart(names: Sequence[str]) -> list[str]:
    """Return names of which equal ones are numbered."""
    return [
        f"{name} ({names[: index + 1].count(name)})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]
