"""The dialogs that ask where to save, and what to open."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from qtpy.QtWidgets import QFileDialog

if TYPE_CHECKING:
    from qtpy.QtWidgets import QWidget

    from napari_wsigpu.slide.slide import Slide


def ask_where_to_save(parent: QWidget, title: str, start: Path, filters: str) -> str:
    """Return the path of a new file, or of one that the user agreed to replace; "" if cancelled.

    Parameters
    ----------
    parent : QWidget
        What the dialog belongs to.
    title : str
        The dialog's title.
    start : Path
        The path that is proposed.
    filters : str
        Kinds of files as Qt writes them; a name without a suffix gets the first of its kind.
    """
    dialog = QFileDialog(parent, title, str(start.parent), filters)
    dialog.setAcceptMode(QFileDialog.AcceptSave)
    dialog.setFileMode(QFileDialog.AnyFile)

    def use_suffix(kind: str) -> None:
        found = re.search(r"\*\.([\w.]+)", kind)
        dialog.setDefaultSuffix(found[1] if found else "")

    use_suffix(filters)
    dialog.filterSelected.connect(use_suffix)
    dialog.selectFile(start.name)
    return _chosen(dialog)


def ask_what_to_open(parent: QWidget, title: str, folder: Path, filters: str) -> str:
    """Return the path of a file that exists; "" if cancelled.

    Parameters
    ----------
    parent : QWidget
        What the dialog belongs to.
    title : str
        The dialog's title.
    folder : Path
        The folder that is shown.
    filters : str
        Kinds of files as Qt writes them.
    """
    dialog = QFileDialog(parent, title, str(folder), filters)
    dialog.setFileMode(QFileDialog.ExistingFile)
    return _chosen(dialog)


def start_folder(last: Path | None, slide: Slide) -> Path:
    """Return where a dialog starts: the folder of the last file, or else of the slide."""
    folder = last or Path(slide.path).parent
    return folder if folder.is_dir() else Path.home()


def _chosen(dialog: QFileDialog) -> str:
    """Ask, and return the path; "" if cancelled."""
    path: str = dialog.selectedFiles()[0] if dialog.exec() else ""
    dialog.deleteLater()
    return path
