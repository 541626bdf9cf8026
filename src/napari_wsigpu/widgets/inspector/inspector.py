"""The "Inspector" dock: facts, metadata, images and decoding of the active slide."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from magicgui.widgets import ProgressBar
from qtpy.QtCore import Qt
from qtpy.QtGui import QKeySequence
from qtpy.QtWidgets import QDockWidget, QShortcut

from napari_wsigpu.viewer.layers.associated_layer import add_associated_image
from napari_wsigpu.viewer.layers.slide_layers import slide_of
from napari_wsigpu.viewer.window.settings import (
    is_preferred_reader,
    prefer_this_reader,
    settings,
    show_private_changed,
)
from napari_wsigpu.widgets.dock.slide_dock import SlideDock
from napari_wsigpu.widgets.inspector.color_page import ColorPage
from napari_wsigpu.widgets.inspector.decoding_page import DecodingPage
from napari_wsigpu.widgets.inspector.disclosure import Disclosure, by_default
from napari_wsigpu.widgets.inspector.header import Header
from napari_wsigpu.widgets.inspector.images_page import ImagesPage
from napari_wsigpu.widgets.inspector.levels_page import LevelsPage
from napari_wsigpu.widgets.inspector.metadata_page import MetadataPage
from napari_wsigpu.widgets.kit.parts import Pages, Panel, Text, button

if TYPE_CHECKING:
    from napari import Viewer
    from napari.utils.events import Event

    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.slide.slide import Slide

LOW = 30  # lines of text; a shorter dock is compact
LINK_STYLE = "QPushButton { background: transparent; text-decoration: underline; padding: 0 }"
NO_SLIDE = "Open a slide, or select its layer, to see its properties."


class SlideInspector(SlideDock):
    """Shows the properties of the slide of the active layer.

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
                "Metadata": (self.metadata, "The file's metadata"),
                "Levels": (self.levels, "The pyramid"),
                "Images": (self.images, "Associated images"),
                "Color": (self.color, "The ICC profile"),
                "Decoding": (self.decoding, "The slide's decoder, its speed and its memory"),
            }
        )
        self.busy = Text("Busy")
        self.progress = ProgressBar(min=0, max=0)
        self.progress.native.setAccessibleName("Progress")
        self.prefer = button(
            "Make this plugin the reader for slides",
            "Let napari open slides with this plugin without asking",
            self._prefer,
        )
        self.prefer.native.setStyleSheet(LINK_STYLE)
        inner = Panel(self.header, self.tabs)
        inner.native.layout().setStretchFactor(self.tabs.native, 1)
        self.add_details(inner, self.busy, self.progress, self.prefer)

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

    def on_shown(self, spontaneous: bool = False) -> None:
        """Let the decoding page pause while the dock is behind another tab."""
        super().on_shown(spontaneous)
        dock = self.native.parent()
        if isinstance(dock, QDockWidget) and dock is not self._dock:
            self._dock = dock
            dock.visibilityChanged.connect(self.decoding.run)

    def on_resized(self) -> None:
        """Shrink the header and the metadata page in a short dock, so that only the tabs scroll."""
        compact = self.height < LOW * self.native.fontMetrics().lineSpacing()
        self.header.set_compact(compact=compact)
        self.metadata.set_compact(compact=compact)

    def drop_slide(self, slide: Slide) -> None:
        """Drop the jobs of a removed slide, and forget that its private data was shown."""
        super().drop_slide(slide)
        self._disclosures.pop(slide, None)

    def _on_show_private(self, event: Event) -> None:
        """Apply the setting to all slides at once, overriding choices for individual slides."""
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

    def _open_layer(self, name: str, pixels: Array) -> None:
        if self.slide is not None and self.slide in self.slides():
            add_associated_image(self.viewer, self.slide, name, pixels)

    def _recolor(self) -> None:
        for layer in self.viewer.layers:
            if slide_of(layer) is self.slide:
                layer.refresh()
        self.header.reload()
        self.images.reload()

    def _show_progress(self, title: str) -> None:
        self.busy.say(f"{title}…" if title else "")
        self.progress.visible = bool(title)

    def _prefer(self) -> None:
        prefer_this_reader()
        self.prefer.visible = not is_preferred_reader()

    def _find(self) -> None:
        self.tabs.open(self.metadata)
        self.metadata.find()
