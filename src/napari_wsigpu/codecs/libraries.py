"""Libraries of imagecodecs, and Pillow's JPEGs, loaded before threads decode or encode by them.

Each is loaded when it is first used, under a lock that a fork does not renew: in a process
that another thread forks meanwhile, whoever needs a library would wait for ever.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import imagecodecs

if TYPE_CHECKING:
    from collections.abc import Iterable

PILLOW = "Pillow"

_loaded: set[str] = set()
_loading = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_loading.acquire, after_in_parent=_loading.release, after_in_child=_loading.release
    )


def load(names: Iterable[str]) -> None:
    """Load the libraries that functions of imagecodecs are in, or `PILLOW`.

    No thread can fork meanwhile.
    """
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
