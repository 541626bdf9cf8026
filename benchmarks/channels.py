"""Time a real window that shows many channels: one composite, and napari's layer per channel.

Usage: ``python -m benchmarks.channels [--channels 40 --side 16384 --visible 8 40 --json FILE]``;
add ``--device cuda --canvas 3700x1900 --modes ours`` for a GPU and a screen of 3840 x 2160 pixels.

Each mode runs in its own process. In ``ours`` the plugin opens the slide as one layer; in
``layers`` its channels are added as separate layers, which napari slices and blends. A movement is
timed until the first frame, and until the frame is exact: for ``ours``, until rows of the canvas
equal the slide's stored pixels composed in float64, within 1; for ``layers``, whose blending has no
such reference, until every layer reports that it is exact. "Contrast" changes the limits of one
channel, and counts the tiles that are decoded until the frame is exact.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np
import tifffile
from qtpy.QtCore import QEventLoop, QTimer
from qtpy.QtWidgets import QDockWidget

from benchmarks.common import SLIDES, write_json
from benchmarks.displaying import Canvas, Clock, Truth
from benchmarks.patches import loop_ms
from benchmarks.stage import (
    CANVAS,
    LARGE_SCREEN,
    ensure_display,
    fit_canvas,
    open_viewer,
    run_part,
    settle,
    size_of,
)
from benchmarks.walking import Pose, go_to
from napari_wsigpu import open_slide
from napari_wsigpu.cli.bench import output_file, print_table
from napari_wsigpu.viewer.drawing.progressive import display_of
from napari_wsigpu.viewer.layers.slide_layers import (
    channel_layers,
    show_composite,
    shown_composite,
    slide_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from napari_wsigpu import Slide
    from napari_wsigpu.model.composite import Composite

MODES = ("ours", "layers")
TILE, LEVELS, UNIQUE = 256, 3, 12
PATIENCE = 20.0
OFFSETS, BYTE_COUNTS = 324, 325
WIDTHS = {3: "<u2", 4: "<u4", 16: "<u8"}  # types of tags: SHORT, LONG, LONG8
TIMES = "first_ms", "exact_ms", "contrast_ms"
COUNTS = "decoded_by_contrast", "never_exact"


def make_channels(path: Path, channels: int, side: int) -> None:
    """Write an OME-TIFF of uint16 channels, whose tiles share a few deflated ones per channel."""
    rng = np.random.default_rng(0)
    options: dict[str, Any] = {
        "tile": (TILE, TILE), "compression": "zlib", "photometric": "minisblack"
    }  # fmt: skip
    with tifffile.TiffWriter(path, ome=True, bigtiff=True) as file:
        for number in range(LEVELS):
            size = side >> (2 * number)
            more: dict[str, Any] = {"subfiletype": 1} if number else {"subifds": LEVELS - 1}
            names = [f"Marker {channel}" for channel in range(channels)]
            spacing = {"PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
            metadata = {"axes": "CYX", "Channel": {"Name": names}, **spacing}
            file.write(
                repeat(b"\0"), shape=(channels, size, size), dtype=np.uint16,
                metadata=None if number else metadata, **options, **more,
            )  # fmt: skip
    with path.open("r+b") as file, tifffile.TiffFile(path) as tiff:
        for number in range(channels):
            page = tiff.pages[number]
            assert isinstance(page, tifffile.TiffPage)
            tiles = [imagecodecs.zlib_encode(_cells(rng).tobytes(), level=6) for _ in range(UNIQUE)]
            file.seek(0, 2)
            at = file.tell()
            file.write(b"".join(tiles))
            lengths = np.array([len(tile) for tile in tiles], np.uint64)
            starts = at + np.cumsum(lengths) - lengths
            for level in (page, *(page.pages or ())):
                assert isinstance(level, tifffile.TiffPage)
                chosen = rng.integers(0, UNIQUE, len(level.dataoffsets))
                for code, values in ((OFFSETS, starts), (BYTE_COUNTS, lengths)):
                    file.seek(level.tags[code].valueoffset)
                    kind = WIDTHS[level.tags[code].dtype]
                    file.write(values[chosen].astype(kind).tobytes())


def _cells(rng: np.random.Generator) -> NDArray[np.uint16]:
    """Return a tile of blurred spots on a dim background, with noise."""
    spots = np.where(rng.random((TILE, TILE)) > 0.998, 60_000.0 * rng.random((TILE, TILE)), 0)
    spread = np.fft.rfftfreq(TILE)[None] ** 2 + np.fft.fftfreq(TILE)[:, None] ** 2
    blurred = np.fft.irfft2(np.fft.rfft2(spots) * np.exp(-200 * spread), spots.shape)
    return rng.poisson(200 + blurred.clip(0)).clip(0, 65_535).astype(np.uint16)


class ComposedTruth(Truth):
    """The expected content of a canvas that shows a composite, computed in float64."""

    def __init__(self, slide: Slide, size: tuple[int, int], settings: Composite) -> None:
        super().__init__(slide, size, 1)
        self.settings = settings

    def _shown(self, level: int, y: NDArray[np.int64], x: NDArray[np.int64]) -> NDArray[Any]:
        sums = np.zeros((len(y), len(x), 3))
        for index in self.settings.visible:
            style = self.settings.channels[index]
            assert style.window is not None
            low, high = style.window
            stored = self._stored(level, y, x, index).astype(np.float64)
            bright = ((stored - low) / (high - low)).clip(0, 1) ** style.gamma
            encoded = (
                bright[..., None] * np.frombuffer(bytes.fromhex(style.color[1:]), np.uint8) / 255
            )
            sums += np.where(
                encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4
            )
        sums = sums.clip(0, 1)
        shown = np.where(sums <= 0.0031308, 12.92 * sums, 1.055 * sums ** (1 / 2.4) - 0.055)
        return np.round(255 * shown)


class Window:
    """One viewer with one slide of many channels."""

    def __init__(self, mode: str, path: Path, device: str, size: tuple[int, int]) -> None:
        self.clock, self.mode = Clock(), mode
        self.viewer = open_viewer()
        begin = time.perf_counter()
        if mode == "ours":
            self.layers = self.viewer.open(path, plugin="napari-wsigpu")
        else:
            slide = open_slide(path)
            count = len(slide.channels)
            for data, attributes, _ in channel_layers(slide, range(count), private=False):
                self.viewer.add_image(data, **attributes)
            self.layers = list(self.viewer.layers)
        settle(0)
        self.opening = time.perf_counter() - begin
        shown = slide_of(self.layers[0])
        assert shown is not None
        self.slide = shown
        self.slide.device = device
        self._pose = Pose(1.0, 0.0, 0.0)
        settle(1)
        for dock in self.viewer.window._qt_window.findChildren(QDockWidget):
            dock.hide()
        self.viewer.canvas.overlays.scale_bar.visible = False
        fit_canvas(self.viewer, size)
        for layer in self.layers:
            layer.interpolation2d = "nearest"
        self.canvas = Canvas(self.viewer, self.clock)
        self.rows = range(50, self.canvas.size[1], 100)
        self._truth = open_slide(path, "cpu")

    def show(self, visible: int) -> None:
        """Show the first channels only."""
        if self.mode == "ours":
            show_composite(self.layers[0], self.slide.composite(range(visible)))
        for number, layer in enumerate(self.layers):
            layer.visible = number < visible

    def wait_for_prefetching(self) -> None:
        """Return once no tile has been decoded for a while."""
        before = -1
        while before != self.decoded:
            before = self.decoded
            settle(0.3)

    @property
    def decoded(self) -> int:
        """Tiles decoded so far."""
        return sum(self.slide.stats()["decoded"].values())

    def move(self, pose: Pose | None, limits: float = 0.0) -> tuple[float, float | None]:
        """Move the camera, or change limits; return the seconds until the first and exact frame."""
        composite, expected, truth = shown_composite(self.layers[0]), None, None
        if composite is not None and limits:
            style = composite.channels[0]
            composite = composite.styled(0, _narrowed(style, limits))
        if composite is not None:
            truth = ComposedTruth(self._truth, self.canvas.size, composite)
            expected = truth.rows(self._pose if pose is None else pose, self.rows)
        settle(0.1)
        loop = QEventLoop()
        exact: list[float] = []
        shown = [layer for layer in self.layers if layer.visible]

        def on_frame() -> None:
            if truth is not None and expected is not None:
                done = truth.agrees(self.canvas.read(self.rows), expected)
            else:
                displays = map(display_of, shown)
                done = all(display is None or display.exact for display in displays)
            if done and not exact:
                exact.append(self.canvas.frames[-1].end)
                loop.quit()

        self.canvas.frames.clear()
        self.canvas.on_frame = on_frame
        QTimer.singleShot(round(PATIENCE * 1e3), loop.quit)
        begin = self.clock.now()
        if pose is not None:
            self._pose = pose
            go_to(self.viewer, self.layers[0], pose)
        elif composite is not None:
            show_composite(self.layers[0], composite)
        else:
            low, high = self.layers[0].contrast_limits
            self.layers[0].contrast_limits = low, low + (high - low) * limits
        loop.exec()
        self.canvas.on_frame = lambda: None
        frames = self.canvas.frames
        first = frames[0].end - begin if frames else PATIENCE
        return first, exact[0] - begin if exact else None


def _narrowed(style: Any, share: float) -> Any:
    low, high = style.window
    return replace(style, window=(low, low + (high - low) * share))


def jumps(slide: Slide, seed: int) -> Iterator[Pose]:
    """Yield random positions endlessly."""
    chance = random.Random(seed)
    width, height = slide.dimensions
    while True:
        y, x = (int(chance.uniform(0.1, 0.9) * side) + 0.25 for side in (height, width))
        yield Pose(1.0, y, x)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Time one mode in this process."""
    window = Window(args.mode, args.slide, args.device, args.canvas)
    figures: dict[str, Any] = {"mode": args.mode, "open_ms": window.opening * 1e3}
    for visible in args.visible:
        window.show(visible)
        poses = jumps(window.slide, visible)
        window.move(next(poses))
        moves, contrasts, decoded = [], [], 0
        for turn in range(args.repeats):
            window.wait_for_prefetching()
            window.slide.clear_cache()
            moves.append(window.move(next(poses)))
            window.wait_for_prefetching()
            window.move(None, 0.8)
            window.wait_for_prefetching()  # also for the overview, which the cache has dropped
            before = window.decoded
            contrasts.append(window.move(None, 0.9 if turn % 2 else 1.1))
            decoded += window.decoded - before
        figures[str(visible)] = {
            "first_ms": [1e3 * first for first, _ in moves],
            "exact_ms": [1e3 * (exact or PATIENCE) for _, exact in moves],
            "contrast_ms": [1e3 * (exact or PATIENCE) for _, exact in contrasts],
            "never_exact": sum(exact is None for _, exact in moves + contrasts),
            "decoded_by_contrast": decoded,
        }
    return figures | {"renderer": window.canvas.renderer, "loop_ms": loop_ms()}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time a window that shows many channels.")
    parser.add_argument("--channels", type=int, default=40)
    parser.add_argument("--side", type=int, default=16384)
    parser.add_argument("--visible", type=int, nargs="+", default=[8, 40])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--canvas", type=size_of, default=CANVAS, metavar="WIDTHxHEIGHT")
    parser.add_argument("--folder", type=Path, default=SLIDES, help="where slides are kept")
    parser.add_argument("--json", type=output_file, help="write all figures to this file")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--slide", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:
        args.json.write_text(json.dumps(measure(args)), "utf-8")
        return 0
    ensure_display(LARGE_SCREEN)
    slide = args.folder / f"channels-{args.channels}-{args.side}.ome.tif"
    if not slide.exists():
        args.folder.mkdir(parents=True, exist_ok=True)
        make_channels(slide, args.channels, args.side)
    runs = []
    for mode in args.modes:
        with TemporaryDirectory() as folder:
            result = Path(folder) / "part.json"
            words: list[Any] = ["--mode", mode, "--slide", slide, "--json", result]
            words += ["--repeats", args.repeats, "--visible", *args.visible]
            words += ["--device", args.device, "--canvas", "x".join(map(str, args.canvas))]
            on_gpu = args.device != "cpu"
            run_part("benchmarks.channels", [str(word) for word in words], 900, gpu=on_gpu)
            runs.append(json.loads(result.read_text("utf-8")))
    medians = [
        {"mode": run["mode"], "visible": visible, "open_ms": run["open_ms"]}
        | {name: statistics.median(run[str(visible)][name]) for name in TIMES}
        | {name: run[str(visible)][name] for name in COUNTS}
        for run in runs
        for visible in args.visible
    ]
    rows = [
        [f"{value:.0f}" if isinstance(value, float) else str(value) for value in row.values()]
        for row in medians
    ]
    columns = ["mode", "visible", "open", "first", "exact", "contrast", "decoded", "never"]
    print_table("A window of many channels, ms", columns, rows)
    setup = {"slide": slide.name, "device": args.device, "canvas": args.canvas}
    write_json(args.json, {**setup, "medians": medians, "runs": runs})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
