"""The dock "Slide inspector": what the active slide is, and what its file says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from qtpy.QtCore import QSize, Qt
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
from napari_wsigpu.viewer.dock import withdraw_offer
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
from napari_wsigpu.widgets.slide_dock import SlideDock

if TYPE_CHECKING:
    from napari import Viewer
    from numpy.typing import NDArray

    from napari_wsigpu.slide.slide import Slide

MARGIN = 6  # pixels
LOW = 40  # lines of text
QUIET = "QPushButton { background: transparent; text-decoration: underline; padding: 0 }"
NO_SLIDE = "Open a slide, or select its layer, to see what it is."


class Tabs(QTabWidget):  # type: ignore[misc]
    """Takes the height that is left: its pages are scrolled, and not the column that it is in."""

    def sizeHint(self) -> QSize:  # noqa: N802
        """Ask for no more than the pages need, whatever they would like."""
        return self.minimumSizeHint()

    def hasHeightForWidth(self) -> bool:  # noqa: N802
        """Ask for no more height where texts are broken."""
        return False


class SlideInspector(SlideDock):
    """Shows what the slide of the active layer is.

    Parameters
    ----------
    napari_viewer : Viewer
        The viewer whose active layer is followed.
    """

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer, NO_SLIDE)
        self._jobs = Jobs()
        self._disclosures: WeakKeyDictionary[Slide, Disclosure] = WeakKeyDictionary()

        self.header = Header(self._jobs)
        self.metadata = MetadataTab(self._jobs)
        self.levels = LevelsTab()
        self.images = ImagesTab(self._jobs)
        self.colour = ColourTab(self._jobs)
        self.tabs = Tabs()
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
        outer.setContentsMargins(MARGIN, MARGIN, MARGIN, MARGIN)
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
        self._show_progress("")
        self.prefer.setHidden(is_preferred_reader())

        show_private = show_private_changed()
        if show_private is not None:
            self.listen(show_private, self._on_show_private)
        self.at_end.append(self._jobs.close)
        self.follow()

    def showEvent(self, event: Any) -> None:  # noqa: N802
        """Who opens the inspector is not asked any more whether to open it."""
        super().showEvent(event)
        withdraw_offer(self.window())

    def resizeEvent(self, event: Any) -> None:  # noqa: N802
        """Leave the height to the tabs where there is little, so that nothing else is scrolled."""
        super().resizeEvent(event)
        self.header.be_low(low=self.height() < LOW * self.fontMetrics().lineSpacing())

    def let_go(self, slide: Slide) -> None:
        """Work on a slide that has left the viewer no more, and hide its private parts again."""
        self._jobs.let_go(slide)
        self._disclosures.pop(slide, None)

    def _on_show_private(self, event: Any) -> None:
        """Show or hide at once, whatever was chosen for single slides before."""
        self._disclosures.clear()
        self.show_slide(self.slide)

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
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
        if self.slide in self.slides():
            add_beside(self.viewer, self.slide, name, pixels)

    def _show_colours(self) -> None:
        for layer in self.viewer.layers:
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
