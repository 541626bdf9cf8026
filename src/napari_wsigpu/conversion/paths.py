"""The path of a conversion's result: what is in its way, and the folder of an unfinished one."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_wsigpu.conversion.checksum import checksum
from napari_wsigpu.conversion.journal import Journal
from napari_wsigpu.conversion.options import kind_of
from napari_wsigpu.conversion.plan import segments_of
from napari_wsigpu.model.errors import (
    ConversionCancelledError,
    ConversionError,
    SlideError,
    TargetExistsError,
    TargetWriteError,
    TileError,
)
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.storage.zarr.array import DOCUMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from threading import Event

    from napari_wsigpu.conversion.options import Options
    from napari_wsigpu.conversion.plan import Plan
    from napari_wsigpu.slide.slide import Slide

# What the folder of an unfinished conversion holds.
JOURNAL, DATA, HEAD, OLD = "journal", "data", "head", "old"
# What lies beside the levels of an OME-Zarr, and what an array's folder holds.
ASSOCIATED, PROFILE, ARRAY = "associated", "icc_profile", ("zarr.json", "c")
# How much less space encoded pixels take, at least as far as slides go.
EXPECTED_RATIO = {"raw": 1, "deflate": 4, "zstd": 4, "lz4": 2, "jpeg": 30}
SPARE_BYTES = 16 << 20
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def check_target(slide: Slide, path: Path, *, overwrite: bool) -> None:
    """Refuse a path that can't be written, or that holds what shall be kept.

    Raises
    ------
    ConversionError
        If it is, or holds, the slide itself.
    TargetExistsError
        If it exists and may not be overwritten, or is a folder that holds other files.
    TargetWriteError
        If its folder is not there, or it can't be looked into.
    """
    with refused(path):
        files = [slide.path, *(file.path for file in slide.layout.files)]
        for file in map(Path, files):
            if path == file or (path.exists() and file.exists() and path.samefile(file)):
                raise ConversionError(f"'{path}' is the slide itself; choose another target.")
            if path in file.parents:
                raise ConversionError(f"'{path}' holds the slide itself; choose another target.")
        if not path.parent.is_dir():
            raise TargetWriteError(f"There is no folder '{path.parent}'; make it first.")
    check_path(path, overwrite=overwrite)


def check_path(path: Path, *, overwrite: bool) -> None:
    """Refuse a path that holds what shall be kept; also asked when the result is whole.

    Raises
    ------
    TargetExistsError
        If it exists and may not be overwritten, or is a folder that holds other files.
    TargetWriteError
        If it can't be looked into.
    """
    with refused(path):
        if os.path.lexists(path) and not overwrite:
            raise TargetExistsError(
                f"'{path}' exists already; choose another name, or allow to overwrite it "
                "(overwrite=True, --overwrite)."
            )
        other = next(_others(path), None)
    if other is not None:
        raise TargetExistsError(
            f"'{path}' holds other files too, such as '{other.relative_to(path)}', and is never "
            "overwritten; choose another name."
        )


def _others(folder: Path) -> Iterator[Path]:
    """Yield what is in a folder that a conversion to OME-Zarr does not write."""
    if folder.is_symlink() or not folder.is_dir():
        return
    entries = sorted(folder.iterdir())
    is_group = any(entry.name in DOCUMENTS for entry in entries)
    for entry in entries:
        if is_group and entry.is_dir() and (entry.name.isdecimal() or entry.name == PROFILE):
            yield from (part for part in entry.iterdir() if part.name not in ARRAY)
        elif is_group and entry.name == ASSOCIATED and entry.is_dir():
            for part in entry.iterdir():
                if part.is_dir():
                    yield from _others(part)
                elif part.name not in DOCUMENTS:
                    yield part
        elif entry.name not in DOCUMENTS:
            yield entry


def work_of(path: Path) -> Path:
    """Return where a result lies until it is whole: a folder, or a file for PNG.

    Raises
    ------
    TargetExistsError
        If something else has that name.
    TargetWriteError
        If it can't be looked into.
    """
    work = path.with_name(f"{path.name}.part")
    with refused(work):
        ours = is_ours(work, png=kind_of(path) == "png")
    if not ours:
        raise in_the_way(work)
    return work


def is_ours(work: Path, *, png: bool = False) -> bool:
    """Whether nothing has that name, or an unfinished conversion of this user.

    No link is followed, which somebody else may have put there.
    """
    if not os.path.lexists(work):
        return True
    status = work.lstat()
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        return False
    if png:
        if not stat.S_ISREG(status.st_mode):
            return False
        with work.open("rb") as file:
            return PNG_SIGNATURE.startswith(file.read(len(PNG_SIGNATURE)))
    if not stat.S_ISDIR(status.st_mode):
        return False
    files = list(work.iterdir())
    names = {file.name for file in files}
    known = not names or JOURNAL in names <= {JOURNAL, DATA, HEAD, OLD}
    return known and not any(file.is_symlink() for file in files)


def make_own(folder: Path) -> None:
    """Make a folder that no other user can look into, unless it is there and this user's.

    Raises
    ------
    TargetExistsError
        If something else has come to its name.
    """
    try:
        folder.mkdir(0o700)
    except FileExistsError:
        if not is_ours(folder):
            raise in_the_way(folder) from None


def in_the_way(work: Path) -> TargetExistsError:
    """Say that something has the name of an unfinished conversion."""
    return TargetExistsError(
        f"'{work}' is in the way, as it holds no unfinished conversion of yours; "
        "move it away, or choose another name for the target."
    )


def put_in_place(data: Path, path: Path) -> None:
    """Give the whole result its name, in one step if it is a file or nothing has that name."""
    if path.is_dir() or (path.exists() and data.is_dir()):
        old = data.with_name(OLD)
        remove(old)
        path.replace(old)
    data.replace(path)
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_space(folder: Path, plan: Plan, options: Options, written: int) -> None:
    """Refuse a conversion for which the disk has clearly no space.

    Parameters
    ----------
    folder : Path
        Where the unfinished result lies.
    plan : Plan
        What is written.
    options : Options
        How it is compressed.
    written : int
        How many bytes of it are there.

    Raises
    ------
    TargetWriteError
        If there is less space than it needs at least.
    """
    default = "zstd" if options.kind == "ome-zarr" else "deflate"
    needed = 0
    for level in plan.levels:
        if level.missing:
            continue
        raw = level.width * level.height * plan.channels * plan.dtype.itemsize
        if level.copied:
            tiles = [(row, column) for row in range(level.rows) for column in range(level.columns)]
            needed += int(segments_of(level, tiles)[1].sum())
        else:
            needed += raw // EXPECTED_RATIO[options.compression or default]
    needed = max(0, needed + SPARE_BYTES - written)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise TargetWriteError(
            f"The disk of '{folder.parent}' has {byte_size(free)} left, but "
            f"{byte_size(needed)} or more are needed; free some, or choose another disk."
        )


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Say in one sentence what the operating system refuses of a target."""
    try:
        yield
    except SlideError:
        raise
    except OSError as error:
        raise _write_error(path, error) from error


