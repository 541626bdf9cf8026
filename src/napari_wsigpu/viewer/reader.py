"""The napari reader: which paths are slides, and their layers."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import napari
from cachetools import TTLCache

from napari_wsigpu.formats.describe import describe
from napari_wsigpu.formats.registry import SLIDE_ENDINGS
from napari_wsigpu.model.errors import (
    NotASlideError,
    SlideError,
    SlideReadError,
    UnsupportedSlideError,
)
from napari_wsigpu.slide.slide import Slide
from napari_wsigpu.storage.remote.url import file_name, is_url
from napari_wsigpu.viewer.folder import chosen, is_slide_folder, slides_in, what_is_in
from napari_wsigpu.viewer.layers import slide_layers
from napari_wsigpu.viewer.notifications import show_info, show_warning
from napari_wsigpu.viewer.settings import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napari_wsigpu.model.layout import SlideLayout
    from napari_wsigpu.viewer.layers import LayerData

LARGE_SIDE = 4096
FRESH_SECONDS = 2

# napari asks whether a path is a slide right before it opens it; a server is asked once for both.
_just_described: TTLCache[str, SlideLayout] = TTLCache(maxsize=1, ttl=FRESH_SECONDS)
_lock = Lock()


def get_reader(
    path: str | Sequence[str],
) -> Callable[[str | Sequence[str]], Sequence[LayerData | tuple[None]]] | None:
    """Return `read_slides` if every path is a slide, `read_folder` for a folder, else None.

    Parameters
    ----------
    path : str or sequence of str
        One path or URL, or several that the user opens together.

    Returns
    -------
    callable or None
        Also for what can't be opened, but is a slide or any TIFF, so that reading it says why:
        napari asks only the plugin that its user chose.
    """
    paths = _as_list(path)
    if len(paths) == 1 and _is_plain_folder(paths[0]):
        return read_folder
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
            layout = _described(name)
            _check_is_no_plain_stack(layout)
            slides.append(Slide(layout))
            _report_failed_tiles(slides[-1])
            if settings().apply_icc:
                _show_srgb(slides[-1])
            layers += slide_layers(slides[-1], private=settings().show_private)
    except BaseException:
        for slide in slides:
            slide.close()
        raise
    for slide in slides:
        further = slide.layout.further_planes
        if further:
            shown = slide.planes.count
            show_info(
                f"'{file_name(slide.path)}' holds {further + shown} planes; "
                f"{'one' if shown == 1 else shown} of them can be shown."
            )
    _prepare_viewers()
    return layers


def read_folder(path: str | Sequence[str]) -> list[LayerData | tuple[None]]:
    """Open the slides in a folder as layers; one that can't be opened is named, and left out.

    Parameters
    ----------
    path : str or sequence of str
        The folder.

    Returns
    -------
    list of (levels, attributes, "image" or "labels")
        Or what napari takes for an empty file, if the user wants none of many.

    Raises
    ------
    SlideError
        If there is no slide in it, or none of them can be opened.
    """
    folder = Path(_as_list(path)[0])
    try:
        slides = slides_in(folder, _files_of)
        held = "" if slides else what_is_in(folder)
    except OSError as error:
        raise SlideReadError(f"'{folder}' can't be read ({error.strerror or error}).") from error
    if not slides:
        raise NotASlideError(f"'{folder}' holds no slide: {held}; open a slide's file instead.")
    layers: list[LayerData] = []
    failures: list[SlideError] = []
    wanted = chosen(slides, folder)
    for slide in wanted:
        try:
            layers += read_slides(slide)
        except SlideError as error:
            failures.append(error)
    if failures and not layers:
        raise failures[0]
    for failure in failures:
        show_warning(failure.message)
    return [*layers] or [(None,)]


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


def _is_plain_folder(path: str) -> bool:
    """Whether a path is a folder that is no slide by itself."""
    return not is_url(path) and Path(path).is_dir() and not is_slide_folder(Path(path))


def _is_ours(path: str) -> bool:
    """Whether a path that somebody names is to be opened here: any picture."""
    try:
        place = None if is_url(path) else Path(path)
        if place is not None and _is_plain_folder(path):
            return False
        layout = describe(path)
        if place is None:
            with _lock:
                _just_described[path] = layout
    except NotASlideError:
        return _has_slides_ending(path)
    except SlideError:
        return True
    return True


def _files_of(path: str) -> list[str]:
    """Return the files of the slide that one of many is a part of; none if it is no slide."""
    try:
        layout = describe(path)
    except NotASlideError:
        return [path] if _has_slides_ending(path) else []
    except SlideError:
        return [path]
    return [file.path for file in layout.files] if _is_slide(layout) else []


def _has_slides_ending(path: str) -> bool:
    return Path(file_name(path)).suffix.lower() in SLIDE_ENDINGS


def _described(path: str) -> SlideLayout:
    """Describe a slide, unless that was just done, and not yet made use of."""
    with _lock:
        found = _just_described.pop(path, None)
    return describe(path) if found is None else found


def _is_slide(layout: SlideLayout) -> bool:
    base = layout.levels[0]
    large = max(base.width, base.height) > LARGE_SIDE and layout.hidden_planes == 0
    stack = "ome" in layout.metadata and bool(layout.planes.names)
    return stack or large or not _is_plain(layout)


def _is_plain(layout: SlideLayout) -> bool:
    """Whether nothing but its size could tell that a file is a slide."""
    own = "wsigpu" in layout.metadata
    return layout.vendor == "generic-tiff" and len(layout.levels) == 1 and not own


def _check_is_no_plain_stack(layout: SlideLayout) -> None:
    """Refuse a stack of which only one plane could be shown; napari's reader shows all."""
    if layout.further_planes and _is_plain(layout):
        raise UnsupportedSlideError(
            f"'{layout.path}' is a stack of {layout.hidden_planes + 1} planes, and does not say "
            "along which axis they lie; open it with napari's own reader, 'napari'."
        )


def _report_failed_tiles(slide: Slide) -> None:
    """Notify of the first tile that can't be shown; further ones are logged and counted."""
    reported: list[str] = []

    def report(tile: str, reason: str) -> None:
        if not reported:
            reported.append(tile)
            show_warning(
                f"The tile at {tile} of '{file_name(slide.path)}' can't be decoded ({reason}); "
                "such tiles are shown as background."
            )

    slide.on_failed_tile(report)


def _show_srgb(slide: Slide) -> None:
    """Show a slide in sRGB if it has an ICC profile; say why if that can't be applied."""
    if slide.layout.icc is not None:
        try:
            slide.display_color = "srgb"
        except SlideError as error:
            show_warning(error.message)
