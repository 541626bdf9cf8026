"""Use two slides in one real viewer at random for minutes, and count what is not released.

Usage: ``python -m benchmarks.soaking --slides A B --minutes 10 --json FILE``; `soak.py` runs this
in a separate process.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import json
import logging
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari.layers import Layer
from napari.utils.notifications import notification_manager
from qtpy.QtCore import QTimer, qInstallMessageHandler

import napari_wsigpu
from benchmarks.stage import ensure_display, fit_canvas, glide, open_viewer, scene_canvas, settle
from benchmarks.walking import Leg, Pose, go_to
from napari_wsigpu.slide import runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from napari import Viewer

PACKAGE = str(Path(napari_wsigpu.__file__).parent)
SAMPLE_EVERY = 10.0
REST = 1.5
MB = 1 << 20
LARGEST_ZOOM = 2.0


class MallocInfo(ctypes.Structure):
    """The structure that glibc's `mallinfo2` returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


class Complaints:
    """Count log messages and warnings, separately for the plugin and for other code.

    Attributes
    ----------
    ours, others : Counter of str
        Number of occurrences of each message.
    """

    def __init__(self) -> None:
        self.ours: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        handler = logging.Handler(logging.WARNING)
        handler.emit = self._on_log  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        warnings.simplefilter("always")
        warnings.showwarning = self._on_warning  # type: ignore[assignment]
        sys.excepthook = partial(self._on_error, "main thread")
        threading.excepthook = lambda args: self._on_error(
            "thread", args.exc_type, args.exc_value, args.exc_traceback
        )
        notification_manager.notification_ready.connect(
            lambda said: self._add(f"notification: {said.severity}: {said.message}")
        )
        qInstallMessageHandler(lambda kind, context, text: self._add(f"Qt: {text}"))

    def _add(self, text: str, *files: str | None) -> None:
        stack = [frame.filename for frame in traceback.extract_stack()]
        plugin = any(file and file.startswith(PACKAGE) for file in (*stack, *files))
        (self.ours if plugin else self.others)[text] += 1

    def _on_log(self, record: logging.LogRecord) -> None:
        by_plugin = record.name.startswith(napari_wsigpu.__name__)
        position = PACKAGE if by_plugin else record.pathname
        self._add(f"log: {record.name}: {record.getMessage()}", position)

    def _on_warning(
        self, message: Warning | str, category: type[Warning], filename: str, *rest: object
    ) -> None:
        self._add(f"{category.__name__}: {message}", filename)

    def _on_error(
        self, where: str, kind: type[BaseException], error: BaseException | None, trace: Any
    ) -> None:
        last = traceback.extract_tb(trace)[-1:]
        position = f" at {last[0].name}" if last else ""
        self._add(f"ERROR in {where}: {kind.__name__}: {error}{position}", PACKAGE)


class Walker:
    """Perform random user actions; after each one, both slides are visible in 2D.

    Parameters
    ----------
    viewer : Viewer
        Empty.
    slides : list of Path
        Opened at the start and again later.
    seed : int
        Seed of the random actions.
    """

    def __init__(self, viewer: Viewer, slides: list[Path], seed: int) -> None:
        self._viewer = viewer
        self._random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self._actions: dict[Callable[[], None], int] = {
            self._pan: 8,
            self._zoom: 6,
            self._jump: 4,
            self._remove_and_undo: 1,
            self._duplicate: 1,
            self._open_again: 1,
            self._grid: 1,
            self._three_dimensions: 1,
            self._hide: 1,
        }
        # napari 0.9.2 frees the GPU objects of a removed layer without making its context current,
        # which crashes in Mesa's OpenGL, whatever the layer is.
        viewer.layers.events.removing.connect(lambda: scene_canvas(viewer).set_current())
        for slide in slides:
            viewer.open(slide, plugin="napari-wsigpu")
        fit_canvas(viewer)
        viewer.reset_view()
        self._fit = viewer.scene.camera.zoom * float(viewer.layers[0].scale[-1])
        self._pose = self._anywhere()

    def act(self) -> None:
        """Perform one action."""
        action = self._random.choices(list(self._actions), list(self._actions.values()))[0]
        action()
        self.done[action.__name__.strip("_")] += 1

    def _anywhere(self) -> Pose:
        height, width = self._any_layer().data.shape[:2]
        zoom = self._fit * (LARGEST_ZOOM / self._fit) ** self._random.random()
        return Pose(zoom, height * self._random.random(), width * self._random.random())

    def _any_layer(self) -> Any:
        return self._random.choice(list(self._viewer.layers))

    def _go(self, pose: Pose) -> None:
        self._pose = pose
        go_to(self._viewer, self._viewer.layers[0], pose)

    def _follow(self, end: Pose) -> None:
        leg = Leg(self._random.uniform(0.5, 2), self._pose, end)
        glide(lambda passed: self._go(leg.at(passed)), leg.seconds)

    def _pan(self) -> None:
        zoom, y, x = self._pose
        far = 1500 / zoom
        self._follow(
            Pose(
                zoom,
                self._within(y + self._random.uniform(-far, far), 0),
                self._within(x + self._random.uniform(-far, far), 1),
            )
        )

    def _within(self, position: float, axis: int) -> float:
        return float(min(max(position, 0), self._viewer.layers[0].data.shape[axis]))

    def _zoom(self) -> None:
        self._follow(self._pose._replace(zoom=self._anywhere().zoom))

    def _jump(self) -> None:
        self._go(self._anywhere())
        settle(self._random.uniform(0.1, 1))

    def _remove_and_undo(self) -> None:
        layer = self._any_layer()
        position = self._viewer.layers.index(layer)
        self._viewer.layers.remove(layer)
        self._pan()
        self._viewer.layers.insert(position, layer)
        self._pan()

    def _duplicate(self) -> None:
        layers = self._viewer.layers
        layer = self._any_layer()
        data, state, kind = layer.as_layer_data_tuple()
        double = Layer.create(deepcopy(data), {**state, "name": f"{layer.name} copy"}, kind)
        layers.insert(layers.index(layer) + 1, double)
        self._pan()
        layers.remove(double)

    def _open_again(self) -> None:
        layer = self._any_layer()
        path = layer.source.path
        self._viewer.layers.remove(layer)
        self._viewer.open(path, plugin="napari-wsigpu")
        self._pan()

    def _grid(self) -> None:
        self._viewer.canvas.grid.enabled = True
        self._pan()
        self._zoom()
        self._viewer.canvas.grid.enabled = False
        self._pan()

    def _three_dimensions(self) -> None:
        self._viewer.dims.ndisplay = 3
        settle(0.5)
        self._viewer.dims.ndisplay = 2
        self._go(self._anywhere())
        settle(0.5)

    def _hide(self) -> None:
        layer = self._any_layer()
        layer.visible = False
        self._pan()
        layer.visible = True


