"""Values from text that may hold anything, each of them checked."""

from __future__ import annotations

import math
from datetime import datetime
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LONGEST_TEXT = 4096
MOST_FIELDS = 4096  # far more than any scanner writes in one text
LONGEST_NUMBER = 32
LARGEST_NUMBER, DEEPEST = 1 << 53, 100
UNEVEN = 0.01  # by how much of it steps may differ that are called the same
DATES = ("%Y:%m:%d %H:%M:%S", "%Y%m%d%H%M%S.%f", "%Y%m%d%H%M%S")


def pairs(parts: Iterable[str]) -> dict[str, str]:
    """Return what stands before and behind the first ``=`` of the parts that have one."""
    found = (part.split("=", 1) for part in parts if "=" in part)
    return {key.strip(): value.strip() for key, value in islice(found, MOST_FIELDS)}


def number(text: str | None) -> float:
    """Read a number with a decimal point or comma.

    Raises
    ------
    ValueError
        If it is missing, none, or so large that whole numbers are lost.
    """
    try:
        value = float((text or "")[:LONGEST_NUMBER].replace(",", "."))
    except ValueError:
        value = math.nan
    if not abs(value) <= LARGEST_NUMBER:
        raise ValueError("a number of it is missing or wrong")
    return value


def whole_number(text: str | None) -> int:
    """Read a whole number; errors as in `number`."""
    value = number(text)
    if not value.is_integer():
        raise ValueError("a number of it is not whole")
    return int(value)


def positive_number(value: Any) -> float | None:
    """Read a number as `number` does; None unless it is one above 0."""
    try:
        found = number(str(value))
    except ValueError:
        return None
    return found if found > 0 else None


def even_step(positions: Sequence[float], unit: float = 1.0) -> float | None:
    """Return the step between positions times the size of a unit; None unless it is the same."""
    steps = [after - before for before, after in pairwise(positions)]
    step = sum(steps) / len(steps) if steps else 0.0
    if not step or any(abs(each - step) > UNEVEN * abs(step) for each in steps):
        return None
    return positive_number(f"{abs(step) * unit:.12g}")


def texts(pairs: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """Return the values that are there, cut to a length that people can read."""
    return {name[:LONGEST_TEXT]: text[:LONGEST_TEXT] for name, text in pairs if text}


def finite(value: Any, depth: int = DEEPEST) -> Any:
    """Return nested values with numbers that JSON has no words for, such as NaN, as text.

    What lies deeper than `depth` is left out.
    """
    if isinstance(value, dict):
        return {key: finite(item, depth - 1) for key, item in value.items() if depth}
    if isinstance(value, list | tuple):
        return [finite(item, depth - 1) for item in value if depth]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def iso_date(text: str | None) -> str | None:
    """Return date and time as ISO 8601 where they are written as TIFF or DICOM do, else as given.

    None for what is no date, such as zeros.
    """
    words = (text or "").strip()
    if not words:
        return None
    for pattern in DATES:
        try:
            return datetime.strptime(words, pattern).isoformat()
        except ValueError:
            continue
    return words if words.strip(" 0:.-/") else None
