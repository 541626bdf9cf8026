"""The order of the house: what may import what."""

import ast
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

import napari_wsigpu

PACKAGE = "napari_wsigpu"
ROOT = Path(napari_wsigpu.__file__).parent

# Short names for users; the package itself imports each module by its own name.
FACADES = {"errors", "limits", "privacy", "runtime", "torch"}

# A room is a folder of the package, or a module next to them. From the ground up, each may import
# rooms on lines above its own, and itself; imports for types alone count as well.
FLOORS = [
    {"native"},
    {"model"},
    {"storage"},
    {"codecs"},
    {"annotations", "formats", "gpu"},
    {"reading"},
    {"display"},
    {"slide"},
    {"conversion"},
    {"compat", "datasets"},
    {"viewer"},
    {"widgets"},
    FACADES,
    {PACKAGE},
    {"cli"},
]
# Two modules of one room that name each other's types: importer, imported.
MUTUAL_TYPES = {
    ("compat.cucim.cache", "compat.cucim.image"),
    ("gpu.jpeg.gpu_batch", "gpu.jpeg.nvimagecodec"),
    ("gpu.jpeg.jpeg_engine", "gpu.device.cuda"),
    ("gpu.jpeg.nvimagecodec_handles", "gpu.jpeg.nvimagecodec_library"),
    ("reading.dask_level", "reading.level"),
}

CUDA = ("cuda", "cupy", "cupyx", "kvikio", "nvidia")
# Each is tried as it is, in a process of its own.
CUDA_EXCEPTIONS = {"napari_wsigpu.cli.probes": {"cupy", "kvikio", "nvidia.nvimgcodec"}}


class Import(NamedTuple):
    """One imported name: `late` in functions, `checked` where types alone are checked."""

    importer: str
    imported: str
    line: int
    late: bool
    checked: bool

    def __str__(self):
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules():
    """Return the path of each module by its name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def names_of(node, importer):
    """Yield what an import statement, or a call of `import_module`, imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = importer if MODULES[importer].name == "__init__.py" else parent(importer)
            for _ in range(node.level - 1):
                package = parent(package)
            base = f"{package}.{base}".rstrip(".")
        for alias in node.names:
            full = f"{base}.{alias.name}"
            yield full if full in MODULES else base
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        (name, *_) = node.args
        if isinstance(name, ast.Constant):
            yield name.value


def parent(name):
    return name.rpartition(".")[0]


def imports_of(importer, tree):
    found = []

    def visit(node, late, checked):
        names = names_of(node, importer)
        found.extend(Import(importer, name, node.lineno, late, checked) for name in names)
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        guarded = node.body if is_type_checking(node) else []
        for child in ast.iter_child_nodes(node):
            visit(child, late, checked or child in guarded)

    visit(tree, late=False, checked=False)
    return found


@pytest.fixture(scope="module")
def imports():
    """All that the package imports: found when it is asked for, as each process collects tests."""
    trees = {name: ast.parse(path.read_text("utf-8")) for name, path in MODULES.items()}
    return [item for name, tree in trees.items() for item in imports_of(name, tree)]


def room(name):
    """Return the folder or module right below the package that a module is, or lies in."""
    return name.split(".")[1] if "." in name else name


def is_ours(name):
    return name.partition(".")[0] == PACKAGE


def test_imports_of_all_kinds_are_found(imports):
    found = {(item.importer, item.imported): item for item in imports}
    assert found[PACKAGE, f"{PACKAGE}.viewer.session.waiting"].late
    assert found[f"{PACKAGE}.slide.slide", f"{PACKAGE}.model.layout"].checked
    assert (f"{PACKAGE}.gpu.transfer.gds", "kvikio.defaults") in found


def test_every_room_has_its_floor():
    known = [name for floor in FLOORS for name in floor]
    assert sorted(known) == sorted({room(name) for name in MODULES})


def test_arrows_between_rooms_point_down(imports):
    floor_of = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    wrong = [
        str(item)
        for item in imports
        if is_ours(item.imported)
        and (here := room(item.importer)) != (there := room(item.imported))
        and floor_of[there] >= floor_of[here]
    ]
    assert wrong == []


def test_facades_are_for_users(imports):
    used = {item.importer for item in imports if is_ours(item.imported)
            and room(item.imported) in FACADES}  # fmt: skip
    assert used == {PACKAGE}


def test_modules_import_each_other_in_no_circle(imports):
    mutual = {(f"{PACKAGE}.{one}", f"{PACKAGE}.{other}") for one, other in MUTUAL_TYPES}
    checked = {(item.importer, item.imported) for item in imports if item.checked}
    assert mutual <= checked
    arrows = defaultdict(set)
    for item in imports:
        known = item.checked and (item.importer, item.imported) in mutual
        if is_ours(item.imported) and not item.late and not known:
            arrows[item.importer].add(item.imported)
    assert circle(arrows) is None


def circle(arrows):
    """Return the modules of a circle, None if there is none."""
    done = set()

    def walk(name, path):
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in sorted(arrows.get(name, ())):
                found = walk(other, [*path, name])
                if found is not None:
                    return found
            done.add(name)
        return None

    for name in sorted(arrows):
        found = walk(name, [])
        if found is not None:
            return found
    return None


@pytest.mark.parametrize(
    ("arrows", "found"),
    [
        ({}, None),
        ({"a": {"b", "c"}, "b": {"c"}}, None),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
        ({"a": {"a"}}, ["a", "a"]),
    ],
)
def test_circles_are_found(arrows, found):
    assert circle(arrows) == found


def test_cuda_is_in_one_room(imports):
    wrong = [
        str(item)
        for item in imports
        if item.imported.partition(".")[0] in CUDA
        and room(item.importer) != "gpu"
        # Naming a type imports nothing when the program runs.
        and not item.checked
        and item.imported not in CUDA_EXCEPTIONS.get(item.importer, ())
    ]
    assert wrong == []
