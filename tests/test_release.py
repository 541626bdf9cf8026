"""What a release needs and a development version may lack.

Runs without the dependencies of the package.
"""

import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URLS = ("Homepage", "Repository", "Documentation", "Changelog", "Issues")


@pytest.mark.skipif("WSIGPU_RELEASE" not in os.environ, reason="only for releases")
def test_release_has_addresses():
    """The documentation takes its addresses from the same table: tools/addresses.py."""
    missing = [name for name in URLS if not PROJECT.get("urls", {}).get(name)]
    assert not missing, f"Fill in [project.urls] in pyproject.toml before a release: {missing}"


def test_actions_are_pinned_by_commit():
    used = {
        use
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for use in re.findall(r"uses: (\S+)", path.read_text())
        if not use.startswith("./")
    }
    assert used
    assert [use for use in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", use)] == []


def test_lock_file_has_the_pinned_versions():
    pinned = dict(
        re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.M)
    )
    locked = dict(re.findall(r"^([\w.-]+)==([\w.]+) ", (ROOT / ".ci/lock.txt").read_text(), re.M))
    assert {name: locked[name] for name in pinned.keys() & locked.keys()} == {
        name: pinned[name] for name in pinned.keys() & locked.keys()
    }
    assert "--hash=sha256:" in (ROOT / ".ci/lock.txt").read_text()
