"""`Composite`: the channels that are combined into one RGB image, and how each is shown."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass, replace
from numbers import Real
from reprlib import repr as short_repr
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.model.errors import LevelError, RegionError

if TYPE_CHECKING:
    from collections.abc import Iterable

WHITE = "#ffffff"
COLOR = re.compile(r"#[0-9a-fA-F]{6}")


@dataclass(frozen=True, slots=True)
class ChannelStyle:
    """How one channel contributes to a composite.

    Attributes
    ----------
    name : str
        Name to display.
    color : str
        Color of the channel's brightest pixels, ``"#rrggbb"``.
    window : tuple of float or None
        Values shown as black and as `color`; None if they have not been determined yet.
    gamma : float
        Exponent applied to values within the window, scaled to the range 0 to 1.
    visible : bool
        Whether the channel is part of the composite.
    """

    name: str
    color: str = WHITE
    window: tuple[float, float] | None = None
    gamma: float = 1.0
    visible: bool = True


@dataclass(frozen=True, slots=True)
class Composite:
    """An RGB image of several channels, whose colors are added in linear light.

    A composite of a single channel looks the same as in any other viewer: linear light affects only
    sums of colors.

    Attributes
    ----------
    channels : tuple of ChannelStyle
        One entry per channel of the slide.
    inverted : bool
        Whether the image is inverted, so that it is white where all channels are dark.
    """

    channels: tuple[ChannelStyle, ...]
    inverted: bool = False

    @property
    def visible(self) -> tuple[int, ...]:
        """Indices of the visible channels."""
        return tuple(index for index, style in enumerate(self.channels) if style.visible)

    def check(self, path: str, count: int) -> None:
        """Raise a `RegionError` unless this can show a slide with `count` channels."""
        styles = self.channels if isinstance(self.channels, tuple | list) else ()
        if len(styles) != count:
            raise RegionError(
                f"The composite has {len(styles)} channels, but '{path}' has {count}; make one "
                "with the slide's `composite`."
            )
        for index, style in enumerate(styles):
            if not isinstance(style, ChannelStyle):
                raise RegionError(
                    f"Channel {index} of the composite is {short_repr(style)}; it must be a "
                    "ChannelStyle."
                )
            if not _is_truth(style.visible):
                raise RegionError(
                    f"Channel {index} of the composite has visible={short_repr(style.visible)}; it "
                    "must be True or False."
                )
        if not _is_truth(self.inverted):
            raise RegionError(
                f"The composite has inverted={short_repr(self.inverted)}; it must be True or False."
            )
        for index in self.visible:
            style = self.channels[index]
            window = (0, 1) if style.window is None else style.window
            if not (isinstance(window, tuple | list) and len(window) == 2 and _finite(*window)):
                wrong = f"window is {short_repr(window)}; it must be a tuple of two finite numbers"
            elif window[0] > window[1]:
                wrong = f"window is {short_repr(window)}; its lower limit must come first"
            elif not (_finite(style.gamma) and style.gamma > 0):
                wrong = f"gamma is {short_repr(style.gamma)}; it must be a number greater than 0"
            elif not (isinstance(style.color, str) and COLOR.fullmatch(style.color)):
                wrong = f"color is {short_repr(style.color)}; it must be like '#ff8000'"
            else:
                continue
            raise RegionError(f"Channel {index} of the composite can't be shown: its {wrong}.")

    def showing(self, channels: Iterable[int]) -> Composite:
        """Return a copy that shows these channels only.

        Raises
        ------
        LevelError
            If there is no such channel.
        """
        try:
            shown = set(map(operator.index, channels))
        except TypeError:
            raise LevelError(
                f"{short_repr(channels)} is not a list of channel numbers; pass [0, 5], for "
                "example. A composite is passed as `settings`."
            ) from None
        last = len(self.channels) - 1
        for index in shown:
            if not 0 <= index <= last:
                raise LevelError(f"There is no channel {index}; the channels are 0 to {last}.")
        return replace(
            self,
            channels=tuple(
                replace(style, visible=index in shown) for index, style in enumerate(self.channels)
            ),
        )

    def styled(self, index: int, style: ChannelStyle) -> Composite:
        """Return a copy in which a channel has the given style.

        Raises
        ------
        LevelError
            If there is no such channel.
        """
        self.showing([index])  # raises an error if there is no such channel
        styles = list(self.channels)
        styles[index] = style
        return replace(self, channels=tuple(styles))


def _is_truth(value: object) -> bool:
    return isinstance(value, bool | np.bool_)


def _finite(*values: object) -> bool:
    try:
        return all(isinstance(value, Real) and math.isfinite(value) for value in values)
    except OverflowError:  # an integer beyond all floats
        return False
