"""The inspector's "Images" page: a card for each associated image."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_wsigpu.model.privacy import PRIVATE_IMAGES
from napari_wsigpu.slide.facts import TIMES
from napari_wsigpu.slide.pictures import read_associated, rgb, save
from napari_wsigpu.viewer.layers.slide_layers import slide_name
from napari_wsigpu.viewer.window.saving import ask_where_to_save, say_saved
from napari_wsigpu.widgets.kit.parts import PAGE_MARGIN, Hosted, Panel, Scrolled, Text, button, flow
from napari_wsigpu.widgets.kit.picture import PictureView, to_image

if TYPE_CHECKING:
    from collections.abc import Callable

    from qtpy.QtGui import QImage

    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.widgets.dock.jobs import Jobs
    from napari_wsigpu.widgets.inspector.disclosure import Disclosure

    # Takes the name and the pixels of an image.
    Opened = Callable[[str, Array], None]

WIDTH, HEIGHT = 18, 9
FILTERS = "PNG (*.png);;TIFF (*.tif *.tiff)"
VEIL = "Private: neither decoded nor shown until you click Show."


class ImageCard(Panel):
    """A card of one associated image, which is decoded only by `load` or a click.

    Parameters
    ----------
    opened : callable
        Called with the name and the pixels of an image that becomes a layer.
    """

    def __init__(
        self, slide: Slide, name: str, disclosure: Disclosure, jobs: Jobs, opened: Opened
    ) -> None:
        self._slide = slide
        self._image = name
        self._disclosure = disclosure
        self._jobs = jobs
        self._is_requested = self._broken = False
        width, height = slide.associated_images[name].size
        self.title = Text("", f"{name},  {width:,} {TIMES} {height:,} px")
        self.picture = Hosted(PictureView(WIDTH, HEIGHT), f"{name} image")
        self.reveal = button("Show", "", self._toggle)
        open_tip = f"Open the {name} image as a separate layer"
        self.open = button("Open as layer", open_tip, partial(self._open, opened), open_tip)
        save_tip = f"Save the {name} image as PNG or TIFF"
        self.save = button("Save…", save_tip, self._save, save_tip)
        super().__init__(
            self.title, self.picture, flow(self.reveal, self.open, self.save), margin=PAGE_MARGIN
        )
        self.reveal.visible = name.casefold() in PRIVATE_IMAGES
        self._update()

    def load(self) -> None:
        """Decode and show the image, unless it is hidden or was already requested."""
        if self._is_requested or self._disclosure.hides(self._image):
            return
        # Also set if decoding fails, so that it is not retried whenever the page is shown.
        self._is_requested, self._broken = True, False
        self._update()
        view = self.picture.native
        view.show_text("Decoding…")
        work = partial(_preview, self._slide, self._image)
        self._start("Decoding", work, view.show_picture, self._fail, owner=self)

    def reload(self) -> None:
        """Decode the image again if it is shown."""
        if self._is_requested:
            self.forget()
            self.load()

    def forget(self) -> None:
        """Cancel the card's jobs."""
        self._jobs.drop(self)
        self._is_requested = False

    def _start(self, what: str, *job: Any, **options: Any) -> None:
        self._jobs.start(f"{what} the {self._image} image", self._slide, *job, **options)

    def _toggle(self) -> None:
        if self._disclosure.hides(self._image):
            self._disclosure.images.add(self._image.casefold())
            self.load()
        else:
            self._disclosure.images.discard(self._image.casefold())
            self.forget()
        self._update()

    def _update(self) -> None:
        hidden = self._disclosure.hides(self._image)
        self.reveal.text = "Show" if hidden else "Hide"
        self.reveal.tooltip = f"{self.reveal.text} the {self._image} image"
        self.reveal.native.setAccessibleName(self.reveal.tooltip)
        for each in (self.open, self.save):
            each.enabled = not hidden and not self._broken
        if hidden:
            self.picture.native.show_veil(VEIL)

    def _fail(self, sentence: str) -> None:
        self._broken = True
        self._update()
        self.picture.native.show_text(sentence)

    def _open(self, opened: Opened) -> None:
        work = partial(read_associated, self._slide, self._image)
        self._start("Opening", work, partial(opened, self._image), self._fail, owner=self)

    def _save(self) -> None:
        slide, name = self._slide, self._image
        start = Path(slide.path).parent / f"{slide_name(slide)} {name}.png"
        path = ask_where_to_save(self.native, f"Save the {name} image", start, FILTERS)
        if path:
            done = partial(say_saved, path)
            self._start("Saving", lambda: save(read_associated(slide, name), path), done)


class ImagesPage(Scrolled):
    """Cards of a slide's associated images, decoded when the page becomes visible.

    Attributes
    ----------
    cards : dict of str to ImageCard
        The cards by the names of the images.
    """

    def __init__(self, jobs: Jobs, opened: Opened) -> None:
        self._jobs, self._opened = jobs, opened
        self.cards: dict[str, ImageCard] = {}
        self.none = Text("", "The file holds no associated images.")
        page = Panel(self.none)
        page.stretch()
        super().__init__(page)
        page.native.shown.connect(self._load)

    def show_slide(self, slide: Slide | None, disclosure: Disclosure) -> None:
        """Show the images of another slide, or none."""
        for card in self.cards.values():
            card.forget()
            self.inner.remove(card)
            # Keep the page as parent, so that a closing window deletes the card as well.
            card.native.setParent(self.inner.native)
            card.native.deleteLater()
        self.cards = {}
        if slide is not None:
            for name in slide.associated_images:
                self.cards[name] = ImageCard(slide, name, disclosure, self._jobs, self._opened)
                self.inner.append(self.cards[name])
        self.none.visible = not self.cards
        if self.inner.visible:
            self._load()

    def reload(self) -> None:
        """Decode the visible images again."""
        for card in self.cards.values():
            card.reload()

    def _load(self) -> None:
        for card in self.cards.values():
            card.load()


def _preview(slide: Slide, name: str) -> QImage:
    return to_image(rgb(read_associated(slide, name)))
