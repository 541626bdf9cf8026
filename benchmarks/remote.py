"""Time the first view of a 1 GB slide on a server that answers after 50 ms.

Usage: ``python -m benchmarks.remote [--side 69632 --latency 0.05 --folder DIR --json FILE]``

The server is that of the tests, in a separate process on this machine, and counts requests. Every
reader opens the slide, reads the level that a screen of 1200 x 950 pixels shows first, and then as
many pixels of level 0 at other positions.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tifffile

from benchmarks.common import SLIDES, ensure_slide, verdict, write_json
from benchmarks.stage import ensure_display, open_viewer, own_settings
from napari_wsigpu import open_slide, wait
from napari_wsigpu.cli.bench import print_table
from napari_wsigpu.storage.remote import remote_source as remote
from napari_wsigpu.storage.remote.disk_cache import FOLDER, disk_cache
from tests.fakes.rangeserver import RangeServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from napari import Viewer
    from numpy.typing import NDArray

    Read = Callable[[int, int, int], NDArray[Any]]

WIDTH, HEIGHT = 1200, 950
PLACES = 5
ROUNDS = 3
MOST_SECONDS, MOST_REQUESTS = 1.0, 15
GAPS = (0, 1, 4, 16)
BANDWIDTHS = {"unlimited": float("inf"), "100 Mbit/s": 12.5e6}
READERS = ("napari-wsigpu", "napari-wsigpu, second time", "tiffslide over fsspec")


class Cost(NamedTuple):
    """The cost of an action."""

    seconds: float
    requests: int
    megabytes: float

    def and_then(self, other: Cost) -> Cost:
        """Return the sum of two costs."""
        return Cost(
            round(self.seconds + other.seconds, 3),
            self.requests + other.requests,
            round(self.megabytes + other.megabytes, 2),
        )


class Server:
    """A server in a separate process."""

    def __init__(self, folder: Path, latency: float) -> None:
        context = get_context("spawn")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=serve, args=(folder, latency, far), daemon=True)
        self._process.start()
        self._url: str = self._pipe.recv()

    def url(self, path: Path) -> str:
        """Return a file's URL."""
        return self._url + path.name

    def take(self, bandwidth: float = float("inf")) -> tuple[int, int]:
        """Return the requests since the last call, and the bytes sent."""
        self._pipe.send(bandwidth)
        requests, size = self._pipe.recv()
        return requests, size

    def measure(self, action: Callable[[], Any]) -> tuple[Any, Cost]:
        """Run an action; return its result and its cost."""
        self.take()
        begin = time.perf_counter()
        found = action()
        seconds = time.perf_counter() - begin
        requests, size = self.take()
        return found, Cost(round(seconds, 3), requests, round(size / 1e6, 2))


def serve(folder: Path, latency: float, pipe: Connection) -> None:
    """Serve a folder and report requests."""
    with RangeServer(folder, latency) as server:
        pipe.send(server.url(""))
        with suppress(EOFError):
            while True:
                server.bandwidth = pipe.recv()
                pipe.send((len(server.requests), server.sent))
                server.requests, server.sent = [], 0


def ours(url: str) -> tuple[Any, Read]:
    """Open with this package."""
    slide = open_slide(url, device="cpu")

    def read(x: int, y: int, side: int) -> NDArray[Any]:
        level = slide.level_dimensions.index((side, side))
        return np.asarray(slide.read_region((x, y), (WIDTH, HEIGHT), level))

    return slide, read


def tiffslide(url: str) -> tuple[Any, Read]:
    """Open with tiffslide, whose files fsspec reads in blocks."""
    from tiffslide import TiffSlide

    slide = TiffSlide(url)

    def read(x: int, y: int, side: int) -> NDArray[Any]:
        level = slide.level_dimensions.index((side, side))
        return np.asarray(slide.read_region((x, y), level, (WIDTH, HEIGHT), as_array=True))

    return slide, read


def compare(server: Server, path: Path, positions: list[tuple[int, int]]) -> Any:
    """Measure all readers alternately."""
    found: dict[str, dict[str, list[Cost]]] = {}
    with tifffile.TiffFile(path) as file:
        finest, coarsest = (file.pages[index].aspage().imagewidth for index in (0, -1))
        expected = file.pages[-1].asarray()[:HEIGHT, :WIDTH]
    for _ in range(ROUNDS):
        disk_cache().clear()
        for name in READERS:
            opener = tiffslide if name.startswith("tiffslide") else ours
            (slide, read), opened = server.measure(partial(opener, server.url(path)))
            pixels, viewed = server.measure(partial(read, 0, 0, coarsest))
            height, width = expected.shape[:2]
            assert np.abs(pixels[:height, :width].astype(int) - expected).max() <= 1
            first = opened.and_then(viewed)
            costs = found.setdefault(name, {"open": [], "first view": [], "level 0": []})
            costs["open"].append(opened)
            costs["first view"].append(first)
            for x, y in positions:
                costs["level 0"].append(server.measure(partial(read, x, y, finest))[1])
            slide.close()
    return {
        name: {what: middle(costs)._asdict() for what, costs in parts.items()}
        for name, parts in found.items()
    }


