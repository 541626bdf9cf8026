"""The folder of an unfinished conversion: kept for the next call, put in place, or removed."""

from __future__ import annotations

import shutil
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from napari_wsigpu.conversion.checksum import checksum
from napari_wsigpu.conversion.journal import Journal
from napari_wsigpu.conversion.paths import (
    DATA,
    JOURNAL,
    OLD,
    check_path,
    make_own,
    put_in_place,
    refused,
    remove,
    work_of,
)
from napari_wsigpu.model.errors import ConversionCancelledError, TileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from threading import Event


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
