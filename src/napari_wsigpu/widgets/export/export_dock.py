"""The "Export" dock: writes a region of a slide to a file."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from magicgui.widgets import ProgressBar
from napari.layers import Shapes
from qtpy.compat import isalive

from napari_wsigpu.model.errors import ConversionCancelledError
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.slide.facts import level_names, title
from napari_wsigpu.viewer.annotations.annotation_layers import (
    FOR_EXPORT,
    SLIDE,
    flat_placement,
    is_padding,
)
from napari_wsigpu.viewer.layers.slide_layers import slide_name
from napari_wsigpu.viewer.napari_internals import open_viewers
from napari_wsigpu.viewer.window.main_window import single_shot
from napari_wsigpu.viewer.window.notifications import show_warning
from napari_wsigpu.viewer.window.saving import ask_where_to_save, may_replace, saved, start_folder
from napari_wsigpu.widgets.dock.slide_dock import SlideDock
from napari_wsigpu.widgets.export.export_plan import (
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
from napari_wsigpu.widgets.kit.parts import (
    Form,
    Panel,
    Text,
    button,
    choice,
    offer,
    retain_size,
    row,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari import Viewer
    from napari.utils.events import Event

    from napari_wsigpu.slide.slide import Slide

INTERVAL_MS = 200
FINE = 1000  # steps of the progress bar
EDGE = 2  # pixels of the screen
NO_SLIDE = "Open a slide, or select its layer, to export a region of it."
CANCELLED = "Cancelled; nothing was written."
SLIDE_CLOSED, DOCK_CLOSED = "its slide was closed", "its dock was closed"

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Export:
    """Files that are being written, one after another."""

    files: Sequence[tuple[Plan, Path]]
    written: int = 0
    part: float = 0  # written share of the current file
    cancelled: threading.Event = field(default_factory=threading.Event)
    why: str = ""  # reason for the cancellation, unless the user cancelled

    def cancel(self, why: str = "") -> None:
        """Cancel the export; `why` gives the reason if the user did not cancel it."""
        if not self.cancelled.is_set():
            self.why = why
            self.cancelled.set()

    def write(self, *, overwrite: bool) -> str:
        """Write the files, and return a summary; called in the worker thread.

        If the slide or dock was closed, the summary is also shown as a notification.
        """
        notes: dict[str, None] = {}
        for plan, path in self.files:
            try:
                done = plan.write(
                    path, overwrite=overwrite, progress=self._note, cancelled=self.cancelled
                )
            except ConversionCancelledError:
                return self._summarize(self.outcome_so_far())
            notes.update(dict.fromkeys(done.notes))
            self.written, self.part = self.written + 1, 0
        return self._summarize(" ".join([saved(*(path for _, path in self.files)), *notes]))

    def outcome_so_far(self) -> str:
        """State how many files were written before the export was cancelled."""
        if not self.written:
            return CANCELLED
        return f"Cancelled; {self.written} of {len(self.files)} files were written."

    def _summarize(self, sentence: str) -> str:
        if self.why:
            result = sentence.removeprefix("Cancelled; ")
            _report(f"Export of '{self.path.name}' ({self.why}): {result}")
        return sentence

    @property
    def path(self) -> Path:
        """The current file."""
        return self.files[min(self.written, len(self.files) - 1)][1]

    @property
    def done(self) -> tuple[float, str]:
        """The fraction written across all files, and a description of the progress."""
        sizes = [plan.bytes for plan, _ in self.files]
        written = sum(sizes[: self.written]) + self.part * sum(sizes[self.written :][:1])
        left = round(sum(sizes) - written)
        rest = f"{byte_size(left)} left" if left else "finishing the file"
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
        self._running: list[Export] = []  # at most one
        # Updates the dock with a short delay, once for all events in between.
        self.timer = single_shot(self._update, INTERVAL_MS, self.native)
        self.source = choice("Slide", "The slide to export from")
        self.region = choice("Region", "The part of the slide to export")
        self.files = choice(
            "Files",
            "One: the bounding box of the selected shapes, or of the last shape if none are "
            "selected. One per shape: each selected shape, or every shape if none are selected. "
            "Masked: pixels outside the shape become background",
            [(each.value, each) for each in Files],
        )
        self.level = choice(
            "Level", "The level that becomes the finest in the file; all levels cover the same area"
        )
        self.color = choice(
            "Colors",
            "Pixels as stored, or converted to sRGB with the slide's ICC profile",
            [("As stored", "stored"), ("sRGB", "srgb")],
        )
        self.kind = choice(
            "Format", "The format of the file to write", [(each.value, each) for each in Kind]
        )
        fields = (self.source, self.region, self.files, self.level, self.color, self.kind)
        self.form = Form({each.label: each for each in fields})
        self.draw = button(
            "Draw a rectangle", "Draw the region to export in a shapes layer", self._draw
        )
        self.summary = Text("Size of the export")
        self.notes = Text("Notes")
        self.export = button("Export…", "Choose a file, and write the region to it", self._ask)
        self.cancel = button("Cancel", "Stop, and delete the unfinished file", self._cancel)
        self.progress = ProgressBar(min=0, max=FINE)
        self.progress.native.setAccessibleName("Progress")
        self.status = Text("Status")
        page = Panel(
            self.form,
            row(self.draw),
            self.summary,
            self.notes,
        )
        page.stretch()
        self.buttons = row(self.export, self.cancel)
        self.add_details(page, self.buttons, self.status, self.progress)

        self.source.changed.connect(self._choose_slide)
        for each in fields[1:]:
            each.changed.connect(self._update)
        self.listen(self.viewer.layers.events.removed, self._update)
        for changes in (
            self.viewer.layers.events,  # includes the events of each layer
            self.viewer.scene.camera.events,
            self.viewer.canvas.events.size,
            self.viewer.dims.events,
        ):
            self.listen(changes, self._update_soon)
        self.listen(self.viewer.layers.selection.events.active, self._use_shapes)
        closed = partial(_cancel, self._running, DOCK_CLOSED)
        self.native.left.connect(closed)
        self.at_end.insert(0, closed)
        self.follow()

    @property
    def choices(self) -> Choices:
        """The current choices."""
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
        self.buttons.visible = slide is not None
        self.status.say("")
        self._update()

    def drop_slide(self, slide: Slide) -> None:
        """Cancel the export of a slide that was removed from the viewer."""
        for export in [export for export in self._running if export.files[0][0].slide is slide]:
            export.cancel(SLIDE_CLOSED)
            self._end(export, export.outcome_so_far())
        super().drop_slide(slide)

    def on_shown(self, spontaneous: bool = False) -> None:
        """Update the summary when the dock becomes visible."""
        super().on_shown(spontaneous)
        retain_size(self.progress)
        self.on_resized()
        self._update()

    def on_resized(self) -> None:
        """Keep room for messages."""
        self.reserve(self.status, 4)

    def on_hidden(self) -> None:
        """Stop updating the summary."""
        self.timer.stop()

    # Choices

    def _offer(self) -> None:
        slides = self.slides()
        names = _distinct_names([title(slide) for slide in slides])
        offer(self.source, list(zip(names, slides, strict=True)))
        # Shapes of another slide would cut this one at places that nobody chose.
        path = None if self.slide is None else self.slide.path
        shapes = [
            layer
            for layer in self.viewer.layers
            if isinstance(layer, Shapes)
            and layer.metadata.get(SLIDE, path) == path
            and not is_padding(layer)
        ]
        names = _distinct_names([f"Shapes of '{layer.name}'" for layer in shapes])
        parts = [(part.value, part) for part in Part]
        offer(self.region, [*parts, *zip(names, shapes, strict=True)])
        self.form.show_row(self.files, isinstance(self.region.value, Shapes))

    def _choose_slide(self, slide: Slide | None) -> None:
        if slide is not None and slide is not self.slide:
            self.slide = slide
            self.show_slide(slide)

    def _use_shapes(self, event: Event) -> None:
        """Select a shapes layer as the region when it becomes active."""
        if isinstance(event.value, Shapes):
            self._offer()
            if event.value in self.region.choices:
                self.region.value = event.value

    def _draw(self) -> None:
        """Let the user draw regions of the slide in a separate layer without annotations."""
        layer = self.layer_of_slide()
        if layer is None or self.slide is None:
            return
        metadata = {FOR_EXPORT: True, SLIDE: self.slide.path}
        drawn = [each for each in self.viewer.layers if metadata.items() <= each.metadata.items()]
        chosen = self.region.value
        shapes = chosen if chosen in drawn else drawn[-1] if drawn else None
        if shapes is None:
            shapes = self.viewer.add_shapes(
                name="Regions",
                ndim=2,
                **flat_placement(layer),
                face_color="transparent",
                edge_color="lime",
                metadata=metadata,
                edge_width=EDGE / (self.viewer.scene.camera.zoom * layer.scale[-1]),
            )
        self.draw_in(shapes, "add_rectangle")
        self._offer()
        self.region.value = shapes  # needed if the layer was already active

    def _update_soon(self, event: Event) -> None:
        if self.visible and not self.timer.isActive():
            self.timer.start()

    def _update(self, event: Event | None = None) -> None:
        """Update the summary, and the progress of a running export."""
        if not isalive(self.native):
            return
        self._offer()
        for export in self._running:
            part, progress = export.done
            self.progress.value = round(FINE * part)
            self.status.say(progress)
        self.cancel.enabled = self.progress.visible = bool(self._running)
        if self._running:
            self.timer.start()
        if self.slide is None or self.slide not in self.slides():
            return
        announced = announce(self.choices, self.viewer, self.slide)
        self.summary.say(announced.size)
        self.notes.say(announced.notes)
        self.export.enabled = bool(announced.size) and not self._running

    # Exports

    def _ask(self) -> None:
        """Ask for a file, and export to it."""
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
            start_folder(plan.slide.path) / f"{slide_name(plan.slide)} {which}{endings[0]}",
            f"{plan.kind} ({patterns})",
        )
        if answer:
            paths = paths_of(plans, Path(named(answer, plan.kind)))
            # The dialog has asked only about replacing the exact path that it returned.
            there = [each for each in paths if os.path.lexists(each) and each != Path(answer)]
            if not there or may_replace(self.native, "Export region", there):
                replaces = bool(there) or paths == [Path(answer)]
                self.write(list(zip(plans, paths, strict=True)), overwrite=replaces)

    def write(self, files: Sequence[tuple[Plan, Path]], *, overwrite: bool) -> None:
        """Write files in another thread, and show the progress."""
        plan, path = files[0]
        export = Export(files)
        self._running.append(export)
        work, end = partial(export.write, overwrite=overwrite), partial(self._end, export)
        self.jobs.start(f"Exporting {path.name}", plan.slide, work, end, end, owner=self)
        self._update()

    def _cancel(self) -> None:
        _cancel(self._running)

    def _end(self, export: Export, sentence: str) -> None:
        if export in self._running:
            self._running.remove(export)
            if isalive(self.native):  # a closing window deletes its docks first
                self.status.say(sentence)
                self._update()


def _cancel(running: Sequence[Export], why: str = "") -> None:
    for export in running:
        export.cancel(why)


def _report(sentence: str) -> None:
    """Report the result of an export whose dock may be gone.

    If a viewer is open, it shows a notification; otherwise, the result is logged.
    """
    if open_viewers():
        with suppress(RuntimeError):  # at exit, Qt may have deleted the notification's window
            show_warning(sentence)
    else:
        logger.warning(sentence)


def _distinct_names(names: Sequence[str]) -> list[str]:
    """Append numbers to names that occur more than once."""
    return [
        f"{name} ({names[: index + 1].count(name)})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]
