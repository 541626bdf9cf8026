"""Paths of a conversion: checks of the target, and the folder of an unfinished result."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from napari_wsigpu.conversion.checksum import checksum
from napari_wsigpu.conversion.conversion_plan import segments_of
from napari_wsigpu.conversion.journal import Journal
from napari_wsigpu.conversion.options import DEFAULT_IN_ZARR, kind_of
from napari_wsigpu.model.errors import (
    ConversionCancelledError,
    ConversionError,
    TargetExistsError,
    TargetWriteError,
    TileError,
    write_errors,
)
from napari_wsigpu.model.tags import COMPRESSION
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.storage.zarr.array import DOCUMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from threading import Event

    from napari_wsigpu.conversion.conversion_plan import Plan
    from napari_wsigpu.conversion.options import Options
    from napari_wsigpu.slide.slide import Slide

# Entries in the folder of an unfinished conversion.
JOURNAL, DATA, HEAD, OLD = "journal", "data", "head", "old"
# Entries of an OME-Zarr next to its levels, and entries of an array's folder.
ASSOCIATED, PROFILE, ARRAY = "associated", "icc_profile", ("zarr.json", "c")
# Optimistic compression ratios, to estimate the minimum disk space.
EXPECTED_RATIO = {"raw": 1, "deflate": 4, "zstd": 4, "lz4": 2, "jpeg": 30}
SPARE_BYTES = 16 << 20
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def check_target(slide: Slide, path: Path, *, overwrite: bool) -> None:
    """Check that a conversion of `slide` may write to a path.

    Raises
    ------
    ConversionError
        If the path is the slide itself or a folder that contains it.
    TargetExistsError
        If the path exists and `overwrite` is false, or if it is a folder with other files.
    TargetWriteError
        If its parent folder does not exist, or the path is not accessible.
    """
    with write_errors(path):
        files = [slide.path, *(file.path for file in slide.layout.files)]
        for file in map(Path, files):
            if path == file or (path.exists() and file.exists() and path.samefile(file)):
                raise ConversionError(f"'{path}' is the slide itself; choose another target.")
            if path in file.parents:
                raise ConversionError(f"'{path}' contains the slide itself; choose another target.")
        if not path.parent.is_dir():
            raise TargetWriteError(f"The folder '{path.parent}' does not exist; create it first.")
    check_path(path, overwrite=overwrite)


def check_path(path: Path, *, overwrite: bool) -> None:
    """Check that a result may replace whatever is at a path.

    Called before the conversion, and again before the finished result is moved there, because
    another program may have created the path in between.

    Raises
    ------
    TargetExistsError
        If the path exists and `overwrite` is false, or if it is a folder with other files.
    TargetWriteError
        If the path is not accessible.
    """
    with write_errors(path):
        if os.path.lexists(path) and not overwrite:
            raise TargetExistsError(
                f"'{path}' already exists; choose another name, or allow overwriting it "
                "(overwrite=True, --overwrite)."
            )
        other = next(_foreign_files(path), None)
    if other is not None:
        raise TargetExistsError(
            f"'{path}' can't be overwritten, because it also contains other files, such as "
            f"'{other.relative_to(path)}'; choose another name."
        )


def _foreign_files(folder: Path) -> Iterator[Path]:
    """Yield the entries of a folder that a conversion to OME-Zarr would not have written."""
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
                    yield from _foreign_files(part)
                elif part.name not in DOCUMENTS:
                    yield part
        elif entry.name not in DOCUMENTS:
            yield entry


def partial_path(path: Path) -> Path:
    """Return the path of an unfinished result: a folder, or a file for PNG.

    Raises
    ------
    TargetExistsError
        If that path exists and is not this user's unfinished conversion.
    TargetWriteError
        If it is not accessible.
    """
    work = path.with_name(f"{path.name}.part")
    with write_errors(work):
        ours = is_own_partial(work, png=kind_of(path) == "png")
    if not ours:
        raise path_taken(work)
    return work


def is_own_partial(work: Path, *, png: bool = False) -> bool:
    """Whether a path is free or holds this user's unfinished conversion.

    Symbolic links are not followed: another user may have planted them in a shared folder.
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


def make_private_folder(folder: Path) -> None:
    """Create a folder that only this user can access, or reuse this user's unfinished one.

    Raises
    ------
    TargetExistsError
        If something else was created there in the meantime.
    """
    try:
        folder.mkdir(0o700)
    except FileExistsError:
        if not is_own_partial(folder):
            raise path_taken(folder) from None


def path_taken(work: Path) -> TargetExistsError:
    """Return the error for a path that is taken by something else."""
    return TargetExistsError(
        f"'{work}' exists but is not an unfinished conversion of yours; "
        "move it away, or choose another name for the target."
    )


