"""A folder of slides is dropped on a window."""

import shutil

import pytest
from napari.utils.notifications import notification_manager
from qtpy.QtCore import QMimeData, QPointF, Qt, QTimer, QUrl
from qtpy.QtGui import QDropEvent
from qtpy.QtWidgets import QApplication, QMessageBox

from napari_wsigpu.model.errors import NotASlideError
from napari_wsigpu.viewer.contributions import slide_folder as folder_module
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.window.settings import prefer_this_reader


@pytest.fixture
def folder(tmp_path):
    """A folder of slides and other things."""
    made = tmp_path / "slides"
    made.mkdir()

    def fill(count):
        for index in range(count):
            (made / f"case {index:02}.svs").symlink_to(sample_path())
        (made / "notes.txt").write_text("x")
        (made / ".hidden.svs").symlink_to(sample_path())
        (made / "below").mkdir()
        return made

    return fill


def drop(viewer, path):
    """Drop a path on the window as a file manager does."""
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(path))])
    event = QDropEvent(QPointF(50, 50), Qt.CopyAction, data, Qt.LeftButton, Qt.NoModifier)
    viewer.window._qt_viewer.dropEvent(event)


def answer(button_text):
    """Click a button of the question that comes."""

    def click():
        boxes = [
            item
            for item in QApplication.topLevelWidgets()
            if isinstance(item, QMessageBox) and item.isVisible()  # others are gone soon
        ]
        buttons = [item for box in boxes for item in box.buttons() if item.text() == button_text]
        if buttons:
            buttons[0].click()
        else:
            QTimer.singleShot(50, click)

    QTimer.singleShot(50, click)


def names(viewer):
    return [layer.name for layer in viewer.layers]


def test_its_slides_are_opened(viewer, folder):
    viewer.open(folder(3), plugin="napari-wsigpu")
    assert names(viewer) == ["case 00", "case 01", "case 02"]


def test_many_slides_are_opened_only_after_a_question(viewer, folder, monkeypatch):
    path = folder(3)
    monkeypatch.setattr(folder_module, "MANY", 2)
    for button, count in (("Open 3", 3), ("Open the first 2", 2), ("Cancel", 0)):
        answer(button)
        viewer.open(path, plugin="napari-wsigpu")
        assert len(viewer.layers) == count
        viewer.layers.clear()


def test_a_damaged_slide_is_named_and_the_others_open(viewer, folder):
    path = folder(2)
    (path / "broken.svs").write_bytes(b"II*\0")
    viewer.open(path, plugin="napari-wsigpu")
    assert names(viewer) == ["case 00", "case 01"]
    said = [item.message for item in notification_manager.records if item.severity == "warning"]
    assert len(said) == 1
    assert "'broken.svs'" in said[0]
    assert str(path) not in said[0]


def test_error_for_a_folder_without_slides_lists_its_content(viewer, tmp_path):
    for name in ("a.jpg", "b.JPG", "c.txt", "d"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "sub").mkdir()
    with pytest.raises(NotASlideError) as caught:
        viewer.open(tmp_path, plugin="napari-wsigpu")
    assert "2 .jpg" in str(caught.value)
    assert "1 folders" in str(caught.value)
    assert caught.value.message.startswith(f"'{tmp_path.name}' holds no slide")


def test_an_empty_folder_is_said_to_be_empty(viewer, tmp_path):
    with pytest.raises(NotASlideError, match="it is empty"):
        viewer.open(tmp_path, plugin="napari-wsigpu")
    shutil.rmtree(tmp_path)


def test_dropped_on_the_window(viewer, folder):
    prefer_this_reader()
    path = folder(2)
    viewer.window._qt_window.show()
    from napari.settings import get_settings

    get_settings().plugins.extension2reader |= {f"{path}/*": "napari-wsigpu"}
    drop(viewer, path)
    assert names(viewer) == ["case 00", "case 01"]
