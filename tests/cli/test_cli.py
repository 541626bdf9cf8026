"""The command `wsigpu info`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile

from napari_wsigpu import convert
from napari_wsigpu.cli import main
from tests.writers import philips, slides, stacks, zarrs


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
        "  scanner     PHILIPS UFS Scanner",
        "  scanned     [hidden]",
        "  barcode     [hidden]",
        "  level 0     300 x 200 (3 x uint8), downsample 1, tiles 64 x 64, JPEG",
        "  level 1     75 x 50 (3 x uint8), downsample 4, tiles 64 x 64, JPEG",
        "  label       30 x 20",
    ]


def test_a_region_of_a_slide(tmp_path, path, capsys):
    convert(path, tmp_path / "region.tif", region=(16, 32, 64, 48))
    assert main(["info", str(tmp_path / "region.tif")]) == 0
    assert "  region      64 x 48 at 16, 32 of its source's level 0\n" in capsys.readouterr().out


def test_planes(tmp_path, capsys):
    path = stacks.save(tmp_path, "TZCYX", stacks.stack())
    assert main(["info", str(path)]) == 0
    said = "2 along t (0.25 s apart), 5 along z (1.5 µm apart); shown: t = 0, z = 2"
    assert f"  planes      {said}\n" in capsys.readouterr().out
    assert main(["info", "--json", str(path)]) == 0
    planes = json.loads(capsys.readouterr().out)["planes"]
    assert (planes["size_z"], planes["z_spacing"]) == (5, 1.5)


def test_as_json(path, capsys):
    assert main(["info", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["vendor"] == "aperio"


def test_json_has_one_line_per_slide(path, capsys):
    assert main(["info", "--json", str(path), str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["path"] for line in lines] == [str(path)] * 2


@pytest.fixture
def private_path(tmp_path):
    fields = ("AppMag = 20", "MPP = 0.5", "Date = 12/29/09", "Barcode = S21-10045", "User = jdoe")
    slides.write_aperio(tmp_path / "private.svs", slides.picture(60, 60), (), fields=fields)
    return tmp_path / "private.svs"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_private_data_is_hidden(private_path, capsys, options):
    assert main(["info", *options, str(private_path)]) == 0
    printed = capsys.readouterr()
    for private in ("S21-10045", "12/29/09", "2009", "jdoe"):
        assert private not in printed.out + printed.err
    assert printed.err.splitlines()[-1].endswith("--private shows it.")


def test_problems_do_not_repeat_private_data(tmp_path, capsys):
    fields = ("AppMag = 40", "MPP = 0.5", "User = does not match")
    slides.write_aperio(tmp_path / "slide.svs", slides.picture(60, 60), (), fields=fields)
    assert main(["info", str(tmp_path / "slide.svs")]) == 0
    assert "of 40 [hidden] 0.5" in capsys.readouterr().out


def test_private_shows_all(private_path, capsys):
    assert main(["info", "--private", "--json", str(private_path)]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["aperio"]["User"] == "jdoe"
    assert (found["barcode"], found["scan_date"]) == ("S21-10045", "2009-12-29")
    assert printed.err == ""
    assert main(["info", "--private", str(private_path)]) == 0
    printed = capsys.readouterr()
    assert "barcode     S21-10045" in printed.out
    assert "scanned     2009-12-29" in printed.out
    assert printed.err == ""


def test_a_terminal_without_a_micro_sign(path):
    command = [
        sys.executable,
        "-c",
        "import sys; from napari_wsigpu.cli import main; main()",
    ]
    done = subprocess.run(
        [*command, "info", path],
        capture_output=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?m" in done.stdout


def test_not_a_slide(tmp_path, path, capsys):
    missing = tmp_path / "missing.svs"
    assert main(["info", str(missing), str(path)]) == 1
    printed = capsys.readouterr()
    assert str(missing) in printed.err
    assert len(printed.err.splitlines()) == 1
    assert str(path) in printed.out


def no_json(text):
    raise ValueError(f"{text} is no JSON")


def test_json_is_json_whatever_the_numbers_are(tmp_path, capsys):
    odd = {"odd": [float("nan"), float("inf"), {"deep": -float("inf")}, 1.5]}
    pixels = [slides.picture(40, 60, 1)[..., 0]]
    zarrs.write_image(tmp_path / "a.zarr", pixels, "yx", more={"omero": odd})
    assert main(["info", "--json", "--private", str(tmp_path / "a.zarr")]) == 0
    printed = capsys.readouterr().out
    assert '["nan", "inf", {"deep": "-inf"}, 1.5]' in printed
    json.loads(printed, parse_constant=no_json)


def test_channels_are_named(tmp_path, capsys):
    pixels = np.zeros((2, 64, 64), np.uint16)
    names = {"axes": "CYX", "Channel": {"Name": ["DAPI", "Cy3"]}}
    tifffile.imwrite(tmp_path / "a.ome.tif", pixels, metadata=names, photometric="minisblack")
    assert main(["info", str(tmp_path / "a.ome.tif")]) == 0
    assert "  channels    DAPI, Cy3\n" in capsys.readouterr().out
    assert main(["info", "--json", str(tmp_path / "a.ome.tif")]) == 0
    assert json.loads(capsys.readouterr().out)["channels"] == ["DAPI", "Cy3"]


def test_empty_file_is_reported(tmp_path, capsys):
    (tmp_path / "a.svs").touch()
    assert main(["info", str(tmp_path / "a.svs")]) == 1
    assert "a.svs' is empty; get a fresh copy" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="file names have no control characters")
def test_control_characters_in_names_are_escaped(path, capsys):
    name = path.rename(path.with_name("\x1b[31m\n.svs"))
    assert main(["info", str(name)]) == 0
    assert main(["check", str(name)]) == 0
    assert main(["convert", str(name), f"{name.with_suffix('')}.png"]) == 0
    for command in "info", "check", "doctor":
        assert main([command, f"{name}.missing"]) == 1
    assert main(["convert", f"{name}.missing", f"{name}.tif"]) == 1
    printed = capsys.readouterr()
    for text in printed.out, printed.err:
        assert "\x1b" not in text
        assert "\n." not in text
        assert r"\x1b[31m\n" in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_a_full_disk_is_named(path):
    info = f"main(['info', {str(path)!r}])"
    code = f"import sys; from napari_wsigpu.cli import main; sys.exit({info})"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.decode().strip() == "The output can't be written: there is no space left."