def middle(costs: list[Cost]) -> Cost:
    """Return the cost with the median time."""
    return sorted(costs)[len(costs) // 2]


def by_gap(server: Server, path: Path, positions: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Measure views of level 0 for several sizes of the gap that a request may span."""
    rows = []
    usual = remote.MERGED_GAP
    for name, bandwidth in BANDWIDTHS.items():
        for gap in GAPS:
            remote.MERGED_GAP = gap
            disk_cache().clear()
            with open_slide(server.url(path), device="cpu") as slide:
                costs = []
                for position in positions:
                    server.take(bandwidth)
                    begin = time.perf_counter()
                    slide.read_region(position, (WIDTH, HEIGHT))
                    seconds = time.perf_counter() - begin
                    requests, size = server.take()
                    costs.append(Cost(round(seconds, 3), requests, round(size / 1e6, 2)))
            rows.append(
                {"bandwidth": name, "gap_kib": gap * remote.BLOCK >> 10, **middle(costs)._asdict()}
            )
    remote.MERGED_GAP = usual
    return rows


def in_napari(server: Server, path: Path) -> dict[str, Any]:
    """Measure the time until napari shows a slide exactly, after a local slide as a warm-up."""
    from napari_wsigpu.viewer.contributions.sample_slide import sample_path

    viewer = open_viewer()

    def show(opened: str | Path) -> Cost:
        disk_cache().clear()
        cost = server.measure(partial(open_and_wait, viewer, opened))[1]
        viewer.layers.clear()
        return cost

    show(sample_path())
    found: dict[str, str | Path] = {"remote": server.url(path), "local": path}
    costs = {name: middle([show(opened) for _ in range(ROUNDS)]) for name, opened in found.items()}
    viewer.close()
    return {name: cost._asdict() for name, cost in costs.items()}


def open_and_wait(viewer: Viewer, path: str | Path) -> None:
    """Open a slide, and return when its view is exact."""
    [layer] = viewer.open(path, plugin="napari-wsigpu")
    wait(layer)


@contextmanager
def own_cache() -> Iterator[None]:
    """Use a temporary disk cache instead of the user's."""
    with TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        yield


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time slides on a server.")
    parser.add_argument("--side", type=int, default=69632)
    parser.add_argument("--latency", type=float, default=0.05)
    parser.add_argument("--folder", type=Path, default=SLIDES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ensure_display()
    path = ensure_slide(options.folder, options.side, "jpeg")
    rng = random.Random(0)
    last = options.side - WIDTH
    positions = [(rng.randrange(last), rng.randrange(last)) for _ in range(PLACES)]
    with own_cache(), own_settings() as environment:
        os.environ.update(environment)
        server = Server(options.folder, options.latency)
        readers = compare(server, path, positions)
        gaps = by_gap(server, path, positions)
        napari = in_napari(server, path)
    rows = [
        [name, what, *map(str, cost.values())]
        for name, parts in readers.items()
        for what, cost in parts.items()
    ]
    rows += [
        ["napari-wsigpu in napari", name, *map(str, cost.values())] for name, cost in napari.items()
    ]
    title = f"A slide of {path.stat().st_size / 1e9:.2f} GB, {options.latency * 1e3:g} ms"
    print_table(title, ["reader", "what", "s", "requests", "MB"], rows)
    print_table(
        "Level 0 by gap", list(gaps[0]), [[str(value) for value in row.values()] for row in gaps]
    )
    views = [readers[READERS[0]]["first view"], napari["remote"]]
    passed = all(
        view["seconds"] <= MOST_SECONDS and view["requests"] <= MOST_REQUESTS for view in views
    )
    print(f"\nFirst view in {MOST_SECONDS:g} s and {MOST_REQUESTS} requests: {verdict(passed)}")
    record = {
        "slide_gb": round(path.stat().st_size / 1e9, 3),
        "latency_ms": options.latency * 1e3,
        "readers": readers,
        "napari": napari,
        "level_0_by_gap": gaps,
        "first_view": verdict(passed),
    }
    write_json(options.json, record)


if __name__ == "__main__":
    main()
