"""`Opening`: how a slide was opened, and can be opened again."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from napari_wsigpu.gpu.device import driver
from napari_wsigpu.model.errors import UnsupportedSlideError

if TYPE_CHECKING:
    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.model.layout import SlideLayout
    from napari_wsigpu.storage.stream import StreamSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Opening:
    """How a slide was opened: enough to open it again after a fork or in another process.

    Attributes
    ----------
    layout : SlideLayout
        The slide.
    device, threads
        As in `open_slide`.
    keeps_whole : bool
        Whether caches keep tiles that one region takes whole.
    title : str or None
        What messages call it instead of its path.
    color : {"stored", "srgb"}
        The slide's `display_color`.
    stream : StreamSource or None
        What it is read from, if it was not opened by a path.
    label : tuple of (Opening, int) or None
        The slide that it is a label image of, and its number there. The path of a label image
        can name a patient, so only this travels.
    """

    layout: SlideLayout
    device: str = "auto"
    threads: int | None = None
    keeps_whole: bool = True
    title: str | None = None
    color: Color = "stored"
    stream: StreamSource | None = None
    label: tuple[Opening, int] | None = None

    def portable(self) -> Opening:
        """Return what travels to another process: nothing that can name a patient.

        Raises
        ------
        UnsupportedSlideError
            If another process can't open the slide.
        """
        if self.label is not None:
            parent = self.label[0].portable()
            return replace(self, layout=parent.layout, title=None, label=(parent, self.label[1]))
        if self.stream is not None:
            raise UnsupportedSlideError(
                f"'{self.title or self.layout.path}' was opened from a stream, which no other "
                "process can read; open the slide by its path."
            )
        return replace(self, layout=self.layout.without_words())

    def in_child(self) -> Opening:
        """Return how a forked process opens the slide: a GPU of its parent can't be used there."""
        if self.device == "cpu" or not driver.started_before_fork():
            return self
        _warn_of_cpu()
        return replace(self, device="cpu")


@cache
def _warn_of_cpu() -> None:
    logger.warning(
        "Slides are decoded on the CPU in this process: it was forked from one that uses the GPU. "
        "Start processes by 'spawn' to use the GPU in them"
    )
