"""The figures of a benchmark as horizontal bars, in a PNG."""

from __future__ import annotations

from textwrap import shorten
from typing import TYPE_CHECKING, Any

from napari_wsigpu.model.errors import MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.transfers.timing import Row

OURS, PEERS, WRONG = "#2a6f97", "#a9b4be", "#c1121f"
INK, FAINT = "#22272b", "#7d868e"
WIDTH, BAR, BETWEEN, ABOVE, LINE = 10.0, 0.28, 0.75, 0.4, 0.16
DOTS_AN_INCH = 150
LONGEST_REASON = 110


def require_matplotlib() -> Any:
    """Return matplotlib's figure class.

    Raises
    ------
    MissingPackageError
        If it is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            f"A plot needs matplotlib, which can't be imported ({error}); "
            'run pip install "napari-wsigpu[bench]" and start again.'
        ) from error
    return Figure


def write_plot(
    path: Path, title: str, notes: Sequence[str], rows: Sequence[Row], ours: str
) -> None:
    """Draw a panel for each case, a bar for each way.

    Parameters
    ----------
    path : Path
        The PNG.
    title : str
        What was measured.
    notes : sequence of str
        Lines below the panels.
    rows : sequence of Row
        What was found.
    ours : str
        How the names of our own ways begin.
    """
    cases = {case: [row for row in rows if row.case == case] for case in _names(rows)}
    heights = [BAR * len(found) + BETWEEN for found in cases.values()]
    below = 0.15 + LINE * len(notes)
    height = below + sum(heights) + 0.3 + ABOVE
    figure = require_matplotlib()(figsize=(WIDTH, height), dpi=DOTS_AN_INCH, layout="constrained")
    inside = 0.01, below / height, 0.98, (height - below - ABOVE) / height
    figure.get_layout_engine().set(rect=inside, h_pad=0.12)
    figure.text(0.015, 1 - 0.1 / height, title, va="top", weight="bold", color=INK, size=13)
    panels = figure.subplots(len(cases), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, (case, found) in zip(panels, cases.items(), strict=True):
        _draw(panel, case, found, ours)
    figure.text(0.015, 0.1 / height, "\n".join(notes), va="bottom", color=FAINT, size=8)
    figure.savefig(path, format="png")


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.case for row in rows))


def _draw(panel: Any, case: str, rows: Sequence[Row], ours: str) -> None:
    longest = max(row.median_ms or 0 for row in rows)
    for place, row in enumerate(rows):
        if row.median_ms is None:
            reason = shorten(row.missing, LONGEST_REASON, placeholder=" …")
            panel.text(0, place, f" {reason}", va="center", color=FAINT, size=8, style="italic")
            continue
        color = WRONG if row.wrong else OURS if row.way.startswith(ours) else PEERS
        panel.barh(place, row.median_ms, color=color, height=0.7)
        text = f" {_short(row.median_ms)} ms   {_short(row.megabytes_a_second or 0)} MB/s"
        panel.text(
            row.median_ms,
            place,
            text + ("   wrong pixels" if row.wrong else ""),
            va="center",
            size=8,
            color=WRONG if row.wrong else INK,
        )
    panel.set_title(f"{case}: median, milliseconds", loc="left", size=10, color=INK)
    panel.set_yticks(range(len(rows)), [row.way for row in rows], size=9, color=INK)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.set_xlim(0, 1.35 * longest or 1)
    panel.xaxis.set_visible(longest > 0)
    panel.tick_params(axis="x", colors=FAINT, labelsize=8)
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.spines["bottom"].set(color=FAINT, visible=longest > 0)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
