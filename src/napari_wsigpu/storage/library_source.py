"""A source of tiles that a library (OpenSlide or libisyntax) decodes."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from napari_wsigpu.model.errors import UnsupportedSlideError
from napari_wsigpu.storage.file_source import check_unchanged
from napari_wsigpu.storage.readers import Readers, closed_error
from napari_wsigpu.storage.source import DecodedSource, DecodedTile, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from isyntax import ISyntax
    from openslide import OpenSlide

    from napari_wsigpu.model.arrays import ByteArray
    from napari_wsigpu.model.geometry import Rect
    from napari_wsigpu.model.layout import LevelLayout, SlideFile
    from napari_wsigpu.storage.source import Fill


class Library(Protocol):
    """A slide that a library has opened."""

    handle: OpenSlide | ISyntax

    def read(self, image: int | str, rect: Rect) -> ByteArray:
        """Return pixels of a level, or of a named associated image, shape (height, width, 3).

        Any thread may call this. It raises the library's own exceptions if decoding fails.
        """

    def close(self) -> None:
        """Close the slide."""
        self.handle.close()


class OpenSlideLibrary(Library):
    """A slide opened by OpenSlide; transparent pixels get the background color."""

    def __init__(self, path: str) -> None:
        import openslide

        self.handle = openslide.OpenSlide(path)
        color = self.handle.properties.get(openslide.PROPERTY_NAME_BACKGROUND_COLOR, "ffffff")
        self._background = np.array([*bytes.fromhex(color)], np.uint8)

    def read(self, image: int | str, rect: Rect) -> ByteArray:
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
    """A slide opened by libisyntax, which decodes one region at a time."""

    def __init__(self, path: str) -> None:
        from isyntax import ISyntax

        self.handle = ISyntax.open(path)
        self._lock = threading.Lock()

    def read(self, image: int | str, rect: Rect) -> ByteArray:
        """Return pixels; see `Library.read`."""
        with self._lock:
            rgba = self.handle.read_region(rect.left, rect.top, rect.width, rect.height, image)
        return np.asarray(rgba)[..., :3]


class LibraryInfo(NamedTuple):
    """How to open a slide with a library, the package to import, and the extra that installs it."""

    open: Callable[[str], Library]
    package: str
    extra: str


LIBRARIES = {
    "OpenSlide": LibraryInfo(OpenSlideLibrary, "openslide", "openslide"),
    "libisyntax": LibraryInfo(ISyntaxLibrary, "isyntax", "isyntax"),
}


def open_library(name: str, path: str) -> Library:
    """Open a slide with one of `LIBRARIES`.

    Raises
    ------
    UnsupportedSlideError
        If the library is not installed, or can't open the slide.
    """
    info = LIBRARIES[name]
    try:
        return info.open(path)
    except ImportError as error:
        raise UnsupportedSlideError(
            f"Reading '{path}' requires {name}, which is not installed ({error}); run "
            f'pip install "napari-wsigpu[{info.extra}]" and restart.'
        ) from error
    except Exception as error:  # each library raises its own exceptions
        raise UnsupportedSlideError(
            f"{name} can't open '{path}' ({error}); get a fresh copy of it, or convert it."
        ) from error


class LibrarySource(DecodedSource):
    """Levels and associated images that a library decodes; safe to read from any thread.

    Parameters
    ----------
    file : SlideFile
        The slide's file; each read checks it for changes.
    images : sequence of LevelLayout
        All images of the slide that one library decodes.
    """

    def __init__(self, file: SlideFile, images: Sequence[LevelLayout]) -> None:
        super().__init__(images)
        self._file = file
        self._readers = Readers(file.path)
        self._lock = threading.Lock()
        self._library: Library | None = None

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; each range must be in one tile."""
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
            first = offset - tile.start
            views.append(view[first : first + length] if len(view) else view)
        return views

    def fills(self, ranges: Sequence[tuple[int, int]]) -> list[Fill]:
        """Return one function per tile, which decodes the whole tile; see `FillingSource.fills`."""
        self._check()
        tiles = [self._tile_at(offset) for offset, _ in ranges]
        return [partial(self._fill, tile) for tile in tiles if tile is not None]

    def release(self) -> None:
        """Close the slide once no thread is reading it; the next read reopens it."""
        with self._readers.exclusive():
            library, self._library = self._library, None
        if library is not None:
            library.close()

    def close(self) -> None:
        """Refuse new reads, and close the slide once no thread is reading it."""
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
            except Exception as error:  # each library raises its own exceptions
                self._discard(library)
                raise ValueError(f"{image.library.name} can't decode it ({error})") from error
        return len(view)

    def _opened(self, name: str) -> Library:
        with self._lock:
            if self._library is None:
                self._library = open_library(name, self._file.path)
            return self._library

    def _discard(self, library: Library) -> None:
        """Let the next read reopen the slide: an OpenSlide handle is unusable after an error.

        Other threads may still be reading with the handle, so it is not closed here; it closes
        itself when the last reference to it is gone.
        """
        with self._lock:
            if self._library is library:
                self._library = None
