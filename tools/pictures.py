"""Take the screenshots in the documents: the inspector and annotations of the sample slide.

Usage: ``python tools/pictures.py [docs/pictures]``, on a display or under Xvfb.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from PIL import Image

from demo import has_display, run_on_xvfb

if TYPE_CHECKING:
    from napari import Viewer

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
WINDOW = 1280, 800
SETTLED_MS = 4000  # until docks are laid out and the slide is fitted to what they leave


def main() -> int:
    """Take all pictures; return the exit status."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    if not has_display():
        return run_on_xvfb([sys.executable, __file__, str(folder)])
    with TemporaryDirectory() as own:  # neither the user's settings nor unsaved annotations
        os.environ.update(NAPARI_CONFIG=f"{own}/napari.yaml", XDG_STATE_HOME=own)
        take_pictures(folder)
    return 0


def take_pictures(folder: Path) -> None:
    """Take a picture of the inspector, dark, and one of annotations, light."""
    import napari

    viewer = napari.Viewer(show_welcome_screen=False)
    viewer.window.resize(*WINDOW)
    viewer.open_sample("napari-wsigpu", "he_phantom")
    _settle(viewer)
    _take(viewer, folder / "inspector-dark.png")
    _magnify(viewer)
    viewer.theme = "light"
    _take(viewer, folder / "annotate-light.png")
    viewer.close()


def _magnify(viewer: Viewer) -> None:
    """Look at a place of the slide at 10x, and annotate it."""
    import numpy as np

    from napari_wsigpu.viewer.contributions.view_commands import magnify_10
    from napari_wsigpu.widgets.annotations.tool_commands import draw_rectangle

    layer = viewer.layers[0]
    draw_rectangle(viewer)
    magnify_10(viewer)
    center = layer.extent.world.mean(axis=0)
    viewer.scene.camera.center = (0, *center)
    shapes = viewer.layers.selection.active
    for offset, side in (((-180, -240), (150, 200)), ((40, 60), (170, 190))):
        corner = center + offset
        box = [shapes.world_to_data(each) for each in (corner, corner + side)]
        shapes.add_rectangles(np.array(box))
    _settle(viewer)


def _settle(viewer: Viewer) -> None:
    from qtpy.QtTest import QTest

    from napari_wsigpu import wait

    QTest.qWait(SETTLED_MS)
    wait(viewer.layers[0], 60)
    QTest.qWait(SETTLED_MS)


def _take(viewer: Viewer, target: Path) -> None:
    from qtpy.QtTest import QTest

    QTest.qWait(SETTLED_MS // 4)
    shown = Image.fromarray(viewer.screenshot(canvas_only=False, flash=False)).convert("RGB")
    shown.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(target)
    print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
