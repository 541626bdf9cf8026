"""Damage slides at random, use them, and keep those that show what should not happen.

Run as ``python -m tests.fuzz --hours 1``, or ``--tries 100``. Each try is told by the seed and its
number: ``--seed 1 --first 4711 --tries 1`` does the same again. What is found is kept, with as few
changes as show it, in a folder: ``--found``. Ends with status 1 if something was found.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from tests.fuzz.attack import Finding, examine, prepare
from tests.fuzz.mutations import mutate
from tests.writers import gallery

if TYPE_CHECKING:
    from collections.abc import Sequence


LARGEST_SEED = 1 << 18
CORPUS = Path(__file__).with_name("corpus")


class Change(NamedTuple):
    """One damage: which of a slide's files, and the seed of what is done to it."""

    file: int
    seed: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first try")
    parser.add_argument("--tries", type=int, default=0, help="how many; else as --hours says")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--more", type=Path, help="folder of small files to damage, too")
    parser.add_argument("--found", type=Path, default=Path("fuzz-found"))
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.hours * 3600
    seen: set[tuple[str, str]] = set()
    number = options.first
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        (folder / "seeds").mkdir()
        seeds = sorted(gallery.write_all(folder / "seeds", "Roe").values())
        seeds += copies(options.more, folder / "more") if options.more else []
        prepare()
        for path in known():
            copy = folder / "known"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(path.parent, copy)
            for finding in examine(copy / path.name):
                seen.add((finding.kind, finding.where))
                print(f"{path.parent.name}: {finding.kind}, {finding.where}\n{finding.details}")
        while number < options.first + options.tries if options.tries else time.monotonic() < end:
            random = Random(f"{options.seed} {number}")
            seed = random.choice(seeds)
            changes = [
                Change(random.randrange(1 << 16), random.getrandbits(32))
                for _ in range(random.choice((1, 1, 1, 2, 3, 5)))
            ]
            findings = run(seed, changes, folder / "try")
            new = [each for each in findings if (each.kind, each.where) not in seen]
            for finding in new:
                seen.add((finding.kind, finding.where))
                print(f"try {number}, {seed.parent.name}: {finding.kind}, {finding.where}")
                fewest = shrink(seed, changes, finding, folder / "try")
                keep(seed, fewest, finding, options.found)
            number += 1
            if number % 1000 == 0:
                print(f"{number - options.first} tries, {len(seen)} findings", flush=True)
    print(f"{number - options.first} tries, {len(seen)} findings")
    return int(bool(seen))


def known() -> list[Path]:
    """Return slides that showed something once: the only file of each folder of the corpus."""
    return [next(folder.iterdir()) for folder in sorted(CORPUS.iterdir()) if folder.is_dir()]


def copies(source: Path, target: Path) -> list[Path]:
    """Copy the small files of a folder to a folder each."""
    found = []
    for path in sorted(source.iterdir()):
        if path.is_file() and path.stat().st_size <= LARGEST_SEED:
            (target / path.stem).mkdir(parents=True)
            found.append(Path(shutil.copy(path, target / path.stem)))
    return found


def damage(seed: Path, changes: Sequence[Change], folder: Path) -> Path:
    """Write a damaged copy of a slide, with all that lies beside it, and return its path."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(seed.parent, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for change in changes:
        path = files[change.file % len(files)]
        path.write_bytes(mutate(path.read_bytes(), Random(change.seed)))
    return folder / seed.name


def run(seed: Path, changes: Sequence[Change], folder: Path) -> list[Finding]:
    """Use a damaged copy of a slide."""
    return examine(damage(seed, changes, folder))


def shrink(
    seed: Path, changes: Sequence[Change], finding: Finding, folder: Path
) -> Sequence[Change]:
    """Return as few of the changes as still show what was found."""
    fewest = list(changes)
    for change in changes:
        fewer = [each for each in fewest if each is not change]
        found = run(seed, fewer, folder) if fewer else []
        if any(each[:2] == finding[:2] for each in found):
            fewest = fewer
    return fewest


def keep(seed: Path, changes: Sequence[Change], finding: Finding, found: Path) -> None:
    """Write a damaged slide to a folder of its own, with what it showed."""
    title = re.sub(r"\W+", "-", f"{seed.parent.name} {finding.kind} {finding.where}")[:80]
    folder = found / title
    path = damage(seed, changes, folder)
    (found / f"{title}.txt").write_text(
        f"{path.relative_to(found)}\n{finding.kind}: {finding.where}\n{finding.details}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
