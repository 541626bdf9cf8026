"""Zarr arrays and groups on disk: their metadata documents, and zarr's view of an array."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu.model.errors import (
    CorruptSlideError,
    SlideError,
    UnsupportedSlideError,
    file_error,
)
from napari_wsigpu.storage.zarr.guard import guard_of, guarded_store
from napari_wsigpu.storage.zarr.server import LARGEST_DOCUMENT, ServerFolder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Folder = Path | ServerFolder

DOCUMENTS = ("zarr.json", ".zgroup", ".zarray", ".zattrs", ".zmetadata")


class Node(NamedTuple):
    """An array or a group.

    Attributes
    ----------
    folder : Path or ServerFolder
        Its folder.
    is_array : bool
        Whether it is an array.
    attributes : Mapping
        Its attributes, whatever they are.
    documents : tuple of Path or ServerFolder
        The files that its metadata were read from.
    """

    folder: Folder
    is_array: bool
    attributes: Mapping[str, Any]
    documents: tuple[Folder, ...]

    @property
    def ome(self) -> Mapping[str, Any]:
        """What OME-Zarr says of it, where version 0.5 puts it, or earlier ones."""
        found = self.attributes.get("ome")
        return found if isinstance(found, dict) else self.attributes


def folder_of(path: Path) -> Path | None:
    """Return the folder of an array or group by its path, or by that of its metadata; or None."""
    folder = path if path.is_dir() else path.parent
    if folder is not path and path.name not in DOCUMENTS:
        return None
    return folder if any((folder / name).is_file() for name in DOCUMENTS) else None


def read_node(folder: Folder) -> Node | None:
    """Read the metadata of an array or group; None if the folder is neither.

    Raises
    ------
    CorruptSlideError
        If a document is damaged.
    SlideError
        If one can't be read.
    """
    document = folder / "zarr.json"
    if document.is_file():
        found = _read(document)
        if found.get("zarr_format") != 3:
            return None
        attributes = found.get("attributes")
        return Node(
            folder,
            found.get("node_type") == "array",
            attributes if isinstance(attributes, dict) else {},
            (document,),
        )
    named = [folder / name for name in (".zarray", ".zgroup") if (folder / name).is_file()]
    own = folder / ".zattrs"
    if not named and not own.is_file():
        return None
    attributes = _read(own) if own.is_file() else {}
    documents = (*named[:1], *([own] if own.is_file() else []))
    return Node(folder, bool(named) and named[0].name == ".zarray", attributes, documents)


def open_array(folder: Folder) -> Any:
    """Return the `zarr.Array` of a folder.

    Raises
    ------
    UnsupportedSlideError
        If zarr is not installed, or lacks what the array needs, a codec for example.
    CorruptSlideError
        If its metadata are damaged.
    """
    try:
        import zarr
        from zarr.errors import UnknownCodecError, ZarrUserWarning
    except ImportError as error:
        raise UnsupportedSlideError(
            f"'{folder}' is a Zarr array, which needs further packages ({error}); "
            'run pip install "napari-wsigpu[zarr]" and start again.'
        ) from error
    try:
        with warnings.catch_warnings():
            # That other programs may not know a codec is for those to read who write with it.
            warnings.simplefilter("ignore", ZarrUserWarning)
            guard = guard_of(_metadata_of(folder), str(folder))
            if isinstance(folder, ServerFolder):
                return zarr.open_array(store=folder.store(guard), mode="r")
            return zarr.open_array(store=guarded_store(folder, guard, DOCUMENTS), mode="r")
    except (MemoryError, SlideError):
        raise
    except UnknownCodecError as error:
        raise UnsupportedSlideError(
            f"'{folder}' has a codec that zarr does not know ({brief(error)}); install it, or "
            "save the array with zstd."
        ) from error
    except Exception:
        # zarr raises whatever a wrong value happens to break (KeyError, TypeError, ...), and quotes
        # that value, which is for nobody to see who was not shown the file.
        raise CorruptSlideError(
            f"The metadata of the array '{folder}' are damaged; get a fresh copy of it."
        ) from None


def _metadata_of(folder: Folder) -> dict[str, Any]:
    """Return what an array's document says, before zarr reads it."""
    for name in ("zarr.json", ".zarray"):
        document = folder / name
        if document.is_file():
            return _read(document)
    return {}


def brief(error: Exception) -> str:
    """Return the first words of an error."""
    return " ".join(str(error).split())[:120] or type(error).__name__


def _read(document: Folder) -> dict[str, Any]:
    try:
        if document.stat().st_size > LARGEST_DOCUMENT:
            raise CorruptSlideError(
                f"'{document}' is too large to be read ({document.stat().st_size >> 20} MiB); "
                "get a fresh copy of it."
            )
        data = document.read_bytes()
        found = json.loads(data)
        if b"\\ud" in data.lower():  # halves of characters, which can be neither shown nor saved
            whole = json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")
            found = json.loads(whole)
    except OSError as error:
        raise file_error(str(document), error) from error
    except (ValueError, RecursionError) as error:
        raise CorruptSlideError(
            f"'{document}' is damaged ({brief(error)}); get a fresh copy of it."
        ) from error
    if not isinstance(found, dict):
        raise CorruptSlideError(f"'{document}' holds no metadata; get a fresh copy of it.")
    return found
