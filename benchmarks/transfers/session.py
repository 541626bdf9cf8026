"""One run of a benchmark: where it works, what is measured, and what came of it."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import check_memory, environment, summary
from benchmarks.synthetic import DOWNSAMPLE, make_slide
from benchmarks.transfers.interrupt import late_interrupt
from benchmarks.transfers.plot import write_plot
from benchmarks.transfers.readers import OURS
from benchmarks.transfers.target import Target
from benchmarks.transfers.timing import Row, measure
from napari_wsigpu.cli.bench import print_table
from napari_wsigpu.model.errors import UnsupportedSlideError
from napari_wsigpu.storage.remote.url import is_url, public_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.synthetic import Codec
    from benchmarks.transfers.timing import Case

HEADS = ("way", "median ms", "best ms", "MB/s", "max diff")


@dataclass
class Session:
    """One run of a benchmark.

    Attributes
    ----------
    name : str
        The benchmark.
    rounds : int
        How often each way is timed.
    stack : ExitStack
        Closes what is opened.
    folder : Path
        A folder that is removed at the end.
    notes : list of str
        What is measured, for people.
    facts : dict
        The same for machines; JSON-serialisable.
    rows : list of Row
        What was found.
    """

    name: str
    rounds: int
    stack: ExitStack
    folder: Path
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def slide(
        self, given: str | None, side: int, tile: int, codec: Codec, whole: int | None
    ) -> Path:
        """Return the slide that was given, or else make one.

        Parameters
        ----------
        given : str or None
            Path of a slide.
        side, tile, codec
            What to make, as in `make_slide`.
        whole : int or None
            Which level of it has to fit into memory.

        Raises
        ------
        SlideError
            If the slide lies on a server, or what would be made is too large.
        """
        if given is not None:
            if is_url(given):
                raise UnsupportedSlideError(
                    f"'{public_url(given)}' lies on a server, but reading from a disk is "
                    "measured; download it."
                )
            return Path(given)
        if whole is not None:
            size = 3 * (side // DOWNSAMPLE ** max(0, whole)) ** 2
            what = f"Level {whole} of a slide of {side} x {side}"
            check_memory(size, what, "choose a smaller --size")
        path = self.folder / "synthetic.svs"
        print(f"Making a slide of {side} x {side} ...", flush=True)
        make_slide(path, side, side, tile, codec)
        return path

    def target(self, path: Path, level: int, *, whole: bool, cold: bool = False) -> Target:
        """Open a level and say what it is; one that is read `whole` has to fit into memory."""
        target = Target(path, level, self.stack, cold=cold)
        if whole:
            target.check_memory()
        target.warm()
        facts = target.facts()
        size, tile = f"{facts['width']} x {facts['height']}", " x ".join(map(str, facts["tile"]))
        self.say(
            f"{facts['slide']}, level {facts['level']}: {size}, {facts['channels']} x "
            f"{facts['dtype']}, tiles {tile}, {facts['compression']}",
            f"page cache {facts['page_cache']}; our own caches empty before each read",
            f"pixels compared with those of {facts['right_pixels_by']}",
            **facts,
        )
        return target

    def say(self, *notes: str, **facts: Any) -> None:
        """Note what is measured."""
        self.notes += notes
        self.facts |= facts

    def run(self, case: Case) -> None:
        """Measure a case and print its table."""
        rows = measure(case)
        self.rows += rows
        _print_case(case.name, rows)

    def leave_out(self, case: str, reason: str) -> None:
        """Note a case that can't be measured."""
        row = Row(case, "all", missing=f"not here: {reason}")
        self.rows.append(row)
        _print_case(case, [row])

    @property
    def passed(self) -> bool:
        """Whether no pixels are wrong, and no way of ours failed."""
        return not any(row.wrong for row in self.rows)

    def finish(self, json_path: Path | None, plot_path: Path | None) -> None:
        """Say what was measured where, and write it."""
        machine = environment()
        in_turn = f"medians of {self.rounds} rounds after a checked one, each way in turn"
        notes = [*self.notes, in_turn, summary(machine)]
        print("", *notes, sep="\n")
        if json_path is not None:
            record = {
                "benchmark": self.name,
                "environment": machine,
                "rounds": self.rounds,
                **self.facts,
                "rows": [asdict(row) for row in self.rows],
            }
            json_path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if plot_path is not None:
            write_plot(plot_path, f"python -m benchmarks {self.name}", notes, self.rows, OURS)


@contextmanager
def session(name: str, rounds: int, folder: Path | None) -> Iterator[Session]:
    """Begin a run, and clean up after it.

    Parameters
    ----------
    name, rounds
        As in `Session`.
    folder : Path, optional
        Where files are written and read, on the disk that is to be measured; by default the
        system's folder for temporary files.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with late_interrupt():
            place = Path(tempfile.mkdtemp(prefix="wsigpu-bench-", dir=folder))
            stack.callback(_remove, place)
        yield Session(name, rounds, stack, place)


def _remove(folder: Path) -> None:
    with late_interrupt():
        shutil.rmtree(folder, ignore_errors=True)


def _print_case(name: str, rows: Sequence[Row]) -> None:
    timed = [row for row in rows if not row.missing]
    if timed:
        print_table(name, HEADS, [_cells(row) for row in timed])
    else:
        print(f"\n{name}")
    for row in rows:
        if row.missing:
            print(f"{row.way}: {row.missing}")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.way,
        f"{row.median_ms:.2f}",
        f"{row.best_ms:.2f}",
        f"{row.megabytes_a_second:.0f}",
        f"{row.largest_difference:g}" + (" WRONG" if row.wrong else ""),
    )
