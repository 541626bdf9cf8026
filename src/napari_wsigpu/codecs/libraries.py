"""Loading of imagecodecs' libraries, and of Pillow's JPEG plugin, before threads use them.

imagecodecs loads each library at its first use, under a lock that a fork does not reset. If another
thread forks the process at that moment, the child waits for the lock forever.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import imagecodecs

if TYPE_CHECKING:
    from collections.abc import Collection

PILLOW = "Pillow"

_loaded: set[str] = set()
_loading = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_loading.acquire, after_in_parent=_loading.release, after_in_child=_loading.release
    )


def load(names: Collection[str]) -> None:
    """Load the libraries of imagecodecs functions, or `PILLOW` itself, while no thread can fork."""
    if _loaded.issuperset(names):
        return
    with _loading:
        for name in names:
            if name == PILLOW:
                from PIL import Image

                Image.preinit()
            else:
                getattr(imagecodecs, name)
        _loaded.update(names)
