"""Fixtures of the whole suite; those that need a display live in viewer/conftest.py."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARED_SLIDES = Path(
    os.environ.get("WSIGPU_TEST_SLIDES")
    or Path(__file__).resolve().parents[2] / "shared" / "slides"
)

settings.register_profile(
    "slides",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "slides"))


def shared_slide(name: str) -> Path:
    """Return the path of a real slide, or skip the test where it is absent."""
    path = SHARED_SLIDES / name
    if not path.exists():
        pytest.skip(f"the slide {name} is not in {SHARED_SLIDES} (set WSIGPU_TEST_SLIDES)")
    return path


def decoding_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("wsigpu")]


@pytest.fixture
def handles_of() -> Callable[[Path], int]:
    """Count this process's open handles of a file."""
    process = psutil.Process()

    def count(path: Path) -> int:
        return sum(Path(item.path) == path for item in process.open_files())

    return count


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Fail the test if it leaves a thread or file handle behind."""
    process = psutil.Process()
    threads = set(threading.enumerate())
    files = {item.path for item in process.open_files()}
    yield
    assert set(threading.enumerate()) <= threads
    assert {item.path for item in process.open_files()} <= files
