"""What happened to the tiles of one slide: counters, failures, and who is told of them."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from napari_wsigpu.model.errors import TileError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from napari_wsigpu.reading.cache import TileKey

MOST_REPORTS = 10

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class TileLog:
    """Counts tiles and reports those that can't be decoded, each once; thread-safe.

    Parameters
    ----------
    path : str
        The slide's path, for messages.
    names : Mapping of int to str
        Names of images that are no levels, for messages.
    explain : callable, optional
        Says of the level, row and column of a failed tile why it failed, if it knows better than
        who decoded it.
    check : callable, optional
        Raises what is wrong with the file as a whole, before tiles are blamed.
    """

    _path: str
    _names: Mapping[int, str]
    _explain: Callable[[int, int, int], str | None] | None = None
    _check: Callable[[], None] | None = None
    on_failed_tile: Callable[[str, str], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _counts: Counter[str] = field(default_factory=Counter)
    _decoded: Counter[str] = field(default_factory=Counter)
    _failed: dict[TileKey, str] = field(default_factory=dict)
    _reported: set[TileKey] = field(default_factory=set)

    def count(self, **numbers: int) -> None:
        """Add to counters: tiles_asked, cache_hits, computed, background, bytes_*."""
        with self._lock:
            self._counts.update(numbers)

    def count_read(self, held: int, decoded: int, read: int, tile_bytes: int) -> None:
        """Add tiles from the cache, tiles decoded on the CPU, bytes read, and bytes a tile."""
        with self._lock:
            counts = self._counts
            counts["tiles_asked"] += held + decoded
            counts["cache_hits"] += held
            counts["bytes_read"] += read
            counts["bytes_decoded"] += decoded * tile_bytes
            self._decoded["cpu"] += decoded

    def count_decoded(self, **numbers: int) -> None:
        """Add to the number of tiles that each decoder decoded, by its name."""
        with self._lock:
            self._decoded.update(numbers)

    def stats(self, most_failed: int | None = None) -> dict[str, Any]:
        """Return the counters as a JSON-serialisable dict, and the first failed tiles."""
        with self._lock:
            return {
                "tiles_asked": self._counts["tiles_asked"],
                "cache_hits": self._counts["cache_hits"],
                "decoded": {"cpu": 0, **self._decoded},
                "computed": self._counts["computed"],
                "background": self._counts["background"],
                "bytes_read": self._counts["bytes_read"],
                "bytes_decoded": self._counts["bytes_decoded"],
                "failed": len(self._failed),
                "failed_tiles": {
                    self._name(key): why for key, why in islice(self._failed.items(), most_failed)
                },
            }

    def note(self, failures: Mapping[TileKey, str], *, report: bool) -> None:
        """Count failed tiles; report each once, when it is first shown, and of many the first.

        Raises
        ------
        SlideError
            If it is the file that is at fault.
        """
        if not failures:
            return
        if self._check is not None:
            self._check()
        failures = self._explained(failures)
        with self._lock:
            self._failed |= failures
            unsaid = failures.keys() - self._reported if report else set()
            said = len(self._reported)
            self._reported |= unsaid
        for key in sorted(unsaid)[: max(0, MOST_REPORTS - said)]:
            name, why = self._name(key), failures[key]
            logger.warning(
                "The tile at %s of '%s' is shown as background: %s", name, self._path, why
            )
            if self.on_failed_tile is not None:
                self.on_failed_tile(name, why)
        if said <= MOST_REPORTS < said + len(unsaid):
            logger.warning("So are more tiles of '%s', which are only counted", self._path)

    def has_failed(self, key: TileKey | None = None) -> bool:
        """Whether a tile, or any tile at all, could not be decoded."""
        return bool(self._failed) if key is None else key in self._failed

    def error(self, failures: Mapping[TileKey, str], regions: Sequence[int] = ()) -> TileError:
        """Return the exception that names failed tiles, and regions that show them."""
        named = [(self._name(key), why) for key, why in sorted(self._explained(failures).items())]
        return TileError(self._path, named, regions)

    def _explained(self, failures: Mapping[TileKey, str]) -> Mapping[TileKey, str]:
        if self._explain is None:
            return failures
        return {
            key: self._explain(key.level, key.row, key.column) or why
            for key, why in failures.items()
        }

    def _name(self, key: TileKey) -> str:
        image = self._names.get(key.level, f"level {key.level}")
        return f"{image}, row {key.row}, column {key.column}"
