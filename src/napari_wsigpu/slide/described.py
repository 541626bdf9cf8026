"""`Described`: what the layout of a slide says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from napari_wsigpu.model.layout import Planes, SlideLayout


class Described:
    """Something that a layout describes.

    Parameters
    ----------
    layout : SlideLayout
        The description.
    """

    def __init__(self, layout: SlideLayout) -> None:
        self.layout = layout

    @property
    def path(self) -> str:
        """Absolute path of the file, or its URL without user, password and query."""
        return self.layout.path

    @property
    def vendor(self) -> str:
        """Vendor as OpenSlide names it, for example ``"aperio"`` or ``"generic-tiff"``."""
        return self.layout.vendor

    @property
    def dimensions(self) -> tuple[int, int]:
        """(width, height) of level 0 in pixels."""
        return self.level_dimensions[0]

    @property
    def level_count(self) -> int:
        """Number of levels: the stored ones, and those that the format lets decoders scale."""
        return len(self.layout.levels)

    @property
    def level_dimensions(self) -> tuple[tuple[int, int], ...]:
        """(width, height) of each level in its own pixels."""
        return tuple((level.width, level.height) for level in self.layout.levels)

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """How many pixels of level 0 one pixel of each level spans."""
        return self.layout.downsamples

    @property
    def mpp(self) -> tuple[float, float] | None:
        """Micrometres a pixel of level 0, (x, y); None where the file doesn't say."""
        return self.layout.mpp

    @property
    def objective(self) -> float | None:
        """Magnification of the objective; None where the file doesn't say."""
        return self.layout.objective

    @property
    def planes(self) -> Planes:
        """How many planes along z and t can be chosen, how far apart they lie, and which is shown.

        The one that is shown is the one that the file names, else the middle one along z (of some
        vendors' slides the first one, as OpenSlide shows it) and the first one along t.
        """
        return self.layout.planes
