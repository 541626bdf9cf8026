"""The errors of this package. Messages name the problem, the file or tile, and what to do.

Each class also inherits from the matching built-in exception, so that generic handlers catch it
too, for example ``except FileNotFoundError``.
"""

from __future__ import annotations

import errno
import json
import re
import sys
import textwrap
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Everything between a quote and the file name of the quoted path or URL.
FOLDERS = re.compile(r"'(?:[A-Za-z][A-Za-z0-9+.-]*:)?[/\\\\][^']*[/\\\\](?=[^'/\\\\]+')")

# Messages about a path that is too long quote this many of its characters.
LONGEST_SHOWN = 100
LONGEST_REASON = 200

# Note in which a worker of a PyTorch `DataLoader` passes on the arguments of a `TileError`.
ARGUMENTS = re.compile(r"^TileError arguments: (\[.*\])$", re.MULTILINE)


class _Message:
    """`SlideError.message`: exists on instances only.

    PyTorch recreates a worker's exception as ``kind(message=...)`` if the class has that attribute.
    """

    def __get__(self, error: SlideError | None, kind: type[SlideError]) -> str:
        if error is None:
            raise AttributeError(f"{kind.__name__} has no attribute 'message'; its instances do")
        return FOLDERS.sub("'", str(error))


class SlideError(Exception):
    """Base class of all errors of this package.

    Attributes
    ----------
    message : str
        The error's text with file names instead of full paths, for notifications.
    """

    message = _Message()


class SlideNotFoundError(SlideError, FileNotFoundError):
    """The slide's file does not exist."""


class SlidePermissionError(SlideError, PermissionError):
    """The user does not have permission to read the slide's file."""


class SlideReadError(SlideError, OSError):
    """The slide's file could not be read from its disk or server."""


class NotASlideError(SlideError, ValueError):
    """The file is not a slide: its format or its sample type is not supported."""


class UnsupportedSlideError(SlideError, ValueError):
    """The file is intact but uses a feature that cannot be decoded."""


class CorruptSlideError(SlideError, ValueError):
    """The file's structure is damaged or contradicts itself."""


class SlideChangedError(SlideError, OSError):
    """The file has changed since the slide was opened."""


class SlideClosedError(SlideError, ValueError):
    """The slide is closed."""


class RegionError(SlideError, ValueError):
    """The arguments do not describe a valid region."""


class LevelError(SlideError, IndexError):
    """The slide has no such level or channel."""


class PlaneError(SlideError, IndexError):
    """The slide has no such plane along z or t."""


class NoSuchItemError(SlideError, KeyError):
    """The slide has no associated image, metadata field or label image with this name."""

    def __str__(self) -> str:  # `KeyError` would add quotes
        return str(self.args[0])


class DeviceError(SlideError, RuntimeError):
    """The requested device cannot be used."""


class MissingPackageError(SlideError, ImportError):
    """A required package is not installed."""


class UnsupportedArrayError(SlideError, NotImplementedError):
    """An array's storage does not support the requested kind of access."""


class LayerError(SlideError, ValueError):
    """The layer does not show a slide."""


class AnnotationError(SlideError, ValueError):
    """Annotations cannot be read, converted or stored."""


class DisplayTimeoutError(SlideError, TimeoutError):
    """The display did not show exact pixels before the timeout."""


class ConversionError(SlideError, ValueError):
    """The options of a conversion are invalid or contradict each other."""


class ConversionCancelledError(SlideError, RuntimeError):
    """The conversion was cancelled."""

    def __init__(self, sentence: str = "The conversion was cancelled.") -> None:
        super().__init__(sentence)


class TargetExistsError(SlideError, FileExistsError):
    """The target already exists."""


class TargetWriteError(SlideError, OSError):
    """The target could not be written."""


