"""`TileLog`: counters, failures and reports of the tiles of one slide."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from napari_wsigpu.model.errors import TileError
from napari_wsigpu.native.tables import WARNINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from napari_wsigpu.reading.cache import TileKey

MAX_REPORTS = 10
MOST_UNCOUNTED = 4096

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class TileLog:
    """Counts tiles, and reports the first failed ones, each once. Thread-safe.

    Parameters
    ----------
    path : str
        The slide's path, for messages.
    names : Mapping of int to str
        Names of images other than levels, for messages.
    explain : callable, optional
        ``explain(image, row, column)`` returns a better reason for a failed tile than the
        decoder's, or None.
    check : callable, optional
        Raises a SlideError if the file as a whole is at fault, before tiles are blamed.
    on_failed_tile : callable, optional
        Called with the name of each reported tile and the reason, without holding the lock.
    """

    _path: str
    _names: Mapping[int, str]
    _explain: Callable[[int, int, int], str | None] | None = None
    _check: Callable[[], None] | None = None
    on_failed_tile: Callable[[str, str], None] | None = None
    # Small reads that are not in `_counts` yet: cached tiles, decoded tiles, bytes read, and bytes
    # decoded. Threads append to it without waiting for each other.
    _small: deque[tuple[int, int, int, int]] = field(default_factory=deque)
    # Guards the fields below; `has_failed` needs no lock, as dict lookups are atomic.
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _counts: Counter[str] = field(default_factory=Counter)
    _decoded: Counter[str] = field(default_factory=Counter)
    _failed: dict[TileKey, str] = field(default_factory=dict)
    _reported: set[TileKey] = field(default_factory=set)
    _doubtful: dict[TileKey, int] = field(default_factory=dict)

    def count(self, **numbers: int) -> None:
        """Add to the counters tiles_asked, cache_hits, computed, background and bytes_*."""
        with self._lock:
            for name, number in numbers.items():  # `Counter.update` takes five times as long
                self._counts[name] += number

    def count_read(self, held: int, decoded: int, read: int, tile_bytes: int) -> None:
        """Count a small read: cached and decoded tiles, bytes read, bytes per tile."""
        self._small.append((held, decoded, read, decoded * tile_bytes))
        if len(self._small) > MOST_UNCOUNTED:
            with self._lock:
                self._count_small()

    def count_decoded(self, **numbers: int) -> None:
        """Add to the numbers of tiles that each decoder has decoded."""
        with self._lock:
            for name, number in numbers.items():
                self._decoded[name] += number

    def stats(self, most_failed: int | None = None) -> dict[str, object]:
        """Return the counters and the first failed tiles as a JSON-serializable dict."""
        with self._lock:
            self._count_small()
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

    def _count_small(self) -> None:
        """Count the small reads so far; the caller holds the lock."""
        if self._small:
            reads = (self._small.popleft() for _ in range(len(self._small)))
            held, decoded, read, decoded_bytes = map(sum, zip(*reads, strict=True))
            self._counts.update(
                tiles_asked=held + decoded, cache_hits=held,
                bytes_read=read, bytes_decoded=decoded_bytes,
            )  # fmt: skip
            self._decoded["cpu"] += decoded

    def record_failures(self, failures: Mapping[TileKey, str], *, report: bool) -> None:
        """Count failed tiles; report the first `MAX_REPORTS`, each when it is first shown.

        Raises
        ------
        SlideError
            If the file as a whole is at fault.
        """
        if not failures:
            return
        # If the file has changed, its tiles are not to blame.
        if self._check is not None:
            self._check()
        failures = self._explained(failures)
        with self._lock:
            self._failed |= failures
            unreported = failures.keys() - self._reported if report else set()
            reported = len(self._reported)
            self._reported |= unreported
        # Without holding the lock: the listener may take other locks.
        for key in sorted(unreported)[: max(0, MAX_REPORTS - reported)]:
            name, why = self._name(key), failures[key]
            logger.warning("The tile at %s of '%s' can't be decoded: %s", name, self._path, why)
            if self.on_failed_tile is not None:
                self.on_failed_tile(name, why)
        if reported <= MAX_REPORTS < reported + len(unreported):
            logger.warning(
                "Further tiles of '%s' failed; they are counted, but no longer reported one by one",
                self._path,
            )

    def record_doubtful(self, key: TileKey, warnings: int) -> None:
        """Record the warnings, bits of `native.tables.WARNINGS`, about a tile that was decoded."""
        with self._lock:
            self._doubtful[key] = self._doubtful.get(key, 0) | warnings

    def forget_doubtful(self) -> None:
        """Forget the doubtful tiles."""
        with self._lock:
            self._doubtful.clear()

    def doubtful_tiles(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the name of each doubtful tile and the codes of the warnings about it."""
        with self._lock:
            found = sorted(self._doubtful.items())
        return [
            (self._name(key), tuple(code for bit, code in WARNINGS.items() if warnings & bit))
            for key, warnings in found
        ]

    def has_failed(self, key: TileKey | None = None) -> bool:
        """Return whether a tile has failed to decode; without a key, whether any tile has."""
        return bool(self._failed) if key is None else key in self._failed

    def error(self, failures: Mapping[TileKey, str], regions: Sequence[int] = ()) -> TileError:
        """Return the exception that names failed tiles and the regions that show them."""
        named = [(self._name(key), why) for key, why in sorted(self._explained(failures).items())]
        return TileError(self._path, named, regions)

    def _explained(self, failures: Mapping[TileKey, str]) -> Mapping[TileKey, str]:
        if self._explain is None:
            return failures
        return {
            key: self._explain(key.image, key.row, key.column) or why
            for key, why in failures.items()
        }

    def _name(self, key: TileKey) -> str:
        image = self._names.get(key.image, f"level {key.image}")
        return f"{image}, row {key.row}, column {key.column}"
