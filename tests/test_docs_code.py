"""The code in README and docs runs."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from napari_wsigpu import Slide
from napari_wsigpu.cli import main
from napari_wsigpu.model.limits import Limits, limits
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from tests.conftest import has_display
from tests.viewer.conftest import no_notifications, own_settings, viewer

__all__ = ["no_notifications", "own_settings", "viewer"]

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Comments before a block say how to test it, and give the code that the page leaves out.
BLOCK = re.compile(
    r"(?:^<!-- (?P<how>compiled only: needs [^>]+|run as a program(?:, needs [\w, ]+)?) -->\n)?"
    r"(?:^<!-- before\n(?P<before>.*?)^-->\n)?"
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

pytestmark = pytest.mark.skipif(
    not (ROOT / "docs").exists(), reason="these are the tests of a checkout"
)


class Block(NamedTuple):
    language: str
    code: str
    how: str
    before: str


def blocks(path):
    found = BLOCK.finditer(path.read_text("utf-8"))
    return [Block(*(each[name] or "" for name in Block._fields)) for each in found]


PAGES = [
    pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in DOCUMENTS if blocks(path)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder in which the code of a page runs; it contains the sample slide."""
    shutil.copyfile(sample_path(), tmp_path / "slide.svs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.timeout(600)  # some packages take long to import
@pytest.mark.parametrize("path", PAGES)
def test_code_runs(path, folder, request, monkeypatch):
    for name, limit in vars(limits).items():
        monkeypatch.setattr(limits, name, limit)  # restores what a page sets
    names = {"__name__": "docs"}
    for block in blocks(path):
        if block.language == "sh":
            for line in block.code.splitlines():
                run_command(shlex.split(line, comments=True))
            continue
        if block.language == "text":
            continue
        assert block.language == "python", "blocks are of python, sh or text"
        code = compile(block.before + block.code, str(path), "exec")
        if block.how.startswith("compiled"):
            continue
        if block.how:
            if all(map(find_spec, packages_of(block))):
                run_program(block.before + block.code, folder)
            continue
        if "viewer." in block.code and "viewer" not in names:
            if not has_display():
                pytest.skip("there is no X display (install Xvfb)")
            names["viewer"] = request.getfixturevalue("viewer")
        exec(code, names)
    for value in names.values():
        if isinstance(value, Slide):
            value.close()


def packages_of(block):
    """Return the packages that a program needs in addition to ours."""
    return block.how.removeprefix("run as a program").replace(", needs", ",").split(", ")[1:]


def run_program(code, folder):
    (folder / "program.py").write_text(code, "utf-8")
    subprocess.run([sys.executable, "program.py"], cwd=folder, check=True, timeout=120)


def run_command(words):
    """Run a `wsigpu` command; check the names in `make` and `pip` commands."""
    if not words:
        return
    if words[0] == "wsigpu":
        quickly = ["--seconds", "0.1"] if words[1] == "bench" else []
        assert main([*words[1:], *quickly]) == 0
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        assert words[:2] == ["pip", "install"], f"what is {words[0]}?"
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for name in re.findall(r"\[(.*)\]", words[-1]):
            assert name in extras["optional-dependencies"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_code_is_in_fences(path):
    """Indented blocks would escape the test above."""
    text = BLOCK.sub("", path.read_text("utf-8"))
    assert not re.search(r"^(    \S|```|~~~)", text, re.MULTILINE)


def test_the_readme_is_short():
    words = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text("utf-8")).split()
    assert len(words) <= 600


def test_troubleshooting_quotes_what_the_command_says():
    page = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text("utf-8")
    package = ROOT / "src" / "napari_wsigpu"
    said = "".join(
        (package / "cli" / name).read_text("utf-8") for name in ("doctor.py", "probes.py")
    )
    for name in ("__init__.py", "tables.py"):
        said += (package / "native" / name).read_text("utf-8")
    names = {limit.name for limit in fields(Limits)}
    quoted = set(re.findall(r"^\| `([^`]+)`", page, re.MULTILINE))
    assert names < quoted
    quoted -= names
    assert len(quoted) > 5
    assert [text for text in quoted if text not in said] == []
