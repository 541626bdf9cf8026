"""`SlideReader` for TIAToolbox, which ``WSIReader.open`` accepts instead of a path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiatoolbox.wsicore.wsireader import OpenSlideWSIReader

from napari_wsigpu.compat.openslide import OpenSlide

if TYPE_CHECKING:
    import os


class SlideReader(OpenSlideWSIReader):  # type: ignore[misc]
    """TIAToolbox's OpenSlide reader, on top of `Slide`.

    Parameters
    ----------
    input_img : str or PathLike
        Path of the slide.
    **options
        Options of TIAToolbox's readers: ``mpp``, ``power`` and ``post_proc``.

    Attributes
    ----------
    openslide_wsi : OpenSlide
        The open slide; its attribute ``slide`` is the `Slide`.
    """

    def __init__(self, input_img: str | os.PathLike[str], **options: object) -> None:
        # Skip the constructor of OpenSlideWSIReader, which would open the file with OpenSlide.
        super(OpenSlideWSIReader, self).__init__(input_img, **{"post_proc": "auto"} | options)
        self.openslide_wsi = OpenSlide(str(self.input_path))
