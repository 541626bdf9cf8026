"""Embedded ICC profiles: conversion of pixels from the scanner's color space to sRGB.

LittleCMS converts each of the 256^3 colors once to fill a table. Looking colors up in the table is
three to five times faster than LittleCMS and gives exactly the same pixels, on the CPU and on
devices.
"""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Literal

import imagecodecs
import numpy as np

from napari_wsigpu.model.errors import RegionError, UnsupportedSlideError

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari_wsigpu.model.arrays import ByteArray, Integers
    from napari_wsigpu.model.layout import LevelLayout

    ByteRange = tuple[int, int]

Color = Literal["stored", "srgb"]

COLORS = 1 << 24
SLABS = 16
PIXELS_AT_ONCE = 1 << 18  # limits the memory that a lookup takes
LARGEST_PROFILE = 32 << 20
# Size of the header, rendering intents and profile classes (ICC.1:2022, section 7.2).
HEADER_BYTES = 128
RELATIVE_COLORIMETRIC, LAST_INTENT = 1, 3
CLASSES = (b"scnr", b"mntr", b"prtr", b"spac")


class ColorTable:
    """Table of converted colors.

    Parameters
    ----------
    convert : callable
        Converts pixels, shape (height, width, 3); several threads call it at the same time.

    Attributes
    ----------
    colors : ndarray of uint32, shape (256**3,)
        Converted color for each stored color. In both the index and the value, red is the lowest
        byte, then green, then blue.
    """

    def __init__(self, convert: Callable[[ByteArray], ByteArray]) -> None:
        self.colors = np.arange(COLORS, dtype="<u4")
        pixels = self.colors.view(np.uint8).reshape(SLABS, 256, -1, 4)

        def fill(slab: ByteArray) -> None:
            slab[..., :3] = convert(np.ascontiguousarray(slab[..., :3]))

        with ThreadPoolExecutor(min(SLABS, os.cpu_count() or 1), "wsigpu-color") as pool:
            for _ in pool.map(fill, pixels):
                pass

    def recolored(self, pixels: ByteArray) -> ByteArray:
        """Return pixels with converted colors and unchanged alpha.

        Parameters
        ----------
        pixels : ndarray of uint8, shape (..., 3 or 4)
            Overwritten and returned if contiguous.
        """
        pixels = np.ascontiguousarray(pixels)
        flat = pixels.reshape(-1, pixels.shape[-1])
        for start in range(0, len(flat), PIXELS_AT_ONCE):
            part = flat[start : start + PIXELS_AT_ONCE]
            colors = self.colors.take(_indices(part), mode="wrap").view(np.uint8).reshape(-1, 4)
            for channel in range(3):
                part[:, channel] = colors[:, channel]
        return pixels

    def background(self, value: float, channels: int) -> ByteArray:
        """Return the converted color of a pixel with this value in all channels."""
        return self.recolored(np.full((1, channels), value, np.uint8)).reshape(channels)


def _indices(pixels: ByteArray) -> Integers:
    """Return the index of each pixel's color in the table."""
    count, channels = pixels.shape
    indices = np.empty(count, np.int64)
    # The strided view reads 4 bytes from the start of each pixel, and the mask below removes the
    # fourth one. The last pixel is read separately: its fourth byte would be beyond the array.
    indices[:-1] = np.ndarray((count - 1,), "<u4", pixels.data, 0, (channels,))
    indices[-1] = int.from_bytes(pixels[-1, :3].tobytes(), "little")
    indices &= COLORS - 1
    return indices


