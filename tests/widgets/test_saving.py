"""The dialog for saving, answered by hand."""

import pytest
from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QApplication, QFileDialog, QLineEdit, QMessageBox, QWidget

from napari_wsigpu.viewer.window.saving import ask_where_to_save, saved, start_folder

FILTERS = "PNG (*.png);;TIFF (*.tif *.tiff)"


@pytest.fixture
def save_as(display, tmp_path):
    """Type a name, agree or not to replace a file; return the path and how often one was asked."""
    parent = QWidget()
    display.addWidget(parent)

    def ask(name, replaces):
        asked, over = [], []

        def answer():
            if over:
                return
            top = QApplication.activeModalWidget()
            if isinstance(top, QMessageBox):
                asked.append(top.text())
                QTimer.singleShot(20, answer)
                top.button(QMessageBox.Yes if replaces else QMessageBox.No).click()
            elif isinstance(top, QFileDialog) and asked and not replaces:
                top.reject()
            elif isinstance(top, QFileDialog):
                QTimer.singleShot(20, answer)
                top.findChild(QLineEdit).setText(name)
                top.accept()

        QTimer.singleShot(20, answer)
        path = ask_where_to_save(parent, "Save", tmp_path / "proposed.png", FILTERS)
        over.append(True)
        return path, len(asked)

    return ask


def test_a_name_gets_its_suffix(save_as, tmp_path):
    assert save_as("one", replaces=False) == (str(tmp_path / "one.png"), 0)
    assert save_as("one.tiff", replaces=False) == (str(tmp_path / "one.tiff"), 0)


def test_dialogs_start_in_the_folder_that_was_chosen_last(save_as, tmp_path):
    assert save_as("one", replaces=False)[0]
    assert start_folder(str(tmp_path.parent / "slide.svs")) == tmp_path
    tmp_path.rmdir()
    assert start_folder(str(tmp_path.parent / "slide.svs")) == tmp_path.parent


def test_a_file_of_another_type_is_not_replaced(save_as, tmp_path):
    (tmp_path / "one.svs").touch()
    # The dialog asks about the name that was typed; the answer does not matter then.
    assert save_as("one.svs", replaces=True) == (str(tmp_path / "one.svs.png"), 1)
    (tmp_path / "one.svs.png").touch()
    assert save_as("one.svs", replaces=True) == (str(tmp_path / "one.svs.png"), 2)
    assert save_as("two.svs", replaces=True) == (str(tmp_path / "two.svs"), 0)


@pytest.mark.parametrize("name", ["one", "one.png"])
def test_a_file_is_replaced_only_if_the_user_agrees(save_as, tmp_path, name):
    (tmp_path / "one.png").touch()
    assert save_as(name, replaces=False) == ("", 1)
    assert save_as(name, replaces=True) == (str(tmp_path / "one.png"), 1)


def test_files_and_folders_are_named_with_their_size(tmp_path):
    folder, file = tmp_path / "a.zarr", tmp_path / "b.png"
    (folder / "0").mkdir(parents=True)
    (folder / "0" / "c").write_bytes(bytes(1500))
    file.write_bytes(bytes(500))
    assert saved(folder) == f"Saved 'a.zarr' (1.5 kB) in '{tmp_path}'."
    assert saved(file, folder) == f"Saved 'b.png' and 1 more (2 kB) in '{tmp_path}'."
