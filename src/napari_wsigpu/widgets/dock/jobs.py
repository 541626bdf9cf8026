"""Slow jobs of a dock, which run off the main thread."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qtpy.QtCore import QObject, Qt, Signal

from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.viewer.window.main_window import single_shot
from napari_wsigpu.viewer.window.notifications import show_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari_wsigpu.slide.slide import Slide

MOST_THREADS = 2
PATIENCE_MS = 300


@dataclass(eq=False)
class Job:
    """One job, with the callbacks that receive its result or error."""

    title: str
    slide: Slide
    work: Callable[[], Any]
    done: Callable[[Any], None]
    failed: Callable[[str], None] | None
    owner: object | None
    is_active: bool = True
    is_slide_removed: bool = False
    future: Future[Any] = field(init=False)

    def run(self) -> Any:
        """Run the job; called in the worker thread."""
        try:
            return self.work()
        finally:
            # The job may have opened the slide's files again after the slide was released.
            if self.is_slide_removed:
                self.slide.release()


class Jobs(QObject):  # type: ignore[misc]
    """Runs jobs on slides, and passes their results to the main thread.

    The threads live as long as there is work. The object has no Qt parent, so it can outlive the
    dock while an uninterruptible job finishes. Call `close` when the dock is deleted.

    Attributes
    ----------
    slow : Signal(str)
        Emits the title of a job that takes a noticeable amount of time, and "" when all jobs are
        done.
    """

    slow = Signal(str)
    _ended = Signal(object)

    def __init__(self) -> None:
        super().__init__()
        self._executor: ThreadPoolExecutor | None = None
        self._running: list[Job] = []
        self._closed = False
        self._slow_timer = single_shot(self._report_slow, PATIENCE_MS, self)
        # Emitted in a worker thread, or in the main one if the job was cancelled: always queued, so
        # that `_deliver` never runs while `drop` iterates over the jobs.
        self._ended.connect(self._deliver, Qt.QueuedConnection)

    def start(
        self,
        title: str,
        slide: Slide,
        work: Callable[[], Any],
        done: Callable[[Any], None],
        failed: Callable[[str], None] | None = None,
        owner: object | None = None,
    ) -> None:
        """Start a job.

        Parameters
        ----------
        title : str
            Text for the progress bar.
        slide : Slide
            The slide that the job reads. If it is removed from the viewer before the job ends, the
            files that the job opened are closed again.
        work : callable
            Called in another thread.
        done : callable
            Called with the result in the main thread.
        failed : callable, optional
            Called with one sentence in the main thread, in addition to a notification.
        owner : object, optional
            Key for `drop`. A job without an owner always runs to its end.
        """
        job = Job(title, slide, work, done, failed, owner)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(MOST_THREADS, "slide-inspector")
        if not self._running:
            self._slow_timer.start()
        # List the job before it is submitted: it may end immediately.
        self._running.append(job)
        job.future = self._executor.submit(job.run)
        job.future.add_done_callback(lambda _: self._report_end(job))

    def drop(self, owner: object) -> None:
        """Drop an owner's jobs, and discard their results."""
        for job in self._running:
            if job.owner is owner:
                _drop(job)

    def drop_slide(self, slide: Slide) -> None:
        """Drop the jobs of a slide that was removed from the viewer, and release the slide."""
        for job in self._running:
            if job.slide is slide:
                job.is_slide_removed = True
                _drop(job)
        slide.release()

    def close(self) -> None:
        """Drop all jobs that have an owner; if one is running, its result is discarded.

        This must not touch Qt: when Python exits, the timer may be deleted before the dock.
        """
        self._closed = True
        for job in self._running:
            job.is_slide_removed = True
            _drop(job)
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None

    def _report_end(self, job: Job) -> None:
        if job.is_active or not self._closed:
            self._ended.emit(job)

    def _report_slow(self) -> None:
        if not self._closed:
            self.slow.emit(self._running[0].title)

    def _deliver(self, job: Job) -> None:
        self._running.remove(job)
        # If the job ended just before `close`, the widgets that show its title may be deleted.
        if not self._running and not self._closed:
            self._slow_timer.stop()
            self.slow.emit("")
            if self._executor is not None:
                self._executor.shutdown(wait=False)
                self._executor = None
        if not job.is_active:
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
        job.is_active = False
        job.future.cancel()
