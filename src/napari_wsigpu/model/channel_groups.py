"""Named groups of channels, and the JSON files that store them: Minerva Author stories."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.model.errors import SlideError, SlideReadError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from napari_wsigpu.model.arrays import DType
    from napari_wsigpu.model.composite import ChannelStyle, Composite

TOGETHER = 4  # channels of a default group
MOST_BYTES = 16 << 20
COLOR = re.compile(r"#?([0-9a-fA-F]{6})$")


@dataclass(frozen=True, slots=True)
class ChannelGroup:
    """Channels that are shown together.

    Attributes
    ----------
    name : str
        Name to display.
    styles : tuple of (int, ChannelStyle)
        Number of each channel, and how it is shown.
    """

    name: str
    styles: tuple[tuple[int, ChannelStyle], ...]

    @property
    def numbers(self) -> list[int]:
        """Numbers of the channels, in ascending order."""
        return sorted(number for number, _ in self.styles)

    def shown(self, composite: Composite) -> Composite:
        """Return a copy of a composite that shows only these channels."""
        channels = [replace(style, visible=False) for style in composite.channels]
        for number, style in self.styles:
            window = style.window or composite.channels[number].window
            channels[number] = replace(style, window=window, visible=True)
        return replace(composite, channels=tuple(channels))


def group_of(composite: Composite, name: str) -> ChannelGroup:
    """Return the visible channels of a composite as a group."""
    return ChannelGroup(
        name, tuple((number, composite.channels[number]) for number in composite.visible)
    )


def default_groups(composite: Composite, initial: ChannelGroup) -> list[ChannelGroup]:
    """Divide the channels into consecutive groups, named by their channel numbers, from 1.

    The channels that are shown initially come first, unless they are one of these groups.
    """
    numbered = list(enumerate(composite.channels))
    parts = [numbered[first : first + TOGETHER] for first in range(0, len(numbered), TOGETHER)]
    groups = [ChannelGroup(_span(part[0][0] + 1, part[-1][0] + 1), tuple(part)) for part in parts]
    known = [[], *(group.numbers for group in groups)]
    return groups if initial.numbers in known else [initial, *groups]


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def read_groups(path: str | Path, composite: Composite, dtype: DType) -> list[ChannelGroup]:
    """Read groups from a Minerva Author story, or from a file that `write_groups` wrote.

    Parameters
    ----------
    path : str or Path
        The JSON file.
    composite : Composite
        The composite of the slide, whose channels the file refers to by number.
    dtype : dtype
        Data type of the slide; Minerva states limits as fractions of its range.

    Raises
    ------
    SlideReadError
        If the file can't be read, or does not hold groups of this slide's channels.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError
        story = json.loads(path.read_text("utf-8-sig"))
        read = [_group(each, composite, dtype) for each in story["groups"]]
        groups = [group for group in read if group.styles]
    except OSError as error:
        reason = error.strerror or error
        raise SlideReadError(f"'{path.name}' can't be read ({reason}); try again.") from error
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):
        groups = []
    if not groups:
        raise SlideReadError(
            f"'{path.name}' holds no channel groups of this slide; choose a Minerva Author story, "
            "or a file saved in the Channels dock."
        )
    return groups


def write_groups(path: str | Path, groups: Sequence[ChannelGroup], dtype: DType) -> None:
    """Write groups to a JSON file that `read_groups` and Minerva Author read.

    Raises
    ------
    SlideError
        If the file can't be written.
    """
    story = {"groups": [_record(group, dtype) for group in groups]}
    try:
        Path(path).write_text(json.dumps(story, indent=1), "utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise SlideError(
            f"'{Path(path).name}' can't be written ({reason}); choose another folder or name."
        ) from error


def _group(record: Any, composite: Composite, dtype: DType) -> ChannelGroup:
    channels = record["channels"] if "channels" in record else record["render"]
    styles = dict(_styles(channels, composite, _full_scale(dtype)))  # each channel once
    return ChannelGroup(str(record["label"]), tuple(styles.items()))


def _styles(
    records: Iterable[Any], composite: Composite, scale: float
) -> Iterable[tuple[int, ChannelStyle]]:
    for record in records:
        number = record["id"]
        if isinstance(number, bool) or number != int(number) or number < 0:
            raise ValueError
        number = int(number)
        style, color = composite.channels[number], COLOR.match(record["color"])
        if color is None:
            raise ValueError
        window = None
        if "min" in record:
            window = scale * float(record["min"]), scale * float(record["max"])
            if not (np.isfinite(window).all() and window[0] < window[1]):
                raise ValueError
        gamma = float(record.get("gamma", 1))
        if not 0 < gamma < np.inf:
            raise ValueError
        shown = replace(style, color=f"#{color[1].lower()}", window=window, gamma=gamma)
        yield number, shown


def _record(group: ChannelGroup, dtype: DType) -> dict[str, Any]:
    scale, channels = _full_scale(dtype), []
    for number, style in group.styles:
        record = {"id": number, "label": style.name, "color": style.color.removeprefix("#")}
        if style.window is not None:
            low, high = style.window
            record |= {"min": low / scale, "max": high / scale}
        channels.append(record | {"gamma": style.gamma})
    return {"label": group.name, "channels": channels}


def _full_scale(dtype: DType) -> float:
    """Return the value that Minerva calls 1: the maximum of an integer type."""
    return float(np.iinfo(dtype).max) if dtype.kind in "iu" else 1.0
