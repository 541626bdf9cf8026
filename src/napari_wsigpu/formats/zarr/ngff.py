"""What OME-NGFF metadata say of an image: axes, scales, channels, colours, each value checked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.model.layout import Channel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

MICROMETRES = {
    "angstrom": 1e-4, "picometer": 1e-6, "nanometer": 1e-3, "micrometer": 1.0, "micron": 1.0,
    "millimeter": 1e3, "centimeter": 1e4, "decimeter": 1e5, "meter": 1e6, "kilometer": 1e9,
    "femtometer": 1e-9, "inch": 25400.0, "foot": 304800.0, "yard": 914400.0,
    "pm": 1e-6, "nm": 1e-3, "um": 1.0, "\N{MICRO SIGN}m": 1.0, "mm": 1e3, "cm": 1e4, "m": 1e6,
    "å": 1e-4,
}  # fmt: skip
SECONDS = {
    "day": 86400.0, "hour": 3600.0, "minute": 60.0, "second": 1.0, "millisecond": 1e-3,
    "microsecond": 1e-6, "nanosecond": 1e-9, "s": 1.0, "ms": 1e-3, "sec": 1.0, "min": 60.0,
}  # fmt: skip
OLDEST_AXES = "tczyx"
BY_TYPE = {"time": "t", "channel": "c"}
OTHER = "?"
LONGEST_NAME = 100
SMALLEST, LARGEST = 2.0**-53, 2.0**53
MOST_COLORS = 1 << 16
PURE = ("#ff0000", "#00ff00", "#0000ff")
NAMES = ({"r", "red"}, {"g", "green"}, {"b", "blue"})


class Axes(NamedTuple):
    """The axes of an image.

    Attributes
    ----------
    letters : str
        t, c, z, y or x for each axis, "?" for others.
    micrometres : tuple of (float or None)
        How many micrometres the unit of each has; of t, how many seconds.
    """

    letters: str
    micrometres: tuple[float | None, ...]

    @classmethod
    def of(cls, letters: str) -> Axes:
        """Return axes without units."""
        return cls(letters, (None,) * len(letters))

    def unit(self, letter: str) -> float | None:
        """Return how many micrometres (of t, seconds) an axis's unit has; None if it is neither."""
        return self.micrometres[self.letters.index(letter)]


class Transform(NamedTuple):
    """How an array's positions become those of space: one factor and one shift an axis."""

    scale: tuple[float, ...]
    translation: tuple[float, ...]


def axes(stated: Any, dimensions: int, problems: list[str]) -> Axes | None:
    """Return the axes of arrays of so many dimensions; None if they can't be known.

    `problems` gets a sentence if they are taken in the order that the oldest version fixed.
    """
    found = _stated_axes(stated)
    if found is not None and len(found.letters) == dimensions:
        return found
    if not 2 <= dimensions <= len(OLDEST_AXES):
        return None
    letters = OLDEST_AXES[-dimensions:]
    if stated is not None or dimensions < len(OLDEST_AXES):
        problems.append(
            f"The axes are missing or contradict the arrays; they are taken as "
            f"{', '.join(letters)}."
        )
    return Axes.of(letters)


def _stated_axes(stated: Any) -> Axes | None:
    if not isinstance(stated, list) or len(stated) > 16:
        return None
    letters, units = "", []
    for axis in stated:
        said = {"name": axis} if isinstance(axis, str) else axis
        if not isinstance(said, dict):
            return None
        name, kind = str(said.get("name")).lower(), str(said.get("type", "")).lower()
        letter = BY_TYPE.get(kind, name)
        letters += letter if letter in set(OLDEST_AXES) - set(letters) else OTHER
        units.append((seconds if letter == "t" else micrometres)(said.get("unit")))
    if not {"y", "x"} <= set(letters):
        return None
    return Axes(letters, tuple(units))


def micrometres(unit: Any) -> float | None:
    """Return how many micrometres a unit of length has; None if it is not known."""
    return _worth(unit, MICROMETRES)


def seconds(unit: Any) -> float | None:
    """Return how many seconds a unit of time has; None if it is not known."""
    return _worth(unit, SECONDS)


