"""Default colors and contrast limits of channels whose file does not state them."""

from __future__ import annotations

import re
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.layout import Channel

PERCENTILES = (0.1, 99.8)
BLUE, GREEN, ORANGE, RED, MAGENTA = "#0000ff", "#00ff00", "#ff8000", "#ff0000", "#ff00ff"
WHITE = "#ffffff"
# Colors for channels whose dye is unknown, used in this order.
COLORS = ("#00ffff", "#ff00ff", "#ffff00", "#00ff00", "#ff0000", "#0000ff")
DYES = {
    BLUE: r"dapi|hoechst|bfp|pacific ?blue",
    GREEN: r"fitc|e?gfp|cy-?2|yfp|fluorescein|calcein|sytox ?green",
    ORANGE: r"tritc|cy-?3|rhodamine|tdtomato|dsred|phycoerythrin",
    RED: r"texas ?red|cy-?3\.5|m?cherry|rfp|propidium( iodide)?",
    MAGENTA: r"cy-?5(\.5)?|draq5|apc|far ?red",
    WHITE: r"cy-?7",
}
# These dyes are numbered by their excitation wavelength in nm (Opal: emission).
NUMBERED = re.compile(r"(?:alexa(?: ?fluor)?|af|atto|dylight|cf|opal|spectrum)[ _-]?(\d{3})\b")
# (upper limit of that wavelength in nm, color)
BANDS = ((435, BLUE), (535, GREEN), (585, ORANGE), (635, RED), (705, MAGENTA), (1000, WHITE))


def dye_color(name: str) -> str | None:
    """Return the usual color ("#rrggbb") of the dye in a channel's name; None if unknown."""
    name = name.casefold()
    for color, pattern in DYES.items():
        if re.search(rf"(?<![a-z0-9])(?:{pattern})(?![a-z]|[-.]?\d)", name):
            return color
    found = NUMBERED.search(name)
    if found is None:
        return None
    return next(color for wavelength, color in BANDS if int(found[1]) < wavelength)


def channel_colors(channels: Sequence[Channel]) -> list[str | None]:
    """Return a color ("#rrggbb") per channel: from the file, from its dye, or from `COLORS`.

    A single channel of unknown color gets None and is shown in gray.
    """
    found = [channel.color or dye_color(channel.name) for channel in channels]
    if len(found) > 1:
        free = [color for color in COLORS if color not in found] or COLORS
        others = cycle(free)
        found = [color or next(others) for color in found]
    return found


def contrast_limits(pixels: Array) -> tuple[float, float]:
    """Return the values to show as black and at full brightness, derived from an overview.

    They are percentiles, so that a few bright specks do not darken everything else. If nearly all
    pixels are equal, they are the minimum and the maximum.
    """
    finite = pixels[np.isfinite(pixels)]
    if not finite.size:
        return 0.0, 1.0
    low, high = (float(value) for value in np.percentile(finite, PERCENTILES))
    if low == high:
        low, high = float(finite.min()), float(finite.max())
    return low, high if high > low else max(low + 1, float(np.nextafter(low, np.inf)))