class ColorProfile:
    """ICC profile of an 8-bit RGB image.

    Pixels are converted without black point compensation. The rendering intent is the profile's, as
    OpenSlide's documentation recommends, or relative colorimetric if the profile has no valid one.

    Parameters
    ----------
    data : bytes
        The profile.
    name : str
        Name of the image, for messages.

    Raises
    ------
    UnsupportedSlideError
        If the profile is damaged or not for RGB pixels.
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

    def convert(self, pixels: ByteArray) -> ByteArray:
        """Convert pixels, shape (height, width, 3), to sRGB with LittleCMS."""
        return imagecodecs.cms_transform(
            pixels,
            self._data,
            srgb_profile(),
            colorspace="rgb",
            outcolorspace="rgb",
            planar=False,
            outplanar=False,
            intent=self._intent,
        )

    def table(self) -> ColorTable:
        """Return the color table, which all slides with the same profile share.

        A table takes 64 MiB, and creating one takes a few tenths of a second.
        """
        with _tables_lock:
            table = _tables.get(self._data)
            if table is None:
                _tables[self._data] = table = ColorTable(self.convert)
            return table


_tables: weakref.WeakValueDictionary[bytes, ColorTable] = weakref.WeakValueDictionary()
_tables_lock = threading.Lock()


def _renew_lock() -> None:
    """Replace the lock in a forked child: the thread that held it may not exist there."""
    global _tables_lock
    _tables_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@cache
def srgb_profile() -> bytes:
    """Return an ICC profile for sRGB."""
    return imagecodecs.cms_profile("srgb")


def profile_size(location: ByteRange | bytes) -> int:
    """Return the size of a profile in bytes, given its (offset, length) or the profile itself."""
    return len(location) if isinstance(location, bytes) else location[1]


@dataclass(eq=False, repr=False)
class EmbeddedProfile:
    """The profile of a slide or associated image, read when it is first needed.

    Parameters
    ----------
    name : str
        Name of the slide or image, for messages.
    image : LevelLayout
        The image to which the profile applies.
    location : tuple of (int, int), bytes or None
        Offset and length of the profile in the file, the profile itself, or None if there is none.
    read : callable
        Returns the profile, given its location.
    rgb : bool
        Whether the channels of the image are red, green and blue (and alpha).
    """

    _name: str
    _image: LevelLayout
    _location: ByteRange | bytes | None
    _read: Callable[[ByteRange | bytes], bytes]
    rgb: bool
    # Guards the two fields below; held during the read, so that the profile is read once.
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _profile: ColorProfile | None = field(default=None, init=False)
    _table: ColorTable | None = field(default=None, init=False)

    def data(self) -> bytes | None:
        """Return the bytes of the profile; None if there is none.

        Raises
        ------
        SlideError
            If the file can't be read.
        """
        return None if self._location is None else self._read(self._location)

    def profile(self) -> ColorProfile:
        """Return the profile.

        Raises
        ------
        UnsupportedSlideError
            If there is no profile, or it can't be applied to the image.
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
        if self._location is None:
            raise _refusal(self._name, "it has no ICC profile")
        if profile_size(self._location) > LARGEST_PROFILE:
            limit = LARGEST_PROFILE >> 20
            raise _refusal(self._name, f"its ICC profile is larger than {limit} MiB")
        return ColorProfile(self._read(self._location), self._name)

    def table(self, color: Color) -> ColorTable | None:
        """Return the table that converts to a color space; None for stored colors.

        Raises
        ------
        RegionError
            If `color` is neither 'stored' nor 'srgb'.
        SlideError
            If `profile` raises it.
        """
        if not is_srgb(color):
            return None
        profile = self.profile()
        with self._lock:
            if self._table is None:
                self._table = profile.table()
            return self._table

    def converted(self, pixels: ByteArray) -> ByteArray:
        """Convert pixels, shape (height, width, 3 or 4), to sRGB without creating a table."""
        converted = pixels.copy()
        converted[..., :3] = self.profile().convert(np.ascontiguousarray(pixels[..., :3]))
        return converted

    def release(self) -> None:
        """Release the table; the next call of `table` gets it again."""
        with self._lock:
            self._table = None


def _refusal(name: str, reason: str) -> UnsupportedSlideError:
    return UnsupportedSlideError(
        f"{name} can't be converted to sRGB, because {reason}; use its stored colors."
    )


def is_srgb(color: str) -> bool:
    """Whether a color space is 'srgb' rather than 'stored'.

    Raises
    ------
    RegionError
        If `color` is neither 'stored' nor 'srgb'.
    """
    if color not in ("stored", "srgb"):
        raise RegionError(f"Color {color!r} is not supported; use 'stored' or 'srgb'.")
    return color == "srgb"
