"""The command ``wsigpu check``: decodes every tile, and lists damaged and doubtful ones."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from napari_wsigpu.conversion.progress_bar import ProgressBar, print_status
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.printable import printable
from napari_wsigpu.slide.facts import masked_problems
from napari_wsigpu.slide.slide import open_slide

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace, _SubParsersAction

    from napari_wsigpu.slide.tile_check import TileCheck

EPILOG = (
    "The exit status is 1 if a tile is damaged, or if a slide can't be read, but not for problems "
    "of the file that are only listed. Flipped bits in compressed tiles often go unnoticed; only a "
    "checksum of the file detects them reliably."
)


def add_command(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add the parser of this command."""
    parser = commands.add_parser(
        "check",
        help="decode every tile, and list those that are damaged or decode with warnings",
        epilog=EPILOG,
    )
    parser.add_argument("slide", nargs="+", help="path of a slide")
    parser.add_argument(
        "--device",
        default="cpu",
        help="decoding device: cpu (the default; finds the most damage), cuda or auto",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per slide")
    parser.set_defaults(run=_run)


def _run(options: Namespace) -> int:
    status = 0
    for path in options.slide:
        bar = ProgressBar() if sys.stderr.isatty() else None
        try:
            found, problems = _check(path, options.device, bar)
        except SlideError as error:
            print_status(bar, str(error))
            status = 1
            continue
        except KeyboardInterrupt:
            if bar is not None:
                bar.clear()
            raise
        if bar is not None:
            bar.clear()
        shown = _as_json if options.json else _as_text
        print(shown(path, found, problems))
        status |= bool(found.damaged)
    return status


def _check(path: str, device: str, bar: ProgressBar | None) -> tuple[TileCheck, list[str]]:
    """Return what the tiles are like, and the problems of the file."""
    with open_slide(path, device) as slide:
        return slide.check_tiles(bar), masked_problems(slide)


def _as_text(path: str, found: TileCheck, problems: list[str]) -> str:
    lines = [path, *(f"  problem     {problem}" for problem in problems)]
    lines += [f"  damaged     {name}: {reason}" for name, reason in found.damaged]
    lines += [f"  doubtful    {name}: {', '.join(codes)}" for name, codes in found.doubtful]
    lines.append(f"  sound       {found.sound} of {found.tiles} tiles")
    return "\n".join(map(printable, lines))


def _as_json(path: str, found: TileCheck, problems: list[str]) -> str:
    damaged = [{"tile": name, "reason": reason} for name, reason in found.damaged]
    doubtful = [{"tile": name, "codes": list(codes)} for name, codes in found.doubtful]
    lists = {"damaged": damaged, "doubtful": doubtful}
    counts = {"tiles": found.tiles, "sound": found.sound}
    return json.dumps({"path": path, **counts, **lists, "problems": problems})
