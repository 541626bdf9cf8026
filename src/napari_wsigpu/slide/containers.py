"""Containers that list their keys or levels in the error for a missing one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, SupportsIndex, TypeVar, overload

from napari_wsigpu.model.errors import LevelError, NoSuchItemError
from napari_wsigpu.reading.level import LevelArray

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Self

Item = TypeVar("Item")


class NamedItems(dict[str, Item]):
    """A dict that lists its keys when a key is missing.

    Parameters
    ----------
    items : Mapping of str
        The items.
    kind : str
        Name of an item in the error, such as ``"label image"``.
    """

    def __init__(self, items: Mapping[str, Item], kind: str) -> None:
        super().__init__(items)
        self._kind = kind

    def __missing__(self, key: object) -> NoReturn:
        names = ", ".join(map(repr, self)) or "none"
        raise NoSuchItemError(f"There is no {self._kind} {key!r}; available: {names}.")


class Levels(tuple[LevelArray, ...]):
    """The levels of a slide.

    Parameters
    ----------
    levels : iterable of LevelArray
        The levels, finest first.
    path : str
        The slide's path, for the error.
    """

    _path: str

    def __new__(cls, levels: Iterable[LevelArray], path: str = "") -> Self:
        """Create the tuple; unpickling sets the path later."""
        self = super().__new__(cls, levels)
        self._path = path
        return self

    @overload
    def __getitem__(self, index: SupportsIndex) -> LevelArray: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[LevelArray, ...]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> LevelArray | tuple[LevelArray, ...]:
        try:
            return super().__getitem__(index)
        except (IndexError, TypeError):
            raise no_level(self._path, index, len(self)) from None


def no_level(path: str, index: object, count: int) -> LevelError:
    """Return the error for a level that a slide does not have."""
    levels = "only level 0" if count == 1 else f"{count} levels, 0 to {count - 1}"
    return LevelError(f"'{path}' has no level {index!r}; it has {levels}.")