def _worth(unit: Any, known: Mapping[str, float]) -> float | None:
    """Look a unit up, which may be in the plural, in British spelling, or with a Greek letter."""
    name = str(unit).strip().lower().replace("\N{GREEK SMALL LETTER MU}", "\N{MICRO SIGN}")
    name = name.replace("metre", "meter")
    found = known.get(name)
    return known.get(name.removesuffix("s")) if found is None else found


def axes_of(image: Mapping[str, Any]) -> Any:
    """Return what a multiscale image says of its axes: by itself, or since 0.6 by a system.

    Of several coordinate systems it is the one that the arrays are transformed to.
    """
    systems = {str(each.get("name")): each for each in _mappings(image.get("coordinateSystems"))}
    datasets = _mappings(image.get("datasets"))
    steps = _mappings(datasets[0].get("coordinateTransformations")) if datasets else []
    output = steps[0].get("output") if steps else None
    name = output.get("name") if isinstance(output, dict) else output
    system = systems.get(str(name)) or next(iter(systems.values()), {})
    return image.get("axes", system.get("axes"))


def is_named(step: Any) -> bool:
    """Whether a transformation of a whole image leads to another coordinate system, as since 0.6.

    An older one applies to all levels.
    """
    return "output" in _mapping(step)


def transform(stated: Sequence[Any], dimensions: int, problems: list[str]) -> Transform | None:
    """Return what a list of transformations amounts to; None if one can't be.

    `problems` gets a sentence for what of them is not applied.
    """
    matrix = np.eye(dimensions + 1)
    for step in stated:
        found = _matrix(step, dimensions)
        if found is None:
            return None
        matrix = found @ matrix
    turning, translation = matrix[:-1, :-1], matrix[:-1, -1]
    scale = np.diagonal(turning).copy()
    if np.count_nonzero(turning - np.diag(scale)):
        problems.append(
            "It lies rotated, sheared or with exchanged axes in space (an affine transformation), "
            "but is shown as it is stored; sizes of pixels are right."
        )
        scale = np.linalg.norm(turning, axis=0)
    if (scale < 0).any():
        problems.append(
            "It lies mirrored in space (a negative scale), but is shown as it is stored."
        )
    scale = abs(scale)
    possible = bool(((scale >= SMALLEST) & (scale <= LARGEST)).all())
    possible = possible and bool((abs(translation) <= LARGEST).all())
    return Transform(tuple(scale.tolist()), tuple(translation.tolist())) if possible else None


def _matrix(step: Any, dimensions: int) -> NDArray[np.float64] | None:
    """Return a transformation as a matrix of homogeneous coordinates; None if it is none."""
    said, matrix = _mapping(step), np.eye(dimensions + 1)
    kind = said.get("type")
    value = said.get(kind) if isinstance(kind, str) else None
    if kind == "identity":
        return matrix
    if kind == "sequence":
        steps = [_matrix(each, dimensions) for each in _mappings(said.get("transformations"))]
        for found in steps:
            if found is None:
                return None
            matrix = found @ matrix
        return matrix
    if kind in ("scale", "translation"):
        values = numbers(value, dimensions)
        if values is not None and kind == "scale":
            return np.diag([*values, 1.0])
        if values is None:
            return None
        matrix[:-1, -1] = values
        return matrix
    if kind in ("affine", "rotation") and isinstance(value, list) and len(value) == dimensions:
        width = dimensions + (kind == "affine")
        rows = [numbers(row, width) for row in value]
        if None not in rows:
            matrix[:-1, :width] = rows
            return matrix
    if (
        kind == "mapAxis"
        and isinstance(value, list)
        and sorted(map(str, value)) == sorted(map(str, range(dimensions)))
    ):
        return matrix[[*map(int, value), dimensions]]
    return None


def numbers(values: Any, count: int) -> tuple[float, ...] | None:
    """Return a list of so many numbers as floats; None if it is another thing."""
    if not isinstance(values, list) or len(values) != count:
        return None
    if not all(isinstance(value, int | float) and abs(value) <= LARGEST for value in values):
        return None
    return tuple(map(float, values))


