"""Copies of unsaved annotations, offered for recovery after a crash."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from napari_wsigpu.annotations.geojson import write_geojson
from napari_wsigpu.model.errors import SlideError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from napari_wsigpu.annotations.annotation import Annotation


def folder() -> Path:
    """Return the folder for unsaved annotations; `save` creates it for the current user only."""
    from platformdirs import user_state_path  # a dependency of npe2, which napari requires

    return user_state_path("napari-wsigpu", appauthor=False) / "annotations"


def save(slide: str, annotations: list[Annotation]) -> str:
    """Save a copy of a slide's annotations, replacing the previous copy; return why it failed.

    The file's name contains only a hash of the slide's path, and the id of this process.
    """
    return write_private(_own(slide), lambda part: write_geojson(part, annotations))


def write_private(path: Path, write: Callable[[Path], object]) -> str:
    """Replace a file in `folder` by what `write` writes; return why it failed, else ""."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        write(part)
        part.chmod(0o600)
        part.replace(path)
    except (OSError, SlideError) as error:  # a full disk must not interrupt the user's work
        return str(error)
    return ""


def discard(slide: str) -> None:
    """Delete the copy of a slide's annotations after they have been saved."""
    with suppress(OSError):
        _own(slide).unlink(missing_ok=True)


def orphans(slide: str) -> list[Path]:
    """Return the copies of a slide's annotations left by processes that ended, newest first."""
    found = [path for path in folder().glob(f"{_digest(slide)}-*.geojson") if _is_orphan(path)]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _own(slide: str) -> Path:
    return folder() / f"{_digest(slide)}-{os.getpid()}.geojson"


def _digest(slide: str) -> str:
    return hashlib.sha256(slide.encode()).hexdigest()


def _is_orphan(path: Path) -> bool:
    """Whether the process that wrote a copy has ended."""
    from psutil import pid_exists  # a dependency of napari

    process = path.name.removesuffix(".geojson").rpartition("-")[2]
    return process.isdigit() and int(process) != os.getpid() and not pid_exists(int(process))
