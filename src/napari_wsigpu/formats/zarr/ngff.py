"""Read OME-NGFF metadata: axes, transformations, channels and labels, with each value checked.

The names follow the specification (https://ngff.openmicroscopy.org): "multiscales", "omero",
"coordinateTransformations" and "image-label".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.formats.units import micrometers, seconds
from napari_wsigpu.model.layout import Channel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.formats.fields import Metadata

OLDEST_AXES = "tczyx"
BY_TYPE = {"time": "t", "channel": "c"}
OTHER = "?"
LONGEST_NAME = 100
# Limits of a size in micrometers or seconds, and of a number in any unit.
SMALLEST, LARGEST, LARGEST_STATED = 2.0**-53, 2.0**53, 1e36
SCALING = ("scale", "affine")
LONGEST_KIND = 20
MOST_COLORS = 1 << 16
PURE = ("#ff0000", "#00ff00", "#0000ff")
NAMES = ({"r", "red"}, {"g", "green"}, {"b", "blue"})


class Axes(NamedTuple):
    """The axes of an image.

    Attributes
    ----------
    letters : str
        t, c, z, y or x for each axis, "?" for any other axis.
    unit_sizes : tuple of (float or None)
        Size of each axis' unit in micrometers, or in seconds for t; None if it is unknown.
    names : tuple of str
        Their names in the metadata, for messages.
    stated_units : tuple
        Their units in the metadata, unchecked; None without one.
    """

    letters: str
    unit_sizes: tuple[float | None, ...]
    names: tuple[str, ...]
    stated_units: tuple[object, ...]

    @classmethod
    def of(cls, letters: str) -> Axes:
        """Return axes without units."""
        nothing = (None,) * len(letters)
        return cls(letters, nothing, tuple(letters), nothing)

    def unit(self, letter: str) -> float | None:
        """Return the size of an axis' unit in micrometers, or seconds for t; None if unknown."""
        return self.unit_sizes[self.letters.index(letter)]

    def stated_unit(self, letter: str) -> object:
        """Return the unit of an axis in the metadata, unchecked; None without one."""
        return self.stated_units[self.letters.index(letter)]


class Transform(NamedTuple):
    """Maps array indices to physical coordinates: one factor and one offset per axis."""

    scale: tuple[float, ...]
    translation: tuple[float, ...]


def axes(stated: object, dimensions: int, problems: list[str]) -> Axes | None:
    """Return the axes of arrays with this number of dimensions; None if they are unknown.

    Without usable metadata, the axes are assumed to be the last ones of t, c, z, y, x, which
    versions 0.1 and 0.2 prescribe. A message in `problems` says so.
    """
    found = _stated_axes(stated)
    if found is not None and len(found.letters) == dimensions:
        return found
    if not 2 <= dimensions <= len(OLDEST_AXES):
        return None
    letters = OLDEST_AXES[-dimensions:]
    if stated is not None or dimensions < len(OLDEST_AXES):
        problems.append(
            f"The axes are missing or contradict the arrays; {', '.join(letters)} are assumed."
        )
    return Axes.of(letters)


def _stated_axes(stated: object) -> Axes | None:
    if not isinstance(stated, list) or len(stated) > 16:
        return None
    letters, units, stated_units, names = "", [], [], []
    for axis in stated:
        fields = {"name": axis} if isinstance(axis, str) else axis
        if not isinstance(fields, dict):
            return None
        name, kind = str(fields.get("name")).lower(), str(fields.get("type", "")).lower()
        letter = BY_TYPE.get(kind, name)
        letters += letter if letter in set(OLDEST_AXES) - set(letters) else OTHER
        units.append((seconds if letter == "t" else micrometers)(fields.get("unit")))
        stated_units.append(fields.get("unit"))
        names.append(name[:LONGEST_NAME])
    if not {"y", "x"} <= set(letters):
        return None
    return Axes(letters, tuple(units), tuple(names), tuple(stated_units))


def axes_of(image: Metadata) -> object:
    """Return the axes of a multiscale image, unchecked.

    Up to version 0.5, the image states them itself. Since 0.6, a coordinate system states them; if
    there are several, the output of the first array's transformation is used.
    """
    systems = {str(each.get("name")): each for each in _mappings(image.get("coordinateSystems"))}
    datasets = _mappings(image.get("datasets"))
    steps = _mappings(datasets[0].get("coordinateTransformations")) if datasets else []
    output = steps[0].get("output") if steps else None
    name = output.get("name") if isinstance(output, dict) else output
    system = systems.get(str(name)) or next(iter(systems.values()), {})
    return image.get("axes", system.get("axes"))


