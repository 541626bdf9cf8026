"""What a file or a server may cost: named limits, which a user can raise.

Parsers and decoders ask `limits` before they allocate, work or wait for what a file or server
claims. What goes beyond is refused by a sentence that names the limit.

Examples
--------
>>> from napari_wsigpu.limits import limits
>>> limits.tile_bytes = 1 << 30
>>> limits.tile_bytes = 256 << 20

The environment variable WSIGPU_LIMITS sets them for a process and those that it starts, for example
to ``tile_bytes=1e9, first_byte_seconds=60``.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, fields
from typing import Any

from napari_wsigpu.model.units import byte_size

VARIABLE = "WSIGPU_LIMITS"

logger = logging.getLogger(__name__)


@dataclass
class Limits:
    """Limits of a process; what is set holds from the next file or request on.

    Attributes
    ----------
    tile_bytes : int
        Decoded bytes of a tile, strip or Zarr chunk, after each of its filters, and of an
        associated image.
    decoding_bytes : int
        Decoded bytes of tiles that threads decode at the same time for a region; of larger tiles,
        one. Codecs take up to five times as much.
    scanned_samples : int
        Samples of a progressive JPEG times its scans, each of which goes through all of them.
    averaged_bytes : int
        Decoded bytes that are held at a time to average levels whose tiles a file lacks.
    header_bytes : int
        Bytes of a remote file's header that are read, and of an XML text 1/16 of that.
    xml_elements : int
        Elements of an XML text.
    images : int
        Images (TIFF directories) in a file.
    pages : int
        Images of which each is looked at: in a file of a slide scanner, or of any kind if they are
        unlike each other or have others below them. A file of more than 10 MB may have more.
    subimages : int
        Images (SubIFDs) below one of them.
    planes : int
        Planes along z, t and channels of an image.
    levels : int
        Levels of a slide.
    tiles : int
        Tiles of all levels of a slide whose number only its size tells.
    geojson_bytes : int
        Bytes of a GeoJSON text, unpacked.
    objects : int
        Objects in a GeoJSON text.
    points : int
        Points of all of them.
    first_byte_seconds : float
        How long to wait for a server's answer to a request, and for its next bytes.
    bytes_per_second : float
        How fast an answer has to come, on average over `first_byte_seconds`.
    """

    tile_bytes: int = 256 << 20
    decoding_bytes: int = 128 << 20
    scanned_samples: int = 1 << 32
    averaged_bytes: int = 256 << 20
    header_bytes: int = 256 << 20
    xml_elements: int = 1 << 17
    images: int = 1 << 16
    pages: int = 1 << 12
    subimages: int = 512
    planes: int = 1 << 18
    levels: int = 64
    tiles: int = 1 << 23
    geojson_bytes: int = 1 << 30
    objects: int = 1 << 22
    points: int = 1 << 27
    first_byte_seconds: float = 10.0
    bytes_per_second: float = 1000.0

    @property
    def xml_bytes(self) -> int:
        """Characters of an XML text."""
        return self.header_bytes // 16

    def advice(self, name: str) -> str:
        """Return the end of a sentence about what goes beyond a limit: what it is, what to do."""
        value = getattr(self, name)
        size = byte_size(value) if name.endswith("_bytes") else f"{value:,}"
        return f"the limit is {size}; if you trust it, raise the limit {name!r}"


def _from_environment(text: str) -> Limits:
    """Return limits as the environment variable sets them; what can't be is left out and told."""
    found = Limits()
    kinds: dict[str, Any] = {item.name: type(item.default) for item in fields(Limits)}
    for part in filter(str.strip, text.split(",")):
        name, _, value = (word.strip() for word in part.partition("="))
        try:
            number = float(value)
            if name not in kinds or not 0 < number < math.inf:
                raise ValueError
            setattr(found, name, kinds[name](number))
        except ValueError:
            logger.warning(
                "%s has '%s', which sets no limit; it is to be as 'tile_bytes=1e9'.",
                VARIABLE,
                part.strip(),
            )
    return found


limits = _from_environment(os.environ.get(VARIABLE, ""))
