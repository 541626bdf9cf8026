"""Embedded ICC profiles: pixels as their scanner stored them become sRGB.

LittleCMS says what each of the 256^3 colours becomes. This table makes the same pixels as
LittleCMS, bit by bit, on the CPU and on devices, and is three to five times faster than it.
"""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import imagecodecs
import numpy as np

from napari_wsigpu.model.errors import RegionError, UnsupportedSlideError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LevelLayout

    Place = tuple[int, int]

Color = Literal["stored", "srgb"]

COLORS = 1 << 24
SLABS = 16
PIXELS_AT_ONCE = 1 << 18
LARGEST_PROFILE = 32 << 20
HEADER_BYTES = 128
RELATIVE_COLORIMETRIC, LAST_INTENT = 1, 3
CLASSES = (b"scnr", b"mntr", b"prtr", b"spac")


class ColorTable:
    """What each colour becomes.

    Parameters
    ----------
    convert : callable
        Converts pixels of shape (height, width, 3); is called from several threads.

    Attributes
    ----------
    colors : ndarray of uint32, shape (256**3,)
        The new red, green and blue, from the lowest byte on, of each colour in that order.
    """

    def __init__(self, convert: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]) -> None:
        self.colors = np.arange(COLORS, dtype="<u4")
        pixels = self.colors.view(np.uint8).reshape(SLABS, 256, -1, 4)

        def fill(slab: NDArray[np.uint8]) -> None:
            slab[..., :3] = convert(np.ascontiguousarray(slab[..., :3]))

        with ThreadPoolExecutor(min(SLABS, os.cpu_count() or 1), "wsigpu-color") as pool:
            for _ in pool.map(fill, pixels):
                pass

    def recolored(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return pixels in their new colours; an alpha channel stays as it is.

        Parameters
        ----------
        pixels : ndarray, shape (..., 3 or 4)
            Is written over if it is contiguous.
        """
        pixels = np.ascontiguousarray(pixels)
        flat = pixels.reshape(-1, pixels.shape[-1])
        for start in range(0, len(flat), PIXELS_AT_ONCE):
            part = flat[start : start + PIXELS_AT_ONCE]
            colors = self.colors.take(_indices(part), mode="wrap").view(np.uint8).reshape(-1, 4)
            for channel in range(3):
                part[:, channel] = colors[:, channel]
        return pixels

    def background(self, value: float, channels: int) -> NDArray[np.uint8]:
        """Return what a pixel of that value in all channels becomes, shape (channels,)."""
        return self.recolored(np.full((1, channels), value, np.uint8)).reshape(channels)


def _indices(pixels: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the place of each pixel's colour in the table."""
    count, channels = pixels.shape
    indices = np.empty(count, np.int64)
    # Four bytes from each pixel on, of which the fourth is of no use: the last has none.
    indices[:-1] = np.ndarray((count - 1,), "<u4", pixels.data, 0, (channels,))
    indices[-1] = int.from_bytes(pixels[-1, :3].tobytes(), "little")
    indices &= COLORS - 1
    return indices


class ColorProfile:
    """The ICC profile of a picture of 8-bit RGB.

    The rendering intent is the profile's own, which is also what OpenSlide's documentation does;
    relative colorimetric if it has none. Black points are not compensated.

    Parameters
    ----------
    data : bytes
        The profile.
    name : str
        What it belongs to, for messages.

    Raises
    ------
    UnsupportedSlideError
        If it is damaged or not for RGB pixels.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self._data = data
        size = int.from_bytes(data[:4], "big")
        if data[36:40] != b"acsp" or not HEADER_BYTES < size <= len(data):
            raise _refusal(name, "its ICC profile is damaged")
        if data[16:20] != b"RGB " or data[12:16] not in CLASSES:
            kind, space = (str(data[at : at + 4], "ascii", "replace") for at in (12, 16))
            raise _refusal(name, f"its ICC profile, {kind!r} of {space!r}, is not for RGB pixels")
        intent = int.from_bytes(data[66:68], "big")
        self._intent = intent if intent <= LAST_INTENT else RELATIVE_COLORIMETRIC
        try:
            self.convert(np.zeros((1, 1, 3), np.uint8))
        except RuntimeError:
            raise _refusal(name, "its ICC profile is damaged") from None

    def convert(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return pixels, shape (height, width, 3), as LittleCMS converts them to sRGB."""
        converted: NDArray[np.uint8] = imagecodecs.cms_transform(
            pixels,
            self._data,
            srgb_profile(),
            colorspace="rgb",
            outcolorspace="rgb",
            planar=False,
            outplanar=False,
            intent=self._intent,
        )
        return converted

    def table(self) -> ColorTable:
        """Return what each colour becomes; made once for all slides that have this profile.

        It takes 64 MiB, and some tenths of a second to make.
        """
        with _tables_lock:
            table = _tables.get(self._data)
            if table is None:
                _tables[self._data] = table = ColorTable(self.convert)
            return table


_tables: weakref.WeakValueDictionary[bytes, ColorTable] = weakref.WeakValueDictionary()
_tables_lock = threading.Lock()


def _renew_lock() -> None:
    """Take a new lock in a process that was forked: the old one's holder may not be there."""
    global _tables_lock
    _tables_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@cache
def srgb_profile() -> bytes:
    """Return an ICC profile of sRGB."""
    profile: bytes = imagecodecs.cms_profile("srgb")
    return profile


def profile_size(place: Place | bytes) -> int:
    """Return the bytes of a profile of which the place is known, or that is at hand."""
    return len(place) if isinstance(place, bytes) else place[1]


@dataclass(eq=False, repr=False)
class EmbeddedProfile:
    """The profile of a slide or of a picture that travels with it, read when first needed.

    Parameters
    ----------
    name : str
        What it belongs to, for messages.
    image : LevelLayout
        The pixels that it is for.
    rgb : bool
        Whether these are red, green, blue (and alpha).
    place : tuple of (int, int), bytes or None
        Offset and length of the profile in the file, or the profile itself.
    read : callable
        Returns the bytes of such a place.
    """

    _name: str
    _image: LevelLayout
    _place: Place | bytes | None
    _read: Callable[[Place | bytes], bytes]
    rgb: bool
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _profile: ColorProfile | None = field(default=None, init=False)
    _table: ColorTable | None = field(default=None, init=False)

    def data(self) -> bytes | None:
        """Return the profile as it is stored; None if there is none.

        Raises
        ------
        SlideError
            If the file can't be read.
        """
        return None if self._place is None else self._read(self._place)

    def profile(self) -> ColorProfile:
        """Return the profile.

        Raises
        ------
        UnsupportedSlideError
            If there is none that can be applied.
        SlideError
            If the file can't be read.
        """
        with self._lock:
            if self._profile is None:
                self._profile = self._checked()
            return self._profile

    def _checked(self) -> ColorProfile:
        image = self._image
        if not self.rgb or image.dtype != np.uint8 or image.channels not in (3, 4):
            raise _refusal(self._name, "its pixels are not 8-bit RGB")
        if self._place is None:
            raise _refusal(self._name, "it has no ICC profile")
        if profile_size(self._place) > LARGEST_PROFILE:
            limit = LARGEST_PROFILE >> 20
            raise _refusal(self._name, f"its ICC profile is larger than {limit} MiB")
        return ColorProfile(self._read(self._place), self._name)

    def table(self, color: Color) -> ColorTable | None:
        """Return the table for pixels of that colour; None if they are to stay as stored.

        Raises
        ------
        RegionError
            If there is no such colour.
        SlideError
            As `profile` does.
        """
        if not wants_srgb(color):
            return None
        profile = self.profile()
        with self._lock:
            if self._table is None:
                self._table = profile.table()
            return self._table

    def converted(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return pixels, shape (height, width, 3 or 4), in sRGB without making a table."""
        converted = pixels.copy()
        converted[..., :3] = self.profile().convert(np.ascontiguousarray(pixels[..., :3]))
        return converted

    def release(self) -> None:
        """Let go of the table; what needs it next takes it again."""
        with self._lock:
            self._table = None


def _refusal(name: str, reason: str) -> UnsupportedSlideError:
    return UnsupportedSlideError(
        f"{name} can't be shown in sRGB, because {reason}; its colours are available as they are "
        "stored."
    )


def wants_srgb(color: Any) -> bool:
    """Whether pixels are to be converted.

    Raises
    ------
    RegionError
        If that is no colour that there is.
    """
    if color not in ("stored", "srgb"):
        raise RegionError(f"There is no color {color!r}; use 'stored' or 'srgb'.")
    return bool(color == "srgb")
