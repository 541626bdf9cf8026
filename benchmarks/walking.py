"""Walk through a slide in one real viewer, and write down how responsive it was.

Usage: ``python -m benchmarks.walking MODE --slide FILE --cost MS --json FILE``; `walk.py` runs
this in separate processes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import imagecodecs
import numpy as np
from napari.settings import get_settings
from qtpy.QtCore import QEventLoop, QTimer

from benchmarks.gauges import CollectionClock, Frame, FrameLog, Heartbeat, SliceClock, Span
from benchmarks.stage import (
    CANVAS,
    SlowDecoder,
    ensure_display,
    fit_canvas,
    glide,
    open_viewer,
    settle,
)
from napari_wsigpu import open_slide
from napari_wsigpu.viewer.layers.slide_layers import slide_layers, slide_of

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Image
    from numpy.typing import NDArray

    from napari_wsigpu import Slide

MODES = ("ours", "blocking", "async", "dask")
WALK_SECONDS = 20.0
CHECK_MS = 5
LOOK = 31
PATIENCE = 30.0
SCRIPT_SIDE = 700
LONGEST = 5
EMPTY = 256  # pixels across and down of a picture that is not in view


class Pose(NamedTuple):
    """A position of the camera.

    Attributes
    ----------
    zoom : float
        Canvas pixels per pixel of level 0.
    y, x : float
        Centre of the view in pixels of level 0.
    """

    zoom: float
    y: float
    x: float


class Leg(NamedTuple):
    """A part of the walk: from one pose to another within some seconds."""

    seconds: float
    begin: Pose
    end: Pose

    def at(self, time: float) -> Pose:
        """Return the pose after some time; the path follows the zoom while that changes."""
        part = time / self.seconds
        first, last = self.begin, self.end
        zoom = math.exp((1 - part) * math.log(first.zoom) + part * math.log(last.zoom))
        if first.zoom != last.zoom:
            part = (1 / zoom - 1 / first.zoom) / (1 / last.zoom - 1 / first.zoom)
        y, x = ((1 - part) * a + part * b for a, b in zip(first[1:], last[1:], strict=True))
        return Pose(zoom, y, x)


def legs_of(width: int, height: int, fit: float) -> list[Leg]:
    """Return a walk of 20 s over a slide, starting with the whole slide in view (`fit`).

    In, along, a jump and a rest, out, in at another position, along.
    """
    whole = Pose(fit, height * 0.5, width * 0.5)
    first = Pose(1, height * 0.4, width * 0.3)
    along = Pose(1, first.y + 6000, first.x + 2500)
    jumped = Pose(1, height * 0.25, width * 0.72)
    out = Pose(max(0.06, fit), jumped.y, jumped.x)
    second = Pose(0.6, height * 0.62, width * 0.65)
    end = Pose(0.6, second.y + 3000, second.x - 5000)
    return [
        Leg(4, whole, first),
        Leg(4, first, along),
        Leg(1.5, jumped, jumped),
        Leg(2.5, jumped, out),
        Leg(3.5, out, second),
        Leg(4.5, second, end),
    ]


def pose_at(legs: list[Leg], time: float) -> Pose:
    """Return the pose of the walk after some time."""
    for leg in legs:
        if time <= leg.seconds:
            return leg.at(time)
        time -= leg.seconds
    return legs[-1].end


def add_slide(viewer: Viewer, mode: str, path: Path) -> tuple[Image, Slide]:
    """Open a slide in one of the compared modes."""
    if mode == "ours":
        [layer] = viewer.open(path, plugin="napari-wsigpu")
        slide = slide_of(layer)
        assert slide is not None
        return layer, slide
    slide = open_slide(path)
    levels, attributes, _ = slide_layers(slide)[0]
    if mode == "dask":
        levels = [level.to_dask(tiles=1) for level in levels]
    if mode == "empty":
        levels = np.asarray(levels[-1][:EMPTY, :EMPTY])
        attributes |= {"multiscale": False}
    return viewer.add_image(levels, **attributes), slide


def decoded_tiles(slide: Slide) -> int:
    """Return how many tiles of a slide were decoded so far."""
    decoded = slide.stats()["decoded"]
    assert isinstance(decoded, dict)
    return sum(decoded.values())


class View:
    """The exact pixels of each level that a pose shows.

    Parameters
    ----------
    slide : Slide
        Read immediately and without the added delay.
    pose : Pose
        The view.
    """

    def __init__(self, slide: Slide, pose: Pose) -> None:
        width, height = slide.dimensions
        half = np.array(CANVAS[::-1]) / 2 / pose.zoom
        low, high = np.array(pose[1:]) - half, np.array(pose[1:]) + half
        self._exact: dict[tuple[int, int], tuple[slice, slice, NDArray[Any]]] = {}
        for level in slide.pyramid:
            image = level.layout
            factors = np.array((height / image.height, width / image.width))
            top, left = np.maximum(0, np.floor(low / factors)).astype(int)
            bottom, right = np.ceil(high / factors).astype(int)
            rows = slice(int(top), min(int(bottom), image.height))
            columns = slice(int(left), min(int(right), image.width))
            pixels = slide.level_array(level.number)[rows, columns]
            self._exact[image.height, image.width] = rows, columns, pixels

    def is_shown_by(self, layer: Image) -> bool:
        """Return whether a layer's slice covers the view with exact pixels of the right level.

        A few pixels are compared first, then all of them.
        """
        shape = tuple(layer.data[layer.data_level].shape[:2])
        rows, columns, exact = self._exact[shape]
        shown = layer._slice.image.raw
        position = layer._transforms["tile2data"]
        factors = layer.downsample_factors[layer.data_level][:2]
        if not np.allclose(position.scale, factors):
            return False
        top, left = np.round(position.translate / factors).astype(int)
        if rows.start < top or columns.start < left:
            return False
        part = shown[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
        return (
            part.shape == exact.shape
            and np.array_equal(part[::LOOK, ::LOOK], exact[::LOOK, ::LOOK])
            and np.array_equal(part, exact)
        )


class Waiting:
    """Check whether a view is exact.

    Parameters
    ----------
    view : View
        The expected view.
    layer : Image
        Checked every few milliseconds.
    heartbeat : Heartbeat
        Excludes the time of the checks.
    """

    def __init__(self, view: View, layer: Image, heartbeat: Heartbeat) -> None:
        self._view = view
        self._layer = layer
        self._heartbeat = heartbeat
        self._loop = QEventLoop()
        self._begin = time.perf_counter()
        self._seconds: float | None = None

    def seconds(self) -> float | None:
        """Wait; return the seconds, or None on a timeout."""
        timer = QTimer()
        timer.timeout.connect(self._look)
        timer.start(CHECK_MS)
        self._loop.exec()
        timer.stop()
        return self._seconds

    def _look(self) -> None:
        now = time.perf_counter()
        exact = self._view.is_shown_by(self._layer)
        self._heartbeat.measuring += time.perf_counter() - now
        if exact:
            self._seconds = now - self._begin
        if exact or now - self._begin > PATIENCE:
            self._loop.quit()


def rest(slide: Slide, seconds: float) -> None:
    """Wait until all decoding has finished, of which each tile takes so long."""
    before, tiles = -1, decoded_tiles(slide)
    while tiles != before:
        settle(0.7 + 2 * seconds)
        before, tiles = tiles, decoded_tiles(slide)


def go_to(viewer: Viewer, layer: Image, pose: Pose) -> None:
    """Move the camera."""
    scale = np.array(layer.scale[-2:])
    viewer.scene.camera.zoom = pose.zoom / float(scale[0])
    viewer.scene.camera.center = (0.0, *(np.array(pose[1:]) * scale))


def script_is_exact(layer: Image, slide: Slide, pose: Pose) -> bool:
    """Return whether level 0 reads exactly at the end of the walk and where it never was."""
    end = int(pose.y), int(pose.x)
    return all(
        np.array_equal(
            np.asarray(layer.data[0][y : y + SCRIPT_SIDE, x : x + SCRIPT_SIDE]),
            slide.read_region((x, y), (SCRIPT_SIDE, SCRIPT_SIDE)),
        )
        for y, x in (end, (131, 77))
    )


class Film:
    """Keep every Nth frame, to write it after the walk."""

    def __init__(self, folder: Path, every: int) -> None:
        self._folder = folder
        self._every = every
        self._count = 0
        self._pictures: list[tuple[int, Frame, NDArray[np.uint8]]] = []

    def take(self, frame: Frame, pixels: NDArray[np.uint8]) -> None:
        """Keep this frame if it is an Nth one."""
        if self._count % self._every == 0:
            self._pictures.append((self._count, frame, pixels.copy()))
        self._count += 1

    def write(self, begin: float) -> None:
        """Write the frames of the walk, named by number, seconds and blank share."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for number, frame, pixels in self._pictures:
            if frame.time >= begin:
                name = f"{number:05d}-{frame.time - begin:07.3f}s-{100 * frame.blank:05.1f}%.png"
                (self._folder / name).write_bytes(imagecodecs.png_encode(pixels, level=1))


