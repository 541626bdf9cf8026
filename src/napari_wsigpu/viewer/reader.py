"""The napari reader: which paths are slides, and their layers."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import napari
from cachetools import TTLCache
from napari.utils.notifications import show_info, show_warning

from napari_wsigpu.errors import NotASlideError, SlideError
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.formats.registry import PATH_FORMATS, SLIDE_ENDINGS
from napari_wsigpu.slide import Slide
from napari_wsigpu.storage.url import file_name, is_url
from napari_wsigpu.viewer.layers import slide_layers
from napari_wsigpu.viewer.settings import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napari_wsigpu.layout import SlideLayout
    from napari_wsigpu.viewer.layers import LayerData

LARGE_SIDE = 4096
FRESH_SECONDS = 2

# napari asks whether a path is a slide right before it opens it; a server is asked once for both.
_just_described: TTLCache[str, SlideLayout] = TTLCache(maxsize=1, ttl=FRESH_SECONDS)
_lock = Lock()


def get_reader(
    path: str | Sequence[str],
) -> Callable[[str | Sequence[str]], list[LayerData]] | None:
    """Return `read_slides` if every path is a slide, else None.

    Parameters
    ----------
    path : str or sequence of str
        One path or URL, or several that the user opens together.

    Returns
    -------
    callable or None
        Also for a damaged slide, so that reading it says what is wrong. None for what others
        read better: small flat pictures and stacks of planes.
    """
    paths = _as_list(path)
    return read_slides if paths and all(map(_is_ours, paths)) else None


def read_slides(path: str | Sequence[str]) -> list[LayerData]:
    """Open slides as layers.

    Parameters
    ----------
    path : str or sequence of str
        One path or URL, or several.

    Returns
    -------
    list of (levels, attributes, "image" or "labels")

    Raises
    ------
    SlideError
        If a slide can't be opened; none of them stays open then.
    """
    slides: list[Slide] = []
    layers: list[LayerData] = []
    try:
        for name in _as_list(path):
            slides.append(Slide(_described(name)))
            _report_failed_tiles(slides[-1])
            if settings().apply_icc:
                _show_srgb(slides[-1])
            layers += slide_layers(slides[-1])
    except BaseException:
        for slide in slides:
            slide.close()
        raise
    for slide in slides:
        if slide.layout.hidden_planes:
            show_info(
                f"'{slide.path}' holds {slide.layout.hidden_planes + 1} planes; "
                "one of them is shown."
            )
    _prepare_viewers()
    return layers


def _prepare_viewers() -> None:
    """Prepare for the slides whichever viewer they are meant for: napari doesn't say."""
    current = napari.current_viewer()
    if current is not None:  # so there is Qt
        from napari_wsigpu.viewer.arrival import welcome_slides
        from napari_wsigpu.viewer.lifetime import look_after_slides
        from napari_wsigpu.viewer.progressive import open_viewers

        for viewer in {current, *open_viewers()}:
            look_after_slides(viewer)
            welcome_slides(viewer)


def _as_list(path: str | Sequence[str]) -> list[str]:
    return [path] if isinstance(path, str) else list(path)


def _is_ours(path: str) -> bool:
    try:
        place = None if is_url(path) else Path(path)
        if (
            place is not None
            and place.is_dir()
            and not any(item.module.probe(place) for item in PATH_FORMATS)
        ):
            return False
        layout = describe(path)
        if place is None:
            with _lock:
                _just_described[path] = layout
    except NotASlideError:
        return Path(file_name(path)).suffix.lower() in SLIDE_ENDINGS
    except SlideError:
        return True
    return _is_slide(layout)


def _described(path: str) -> SlideLayout:
    """Describe a slide, unless that was just done, and not yet made use of."""
    with _lock:
        found = _just_described.pop(path, None)
    return describe(path) if found is None else found


def _is_slide(layout: SlideLayout) -> bool:
    base = layout.levels[0]
    large = max(base.width, base.height) > LARGE_SIDE and layout.hidden_planes == 0
    own = "wsigpu" in layout.metadata
    return own or layout.vendor != "generic-tiff" or len(layout.levels) > 1 or large


def _report_failed_tiles(slide: Slide) -> None:
    """Notify of the first tile that can't be shown; further ones are logged and counted."""
    reported: list[str] = []

    def report(tile: str, reason: str) -> None:
        if not reported:
            reported.append(tile)
            show_warning(
                f"The tile at {tile} of '{slide.path}' can't be decoded ({reason}); "
                "such tiles are shown as background."
            )

    slide.on_failed_tile(report)


def _show_srgb(slide: Slide) -> None:
    """Show a slide in sRGB if it has an ICC profile; say why if that can't be applied."""
    if slide.layout.icc is not None:
        try:
            slide.display_color = "srgb"
        except SlideError as error:
            show_warning(str(error))
