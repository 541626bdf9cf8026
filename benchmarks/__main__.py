"""Time reading and writing on this machine, beside other libraries.

Usage: ``python -m benchmarks read | round-trip | zarr-write | zarr-write-lz4 | viewport |
display``; each has ``--help``. What a benchmark needs is imported when it is run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.display import add_options as add_display_options
from benchmarks.display import run as run_display
from napari_wsigpu.cli.bench import output_file
from napari_wsigpu.cli.command import run_command
from napari_wsigpu.model.errors import SlideError, TargetWriteError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.transfers.session import Session

    Benchmark = Callable[[Session, argparse.Namespace], None]

CHUNKS = (256, 512, 1024, 2048, 4096)
VIEWPORTS = (1024, 2048, 4096)
SLIDE_SIDE, ARRAY_SIDE, TILE = 8192, 4096, 512
ROUNDS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Words after the program's name; by default those of the process.

    Returns
    -------
    int
        Exit status, as of ``wsigpu``; 1 also where pixels are wrong.
    """
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description="Time reading and writing, beside other libraries."
    )
    kinds = parser.add_subparsers(required=True, metavar="benchmark")
    _add(kinds, "read", "read a whole level", _read, _options_of_slides(level=True, cold=True))
    _add(
        kinds,
        "round-trip",
        "read a level while writing it to raw Zarr",
        _round_trip,
        _options_of_slides(level=True),
    )
    for name, text in (("zarr-write", "uncompressed"), ("zarr-write-lz4", "by LZ4")):
        _add(kinds, name, f"write arrays to Zarr, {text}", _zarr_write, _options_of_arrays())
    viewport = _add(
        kinds,
        "viewport",
        "read regions at random places, for the first time",
        _viewport,
        _options_of_slides(cold=True),
    )
    viewport.add_argument(
        "--viewports", type=_numbers, default=VIEWPORTS, metavar="SIDE,...", help="their sides"
    )
    display = kinds.add_parser("display", help="time a napari window until its frames are exact")
    add_display_options(display)
    display.set_defaults(run=run_display)
    return run_command(parser.parse_args(arguments))


def _add(
    kinds: Any, name: str, text: str, run: Benchmark, options: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=text, parents=[options])
    parser.add_argument("--rounds", type=_positive, default=ROUNDS, help="how often each is timed")
    parser.add_argument("--folder", type=Path, help="where files are made, on the disk to measure")
    parser.add_argument("--json", type=output_file, help="write all figures to this file")
    parser.add_argument("--plot", type=_plot, help="draw them into this PNG")
    parser.set_defaults(run=_run, benchmark=run, name=name)
    return parser


def _options_of_slides(*, level: bool = False, cold: bool = False) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("slide", nargs="?", help="by default one is made, and removed")
    if level:
        options.add_argument("--level", type=int, default=0, help="index of the level")
    if cold:
        options.add_argument(
            "--cold", action="store_true", help="drop the file from the page cache before each read"
        )
    made = options.add_argument_group("the slide that is made")
    made.add_argument("--size", type=_positive, default=SLIDE_SIDE, help="its side in pixels")
    made.add_argument("--tile", type=_tile, default=TILE, help="side of its tiles")
    made.add_argument(
        "--codec", choices=("none", "jpeg", "jpeg2000"), default="none", help="of its tiles"
    )
    return options


def _options_of_arrays() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--size", type=_positive, default=ARRAY_SIDE, help="side in pixels")
    options.add_argument(
        "--chunks", type=_numbers, default=CHUNKS, metavar="SIDE,...", help="sides of chunks"
    )
    return options


def _run(options: argparse.Namespace) -> int:
    from benchmarks.transfers.plot import require_matplotlib
    from benchmarks.transfers.session import session

    try:
        if options.plot is not None:
            require_matplotlib()
        with session(options.name, options.rounds, options.folder) as begun:
            options.benchmark(begun, options)
            try:
                begun.finish(options.json, options.plot)
            except OSError as error:
                raise TargetWriteError(_refusal(error, "give another file")) from None
            return 0 if begun.passed else 1
    except SlideError as error:
        print(error, file=sys.stderr)
    except OSError as error:
        print(_refusal(error, "try --folder"), file=sys.stderr)
    return 1


def _refusal(error: OSError, advice: str) -> str:
    place = f" '{error.filename}'" if error.filename else ""
    return f"A file{place} can't be written ({error.strerror or error}); {advice}."


def _read(session: Session, options: argparse.Namespace) -> None:
    from benchmarks.transfers import read

    path = _slide(session, options, options.level)
    read.run(session, path, options.level, cold=options.cold)


def _round_trip(session: Session, options: argparse.Namespace) -> None:
    from benchmarks.transfers import round_trip

    round_trip.run(session, _slide(session, options, options.level), options.level)


def _zarr_write(session: Session, options: argparse.Namespace) -> None:
    from benchmarks.transfers import zarr_write

    codec = zarr_write.CODECS[options.name]
    zarr_write.run(session, options.size, options.chunks, codec)


def _viewport(session: Session, options: argparse.Namespace) -> None:
    from benchmarks.transfers import viewport

    viewport.run(session, _slide(session, options), options.viewports, cold=options.cold)


def _slide(session: Session, options: argparse.Namespace, whole: int | None = None) -> Path:
    return session.slide(options.slide, options.size, options.tile, options.codec, whole)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(_positive, text.split(",")))


def _plot(text: str) -> Path:
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text} does not end in .png")
    return output_file(text)


def _tile(text: str) -> int:
    side = _positive(text)
    if side % 16 or side > 1024:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 16 up to 1024")
    return side


if __name__ == "__main__":
    raise SystemExit(main())
