"""Read all of a slide that can be read, in a process that may not take much memory.

Run as ``python probe.py PATH...``; prints one JSON line for each path.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from napari_wsigpu import SlideError, open_slide

GUARD_BYTES = 6 << 30
WHOLE_BYTES = 8 << 20
SIDE = 300
COMPUTED_PIXELS = 1 << 24


def main(paths: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (GUARD_BYTES, GUARD_BYTES))
    warnings.simplefilter("error")
    before = peak()
    for path in paths:
        start = time.process_time()  # what else the machine does is not its fault
        found = probe(path)
        found["seconds"] = time.process_time() - start
        found["peak"] = peak()
        found["grown"] = peak() - before
        print(json.dumps(found), flush=True)


def peak() -> int:
    """Most bytes of memory that this process ever took."""
    status = Path("/proc/self/status")
    if status.exists():  # where it is, the other figure counts the parent's memory too
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def probe(path: str) -> dict[str, Any]:
    errors: list[str] = []
    pixels = 0
    try:
        with open_slide(path) as slide:
            # To compute the coarsest level of a large slide, all of it has to be read.
            small = math.prod(slide.dimensions) <= COMPUTED_PIXELS
            count = len(slide.pyramid) if small else slide.level_count
            tolerant = [slide.level_array(index, tolerant=True) for index in range(count)]
            for array in (*slide.levels, *tolerant):
                pixels += read(array, errors)
            for image in slide.associated_images.values():
                pixels += attempt(image.read, errors)
            json.dumps([slide.metadata, slide.stats()])
    except SlideError as error:
        errors.append(str(error))
    return {"path": path, "errors": errors, "pixels": pixels}


def read(array: Any, errors: list[str]) -> int:
    """Read the whole of a small level, and the corners of a large one."""
    height, width = array.shape[:2]
    if array.size * array.dtype.itemsize <= WHOLE_BYTES:
        return attempt(lambda: array[...], errors)
    return sum(
        attempt(lambda y=y, x=x: array[y : y + SIDE, x : x + SIDE, :1], errors)
        for y in {0, max(0, height - SIDE)}
        for x in {0, max(0, width - SIDE)}
    )


def attempt(action: Any, errors: list[str]) -> int:
    try:
        return action().size
    except SlideError as error:
        errors.append(str(error))
        return 0


if __name__ == "__main__":
    main(sys.argv[1:])
