"""The argument parser of `wsigpu`, and the command ``wsigpu info``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from errno import ENOSPC, EPIPE
from io import TextIOWrapper
from typing import TYPE_CHECKING

from napari_wsigpu import __version__
from napari_wsigpu.cli.bench import add_command as add_bench
from napari_wsigpu.cli.check_command import add_command as add_check
from napari_wsigpu.cli.doctor import report
from napari_wsigpu.codecs.compressions import storage_name
from napari_wsigpu.conversion.convert_command import add_command as add_convert
from napari_wsigpu.conversion.convert_command import with_value
from napari_wsigpu.formats.wsigpu import region_of
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.interrupt import INTERRUPTED
from napari_wsigpu.model.printable import printable
from napari_wsigpu.model.privacy import MASK
from napari_wsigpu.slide.facts import file_report
from napari_wsigpu.slide.slide import open_slide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.slide.facts import FileReport
    from napari_wsigpu.slide.slide import Slide


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments without the program's name; ``sys.argv[1:]`` by default.

    Returns
    -------
    int
        Exit status: 0, 1 after an error (printed on standard error), or 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        "wsigpu", description="Describe, check, time and convert whole-slide images."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True)
    info = commands.add_parser("info", help="describe slides")
    info.add_argument("slide", nargs="+", help="path of a slide")
    info.add_argument(
        "--json", action="store_true", help="print all metadata as JSON, one line per slide"
    )
    text = "include data that can identify a patient, such as dates"
    info.add_argument("--private", action="store_true", help=text)
    info.set_defaults(run=_info)
    doctor = commands.add_parser("doctor", help="show what decodes slides on this machine")
    doctor.add_argument("slide", nargs="*", help="slide whose decoders are shown")
    doctor.add_argument("--json", action="store_true", help="print everything as JSON")
    doctor.set_defaults(run=_doctor)
    add_check(commands)
    add_bench(commands)
    add_convert(commands)
    options = parser.parse_args(with_value(sys.argv[1:] if arguments is None else arguments))
    return run_command(options)


def run_command(options: argparse.Namespace) -> int:
    """Run a parsed command, and print a message instead of a traceback on Ctrl-C.

    Parameters
    ----------
    options : argparse.Namespace
        Parsed arguments; ``options.run(options)`` is called.

    Returns
    -------
    int
        Exit status.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal's encoding may lack the micro sign
    try:
        status: int = options.run(options)
        print(end="", flush=True)  # does nothing if standard output is closed
    except OSError as error:
        if error.errno not in (EPIPE, ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0  # the reader, for example head, has closed the pipe
        if error.errno == ENOSPC:
            print("The output can't be written: there is no space left.", file=sys.stderr)
            status = 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        status = INTERRUPTED
    return status


def _info(options: argparse.Namespace) -> int:
    status = 0
    hidden = False
    for path in options.slide:
        try:
            with open_slide(path) as slide:
                info = file_report(slide, private=options.private)
                text = (_as_json if options.json else _as_text)(slide, info)
        except SlideError as error:
            print(printable(str(error)), file=sys.stderr)
            status = 1
        else:
            print(text)
            hidden |= not options.private and MASK in text
    if hidden:
        print("Data that can identify a patient is hidden; --private shows it.", file=sys.stderr)
    return status


def _doctor(options: argparse.Namespace) -> int:
    return report(options.slide, as_json=options.json)


def _as_json(slide: Slide, info: FileReport) -> str:
    levels = [
        {"size": list(size), "downsample": downsample}
        for size, downsample in zip(slide.level_dimensions, slide.level_downsamples, strict=True)
    ]
    found = {"levels": levels, "other_planes": slide.layout.other_planes}
    found |= {"planes": asdict(slide.planes), "channels": info.channels}
    return json.dumps({"path": slide.path, **found, **info.metadata, "problems": info.problems})


def _as_text(slide: Slide, info: FileReport) -> str:
    mpp = "not given" if slide.mpp is None else f"{slide.mpp[0]:g} x {slide.mpp[1]:g} µm"
    objective = "not given" if slide.objective is None else f"{slide.objective:g}x"
    lines = [slide.path, f"  vendor      {slide.vendor}"]
    lines += [f"  pixel size  {mpp}", f"  objective   {objective}"]
    region = region_of(slide.metadata)
    if region is not None:
        x, y, width, height = region
        lines.append(f"  region      {width} x {height} at {x}, {y} of its source's level 0")
    if info.channels:
        lines.append(f"  channels    {', '.join(info.channels)}")
    planes = _planes(slide)
    if planes:
        lines.append(f"  planes      {planes}")
    names = {"scanner": "scanner", "scan_date": "scanned", "barcode": "barcode"}
    metadata = info.metadata
    lines += [f"  {name:<11} {metadata[key]}" for key, name in names.items() if metadata[key]]
    for index, level in enumerate(slide.layout.levels):
        tiles = f"{level.grid.tile_width} x {level.grid.tile_height}"
        compression = storage_name(level)
        lines.append(
            f"  level {index:<5} {level.width} x {level.height} "
            f"({level.channels} x {level.dtype}), downsample "
            f"{slide.level_downsamples[index]:.4g}, "
            f"{'computed' if level.computed else f'tiles {tiles}, {compression}'}"
        )
    for name, image in slide.associated_images.items():
        lines.append(f"  {name:<11} {image.size[0]} x {image.size[1]}")
    for name, labels in slide.labels.items():
        width, height = labels.dimensions
        lines.append(f"  labels      {name if info.private else MASK}, {width} x {height}")
    lines += [f"  problem     {problem}" for problem in info.problems]
    return "\n".join(map(printable, lines))


def _planes(slide: Slide) -> str:
    """Describe the planes and the current one; return an empty string for a single plane."""
    planes = slide.planes
    steps, found = {"t": (planes.time_step, "s"), "z": (planes.z_spacing, "µm")}, []
    for axis, size in planes.sizes.items():
        step, unit = steps[axis]
        found.append(f"{size} along {axis}" + (f" ({step:g} {unit} apart)" if step else ""))
    if slide.layout.unselectable_planes:
        found.append(f"{slide.layout.unselectable_planes} more, which can't be selected")
    shown = {"t": planes.t, "z": planes.z}
    which = ", ".join(f"{axis} = {shown[axis]}" for axis in planes.names)
    return ", ".join(found) + (f"; shown: {which}" if which else "")
