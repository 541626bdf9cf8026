"""Slow work of a dock, off the main thread."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qtpy.QtCore import QObject, Qt, QTimer, Signal

from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.viewer.notifications import show_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari_wsigpu.slide.slide import Slide

MOST_THREADS = 2
PATIENCE_MS = 300


@dataclass(eq=False)
class Job:
    """One piece of work, with who wants its result."""

    what: str
    slide: Slide
    work: Callable[[], Any]
    done: Callable[[Any], None]
    failed: Callable[[str], None] | None
    owner: object | None
    wanted: bool = True
    slide_has_left: bool = False
    future: Future[Any] = field(init=False)

    def run(self) -> Any:
        """Do the work; called off the main thread."""
        try:
            return self.work()
        finally:
            if self.slide_has_left:
                self.slide.release()


class Jobs(QObject):  # type: ignore[misc]
    """Runs work on slides and hands its results to the main thread.

    Its threads live as long as there is work. It has no Qt parent, so that it may outlive
    the dock by the work that can't be interrupted; `close` has to be called.

    Attributes
    ----------
    slow : Signal(str)
        What takes longer than people like to wait without a word; "" when it is over.
    """

    slow = Signal(str)
    _ended = Signal(object)

    def __init__(self) -> None:
        super().__init__()
        self._executor: ThreadPoolExecutor | None = None
        self._running: list[Job] = []
        self._closed = False
        self._patience = QTimer(self)
        self._patience.setSingleShot(True)
        self._patience.setInterval(PATIENCE_MS)
        self._patience.timeout.connect(self._say)
        self._ended.connect(self._deliver, Qt.QueuedConnection)

    def start(
        self,
        what: str,
        slide: Slide,
        work: Callable[[], Any],
        done: Callable[[Any], None],
        failed: Callable[[str], None] | None = None,
        owner: object | None = None,
    ) -> None:
        """Start work.

        Parameters
        ----------
        what : str
            What is being done, for the progress bar.
        slide : Slide
            The slide that it reads. If it leaves the viewer meanwhile, what the work opened is
            closed again.
        work : callable
            Called in another thread.
        done : callable
            Called with the result in the main thread.
        failed : callable, optional
            Called with one sentence in the main thread, beside a notification.
        owner : object, optional
            Who can drop the work. Without an owner it is finished in any case.
        """
        job = Job(what, slide, work, done, failed, owner)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(MOST_THREADS, "slide-inspector")
        if not self._running:
            self._patience.start()
        self._running.append(job)
        job.future = self._executor.submit(job.run)
        job.future.add_done_callback(lambda _: self._tell(job))

    def drop(self, owner: object) -> None:
        """Forget the work of an owner: its results are no longer wanted."""
        for job in self._running:
            if job.owner is owner:
                _drop(job)

    def let_go(self, slide: Slide) -> None:
        """Take note that a slide has left the viewer: work on it opens its file no more."""
        for job in self._running:
            if job.slide is slide:
                job.slide_has_left = True
                _drop(job)
        slide.release()

    def close(self) -> None:
        """Drop all work; what can't be interrupted ends without a trace.

        Touches nothing of Qt: as Python ends, the timer may be gone before the dock is.
        """
        self._closed = True
        for job in self._running:
            job.slide_has_left = True
            _drop(job)
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None

    def _tell(self, job: Job) -> None:
        if job.wanted or not self._closed:
            self._ended.emit(job)

    def _say(self) -> None:
        if not self._closed:
            self.slow.emit(self._running[0].what)

    def _deliver(self, job: Job) -> None:
        self._running.remove(job)
        if not self._running:
            self._patience.stop()
            self.slow.emit("")
            if self._executor is not None:
                self._executor.shutdown(wait=False)
                self._executor = None
        if not job.wanted:
            return
        error = job.future.exception()
        if error is None:
            job.done(job.future.result())
            return
        if job.failed is not None:
            job.failed(str(error))
        if not isinstance(error, SlideError):
            raise error
        show_error(error.message)


def _drop(job: Job) -> None:
    if job.owner is not None:
        job.wanted = False
        job.future.cancel()
