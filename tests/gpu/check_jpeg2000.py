"""Checks of the JPEG 2000 kernels that take longer than tests: many streams, on a GPU.

Run as ``python -m tests.gpu.check_jpeg2000 files FILE_OR_FOLDER ... [--json OUT]``,
``... threads SLIDE ... [--seconds 60]`` or, under compute-sanitizer, ``... mutated``. Ends with
status 1 if something is wrong.

``files`` opens slides, and code streams as the one tile of a TIFF file, on the GPU and on the CPU,
and compares level 0. ``threads`` has many threads read random regions, and compares. ``mutated``
damages streams of many forms: it needs that no sound neighbour changes and no launch fails, with
each part of the decoder's memory an allocation of its own, so that the sanitizer sees a wrong step.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np

from napari_wsigpu import open_slide
from napari_wsigpu.gpu.jpeg2000 import form_decoder
from napari_wsigpu.gpu.jpeg2000.form_decoder import Form, FormDecoder
from napari_wsigpu.gpu.jpeg2000.jpeg2000_engine import form_of_stream
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.tags import COMPRESSION
from napari_wsigpu.slide import runtime
from tests.gpu import test_jpeg2000 as forms
from tests.writers import openjpeg, tiffbytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from napari_wsigpu import Slide

BARE = {".j2k", ".j2c", ".jpc", ".jp2", ".jpx"}
START = b"\xff\x4f\xff\x51"
LARGEST = 1 << 26
AT_ONCE, SIDE = 66, 512


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("files", "threads", "mutated"))
    parser.add_argument("paths", type=Path, nargs="*")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1, help="of what is damaged")
    parser.add_argument("--fast", action="store_true", help="damage high-throughput streams")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    check = {"files": files, "threads": threads, "mutated": mutated}[given.what]
    figures, passed = check(given)
    text = json.dumps(figures, indent=1)
    print(text, "as it should be" if passed else "WRONG", sep="\n")
    if given.json:
        given.json.write_text(text + "\n", encoding="utf-8")
    return int(not passed)


def files(given: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Compare level 0 of all files as decoded by the GPU and by the CPU."""
    rows: dict[str, list[dict[str, Any]]] = {"compared": [], "left out": []}
    for path in found(given.paths):
        with tempfile.TemporaryDirectory() as folder:
            try:
                slide = as_slide(path, Path(folder)) if path.suffix in BARE else path
                row = compared(slide, given.device)
            except (SlideError, ValueError) as error:
                rows["left out"].append({"file": path.name, "why": str(error)[:200]})
                continue
        rows["compared"].append({"file": path.name, "folder": path.parent.name, **row})
    kernels = [row for row in rows["compared"] if row["by_kernels"]]
    largest = [row["largest_difference"] for row in kernels]
    lossless = [row["largest_difference"] for row in kernels if row["lossless"]]
    figures = {
        "files": len(rows["compared"]),
        "files_by_kernels": len(kernels),
        "lossless_files": len(lossless),
        "largest_difference_lossless": max(lossless, default=0),
        "largest_difference": max(largest, default=0),
        "samples": sum(row["samples"] for row in kernels),
        "samples_that_differ": sum(row["differ"] for row in kernels),
    }
    passed = not any(lossless) and max(largest, default=0) <= 1
    return figures | rows, passed


def found(paths: list[Path]) -> Iterator[Path]:
    """Yield files, and the files in folders."""
    for path in paths:
        inside = sorted(path.rglob("*")) if path.is_dir() and path.suffix != ".zarr" else [path]
        yield from (file for file in inside if file.is_file())


def as_slide(path: Path, folder: Path) -> Path:
    """Write a TIFF file whose one tile is a code stream."""
    data = path.read_bytes()
    stream = data[max(0, data.find(START)) :]
    if not stream.startswith(START):
        raise ValueError("no code stream")
    right, bottom, left, top = struct.unpack_from(">4I", stream, 8)
    (components,) = struct.unpack_from(">H", stream, 40)
    depth, *spacing = stream[42:45]
    later = stream[45 : 42 + 3 * components]
    kind = f"{'i' if depth >> 7 else 'u'}{1 if depth & 127 < 8 else 2}"
    pixels = np.broadcast_to(np.zeros((), kind), (bottom - top, right - left, components))
    if pixels.nbytes > LARGEST:
        raise ValueError("too large for a tile")
    spaced = {*spacing, *later[1::3], *later[2::3]} != {1}
    page = tiffbytes.page(
        pixels,
        lambda _tile: stream,
        tile=pixels.shape[:2],
        compression=COMPRESSION.APERIO_JP2000_YCBC if spaced else COMPRESSION.JPEG2000,
        photometric=2 if components >= 3 else 1,
    )
    return tiffbytes.write(folder / "stream.tif", [page])