def _write_error(path: Path, error: OSError) -> SlideError:
    """Say in one sentence why the operating system refuses a target."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TargetWriteError(f"There is no room left for '{path}'; free some and convert again.")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return TargetWriteError(f"You have no permission to write '{path}'; choose another folder.")
    return TargetWriteError(
        f"'{path}' can't be written ({error.strerror or error}); "
        "choose another folder, or try again."
    )


class Work:
    """What is there of a result that is not whole.

    Parameters
    ----------
    folder : Path
        Where it lies.
    target : Path
        What it becomes.
    journal : Journal
        Of the tiles that are written.
    overwrite : bool
        Whether the target may be replaced.

    Attributes
    ----------
    data : Path
        The file or folder that gets the target's name.
    begun : bool
        Whether another call could go on with it.
    notes : list of str
        What is to be said of what was found, one sentence each.
    """

    def __init__(self, folder: Path, target: Path, journal: Journal, *, overwrite: bool) -> None:
        self._folder = folder
        self._target = target
        self._overwrite = overwrite
        self.journal = journal
        self.data = folder / DATA
        self.begun = journal.found
        self.notes = (
            [f"What '{folder}' held was begun anew, as {journal.changed}."]
            if journal.changed
            else []
        )

    def finish(self) -> str:
        """Give the whole result its name, and return its checksum."""
        digest = checksum(self.data)
        check_path(self._target, overwrite=self._overwrite)
        put_in_place(self.data, self._target)
        remove(self._folder / OLD)  # the journal last, which says whose folder it is
        self.journal.close()
        shutil.rmtree(self._folder)
        return digest


@contextmanager
def working_on(
    target: Path,
    identity: Mapping[str, Any],
    shapes: Sequence[tuple[int, int, int]],
    *,
    overwrite: bool,
    keep: bool,
    cancelled: Event | None,
) -> Iterator[Work]:
    """Work in the folder beside a target, and decide what stays of it if that fails.

    Parameters
    ----------
    target : Path
        What the result becomes.
    identity, shapes
        As a `Journal` takes them.
    overwrite : bool
        Whether the target may be replaced.
    keep : bool
        Whether a failed conversion leaves the folder, so that the same call goes on.
    cancelled : threading.Event, optional
        Whether it was set is why the work fails.

    Raises
    ------
    TargetExistsError, ConversionError
        If the folder's name is taken, or the target's by now, or another conversion is working
        there.
    TargetWriteError
        If the operating system refuses something.
    ConversionCancelledError
        Instead of any error, if `cancelled` was set.
    """
    folder = work_of(target)
    with refused(target):
        make_own(folder)
        journal = Journal(folder / JOURNAL, identity, shapes)
    work = Work(folder, target, journal, overwrite=overwrite)
    try:
        with refused(target), closing(journal):
            yield work
    except Exception as error:
        # Who cancels may close the slide, or end the process, before the next tile notices.
        ended = cancelled is not None and cancelled.is_set()
        if ended or not (work.begun and keep) or isinstance(error, TileError):
            # A damaged source stays so; what was written of it is of no use.
            shutil.rmtree(folder, ignore_errors=True)
        else:
            error.add_note(
                f"What is written lies in '{folder}'; the same conversion goes on there."
            )
        if ended:
            raise ConversionCancelledError from error
        raise
