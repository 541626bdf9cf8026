"""Searching, copying and exporting metadata, and what stays hidden in all of these."""

import json
import threading
from dataclasses import replace

import pytest
from napari.utils.notifications import notification_manager
from qtpy.QtCore import QEvent, QModelIndex, Qt
from qtpy.QtGui import QKeyEvent
from qtpy.QtTest import QTest
from qtpy.QtWidgets import QApplication

from napari_wsigpu import open_slide
from napari_wsigpu.model.privacy import masked
from napari_wsigpu.slide.facts import file_report
from napari_wsigpu.slide.slide import Slide
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.widgets.inspector import metadata_page
from napari_wsigpu.widgets.inspector.disclosure import Disclosure
from napari_wsigpu.widgets.inspector.metadata_page import MetadataPage
from napari_wsigpu.widgets.kit.metadata_model import MOST_ROWS
from tests.widgets.conftest import click
from tests.widgets.test_metadata_model import paths, row


@pytest.fixture
def slide():
    with open_slide(sample_path(), "cpu") as opened:
        yield opened


@pytest.fixture
def tab(jobs, display, slide):
    made = MetadataPage(jobs, lambda problems: None)
    display.addWidget(made.native)
    made.native.resize(400, 500)
    made.show()
    made.show_slide(slide, Disclosure())
    return made


def clipboard():
    return QApplication.clipboard().text()


def search(tab, text):
    tab.search.native.setText(text)
    QTest.keyClick(tab.search.native, Qt.Key_Return)


def choose(tab, path):
    tab.tree.native.setCurrentIndex(row(tab.model, path))


def hidden_values(slide):
    """Values that are private, by what the rules say of the slide's metadata."""
    shown, whole = masked(slide.metadata)["aperio"], slide.metadata["aperio"]
    found = {whole[name] for name in whole if shown[name] != whole[name]}
    found = {value for value in found if value.isprintable()}
    assert found
    return found


def test_search_by_typing(tab, display):
    everything = paths(tab.model)
    QTest.keyClicks(tab.search.native, "appmag")
    assert paths(tab.model) == everything
    display.waitUntil(lambda: paths(tab.model) != everything)
    found = set(paths(tab.model))
    assert {"aperio", "aperio.AppMag"} <= found < set(everything)
    assert "aperio.MPP" not in found
    assert not tab.nothing.visible
    assert tab.tree.native.isExpanded(tab.model.index(0, 0))
    choose(tab, "aperio.AppMag")
    search(tab, "")
    assert tab.model.path(tab.tree.native.currentIndex()) == "aperio.AppMag"
    search(tab, "appmag!")
    assert tab.nothing.visible
    assert "Hidden values are not searched" in tab.nothing.value
    click(tab.private)
    assert tab.nothing.value == metadata_page.NOTHING
    assert not tab.copy_value.enabled
    search(tab, "")
    assert paths(tab.model) == everything
    assert not tab.nothing.visible


def test_the_search_stays_for_the_next_slide(tab, slide):
    search(tab, "appmag")
    tab.show_slide(slide, Disclosure())
    assert "aperio.AppMag" in paths(tab.model)
    assert "aperio.MPP" not in paths(tab.model)


@pytest.fixture
def large(slide):
    """The slide with 12 000 more fields."""
    more = [{"User": f"Jane Doe {i}" if i % 100 else "Hill"} for i in range(12_000)]
    layout = replace(slide.layout, metadata=slide.layout.metadata | {"aperio": {"Parmset": more}})
    with Slide(layout, "cpu") as made:
        yield made


def test_large_metadata_is_masked_once_in_another_thread(tab, large, settled, monkeypatch):
    asked = []

    def noted(slide, *, private):
        asked.append((private, threading.current_thread()))
        return file_report(slide, private=private)

    monkeypatch.setattr(metadata_page, "file_report", noted)
    disclosure = Disclosure()
    tab.show_slide(large, disclosure)
    assert paths(tab.model) == []
    assert tab.nothing.visible
    assert not tab.copy_json.enabled
    settled()
    assert not tab.nothing.visible
    click(tab.copy_json)
    assert json.loads(clipboard()) == masked(large.metadata)
    click(tab.private)
    settled()
    click(tab.private)
    tab.show_slide(None, Disclosure())
    tab.show_slide(large, disclosure)
    assert [private for private, _ in asked] == [False, True]
    assert threading.main_thread() not in [thread for _, thread in asked]
    assert tab.tree.native.isFirstColumnSpanned(tab.model.rowCount() - 1, QModelIndex())
    assert len(paths_without_the_last(tab.model)) == MOST_ROWS


def test_hidden_values_of_a_slide_shown_before_are_gone(tab, large, settled):
    tab.show_slide(large, Disclosure(fields=True))
    tab.show_slide(None, Disclosure())
    settled()
    assert paths(tab.model) == []


