"""How channels are shown where their file does not say: colours by dye, limits by percentiles."""

from __future__ import annotations

import re
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import Channel

PERCENTILES = (0.1, 99.8)
BLUE, GREEN, ORANGE, RED, MAGENTA = "#0000ff", "#00ff00", "#ff8000", "#ff0000", "#ff00ff"
WHITE = "#ffffff"
# In turn, for channels whose dye is not known either.
COLORS = ("#00ffff", "#ff00ff", "#ffff00", "#00ff00", "#ff0000", "#0000ff")
DYES = {
    BLUE: r"dapi|hoechst|bfp|pacific ?blue",
    GREEN: r"fitc|e?gfp|cy-?2|yfp|fluorescein|calcein|sytox ?green",
    ORANGE: r"tritc|cy-?3|rhodamine|tdtomato|dsred|phycoerythrin",
    RED: r"texas ?red|cy-?3\.5|m?cherry|rfp|propidium( iodide)?",
    MAGENTA: r"cy-?5(\.5)?|draq5|apc|far ?red",
    WHITE: r"cy-?7",
}
# Families of dyes are numbered by the wavelength in nm that excites them.
NUMBERED = re.compile(r"(?:alexa(?: ?fluor)?|af|atto|dylight|cf|opal|spectrum)[ _-]?(\d{3})\b")
BANDS = ((435, BLUE), (535, GREEN), (585, ORANGE), (635, RED), (705, MAGENTA), (1000, WHITE))


def dye_color(name: str) -> str | None:
    """Return the usual colour "#rrggbb" of the dye that a channel is named after, if any."""
    name = name.casefold()
    for color, pattern in DYES.items():
        if re.search(rf"(?<![a-z0-9])(?:{pattern})(?![a-z]|[-.]?\d)", name):
            return color
    found = NUMBERED.search(name)
    if found is None:
        return None
    return next(color for wavelength, color in BANDS if int(found[1]) < wavelength)


def channel_colors(channels: Sequence[Channel]) -> list[str | None]:
    """Return a colour "#rrggbb" for each channel: the file's, its dye's, or one in turn.

    A single channel that nothing is known of has none: it is gray.
    """
    found = [channel.color or dye_color(channel.name) for channel in channels]
    if len(found) > 1:
        free = [color for color in COLORS if color not in found] or COLORS
        others = cycle(free)
        found = [color or next(others) for color in found]
    return found


def shown_limits(pixels: NDArray[Any]) -> tuple[float, float]:
    """Return the values that are shown darkest and brightest, by the pixels of an overview.

    They are percentiles: a few bright specks would make all else black. Where nearly all pixels
    are the same, they are the least and the greatest value.
    """
    finite = pixels[np.isfinite(pixels)]
    if not finite.size:
        return 0.0, 1.0
    low, high = (float(value) for value in np.percentile(finite, PERCENTILES))
    if low == high:
        low, high = float(finite.min()), float(finite.max())
    return low, high if high > low else max(low + 1, float(np.nextafter(low, np.inf)))
