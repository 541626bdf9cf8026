"""What `wsigpu info` prints."""

import json
import os
import subprocess
import sys

import pytest

from napari_wsigpu.cli import main
from tests import philips, slides


@pytest.fixture
def path(tmp_path):
    slides.write_aperio(tmp_path / "slide.svs", slides.picture(100, 150))
    return tmp_path / "slide.svs"


def test_a_slide(path, capsys):
    assert main(["info", str(path)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == str(path)
    assert "vendor      aperio" in lines[0]
    assert any("150 x 100" in line for line in lines)


def test_a_philips_slide(tmp_path, capsys):
    path = tmp_path / "slide.tiff"
    label = philips.picture_object("LABELIMAGE", philips.base64_jpeg(slides.picture(20, 30)))
    philips.write(path, slides.picture(200, 300), (1, 4), tile=64, images=[label])
    assert main(["info", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(path),
        "  vendor      philips",
        "  pixel size  0.226907 x 0.226891 µm",
        "  objective   40x",
        "  level 0     300 x 200 (3 x uint8), downsample 1, tiles 64 x 64, JPEG",
        "  level 1     75 x 50 (3 x uint8), downsample 4, tiles 64 x 64, JPEG",
        "  label       30 x 20",
    ]


def test_as_json(path, capsys):
    assert main(["info", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["vendor"] == "aperio"


def test_a_terminal_without_a_micro_sign(path):
    command = [sys.executable, "-c", "import sys; from napari_wsigpu.cli import main; main()"]
    done = subprocess.run(
        [*command, "info", path],
        capture_output=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?m" in done.stdout


def test_what_is_no_slide(tmp_path, path, capsys):
    missing = tmp_path / "missing.svs"
    assert main(["info", str(missing), str(path)]) == 1
    printed = capsys.readouterr()
    assert str(missing) in printed.err
    assert len(printed.err.splitlines()) == 1
    assert str(path) in printed.out
