"""Folders of slides, as people drop them on a window."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from qtpy.QtWidgets import QApplication, QMessageBox

from napari_wsigpu.formats.registry import PATH_FORMATS, SLIDE_ENDINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

MANY = 10
SHARED_ENDINGS = (".tif", ".tiff", ".btf", ".dcm")  # with files that are no slides
MOST_KINDS = 4


def is_slide_folder(path: Path) -> bool:
    """Whether a folder is one slide by itself."""
    return path.is_dir() and any(item.module.probe(path, b"") for item in PATH_FORMATS)


def slides_in(folder: Path, files_of: Callable[[str], Collection[str]]) -> list[str]:
    """Return the slides that lie in a folder, by name, each once; not those in folders below.

    Parameters
    ----------
    folder : Path
        The folder.
    files_of : callable
        Returns the paths of a slide's files, none of what is no slide; asked by one of them whose
        ending does not tell.
    """
    found: list[str] = []
    known: set[str] = set()
    for path in sorted(folder.absolute().iterdir()):
        if path.name.startswith(".") or str(path) in known:
            continue
        ending = path.suffix.lower()
        if path.is_dir():
            slide = is_slide_folder(path)
        elif ending in SHARED_ENDINGS:
            files = files_of(str(path))
            known.update(files)
            slide = bool(files)
        else:
            slide = ending in SLIDE_ENDINGS
        if slide:
            found.append(str(path))
    return found


def what_is_in(folder: Path) -> str:
    """Say in a few words what a folder without slides holds."""
    items = list(folder.iterdir())
    if not items:
        return "it is empty"
    kinds = Counter(
        "folders" if item.is_dir() else item.suffix.lower() or "files without an ending"
        for item in items
    )
    parts = [f"{count:,} {kind}" for kind, count in kinds.most_common(MOST_KINDS)]
    rest = kinds.total() - sum(count for _, count in kinds.most_common(MOST_KINDS))
    return f"it holds {', '.join([*parts, f'{rest:,} others'] if rest else parts)}"


def chosen(slides: Sequence[str], folder: Path) -> list[str]:
    """Return the slides to be opened: all, or what the user answers if they are many."""
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
