"""Atomic writing of the chunks of a local Zarr array."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typing_extensions import Buffer


def put_chunk(path: Path, data: Buffer) -> None:
    """Write a chunk's file, so that other processes see either all of it or none."""
    with whole_file(path) as unfinished:
        unfinished.write_bytes(data)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it on success, remove it on an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.partial")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
