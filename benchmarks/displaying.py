"""Move the camera of one real viewer, and time it until its pixels are exact.

Usage: ``python -m benchmarks.displaying MODE --slide FILE --device D --window W H --seconds S
--repeats N --json FILE``; `display.py` runs this in separate processes.

A frame counts as exact if its own pixels are: after every draw, rows of the canvas are read back
and compared with `Slide.read_region`, independently of what napari and the plugin report.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import imagecodecs
import numpy as np
from napari.settings import get_settings
from qtpy.QtCore import QEventLoop, QTimer
from qtpy.QtWidgets import QApplication, QDockWidget
from vispy import gloo
from vispy.gloo import gl

from benchmarks.gauges import CollectionClock, SliceClock
from benchmarks.patches import loop_ms
from benchmarks.stage import open_viewer, scene_canvas, settle
from benchmarks.walking import Pose, add_slide, go_to
from napari_wsigpu import open_slide
from napari_wsigpu.gpu.device.verify import TOLERANCES
from napari_wsigpu.viewer.drawing.progressive import display_of
from napari_wsigpu.viewer.session.new_slides import complete_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from napari import Viewer
    from numpy.typing import NDArray

    from napari_wsigpu import Slide

    Pixels = NDArray[np.uint8]

MODES = ("ours", "blocking", "empty")
ROW_STEP = 100
EDGE = 0.05
WARM_SECONDS = 4.0
PATIENCE = 5.0
PAN = "pan"
PAN_SECONDS = 2.0  # in less time, other load on the machine matters more than the drawing
PAN_STEP = 16
LOOK_EVERY = 5
NOTCH = 1.15
NOTCHES = 12
TO_HOST = 2
ANY = 255


class Frame(NamedTuple):
    """One drawn frame in `Clock` time, from the start of the draw until the card has finished."""

    begin: float
    end: float


class Move(NamedTuple):
    """The timing of one movement of the camera in seconds; None if it was never exact."""

    first: float
    exact: float | None
    frames: int


class Truth:
    """The expected content of the canvas, read from the slide.

    Parameters
    ----------
    slide : Slide
        A separate slide on the device that decodes for the viewer.
    size : tuple of int
        Width and height of the canvas in pixels.
    tolerance : int
        Largest difference of a sample that counts as equal.
    """

    def __init__(self, slide: Slide, size: tuple[int, int], tolerance: int) -> None:
        self._slide = slide
        self._size = size
        self._tolerance = tolerance

    def rows(self, pose: Pose, rows: Sequence[int]) -> tuple[Pixels, NDArray[np.bool_]]:
        """Return the expected pixels of some rows of the canvas, and a mask of the certain ones.

        Pixels outside the slide are uncertain, and so are those so close to the edge of a level's
        pixel that the graphics card may choose either side.
        """
        level = self._level(pose)
        (width, height), (canvas_width, canvas_height) = self._slide.dimensions, self._size
        image = level.layout
        y, sure_y = _sampled(rows, canvas_height, pose.y, pose.zoom, height / image.height)
        x, sure_x = _sampled(
            range(canvas_width), canvas_width, pose.x, pose.zoom, width / image.width
        )
        sure_y &= (y >= 0) & (y < image.height)
        sure_x &= (x >= 0) & (x < image.width)
        y, x = np.clip(y, 0, image.height - 1), np.clip(x, 0, image.width - 1)
        return self._shown(level.number, y, x), sure_y[:, None] & sure_x

    def _shown(self, level: int, y: NDArray[np.int64], x: NDArray[np.int64]) -> NDArray[Any]:
        """Return the colours of rows and columns of a level."""
        return self._stored(level, y, x)[..., :3]

    def _stored(
        self, level: int, y: NDArray[np.int64], x: NDArray[np.int64], channel: int | None = None
    ) -> NDArray[Any]:
        pixels = self._slide.level_array(level, channel)
        columns = slice(int(x[0]), int(x[-1]) + 1)
        part = np.asarray(pixels[int(y[0]) : int(y[-1]) + 1, columns])
        return np.asarray(part[y - y[0]][:, x - x[0]])

    def agrees(self, shown: Pixels, expected: tuple[Pixels, NDArray[np.bool_]]) -> bool:
        """Return whether the shown pixels equal the expected ones wherever these are certain."""
        pixels, sure = expected
        differ = np.abs(shown.astype(np.int16) - pixels).max(axis=2) > self._tolerance
        return not (differ & sure).any()

    def _level(self, pose: Pose) -> Any:
        """Return the coarsest level that has a pixel for each of the canvas, as napari picks it."""
        width = self._slide.dimensions[0]
        fine = [
            level
            for level in self._slide.pyramid
            if width / level.layout.width <= 1.001 / pose.zoom
        ]
        return max(fine, key=lambda level: width / level.layout.width)


def _sampled(
    places: Sequence[int], size: int, middle: float, zoom: float, factor: float
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the pixels of a level at positions of the canvas, and a mask of the certain ones."""
    at = ((np.asarray(places) + 0.5 - size / 2) / zoom + middle + 0.5) / factor
    whole = np.floor(at)
    return whole.astype(np.int64), (at - whole > EDGE) & (at - whole < 1 - EDGE)


