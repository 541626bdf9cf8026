"""What is built for others holds all that the package needs."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "napari_wsigpu"
OPENS_THE_SAMPLE = """
from napari_wsigpu import __file__, open_slide
from napari_wsigpu.viewer.sample import sample_path
assert __file__.startswith({folder!r}) and str(sample_path()).startswith({folder!r})
with open_slide(sample_path(), "cpu") as slide:
    print(slide.levels[-1][...].std() > 10)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A source distribution, and the wheel that is made of it."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    [source], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


def package_files():
    return {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_both_hold_the_whole_package(built):
    source, wheel = built
    with tarfile.open(source) as file:
        packed = {name.partition("/src/")[2] for name in file.getnames()}
    assert package_files() - packed == set()
    with zipfile.ZipFile(wheel) as file:
        assert package_files() - set(file.namelist()) == set()


def test_an_installation_from_source_opens_the_sample(built, tmp_path):
    _, wheel = built
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    code = OPENS_THE_SAMPLE.format(folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path), "PATH": "", "QT_QPA_PLATFORM": "offscreen"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True"]
