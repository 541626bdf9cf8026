"""Slides in a folder that the user drops on a window."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from qtpy.QtWidgets import QApplication, QMessageBox

from napari_wsigpu.formats.dicom import dicom
from napari_wsigpu.formats.registry import PATH_FORMATS, SLIDE_ENDINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

MANY = 10
SHARED_ENDINGS = (".tif", ".tiff", ".btf", ".dcm")  # also used by files other than slides
LISTS = (".companion.ome", ".ndpis", ".afi")  # name the other files of a slide
MOST_KINDS = 4


def is_slide_folder(path: Path) -> bool:
    """Whether a folder is itself a slide, and does not contain several DICOM slides."""
    return (
        path.is_dir()
        and any(item.module.probe(path, b"") for item in PATH_FORMATS)
        and len(list(islice(dicom.slide_folders(path), 2))) < 2
    )


def slides_in(folder: Path, files_of: Callable[[str], Collection[str]]) -> list[str]:
    """Return the sorted paths of the slides in a folder, and of DICOM slides in subfolders.

    Parameters
    ----------
    folder : Path
        The folder.
    files_of : callable
        Returns all files of the slide that a path belongs to, or none if it is not a slide. Called
        only for suffixes that other files share with slides.
    """
    found: list[Path] = []
    known: set[str] = set()
    # Lists first, so that the files that they name are not opened as separate slides.
    for path in sorted(folder.absolute().iterdir(), key=lambda path: (not _is_list(path), path)):
        if path.name.startswith(".") or str(path) in known:
            continue
        ending = path.suffix.lower()
        slide = False
        if path.is_dir():
            found += [path] if is_slide_folder(path) else dicom.slide_folders(path)
        elif ending in SHARED_ENDINGS or _is_list(path):
            files = files_of(str(path))
            known.update(files)
            slide = bool(files)
        else:
            slide = path.name.lower().endswith(SLIDE_ENDINGS)
        if slide:
            found.append(path)
    return [str(path) for path in sorted(found)]


def _is_list(path: Path) -> bool:
    return path.name.lower().endswith(LISTS)


def summarize_content(folder: Path) -> str:
    """Summarize the content of a folder without slides."""
    items = list(folder.iterdir())
    if not items:
        return "it is empty"
    kinds = Counter(
        "folders"
        if item.is_dir()
        else f"{item.suffix.lower()} files"
        if item.suffix
        else "files without a suffix"
        for item in items
    )
    parts = [f"{count:,} {kind}" for kind, count in kinds.most_common(MOST_KINDS)]
    rest = kinds.total() - sum(count for _, count in kinds.most_common(MOST_KINDS))
    return f"it holds {', '.join([*parts, f'{rest:,} others'] if rest else parts)}"


def chosen(slides: Sequence[str], folder: Path) -> list[str]:
    """Return the slides to open; ask the user if there are more than `MANY`."""
    if len(slides) <= MANY or QApplication.instance() is None:
        return list(slides)
    question = QMessageBox(QApplication.activeWindow())
    question.setIcon(QMessageBox.Question)
    question.setWindowTitle("Open slides")
    question.setText(f"Open all {len(slides):,} slides of '{folder.name}'?")
    every = question.addButton(f"Open {len(slides):,}", QMessageBox.AcceptRole)
    first = question.addButton(f"Open the first {MANY}", QMessageBox.AcceptRole)
    question.addButton(QMessageBox.Cancel)
    question.setDefaultButton(first)
    question.exec()
    answer = question.clickedButton()
    question.deleteLater()
    if answer is every:
        return list(slides)
    return list(slides[:MANY]) if answer is first else []