class Clock:
    """A clock that excludes the time of the benchmark itself."""

    def __init__(self) -> None:
        self.measuring = 0.0

    def now(self) -> float:
        """Return the time in seconds."""
        return time.perf_counter() - self.measuring


class Canvas:
    """Record the frames that a viewer draws.

    Parameters
    ----------
    viewer : Viewer
        Its window is open.
    clock : Clock
        Excludes the time of the inspection.

    Attributes
    ----------
    frames : list of Frame
        Frames since it was last emptied.
    on_frame : callable
        Called after each frame; its time is excluded.
    """

    def __init__(self, viewer: Viewer, clock: Clock) -> None:
        self.frames: list[Frame] = []
        self.on_frame: Callable[[], None] = lambda: None
        self._clock = clock
        self._canvas = scene_canvas(viewer)
        self._begin = 0.0
        self._canvas.events.draw.connect(self._before, position="first")
        self._canvas.events.draw.connect(self._after, position="last")

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        width, height = self._canvas.physical_size
        return int(width), int(height)

    @property
    def renderer(self) -> str:
        """Name of the OpenGL renderer."""
        self._canvas.set_current()
        return str(gl.glGetParameter(gl.GL_RENDERER))

    def read(self, rows: Sequence[int]) -> Pixels:
        """Return some rows of the frame; call this only while drawing."""
        width, height = self.size
        if len(rows) == height:
            return np.asarray(gloo.read_pixels((0, 0, width, height)))[..., :3]
        read = [gloo.read_pixels((0, height - 1 - row, width, 1)) for row in rows]
        return np.concatenate(read)[..., :3]

    def _before(self, event: Any) -> None:
        self._begin = self._clock.now()

    def _after(self, event: Any) -> None:
        self._canvas.context.finish()
        self.frames.append(Frame(self._begin, self._clock.now()))
        begin = time.perf_counter()
        self.on_frame()
        self._clock.measuring += time.perf_counter() - begin


class Bytes:
    """Count the bytes that the plugin and vispy copy on the way to the screen.

    The viewer must be open, because vispy chooses its OpenGL functions when it opens.

    Attributes
    ----------
    counts : bool
        Whether to count now; reads by the benchmark itself are not counted.
    to_host : int
        Bytes copied from a CUDA device to the host.
    to_texture : int
        Bytes that vispy sent from the host to the graphics card.
    """

    def __init__(self, *, cuda: bool) -> None:
        self.counts = False
        self.to_host = self.to_texture = 0
        upload = gl.glTexSubImage2D

        def counted_upload(*arguments: Any) -> Any:
            if self.counts:
                self.to_texture += int(getattr(arguments[-1], "nbytes", 0))
            return upload(*arguments)

        vars(gl)["glTexSubImage2D"] = counted_upload
        if cuda:
            self._count_downloads()

    def _count_downloads(self) -> None:
        from cupy.cuda import runtime

        copy = runtime.memcpyAsync

        def counted_copy(target: int, source: int, size: int, kind: int, stream: int) -> None:
            if self.counts and kind == TO_HOST:
                self.to_host += size
            copy(target, source, size, kind, stream)

        vars(runtime)["memcpyAsync"] = counted_copy


