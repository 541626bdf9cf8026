"""A file object that protects parsers from false sizes in damaged files."""

from __future__ import annotations

import io
import os

# Reads up to this size are passed on without checking how much of the file is left.
SMALL = 1 << 20


class BoundedReader(io.BufferedReader):
    """Reader that limits large reads to the bytes left in the file.

    `io.BufferedReader` allocates the requested size before it reads anything.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        """Return at most `size` bytes; fewer at the end of the file."""
        if size is not None and size > SMALL:
            here = self.tell()
            size = min(size, max(0, self.seek(0, os.SEEK_END) - here))
            self.seek(here)
        return io.BufferedReader.read(self, size)
