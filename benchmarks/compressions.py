"""Time random patches of every kind of tiles: read to a GPU, and decoded by the CPU.

Usage: ``python -m benchmarks.compressions [--only KIND ...] [--json OUT]``.

Needs a CUDA device. The slides are 32,768 pixels wide, in tiles of 256 x 256, or one large JPEG
with restart intervals of 2048 x 8 as in NDPI. The GPU and the CPU take turns and read the same
patches in batches, the CPU fewer of them; the pixels of one batch are compared.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from benchmarks.common import SLIDES, ensure_slide, write_json
from benchmarks.gpu import gpu, loop
from benchmarks.synthetic import make_large_jpeg
from napari_wsigpu import open_slide
from napari_wsigpu.cli.bench import print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.synthetic import Codec
    from napari_wsigpu import Slide

SIDE, PATCH, AT_ONCE, ROUNDS = 32768, 256, 256, 3
LARGE_JPEG = "jpeg intervals"
# Patches that the GPU and the CPU read in a round, by the time that they take.
FAST, SLOW = (16384, 2048), (512, 512)
KINDS: dict[str, tuple[int, int]] = {
    "jpeg": FAST,
    LARGE_JPEG: FAST,
    "none": FAST,
    "zstd": FAST,
    "deflate": FAST,
    "lzw": FAST,
    "jpeg2000": FAST,
    "htj2k": FAST,
    "packbits": FAST,
    "lerc": SLOW,
    "webp": SLOW,
    "jpegxl": SLOW,
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time all kinds of tiles on a GPU.")
    parser.add_argument("--only", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--folder", type=Path, default=SLIDES, help="folder for the slides")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    rows = []
    for kind in args.only:
        rows.append(measure(kind, args.folder))
        print(rows[-1], flush=True)
    heads = ("kind", "decoded by", "GPU/s", "CPU/s", "difference", "loop ms")
    print_table("Random patches", heads, [tuple(map(str, row.values())) for row in rows])
    write_json(args.json, {"gpu": gpu(), "kinds": rows})


def slide_of(kind: Any, folder: Path) -> Path:
    """Return the slide of a kind, which is made if it is missing."""
    if kind != LARGE_JPEG:
        codec: Codec = kind
        return ensure_slide(folder, SIDE, codec)
    path = folder / f"intervals-{SIDE}.jpg"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_large_jpeg(path, SIDE)
    return path


def measure(kind: str, folder: Path) -> dict[str, Any]:
    """Return the median rates of one kind of tiles."""
    path = slide_of(kind, folder)
    with open_slide(path, device="cuda") as by_gpu, open_slide(path, device="cpu") as by_cpu:
        readers: dict[str, Callable[[list[tuple[int, int]]], Iterator[Any]]] = {
            "gpu": partial(batches, by_gpu, "cuda"),
            "cpu": partial(batches, by_cpu, "cpu"),
        }
        rates: dict[str, list[float]] = {name: [] for name in readers}
        difference = compare(*(read(places(0, AT_ONCE)) for read in readers.values()))
        for number in range(ROUNDS + 1):
            counts = dict(zip(readers, KINDS[kind], strict=True))
            for name in sorted(readers, reverse=bool(number % 2)):
                patches = places(number, counts[name])
                begin = time.perf_counter()
                for _ in readers[name](patches):
                    pass
                cupy.cuda.runtime.deviceSynchronize()
                rates[name].append(len(patches) / (time.perf_counter() - begin))
        decoder = by_gpu.decoder
        return {
            "kind": kind,
            "decoder": decoder[1] if decoder[0] != "CPU" else f"CPU ({decoder[1]})",
            # The first round starts threads and page-locks memory.
            **{name: round(statistics.median(found[1:])) for name, found in rates.items()},
            "difference": difference,
            "loop_ms": round(loop() * 1e3, 2),
        }


def places(seed: int, count: int) -> list[tuple[int, int]]:
    """Return random positions."""
    dice = random.Random(seed)
    return [(dice.randrange(SIDE - PATCH), dice.randrange(SIDE - PATCH)) for _ in range(count)]


def batches(slide: Slide, device: str, patches: list[tuple[int, int]]) -> Iterator[Any]:
    """Read patches from an empty cache, to the GPU or to the host."""
    slide.clear_cache()
    return slide.read_regions(patches, (PATCH, PATCH), batch_size=AT_ONCE, device=device)


def compare(found: Iterator[Any], expected: Iterator[Any]) -> int:
    """Return the largest difference of the pixels."""
    return max(
        int(np.abs(cupy.asnumpy(first).astype(np.int16) - second).max())
        for first, second in zip(found, expected, strict=True)
    )


if __name__ == "__main__":
    main()
