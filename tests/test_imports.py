"""The engine works where there is no napari, no Qt and no GPU library."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import napari_wsigpu
from napari_wsigpu.model import errors
from tests.writers import slides

SCRIPT = """
import importlib, pathlib, sys

FORBIDDEN = {"napari", "qtpy", "magicgui", "superqt", "npe2", "vispy", "cupy", "nvidia", "kvikio",
             "PyQt5", "PyQt6", "PySide2", "PySide6", "dask", "zarr", "PIL", "openslide",
             "pydicom", "wsidicom", "aiohttp", "obstore", "platformdirs"}

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FORBIDDEN:
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Hook())
for name in FORBIDDEN:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
    else:
        raise AssertionError(f"{name} could be imported")
for name in sys.argv[2:]:
    importlib.import_module(name)
import napari_wsigpu
with napari_wsigpu.open_slide(sys.argv[1]) as slide:
    assert slide.levels[0][...].shape == (100, 150, 3)
    assert slide.read_region((0, 0), (20, 10), 1).shape == (10, 20, 3)
    assert slide.associated_images["label"].read().any()
assert not FORBIDDEN & {name.partition(".")[0] for name in sys.modules}
assert not any(name.startswith("napari_wsigpu.conversion") for name in sys.modules)
assert callable(napari_wsigpu.convert)
"""


def engine_modules():
    root = Path(napari_wsigpu.__file__).parent
    rooms = ("model", "formats", "storage", "codecs", "gpu", "reading", "display", "slide")
    files = [file for name in rooms for file in (root / name).rglob("*.py")]
    names = [".".join(file.relative_to(root.parent).with_suffix("").parts) for file in files]
    # What imports the packages of an extra is imported when it is first needed.
    for name in ("dicom_instance", "dicom_json"):
        names.remove(f"napari_wsigpu.formats.dicom.{name}")
    return [name.removesuffix(".__init__") for name in names]


def test_there_are_modules_to_import():
    assert {"napari_wsigpu.codecs", "napari_wsigpu.reading.level"} <= set(engine_modules())


def test_the_engine_needs_no_viewer_and_no_gpu(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 150))
    command = [sys.executable, "-W", "error", "-c", SCRIPT, path, *engine_modules()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


# What no slide in SVS needs: rooms, modules, and libraries of codecs.
LATER = {
    *(
        f"napari_wsigpu.{name}"
        for name in (
            "annotations", "cli", "compat", "conversion", "datasets", "formats.czi",
            "formats.mirax", "formats.tiff.leica", "formats.zarr", "gpu.device.cuda",
            "gpu.device.worker", "gpu.transfer", "reading.device", "storage.remote.connection",
            "storage.zarr", "viewer", "widgets",
        )
    ),
    *("asyncio", "ssl"),
    *(f"imagecodecs._{name}" for name in ("blosc", "bz2", "imcd", "lz4", "lzma", "zstd")),
}  # fmt: skip
OPEN = """
import sys
import napari_wsigpu
with napari_wsigpu.open_slide(sys.argv[1], device="cpu") as slide:
    assert slide.read_region((0, 0), (20, 10)).any()
print(*sys.modules)
for name in napari_wsigpu.__all__:
    assert getattr(napari_wsigpu, name) is not None
assert napari_wsigpu.errors and napari_wsigpu.runtime
"""


def test_what_few_need_is_imported_when_it_is_asked_for(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 150))
    command = [sys.executable, "-c", OPEN, path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert LATER & set(done.stdout.split()) == set()


@pytest.mark.parametrize(
    ("facade", "module"),
    [
        ("errors", "model.errors"),
        ("limits", "model.limits"),
        ("privacy", "model.privacy"),
        ("runtime", "slide.runtime"),
        ("torch", "datasets.torch"),
    ],
)
def test_short_names_are_of_what_they_name(facade, module):
    if facade == "torch":
        pytest.importorskip("torch")
    found = import_module(f"napari_wsigpu.{facade}")
    real = import_module(f"napari_wsigpu.{module}")
    assert all(getattr(found, name) is getattr(real, name) for name in found.__all__)


def test_every_error_has_a_short_name():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, errors.SlideError)}
    assert set(napari_wsigpu.errors.__all__) == names


ALLOWED = {
    "native": {"native"},
    "storage": {"model", "native", "storage"},
    "codecs": {"model", "native", "storage", "codecs"},
}


@pytest.mark.parametrize("package", ALLOWED)
def test_what_lies_below_imports_nothing_above(package):
    root = Path(napari_wsigpu.__file__).parent
    packages = {folder.name for folder in root.iterdir() if folder.is_dir()}
    imported = {
        name.split(".")[1]
        for file in (root / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (name := node.module or "").count(".")
        if name.startswith("napari_wsigpu.")
    }
    assert imported & packages <= ALLOWED[package]
