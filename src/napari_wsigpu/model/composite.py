"""`Composite`: the channels that are combined into one RGB image, and how each is shown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from napari_wsigpu.model.errors import LevelError

if TYPE_CHECKING:
    from collections.abc import Iterable

WHITE = "#ffffff"


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

    def showing(self, channels: Iterable[int]) -> Composite:
        """Return a copy that shows these channels only.

        Raises
        ------
        LevelError
            If there is no such channel.
        """
        shown = set(channels)
        missing = sorted(shown.difference(range(len(self.channels))))
        if missing:
            last = len(self.channels) - 1
            raise LevelError(f"There is no channel {missing[0]!r}; the channels are 0 to {last}.")
        return replace(
            self,
            channels=tuple(
                replace(style, visible=index in shown) for index, style in enumerate(self.channels)
            ),
        )

    def styled(self, index: int, style: ChannelStyle) -> Composite:
        """Return a copy in which a channel has the given style."""
        return replace(self, channels=(*self.channels[:index], style, *self.channels[index + 1 :]))
