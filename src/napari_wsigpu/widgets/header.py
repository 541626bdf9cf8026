"""The inspector's header: a thumbnail, what people look for first, and what is wrong."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from qtpy.QtCore import QSize, Qt, QTimer
from qtpy.QtWidgets import QBoxLayout, QHBoxLayout, QLabel, QVBoxLayout, QWidget
from superqt import QElidingLabel

from napari_wsigpu.widgets.facts import damage, facts, title
from napari_wsigpu.widgets.picture_view import PictureView, overview_image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.widgets.jobs import Jobs

THUMBNAIL = 8.0
NARROW = 21  # lines of text
MOST_WARNINGS = 3
WATCH_MS = 1000


class Header(QWidget):  # type: ignore[misc]
    """What the slide is, at a glance."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__()
        self._jobs = jobs
        self._slide: Slide | None = None
        self._problems: list[str] = []
        self._found: list[str] | None = None
        self._unread = False
        self._low = False
        self.title = QElidingLabel()
        self.title.setElideMode(Qt.ElideMiddle)
        font = self.title.font()
        font.setBold(True)
        self.title.setFont(font)
        self.thumbnail = PictureView(THUMBNAIL, THUMBNAIL)
        self.thumbnail.setAccessibleName("Thumbnail of the slide")
        self.facts = _selectable_label(Qt.RichText)
        self.facts.setAccessibleName("What the slide is")
        self.warnings = _selectable_label(Qt.PlainText)
        self.warnings.setAccessibleName("Warnings")
        # Tiles turn out to be damaged while one looks around; nobody says when.
        self._watch = QTimer(self)
        self._watch.setInterval(WATCH_MS)
        self._watch.timeout.connect(self._warn)

        self._middle = QHBoxLayout()
        self._middle.addWidget(self.thumbnail, 0, Qt.AlignTop)
        self._middle.addWidget(self.facts, 1, Qt.AlignTop)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.title)
        layout.addLayout(self._middle)
        layout.addWidget(self.warnings)

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
        self._slide = slide
        self.title.setText("" if slide is None else title(slide))
        self.title.setToolTip("" if slide is None else slide.path)
        self.facts.setText("" if slide is None else _table(facts(slide)))
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
        self.thumbnail.show_text("")
        if self.isVisible():
            self._read()

    def showEvent(self, event: Any) -> None:  # noqa: N802
        """Make the thumbnail, now that it is looked at."""
        super().showEvent(event)
        self._watch.start()
        self._warn()
        self._read()

    def hideEvent(self, event: Any) -> None:  # noqa: N802
        """Watch no longer."""
        self._watch.stop()
        super().hideEvent(event)

    def resizeEvent(self, event: Any) -> None:  # noqa: N802
        """Keep room for all lines, which layouts don't; put them below a thumbnail if narrow."""
        super().resizeEvent(event)
        self._arrange()

    def be_low(self, *, low: bool) -> None:
        """Do without a thumbnail above the lines, or with it again."""
        if low != self._low:
            self._low = low
            self._arrange()

    def _arrange(self) -> None:
        narrow = self.width() < NARROW * self.fontMetrics().lineSpacing()
        self._middle.setDirection(QBoxLayout.TopToBottom if narrow else QBoxLayout.LeftToRight)
        self.thumbnail.setHidden(narrow and self._low)
        self._make_room()

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return the least size with the lines below the thumbnail."""
        return QSize(self.facts.minimumSizeHint().width(), super().minimumSizeHint().height())

    def _make_room(self) -> None:
        for label in (self.facts, self.warnings):
            label.setMinimumHeight(0)  # or it is the least that is asked for
            label.setMinimumHeight(max(label.heightForWidth(label.width()), 0))

    def _read(self) -> None:
        slide = self._slide
        if slide is None or not self._unread:
            return
        self._unread = False
        self._jobs.start(
            "Making a thumbnail",
            slide,
            lambda: overview_image(slide),
            self.thumbnail.show_picture,
            self.thumbnail.show_text,
            owner=self,
        )

    def _warn(self) -> None:
        found = [] if self._slide is None else [*damage(self._slide), *self._problems]
        more = len(found) - MOST_WARNINGS
        shown = found[:MOST_WARNINGS] + ([f"And {more:,} more."] if more > 0 else [])
        if found == self._found:
            return
        self._found = found
        self.warnings.setText("\n".join(f"\N{WARNING SIGN} {text}" for text in shown))
        self.warnings.setToolTip("\n".join(found[:100]) if more > 0 else "")
        self.warnings.setVisible(bool(found))
        self._make_room()


def _selectable_label(text_format: Qt.TextFormat) -> QLabel:
    label = QLabel()
    label.setTextFormat(text_format)
    label.setWordWrap(True)
    label.setTextInteractionFlags(Qt.TextSelectableByMouse | Qt.TextSelectableByKeyboard)
    return label


def _table(rows: Sequence[tuple[str, str]]) -> str:
    text = "".join(
        f"<tr><td>{name}&nbsp;&nbsp;</td><td>{html.escape(value)}</td></tr>" for name, value in rows
    )
    return f"<table cellpadding='1'>{text}</table>"
