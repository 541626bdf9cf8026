"""Dialogs for choosing a file to save or to open."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from qtpy.QtWidgets import QFileDialog, QMessageBox

from napari_wsigpu.model.units import byte_size
from napari_wsigpu.viewer.window.main_window import may_discard
from napari_wsigpu.viewer.window.notifications import show_info

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qtpy.QtWidgets import QWidget

# Folder of the file that the user chose last, in any dialog.
_last: list[Path] = []
GEOJSON = "GeoJSON (*.geojson *.geojson.gz *.json)"
GEOJSON_TO_READ = "GeoJSON (*.geojson *.geojson.gz *.json *.zip)"


def ask_where_to_save(parent: QWidget, title: str, start: Path, filters: str) -> str:
    """Ask for a file to write; return "" if the user cancels.

    Qt asks for confirmation if the file exists. If its name ends like none of the file types, as
    that of a slide does, it is not replaced: the path gets the suffix of the chosen type.

    Parameters
    ----------
    parent : QWidget
        The dialog's parent.
    title : str
        The dialog's title.
    start : Path
        The proposed path.
    filters : str
        File types in Qt's syntax; a name without a suffix gets the first suffix of its type.
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
    path = _chosen(dialog)
    suffixes = tuple(re.findall(r"\*(\.[\w.]+)", filters))
    if path.lower().endswith(suffixes) or not Path(path).is_file():
        return path
    path = f"{path}.{dialog.defaultSuffix()}"
    target = Path(path)
    return path if not os.path.lexists(target) or may_replace(parent, title, [target]) else ""


def may_replace(parent: QWidget, title: str, paths: Sequence[Path]) -> bool:
    """Ask whether to replace existing files that the dialog for saving has not asked about."""
    names = f"'{paths[0].name}'"
    if len(paths) > 1:
        names = f"{len(paths):,} files, such as {names},"
    text = f"{names} already exist{'s' if len(paths) == 1 else ''} in '{paths[0].parent}'. "
    text += f"Replace {'it' if len(paths) == 1 else 'them'}?"
    return may_discard(parent, title, text, QMessageBox.Yes)


def ask_for_file(parent: QWidget, title: str, folder: Path, filters: str) -> str:
    """Ask for an existing file; return "" if the user cancels.

    Parameters
    ----------
    parent : QWidget
        The dialog's parent.
    title : str
        The dialog's title.
    folder : Path
        The initial folder.
    filters : str
        File types in Qt's syntax.
    """
    dialog = QFileDialog(parent, title, str(folder), filters)
    dialog.setFileMode(QFileDialog.ExistingFile)
    return _chosen(dialog)


def ask_for_folder(parent: QWidget, title: str, folder: Path) -> str:
    """Ask for an existing folder; return "" if the user cancels."""
    dialog = QFileDialog(parent, title, str(folder))
    dialog.setFileMode(QFileDialog.Directory)
    return _chosen(dialog)


def saved(first: Path, *others: Path) -> str:
    """State which files, or folders of OME-Zarr, were written, how large they are, and where."""
    files = (each for path in (first, *others) for each in (path, *path.rglob("*")))
    size = byte_size(sum(each.stat().st_size for each in files if each.is_file()))
    more = f" and {len(others)} more" if others else ""
    return f"Saved '{first.name}'{more} ({size}) in '{first.parent}'."


def say_saved(path: str, result: object) -> None:
    """Tell the user that a job has written a file."""
    show_info(f"Saved '{Path(path).name}'.")


def start_folder(slide: str) -> Path:
    """Return the folder chosen last, else that of the slide at a path, else the home folder."""
    return next(filter(Path.is_dir, (*_last, Path(slide).parent)), Path.home())


def _chosen(dialog: QFileDialog) -> str:
    """Run a dialog; return the path, or "" if the user cancels."""
    path: str = dialog.selectedFiles()[0] if dialog.exec() else ""
    if path:
        _last[:] = [Path(path).parent]
    # Otherwise its parent, a dock, would own it until the window closes.
    dialog.deleteLater()
    return path
