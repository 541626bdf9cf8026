"""Threads that feed a device take turns."""

import threading

import pytest

from napari_wsigpu.gpu.device import switching
from napari_wsigpu.gpu.device.switching import Turn

SECONDS = 10


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(switching, "LONGEST_TURN", SECONDS)


def in_thread(work):
    """Start a thread, and return an event that tells when `work` is done."""
    done = threading.Event()

    def run():
        work()
        done.set()

    threading.Thread(target=run, daemon=True).start()
    return done


def enter(turn):
    with turn.taken():
        pass


def test_one_thread_has_the_turn_at_a_time():
    turn, inside, most = Turn(), 0, 0

    def work():
        nonlocal inside, most
        for _ in range(200):
            with turn.taken():
                inside += 1
                most = max(most, inside)
                inside -= 1
                with turn.lent():
                    pass
                inside += 1
                most = max(most, inside)
                inside -= 1

    for done in [in_thread(work) for _ in range(4)]:
        assert done.wait(SECONDS)
    assert most == 1


def test_another_thread_has_the_turn_while_it_is_lent():
    turn = Turn()
    with turn.taken():
        with turn.lent():
            assert in_thread(lambda: enter(turn)).wait(SECONDS)
        waiting = in_thread(lambda: enter(turn))
        assert not waiting.wait(0.05)
    assert waiting.wait(SECONDS)


def test_a_thread_that_is_stopped_in_its_turn_blocks_no_other(monkeypatch):
    monkeypatch.setattr(switching, "LONGEST_TURN", 0.01)
    turn = Turn()
    with turn.taken():
        assert in_thread(lambda: enter(turn)).wait(SECONDS)
        with turn.lent():
            assert in_thread(lambda: enter(turn)).wait(SECONDS)
    monkeypatch.setattr(switching, "LONGEST_TURN", SECONDS)
    assert in_thread(lambda: enter(turn)).wait(SECONDS)


def test_entering_twice_has_no_effect():
    turn = Turn()
    with turn.taken(), turn.taken():
        pass
    assert in_thread(lambda: enter(turn)).wait(SECONDS)


def test_lending_without_the_turn_has_no_effect():
    turn = Turn()
    with turn.lent(), turn.taken():
        assert not in_thread(lambda: enter(turn)).wait(0.05)


def fail(turn, lends):
    with turn.taken():
        if lends:
            with turn.lent():
                raise ValueError("no")
        raise ValueError("no")


@pytest.mark.parametrize("lends", [False, True])
def test_an_error_ends_the_turn(lends):
    turn = Turn()
    with pytest.raises(ValueError, match="no"):
        fail(turn, lends)
    assert in_thread(lambda: enter(turn)).wait(SECONDS)
