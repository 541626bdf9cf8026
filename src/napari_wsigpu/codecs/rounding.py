"""Where a JPEG engine and libjpeg round the green of a pixel differently.

Both make RGB of YCbCr by the same formula, libjpeg with factors of 16 binary digits, NVIDIA's
JPEG engine with exact ones. Of the 65 536 pairs of (Cb, Cr), 43 give a green that is apart
by one. Where no colour is clipped, red - green and blue - green tell the pair, so that it can
be put right afterwards. Where one is, the pair stays unclear; tiles that may hold such a pixel
are decoded again on the CPU. Colours that lay more than 8 beyond black or white before they were
clipped are left out of this, or every second tile of light glass would be in doubt: on noisy
tissue, one pixel in 10^8 may so keep the engine's rounding.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

CB_TO_GREEN = 0.114 * 1.772 / 0.587
CR_TO_GREEN = 0.299 * 1.402 / 0.587
HALF = 1 << 15


@cache
def differing_pairs() -> NDArray[np.int32]:
    """Return the chroma pairs that are rounded differently.

    Returns
    -------
    ndarray of int32, shape (pairs, 4)
        Red, blue, exact green and libjpeg's green of each, relative to luma.
    """
    cb, cr = np.meshgrid(np.arange(-128, 128), np.arange(-128, 128), indexing="ij")
    red = (91881 * cr + HALF) >> 16
    blue = (116130 * cb + HALF) >> 16
    stored = (-22554 * cb - 46802 * cr + HALF) >> 16
    exact = np.floor(0.5 - CB_TO_GREEN * cb - CR_TO_GREEN * cr).astype(np.int64)
    differs = exact != stored
    return np.stack([part[differs] for part in (red, blue, exact, stored)], -1).astype(np.int32)


@cache
def correction_table() -> NDArray[np.int8]:
    """Return what to add to an exact green, by red - green + 256 and blue - green + 256.

    Returns
    -------
    ndarray of int8, shape (512, 512)
    """
    table: NDArray[Any] = np.zeros((512, 512), np.int8)
    red, blue, exact, stored = differing_pairs().T
    places = np.stack([red - exact, blue - exact]) + 256
    shown = ((places >= 0) & (places < 512)).all(0)
    table[tuple(places[:, shown])] = (stored - exact)[shown]
    return table
