"""What several of these interfaces need."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

    from napari_wsigpu.model.layout import SlideLayout

    Pair = tuple[int, int]

Value = TypeVar("Value")


class OpenedSlide(ABC):
    """What the slides of OpenSlide's and tiffslide's interfaces have in common."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Let go of the file."""

    @property
    @abstractmethod
    def level_dimensions(self) -> tuple[Pair, ...]:
        """(width, height) of each level."""

    @property
    @abstractmethod
    def level_downsamples(self) -> tuple[float, ...]:
        """How many pixels of level 0 one of each level spans."""

    @property
    def dimensions(self) -> Pair:
        """(width, height) of level 0."""
        return self.level_dimensions[0]

    def get_best_level_for_downsample(self, downsample: float) -> int:
        """Return the coarsest level that is at least so fine."""
        factors = self.level_downsamples
        return max((level for level, each in enumerate(factors) if each <= downsample), default=0)


class Items(Mapping[str, Value]):
    """What a slide has by name, made when it is asked for.

    Parameters
    ----------
    kind : str
        What `repr` calls it.
    names, make : callable
        Give all names, and what has a name.
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


def truncated(place: Pair, downsample: float) -> tuple[Pair, Pair]:
    """Return where a level's pixels are, as those say who round towards 0.

    Parameters
    ----------
    place : tuple of int
        (x, y) in pixels of level 0.
    downsample : float
        The level's.

    Returns
    -------
    start : tuple of int
        (x, y) in the level's own pixels.
    location : tuple of int
        (x, y) in pixels of level 0 that `Slide.read_region` takes for it.
    """
    x, y = (int(number / downsample) for number in place)
    return (x, y), (math.floor(x * downsample + 0.5), math.floor(y * downsample + 0.5))


def mpp_of(layout: SlideLayout) -> tuple[float, float] | None:
    """Return micrometres a pixel (x, y) as OpenSlide and tiffslide do.

    They take any resolution of a plain TIFF for a measurement, also the 72 dpi of screens.
    """
    tags = layout.metadata.get("tiff")
    if layout.mpp is not None or layout.vendor != "generic-tiff" or not isinstance(tags, dict):
        return layout.mpp
    unit = {"inch": 25400.0, "centimeter": 10000.0}.get(str(tags.get("ResolutionUnit")))
    x, y = (tags.get(f"{axis}Resolution") for axis in "XY")
    return (unit / x, unit / y) if unit and x and y else None
