"""Record a real napari window that opens the sample slide, zooms and pans.

Usage: ``python tools/film.py [docs/pictures/film.gif]``, on a display or under Xvfb.
"""

from __future__ import annotations

import os
import sys
from math import exp, log
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from demo import has_display, run_on_xvfb

if TYPE_CHECKING:
    from collections.abc import Iterator

FILM = Path(__file__).parents[1] / "docs" / "pictures" / "film.gif"
WINDOW = 1280, 800
SIZE = 560, 350
MOST_BYTES = 1_200_000
# Stops of the view: seconds at the stop, x and y relative to the slide, zoom relative to the first.
STOPS = [
    (1.2, 0.5, 0.5, 1.0),
    (1.2, 0.43, 0.42, 5.0),
    (1.2, 0.47, 0.45, 20.0),
    (1.0, 0.5, 0.5, 1.0),
]
STEPS = 5
STEP_SECONDS = 0.12


def main() -> int:
    """Record the film; return the exit status."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FILM
    if not has_display():
        return run_on_xvfb([sys.executable, __file__, str(target)])
    with TemporaryDirectory() as folder:
        os.environ["NAPARI_CONFIG"] = str(Path(folder) / "settings.yaml")  # a first run's window
        frames, seconds = zip(*film(), strict=True)
    for colors in (128, 96, 64, 48, 32):
        write(target, frames, seconds, colors)
        if target.stat().st_size <= MOST_BYTES:
            break
    print(f"{target}: {len(frames)} frames, {colors} colours, {target.stat().st_size:,} bytes")
    return 0


def film() -> Iterator[tuple[Image.Image, float]]:
    """Move the view from stop to stop; yield screenshots and the seconds to show each."""
    import napari
    from qtpy.QtTest import QTest

    from napari_wsigpu import wait

    viewer = napari.Viewer()
    viewer.window.resize(*WINDOW)
    [layer, *_] = viewer.open_sample("napari-wsigpu", "he_phantom")
    QTest.qWait(1500)
    wait(layer)
    camera = viewer.scene.camera
    zoom, extent = camera.zoom, layer.extent.world[1] - layer.extent.world[0]
    before = STOPS[0]
    for stop in STOPS:
        for step in range(1, STEPS + 1) if stop is not before else [STEPS]:
            part = step / STEPS
            _, x, y, times = _between(before, stop, part)
            camera.zoom = zoom * times
            camera.center = (0, *(layer.extent.world[0] + extent * (y, x)))
            QTest.qWait(30)
            wait(layer)
            yield picture(viewer), stop[0] if part == 1 else STEP_SECONDS
        before = stop
    viewer.close()


def _between(before: Any, after: Any, part: float) -> tuple[float, ...]:
    """Interpolate two stops: zoom at a constant rate, towards a fixed point."""
    times = exp(log(before[3]) * (1 - part) + log(after[3]) * part)
    moved = part
    if before[3] != after[3]:
        moved = (1 / before[3] - 1 / times) / (1 / before[3] - 1 / after[3])
    x, y = (before[i] + (after[i] - before[i]) * moved for i in (1, 2))
    return after[0], x, y, times


def picture(viewer: Any) -> Image.Image:
    """Return a screenshot of the window, scaled to the film."""
    pixels = np.asarray(viewer.screenshot(canvas_only=False, flash=False))
    return Image.fromarray(pixels[..., :3]).resize(SIZE, Image.Resampling.LANCZOS)


def write(path: Path, frames: Any, seconds: Any, colors: int) -> None:
    """Write frames as an endless GIF with one palette."""
    width, height = SIZE
    strip = Image.new("RGB", (width, height * len(frames)))
    for number, frame in enumerate(frames):
        strip.paste(frame, (0, number * height))
    palette = strip.quantize(colors, dither=Image.Dither.NONE)
    few = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [round(value * 1000) for value in seconds]
    few[0].save(path, save_all=True, append_images=few[1:], duration=times, loop=0, optimize=True)


if __name__ == "__main__":
    raise SystemExit(main())
