"""Links, files and names in the documents exist."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "napari_wsigpu"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A folder, or a file with an optional definition: reading/plan.py:ReadPlan.regions_of
NAMED = re.compile(r"`([\w./-]+/|[\w./-]*\w\.(?:py|cpp|h|cu|md|yaml|toml|txt))(?::([\w.]+))?`")
# A function that is defined at the start of a line.
C_FUNCTION = re.compile(r"^\w[\w:<>*& ]*[ *&](\w+)\(", re.MULTILINE)
# Files that a recipe creates, and module paths that look like files.
OTHERS = {"src/napari_wsigpu/formats/tiff/VENDOR.py", "napari_wsigpu.errors"}

ALL = [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in DOCUMENTS]

pytestmark = pytest.mark.skipif(
    not (ROOT / "ARCHITECTURE.md").exists(), reason="these are the tests of a checkout"
)


def words(path):
    """A document's text, without blocks of code."""
    lines = re.sub(r"(?ms)^```.*?^```$", "", path.read_text("utf-8")).splitlines()
    return "\n".join(line for line in lines if not line.startswith("    "))


def found(name):
    places = [base / name for base in (ROOT, PACKAGE) if (base / name).exists()]
    return places[0] if places else None


@cache
def defined(path):
    """Names that a module defines, those in its classes as Class.name."""
    if path.suffix != ".py":
        return set(C_FUNCTION.findall(path.read_text("utf-8")))
    names = set()

    def add(body, prefix):
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{prefix}{node.name}.")
            for target in [*getattr(node, "targets", ()), getattr(node, "target", None)]:
                if isinstance(target, ast.Name):
                    names.add(prefix + target.id)

    add(ast.parse(path.read_text("utf-8")).body, "")
    return names


@pytest.mark.parametrize("path", ALL)
def test_links_resolve(path):
    links = [link for link in LINK.findall(words(path)) if "://" not in link]
    missing = [link for link in links if not (path.parent / link.partition("#")[0]).exists()]
    assert missing == []


@pytest.mark.parametrize("path", ALL)
def test_named_files_and_what_they_define_exist(path):
    missing = []
    for name, member in NAMED.findall(words(path)):
        file = found(name)
        if name not in OTHERS and (file is None or (member and member not in defined(file))):
            missing.append(f"{name}:{member}")
    assert missing == []


def test_threads_and_locks_of_the_architecture_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    source = "".join(path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py")))
    threads, locks = (
        text.split(f"## {title}")[1].split("\n## ")[0] for title in ("Threads", "Locks")
    )
    names = re.findall(r"`((?:wsigpu|slide)-[\w-]+)`", threads)
    assert len(names) > 10
    assert [name for name in names if f'"{name}' not in source] == []
    owners = re.findall(r"`(\w+)\.(\w+)`", locks)
    assert len(owners) > 10
    assert [
        f"{owner}.{attribute}"
        for owner, attribute in owners
        if not re.search(rf"^class {owner}\b", source, re.MULTILINE)
        or not re.search(rf"\b{attribute}\b", source)
    ] == []


def test_rooms_import_only_from_their_row_and_those_above():
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    rows = [re.findall(r"`([\w/.]+)`", line.split("|")[1]) for line in text.splitlines()
            if re.match(r"\| `[\w/.]+[/y]`", line)]  # fmt: skip
    order = {name.strip("/").removesuffix(".py"): row for row, names in enumerate(rows)
             for name in names}  # fmt: skip
    assert {"model", "storage", "reading", "widgets"} <= set(order)
    wrong = []
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("napari_wsigpu."):
                other = str(node.module).split(".")[1]
                if room in order and order.get(other, -1) > order[room]:
                    wrong.append(f"{file.relative_to(PACKAGE)} imports {node.module}")
    assert wrong == []


def test_prose_is_idiomatic(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    prose = importlib.import_module("prose")
    found, count = prose.check()
    # A few of these phrases are right where they are: "No such file".
    assert len(found) * 10_000 / count <= 3, "\n".join(found)


def test_prose_check_finds_translated_phrases(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    prose = importlib.import_module("prose")
    page = tmp_path / "page.md"
    page.write_text("Of tiles, those beside the region begin anew.\n\n```\nbeside = 1\n```\n")
    found, count = prose.check([page])
    assert count == 8
    assert [place.split(": ")[1] for place in found] == ["begin", "fronted Of", "beside", "anew"]
