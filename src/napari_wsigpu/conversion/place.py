"""The place of a conversion's result: what may not be overwritten, and how it gets its name."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from napari_wsigpu.conversion.options import kind_of
from napari_wsigpu.errors import (
    ConversionError,
    SlideError,
    TargetExistsError,
    TargetWriteError,
)
from napari_wsigpu.formats.zarr_array import DOCUMENTS, read_node

if TYPE_CHECKING:
    from napari_wsigpu.slide import Slide

# What the folder of an unfinished conversion holds.
JOURNAL, DATA, HEAD, OLD = "journal", "data", "head", "old"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def check_target(slide: Slide, path: Path, *, overwrite: bool) -> None:
    """Refuse a place that can't be written, or that holds what shall be kept.

    Raises
    ------
    ConversionError
        If it is, or holds, the slide itself.
    TargetWriteError
        If its folder is not there.
    TargetExistsError
        If it exists and may not be overwritten, or is a folder that holds other files.
    """
    files = [slide.path, *(file.path for file in slide.layout.files)]
    for file in map(Path, files):
        if path == file or (path.exists() and file.exists() and path.samefile(file)):
            raise ConversionError(f"'{path}' is the slide itself; choose another target.")
        if path in file.parents:
            raise ConversionError(f"'{path}' holds the slide itself; choose another target.")
    if not path.parent.is_dir():
        raise TargetWriteError(f"There is no folder '{path.parent}'; make it first.")
    if os.path.lexists(path) and not overwrite:
        raise TargetExistsError(
            f"'{path}' exists already; choose another name, or allow to overwrite it."
        )
    others = _others(path)
    if others:
        raise TargetExistsError(
            f"'{path}' holds other files too, such as '{others[0]}', and is never overwritten; "
            "choose another name."
        )


def _others(path: Path) -> list[str]:
    """Return the names in a folder that a conversion to OME-Zarr does not write."""
    if not path.is_dir():
        return []
    names = sorted(file.name for file in path.iterdir())
    own = (*DOCUMENTS, "associated", "icc_profile")
    return [
        name
        for name in names
        if name not in own and not (name.isdecimal() and _is_level(path / name))
    ]


def _is_level(folder: Path) -> bool:
    try:
        node = read_node(folder)
    except SlideError:  # a damaged one
        return True
    return node is not None and node.is_array


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
    try:
        ours = _is_ours(work, png=kind_of(path) == "png")
    except OSError as error:
        raise write_error(work, error) from error
    if not ours:
        raise TargetExistsError(
            f"'{work}' is in the way, as it holds no unfinished conversion; "
            "move it away, or choose another name for the target."
        )
    return work


def _is_ours(work: Path, *, png: bool) -> bool:
    if not work.exists():
        return True
    if png:
        return work.is_file() and PNG_SIGNATURE.startswith(_beginning(work))
    if not work.is_dir():
        return False
    names = {file.name for file in work.iterdir()}
    return not names or JOURNAL in names <= {JOURNAL, DATA, HEAD, OLD}


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(PNG_SIGNATURE))


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
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_error(path: Path, error: OSError) -> SlideError:
    """Say in one sentence why the operating system refuses a target."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TargetWriteError(f"There is no room left for '{path}'; free some and convert again.")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return TargetWriteError(f"You have no permission to write '{path}'; choose another folder.")
    return TargetWriteError(
        f"'{path}' can't be written ({error.strerror or error}); "
        "choose another folder, or try again."
    )