class Stage:
    """One viewer with one slide, and the instruments that observe them."""

    def __init__(self, mode: str, path: Path, device: str, window: tuple[int, int]) -> None:
        get_settings().experimental.async_ = False
        self.clock = Clock()
        self.slices = SliceClock(CollectionClock())
        self.viewer = open_viewer(window)
        self.bytes = Bytes(cuda=device != "cpu")
        begin = time.perf_counter()
        self.layer, slide = add_slide(self.viewer, mode, path)
        self.opening = time.perf_counter() - begin
        self.layer.interpolation2d = "nearest"  # show stored pixels, which can be compared
        self.slide: Slide = slide
        self.slide.device = device
        settle(0.5)
        complete_view(self.viewer)  # start it now rather than while timing
        for dock in self.viewer.window._qt_window.findChildren(QDockWidget):
            dock.hide()
        self.viewer.canvas.overlays.scale_bar.visible = (
            False  # draw only pixels, which can be compared
        )
        settle(0.5)
        self.canvas = Canvas(self.viewer, self.clock)
        height = self.canvas.size[1]
        self.rows = sorted({1, *range(ROW_STEP // 2, height, ROW_STEP), height - 2})
        tolerance = 0 if device == "cpu" else max(TOLERANCES.values())
        if mode == "empty":
            tolerance = ANY  # the first frame ends a movement
        self.truth = Truth(open_slide(path, device=device), self.canvas.size, tolerance)

    def warm_up(self, seconds: float) -> None:
        """Jump around until devices have started and decoders have been measured."""
        end = time.perf_counter() + seconds
        for pose in jumps(self.slide, 1.0, seed=1):
            self.slide.clear_cache()
            self.go_to(pose)
            settle(0.15)
            if time.perf_counter() > end:
                return

    def go_to(self, pose: Pose) -> None:
        """Move the camera."""
        go_to(self.viewer, self.layer, pose)

    def move(self, pose: Pose) -> Move:
        """Move the camera, and wait until the drawn frame is exact."""
        expected = self.truth.rows(pose, self.rows)
        settle(0.03)
        loop = QEventLoop()
        exact: list[float] = []

        def on_frame() -> None:
            if not exact and self.truth.agrees(self.canvas.read(self.rows), expected):
                exact.append(self.canvas.frames[-1].end)
                loop.quit()

        self.canvas.frames.clear()
        self.canvas.on_frame = on_frame
        QTimer.singleShot(round(PATIENCE * 1e3), loop.quit)
        self.bytes.counts = True
        begin = self.clock.now()
        self.go_to(pose)
        loop.exec()
        self.bytes.counts = False
        self.canvas.on_frame = lambda: None
        frames = self.canvas.frames
        first = frames[0].end - begin if frames else PATIENCE
        return Move(first, exact[0] - begin if exact else None, len(frames))

    def whole_frame(self, pose: Pose) -> tuple[bool, Pixels]:
        """Return whether a frame is exact in each pixel of the canvas, and the frame."""
        rows = range(self.canvas.size[1])
        read: list[Pixels] = []
        self.canvas.on_frame = lambda: read.append(self.canvas.read(rows))
        scene_canvas(self.viewer).update()
        while not read:
            settle(0.02)
        self.canvas.on_frame = lambda: None
        return self.truth.agrees(read[-1], self.truth.rows(pose, rows)), read[-1]

    def pan(self, zoom: float, seconds: float) -> dict[str, Any]:
        """Pan as fast as frames can be drawn; look at every fifth frame."""
        width, height = self.slide.dimensions
        place = Pose(zoom, 0.3 * height + 0.25, 0.3 * width + 0.25)
        looked: list[tuple[Pose, Pixels]] = []

        def on_frame() -> None:
            if len(self.canvas.frames) % LOOK_EVERY == 0:
                looked.append((place, self.canvas.read(self.rows)))

        self.slide.clear_cache()
        self.canvas.frames.clear()
        self.canvas.on_frame = on_frame
        before = self.bytes.to_host, self.bytes.to_texture
        self.bytes.counts = True
        begin = self.clock.now()
        while self.clock.now() - begin < seconds:
            step = PAN_STEP / zoom
            if place.y + step + self.canvas.size[1] / zoom > height:
                break
            place = Pose(zoom, place.y + step, place.x + step)
            self.go_to(place)
            QApplication.processEvents()
        passed = self.clock.now() - begin
        self.bytes.counts = False
        self.canvas.on_frame = lambda: None
        drawn = len(self.canvas.frames)
        exact = [self.truth.agrees(seen, self.truth.rows(at, self.rows)) for at, seen in looked]
        return {
            "seconds": passed,
            "frames": drawn,
            "frames_per_s": drawn / passed,
            "looked_at": len(exact),
            "exact_percent": 100 * sum(exact) / len(exact) if exact else None,
            "to_host_bytes_a_frame": (self.bytes.to_host - before[0]) / max(drawn, 1),
            "to_texture_bytes_a_frame": (self.bytes.to_texture - before[1]) / max(drawn, 1),
        }


def jumps(slide: Slide, zoom: float, seed: int = 3) -> Iterator[Pose]:
    """Yield random positions endlessly."""
    chance = random.Random(seed)
    width, height = slide.dimensions
    while True:
        y, x = chance.uniform(0.1, 0.9) * height, chance.uniform(0.1, 0.9) * width
        yield Pose(zoom, int(y) + 0.25, int(x) + 0.25)


def steps(slide: Slide, zoom: float, step: int) -> Iterator[Pose]:
    """Yield positions that move down and right by a number of canvas pixels."""
    width, height = slide.dimensions
    y, x = int(0.3 * height) + 0.25, int(0.3 * width) + 0.25
    while True:
        yield Pose(zoom, y, x)
        y = 0.1 * height + (y + step / zoom - 0.1 * height) % (0.8 * height)
        x = 0.1 * width + (x + step / zoom - 0.1 * width) % (0.8 * width)


def wheel(slide: Slide, zoom: float) -> Iterator[Pose]:
    """Yield wheel notches, out and in again, at a new position each time."""
    for place in jumps(slide, zoom, seed=5):
        for notch in cycle([*range(NOTCHES), *range(NOTCHES, 0, -1)]):
            yield place._replace(zoom=zoom * NOTCH**-notch)
            if notch == 1:
                break


SERIES: dict[str, Callable[[Slide, float], Iterator[Pose]]] = {
    "jump": jumps,
    "step 64": lambda slide, zoom: steps(slide, zoom, 64),
    "step 512": lambda slide, zoom: steps(slide, zoom, 512),
    "wheel": wheel,
}


def series(
    stage: Stage, name: str, zoom: float, repeats: int, until: float, frames: Path | None
) -> dict[str, Any]:
    """Repeat movements up to a number, or until a time of `time.perf_counter`."""
    stage.slide.clear_cache()
    poses = SERIES[name](stage.slide, zoom)
    stage.move(next(poses))
    before = stage.bytes.to_host, stage.bytes.to_texture
    stage.slices.slices.clear()
    moves, drawing = [], []
    pose = next(poses)
    while True:
        moves.append(stage.move(pose))
        drawing += [frame.end - frame.begin for frame in stage.canvas.frames]
        if len(moves) >= repeats or time.perf_counter() > until:
            break
        pose = next(poses)
    after = stage.bytes.to_host, stage.bytes.to_texture
    count = max(1, sum(move.frames for move in moves))
    whole, pixels = stage.whole_frame(pose)
    if frames is not None:
        png = imagecodecs.png_encode(np.ascontiguousarray(pixels), level=1)
        (frames / f"{name} {zoom:g}.png".replace(" ", "-")).write_bytes(png)
    return {
        "first_ms": _ms([move.first for move in moves]),
        "exact_ms": _ms([PATIENCE if move.exact is None else move.exact for move in moves]),
        "never_exact": sum(move.exact is None for move in moves),
        "frames": count,
        "slice_ms": _ms([span.seconds for span in stage.slices.slices]),
        "draw_ms": _ms(drawing),
        "to_host_bytes_a_frame": (after[0] - before[0]) / count,
        "to_texture_bytes_a_frame": (after[1] - before[1]) / count,
        "whole_frame_exact": whole,
    }


def _ms(seconds: list[float]) -> list[float]:
    return [round(second * 1e3, 2) for second in seconds]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all series, and return their timings."""
    stage = Stage(args.mode, args.slide, args.device, tuple(args.window))
    stage.warm_up(min(WARM_SECONDS, args.seconds / 4))
    loops = [loop_ms()]
    wanted = [(name, zoom) for zoom in args.zooms for name in args.series]
    figures: dict[str, Any] = {}
    end = time.perf_counter() + args.seconds
    for done, (name, zoom) in enumerate(wanted):
        share = (end - time.perf_counter()) / (len(wanted) - done)
        if name == PAN:
            figures[f"pan {zoom:g}"] = stage.pan(zoom, max(PAN_SECONDS, share / 2))
        else:
            until = time.perf_counter() + share
            figures[f"{name} {zoom:g}"] = series(
                stage, name, zoom, args.repeats, until, args.frames
            )
    loops.append(loop_ms())
    display = display_of(stage.layer)
    record = {
        "mode": args.mode,
        "device": args.device,
        "canvas": stage.canvas.size,
        "renderer": stage.canvas.renderer,
        "interop": str(getattr(display, "interop", "none")),
        "decoder": stage.slide.decoder,
        "opening_ms": round(stage.opening * 1e3, 1),
        "loop_ms": [round(loop, 2) for loop in loops],
        "series": figures,
    }
    stage.viewer.close()
    return record


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time one viewer until its pixels are exact.")
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--slide", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--window", type=int, nargs=2, default=(1920, 1200))
    parser.add_argument("--zooms", type=float, nargs="+", default=[1.0, 0.4])
    parser.add_argument("--series", nargs="+", choices=[*SERIES, PAN], default=[*SERIES, PAN])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--frames", type=Path, help="write each series' last frame here, as PNG")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    figures = measure(args)
    args.json.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
