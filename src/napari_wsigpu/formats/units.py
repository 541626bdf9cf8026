"""The units of length and time that OME-TIFF, OME-Zarr and ImageJ name or abbreviate."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MICRO = "\N{MICRO SIGN}"
PREFIXES = {
    "yotta": ("Y", 24), "zetta": ("Z", 21), "exa": ("E", 18), "peta": ("P", 15), "tera": ("T", 12),
    "giga": ("G", 9), "mega": ("M", 6), "kilo": ("k", 3), "hecto": ("h", 2), "deca": ("da", 1),
    "": ("", 0), "deci": ("d", -1), "centi": ("c", -2), "milli": ("m", -3), "micro": (MICRO, -6),
    "nano": ("n", -9), "pico": ("p", -12), "femto": ("f", -15), "atto": ("a", -18),
    "zepto": ("z", -21), "yocto": ("y", -24),
}  # fmt: skip
INCH = 25400.0
# Names are compared in lower case and as written here; symbols only as written here.
LENGTH_NAMES = {
    **{f"{name}meter": float(f"1e{power + 6}") for name, (_, power) in PREFIXES.items()},
    "micron": 1.0, "angstrom": 1e-4, "thou": INCH / 1000, "inch": INCH, "inches": INCH,
    "foot": 12 * INCH, "feet": 12 * INCH, "yard": 36 * INCH, "mile": 63360 * INCH,
    "astronomical unit": 1.495978707e17, "light year": 9.4607304725808e21,
    "parsec": 3.0856775814913673e22,
}  # fmt: skip
LENGTH_SYMBOLS = {
    **{f"{symbol}m": float(f"1e{power + 6}") for symbol, power in PREFIXES.values()},
    "um": 1.0, "Å": 1e-4, "thou": INCH / 1000, "li": INCH / 12, "in": INCH, "ft": 12 * INCH,
    "yd": 36 * INCH, "mi": 63360 * INCH, "pt": INCH / 72, "ua": 1.495978707e17,
    "ly": 9.4607304725808e21, "pc": 3.0856775814913673e22,
}  # fmt: skip
TIME_NAMES = {
    **{f"{name}second": float(f"1e{power}") for name, (_, power) in PREFIXES.items()},
    "sec": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0,
}  # fmt: skip
TIME_SYMBOLS = {
    **{f"{symbol}s": float(f"1e{power}") for symbol, power in PREFIXES.values()},
    "us": 1e-6, "min": 60.0, "h": 3600.0, "d": 86400.0,
}  # fmt: skip
# Written by some programs with another case of letters.
COMMON = ("pm", "nm", "um", f"{MICRO}m", "mm", "cm", "m", "in", "å", "s", "ms", "min")
LONGEST_QUOTED = 20


def micrometers(unit: object) -> float | None:
    """Return the size of a unit of length in micrometers; None if it is unknown."""
    return _size(unit, LENGTH_NAMES, LENGTH_SYMBOLS)


def seconds(unit: object) -> float | None:
    """Return the size of a unit of time in seconds; None if it is unknown."""
    return _size(unit, TIME_NAMES, TIME_SYMBOLS)


def unknown_length(unit: object) -> str:
    """Return the problem of a pixel size with an unknown unit of length, or without a unit."""
    if unit is None or unit == "":
        return "The pixel size has no unit of length and is ignored."
    quoted = str(unit)[:LONGEST_QUOTED]
    return f"The pixel size has an unknown unit of length ({quoted!r}) and is ignored."


def _size(unit: object, names: Mapping[str, float], symbols: Mapping[str, float]) -> float | None:
    """Look up a unit; plurals, British spelling and a Greek mu are accepted."""
    if not isinstance(unit, str):
        return None
    text = (
        unit.strip().replace("\N{GREEK SMALL LETTER MU}", MICRO).replace("\N{ANGSTROM SIGN}", "Å")
    )
    if text in symbols:
        return symbols[text]
    lower = text.lower().replace("metre", "meter")
    if lower in COMMON:
        return symbols.get("Å" if lower == "å" else lower)
    found = names.get(lower)
    return names.get(lower.removesuffix("s")) if found is None else found
