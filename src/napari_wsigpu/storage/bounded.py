"""A file for parsers that ask for as many bytes as damaged files claim."""

from __future__ import annotations

import io
import os

# Fewer bytes than these are read without asking whether the file has them.
SMALL = 1 << 20


class BoundedReader(io.BufferedReader):
    """Takes no memory for bytes that the file lacks; Python does before it reads any."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read so many bytes, or fewer at the file's end."""
        if size is not None and size > SMALL:
            here = self.tell()
            size = min(size, max(0, self.seek(0, os.SEEK_END) - here))
            self.seek(here)
        return io.BufferedReader.read(self, size)
