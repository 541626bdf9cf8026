"""Zarr hierarchies on servers: their folders as far as parsers need paths, and zarr's store."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu.model.errors import (
    SlideNotFoundError,
    SlidePermissionError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.limits import limits
from napari_wsigpu.storage.readers import closed_error
from napari_wsigpu.storage.remote.connection import Connection
from napari_wsigpu.storage.remote.signed import is_secret
from napari_wsigpu.storage.remote.url import public_url

if TYPE_CHECKING:
    from concurrent.futures import Future

    from napari_wsigpu.storage.remote.connection import Answer
    from napari_wsigpu.storage.zarr.guard import Guard

DOCUMENTS = ("zarr.json", ".zattrs", ".zgroup", ".zarray")
LARGEST_DOCUMENT = 16 << 20


class Status(NamedTuple):
    """The size of an object, by the name that `os.stat` has for it."""

    st_size: int


class ZarrServer:
    """What lies below a URL. Documents of metadata are asked for once, those of a folder together.

    Parameters
    ----------
    url : str
        Of a folder; see `Connection`.

    Attributes
    ----------
    name : str
        What of the URL may be shown.

    Raises
    ------
    UnsupportedSlideError
        If the URL has a query, which is for one object only.
    """

    def __init__(self, url: str) -> None:
        self.name = public_url(url).rstrip("/")
        if is_secret(url):
            raise UnsupportedSlideError(
                f"'{self.name}' is a folder of Zarr, whose URL can't have a query; give the URL "
                "without it, and credentials in environment variables."
            )
        self._connection = Connection(url.rstrip("/"))
        self._documents: dict[str, bytes | None] = {}

    def ask(self, key: str, offset: int = 0, length: int | None = None) -> Future[Answer]:
        """Ask for an object, or for a range of it; see `Connection.get`."""
        return self._connection.get(offset, length, key)

    def document(self, key: str) -> bytes | None:
        """Return a document, None if there is none.

        Raises
        ------
        SlideError
            If the server does not answer, or gives none of the folder's documents.
        """
        if key not in self._documents:
            folder, slash, name = key.rpartition("/")
            names = DOCUMENTS if name in DOCUMENTS else (name,)
            self._fetch([f"{folder}{slash}{each}" for each in names])
        return self._documents[key]

    def _fetch(self, keys: list[str]) -> None:
        asked = {key: self.ask(key) for key in keys}
        found: dict[str, bytes | None] = {}
        refused: SlidePermissionError | None = None
        for key, answer in asked.items():
            found[key] = None
            try:
                found[key] = bytes(answer.result().data)
            except SlideNotFoundError:
                continue
            except SlidePermissionError as error:
                # Some servers say so of what is not there; but not of everything.
                refused = error
        if refused is not None and not any(found.values()):
            raise refused
        self._documents |= found

    @property
    def version(self) -> str:
        """What changes with any document that was asked for."""
        held = sorted((key, data) for key, data in self._documents.items() if data is not None)
        return sha256(repr(held).encode()).hexdigest()

    def release(self) -> None:
        """Let go of the connection until the next request; those in flight fail."""
        self._connection.release()

    def close(self) -> None:
        """Let go of everything for good; requests in flight fail."""
        self._connection.close()


@dataclass(frozen=True, repr=False)
class ServerFolder:
    """A folder on a server, or an object in one: as much of a `Path` as parsers of Zarr need.

    Parameters
    ----------
    server : ZarrServer
        Where.
    key : str
        Its name there, without a slash at its end; that of the uppermost folder is empty.
    """

    _server: ZarrServer
    _key: str = ""

    def __truediv__(self, name: str) -> ServerFolder:
        return ServerFolder(self._server, f"{self._key}/{name}".strip("/"))

    def __str__(self) -> str:
        return f"{self._server.name}/{self._key}".rstrip("/")

    @property
    def name(self) -> str:
        """The last part of it."""
        return str(self).rpartition("/")[2]

    def is_file(self) -> bool:
        """Whether there is such an object."""
        return self._server.document(self._key) is not None

    def is_dir(self) -> bool:
        """Whether it is the folder of an array or of a group."""
        return any((self / name).is_file() for name in DOCUMENTS)

    def stat(self) -> Status:
        """Return its size."""
        return Status(len(self.read_bytes()))

    def read_bytes(self) -> bytes:
        """Return what is in it."""
        found = self._server.document(self._key)
        if found is None:
            raise FileNotFoundError(2, "No such file or directory", str(self))
        return found

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return what is in it as text."""
        return self.read_bytes().decode(encoding, errors)

    def store(self, guard: Guard) -> Any:
        """Return a store of zarr that reads this folder, and checks chunks."""
        store = _kind()(read_only=True)
        store.server, store.key, store.guard = self._server, self._key, guard
        return store


@cache
def _kind() -> Any:
    """Return the class of stores; zarr is an extra."""
    from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

    async def get(store: Any, key: str, prototype: Any, byte_range: Any = None) -> Any:
        whole = f"{store.key}/{key}".strip("/")
        if key in DOCUMENTS:
            found = await asyncio.to_thread(store.server.document, whole)
            return None if found is None else prototype.buffer.from_bytes(found)
        offset, length = 0, None
        if isinstance(byte_range, RangeByteRequest):
            offset, length = byte_range.start, byte_range.end - byte_range.start
        elif isinstance(byte_range, SuffixByteRequest):
            offset, length = -byte_range.suffix, byte_range.suffix
        elif isinstance(byte_range, OffsetByteRequest):
            offset, length = byte_range.offset, limits.tile_bytes
        try:
            answer = await asyncio.wrap_future(store.server.ask(whole, offset, length))
        except SlideNotFoundError:
            return None
        except (CancelledError, asyncio.CancelledError):
            raise closed_error(store.server.name) from None
        store.guard.check_read(answer.data, byte_range)
        return prototype.buffer.from_bytes(bytes(answer.data))

    async def get_partial_values(store: Any, prototype: Any, key_ranges: Any) -> Any:
        asked = (store.get(key, prototype, byte_range) for key, byte_range in key_ranges)
        return list(await asyncio.gather(*asked))

    async def exists(store: Any, key: str) -> bool:
        found = await asyncio.to_thread(store.server.document, f"{store.key}/{key}".strip("/"))
        return found is not None

    def same(store: Any, other: object) -> bool:
        return store is other

    def refuse(store: Any, *args: Any) -> Any:
        raise NotImplementedError("it is read only, and not listed")

    no = property(lambda store: False)
    writing = dict.fromkeys(("set", "delete", "list", "list_prefix", "list_dir"), refuse)
    support = dict.fromkeys(("supports_writes", "supports_deletes", "supports_listing"), no)
    own = {"get": get, "get_partial_values": get_partial_values, "exists": exists, "__eq__": same}
    return type("ServerStore", (Store,), {**writing, **support, **own, "__hash__": object.__hash__})
