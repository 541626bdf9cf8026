"""Every failure a user can cause, as one clear sentence each.

Each error also inherits the builtin that fits, so that code which knows nothing of
slides (``except FileNotFoundError``) still catches it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# From a quote up to the last part of a path or URL that a name in quotes begins with.
FOLDERS = re.compile(r"'(?:[A-Za-z][A-Za-z0-9+.-]*:)?[/\\\\][^']*[/\\\\](?=[^'/\\\\]+')")


class _Message:
    """The sentence of an error, which its class does not have.

    PyTorch would make an error of another process anew with it, as ``kind(message=...)``.
    """

    def __get__(self, error: SlideError | None, kind: type[SlideError]) -> str:
        if error is None:
            raise AttributeError(f"{kind.__name__} has no message; its errors do")
        return FOLDERS.sub("'", str(error))


class SlideError(Exception):
    """Base of every error of this package.

    Attributes
    ----------
    message : str
        The sentence with names of files instead of paths, as notifications have room for.
    """

    message = _Message()


class SlideNotFoundError(SlideError, FileNotFoundError):
    """The slide's file does not exist (any more)."""


class SlidePermissionError(SlideError, PermissionError):
    """The slide's file may not be read by this user."""


class SlideReadError(SlideError, OSError):
    """The operating system could not read the slide's file."""


class NotASlideError(SlideError, ValueError):
    """The file is no slide: neither TIFF-based nor DICOM, or of samples that no slide has."""


class UnsupportedSlideError(SlideError, ValueError):
    """The file is sound, but holds something that can't be decoded here."""


class CorruptSlideError(SlideError, ValueError):
    """The file's structure is damaged or contradicts itself."""


class SlideChangedError(SlideError, OSError):
    """The file is no longer the one that was described."""


class SlideClosedError(SlideError, ValueError):
    """The slide was closed before this read."""


class RegionError(SlideError, ValueError):
    """A region was asked for that no slide can have."""


class LevelError(SlideError, IndexError):
    """A level was asked for that the slide does not have."""


class PlaneError(SlideError, IndexError):
    """A plane along z or t was asked for that the slide does not have."""


class DeviceError(SlideError, RuntimeError):
    """Pixels were asked for on a device that can't be used."""


class MissingPackageError(SlideError, ImportError):
    """What was asked for needs a package that is not installed."""


class UnsupportedArrayError(SlideError, NotImplementedError):
    """An array is stored in a way that can't be read as was asked for."""


class LayerError(SlideError, ValueError):
    """A layer was given that shows no slide."""


class AnnotationError(SlideError, ValueError):
    """Objects on a slide can't be had from a file or a layer, or can't be kept as was asked for."""


class DisplayTimeoutError(SlideError, TimeoutError):
    """What is on screen was not exact in time."""


class ConversionError(SlideError, ValueError):
    """A conversion was asked for that can't be."""


class ConversionCancelledError(SlideError, RuntimeError):
    """A conversion was ended by who asked for it."""

    def __init__(self, sentence: str = "The conversion was cancelled.") -> None:
        super().__init__(sentence)


class TargetExistsError(SlideError, FileExistsError):
    """What shall be written exists already."""


class TargetWriteError(SlideError, OSError):
    """The operating system refuses to write a result."""


class TileError(SlideError, ValueError):
    """A tile that was asked for exactly could not be decoded.

    Attributes
    ----------
    failures : tuple of (str, str)
        The name of each failed tile ("level 0, row 3, column 7") and its reason.
    regions : tuple of int
        Which regions of a batch show them, counted from 0.
    locations : tuple of (int, int)
        Where these regions are, as they were asked for.
    """

    def __init__(
        self,
        path: str,
        failures: Sequence[tuple[str, str]],
        regions: Sequence[int] = (),
        locations: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.path = path
        self.failures = tuple(failures)
        self.regions = tuple(regions)
        self.locations = tuple(locations)
        name, reason = self.failures[0]
        where = f", in the region at {self.locations[0]}," if locations else ""
        others = len(failures) - 1
        more = f" (and {others} more tile{'s' if others > 1 else ''})" if others else ""
        super().__init__(
            f"The tile at {name} of '{path}'{where} could not be decoded{more}: {reason}. "
            "The rest of the slide can still be read; get a fresh copy of the file."
        )

    def among(self, locations: Sequence[tuple[int, int]]) -> TileError:
        """Return the same of a batch of regions at these locations."""
        found = [locations[region] for region in self.regions]
        return type(self)(self.path, self.failures, self.regions, found)

    def __reduce__(self) -> tuple[type[TileError], tuple[Any, ...]]:
        return type(self), (self.path, self.failures, self.regions, self.locations)


def device_error(device: str, error: Exception) -> DeviceError:
    """Say in one sentence that a device failed while it was used."""
    return DeviceError(f"'{device}' failed ({error}); use device='cpu', or start again.")


def changed_error(path: str) -> SlideChangedError:
    """Say in one sentence that a slide is no longer the one that was opened."""
    return SlideChangedError(f"'{path}' has changed since it was opened; open the slide again.")


def file_error(path: str, error: OSError) -> SlideError:
    """Say in one sentence why the operating system refuses a slide's file."""
    if isinstance(error, FileNotFoundError):
        return SlideNotFoundError(f"There is no file '{path}'; check the path.")
    if isinstance(error, IsADirectoryError):
        return SlideReadError(f"'{path}' is a folder, not a slide; choose a file in it.")
    if isinstance(error, PermissionError):
        return SlidePermissionError(
            f"You have no permission to read '{path}'; ask its owner for access."
        )
    return SlideReadError(f"'{path}' can't be read ({error.strerror or error}); try again.")
