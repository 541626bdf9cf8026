"""The inspector's header: a thumbnail, the main facts, and warnings."""

from __future__ import annotations

import html
from functools import partial
from typing import TYPE_CHECKING

from qtpy.QtCore import QSize, Qt, QTimer
from qtpy.QtWidgets import QBoxLayout

from napari_wsigpu.slide.facts import NOT_GIVEN, damage, facts, title
from napari_wsigpu.widgets.kit.parts import Hosted, Panel, Text, Title, row
from napari_wsigpu.widgets.kit.picture import PictureView, overview_image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.widgets.dock.jobs import Jobs

THUMBNAIL = 8.0
NARROW = 21  # lines of text
MOST_WARNINGS = 3
WATCH_MS = 1000


class Header(Panel):
    """Thumbnail, main facts and warnings of a slide."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._slide: Slide | None = None
        self._problems: list[str] = []
        self._found: list[str] | None = None
        self._unread = self._is_compact = False
        self.title = Title()
        self.thumbnail = Hosted(PictureView(THUMBNAIL, THUMBNAIL), "Thumbnail of the slide")
        self.facts = Text("Facts about the slide", rich=True)
        self.warnings = Text("Warnings")
        self._middle = row(self.thumbnail, self.facts)
        super().__init__(self.title, self._middle, self.warnings)
        for part in (self.thumbnail, self.facts):
            self._middle.native.layout().setAlignment(part.native, Qt.AlignTop)
        self._middle.native.layout().setStretchFactor(self.facts.native, 1)
        self.native.least = self._least
        # Damaged tiles are found while the user moves the view, and no signal reports them.
        self.watch = QTimer(self.native)
        self.watch.setInterval(WATCH_MS)
        self.watch.timeout.connect(self._warn)

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
        self._slide = slide
        self.title.say("" if slide is None else title(slide), "" if slide is None else slide.path)
        self._show_facts()
        self.warn([])
        self.reload()

    def warn(self, problems: Sequence[str]) -> None:
        """Show the file's warnings."""
        self._problems = list(problems)
        self._warn()

    def reload(self) -> None:
        """Create the thumbnail again."""
        self._jobs.drop(self)
        self._unread = self._slide is not None
        self.thumbnail.native.show_text("")
        if self.visible:
            self._read()

    def on_shown(self, spontaneous: bool = False) -> None:
        """Create the thumbnail when the header becomes visible."""
        self.watch.start()
        self._warn()
        self._read()

    def on_hidden(self) -> None:
        """Stop looking for damaged tiles."""
        self.watch.stop()

    def on_resized(self) -> None:
        """Move the facts below the thumbnail if the header is narrow."""
        narrow = self.width < NARROW * self.native.fontMetrics().lineSpacing()
        direction = QBoxLayout.TopToBottom if narrow else QBoxLayout.LeftToRight
        self._middle.native.layout().setDirection(direction)
        self._make_room()

    def set_compact(self, *, compact: bool) -> None:
        """Show the facts as a line without a thumbnail, or as a table next to the thumbnail."""
        if compact != self._is_compact:
            self._is_compact = compact
            self.thumbnail.native.setHidden(compact)
            self._show_facts()
            self.on_resized()

    def _show_facts(self) -> None:
        found = [] if self._slide is None else facts(self._slide)
        self.facts.value = _line(found) if self._is_compact else _table(found)

    def _least(self, size: QSize) -> QSize:
        """Return the minimum size with the facts below the thumbnail."""
        return QSize(self.facts.native.minimumSizeHint().width(), size.height())

    def _make_room(self) -> None:
        for label in (self.facts, self.warnings):
            label.keep_room()

    def _read(self) -> None:
        slide = self._slide
        if slide is None or not self._unread:
            return
        self._unread = False
        view, work = self.thumbnail.native, partial(overview_image, slide)
        self._jobs.start(
            "Making a thumbnail", slide, work, view.show_picture, view.show_text, owner=self
        )

    def _warn(self) -> None:
        found = [] if self._slide is None else [*damage(self._slide), *self._problems]
        if found == self._found:
            return
        self._found = found
        more = len(found) - MOST_WARNINGS
        shown = found[:MOST_WARNINGS] + ([f"And {more:,} more."] if more > 0 else [])
        self.warnings.say("\n".join(f"\N{WARNING SIGN} {text}" for text in shown))
        self.warnings.tooltip = "\n".join(found[:100]) if more > 0 else ""
        self._make_room()


def _line(rows: Sequence[tuple[str, str]]) -> str:
    return " · ".join(html.escape(value) for _, value in rows if value != NOT_GIVEN)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    text = "".join(
        f"<tr><td>{name}&nbsp;&nbsp;</td><td>{html.escape(value)}</td></tr>" for name, value in rows
    )
    return f"<table cellpadding='1'>{text}</table>"
