"""Do with a damaged slide all that people do with slides, in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import resource
import select
import shutil
import signal
import sys
import time
import traceback
import warnings
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu import SlideError, convert, open_slide
from napari_wsigpu.model.privacy import masked
from napari_wsigpu.storage.buffers import RegionMemory, TileMemory
from tests import probe

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from napari_wsigpu import Slide

ADDRESSES = 6 << 30  # bytes, what a process may take at all
MOST_MEMORY = 1 << 30
MOST_CPU_SECONDS = 5.0
MOST_SECONDS = 60.0
SIDE = 200
MOST_LEVELS = 8
MOST_CONVERTED = 1 << 20  # pixels
LONGEST_SENTENCE = 1200
SLOW_TO_IMPORT = ("pydicom", "wsidicom", "zarr")
PACKAGE = f"{Path('napari_wsigpu')}{os.sep}"


class Finding(NamedTuple):
    """What should not happen.

    Attributes
    ----------
    kind : str
        "raw" (an exception that is no `SlideError`), "sentence", "pixels" (others the second
        time), "memory", "slow", "hang", "crash".
    where : str
        What tells it from others of its kind.
    details : str
        For who mends it.
    """

    kind: str
    where: str
    details: str


def prepare() -> None:
    """Import what would be imported in each process anew."""
    for name in SLOW_TO_IMPORT:
        importlib.import_module(name)


def examine(path: Path) -> list[Finding]:
    """Use a slide, and say what should not have happened. Nothing of this process changes."""
    receiver, sender = os.pipe()
    before = time.monotonic()
    child = os.fork()
    if child == 0:
        _run(path, sender)
    os.close(sender)
    said, hung = b"", False
    while True:
        left = before + MOST_SECONDS - time.monotonic()
        if left <= 0 or not select.select([receiver], [], [], left)[0]:
            os.kill(child, signal.SIGKILL)
            hung = True
            break
        part = os.read(receiver, 1 << 16)
        if not part:
            break
        said += part
    os.close(receiver)
    _, status, usage = os.wait4(child, 0)
    if hung:
        return [Finding("hang", path.name, said.decode(errors="replace")[-2000:])]
    try:
        done = json.loads(said)
    except ValueError:
        return [Finding("crash", f"status {status}", said.decode(errors="replace")[-2000:])]
    findings = [Finding(*item) for item in done["findings"]]
    if done["grown"] > MOST_MEMORY:
        findings.append(Finding("memory", done["where"], f"{done['grown'] >> 20} MiB"))
    seconds = usage.ru_utime + usage.ru_stime
    if seconds > MOST_CPU_SECONDS:
        findings.append(Finding("slow", done["where"], f"{seconds:.1f} s, {done['slowest']}"))
    return findings


def _soil_memory() -> None:
    """Have memory that pixels are put into filled with another number each time it is taken."""
    numbers = cycle(range(1, 251))
    allocate, empty = TileMemory.allocate, RegionMemory.empty

    def allocated(memory: TileMemory, size: int) -> NDArray[np.uint8]:
        block = allocate(memory, size)
        block.fill(next(numbers))
        return block

    def emptied(memory: RegionMemory, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        pixels = empty(memory, shape, dtype)
        pixels.reshape(-1).view(np.uint8).fill(next(numbers))
        return pixels

    for kind, name, soiled in (
        (TileMemory, "allocate", allocated),
        (RegionMemory, "empty", emptied),
    ):
        setattr(kind, name, soiled)


def _run(path: Path, sender: int) -> None:
    """Use a slide, write what was found to a pipe, and end this process."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        warnings.simplefilter("error")
        _soil_memory()
        user = _User(path)
        before = probe.peak()
        user.use()
        said = {
            "findings": user.findings,
            "grown": probe.peak() - before,
            "slowest": f"{user.slowest[1]} {user.slowest[0]:.1f} s",
            "where": user.where,
        }
        data = json.dumps(said).encode()
        while data:
            data = data[os.write(sender, data) :]
    finally:
        os._exit(0)


