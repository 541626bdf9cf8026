"""Code shared by the interfaces of other libraries."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

    from napari_wsigpu.model.geometry import Pair
    from napari_wsigpu.model.layout import SlideLayout

Value = TypeVar("Value")


class OpenedSlide(ABC):
    """Base class of slides with OpenSlide's or tiffslide's interface."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    @property
    @abstractmethod
    def level_dimensions(self) -> tuple[Pair, ...]:
        """(width, height) of each level."""

    @property
    @abstractmethod
    def level_downsamples(self) -> tuple[float, ...]:
        """Downsample of each level relative to level 0."""

    @property
    def dimensions(self) -> Pair:
        """(width, height) of level 0."""
        return self.level_dimensions[0]

    def get_best_level_for_downsample(self, downsample: float) -> int:
        """Return the coarsest level whose downsample is at most `downsample`, else 0."""
        factors = self.level_downsamples
        return max((level for level, each in enumerate(factors) if each <= downsample), default=0)


class LazyMapping(Mapping[str, Value]):
    """A mapping that computes its values on access.

    Parameters
    ----------
    kind : str
        Type name shown by `repr`.
    names : callable
        Returns all names.
    make : callable
        Returns the value of a name.
    """

    def __init__(
        self, kind: str, names: Callable[[], Iterable[str]], make: Callable[[str], Value]
    ) -> None:
        self._kind, self._names, self._make = kind, names, make

    def __getitem__(self, name: str) -> Value:
        if name not in list(self):
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"<{self._kind} {dict(self)!r}>"


def truncated(location: Pair, downsample: float) -> tuple[Pair, Pair]:
    """Truncate a location to whole pixels of a level, as tiffslide and cuCIM do.

    `Slide.read_region` rounds instead, so it needs a location that rounds to the same pixel.

    Parameters
    ----------
    location : tuple of int
        (x, y) in pixels of level 0.
    downsample : float
        Downsample of the level.

    Returns
    -------
    start : tuple of int
        (x, y) in pixels of the level.
    location : tuple of int
        (x, y) in pixels of level 0, for `Slide.read_region`.
    """
    x, y = (int(number / downsample) for number in location)
    return (x, y), (math.floor(x * downsample + 0.5), math.floor(y * downsample + 0.5))


def mpp_of(layout: SlideLayout) -> tuple[float, float] | None:
    """Return the pixel size (x, y) in micrometers that OpenSlide and tiffslide report.

    They trust any resolution of a plain TIFF, even the 72 dpi of screens.
    """
    tags = layout.metadata.get("tiff")
    if layout.mpp is not None or layout.vendor != "generic-tiff" or not isinstance(tags, dict):
        return layout.mpp
    unit = {"inch": 25400.0, "centimeter": 10000.0}.get(str(tags.get("ResolutionUnit")))
    x, y = (tags.get(f"{axis}Resolution") for axis in "XY")
    return (unit / x, unit / y) if unit and x and y else None