def has_output(step: object) -> bool:
    """Whether a transformation of a multiscale image leads to a named coordinate system (0.6).

    Transformations of older versions have no output and apply to all levels.
    """
    return "output" in _mapping(step)


@np.errstate(all="ignore")  # overflowed values are refused
def transform(stated: Sequence[object], axes: Axes, problems: list[str]) -> Transform | None:
    """Compose a list of transformations; None if the scale is invalid or unknown.

    Rotation, shear and mirroring are not applied; neither are invalid or unsupported
    transformations of an image with a valid scale. Each adds a message to `problems`.
    """
    steps = list(_flat(stated))
    parts = [_matrix(step, len(axes.letters)) for step in steps]
    matrix, has_scale = np.eye(len(axes.letters) + 1), False
    ignored: list[str] = []
    for step, part in zip(steps, parts, strict=True):
        kind = step.get("type")
        if part is not None:
            matrix, has_scale = part @ matrix, has_scale or kind in SCALING
        elif kind == "scale":
            return None
        else:
            ignored.append(str(kind)[:LONGEST_KIND])
    if ignored and not has_scale:
        return None
    linear, translation = matrix[:-1, :-1], matrix[:-1, -1]
    scale = np.diagonal(linear).copy()
    if np.count_nonzero(linear - np.diag(scale)):
        problems.append(
            "The image should be rotated, sheared or have its axes swapped (affine "
            "transformation); it is shown as stored, with the right pixel size."
        )
        scale = np.linalg.norm(linear, axis=0)
    if (scale < 0).any():
        problems.append("The image should be mirrored (negative scale); it is shown as stored.")
    scale = abs(scale)
    factors = np.array([size or 1.0 for size in axes.unit_sizes])
    if not ((scale * factors >= SMALLEST) & (scale * factors <= LARGEST)).all():
        return None
    if not (abs(translation * factors) <= LARGEST).all():
        ignored.append("translation")
        translation = np.zeros_like(translation)
    problems += [
        f"A transformation of type {kind!r} is invalid or not supported and is ignored."
        for kind in dict.fromkeys(ignored)
    ]
    return Transform(tuple(scale.tolist()), tuple(translation.tolist()))


def _flat(steps: Sequence[object]) -> Iterator[Metadata]:
    """Yield transformations in their order, with the contents of sequences in their place."""
    for step in map(_mapping, steps):
        if step.get("type") == "sequence":
            yield from _flat(_mappings(step.get("transformations")))
        else:
            yield step


def _matrix(fields: Metadata, dimensions: int) -> NDArray[np.float64] | None:
    """Return a transformation as a homogeneous matrix; None if it is invalid or unsupported."""
    matrix = np.eye(dimensions + 1)
    kind = fields.get("type")
    value = fields.get(kind) if isinstance(kind, str) else None
    if kind == "identity":
        return matrix
    if kind in ("scale", "translation"):
        values = numbers(value, dimensions, LARGEST_STATED)
        if values is None or kind == "scale":
            return None if values is None else np.diag([*values, 1.0])
        matrix[:-1, -1] = values
        return matrix
    if kind in ("affine", "rotation") and isinstance(value, list) and len(value) == dimensions:
        width = dimensions + (kind == "affine")
        rows = [numbers(row, width, LARGEST_STATED) for row in value]
        if None not in rows:
            matrix[:-1, :width] = rows
            return matrix
    order = list(map(str, value)) if kind == "mapAxis" and isinstance(value, list) else []
    if sorted(order) == sorted(map(str, range(dimensions))):
        return matrix[[*map(int, order), dimensions]]
    return None


def numbers(values: object, count: int, largest: float = LARGEST) -> tuple[float, ...] | None:
    """Return a list of `count` numbers as floats; None if the value is not such a list."""
    if not isinstance(values, list) or len(values) != count:
        return None
    if not all(isinstance(value, int | float) and abs(value) <= largest for value in values):
        return None
    return tuple(map(float, values))