class _User:
    """Somebody who tries everything."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.findings: list[Finding] = []
        self.slowest = (0.0, "")
        self.where = "nothing opened"

    def use(self) -> None:
        slide = self.attempt("open", lambda: open_slide(self.path, "cpu"))
        if slide is None:
            return
        self.where = slide.vendor
        self.attempt("metadata", lambda: json.dumps(slide.metadata, allow_nan=False))
        self.attempt("masked", lambda: json.dumps(masked(slide.metadata), allow_nan=False))
        self.attempt("words", lambda: (repr(slide), str(slide), hash(slide)))
        self.attempt("pickle", lambda: pickle.loads(pickle.dumps(slide)).close())
        self.attempt("profile", lambda: slide.icc_profile)
        for text in slide.layout.problems:
            self.check_sentence("problem", text)
        for number, (width, height) in enumerate(slide.level_dimensions[:MOST_LEVELS]):
            step = slide.level_downsamples[number]
            for x, y in {(0, 0), (max(0, width - SIDE), max(0, height - SIDE))}:
                place = int(x * step), int(y * step)
                self.attempt("region", lambda at=place, level=number: self.twice(slide, at, level))
            self.attempt(
                "tolerant",
                lambda level=number: slide.level_array(level, tolerant=True)[:SIDE, :SIDE],
            )
        last = {"z": slide.planes.size_z - 1, "t": slide.planes.size_t - 1}
        self.attempt("plane", lambda: slide.read_region((0, 0), (SIDE, SIDE), **last))
        self.attempt("outside", lambda: slide.read_region((-50, -50), (100, 100), 0))
        if slide.layout.icc is not None:
            self.attempt("srgb", lambda: slide.read_region((0, 0), (99, 99), 0, color="srgb"))
        for name in list(slide.associated_images)[:8]:
            self.attempt("associated", lambda image=name: slide.associated_images[image].read())
        for name in list(slide.labels)[:4]:
            self.attempt("labels", lambda label=name: slide.labels[label].levels[0][:SIDE, :SIDE])
        if np.prod(slide.dimensions, dtype=float) <= MOST_CONVERTED:
            for suffix in (".tif", ".zarr"):
                target = self.path.parent / f"converted{suffix}"
                self.attempt("convert", lambda to=target: convert(self.path, to))
                if target.exists():
                    shutil.rmtree(target) if target.is_dir() else target.unlink()
        self.attempt("close", slide.close)

    def twice(self, slide: Slide, place: tuple[int, int], level: int) -> None:
        """Read a region again: what was in memory before is in none of its pixels."""
        first = slide.read_region(place, (SIDE, SIDE), level)
        slide.clear_cache()
        again = slide.read_region(place, (SIDE, SIDE), level)
        if first.tobytes() != again.tobytes():
            kind = f"{slide.vendor} {slide.layout.levels[level].encoding.compression}"
            self.findings.append(Finding("pixels", kind, f"level {level} at {place}"))

    def attempt(self, what: str, action: Callable[[], Any]) -> Any:
        start = time.monotonic()
        try:
            return action()
        except SlideError as error:
            self.check_sentence(what, str(error))
        except BaseException as error:
            details = "".join(traceback.format_exception(error))
            self.findings.append(Finding("raw", f"{what}: {_origin(error)}", details[-4000:]))
        finally:
            self.slowest = max(self.slowest, (time.monotonic() - start, what))
        return None

    def check_sentence(self, what: str, text: str) -> None:
        if "\n" in text or len(text) > LONGEST_SENTENCE or not text.rstrip().endswith((".", "…")):
            self.findings.append(Finding("sentence", f"{what}: {text[:40]!r}", text[:2000]))


def _origin(error: BaseException) -> str:
    """Return an exception's type, and the last line of this package that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if PACKAGE in frame.filename] or frames
    return f"{type(error).__name__} {Path(own[-1].filename).name}:{own[-1].name}"
