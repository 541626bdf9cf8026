"""Time a window with 20,000 outlines on a slide of 32,768 pixels a side.

Usage: ``python -m benchmarks.outlines_window [--objects 20000 --json FILE]``

The same steps run twice, with the shapes drawn by napari and by this plugin. Wall times depend on
the load of the machine, which is stored; CPU times of the process include those of an OpenGL that
draws with the CPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import napari
import numpy as np
import tifffile

from benchmarks.common import write_json
from benchmarks.displaying import Canvas, Clock
from benchmarks.outlines import CLASSES, VERTICES
from benchmarks.stage import settle
from napari_wsigpu import Annotation, read_geojson, write_geojson
from napari_wsigpu.cli.bench import print_table
from napari_wsigpu.viewer.annotations import annotator
from napari_wsigpu.viewer.annotations.annotator import annotator_of
from napari_wsigpu.viewer.layers.slide_layers import slide_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIDE, TILE = 32_768, 512
WINDOW = 1089, 630
RADII = 8, 60  # pixels
MOVES = 10
ZOOMS = 1, 6, 30  # relative to the whole slide


def write_slide(path: Path) -> None:
    """Write a gray pyramid."""
    tile = np.full((TILE, TILE, 3), 230, np.uint8)
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for power in range((SIDE // TILE).bit_length()):
            side = SIDE >> power
            tiles = iter([tile] * (side // TILE) ** 2)
            file.write(
                tiles,
                shape=(side, side, 3),
                subfiletype=int(power > 0),
                compression="deflate",
                resolution=(40_000, 40_000),
                resolutionunit="CENTIMETER",
                dtype="uint8",
                tile=(TILE, TILE),
                photometric="rgb",
            )


def nuclei(count: int) -> list[Annotation]:
    """Return star-like outlines at random positions."""
    chance = np.random.default_rng(0)
    turn = np.linspace(0, 2 * np.pi, VERTICES, endpoint=False)
    circle = np.stack([np.cos(turn), np.sin(turn)], axis=1)
    found = []
    for number in range(count):
        radius = chance.uniform(*RADII) * chance.uniform(0.9, 1.1, (VERTICES, 1))
        outline = circle * radius + chance.uniform(100, SIDE - 100, 2)
        found.append(Annotation("polygon", (outline,), "", *CLASSES[number % 2]))
    return found


def measure(slide: Path, objects: Path) -> dict[str, Any]:
    """Return the times of each step in a new window."""
    viewer = napari.Viewer()
    viewer.window._qt_window.resize(*WINDOW)
    [image] = viewer.open(str(slide), plugin="napari-wsigpu")
    settle(1)
    _, dock = viewer.window.add_plugin_dock_widget("napari-wsigpu", "Annotate")
    settle(1)
    canvas, camera = Canvas(viewer, Clock()), viewer.scene.camera
    steps: dict[str, Any] = {}

    def timed(work: Callable[[], object]) -> dict[str, float]:
        begin, cpu = time.perf_counter(), time.process_time()
        work()
        canvas.frames.clear()
        canvas._canvas.update()
        while not canvas.frames:
            napari.qt.get_qapp().processEvents()
        return {"wall_s": time.perf_counter() - begin, "cpu_s": time.process_time() - cpu}

    def move_p95() -> dict[str, float]:
        whole, moves = camera.zoom, []
        for zoom in ZOOMS:
            camera.zoom = whole * zoom
            settle(0.5)
            for number in range(MOVES):

                def move(number: int = number, zoom: int = zoom) -> None:
                    camera.center = np.array(camera.center) + 20 / camera.zoom * (-1) ** number
                    camera.zoom = whole * zoom * 1.1 ** (number % 5)

                moves.append(timed(move))
                settle(0.02)
        viewer.fit_to_view()
        clocks = ("wall_s", "cpu_s")
        return {each: float(np.percentile([of[each] for of in moves], 95)) for each in clocks}

    steps["move p95, no outlines"] = move_p95()
    steps["add"] = timed(lambda: viewer.open(str(objects), plugin="napari-wsigpu"))
    layer = viewer.layers[-1]
    settle(0.5)
    steps["move p95"] = move_p95()
    viewer.layers.selection.active, layer.mode = layer, "select"
    settle(0.5)
    chosen = set(range(layer.nshapes))
    steps["select"] = timed(lambda: setattr(layer, "selected_data", chosen))
    settle(0.5)
    steps["classify"] = timed(lambda: dock.set_class("Necrosis"))
    settle(0.5)
    slide_shown = slide_of(image)
    assert slide_shown is not None
    exported = annotator_of(viewer).annotations(slide_shown)
    pairs = zip(exported, read_geojson(objects), strict=True)
    steps["same outlines"] = all(
        np.allclose(one.rings[0], other.rings[0], atol=0.01) for one, other in pairs
    )
    steps["renderer"] = canvas.renderer
    annotator_of(viewer).saved(slide_shown.path)
    viewer.close()
    return steps


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    found: dict[str, Any] = {"objects": chosen.objects, "vertices": VERTICES, "window": WINDOW}
    with tempfile.TemporaryDirectory() as folder:
        slide, objects = Path(folder) / "slide.tif", Path(folder) / "nuclei.geojson"
        write_slide(slide)
        write_geojson(objects, nuclei(chosen.objects))
        found["load_before"] = os.getloadavg()[0]
        with patch.object(annotator, "OutlineDrawing", side_effect=AttributeError):
            found["napari"] = measure(slide, objects)
        found["plugin"] = measure(slide, objects)
        found["load_after"] = os.getloadavg()[0]
    rows = [
        (name, *(f"{found[who][name][clock]:.3f}" for who in ("napari", "plugin") for clock in
         ("cpu_s", "wall_s")))
        for name in ("add", "move p95, no outlines", "move p95", "select", "classify")
    ]  # fmt: skip
    titles = ("step", "napari CPU s", "napari wall s", "plugin CPU s", "plugin wall s")
    print_table(f"{chosen.objects:,} outlines, load {found['load_before']:.1f}", titles, rows)
    write_json(chosen.json, found)


if __name__ == "__main__":
    main()