def default_position(omero: object, letter: str, length: int) -> int:
    """Return the index of the plane to show along an axis, from the image's rendering settings.

    Without settings, it is the middle one along z and the first one along other axes.
    """
    settings = _mapping(_mapping(omero).get("rdefs"))
    default = length // 2 if letter == "z" else 0
    value = settings.get(f"default{letter.upper()}")
    return value if type(value) is int and 0 <= value < length else default


def channels(omero: object, count: int, problems: list[str]) -> tuple[Channel, ...]:
    """Return the names, colors and windows of `count` channels; empty if none are given.

    If their number differs from `count`, a message is appended to `problems`.
    """
    stated = _mapping(omero).get("channels")
    if not isinstance(stated, list) or not stated:
        return ()
    if len(stated) != count:
        problems.append(f"The metadata names {len(stated)} channel(s), but the image has {count}.")
    items = [_mapping(each) for each in (stated + [None] * count)[:count]]
    wrong = [each["color"] for each in items if each.get("color") and not _color(each["color"])]
    if wrong:
        problems.append(f"{len(wrong)} channel(s) have an invalid color ({str(wrong[0])[:20]}).")
    found = tuple(_channel(each, index) for index, each in enumerate(items))
    ignored = [
        window
        for window, channel in zip(map(_window, items), found, strict=True)
        if channel.window is None and window.get("start") != window.get("end")
    ]
    if ignored:
        start, end = (str(ignored[0].get(name))[:20] for name in ("start", "end"))
        problems.append(f"{len(ignored)} channel(s) have an invalid window ({start} to {end}).")
    return found


def _color(stated: object) -> str | None:
    """Return a color of 6 or 8 hexadecimal digits as "#rrggbb"; None if it is invalid.

    With 8 digits, the opacity comes last, or first as .NET writes it.
    """
    if not isinstance(stated, str) or not re.fullmatch(r"#?([0-9a-fA-F]{2}){3,4}", stated):
        return None
    digits = stated.lstrip("#").lower()
    opacity_first = len(digits) == 8 and digits[:2] == "ff" != digits[-2:]
    return f"#{digits[2:] if opacity_first else digits[:6]}"


def is_inverted(omero: object) -> bool:
    """Whether the first channel is displayed inverted, with high values dark."""
    stated = _mapping(omero).get("channels")
    first = stated[0] if isinstance(stated, list) and stated else None
    return _mapping(first).get("inverted") is True


def _window(fields: Metadata) -> Metadata:
    return _mapping(fields.get("window"))


def _channel(fields: Metadata, index: int) -> Channel:
    label, color, window = fields.get("label"), fields.get("color"), _window(fields)
    limits = numbers([window.get("start"), window.get("end")], 2)
    return Channel(
        name=(label[:LONGEST_NAME] if isinstance(label, str) else "") or f"channel {index}",
        color=_color(color),
        window=(limits[0], limits[1]) if limits and limits[0] < limits[1] else None,
        visible=fields.get("active") is not False,
    )


def are_rgb(stated: Sequence[Channel], dtype: str) -> bool:
    """Whether three channels are the red, green and blue of one color image.

    True if their colors or names say so, all are visible, and no window stretches them; also if
    nothing is stated and the samples have 8 bits.
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


def label_colors(image_label: object) -> dict[int, str]:
    """Return the color of each label that has one, as "#rrggbbaa"."""
    found = {}
    for item in _mappings(_mapping(image_label).get("colors")):
        value, rgba = item.get("label-value"), numbers(item.get("rgba"), 4)
        if type(value) is int and abs(value) < 1 << 63 and rgba and all(0 <= v < 256 for v in rgba):
            found[value] = "#" + "".join(f"{int(part):02x}" for part in rgba)
    return found


def label_properties(image_label: object) -> tuple[Metadata, ...]:
    """Return the properties of individual labels, each with an integer "label-value"."""
    stated = _mappings(_mapping(image_label).get("properties"))
    return tuple(item for item in stated if type(item.get("label-value")) is int)


def _mapping(value: object) -> Metadata:
    return value if isinstance(value, dict) else {}


def _mappings(value: object) -> list[Metadata]:
    items = value[:MOST_COLORS] if isinstance(value, list) else []
    return [item for item in items if isinstance(item, dict)]
