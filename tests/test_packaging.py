"""What is built for others holds all that the package needs."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "napari_wsigpu"
OPENS_THE_SAMPLE = """
from napari_wsigpu import __file__, native, open_slide
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
assert __file__.startswith({folder!r}) and str(sample_path()).startswith({folder!r})
with open_slide(sample_path(), "cpu") as slide:
    print(slide.levels[-1][...].std() > 10, native.available)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A source distribution, and the wheel that is made of it."""
    pytest.importorskip("build")
    pytest.importorskip("scikit_build_core")
    pytest.importorskip("cmake")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    [source], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


def test_bioio_finds_one_requirement_of_its_reader():
    # bioio looks up the distribution by the name of the entry point, and raises an error unless
    # exactly one requirement, of any extra, starts with bioio-base.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["bioio.readers"].keys() == {project["name"]}
    extras = project["optional-dependencies"].values()
    required = [*project["dependencies"], *(name for extra in extras for name in extra)]
    assert sum(name.startswith("bioio-base") for name in required) == 1


def package_files():
    return {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def is_native(name):
    return Path(name).match("native/wsigpu_core.*")


def test_sdist_and_wheel_contain_the_whole_package(built):
    source, wheel = built
    # An editable installation has the library next to its sources.
    files = {name for name in package_files() if not is_native(name)}
    with tarfile.open(source) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {f"src/{name}" for name in files} - names == set()
    others = {"cmake/CMakeLists.txt", "LICENSE", "LICENSES/libjpeg-turbo.txt"}
    assert {*others, "resources/he_phantom.svs"} - names == set()
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    compiled = {name for name in files if name.endswith((".cpp", ".h"))}
    assert files - compiled - names == set()
    assert compiled & names == set()
    licenses = {name.partition("/licenses/")[2] for name in names}
    assert {"LICENSE", "LICENSES/libjpeg-turbo.txt"} <= licenses


def test_wheel_contains_the_core_or_runs_everywhere(built):
    _, wheel = built
    with zipfile.ZipFile(wheel) as file:
        has_core = any(map(is_native, file.namelist()))
    assert "-py3-none-" in wheel.name
    assert wheel.name.endswith("-any.whl") is not has_core


def test_installed_wheel_opens_the_sample(built, tmp_path):
    _, wheel = built
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    code = OPENS_THE_SAMPLE.format(folder=str(tmp_path))
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        # Without `site`: an editable installation redirects imports, whatever the path is.
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": path, "PATH": "", "QT_QPA_PLATFORM": "offscreen"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", str(not wheel.name.endswith("-any.whl"))]
