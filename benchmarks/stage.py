"""Shared by the benchmarks of the viewer: a display, separate settings, a slow decoder."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from napari import Viewer
    from numpy.typing import NDArray

CANVAS = (1200, 950)
SCREEN, LARGE_SCREEN = "2000x1300x24", "3840x2160x24"
BACKGROUND = "magenta"
STEP_MS = 16


def ensure_display(screen: str = SCREEN) -> None:
    """Without a display, run this program again under Xvfb and exit with its status."""
    if sys.platform in ("win32", "darwin") or os.environ.get("DISPLAY"):
        return
    xvfb = shutil.which("xvfb-run")
    if xvfb is None:
        raise SystemExit("napari needs a display; install Xvfb.")
    command = [xvfb, "-a", "-s", f"-screen 0 {screen}", sys.executable, *sys.orig_argv[1:]]
    raise SystemExit(subprocess.run(command, check=False).returncode)


@contextmanager
def own_settings(*, gpu: bool = False) -> Iterator[dict[str, str]]:
    """Yield an environment with separate napari settings, and without CUDA unless `gpu`.

    The slide inspector stays closed, because its dock would narrow the canvas.
    """
    with TemporaryDirectory() as folder:
        (Path(folder) / "napari-wsigpu.yaml").write_text(
            "slides:\n  open_inspector: false\n", encoding="utf-8"
        )
        config = str(Path(folder) / "settings.yaml")
        hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
        yield {**os.environ, "NAPARI_CONFIG": config, **hidden}


def run_part(module: str, arguments: Sequence[str], timeout: float, *, gpu: bool = False) -> None:
    """Run a module in a fresh process with separate napari settings."""
    with own_settings(gpu=gpu) as environment:
        command = [sys.executable, "-m", module, *arguments]
        subprocess.run(command, env=environment, check=True, timeout=timeout)


class SlowDecoder:
    """Delay the decoding of each stored tile on the CPU.

    Parameters
    ----------
    slow : bool
        Whether tiles will be delayed. Python decodes them then, one by one, as it decodes all kinds
        that take long.

    Attributes
    ----------
    seconds : float
        Delay per tile; the decoding thread sleeps.
    """

    def __init__(self, *, slow: bool) -> None:
        from napari_wsigpu import native
        from napari_wsigpu.codecs import cpu, tile
        from napari_wsigpu.viewer.contributions import slide_reader as reader  # noqa: F401  brings in all that may decode

        self.seconds = 0.0
        self._decode: Callable[..., NDArray[Any]] = tile.decode_tile
        # Disable the native path, which this class cannot delay.
        vars(cpu)["whole_tile_decoder"] = lambda batch: None
        for name, module in list(sys.modules.items()):
            if name.startswith("napari_wsigpu"):
                for variable, value in list(vars(module).items()):
                    if value is self._decode:
                        setattr(module, variable, self._decode_late)
        if slow:
            vars(native)["core"] = None

    def _decode_late(self, *arguments: Any) -> NDArray[Any]:
        if self.seconds:
            time.sleep(self.seconds)
        return self._decode(*arguments)


def size_of(text: str) -> tuple[int, int]:
    """Return the width and height in an argument of a command line."""
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text} is not like 1920x1200")
    return int(width), int(height)


def open_viewer(window: tuple[int, int] | None = None) -> Viewer:
    """Open napari with a background colour that no slide has.

    The window has the given size; by default it fits a canvas of the size `CANVAS`.
    """
    import napari

    viewer = napari.Viewer()
    viewer.canvas.background_color_override = BACKGROUND
    if window is None:
        fit_canvas(viewer)
    else:
        viewer.window._qt_window.resize(*window)
    return viewer


def fit_canvas(viewer: Viewer, size: tuple[int, int] = CANVAS) -> None:
    """Resize the window until the canvas has a size."""
    window = viewer.window._qt_window
    for _ in range(5):
        settle(0.3)
        width, height = scene_canvas(viewer).size
        if (width, height) == size:
            return
        window.resize(window.width() + size[0] - width, window.height() + size[1] - height)
    raise RuntimeError(f"The canvas is {width} x {height}; a larger screen is needed.")


def scene_canvas(viewer: Viewer) -> Any:
    """Return the canvas that vispy draws on."""
    return viewer.window._qt_viewer.canvas._scene_canvas


def settle(seconds: float) -> None:
    """Let Qt's event loop run."""
    from qtpy.QtCore import QEventLoop, QTimer

    loop = QEventLoop()
    QTimer.singleShot(round(seconds * 1e3), loop.quit)
    loop.exec()


def glide(move: Callable[[float], None], seconds: float) -> None:
    """Call `move` with the elapsed seconds every 16 ms, and finally with `seconds`."""
    from qtpy.QtCore import QEventLoop, Qt, QTimer

    loop, timer = QEventLoop(), QTimer()
    begin = time.perf_counter()

    def step() -> None:
        passed = time.perf_counter() - begin
        move(min(passed, seconds))
        if passed >= seconds:
            timer.stop()
            loop.quit()

    timer.setTimerType(Qt.TimerType.PreciseTimer)
    timer.timeout.connect(step)
    timer.start(STEP_MS)
    loop.exec()
