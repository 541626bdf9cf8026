"""`wsigpu convert`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_wsigpu.conversion.options import kind_of
from napari_wsigpu.conversion.run import convert
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.interrupt import INTERRUPTED, noticed_interrupt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.conversion.options import Region

BAR = 30
REFRESH_SECONDS = 0.2
# What an interrupted conversion left is checked much faster than tiles are written.
LATELY_SECONDS = 20

EPILOG = """\
What is written is told by the end of TARGET: .tif or .tiff is a tiled BigTIFF pyramid, .ome.tif an
OME-TIFF, .zarr an OME-Zarr. An interrupted conversion goes on when it is started again.
"""


def add_command(commands: Any) -> None:
    """Add the command to those of `wsigpu`."""
    parser = commands.add_parser(
        "convert",
        help="write a slide as TIFF, OME-TIFF, OME-Zarr or PNG",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="path of a slide")
    parser.add_argument("target", help="path of the result")
    parser.add_argument(
        "--compression",
        choices=("raw", "jpeg", "deflate", "zstd", "lz4"),
        help="by default tiles are copied where that is possible, others compressed without loss",
    )
    parser.add_argument("--tile-size", type=int, metavar="N", help="width and height of tiles")
    parser.add_argument("--levels", type=int, metavar="N", help="write so many levels at most")
    parser.add_argument(
        "--region",
        type=_region,
        metavar="X,Y,W,H",
        help="a part, in pixels of level 0, without the thumbnail of all",
    )
    parser.add_argument(
        "--level",
        type=int,
        default=0,
        metavar="N",
        help="the level that becomes level 0, as `wsigpu info` counts them; numbers above its last "
        "one are of averaged levels between and below these",
    )
    for axis in "zt":
        parser.add_argument(
            f"--{axis}",
            type=int,
            metavar="N",
            help=f"one plane along {axis}, counted from 0; else OME-TIFF and OME-Zarr get all",
        )
    parser.add_argument("--workers", type=int, metavar="N", help="threads that encode")
    parser.add_argument(
        "--quality", type=int, metavar="Q", help="of --compression jpeg, 1 to 100 (90)"
    )
    parser.add_argument(
        "--shard", type=int, metavar="N", help="OME-Zarr: keep N x N tiles in one file"
    )
    parser.add_argument(
        "--color",
        choices=("stored", "srgb"),
        default="stored",
        help="pixels as they are, or in sRGB by the slide's ICC profile",
    )
    parser.add_argument(
        "--private",
        action="store_true",
        help="keep also what can name a patient: fields, dates, text in tiles, label and macro",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what exists")
    parser.set_defaults(run=_run)


def with_value(words: Sequence[str]) -> list[str]:
    """Join `--region` to a value that begins with a minus, which would pass for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "--region" and word[:1] == "-" and word[1:2].isdigit():
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _run(options: argparse.Namespace) -> int:
    bar = _Bar() if sys.stderr.isatty() else None
    given = vars(options)
    names = (
        "compression", "tile_size", "levels", "region", "level", "workers", "quality", "shard",
        "private", "overwrite", "color", "z", "t",
    )  # fmt: skip
    try:
        with noticed_interrupt() as interrupted:

            def progress(done: int, total: int) -> None:
                if interrupted.is_set():
                    raise KeyboardInterrupt
                if bar is not None:
                    bar(done, total)

            done = convert(
                options.source,
                options.target,
                progress=progress,
                **{name: given[name] for name in names},
            )
    except SlideError as error:
        _say(bar, "\n".join([str(error), *getattr(error, "__notes__", ())]))
        return 1
    except KeyboardInterrupt:
        goes_on = "begins anew" if _is_picture(options.target) else "goes on where this one ended"
        _say(bar, f"Interrupted; the same command {goes_on}.")
        return INTERRUPTED
    found = f", {done.tiles_found} found" if done.tiles_found else ""
    tiles = f"{done.tiles_copied} tiles copied, {done.tiles_encoded} encoded{found}"
    _say(bar, f"{'Written' if _is_picture(done.path) else tiles} in {done.seconds:.1f} s")
    for note in done.notes:
        print(note, file=sys.stderr)
    print(f"{done.checksum}  {options.target}")
    return 0


def _is_picture(target: str) -> bool:
    return kind_of(Path(target)) == "png"


def _region(text: str) -> Region:
    try:
        x, y, width, height = (int(value) for value in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not X,Y,W,H in whole pixels") from None
    return x, y, width, height


def _say(bar: _Bar | None, text: str) -> None:
    if bar is not None:
        bar.clear()
    print(text, file=sys.stderr)


class _Bar:
    """A line on a terminal that says how far a conversion is."""

    def __init__(self) -> None:
        self._drawn = 0.0
        self._lately: deque[tuple[float, int]] = deque()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._drawn < REFRESH_SECONDS and done < total:
            return
        self._drawn = now
        self._lately.append((now, done))
        while now - self._lately[0][0] > LATELY_SECONDS:
            self._lately.popleft()
        before, first = self._lately[0]
        share = done / max(1, total)
        made = done - first
        left = f", {(now - before) / made * (total - done):.0f} s left" if made > 0 else ""
        filled = round(BAR * share)
        bar = "#" * filled + "." * (BAR - filled)
        line = f"\r{bar} {share:4.0%}  {done} of {total} tiles{left}"
        sys.stderr.write(f"{line:<79}")
        sys.stderr.flush()

    def clear(self) -> None:
        """Take the line away."""
        sys.stderr.write(f"\r{'':79}\r")
