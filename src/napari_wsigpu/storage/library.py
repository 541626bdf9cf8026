"""Tiles that a library decodes, as if they lay uncompressed one after another in one file."""

from __future__ import annotations

import threading
from collections.abc import Callable  # noqa: TC003, of a NamedTuple's field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from napari_wsigpu.model.errors import UnsupportedSlideError
from napari_wsigpu.storage.file import check_unchanged
from napari_wsigpu.storage.readers import Readers, closed_error
from napari_wsigpu.storage.source import DecodedSource, DecodedTile, Unreadable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.model.geometry import Rect
    from napari_wsigpu.model.layout import LevelLayout, SlideFile
    from napari_wsigpu.storage.source import Fill


class Library(Protocol):
    """A slide that a library has opened."""

    handle: Any

    def read(self, image: int | str, rect: Rect) -> NDArray[np.uint8]:
        """Return pixels of a level, or of an associated image, shape (height, width, 3).

        It may be called by many threads, and raises what it likes if they can't be decoded.
        """

    def close(self) -> None:
        """Close the slide."""
        self.handle.close()


class OpenSlideLibrary(Library):
    """A slide that OpenSlide has opened; what it leaves transparent has the background's colour."""

    def __init__(self, path: str) -> None:
        import openslide

        self.handle = openslide.OpenSlide(path)
        color = self.handle.properties.get(openslide.PROPERTY_NAME_BACKGROUND_COLOR, "ffffff")
        self._background = np.array([*bytes.fromhex(color)], np.uint8)

    def read(self, image: int | str, rect: Rect) -> NDArray[np.uint8]:
        """Return pixels; see `Library.read`."""
        if isinstance(image, str):
            rgba = np.asarray(self.handle.associated_images[image])
            rgba = rgba[rect.top : rect.bottom, rect.left : rect.right]
        else:
            step = self.handle.level_downsamples[image]
            corner = round(rect.left * step), round(rect.top * step)
            rgba = np.asarray(self.handle.read_region(corner, image, (rect.width, rect.height)))
        alpha = rgba[..., 3:].astype(np.uint16)
        if (alpha == 255).all():
            return rgba[..., :3]
        mixed = rgba[..., :3] * alpha + self._background * (255 - alpha) + 127
        return (mixed // 255).astype(np.uint8)


class ISyntaxLibrary(Library):
    """A slide that libisyntax has opened, which decodes one region at a time."""

    def __init__(self, path: str) -> None:
        from isyntax import ISyntax

        self.handle = ISyntax.open(path)
        self._lock = threading.Lock()

    def read(self, image: int | str, rect: Rect) -> NDArray[np.uint8]:
        """Return pixels; see `Library.read`."""
        with self._lock:
            rgba = self.handle.read_region(rect.left, rect.top, rect.width, rect.height, image)
        return np.asarray(rgba)[..., :3]


class Known(NamedTuple):
    """A library: the package to import, and the extra that installs it."""

    open: Callable[[str], Library]
    package: str
    extra: str


LIBRARIES = {
    "OpenSlide": Known(OpenSlideLibrary, "openslide", "openslide"),
    "libisyntax": Known(ISyntaxLibrary, "isyntax", "isyntax"),
}


def open_library(name: str, path: str) -> Library:
    """Open a slide by a library of that name.

    Raises
    ------
    UnsupportedSlideError
        If it is not installed, or can't open the slide; it says why.
    """
    known = LIBRARIES[name]
    try:
        return known.open(path)
    except ImportError as error:
        raise UnsupportedSlideError(
            f"'{path}' is read by {name}, which is not installed ({error}); run "
            f'pip install "napari-wsigpu[{known.extra}]" and start again.'
        ) from error
    except Exception as error:  # libraries have exceptions of their own
        raise UnsupportedSlideError(
            f"'{path}' can't be opened by {name} ({error}); get a fresh copy of it, or convert it."
        ) from error


class LibrarySource(DecodedSource):
    """Levels and associated images that a library decodes; safe to read from any thread.

    Parameters
    ----------
    file : SlideFile
        The slide, which must not have changed at any read.
    images : sequence of LevelLayout
        All of them, of one library.
    """

    def __init__(self, file: SlideFile, images: Sequence[LevelLayout]) -> None:
        super().__init__(images)
        self._file = file
        self._readers = Readers(file.path)
        self._lock = threading.Lock()
        self._library: Library | None = None

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length) within a tile, in order."""
        self._check()
        views = []
        for offset, length in ranges:
            tile = self._tile_at(offset)
            assert tile is not None
            view = np.empty(tile.image.tile_bytes, np.uint8).data
            try:
                self._fill(tile, view)
            except ValueError as error:
                view = memoryview(Unreadable(str(error)))
            first = offset - tile.begin
            views.append(view[first : first + length] if len(view) else view)
        return views

    def fills(self, ranges: Sequence[tuple[int, int]]) -> list[Fill]:
        """Return what decodes each whole tile later; see `FillingSource.fills`."""
        self._check()
        tiles = [self._tile_at(offset) for offset, _ in ranges]
        return [partial(self._fill, tile) for tile in tiles if tile is not None]

    def release(self) -> None:
        """Have the library close the slide until the next read."""
        with self._readers.none():
            library, self._library = self._library, None
        if library is not None:
            library.close()

    def close(self) -> None:
        """Read no more."""
        self._readers.closed = True
        self.release()

    def _check(self) -> None:
        if self._readers.closed:
            raise closed_error(self._file.path)
        check_unchanged(self._file, self._file.path)

    def _fill(self, tile: DecodedTile, view: memoryview) -> int:
        image, rect = tile.image, tile.rect
        assert image.library is not None
        with self._readers:
            library = self._opened(image.library.name)
            try:
                pixels = library.read(image.library.image, rect)
                shape = image.grid.tile_height, image.grid.tile_width, image.channels
                target = np.frombuffer(view, image.dtype).reshape(shape)
                target[: rect.height, : rect.width] = pixels
            except Exception as error:  # libraries have exceptions of their own
                self._drop(library)
                raise ValueError(f"{image.library.name} can't decode it ({error})") from error
        return len(view)

    def _opened(self, name: str) -> Library:
        with self._lock:
            if self._library is None:
                self._library = open_library(name, self._file.path)
            return self._library

    def _drop(self, library: Library) -> None:
        """Open the slide anew for the next read: OpenSlide refuses all after one that failed.

        It closes by itself when no thread uses it any more.
        """
        with self._lock:
            if self._library is library:
                self._library = None