def move_into_place(data: Path, path: Path) -> None:
    """Move the finished result to its path.

    The move is atomic unless something exists at `path` and it or `data` is a folder.
    """
    if path.is_dir() or (path.exists() and data.is_dir()):
        old = data.with_name(OLD)
        remove(old)
        path.replace(old)
    data.replace(path)
    # On POSIX, the new directory entry survives a power failure only after fsync of the folder.
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove(path: Path) -> None:
    """Remove a file, a symbolic link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_space(folder: Path, plan: Plan, options: Options, written: int) -> None:
    """Check that the disk has the minimum space that a conversion is expected to need.

    Parameters
    ----------
    folder : Path
        Folder of the unfinished result.
    plan : Plan
        The levels to write.
    options : Options
        The options, for the compression.
    written : int
        Number of bytes already written.

    Raises
    ------
    TargetWriteError
        If the free space is less than an optimistic estimate of the result's size.
    """
    default = DEFAULT_IN_ZARR if options.kind == "ome-zarr" else "deflate"
    needed = 0
    for level in plan.levels:
        if level.missing:
            continue
        raw = level.width * level.height * plan.channels * plan.dtype.itemsize
        if level.copied:
            tiles = [(row, column) for row in range(level.rows) for column in range(level.columns)]
            needed += int(segments_of(level, tiles)[1].sum())
        else:
            lossy = level.coding is not None and level.coding.compression == COMPRESSION.JPEG
            needed += raw // EXPECTED_RATIO["jpeg" if lossy else options.compression or default]
    needed = max(0, needed + SPARE_BYTES - written)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise TargetWriteError(
            f"The disk of '{folder.parent}' has only {byte_size(free)} free, but the conversion "
            f"needs at least {byte_size(needed)}; free some space, or choose another disk."
        )


class PartialResult:
    """An unfinished result: its data and its journal.

    Parameters
    ----------
    folder : Path
        Folder that holds both.
    target : Path
        Final path of the data.
    journal : Journal
        Records the written tiles; closed by `finish`.
    overwrite : bool
        Whether the target may be replaced.

    Attributes
    ----------
    data : Path
        The file or folder that is moved to the target.
    resumable : bool
        Whether another call could continue from the current state.
    notes : list of str
        Messages about the earlier contents of the folder, one sentence each.
    """

    def __init__(self, folder: Path, target: Path, journal: Journal, *, overwrite: bool) -> None:
        self._folder = folder
        self._target = target
        self._overwrite = overwrite
        self.journal = journal
        self.data = folder / DATA
        self.resumable = journal.found
        restarted = f"The conversion in '{folder}' started from scratch, because {journal.changed}."
        self.notes = [restarted] if journal.changed else []

    def finish(self) -> str:
        """Move the finished data to the target, remove the folder and return the checksum."""
        digest = checksum(self.data)
        check_path(self._target, overwrite=self._overwrite)
        move_into_place(self.data, self._target)
        # The journal goes last: it identifies the folder as an unfinished conversion.
        remove(self._folder / OLD)
        self.journal.close()
        shutil.rmtree(self._folder)
        return digest


@contextmanager
def partial_result(
    target: Path,
    identity: Mapping[str, object],
    shapes: Sequence[tuple[int, int, int]],
    *,
    overwrite: bool,
    keep: bool,
    cancelled: Event | None,
) -> Iterator[PartialResult]:
    """Provide a folder for the unfinished result next to a target; on failure, keep or remove it.

    Parameters
    ----------
    target : Path
        Final path of the result.
    identity, shapes
        Arguments of `Journal`.
    overwrite : bool
        Whether the target may be replaced.
    keep : bool
        Whether a failed conversion leaves the folder for the next call to resume from.
    cancelled : threading.Event, optional
        If set when an error occurs, the conversion counts as cancelled.

    Raises
    ------
    TargetExistsError, ConversionError
        If the path of the folder or the target is taken, or another conversion uses the folder.
    TargetWriteError
        If the operating system rejects an operation.
    ConversionCancelledError
        Instead of any other error, if `cancelled` is set.
    """
    folder = partial_path(target)
    with write_errors(target):
        make_private_folder(folder)
        journal = Journal(folder / JOURNAL, identity, shapes)
    work = PartialResult(folder, target, journal, overwrite=overwrite)
    try:
        with write_errors(target), closing(journal):
            yield work
    except Exception as error:
        # The caller may close the slide right after setting `cancelled`; then reading fails with
        # some other error before the conversion sees the event.
        was_cancelled = cancelled is not None and cancelled.is_set()
        if was_cancelled or not (work.resumable and keep) or isinstance(error, TileError):
            # A damaged source stays damaged, so the partial result is useless.
            shutil.rmtree(folder, ignore_errors=True)
        else:
            note = f"The partial result is in '{folder}'; run the conversion again to resume it."
            error.add_note(note)
        if was_cancelled:
            raise ConversionCancelledError from error
        raise
