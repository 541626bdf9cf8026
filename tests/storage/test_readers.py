"""`Readers` waits for all reads of other threads, and never for interrupted ones."""

import dis
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import SlideClosedError
from napari_wsigpu.storage.readers import Readers
from tests.writers import slides

INTERRUPTED = {"slide.py", "readers.py", "file_source.py"}


def test_waits_for_other_threads():
    readers = Readers("slide")
    inside, end, order = threading.Event(), threading.Event(), []

    def read() -> None:
        with readers:
            inside.set()
            end.wait(10)
            order.append("read")

    thread = threading.Thread(target=read)
    thread.start()
    inside.wait(10)
    threading.Timer(0.05, end.set).start()
    with readers.exclusive():
        order.append("closed")
    thread.join()
    assert order == ["read", "closed"]


def test_another_thread_may_end_a_read():
    readers = Readers("slide")
    reader = readers.enter()
    thread = threading.Thread(target=readers.leave, args=(reader,))
    thread.start()
    thread.join()
    done = threading.Thread(target=lambda: readers.exclusive().__enter__(), daemon=True)
    done.start()
    done.join(10)
    assert not done.is_alive()


def test_closed():
    readers = Readers("slide")
    readers.closed = True
    with pytest.raises(SlideClosedError, match="'slide' was closed; open the slide again"), readers:
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(sys.implementation.name != "cpython", reason="traces CPython's steps")
def test_interrupted_anywhere(tmp_path):
    """After Ctrl-C at any point of a read, the slide can still be read and closed."""
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(60, 60), ())
    left = 0
    calls = dis.opmap["CALL"], dis.opmap["CALL_FUNCTION_EX"]
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if Path(frame.f_code.co_filename).name not in INTERRUPTED:
            return None
        frame.f_trace_opcodes = True
        if event == "call" or (event == "opcode" and last.get(frame) in calls):
            left -= 1
            if left == 0:
                last.clear()
                raise KeyboardInterrupt
        if event == "opcode":
            last[frame] = frame.f_code.co_code[frame.f_lasti]
        return trace

    before = sys.gettrace()
    number, interrupted = 0, True
    while interrupted:
        number, interrupted = number + 1, False
        with open_slide(path, "cpu") as slide:
            left = number
            try:
                sys.settrace(trace)
                slide.read_region((0, 0), (50, 50))
                slide.read_region((-5, 0), (50, 50))  # uses a plan
            except KeyboardInterrupt:
                interrupted = True
            finally:
                sys.settrace(before)
            other = threading.Thread(target=slide.read_region, args=((0, 0), (50, 50)), daemon=True)
            other.start()
            other.join(10)
            assert not other.is_alive(), f"a lock stayed locked after {number} steps"
    assert number > 50
