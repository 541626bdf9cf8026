"""The command `wsigpu convert`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from napari_wsigpu.conversion.convert_slide import convert
from napari_wsigpu.conversion.options import kind_of
from napari_wsigpu.conversion.progress_bar import ProgressBar, interruptible, print_status
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.interrupt import INTERRUPTED, interrupt_event
from napari_wsigpu.model.printable import printable
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.storage.remote.url import is_url, public_url

if TYPE_CHECKING:
    from collections.abc import Sequence
    from threading import Event

    from napari_wsigpu.conversion.forecast import Forecast
    from napari_wsigpu.conversion.options import Region

NAME = "{name}"
# Attributes of the parsed arguments that are not keyword arguments of `convert`.
OTHERS = "source", "target", "json", "run"
EPILOG = """\
The extension of TARGET selects the format:
  .tif, .tiff          tiled BigTIFF pyramid, also readable by OpenSlide
  .ome.tif, .ome.tiff  OME-TIFF
  .zarr, .ome.zarr     OME-Zarr 0.5
  .png                 image of one level

{name} in TARGET is replaced by the name of the source without its extension:
  wsigpu convert *.svs 'converted/{name}.ome.tif'

Before it starts, the command prints the planned levels and tiles, and an estimate of their size. To
resume an interrupted conversion, run the same command again.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `convert` to the subcommands of `wsigpu`."""
    parser = commands.add_parser(
        "convert",
        help="write a slide as TIFF, OME-TIFF, OME-Zarr or PNG",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", nargs="+", help="path of a slide")
    parser.add_argument("target", help="path of the result; for several sources, include {name}")
    parser.add_argument(
        "--compression",
        choices=("raw", "jpeg", "deflate", "zstd", "lz4"),
        help="by default, tiles are copied if possible; averages of JPEG tiles are compressed with "
        "JPEG, all other tiles losslessly",
    )
    parser.add_argument(
        "--lossless",
        action="store_true",
        help="compress averages of JPEG tiles losslessly too, which takes more space",
    )
    parser.add_argument("--tile-size", type=int, metavar="N", help="width and height of tiles")
    parser.add_argument("--levels", type=int, metavar="N", help="write at most N levels")
    parser.add_argument(
        "--region",
        type=_region,
        metavar="X,Y,W,H",
        help="write only this part of the slide, in pixels of level 0, without the thumbnail",
    )
    parser.add_argument(
        "--level",
        type=int,
        default=0,
        metavar="N",
        help="level to write as level 0, numbered as in `wsigpu info`; higher numbers select "
        "computed levels, which lie between the stored ones or are coarser",
    )
    for axis in "zt":
        parser.add_argument(
            f"--{axis}",
            type=int,
            metavar="N",
            help=f"write only plane N along {axis}, from 0; by default, OME files hold all planes",
        )
    parser.add_argument("--workers", type=int, metavar="N", help="number of encoding threads")
    parser.add_argument(
        "--quality",
        type=int,
        metavar="Q",
        help="quality for --compression jpeg, 1 to 100 (default 90)",
    )
    parser.add_argument(
        "--shard", type=int, metavar="N", help="OME-Zarr: store N x N tiles per file"
    )
    parser.add_argument(
        "--color",
        choices=("stored", "srgb"),
        default="stored",
        help="keep colors as stored, or convert them to sRGB with the slide's ICC profile",
    )
    parser.add_argument(
        "--private",
        action="store_true",
        help="keep data that may identify a patient: metadata, text in tiles, label, macro, dates",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing target")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per result")
    parser.set_defaults(run=_run)


def with_value(words: Sequence[str]) -> list[str]:
    """Join `--region` and a negative value, which argparse would take for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "--region" and word[:1] == "-" and word[1:2].isdigit():
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _run(options: argparse.Namespace) -> int:
    sources, targets = options.source, _targets(options.source, options.target)
    if len(set(targets)) < len(targets):
        shared = f"Several sources would be written to '{_repeated(targets)}'; "
        advice = f"include {NAME} in the target" if NAME not in options.target else "rename one"
        print_status(None, f"{shared}{advice}.")
        return 1
    status = 0
    with interrupt_event() as interrupted:
        for source, target in zip(sources, targets, strict=True):
            bar = ProgressBar() if sys.stderr.isatty() else None
            try:
                _convert(options, source, target, bar, interrupted)
            except SlideError as error:
                print_status(bar, str(error), *getattr(error, "__notes__", ()))
                status = 1
            except KeyboardInterrupt:
                again = "start over" if _is_png(target) else "resume the conversion"
                print_status(bar, f"Interrupted; run the same command to {again}.")
                return INTERRUPTED
    return status


def _convert(
    options: argparse.Namespace,
    source: str,
    target: str,
    bar: ProgressBar | None,
    interrupted: Event,
) -> None:
    """Convert one slide, and print the result."""
    values = {key: value for key, value in vars(options).items() if key not in OTHERS}
    expected: list[Forecast] = []

    def announce(found: Forecast) -> None:
        expected.append(found)
        print_status(None, f"{target}: {found}")

    progress = interruptible(bar, interrupted)
    done = convert(source, target, announce=announce, progress=progress, **values)
    size = _size_of(Path(done.path))
    found = f", {done.tiles_found} written earlier" if done.tiles_found else ""
    tiles = f"{done.tiles_copied} tiles copied, {done.tiles_encoded} encoded{found}"
    written = "Written" if _is_png(done.path) else tiles
    print_status(bar, f"{written} in {done.seconds:.1f} s, {byte_size(size)}", *done.notes)
    if options.json:
        paths = {"source": public_url(source) if is_url(source) else source, "target": target}
        [forecast] = expected
        result = {**paths, **asdict(done), "size": size, "forecast": asdict(forecast)}
        print(json.dumps(result))
    else:
        print(f"{done.checksum}  {printable(target)}")


def _targets(sources: list[str], target: str) -> list[str]:
    """Return the target of each source; the source's name replaces {name}."""
    return [target.replace(NAME, _stem(source)) for source in sources]


def _stem(source: str) -> str:
    """Return the name of a file, folder or URL without its suffix."""
    name = PurePath(urlsplit(source).path if is_url(source) else source).name
    return re.sub(r"(\.ome)?\.[^.]+$", "", name, flags=re.IGNORECASE) or name


def _size_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _repeated(targets: list[str]) -> str:
    return next(target for target in targets if targets.count(target) > 1)


def _is_png(target: str) -> bool:
    return kind_of(Path(target)) == "png"


def _region(text: str) -> Region:
    try:
        x, y, width, height = (int(value) for value in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not X,Y,W,H in integer pixels") from None
    return x, y, width, height
