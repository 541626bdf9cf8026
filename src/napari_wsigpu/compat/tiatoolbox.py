"""`SlideReader` for TIAToolbox, which ``WSIReader.open`` takes in place of a path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiatoolbox.wsicore.wsireader import OpenSlideWSIReader

from napari_wsigpu.compat.openslide import OpenSlide

if TYPE_CHECKING:
    import os


class SlideReader(OpenSlideWSIReader):  # type: ignore[misc]
    """TIAToolbox's reader by OpenSlide, on top of `Slide`.

    Parameters
    ----------
    input_img : str or PathLike
        The slide.
    **options
        ``mpp``, ``power`` and ``post_proc`` of TIAToolbox's readers.

    Attributes
    ----------
    openslide_wsi : OpenSlide
        The open slide; its ``slide`` is this package's.
    """

    def __init__(self, input_img: str | os.PathLike[str], **options: Any) -> None:
        # Its own would open the file by OpenSlide.
        super(OpenSlideWSIReader, self).__init__(input_img, **{"post_proc": "auto"} | options)
        self.openslide_wsi = OpenSlide(str(self.input_path))
