"""The dock "Slide inspector": what the active slide is, and what its file says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from qtpy.QtCore import QEvent, QObject, QSize, Qt
from qtpy.QtGui import QKeySequence
from qtpy.QtWidgets import (
    QLabel,
    QProgressBar,
    QPushButton,
    QShortcut,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)

from napari_wsigpu.viewer.beside import add_beside
from napari_wsigpu.viewer.layers import slide_of
from napari_wsigpu.viewer.settings import (
    is_preferred_reader,
    prefer_this_reader,
    settings,
    show_private_changed,
)
from napari_wsigpu.widgets.colour_tab import ColourTab
from napari_wsigpu.widgets.column import Column
from napari_wsigpu.widgets.disclosure import Disclosure, by_default
from napari_wsigpu.widgets.header import Header
from napari_wsigpu.widgets.images_tab import ImagesTab
from napari_wsigpu.widgets.jobs import Jobs
from napari_wsigpu.widgets.levels_tab import LevelsTab
from napari_wsigpu.widgets.metadata_tab import MetadataTab

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari import Viewer
    from numpy.typing import NDArray

    from napari_wsigpu.slide import Slide

PREFERRED_WIDTH = 32
QUIET = "QPushButton { background: transparent; text-decoration: underline; padding: 0 }"
NO_SLIDE = "Open a slide, or select its layer, to see what it is."


class SlideInspector(QWidget):  # type: ignore[misc]
    """Shows the slide of the active layer.

    While a layer of another kind is active, the slide that was shown last stays, as long as
    it is in the viewer.

    Parameters
    ----------
    napari_viewer : Viewer
        The viewer whose active layer is followed.
    """

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__()
        self._viewer = napari_viewer
        self._jobs = Jobs()
        self._disclosures: WeakKeyDictionary[Slide, Disclosure] = WeakKeyDictionary()
        self.slide: Slide | None = None

        self.empty = QLabel(NO_SLIDE)
        self.empty.setWordWrap(True)
        self.header = Header(self._jobs)
        self.metadata = MetadataTab(self._jobs)
        self.levels = LevelsTab()
        self.images = ImagesTab(self._jobs)
        self.colour = ColourTab(self._jobs)
        self.tabs = QTabWidget()
        self.tabs.addTab(self.metadata, "Metadata")
        self.tabs.addTab(self.levels, "Levels")
        self.tabs.addTab(self.images, "Images")
        self.tabs.setTabToolTip(self.tabs.indexOf(self.images), "Associated images")
        self.tabs.addTab(self.colour, "Colour")
        page = QWidget()
        inner = QVBoxLayout(page)
        inner.setContentsMargins(0, 0, 0, 0)
        inner.addWidget(self.header)
        inner.addWidget(self.tabs, 1)
        self.details = Column(page)
        self.busy = QLabel()
        self.progress = QProgressBar()
        self.progress.setRange(0, 0)
        self.progress.setAccessibleName("Progress")
        self.prefer = QPushButton("Make this plugin the reader for slides")
        self.prefer.setStyleSheet(QUIET)
        self.prefer.setToolTip("Have napari open slides with this plugin without asking")
        outer = QVBoxLayout(self)
        outer.addWidget(self.empty)
        outer.addWidget(self.details, 1)
        outer.addStretch()
        outer.addWidget(self.busy)
        outer.addWidget(self.progress)
        outer.addWidget(self.prefer, 0, Qt.AlignLeft)

        self.metadata.problems.connect(self.header.warn)
        self.images.opened.connect(self._open_layer)
        self.colour.changed.connect(self._show_colours)
        self.prefer.clicked.connect(self._prefer)
        self._jobs.slow.connect(self._show_progress)
        find = QShortcut(QKeySequence(QKeySequence.Find), self)
        find.setContext(Qt.WidgetWithChildrenShortcut)
        find.activated.connect(self._find)
        self.empty.installEventFilter(self)
        self._show_progress("")
        self.prefer.setHidden(is_preferred_reader())

        connections = (
            (napari_viewer.layers.selection.events.active, self._follow),
            (napari_viewer.layers.events.removed, self._on_removed),
            (show_private_changed(), self._on_show_private),
        )
        self._connections = [(signal, slot) for signal, slot in connections if signal is not None]
        for signal, slot in self._connections:
            signal.connect(slot)
        self.destroyed.connect(_end(self._connections, self._jobs))
        self._follow()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return a size that holds the table of levels, but leaves most of the screen."""
        line = self.fontMetrics().lineSpacing()
        width = min(PREFERRED_WIDTH * line, self.screen().availableGeometry().width() // 3)
        return QSize(width, super().sizeHint().height())

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Use the size that napari's style gives to labels for all text, trees and tables too."""
        if watched is self.empty and event.type() in (QEvent.FontChange, QEvent.Polish):
            size, font = self.empty.font().pointSizeF(), self.font()
            if font.pointSizeF() != size:
                font.setPointSizeF(size)
                self.setFont(font)
        return bool(super().eventFilter(watched, event))

    def showEvent(self, event: Any) -> None:  # noqa: N802
        """Have the style applied before the size of the dock is asked."""
        self.empty.ensurePolished()
        super().showEvent(event)

    def _on_removed(self, event: Any) -> None:
        slide = slide_of(event.value)
        if slide is not None and slide not in self._slides():
            self._jobs.let_go(slide)
            self._disclosures.pop(slide, None)
        self._follow()

    def _on_show_private(self, event: Any) -> None:
        """Show or hide at once, whatever was chosen for single slides before."""
        self._disclosures.clear()
        self._show(self.slide)

    def _follow(self, event: Any = None) -> None:
        slides = self._slides()
        active = slide_of(self._viewer.layers.selection.active)
        kept = self.slide if self.slide in slides else None
        slide = active or kept or (slides[-1] if slides else None)
        if slide is not self.slide or slide is None:
            self._show(slide)

    def _slides(self) -> list[Slide]:
        slides = (slide_of(layer) for layer in self._viewer.layers)
        return [slide for slide in slides if slide is not None]

    def _show(self, slide: Slide | None) -> None:
        self.slide = slide
        self.empty.setVisible(slide is None)
        self.details.setVisible(slide is not None)
        disclosure = by_default(show_private=settings().show_private)
        if slide is not None:
            disclosure = self._disclosures.setdefault(slide, disclosure)
        self.header.show_slide(slide)
        self.metadata.show_slide(slide, disclosure)
        self.levels.show_slide(slide)
        self.images.show_slide(slide, disclosure)
        self.colour.show_slide(slide)

    def _open_layer(self, name: str, pixels: NDArray[Any]) -> None:
        if self.slide in self._slides():
            add_beside(self._viewer, self.slide, name, pixels)

    def _show_colours(self) -> None:
        for layer in self._viewer.layers:
            if slide_of(layer) is self.slide:
                layer.refresh()
        self.header.reload()
        self.images.reload()

    def _show_progress(self, what: str) -> None:
        self.busy.setText(f"{what}…")
        self.busy.setVisible(bool(what))
        self.progress.setVisible(bool(what))

    def _prefer(self) -> None:
        prefer_this_reader()
        self.prefer.setHidden(is_preferred_reader())

    def _find(self) -> None:
        self.tabs.setCurrentWidget(self.metadata)
        self.metadata.search.setFocus()
        self.metadata.search.selectAll()


def _end(connections: Sequence[tuple[Any, Any]], jobs: Jobs) -> Any:
    """Return a function that ends all that goes on, and knows nothing of the dying widget."""

    def end() -> None:
        for signal, slot in connections:
            signal.disconnect(slot)
        jobs.close()

    return end