def paths_without_the_last(model):
    model.removeRow(model.rowCount() - 1)
    return paths(model)


def test_copies_value_and_path(tab):
    assert not tab.copy_value.enabled
    choose(tab, "aperio.MPP")
    click(tab.copy_value)
    assert clipboard() == "0.4990"
    click(tab.copy_path)
    assert clipboard() == "aperio.MPP"
    assert [action.text() for action in tab.tree.native.actions()] == ["Copy value", "Copy path"]
    choose(tab, "aperio.AppMag")
    tab.tree.native.actions()[0].trigger()
    assert clipboard() == "20"


def test_copies_by_keyboard(tab):
    choose(tab, "aperio.MPP")
    taken = QKeyEvent(QEvent.ShortcutOverride, Qt.Key_C, Qt.ControlModifier)
    taken.ignore()
    QApplication.sendEvent(tab.tree.native, taken)
    assert taken.isAccepted()
    QTest.keyClick(tab.tree.native, Qt.Key_C, Qt.ControlModifier)
    assert clipboard() == "0.4990"
    QTest.keyClick(tab.tree.native, Qt.Key_Down)
    assert tab.tree.native.currentIndex() != row(tab.model, "aperio.MPP")


def test_private_fields_are_masked_everywhere(tab, slide, answer, tmp_path, settled):
    path = tmp_path / "out.json"
    answer(path)
    click(tab.copy_json)
    click(tab.export)
    settled()
    assert json.loads(clipboard()) == json.loads(path.read_text("utf-8")) == masked(slide.metadata)
    for value in hidden_values(slide):
        search(tab, value)
        assert not [p for p in paths(tab.model) if tab.model.value(row(tab.model, p)) == value]


def test_private_fields_are_shown_on_click(tab, slide, answer, tmp_path, settled):
    click(tab.private)
    path = tmp_path / "out.json"
    answer(path)
    click(tab.copy_json)
    click(tab.export)
    settled()
    assert json.loads(clipboard()) == json.loads(path.read_text("utf-8")) == slide.metadata
    for value in hidden_values(slide):
        search(tab, value)
        assert value in [tab.model.value(row(tab.model, p)) for p in paths(tab.model)]
    click(tab.private)
    click(tab.copy_json)
    assert json.loads(clipboard()) == masked(slide.metadata)


def test_disclosure_applies_to_one_slide(tab, slide):
    asked = Disclosure()
    tab.show_slide(slide, asked)
    click(tab.private)
    assert asked.fields
    tab.show_slide(slide, Disclosure())
    assert not tab.private.value
    click(tab.copy_json)
    assert json.loads(clipboard()) == masked(slide.metadata)


def test_export_says_where_it_went_or_why_not(tab, answer, tmp_path, settled):
    notification_manager.records.clear()
    answer("")
    click(tab.export)
    answer(tmp_path / "out.json")
    click(tab.export)
    answer(tmp_path / "nowhere" / "out.json")
    click(tab.export)
    settled()
    saved, failed = sorted((r.message for r in notification_manager.records), reverse=True)
    assert saved == "Saved 'out.json'."
    assert failed.startswith("'out.json' can't be written")
    assert "choose another folder" in failed


def test_can_be_used_without_a_mouse(tab, display):
    tab.native.activateWindow()
    tab.search.native.setFocus()
    display.waitUntil(lambda: QApplication.focusWidget() is tab.search.native)
    order = []
    for _ in range(6):
        order.append(QApplication.focusWidget() or tab.native.focusWidget())
        QTest.keyClick(order[-1], Qt.Key_Tab)
    assert order[:3] == [tab.search.native, tab.tree.native, tab.private.native]
    assert tab.copy_json.native in order
    assert tab.search.native.accessibleName()
    assert tab.tree.native.accessibleName()


def test_keys_lead_from_the_search_to_the_tree_and_back(tab, display):
    tab.native.activateWindow()
    tab.search.native.setFocus()
    everything = paths(tab.model)
    QTest.keyClicks(tab.search.native, "appmag")
    QTest.keyClick(tab.search.native, Qt.Key_Down)
    assert tab.native.focusWidget() is tab.tree.native
    assert tab.model.path(tab.tree.native.currentIndex()) == "aperio"
    QTest.keyClick(tab.tree.native, Qt.Key_Down)
    assert tab.model.path(tab.tree.native.currentIndex()) == "aperio.AppMag"
    QTest.keyClick(tab.search.native, Qt.Key_Escape)
    assert tab.search.native.text() == ""
    display.waitUntil(lambda: paths(tab.model) == everything)
    search(tab, "no such text")
    QTest.keyClick(tab.search.native, Qt.Key_Down)
    assert not tab.tree.native.currentIndex().isValid()
