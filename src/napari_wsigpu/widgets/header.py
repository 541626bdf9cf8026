"""The inspector's header: a thumbnail, what people look for first, and what is wrong."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from qtpy.QtCore import QSize, Qt, QTimer
from qtpy.QtWidgets import QBoxLayout

from napari_wsigpu.slide.facts import NOT_GIVEN, damage, facts, title
from napari_wsigpu.widgets.kit.parts import Hosted, Panel, Text, Title, row
from napari_wsigpu.widgets.kit.picture import PictureView, overview_image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.widgets.jobs import Jobs

THUMBNAIL = 8.0
NARROW = 21  # lines of text
MOST_WARNINGS = 3
WATCH_MS = 1000


class Header(Panel):
    """What the slide is, at a glance."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._slide: Slide | None = None
        self._problems: list[str] = []
        self._found: list[str] | None = None
        self._unread = self._low = False
        self.title = Title()
        self.thumbnail = Hosted(PictureView(THUMBNAIL, THUMBNAIL), "Thumbnail of the slide")
        self.facts = Text("What the slide is", rich=True)
        self.warnings = Text("Warnings")
        self._middle = row(self.thumbnail, self.facts)
        super().__init__(self.title, self._middle, self.warnings)
        for part in (self.thumbnail, self.facts):
            self._middle.native.layout().setAlignment(part.native, Qt.AlignTop)
        self._middle.native.layout().setStretchFactor(self.facts.native, 1)
        self.native.least = self._least
        # Tiles turn out to be damaged while one looks around; nobody says when.
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
        """Say what is wrong with the file."""
        self._problems = list(problems)
        self._warn()

    def reload(self) -> None:
        """Make the thumbnail again."""
        self._jobs.drop(self)
        self._unread = self._slide is not None
        self.thumbnail.native.show_text("")
        if self.visible:
            self._read()

    def on_shown(self, event: Any) -> None:
        """Make the thumbnail, now that it is looked at."""
        self.watch.start()
        self._warn()
        self._read()

    def on_hidden(self) -> None:
        """Watch no longer."""
        self.watch.stop()

    def on_resized(self) -> None:
        """Put the lines below the thumbnail if it is narrow."""
        narrow = self.width < NARROW * self.native.fontMetrics().lineSpacing()
        way = QBoxLayout.TopToBottom if narrow else QBoxLayout.LeftToRight
        self._middle.native.layout().setDirection(way)
        self._make_room()

    def be_low(self, *, low: bool) -> None:
        """Say all in two lines without a thumbnail, or in a table beside it again."""
        if low != self._low:
            self._low = low
            self.thumbnail.native.setHidden(low)
            self._show_facts()
            self.on_resized()

    def _show_facts(self) -> None:
        found = [] if self._slide is None else facts(self._slide)
        self.facts.value = _line(found) if self._low else _table(found)

    def _least(self, size: QSize) -> QSize:
        """Return the least size with the lines below the thumbnail."""
        return QSize(self.facts.native.minimumSizeHint().width(), size.height())

    def _make_room(self) -> None:
        for label in (self.facts, self.warnings):
            label.keep_room()

    def _read(self) -> None:
        slide = self._slide
        if slide is None or not self._unread:
            return
        self._unread = False
        view = self.thumbnail.native
        self._jobs.start(
            "Making a thumbnail",
            slide,
            lambda: overview_image(slide),
            view.show_picture,
            view.show_text,
            owner=self,
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