def default_position(omero: Any, letter: str, length: int) -> int:
    """Return which plane of an axis is shown: what the image's rendering says, or a default.

    That is the middle one along z, the first one of others.
    """
    settings = _mapping(_mapping(omero).get("rdefs"))
    default = length // 2 if letter == "z" else 0
    value = settings.get(f"default{letter.upper()}")
    return value if type(value) is int and 0 <= value < length else default


def channels(omero: Any, count: int, problems: list[str]) -> tuple[Channel, ...]:
    """Return names, colours and windows of channels; empty if nothing is said of any.

    `problems` gets a sentence if they are said of fewer or more channels than there are.
    """
    stated = _mapping(omero).get("channels")
    if not isinstance(stated, list) or not stated:
        return ()
    if len(stated) != count:
        problems.append(f"Names and colours are given for {len(stated)} of {count} channel(s).")
    said = [_mapping(each) for each in (stated + [None] * count)[:count]]
    wrong = [each["color"] for each in said if each.get("color") and not _color(each["color"])]
    if wrong:
        problems.append(
            f"{len(wrong)} channel(s) have a colour that is none ({str(wrong[0])[:20]})."
        )
    return tuple(_channel(each, index) for index, each in enumerate(said))


def _color(stated: Any) -> str | None:
    """Return a colour of six hexadecimal digits, or of eight: opacity is last, or first (.NET)."""
    if not isinstance(stated, str) or not re.fullmatch(r"#?([0-9a-fA-F]{2}){3,4}", stated):
        return None
    digits = stated.lstrip("#").lower()
    opacity_first = len(digits) == 8 and digits[:2] == "ff" != digits[-2:]
    return f"#{digits[2:] if opacity_first else digits[:6]}"


def is_inverted(omero: Any) -> bool:
    """Whether the first channel is shown dark where its values are high."""
    stated = _mapping(omero).get("channels")
    first = stated[0] if isinstance(stated, list) and stated else None
    return _mapping(first).get("inverted") is True


def _channel(said: Mapping[str, Any], index: int) -> Channel:
    label, color, window = said.get("label"), said.get("color"), _mapping(said.get("window"))
    limits = numbers([window.get("start"), window.get("end")], 2)
    return Channel(
        name=(label[:LONGEST_NAME] if isinstance(label, str) else "") or f"channel {index}",
        color=_color(color),
        window=(limits[0], limits[1]) if limits and limits[0] < limits[1] else None,
        visible=said.get("active") is not False,
    )


def are_rgb(stated: Sequence[Channel], dtype: str) -> bool:
    """Whether three channels are red, green and blue of one colour picture.

    That is so if they are coloured or named so, all are shown, and none is stretched; or if
    nothing is said of them and they are of 8 bits.
    """
    if not stated:
        return dtype == "uint8"
    full = {"uint8": (0.0, 255.0), "uint16": (0.0, 65535.0)}.get(dtype)
    colored = tuple(channel.color for channel in stated) == PURE
    named = all(
        channel.name.lower() in names for channel, names in zip(stated, NAMES, strict=False)
    )
    plain = all(channel.visible and channel.window in (None, full) for channel in stated)
    return len(stated) == 3 and full is not None and (colored or named) and plain


def label_colors(image_label: Any) -> dict[int, str]:
    """Return the colour of each label that has one, as "#rrggbbaa"."""
    found = {}
    for said in _mappings(_mapping(image_label).get("colors")):
        value, rgba = said.get("label-value"), numbers(said.get("rgba"), 4)
        if type(value) is int and abs(value) < 1 << 63 and rgba and all(0 <= v < 256 for v in rgba):
            found[value] = "#" + "".join(f"{int(part):02x}" for part in rgba)
    return found


def label_properties(image_label: Any) -> tuple[dict[str, Any], ...]:
    """Return what is said of single labels; each has a whole number as "label-value"."""
    stated = _mappings(_mapping(image_label).get("properties"))
    return tuple(said for said in stated if type(said.get("label-value")) is int)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _mappings(value: Any) -> list[dict[str, Any]]:
    items = value[:MOST_COLORS] if isinstance(value, list) else []
    return [item for item in items if isinstance(item, dict)]
