"""The dock "Inspector": what the active slide is, what its file says, and how it is decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from magicgui.widgets import ProgressBar
from qtpy.QtCore import Qt
from qtpy.QtGui import QKeySequence
from qtpy.QtWidgets import QDockWidget, QShortcut

from napari_wsigpu.viewer.beside import add_beside
from napari_wsigpu.viewer.layers import slide_of
from napari_wsigpu.viewer.settings import (
    is_preferred_reader,
    prefer_this_reader,
    settings,
    show_private_changed,
)
from napari_wsigpu.widgets.color_page import ColorPage
from napari_wsigpu.widgets.decoding_page import DecodingPage
from napari_wsigpu.widgets.disclosure import Disclosure, by_default
from napari_wsigpu.widgets.header import Header
from napari_wsigpu.widgets.images_page import ImagesPage
from napari_wsigpu.widgets.kit.parts import Pages, Panel, Text, button
from napari_wsigpu.widgets.levels_page import LevelsPage
from napari_wsigpu.widgets.metadata_page import MetadataPage
from napari_wsigpu.widgets.slide_dock import SlideDock

if TYPE_CHECKING:
    from napari import Viewer
    from numpy.typing import NDArray

    from napari_wsigpu.slide.slide import Slide

LOW = 30  # lines of text
QUIET = "QPushButton { background: transparent; text-decoration: underline; padding: 0 }"
NO_SLIDE = "Open a slide, or select its layer, to see what it is."


class SlideInspector(SlideDock):
    """Shows what the slide of the active layer is.

    Parameters
    ----------
    napari_viewer : Viewer
        The viewer whose active layer is followed.
    """

    title_in_tabs = "Inspector"

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer, NO_SLIDE)
        self._disclosures: WeakKeyDictionary[Slide, Disclosure] = WeakKeyDictionary()
        self._dock: QDockWidget | None = None
        self.header = Header(self.jobs)
        self.metadata = MetadataPage(self.jobs, self.header.warn)
        self.levels = LevelsPage()
        self.images = ImagesPage(self.jobs, self._open_layer)
        self.color = ColorPage(self.jobs, self._recolor)
        self.decoding = DecodingPage(self.jobs, napari_viewer)
        self.tabs = Pages(
            {
                "Metadata": (self.metadata, "What the file says"),
                "Levels": (self.levels, "The pyramid"),
                "Images": (self.images, "Associated images"),
                "Color": (self.color, "The ICC profile"),
                "Decoding": (self.decoding, "What decodes the slide, how fast, in which memory"),
            }
        )
        self.busy = Text("Busy")
        self.progress = ProgressBar(min=0, max=0)
        self.progress.native.setAccessibleName("Progress")
        self.prefer = button(
            "Make this plugin the reader for slides",
            "Have napari open slides with this plugin without asking",
            self._prefer,
        )
        self.prefer.native.setStyleSheet(QUIET)
        inner = Panel(self.header, self.tabs)
        inner.native.layout().setStretchFactor(self.tabs.native, 1)
        self.add_details(inner, self.busy, self.progress, self.prefer, scrolled=True)

        self.jobs.slow.connect(self._show_progress)
        find = QShortcut(QKeySequence(QKeySequence.Find), self.native)
        find.setContext(Qt.WidgetWithChildrenShortcut)
        find.activated.connect(self._find)
        self._show_progress("")
        self.prefer.visible = not is_preferred_reader()
        show_private = show_private_changed()
        if show_private is not None:
            self.listen(show_private, self._on_show_private)
        self.follow()

    def on_shown(self, event: Any) -> None:
        """Know when it is behind other tabs."""
        super().on_shown(event)
        dock = self.native.parent()
        if isinstance(dock, QDockWidget) and dock is not self._dock:
            self._dock = dock
            dock.visibilityChanged.connect(self.decoding.run)

    def on_resized(self) -> None:
        """Leave the height to the tabs where there is little, so that nothing else is scrolled."""
        self.header.be_low(low=self.height < LOW * self.native.fontMetrics().lineSpacing())

    def let_go(self, slide: Slide) -> None:
        """Work on a slide that has left the viewer no more, and hide its private parts again."""
        super().let_go(slide)
        self._disclosures.pop(slide, None)

    def _on_show_private(self, event: Any) -> None:
        """Show or hide at once, whatever was chosen for single slides before."""
        self._disclosures.clear()
        self.show_slide(self.slide)

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
        disclosure = by_default(show_private=settings().show_private)
        if slide is not None:
            disclosure = self._disclosures.setdefault(slide, disclosure)
        self.header.show_slide(slide)
        self.metadata.show_slide(slide, disclosure)
        self.levels.show_slide(slide)
        self.images.show_slide(slide, disclosure)
        self.color.show_slide(slide)
        self.decoding.show_slide(slide)

    def _open_layer(self, name: str, pixels: NDArray[Any]) -> None:
        if self.slide is not None and self.slide in self.slides():
            add_beside(self.viewer, self.slide, name, pixels)

    def _recolor(self) -> None:
        for layer in self.viewer.layers:
            if slide_of(layer) is self.slide:
                layer.refresh()
        self.header.reload()
        self.images.reload()

    def _show_progress(self, what: str) -> None:
        self.busy.say(f"{what}…" if what else "")
        self.progress.visible = bool(what)

    def _prefer(self) -> None:
        prefer_this_reader()
        self.prefer.visible = not is_preferred_reader()

    def _find(self) -> None:
        self.tabs.open(self.metadata)
        self.metadata.find()
