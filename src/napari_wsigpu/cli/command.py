"""The command `wsigpu`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu import __version__
from napari_wsigpu.cli.bench import add_command as add_bench
from napari_wsigpu.cli.doctor import report
from napari_wsigpu.codecs.table import storage_name
from napari_wsigpu.conversion.command import add_command as add_convert
from napari_wsigpu.conversion.command import with_value
from napari_wsigpu.formats.wsigpu import region_of
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.interrupt import INTERRUPTED
from napari_wsigpu.model.privacy import MASK, Screen
from napari_wsigpu.slide.slide import Slide, open_slide

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Words after the program's name; by default those of the process.

    Returns
    -------
    int
        Exit status: 0, 1 after an error that was said on standard error, or 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser("wsigpu", description="Whole-slide images.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True)
    info = commands.add_parser("info", help="say what a slide is")
    info.add_argument("slide", nargs="+", help="path of a slide")
    info.add_argument("--json", action="store_true", help="all metadata, a line of JSON a slide")
    info.add_argument(
        "--private", action="store_true", help="show also what can name a patient, as dates do"
    )
    info.set_defaults(run=_info)
    doctor = commands.add_parser("doctor", help="say what this machine has, and what decodes what")
    doctor.add_argument("slide", nargs="*", help="path of a slide, to say what decodes it")
    doctor.add_argument("--json", action="store_true", help="all that was found, as JSON")
    doctor.set_defaults(run=_doctor)
    add_bench(commands)
    add_convert(commands)
    options = parser.parse_args(with_value(sys.argv[1:] if arguments is None else arguments))
    return run_command(options)


def run_command(options: argparse.Namespace) -> int:
    """Run what was asked for, and end in a sentence on Ctrl-C.

    Parameters
    ----------
    options : argparse.Namespace
        What was parsed; its `run` is called with it.

    Returns
    -------
    int
        Exit status.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may know no micro sign
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
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
                said = _Said.of(slide, private=options.private)
                text = _as_json(slide, said) if options.json else _as_text(slide, said)
        except SlideError as error:
            print(error, file=sys.stderr)
            status = 1
        else:
            print(text)
            hidden |= not options.private and MASK in text
    if hidden:
        print("What can name a patient is hidden; --private shows it.", file=sys.stderr)
    return status


def _doctor(options: argparse.Namespace) -> int:
    return report(options.slide, as_json=options.json)


class _Said(NamedTuple):
    """What a file says, as far as it may be shown."""

    metadata: dict[str, Any]
    channels: list[str]
    labels: list[str]
    problems: list[str]

    @classmethod
    def of(cls, slide: Slide, *, private: bool) -> _Said:
        channels = [channel.name for channel in slide.channels]
        problems = list(slide.layout.problems)
        if private:
            return cls(slide.metadata, channels, list(slide.labels), problems)
        screen = Screen(slide.metadata, slide.path)
        channels = [screen.text(name) for name in channels]
        hidden = [MASK] * len(slide.labels)
        return cls(screen.metadata, channels, hidden, screen.sentences(problems))


def _as_json(slide: Slide, said: _Said) -> str:
    levels = [
        {"size": list(size), "downsample": downsample}
        for size, downsample in zip(slide.level_dimensions, slide.level_downsamples, strict=True)
    ]
    found = {
        "levels": levels,
        "hidden_planes": slide.layout.hidden_planes,
        "planes": asdict(slide.planes),
        "channels": said.channels,
    }
    return json.dumps({"path": slide.path, **found, **said.metadata, "problems": said.problems})


def _as_text(slide: Slide, said: _Said) -> str:
    mpp = "not given" if slide.mpp is None else f"{slide.mpp[0]:g} x {slide.mpp[1]:g} µm"
    objective = "not given" if slide.objective is None else f"{slide.objective:g}x"
    lines = [
        slide.path,
        f"  vendor      {slide.vendor}",
        f"  pixel size  {mpp}",
        f"  objective   {objective}",
    ]
    region = region_of(slide.metadata)
    if region is not None:
        x, y, width, height = region
        lines.append(f"  region      {width} x {height} at {x}, {y} of its source's level 0")
    if said.channels:
        lines.append(f"  channels    {', '.join(said.channels)}")
    planes = _planes(slide)
    if planes:
        lines.append(f"  planes      {planes}")
    given = {"scanner": "scanner", "scan_date": "scanned", "barcode": "barcode"}
    metadata = said.metadata
    lines += [f"  {name:<11} {metadata[key]}" for key, name in given.items() if metadata[key]]
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
    for name, labels in zip(said.labels, slide.labels.values(), strict=True):
        lines.append(f"  labels      {name}, {labels.dimensions[0]} x {labels.dimensions[1]}")
    lines += [f"  problem     {problem}" for problem in said.problems]
    return "\n".join(lines)


def _planes(slide: Slide) -> str:
    """Say how many planes there are, how far apart, and which one is shown; empty if it is one."""
    planes = slide.planes
    steps = {
        "t": planes.time_step and f"{planes.time_step:g} s",
        "z": planes.z_spacing and f"{planes.z_spacing:g} µm",
    }
    said = [
        f"{size} along {axis}" + (f" ({steps[axis]} apart)" if steps[axis] else "")
        for axis, size in planes.sizes.items()
    ]
    others = slide.layout.hidden_planes + 1 - planes.size_z * planes.size_t
    if others > 0:
        said.append(f"{others} more, which are not read")
    shown = {"t": planes.t, "z": planes.z}
    which = ", ".join(f"{axis} = {shown[axis]}" for axis in planes.names)
    return ", ".join(said) + (f"; shown is {which}" if which else "")
