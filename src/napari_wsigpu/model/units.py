"""Numbers as people read them."""

from __future__ import annotations

import math

BYTE_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def byte_size(count: int) -> str:
    """Return a number of bytes in decimal units."""
    power = min(int(math.log10(count) / 3), len(BYTE_UNITS) - 1) if count > 0 else 0
    return f"{count / 1000**power:.4g} {BYTE_UNITS[power]}"
