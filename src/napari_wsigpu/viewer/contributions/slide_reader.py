"""napari reader for slides and folders of slides."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import napari
from cachetools import TTLCache

from napari_wsigpu.formats.describe import describe
from napari_wsigpu.formats.image_file import VENDOR
from napari_wsigpu.formats.registry import SLIDE_ENDINGS
from napari_wsigpu.model.errors import (
    NotASlideError,
    SlideError,
    SlideReadError,
    UnsupportedSlideError,
)
from napari_wsigpu.slide.slide import Slide
from napari_wsigpu.storage.remote.url import file_name, is_url
from napari_wsigpu.viewer.contributions.slide_folder import (
    chosen,
    is_slide_folder,
    slides_in,
    summarize_content,
)
from napari_wsigpu.viewer.layers.slide_layers import slide_layers
from napari_wsigpu.viewer.window.notifications import show_info, show_warning
from napari_wsigpu.viewer.window.settings import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napari_wsigpu.model.layout import SlideLayout
    from napari_wsigpu.viewer.layers.slide_layers import LayerData

LARGE_SIDE = 4096
FRESH_SECONDS = 2

# napari asks for a reader right before it reads. Keep the layout of a URL in between, to query its
# server only once.
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
        A reader is also returned for a damaged slide or TIFF, so that reading it raises an error
        with the reason.
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
        If a slide cannot be opened; the others are closed again.
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
        further = slide.layout.unselectable_planes
        if further:
            shown = slide.planes.count
            show_info(
                f"'{file_name(slide.path)}' holds {further + shown} planes; "
                f"{'one' if shown == 1 else shown} of them can be shown."
            )
    _prepare_viewers()
    return layers


def read_folder(path: str | Sequence[str]) -> list[LayerData | tuple[None]]:
    """Open the slides in a folder as layers, and warn about slides that cannot be opened.

    Parameters
    ----------
    path : str or sequence of str
        The folder.

    Returns
    -------
    list of (levels, attributes, "image" or "labels")
        Or ``[(None,)]``, which tells napari that the file is empty, if the user cancels.

    Raises
    ------
    SlideError
        If the folder holds no slide, or none can be opened.
    """
    folder = Path(_as_list(path)[0])
    try:
        slides = slides_in(folder, _files_of)
        held = "" if slides else summarize_content(folder)
    except OSError as error:
        raise SlideReadError(f"'{folder}' can't be read ({error.strerror or error}).") from error
    if not slides:
        raise NotASlideError(f"'{folder}' holds no slide: {held}; open a slide file instead.")
    layers: list[LayerData] = []
    failures: list[SlideError] = []
    for slide in chosen(slides, folder):
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
    """Prepare all viewers for slides, because napari does not state which one will show them."""
    current = napari.current_viewer()
    if current is not None:  # import vispy, which is slow, only for a viewer
        from napari_wsigpu.viewer.napari_internals import open_viewers
        from napari_wsigpu.viewer.session.lifetime import manage_slides
        from napari_wsigpu.viewer.session.new_slides import show_new_slides

        for viewer in {current, *open_viewers()}:
            manage_slides(viewer)
            show_new_slides(viewer)


def _as_list(path: str | Sequence[str]) -> list[str]:
    return [path] if isinstance(path, str) else list(path)


def _is_plain_folder(path: str) -> bool:
    """Whether a path is a folder that is not itself a slide."""
    return not is_url(path) and Path(path).is_dir() and not is_slide_folder(Path(path))


def _is_ours(path: str) -> bool:
    """Whether this plugin opens a path that the user chose: any supported image."""
    try:
        remote = is_url(path)
        if not remote and _is_plain_folder(path):
            return False
        layout = describe(path)
        if remote:
            with _lock:
                _just_described[path] = layout
    except NotASlideError:
        return _has_slide_ending(path)
    except SlideError:
        return True
    return True


def _files_of(path: str) -> list[str]:
    """Return all files of the slide that a file belongs to; empty if it is not a slide."""
    try:
        layout = describe(path)
    except NotASlideError:
        return [path] if _has_slide_ending(path) else []
    except SlideError:
        return [path]
    return [file.path for file in layout.files] if _is_slide(layout) else []


def _has_slide_ending(path: str) -> bool:
    return file_name(path).lower().endswith(SLIDE_ENDINGS)


def _described(path: str) -> SlideLayout:
    """Return a slide's layout, from `_just_described` if `get_reader` has just read it."""
    with _lock:
        found = _just_described.pop(path, None)
    return describe(path) if found is None else found


def _is_slide(layout: SlideLayout) -> bool:
    base = layout.levels[0]
    large = max(base.width, base.height) > LARGE_SIDE and layout.other_planes == 0
    stack = "ome" in layout.metadata and bool(layout.planes.names)
    return stack or large or not _is_plain(layout)


def _is_plain(layout: SlideLayout) -> bool:
    """Whether only its size could distinguish a slide from an ordinary image."""
    exported = "wsigpu" in layout.metadata
    return layout.vendor in ("generic-tiff", VENDOR) and len(layout.levels) == 1 and not exported


def _check_is_no_plain_stack(layout: SlideLayout) -> None:
    """Refuse a stack if this plugin could show only one plane; napari's own reader shows all."""
    if layout.unselectable_planes and _is_plain(layout):
        raise UnsupportedSlideError(
            f"'{layout.path}' is a stack of {layout.other_planes + 1} planes along an unknown "
            "axis; open it with napari's own reader, 'napari'."
        )


def _report_failed_tiles(slide: Slide) -> None:
    """Warn about a slide's first tile that cannot be decoded; others are only logged."""
    reported: list[str] = []

    def report(tile: str, reason: str) -> None:
        if not reported:
            reported.append(tile)
            show_warning(
                f"The tile at {tile} of '{file_name(slide.path)}' can't be decoded ({reason}); "
                "such tiles are hatched or shown as background."
            )

    slide.on_failed_tile(report)


def _show_srgb(slide: Slide) -> None:
    """Show a slide in sRGB if it has an ICC profile; warn if the profile cannot be applied."""
    if slide.layout.icc is not None:
        try:
            slide.display_color = "srgb"
        except SlideError as error:
            show_warning(error.message)
