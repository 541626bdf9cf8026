"""A short run with a fixed seed; `make fuzz` is the long one."""

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.mutations import mutate
from tests.writers import slides

pytest.importorskip("resource", reason="memory can't be limited on this system")
for package in ("pydicom", "wsidicom", "zarr"):
    pytest.importorskip(package)

ROOT = Path(__file__).parents[2]
TRIES = 30
HARMED = """
import os, sys, time
from pathlib import Path
from tests.fuzz import attack
path = Path(sys.argv[1])
def burn():
    while time.process_time() < end:
        pass
def kinds():
    return " ".join(finding.kind for finding in attack.examine(path)) or "none"
print(kinds())
attack.MOST_MEMORY = 64 << 20
for harm in (lambda: 1 / 0, os.abort, lambda: len(b"1" * (96 << 20))):
    attack.masked = lambda _: harm()
    print(kinds())
attack.MOST_SECONDS, attack.masked = 3.0, lambda _: time.sleep(99)
print(kinds())
end = time.process_time() + 0.6
attack.MOST_SECONDS, attack.MOST_CPU_SECONDS, attack.masked = 60.0, 0.3, lambda _: burn()
print(kinds())
"""


def test_damaged_slides(tmp_path):
    """Nothing that was found before is found again, nor anything new in some tries."""
    command = [sys.executable, "-m", "tests.fuzz", "--tries", f"{TRIES}", "--found", tmp_path]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{TRIES} tries, 0 findings" in done.stdout


def test_mutations_change_files_and_can_be_done_again(tmp_path):
    slides.write_aperio(tmp_path / "slide.svs", slides.picture(60, 60), ())
    data = (tmp_path / "slide.svs").read_bytes()
    found = [mutate(data, Random(seed)) for seed in range(200)]
    assert len(set(found)) > 150
    assert found == [mutate(data, Random(seed)) for seed in range(200)]


def test_what_should_not_happen_is_found(tmp_path):
    slides.write_aperio(tmp_path / "slide.svs", slides.picture(60, 60), ())
    done = subprocess.run(
        [sys.executable, "-c", HARMED, tmp_path / "slide.svs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["none", "raw", "crash", "memory", "hang", "slow"]
