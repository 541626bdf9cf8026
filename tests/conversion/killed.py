"""Kill conversions at each file-system operation, and resume them.

Run as ``python -m tests.conversion.killed SOURCE FOLDER NAME POINTS``. For POINTS operations,
spread evenly over a conversion, one process is killed at the operation, a second one resumes, and
the result is compared with that of an undisturbed conversion. Prints the number of operations.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from napari_wsigpu import convert
from napari_wsigpu.conversion import convert_slide
from napari_wsigpu.conversion.checksum import checksum

STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link"}
KILLED = 9


def main(source: str, folder: str, name: str, points: str) -> None:
    """Try all points; an assertion fails if a result differs."""
    convert_slide.COMMIT_SECONDS = 0
    os.fsync = lambda _: None
    whole = Path(folder) / "whole" / name
    assert _in_child(source, whole) == 0
    wanted, steps = checksum(whole), int((Path(folder) / "steps").read_text())
    chosen = sorted({steps * number // int(points) for number in range(int(points))})
    for point in chosen:
        target = Path(folder) / f"{point}" / name
        assert _in_child(source, target, point) == KILLED, point
        # A file with the target's name is always a complete result.
        assert not target.exists() or checksum(target) == wanted, point
        assert _in_child(source, target) == 0, point
        assert checksum(target) == wanted, point
        assert [path.name for path in target.parent.iterdir()] == [name], point
        shutil.rmtree(target.parent)
    print(steps, len(chosen))


def _in_child(source: str, target: Path, last: int = sys.maxsize) -> int:
    """Convert in a process that is killed at a step; return its exit status.

    The process writes the number of its steps to a file next to the target's folder.
    """
    target.parent.mkdir(exist_ok=True, parents=True)
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        steps = _count(source, target, last)
        (target.parent.parent / "steps").write_text(f"{steps}")
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _count(source: str, target: Path, last: int) -> int:
    """Convert and return the number of steps; exit the process at the last one."""
    place, steps = str(target), 0

    def step(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal steps
        if event in STEPS and str(arguments[0]).startswith(place):
            if steps == last:
                os._exit(KILLED)
            steps += 1

    sys.addaudithook(step)
    convert(source, target, compression="zstd", tile_size=64, workers=1, overwrite=target.exists())
    return steps


if __name__ == "__main__":
    main(*sys.argv[1:])
