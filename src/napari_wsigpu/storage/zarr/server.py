"""Zarr hierarchies whose objects are read by key: on servers and in ZIP archives.

`KeyFolder` stands in for `pathlib.Path`, and its `store` lets zarr read the objects.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple, Protocol

from napari_wsigpu.model.errors import (
    SlideNotFoundError,
    SlidePermissionError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.limits import limits
from napari_wsigpu.storage.readers import closed_error
from napari_wsigpu.storage.remote.url import public_url

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future
    from typing import NoReturn

    from zarr.abc.store import ByteRequest, Store
    from zarr.core.buffer import Buffer, BufferPrototype

    from napari_wsigpu.storage.remote.connection import Response
    from napari_wsigpu.storage.zarr.guard import Guard

DOCUMENTS = ("zarr.json", ".zattrs", ".zgroup", ".zarray")
LARGEST_DOCUMENT = 16 << 20


class Status(NamedTuple):
    """The size of an object, under the name that `os.stat` uses."""

    st_size: int


class Hierarchy(Protocol):
    """The objects of a Zarr hierarchy by their keys."""

    name: str

    def get(self, key: str, offset: int = 0, length: int | None = None) -> Future[Response]:
        """Read an object or a range of it; a negative offset counts from its end."""
        ...

    def document(self, key: str) -> bytes | None:
        """Return the content of a metadata document; None if there is none."""


class ZarrServer:
    """A Zarr hierarchy below a URL.

    Metadata documents are requested once, all documents of a folder at the same time.

    Parameters
    ----------
    url : str
        URL of a folder; see `Connection`.

    Attributes
    ----------
    name : str
        The URL without its secrets.

    Raises
    ------
    UnsupportedSlideError
        If the URL has a query, which would be valid for one object only.
    """

    def __init__(self, url: str) -> None:
        from napari_wsigpu.storage.remote.connection import Connection
        from napari_wsigpu.storage.remote.http_store import has_query

        self.name = public_url(url).rstrip("/")
        if has_query(url):
            raise UnsupportedSlideError(
                f"'{self.name}' is a Zarr folder, whose URL can't have a query; remove the query, "
                "and put credentials in environment variables."
            )
        self._connection = Connection(url.rstrip("/"))
        self._documents: dict[str, bytes | None] = {}

    def get(self, key: str, offset: int = 0, length: int | None = None) -> Future[Response]:
        """Request an object or a range of it; see `Connection.get`."""
        return self._connection.get(offset, length, key)

    def document(self, key: str) -> bytes | None:
        """Return the content of a metadata document; None if there is none.

        Raises
        ------
        SlideError
            If the server does not respond, or refuses a document of a folder in which no other
            document is found.
        """
        if key not in self._documents:
            folder, slash, name = key.rpartition("/")
            names = DOCUMENTS if name in DOCUMENTS else (name,)
            self._fetch([f"{folder}{slash}{each}" for each in names])
        return self._documents[key]

    def _fetch(self, keys: list[str]) -> None:
        requests = {key: self.get(key) for key in keys}
        found: dict[str, bytes | None] = {}
        refused: SlidePermissionError | None = None
        for key, request in requests.items():
            found[key] = None
            try:
                found[key] = bytes(request.result().data)
            except SlideNotFoundError:
                continue
            except SlidePermissionError as error:
                # Some servers answer "forbidden" for objects that don't exist, so a refusal counts
                # only if no document is found.
                refused = error
        if refused is not None and not any(found.values()):
            raise refused
        self._documents |= found

    @property
    def version(self) -> str:
        """Hash of all documents read so far; it identifies their versions."""
        read = sorted((key, data) for key, data in self._documents.items() if data is not None)
        return sha256(repr(read).encode()).hexdigest()

    def release(self) -> None:
        """Release the connection; the next request reconnects. Requests in progress fail."""
        self._connection.release()

    def close(self) -> None:
        """Close the connection for good; requests in progress fail."""
        self._connection.close()


@dataclass(frozen=True, repr=False)
class KeyFolder:
    """A folder or object of a hierarchy, with the methods of `Path` that the Zarr parsers use.

    Parameters
    ----------
    hierarchy : Hierarchy
        The server or archive.
    key : str
        Path in the hierarchy, without a slash at the end; empty for the root.
    """

    _hierarchy: Hierarchy
    _key: str = ""

    def __truediv__(self, name: str) -> KeyFolder:
        return KeyFolder(self._hierarchy, f"{self._key}/{name}".strip("/"))

    def __str__(self) -> str:
        return f"{self._hierarchy.name}/{self._key}".rstrip("/")

    @property
    def name(self) -> str:
        """The last component of the path."""
        return str(self).rpartition("/")[2]

    def is_file(self) -> bool:
        """Return whether the object exists."""
        return self._hierarchy.document(self._key) is not None

    def is_dir(self) -> bool:
        """Return whether this is the folder of an array or a group."""
        return any((self / name).is_file() for name in DOCUMENTS)

    def stat(self) -> Status:
        """Return the size of the object."""
        return Status(len(self.read_bytes()))

    def read_bytes(self) -> bytes:
        """Return the content of the object."""
        found = self._hierarchy.document(self._key)
        if found is None:
            raise FileNotFoundError(2, "No such file or directory", str(self))
        return found

    def store(self, guard: Guard) -> Store:
        """Return a zarr store that reads this folder, and checks chunks with a guard."""
        store = _store_class()(read_only=True)
        store.hierarchy, store.key, store.guard = self._hierarchy, self._key, guard
        return store


@cache
def _store_class() -> type[Store]:
    """Create the store class on first use, since zarr is an optional dependency."""
    import asyncio

    from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

    async def get(
        store: Store, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        whole = f"{store.key}/{key}".strip("/")
        if key in DOCUMENTS:
            found = await asyncio.to_thread(store.hierarchy.document, whole)
            return None if found is None else prototype.buffer.from_bytes(found)
        offset, length = 0, None
        if isinstance(byte_range, RangeByteRequest):
            offset, length = byte_range.start, byte_range.end - byte_range.start
        elif isinstance(byte_range, SuffixByteRequest):
            offset, length = -byte_range.suffix, byte_range.suffix
        elif isinstance(byte_range, OffsetByteRequest):
            offset, length = byte_range.offset, limits.tile_bytes
        try:
            response = await asyncio.wrap_future(store.hierarchy.get(whole, offset, length))
        except SlideNotFoundError:
            return None
        except (CancelledError, asyncio.CancelledError):
            raise closed_error(store.hierarchy.name) from None
        store.guard.check_read(response.data, byte_range)
        return prototype.buffer.from_bytes(bytes(response.data))

    async def get_partial_values(
        store: Store,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        requests = (store.get(key, prototype, byte_range) for key, byte_range in key_ranges)
        return list(await asyncio.gather(*requests))

    async def exists(store: Store, key: str) -> bool:
        found = await asyncio.to_thread(store.hierarchy.document, f"{store.key}/{key}".strip("/"))
        return found is not None

    def same(store: Store, other: object) -> bool:
        return store is other

    def refuse(store: Store, *arguments: object) -> NoReturn:
        raise NotImplementedError("this store is read-only and can't be listed")

    no = property(lambda store: False)
    refused = dict.fromkeys(("set", "delete", "list", "list_prefix", "list_dir"), refuse)
    support = dict.fromkeys(("supports_writes", "supports_deletes", "supports_listing"), no)
    own = {"get": get, "get_partial_values": get_partial_values, "exists": exists, "__eq__": same}
    return type("KeyStore", (Store,), {**refused, **support, **own, "__hash__": object.__hash__})
