"""Chunks of a local Zarr array, which have their names only once they are whole."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def put_chunk(path: Path, data: Any) -> None:
    """Write the bytes of a chunk; it has its name only once it is whole."""
    with whole_file(path) as unfinished:
        unfinished.write_bytes(data)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Let a chunk have its name only once it is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.partial")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
