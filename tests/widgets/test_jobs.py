"""Jobs off the main thread: their callbacks, and cleanup."""

import threading

import pytest
from napari.utils.notifications import notification_manager
from qtpy.QtCore import QObject

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from tests.widgets.conftest import workers

SENTENCE = "The label is damaged; get a fresh copy."


@pytest.fixture
def slide():
    with open_slide(sample_path(), "cpu") as opened:
        yield opened


def fail():
    raise SlideError(SENTENCE)


def test_works_elsewhere_and_tells_here(jobs, slide, settled):
    told = []
    jobs.start(
        "Working",
        slide,
        threading.current_thread,
        lambda thread: told.append((thread, threading.current_thread())),
    )
    settled()
    [(worked, heard)] = told
    assert heard is threading.main_thread()
    assert worked is not heard


def test_a_failure_is_one_sentence_for_the_owner_and_the_user(jobs, slide, settled):
    notification_manager.records.clear()
    done, failed = [], []
    jobs.start("Working", slide, fail, done.append, failed.append)
    settled()
    assert done == []
    assert failed == [SENTENCE]
    assert [record.message for record in notification_manager.records] == [SENTENCE]


def test_a_bug_is_not_hidden(jobs, slide, settled, display):
    failed = []
    with display.capture_exceptions() as raised:
        jobs.start("Working", slide, lambda: 1 / 0, print, failed.append)
        settled()
    assert [kind for kind, *_ in raised] == [ZeroDivisionError]
    assert failed == ["division by zero"]


def test_dropped_work_is_not_heard_of(jobs, slide, settled, gate):
    owner, other, told = QObject(), QObject(), []
    jobs.start("Working", slide, gate.wait, told.append, owner=owner)
    jobs.start("Working", slide, lambda: "other", told.append, owner=other)
    jobs.drop(owner)
    gate.set()
    settled()
    assert told == ["other"]


def test_a_slide_that_left_stays_let_go(jobs, slide, settled, gate, handles_of):
    told, owner = [], QObject()

    def read():
        gate.wait()
        return slide.levels[0][:256, :256].shape

    jobs.start("Reading", slide, read, told.append, owner=owner)
    jobs.drop_slide(slide)
    gate.set()
    settled()
    assert told == []
    assert handles_of(sample_path()) == 0
    assert slide.stats()["decoded"]["cpu"] > 0


def test_work_in_flight_when_all_is_closed_leaves_nothing(
    jobs, slide, settled, gate, handles_of, leaves_nothing
):
    told, owner = [], QObject()
    for _ in range(5):
        jobs.start("Reading", slide, lambda: (gate.wait(), slide.levels[0][:9]), told.append,
                   owner=owner)  # fmt: skip
    jobs.close()
    gate.set()
    settled()
    assert told == []
    assert handles_of(sample_path()) == 0


def test_work_without_an_owner_is_finished(jobs, slide, settled, gate):
    told = []
    jobs.start("Saving", slide, lambda: gate.wait() and "saved", told.append)
    jobs.drop_slide(slide)
    jobs.close()
    gate.set()
    settled()
    assert told == ["saved"]


def test_nothing_is_shown_once_all_is_closed(jobs, slide, settled, gate):
    said = []
    jobs.slow.connect(said.append)
    jobs.start("Saving", slide, gate.wait, lambda _: None)
    jobs.close()
    gate.set()
    settled()
    assert said == []


def test_only_slow_work_is_shown(jobs, slide, settled, gate, display):
    said = []
    jobs.slow.connect(said.append)
    jobs.start("Reading", slide, lambda: None, lambda _: None)
    settled()
    assert said == [""]
    with display.waitSignal(jobs.slow, timeout=2000) as shown:
        jobs.start("Saving", slide, gate.wait, lambda _: None)
    assert shown.args == ["Saving"]
    gate.set()
    settled()
    assert said[-1] == ""
    display.wait(400)
    assert said[-1] == ""


def test_idle_jobs_have_no_threads(jobs, slide, settled):
    jobs.start("Working", slide, lambda: None, lambda _: None)
    assert workers()
    settled()
    assert not workers()
