"""Human-readable numbers with units."""

from __future__ import annotations

import math

BYTE_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def byte_size(count: int) -> str:
    """Format a number of bytes with a decimal unit, for example ``"1.5 MB"``."""
    power = min(int(math.log10(count) / 3), len(BYTE_UNITS) - 1) if count > 0 else 0
    return f"{count / 1000**power:.4g} {BYTE_UNITS[power]}"