def measure(mode: str, path: Path, cost_ms: float, film: Film | None) -> dict[str, Any]:
    """Walk once, and return the measurements."""
    decoder, collections = SlowDecoder(slow=cost_ms > 0), CollectionClock()
    slices, heartbeat = SliceClock(collections), Heartbeat(collections)
    get_settings().experimental.async_ = mode == "async"
    viewer = open_viewer()
    log = FrameLog(viewer, heartbeat, None if film is None else film.take)
    reference = open_slide(path, device="cpu")
    width, height = reference.dimensions

    decoder.seconds = cost_ms / 1e3
    begin = time.perf_counter()
    layer, slide = add_slide(viewer, mode, path)
    opening = time.perf_counter() - begin
    fit_canvas(viewer)
    viewer.reset_view()
    legs = legs_of(width, height, viewer.scene.camera.zoom * float(layer.scale[-1]))
    decoder.seconds = 0
    end = legs[-1].end
    view = View(reference, end)
    decoder.seconds = cost_ms / 1e3
    rest(slide, decoder.seconds)

    refreshes: list[float] = []
    layer.events.set_data.connect(lambda: refreshes.append(time.perf_counter()))
    decoded = decoded_tiles(slide)
    slices.slices.clear()
    heartbeat.start()
    begin = time.perf_counter()
    glide(lambda passed: go_to(viewer, layer, pose_at(legs, passed)), WALK_SECONDS)
    arrived = time.perf_counter()
    to_exact = Waiting(view, layer, heartbeat).seconds()
    heartbeat.stop()
    walked = arrived - begin
    seen = log.frames[next(i for i, frame in enumerate(log.frames) if frame.shown) :]
    moving = [frame for frame in seen if begin <= frame.time <= arrived]
    sliced_ms = np.array([span.seconds for span in slices.slices] or [0]) * 1e3
    gaps_ms = np.array([gap.seconds for gap in heartbeat.gaps]) * 1e3
    clear_ms = np.array([gap.seconds - gap.collecting for gap in heartbeat.gaps]) * 1e3
    figures = {
        "opening_ms": opening * 1e3,
        "walked_s": walked,
        "slices": len(slices.slices),
        "slice_p95_ms": np.percentile(sliced_ms, 95),
        "slice_worst_ms": sliced_ms.max(),
        "slice_worst_without_gc_ms": max(
            ((span.seconds - span.collecting) * 1e3 for span in slices.slices), default=0.0
        ),
        "stall_ms": gaps_ms.max(),
        "stall_without_gc_ms": clear_ms.max(),
        "stalled_s": gaps_ms[gaps_ms > 100].sum() / 1e3,
        "gc_s": sum(gap.collecting for gap in heartbeat.gaps),
        "measuring_s": heartbeat.measuring,
        "frames_per_s": len(moving) / walked,
        "refreshes_per_s": sum(moment <= arrived for moment in refreshes) / walked,
        "blank_mean_percent": 100 * log.blank_between(begin, arrived + (to_exact or 0)),
        "blank_worst_percent": 100 * max(frame.blank for frame in seen),
        "blank_frames": sum(frame.blank > 0 for frame in seen),
        "to_exact_ms": None if to_exact is None else to_exact * 1e3,
        "tiles": decoded_tiles(slide) - decoded,
        "level": int(layer.data_level),
        "longest_slices": _longest(slices.slices, begin),
        "longest_stalls": _longest(heartbeat.gaps, begin),
    }
    decoder.seconds = 0
    figures["script_exact"] = script_is_exact(layer, reference, end)
    if film is not None:
        film.write(begin)
    viewer.close()
    reference.close()
    return {name: _plain(value) for name, value in figures.items()}


def _longest(spans: list[Span], begin: float) -> list[dict[str, float]]:
    longest = sorted(spans, key=lambda span: span.seconds, reverse=True)[:LONGEST]
    return [
        {
            "at_s": round(span.start - begin, 2),
            "ms": round(span.seconds * 1e3, 1),
            "gc_ms": round(span.collecting * 1e3, 1),
        }
        for span in longest
    ]


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Walk through a slide in one viewer.")
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--slide", type=Path, required=True)
    parser.add_argument("--cost", type=float, default=0, help="milliseconds more for each tile")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--film", type=Path, help="write frames into this folder, as PNG")
    parser.add_argument("--every", type=int, default=5, help="write each Nth frame")
    args = parser.parse_args()
    film = None if args.film is None else Film(args.film, args.every)
    figures = measure(args.mode, args.slide, args.cost, film)
    args.json.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    ensure_display()
    main()
