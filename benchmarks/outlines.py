"""Time adding very many outlines to napari, as labels and as shapes.

Usage: ``python -m benchmarks.outlines [--objects 100000 --rounds 3 --json FILE]``; up to 20 000
outlines always become shapes.

No window is opened, so napari's own drawing is not included.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from napari.layers import Layer, Shapes

from benchmarks.common import write_json
from napari_wsigpu import Annotation, read_geojson, write_geojson
from napari_wsigpu.cli.bench import print_table
from napari_wsigpu.viewer.annotations.annotation_layers import annotation_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIDE, RADIUS, VERTICES = 60_000, 11, 20
VIEW = 1500  # pixels
CLASSES = (("Tumor", (200, 0, 0)), ("Stroma", (0, 200, 0)))


def cells(count: int) -> list[Annotation]:
    """Return nucleus-like objects at random positions of a slide."""
    turn = np.linspace(0, 2 * np.pi, VERTICES, endpoint=False)
    circle = RADIUS * np.stack([np.cos(turn), np.sin(turn)], axis=1)
    positions = np.random.default_rng(0).uniform(RADIUS, SIDE - RADIUS, (count, 2))
    return [
        Annotation("polygon", (circle + position,), "", *CLASSES[number % 2], "detection")
        for number, position in enumerate(positions)
    ]


def timed(work: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Return the shortest CPU and wall times of some rounds."""
    taken = []
    for _ in range(rounds):
        begin, cpu = time.perf_counter(), time.process_time()
        work()
        taken.append((time.process_time() - cpu, time.perf_counter() - begin))
    return {"cpu_s": min(cpu for cpu, _ in taken), "wall_s": min(wall for _, wall in taken)}


def measure(count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the time of each step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cells.geojson"
        write_geojson(path, cells(count))
        found = {"read": timed(lambda: read_geojson(path), rounds)}
        annotations = read_geojson(path)
    Shapes([np.eye(3, 2)], shape_type="polygon")  # load what napari imports once
    found["labels"] = timed(
        lambda: [Layer.create(*each) for each in annotation_layers(annotations, "cells")], rounds
    )
    [(levels, _, _)] = annotation_layers(annotations, "cells")
    part = slice(SIDE // 2, SIDE // 2 + VIEW)
    found["view"] = timed(lambda: levels[0][part, part], rounds)
    outlines = [annotation.rings[0][:, ::-1] for annotation in annotations]
    found["shapes"] = timed(
        lambda: Shapes(outlines, shape_type="polygon", face_color="transparent"), 1
    )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    steps = measure(chosen.objects, chosen.rounds)
    rows = [(name, f"{each['cpu_s']:.2f}", f"{each['wall_s']:.2f}") for name, each in steps.items()]
    print_table(f"{chosen.objects:,} outlines", ("step", "processor s", "wall s"), rows)
    write_json(chosen.json, {"objects": chosen.objects, "vertices": VERTICES, "steps": steps})


if __name__ == "__main__":
    main()