class TileError(SlideError, ValueError):
    """A tile could not be decoded in a read that does not tolerate damaged tiles.

    Attributes
    ----------
    failures : tuple of (str, str)
        (name, reason) of each failed tile; a name is like ``"level 0, row 3, column 7"``.
    regions : tuple of int
        Indices, within a batch, of the regions that contain the tiles.
    locations : tuple of (int, int)
        Locations of these regions as the caller passed them.
    """

    def __init__(
        self,
        path: str,
        failures: Sequence[tuple[str, str]] = (),
        regions: Sequence[int] = (),
        locations: Sequence[tuple[int, int]] = (),
    ) -> None:
        if not failures:
            # A `DataLoader` recreates a worker's exception from a single string, its traceback.
            text, found = path, ARGUMENTS.findall(path)
            if not found:
                self._set("", (), (), ())
                super().__init__(text)
                return
            path, failures, regions, locations = json.loads(found[-1])
            self.add_note(ARGUMENTS.sub("", text).strip())
        self._set(path, failures, regions, locations)
        if _in_loader_worker():
            arguments = self.path, self.failures, self.regions, self.locations
            self.add_note(f"TileError arguments: {json.dumps(arguments, default=int)}")
        name, reason = self.failures[0]
        where = f", in the region at {self.locations[0]}," if locations else ""
        others = len(failures) - 1
        more = f" (and {others} more tile{'s' if others > 1 else ''})" if others else ""
        super().__init__(
            f"The tile at {name} of '{path}'{where} could not be decoded{more}: {reason}. "
            "Undamaged tiles can still be read; get a fresh copy of the file."
        )

    def _set(
        self,
        path: str,
        failures: Sequence[tuple[str, str]],
        regions: Sequence[int],
        locations: Sequence[tuple[int, int]],
    ) -> None:
        self.path = path
        self.failures = tuple((name, reason) for name, reason in failures)
        self.regions = tuple(regions)
        self.locations = tuple((x, y) for x, y in locations)

    def among(self, locations: Sequence[tuple[int, int]]) -> TileError:
        """Return a copy with the locations of its regions, given all locations of the batch."""
        found = [locations[region] for region in self.regions]
        return type(self)(self.path, self.failures, self.regions, found)

    def __reduce__(self) -> tuple[type[TileError], tuple[object, ...]]:
        return type(self), (self.path, self.failures, self.regions, self.locations)


def _in_loader_worker() -> bool:
    loaders = sys.modules.get("torch.utils.data")
    return loaders is not None and loaders.get_worker_info() is not None


def device_error(device: str, error: Exception) -> DeviceError:
    """Return the error for a device that failed during use."""
    return DeviceError(f"'{device}' failed ({error}); use device='cpu', or restart the process.")


def thread_error(error: RuntimeError) -> SlideError | None:
    """Return the error for a thread that can't be started; None for any other error."""
    if "start new thread" not in str(error):
        return None
    return SlideError(
        "No more threads can be started, because this process or its user has reached a limit; end "
        "other threads or processes, or raise the limit (ulimit -u)."
    )


def changed_error(path: str) -> SlideChangedError:
    """Return the error for a slide whose file changed after it was opened."""
    return SlideChangedError(f"'{path}' has changed since it was opened; open the slide again.")


@contextmanager
def write_errors(path: object) -> Iterator[None]:
    """Turn errors of the operating system into a `TargetWriteError` that names the target."""
    try:
        yield
    except SlideError:
        raise
    except OSError as error:
        raise _write_error(str(path), error) from error


def _write_error(path: str, error: OSError) -> TargetWriteError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TargetWriteError(f"No space is left for '{path}'; free some space and try again.")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return TargetWriteError(
            f"You don't have permission to write '{path}'; choose another folder."
        )
    reason = error.strerror or error
    return TargetWriteError(f"'{path}' can't be written ({reason}); choose another folder or name.")


def shortened(reason: str) -> str:
    """Return a library's message on one line, cut between two words if it is long."""
    return textwrap.shorten(reason, LONGEST_REASON, placeholder=" ...")


def file_error(path: str, error: OSError) -> SlideError:
    """Return the `SlideError` for an `OSError` raised while reading a file."""
    if not path:
        return SlideNotFoundError("The path is empty; pass the path of a file.")
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return SlideNotFoundError(f"There is no file '{path}'; check the path.")
    if isinstance(error, IsADirectoryError):
        return SlideReadError(f"'{path}' is a folder, not a slide; choose a file in it.")
    if isinstance(error, PermissionError):
        return SlidePermissionError(
            f"You don't have permission to read '{path}'; ask its owner for access."
        )
    if error.errno == errno.ENAMETOOLONG:
        shown = f"{path[:LONGEST_SHOWN]}…" if len(path) > LONGEST_SHOWN else path
        return SlideReadError(f"The path '{shown}' is too long for this system; shorten it.")
    if error.errno == errno.ELOOP:
        return SlideReadError(
            f"'{path}' can't be read, because its symbolic links form a loop; correct the links."
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return SlideReadError(
            f"'{path}' can't be read, because too many files are open; close slides that you no "
            "longer need, or raise the limit (ulimit -n)."
        )
    return SlideReadError(f"'{path}' can't be read ({error.strerror or error}); try again.")


def too_large(width: int, height: int) -> RegionError:
    """Return the error for a region that exceeds memory."""
    return RegionError(
        f"A region of {width} x {height} pixels doesn't fit into memory; read it in parts."
    )
