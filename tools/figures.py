"""The figures of the documents are those of `benchmarks/results`.

A figure is followed by a comment that names its file and key: ``5.2 ms<!-- viewport-cpu:
codecs/jpeg/readers/napari-wsigpu/median_ms -->``. In lists an entry is named by some of its
values, ``tile=256&size=1024``; `` * 1000`` at the end converts units.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
CITED = re.compile(r"(\d[\d,]*(?:\.\d+)?)([^\d<|]*)<!-- ([\w-]+): ([^>]+?)(?: \* ([\d.e-]+))? -->")


def value(file: str, key: str) -> float:
    """Look up a figure.

    Parameters
    ----------
    file : str
        Name of a file of results, without its ending.
    key : str
        Names from the outside in, with slashes between them.

    Raises
    ------
    KeyError
        If there is no such figure, or several.
    """
    found: Any = _results(file)
    for name in key.split("/"):
        if isinstance(found, list):
            wanted = dict(pair.split("=", 1) for pair in name.split("&"))
            entries = [e for e in found if all(str(e.get(k)) == v for k, v in wanted.items())]
            if len(entries) != 1:
                raise KeyError(f"{len(entries)} entries are {name} in {file}: {key}")
            found = entries[0]
        else:
            found = found[name]
    return float(found)


@cache
def _results(file: str) -> Any:
    return json.loads((RESULTS / f"{file}.json").read_text("utf-8"))


def wrong(text: str) -> list[str]:
    """List the figures of a document that are not those of its sources, rounded."""
    differing = []
    for shown, _, file, key, factor in CITED.findall(text):
        decimals = len(shown.partition(".")[2])
        right = value(file, key) * float(factor or 1)
        if abs(float(shown.replace(",", "")) - right) > 0.5001 * 10**-decimals:
            differing.append(f"{shown} is {right:,.{decimals}f} in {file}: {key}")
    return differing
