"""Metadata of Zarr arrays and groups, and how to open an array with zarr."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, NamedTuple

from napari_wsigpu.model.errors import (
    CorruptSlideError,
    SlideError,
    UnsupportedSlideError,
    file_error,
    shortened,
)
from napari_wsigpu.storage.zarr.guard import guard_of, guarded_store
from napari_wsigpu.storage.zarr.server import LARGEST_DOCUMENT, KeyFolder

if TYPE_CHECKING:
    from pathlib import Path

    import zarr

    from napari_wsigpu.storage.zarr.guard import Document

    Folder = Path | KeyFolder

DOCUMENTS = ("zarr.json", ".zgroup", ".zarray", ".zattrs", ".zmetadata")


class Node(NamedTuple):
    """An array or a group.

    Attributes
    ----------
    folder : Path or KeyFolder
        Its folder.
    is_array : bool
        Whether it is an array.
    attributes : Mapping
        Its attributes, not validated.
    documents : tuple of Path or KeyFolder
        The metadata files that were read.
    """

    folder: Folder
    is_array: bool
    attributes: Document
    documents: tuple[Folder, ...]

    @property
    def ome(self) -> Document:
        """OME-Zarr metadata: the value of ``ome``, or all attributes before version 0.5."""
        found = self.attributes.get("ome")
        return found if isinstance(found, dict) else self.attributes


def folder_of(path: Path) -> Path | None:
    """Return the folder of an array or group; None if there is none.

    The path may be the folder, or a metadata file in it.
    """
    folder = path if path.is_dir() else path.parent
    if folder is not path and path.name not in DOCUMENTS:
        return None
    return folder if any((folder / name).is_file() for name in DOCUMENTS) else None


def read_node(folder: Folder) -> Node | None:
    """Read the metadata of an array or group; return None if the folder is neither.

    Raises
    ------
    CorruptSlideError
        If a metadata file is damaged.
    SlideError
        If a metadata file can't be read.
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


def open_array(folder: Folder) -> zarr.Array:
    """Open the array in a folder, in a store that checks chunks; see `Guard`.

    Raises
    ------
    UnsupportedSlideError
        If zarr is not installed, or lacks a codec or another feature that the array needs.
    CorruptSlideError
        If the array's metadata is damaged.
    """
    try:
        import zarr
        from zarr.errors import UnknownCodecError, ZarrUserWarning
    except ImportError as error:
        raise UnsupportedSlideError(
            f"Reading the Zarr array '{folder}' requires optional packages ({error}); "
            'run pip install "napari-wsigpu[zarr]" and restart.'
        ) from error
    try:
        with warnings.catch_warnings():
            # zarr warns that other programs may not know a codec; that matters only to writers.
            warnings.simplefilter("ignore", ZarrUserWarning)
            guard = guard_of(_array_metadata(folder), str(folder))
            if isinstance(folder, KeyFolder):
                return zarr.open_array(store=folder.store(guard), mode="r")
            return zarr.open_array(store=guarded_store(folder, guard, DOCUMENTS), mode="r")
    except (MemoryError, SlideError):
        raise
    except UnknownCodecError as error:
        raise UnsupportedSlideError(
            f"'{folder}' uses a codec that zarr does not know ({brief(error)}); install it, or "
            "save the array with zstd."
        ) from error
    except Exception:
        # An invalid value makes zarr raise an arbitrary exception (KeyError, TypeError, ...) that
        # quotes it. The value may be private, so it must not appear in our message.
        raise CorruptSlideError(
            f"The metadata of the array '{folder}' is damaged; get a fresh copy of it."
        ) from None


def _array_metadata(folder: Folder) -> Document:
    """Return an array's metadata, before zarr reads it; empty if there is none."""
    for name in ("zarr.json", ".zarray"):
        document = folder / name
        if document.is_file():
            return _read(document)
    return {}


def brief(error: Exception) -> str:
    """Return an error's message on one line, shortened if it is long."""
    return shortened(str(error)) or type(error).__name__


def _read(document: Folder) -> Document:
    try:
        if document.stat().st_size > LARGEST_DOCUMENT:
            raise CorruptSlideError(
                f"'{document}' is too large for a metadata file ({document.stat().st_size >> 20} "
                "MiB); get a fresh copy of it."
            )
        data = document.read_bytes()
        found = json.loads(data)
        if b"\\ud" in data.lower():  # lone surrogates can be neither shown nor saved
            whole = json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")
            found = json.loads(whole)
    except OSError as error:
        raise file_error(str(document), error) from error
    except (ValueError, RecursionError) as error:
        raise CorruptSlideError(
            f"'{document}' is damaged ({brief(error)}); get a fresh copy of it."
        ) from error
    if not isinstance(found, dict):
        raise CorruptSlideError(f"'{document}' is not a JSON object; get a fresh copy of it.")
    return found