def sample(viewer: Viewer, begin: float) -> dict[str, float]:
    """Return the current counts."""
    settle(REST)
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    timers = {
        id(timer): timer
        for timer in (
            *(item for item in gc.get_objects() if isinstance(item, QTimer)),
            *viewer.window._qt_window.findChildren(QTimer),
        )
    }
    return {
        "seconds": round(time.perf_counter() - begin, 1),
        "rss_mb": round(int(status["VmRSS"].split()[0]) / 1024, 1),
        "allocated_mb": round(_allocated() / MB, 1),
        "cache_mb": round(runtime.default().tiles.used / MB, 1),
        "layers": len(viewer.layers),
        "threads": int(status["Threads"]),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "timers": len(timers),
        "timers_active": sum(timer.isActive() for timer in timers.values()),
        "callbacks": sum(map(_callbacks, _emitters(viewer))),
    }


def _allocated() -> int:
    """Return the allocated bytes of the C library."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = MallocInfo
    info = ask()
    return int(info.uordblks + info.hblkhd)


def _emitters(viewer: Viewer) -> Iterator[Any]:
    groups = [
        viewer.events,
        viewer.layers.events,
        viewer.layers.selection.events,
        viewer.dims.events,
        viewer.scene.camera.events,
        viewer.canvas.events,
        viewer.canvas.grid.events,
        viewer._layer_slicer.events,
        *(layer.events for layer in viewer.layers),
    ]
    for group in groups:
        yield group
        yield from group.emitters.values()


def _callbacks(emitter: Any) -> int:
    """Count callbacks whose objects are alive."""
    return sum(
        not isinstance(callback, tuple) or callback[0]() is not None
        for callback in emitter.callbacks
    )


def soak(slides: list[Path], minutes: float, seed: int) -> dict[str, Any]:
    """Act for some minutes; return samples, messages and the actions."""
    faulthandler.enable()
    complaints = Complaints()
    viewer = open_viewer()
    walker = Walker(viewer, slides, seed)
    begin = last = time.perf_counter()
    samples = []
    while time.perf_counter() - begin < 60 * minutes:
        walker.act()
        if time.perf_counter() - last >= SAMPLE_EVERY:
            samples.append(sample(viewer, begin))
            last = time.perf_counter()
    viewer.close()
    settle(REST)
    return {
        "minutes": minutes,
        "seed": seed,
        "budget_mb": runtime.default().tiles.budget // MB,
        "done": walker.done,
        "samples": samples,
        "plugin_said": complaints.ours,
        "others_said": complaints.others,
        "threads_after_close": [
            thread.name for thread in threading.enumerate() if thread.name.startswith("wsigpu")
        ],
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Walk at random through two slides.")
    parser.add_argument("--slides", type=Path, nargs=2, required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    figures = soak(given.slides, given.minutes, given.seed)
    given.json.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    ensure_display()
    main()
