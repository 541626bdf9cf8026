"""Named limits on the memory and time that a file or server may take; users can raise them.

Parsers and decoders check `limits` before they allocate the memory or spend the time that a file or
server demands. If a limit is exceeded, the error names it.

Examples
--------
>>> from napari_wsigpu.limits import limits
>>> limits.tile_bytes = 1 << 30
>>> limits.tile_bytes = 256 << 20

The environment variable WSIGPU_LIMITS sets limits for a process and its children, for example
``tile_bytes=1e9, first_byte_seconds=60``.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass

from napari_wsigpu.model.units import byte_size

VARIABLE = "WSIGPU_LIMITS"
UNKNOWN_MEMORY = 8_000_000_000

logger = logging.getLogger(__name__)


@dataclass
class Limits:
    """Limits of this process. A change applies to the next file or request.

    Attributes
    ----------
    tile_bytes : int
        Decoded size of a tile, strip, Zarr chunk (after each filter) or associated image.
    decoding_bytes : int
        Total decoded size of the tiles that threads decode at the same time for one region; larger
        tiles are decoded one at a time. Codecs may use up to five times as much memory.
    scanned_samples : int
        Samples of a progressive JPEG, multiplied by the number of its scans.
    averaged_bytes : int
        Decoded bytes held at a time to average levels that have missing tiles.
    header_bytes : int
        Bytes read from a remote file's header. An XML document may have 1/16 as many characters.
    xml_elements : int
        Elements of an XML document.
    images : int
        Images (TIFF directories) in a file.
    pages : int
        TIFF directories that must be parsed one by one: all directories of a slide scanner's file;
        all directories of any other file if they differ or have subimages. Files of the second kind
        may always have one directory per 2,560 bytes of file size.
    subimages : int
        Images (SubIFDs) of one TIFF directory.
    planes : int
        Planes along z, t and channels of an image.
    samples : int
        Interleaved samples per pixel in a TIFF file.
    levels : int
        Levels of a slide.
    tiles : int
        Tiles in all levels of a slide, for formats whose files don't have to list every tile.
    geojson_bytes : int
        Bytes of a GeoJSON document after decompression, of DICOM annotations or reports, and
        of a DICOM segmentation, both as stored and as decoded labels.
    objects : int
        Objects in a file of annotations, or patches in a file of scores.
    points : int
        Points of all objects in a file of annotations.
    first_byte_seconds : float
        Seconds to wait for a server's response, and for the first bytes of its content.
    bytes_per_second : float
        Lowest acceptable rate of a response, on average after `first_byte_seconds`.
    allow_hosts : frozenset of str
        Hosts that servers may redirect to even if they have a loopback or link-local address;
        separated by spaces in the environment variable.
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
    samples: int = 1 << 13
    levels: int = 64
    tiles: int = 1 << 23
    geojson_bytes: int = 1 << 30
    objects: int = 1 << 22
    points: int = 1 << 27
    first_byte_seconds: float = 10.0
    bytes_per_second: float = 1000.0
    allow_hosts: frozenset[str] = frozenset()

    @property
    def xml_bytes(self) -> int:
        """Number of characters that an XML document may have."""
        return self.header_bytes // 16

    def advice(self, name: str) -> str:
        """Return the end of an error message: a limit's value, and how to raise the limit."""
        value = getattr(self, name)
        size = byte_size(value) if name.endswith("_bytes") else f"{value:,}"
        return f"the limit is {size}; if you trust the file, raise the limit {name!r}"


def _from_environment(text: str) -> Limits:
    """Parse the value of the environment variable; log parts that are invalid and ignore them."""
    found = Limits()
    kinds = {name: type(value) for name, value in vars(found).items()}
    for part in filter(str.strip, text.split(",")):
        name, _, value = (word.strip() for word in part.partition("="))
        if name == "allow_hosts":
            found.allow_hosts = frozenset(value.split())
            continue
        try:
            number = float(value)
            if name not in kinds or not 0 < number < math.inf:
                raise ValueError
            setattr(found, name, kinds[name](number))
        except ValueError:
            logger.warning(
                "%s contains '%s', which is not a valid limit; write it like 'tile_bytes=1e9'.",
                VARIABLE,
                part.strip(),
            )
    return found


limits = _from_environment(os.environ.get(VARIABLE, ""))


def machine_memory() -> int:
    """Return the machine's memory in bytes, or a fixed number if it is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return UNKNOWN_MEMORY
