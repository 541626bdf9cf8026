"""Read values from untrusted text, and check each of them."""

from __future__ import annotations

import math
from contextlib import suppress
from datetime import datetime
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A file's own metadata: nested JSON-like values without a fixed structure.
Metadata: TypeAlias = dict[str, Any]

LONGEST_TEXT = 4096
MOST_FIELDS = 4096  # far more than any scanner writes into one string
LONGEST_NUMBER = 32
LARGEST_NUMBER, DEEPEST = 1 << 53, 100  # float64 represents every integer up to 2**53
UNEVEN = 0.01  # relative difference up to which steps count as equal
DATES = ("%Y:%m:%d %H:%M:%S", "%Y%m%d%H%M%S.%f", "%Y%m%d%H%M%S")


def pairs(parts: Iterable[str]) -> dict[str, str]:
    """Split each ``key=value`` part at its first ``=``; parts without one are skipped."""
    found = (part.split("=", 1) for part in parts if "=" in part)
    return {key.strip(): value.strip() for key, value in islice(found, MOST_FIELDS)}


def number(text: str | None) -> float:
    """Read a number with a decimal point or comma.

    Raises
    ------
    ValueError
        If the text is missing or not a number, or the number exceeds 2**53.
    """
    try:
        value = float((text or "")[:LONGEST_NUMBER].replace(",", "."))
    except ValueError:
        value = math.nan
    if not abs(value) <= LARGEST_NUMBER:
        raise ValueError("a number is missing or wrong")
    return value


def whole_number(text: str | None) -> int:
    """Read a whole number; raises as `number` does, and if the number has a fraction."""
    value = number(text)
    if not value.is_integer():
        raise ValueError("a number is not whole")
    return int(value)


def positive_number(value: object) -> float | None:
    """Read a number as `number` does; None unless it is greater than 0."""
    try:
        found = number(str(value))
    except ValueError:
        return None
    return found if found > 0 else None


def gray(color: int, default: float) -> float:
    """Return the brightness of a 24-bit color; the default if it is not gray."""
    first, second, third = (color >> shift & 0xFF for shift in (16, 8, 0))
    return first if first == second == third else default


def even_step(positions: Sequence[float], unit: float = 1.0) -> float | None:
    """Return the step between positions, times `unit`; None if the steps differ."""
    steps = [after - before for before, after in pairwise(positions)]
    step = sum(steps) / len(steps) if steps else 0.0
    if not step or any(abs(each - step) > UNEVEN * abs(step) for each in steps):
        return None
    return positive_number(f"{abs(step) * unit:.12g}")


def texts(pairs: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """Return the pairs that have a value, with names and values cut to `LONGEST_TEXT`."""
    return {name[:LONGEST_TEXT]: text[:LONGEST_TEXT] for name, text in pairs if text}


def finite(value: Any, depth: int = DEEPEST) -> Any:
    """Replace numbers that JSON cannot represent, such as NaN, with text in nested values.

    Values nested deeper than `depth` are left out.
    """
    if isinstance(value, dict):
        return {key: finite(item, depth - 1) for key, item in value.items() if depth}
    if isinstance(value, list | tuple):
        return [finite(item, depth - 1) for item in value if depth]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def iso_date(text: str | None) -> str | None:
    """Convert a date and time in the notation of TIFF or DICOM to ISO 8601.

    Other text is returned unchanged; the result is None for a placeholder such as zeros.
    """
    words = (text or "").strip()
    if not words:
        return None
    for pattern in DATES:
        with suppress(ValueError):
            return datetime.strptime(words, pattern).isoformat()
    return words if words.strip(" 0:.-/") else None