def compared(path: Path, device: str) -> dict[str, Any]:
    """Return how level 0 of a slide differs between the devices."""
    with open_slide(path, device=device) as ours, open_slide(path, device="cpu") as by_cpu:
        level = by_cpu.layout.levels[0]
        form = form_of_first_tile(by_cpu)
        width, height = (min(size, 4096) for size in by_cpu.dimensions)
        shown, expected = (
            slide.read_region((0, 0), (width, height), 0).astype(np.int64)
            for slide in (ours, by_cpu)
        )
        difference = np.abs(shown - expected)
        return {
            "tile": [level.grid.tile_height, level.grid.tile_width],
            "by_kernels": not isinstance(form, str),
            "form": form if isinstance(form, str) else "taken",
            "lossless": not isinstance(form, str)
            and all(one.reversible for one in form.header.coding),
            "samples": difference.size,
            "differ": int(np.count_nonzero(difference)),
            "largest_difference": int(difference.max()),
        }


def form_of_first_tile(slide: Slide) -> Form | str:
    """Return the form of the first stored tile, or why the kernels cannot decode it."""
    level = slide.layout.levels[0]
    for place in np.argwhere(np.ones((level.grid.rows, level.grid.columns), np.bool_)):
        stream = slide._reader._host._encoded(level, place[None])[0].segments[0]
        if stream:
            return form_of_stream(stream)
    return "no tile is stored"


def threads(given: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Let threads read regions of slides for some seconds."""
    slides = [open_slide(path, device=given.device) for path in given.paths]
    truths = []
    for path in given.paths:
        with open_slide(path, device="cpu") as slide:
            width, height = (min(size, 4096) for size in slide.dimensions)
            truths.append(slide.read_region((0, 0), (width, height), 0))
    end = time.monotonic() + given.seconds
    rows: list[tuple[int, int, int, int]] = []

    def read(seed: int) -> None:
        chance = random.Random(seed)
        reads = wrong = samples = differ = 0
        while time.monotonic() < end:
            number = chance.randrange(len(slides))
            slide, truth = slides[number], truths[number]
            height, width = truth.shape[:2]
            x, y = chance.randrange(width - SIDE), chance.randrange(height - SIDE)
            if chance.random() < 0.3:
                slide.clear_cache()
            shown = slide.read_region((x, y), (SIDE, SIDE), 0).astype(np.int16)
            difference = np.abs(shown - truth[y : y + SIDE, x : x + SIDE])
            reads += 1
            wrong += int(difference.max() > 1)
            samples += difference.size
            differ += int(np.count_nonzero(difference))
        rows.append((reads, wrong, samples, differ))

    workers = [threading.Thread(target=read, args=(seed,)) for seed in range(given.threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for slide in slides:
        slide.close()
    names = ("reads", "wrong", "samples", "samples_that_differ")
    sums = dict(zip(names, map(sum, zip(*rows, strict=True)), strict=True))
    figures = {"threads": given.threads, "seconds": given.seconds, **sums}
    figures["threads_that_failed"] = given.threads - len(rows)
    return figures, len(rows) == given.threads and not sums["wrong"]


class Apart(FormDecoder):
    """A decoder that allocates each part of its memory separately."""

    def layout(self, tiles: int) -> dict[str, int]:
        """Return the addresses of the parts, relative to address 0."""
        sizes = {name: size for part in self.sizes(tiles) for name, size in part.items()}
        if getattr(self, "_sizes", None) != sizes:
            self._parts = [self._device.allocate(max(1, size)) for size in sizes.values()]
            self._sizes = sizes
        return dict(zip(sizes, (address for address, _ in self._parts), strict=True)) | {"size": 1}

    def decode(self, *given: Any) -> None:
        """Decode with the parts' own addresses instead of offsets from `memory`."""
        *before, _memory, status, stream = given
        super().decode(*before, 0, status, stream)


def mutated(given: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Decode randomly damaged streams together with intact ones."""
    from cupy import cuda

    cuda.set_allocator(None)
    device = runtime.default().devices.worker(0).device
    end, done, wrong, kinds = time.monotonic() + given.seconds, 0, 0, set()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream.j2k"
        chance = random.Random(given.seed)
        if given.fast:
            wholes = forms.fast_streams()
            truths = {name: imagecodecs.jpeg2k_decode(one) for name, one in wholes.items()}
        else:
            wholes = {name: forms.stream_of(1, path, **form) for name, form in forms.FORMS.items()}
            truths = {
                name: np.stack(openjpeg.decode(one, path), -1) for name, one in wholes.items()
            }
        names = list(wholes)
        while done < given.streams and time.monotonic() < end:
            name = names[done // AT_ONCE % len(names)]
            whole = wholes[name]
            streams = [whole, *(forms.damaged(whole, chance) for _ in range(AT_ONCE)), whole]
            least = chance.choice((0, form_decoder.LONG_TO_READ))
            status, tiles = forms.decoded(device, streams, kind=Apart, least=least)
            apart = np.abs(tiles[[0, -1]].astype(np.int64) - truths[name].reshape(tiles.shape[1:]))
            wrong += int(status[0] != 0 or status[-1] != 0 or apart.max() > 1)
            kinds |= {*status.tolist()}
            done += AT_ONCE
    figures = {"streams": done, "forms": len(names), "batches_wrong": wrong}
    return figures | {"kinds_of_refusal": sorted(kinds)}, not wrong


if __name__ == "__main__":
    raise SystemExit(main())
