"""Open the sample slide in napari, or render it to a PNG if there is no display."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

PICTURE = "demo.png"
SIZE = 1500, 950  # wide enough for the inspector to open by itself
PACKAGES = (
    "xvfb xauth libgl1 libegl1 libopengl0 libglx-mesa0 libgl1-mesa-dri libxkbcommon-x11-0 "
    "libxcb-cursor0 libxcb-icccm4 libxcb-image0 libxcb-keysyms1 libxcb-randr0 "
    "libxcb-render-util0 libxcb-shape0 libxcb-xinerama0 libxcb-xkb1 libdbus-1-3 "
    "libfontconfig1 libglib2.0-0"
)


def main() -> int:
    """Run the demo; return the exit status."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("slide", nargs="?", help="a slide; the sample by default")
    parser.add_argument("--picture", help="save a screenshot to this PNG and exit")
    options = parser.parse_args()
    if has_display():
        show(options.slide, options.picture)
        return 0
    return run_under_xvfb(options.slide, options.picture or PICTURE)


def has_display() -> bool:
    """Return whether a window can be opened."""
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def run_under_xvfb(slide: str | None, picture: str) -> int:
    """Run this program again under Xvfb."""
    print(f"There is no display: rendering to {picture} under Xvfb.", flush=True)
    program = [sys.executable, __file__, "--picture", picture]
    return run_on_xvfb([*program, *([slide] if slide else [])])


def run_on_xvfb(program: list[str]) -> int:
    """Run a program under Xvfb, or print what is missing; return the exit status."""
    xvfb = shutil.which("xvfb-run")
    if xvfb is None:
        print("There is neither a display for napari nor Xvfb to render a picture.")
        print(f"Use a desktop, or install Xvfb: sudo apt-get install {PACKAGES}")
        return 1
    command = [xvfb, "-a", "-s", "-screen 0 1600x1000x24"]
    status = subprocess.run([*command, *program], check=False, timeout=300).returncode
    if status:
        print(f"napari failed to render. It needs: sudo apt-get install {PACKAGES}")
    return status


def show(slide: str | None, picture: str | None) -> None:
    """Open a slide; save a picture and close, or run napari until the user closes it."""
    import napari
    from qtpy.QtTest import QTest

    from napari_wsigpu import wait

    viewer = napari.Viewer()
    viewer.window.resize(*SIZE)
    if slide is None:
        layers = viewer.open_sample("napari-wsigpu", "he_phantom")
    else:
        layers = viewer.open(slide, plugin="napari-wsigpu")
    if picture is None:
        napari.run()
        return
    for _ in range(
        2
    ):  # the inspector opens after the slide, and the view changes again after the inspector
        QTest.qWait(500)
        wait(layers[0])
    viewer.screenshot(picture, canvas_only=False)
    print(f"Saved {Path(picture).absolute()}")
    viewer.close()


if __name__ == "__main__":
    raise SystemExit(main())
