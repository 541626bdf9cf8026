"""Annotations that are kept while they are not saved, and offered again after a crash."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from napari_wsigpu.annotations.geojson import read_geojson, write_geojson
from napari_wsigpu.model.errors import SlideError

if TYPE_CHECKING:
    from pathlib import Path

    from napari_wsigpu.annotations.annotation import Annotation


def folder() -> Path:
    """Return the user's own folder of annotations that were not saved; nobody else may read it."""
    from platformdirs import user_state_path  # which npe2 brings, where there is napari

    made = user_state_path("napari-wsigpu", appauthor=False) / "annotations"
    made.mkdir(mode=0o700, parents=True, exist_ok=True)
    return made


def keep(slide: str, annotations: list[Annotation]) -> None:
    """Keep the annotations of a slide, instead of those that were kept before.

    The file's name tells nothing of the slide: only a hash of its path, and this process.
    """
    path = _own(slide)
    with suppress(OSError, SlideError):  # who annotates is not bothered by a full disk yet
        part = path.with_suffix(".part")
        write_geojson(part, annotations)
        part.replace(path)


def drop(slide: str) -> None:
    """Keep nothing of a slide: its annotations are saved."""
    with suppress(OSError):
        _own(slide).unlink(missing_ok=True)


def lost(slide: str) -> list[Path]:
    """Return the files that processes kept for a slide and left behind, the newest first."""
    found = [path for path in folder().glob(f"{_digest(slide)}-*.geojson") if _is_orphan(path)]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def take(path: Path) -> list[Annotation]:
    """Return the annotations of a file that was left behind, and remove it.

    Raises
    ------
    SlideError
        If it can't be read.
    """
    found = read_geojson(path)
    path.unlink(missing_ok=True)
    return found


def _own(slide: str) -> Path:
    return folder() / f"{_digest(slide)}-{os.getpid()}.geojson"


def _digest(slide: str) -> str:
    return hashlib.sha256(slide.encode()).hexdigest()


def _is_orphan(path: Path) -> bool:
    """Whether the process that kept a file is no more."""
    from psutil import pid_exists  # which napari brings

    process = path.name.removesuffix(".geojson").rpartition("-")[2]
    return process.isdigit() and int(process) != os.getpid() and not pid_exists(int(process))
