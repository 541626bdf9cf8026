"""The command `wsigpu convert`."""

import errno
import hashlib
import io
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import tifffile

from napari_wsigpu.cli import main
from napari_wsigpu.conversion import convert, convert_command, progress_bar
from napari_wsigpu.model.errors import ConversionError
from tests.writers import slides


@pytest.fixture
def source(tmp_path):
    slides.write_aperio(tmp_path / "s.svs", slides.picture(300, 400), (), tile=(64, 64))
    return tmp_path / "s.svs"


def test_last_line_matches_sha256sum(tmp_path, source, capsys):
    target = tmp_path / "out.tif"
    assert main(["convert", str(source), str(target), "--compression", "raw"]) == 0
    printed = capsys.readouterr()
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    assert printed.out == f"{digest}  {target}\n"
    assert "0 tiles copied" in printed.err


def test_options_are_passed_on(tmp_path, source, monkeypatch, capsys):
    given = {}

    def convert(source, target, **options):
        given.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_command, "convert", convert)
    words = (
        "--compression zstd --tile-size 128 --levels 3 --region 1,2,30,40 --level 1 --workers 2 "
        "--quality 80 --private --overwrite --shard 4 --color srgb --z 3 --t 1 --lossless"
    )
    assert main(["convert", str(source), str(tmp_path / "out.tif"), *words.split()]) == 130
    assert "resume the conversion" in capsys.readouterr().err
    del given["progress"], given["announce"]
    assert given == {
        "compression": "zstd", "tile_size": 128, "levels": 3, "region": (1, 2, 30, 40), "level": 1,
        "workers": 2, "quality": 80, "private": True, "overwrite": True, "shard": 4,
        "color": "srgb", "z": 3, "t": 1, "lossless": True,
    }  # fmt: skip


@pytest.mark.parametrize("region", ["1,2,3", "a,b,c,d", "1.5,2,3,4"])
def test_a_wrong_region(tmp_path, source, region, capsys):
    with pytest.raises(SystemExit):
        main(["convert", str(source), str(tmp_path / "out.tif"), "--region", region])
    assert "is not X,Y,W,H" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--region", "-1,0,5,10"], ["--region=-1,0,5,10"]])
def test_a_region_beyond_the_slide(tmp_path, source, words, capsys):
    assert main(["convert", *words, str(source), str(tmp_path / "out.tif")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("The region -1,0,5,10 extends beyond the slide (400 x 300 pixels)")


def test_missing_region_value(tmp_path, source, capsys):
    with pytest.raises(SystemExit):
        main(["convert", str(source), str(tmp_path / "out.tif"), "--region", "--private"])
    assert "expected one argument" in capsys.readouterr().err


def test_an_error_is_one_sentence(tmp_path, source, capsys):
    (tmp_path / "out.tif").write_bytes(b"mine")
    assert main(["convert", str(source), str(tmp_path / "out.tif")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert (tmp_path / "out.tif").read_bytes() == b"mine"


def test_failure_reports_the_partial_result(tmp_path, source, monkeypatch, capsys):
    write, calls = os.write, []

    def full(handle, data):
        calls.append(data)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data)

    target = tmp_path / "out.tif"
    monkeypatch.setattr("os.write", full)
    assert main(["convert", str(source), str(target)]) == 1
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"No space is left for '{target}'; free some space and try again.",
        f"The partial result is in '{target}.part'; run the conversion again to resume it.",
    ]


def test_restart_is_reported_once(tmp_path, source):
    target = tmp_path / "out.tif"

    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, target, compression="raw", progress=stop)
    words = ["-c", "import sys; from napari_wsigpu.cli import main; sys.exit(main())"]
    words += ["convert", source, target]
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    assert ended.stderr.count("started from scratch") == 1


def test_the_bar_on_a_terminal(tmp_path, source, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["convert", str(source), str(tmp_path / "out.tif"), "--tile-size", "32"]) == 0
    _, _, drawn = terminal.getvalue().partition("\n")  # the bar follows the forecast
    assert "100%  130 of 130 tiles" in drawn
    assert all(len(line) <= 80 for line in drawn.split("\r"))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one process")
def test_control_c_exits_cleanly(tmp_path):
    source, target = tmp_path / "s.svs", tmp_path / "out.tif"
    slides.write_aperio(source, slides.picture(1500, 1500), (), tile=(256, 256))
    script = (
        "import sys; from napari_wsigpu.cli import main\n"
        "from napari_wsigpu.conversion import convert_command\n"
        "old = convert_command.convert\n"
        "def convert(*words, progress, **options):\n"
        "    def both(*counts):\n"
        "        print(*counts, flush=True)\n"
        "        progress(*counts)\n"
        "    return old(*words, progress=both, **options)\n"
        "convert_command.convert = convert; sys.exit(main(sys.argv[1:]))"
    )
    words = ["convert", source, target, "--compression", "zstd", "--tile-size", "16"]
    with subprocess.Popen(
        [sys.executable, "-c", script, *words, "--workers", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    ) as process:
        for line in process.stdout:
            if int(line.split()[0]) > 100:
                process.send_signal(signal.SIGINT)
                break
        _, err = process.communicate()
    assert process.returncode == 130
    assert err.splitlines()[1:] == ["Interrupted; run the same command to resume the conversion."]
    assert not target.exists()
    assert (tmp_path / "out.tif.part" / "journal").exists()


def test_remaining_time_follows_the_recent_rate(monkeypatch, capsys):
    """Verifying existing tiles takes almost no time."""
    now = [100.0]
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    bar = progress_bar.ProgressBar()
    bar(0, 100_000)
    assert " left" not in capsys.readouterr().err
    for done in range(0, 50_000, 1000):
        now[0] += 0.1
        bar(done, 100_000)
    for done in range(50_000, 51_000):
        now[0] += 0.1
        bar(done, 100_000)
    *_, last = capsys.readouterr().err.rpartition("\r")
    seconds = int(last.split(", ")[1].split()[0])
    assert seconds == pytest.approx(4900, rel=0.02)


def jpeg_slide(path, side=1280):
    """Write one level of JPEG tiles and return the path."""
    pixels = slides.picture(side, side)
    slides.write_aperio(path, pixels, (), tile=(64, 64), thumbnail=False, associated=())
    return path


def test_forecast_is_close(tmp_path, capsys):
    source = jpeg_slide(tmp_path / "s.svs")
    for words in ([], ["--lossless"], ["--compression", "zstd"], ["--levels", "1"]):
        target = tmp_path / "out.ome.tif"
        assert main(["convert", str(source), str(target), "--overwrite", "--json", *words]) == 0
        printed = capsys.readouterr()
        result = json.loads(printed.out)
        forecast = result["forecast"]
        assert forecast["size"] == pytest.approx(result["size"], rel=0.3)
        assert result["size"] == target.stat().st_size
        assert sum(forecast["copied"].values()) == result["tiles_copied"]
        assert sum(forecast["encoded"].values()) == result["tiles_encoded"]
        line = printed.err.splitlines()[0]
        assert line.startswith(f"{target}: OME-TIFF of about ")
        assert "1280 x 1280 pixels" in line


@pytest.mark.parametrize("name", ["out.zarr", "out.png"])
def test_forecast_of_other_targets(tmp_path, source, name, capsys):
    assert main(["convert", str(source), str(tmp_path / name), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["forecast"]["copied"] == {}
    assert result["forecast"]["size"] == pytest.approx(result["size"], rel=0.5)


def test_averages_of_jpeg_tiles_are_jpeg_unless_lossless(tmp_path):
    source = jpeg_slide(tmp_path / "s.svs")
    convert(source, tmp_path / "small.tif")
    convert(source, tmp_path / "exact.tif", lossless=True)
    with (
        tifffile.TiffFile(source) as file,
        tifffile.TiffFile(tmp_path / "small.tif") as small,
        tifffile.TiffFile(tmp_path / "exact.tif") as exact,
    ):
        assert [page.compression.name for page in small.pages][:2] == ["JPEG", "JPEG"]
        assert exact.pages[1].compression.name == "ADOBE_DEFLATE"
        stored = file.pages.first.asarray()
        for result in (small, exact):  # stored pixels never change
            np.testing.assert_array_equal(result.pages.first.asarray(), stored)
        average = slides.average(stored, 2)
        np.testing.assert_array_equal(exact.pages[1].asarray(), average)
        difference = small.pages[1].asarray().astype(int) - average
        assert np.abs(difference).mean() < 20
    assert (tmp_path / "small.tif").stat().st_size < (tmp_path / "exact.tif").stat().st_size


def test_several_sources(tmp_path, source, capsys):
    other = jpeg_slide(tmp_path / "other.ome.svs", 128)
    sources = [str(source), str(tmp_path / "missing.svs"), str(other)]
    assert main(["convert", *sources, str(tmp_path / "{name}.tif"), "--json"]) == 1
    printed = capsys.readouterr()
    results = [json.loads(line) for line in printed.out.splitlines()]
    assert [result["source"] for result in results] == [str(source), str(other)]
    assert [result["target"] for result in results] == [
        str(tmp_path / "s.tif"),
        str(tmp_path / "other.tif"),
    ]
    assert "missing.svs" in printed.err


def test_several_sources_need_different_targets(tmp_path, source, capsys):
    assert main(["convert", str(source), str(source), str(tmp_path / "out.tif")]) == 1
    assert "include {name} in the target" in capsys.readouterr().err
    assert not (tmp_path / "out.tif").exists()


def test_help_names_all_targets(capsys):
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    text = capsys.readouterr().out
    for ending in (".tif", ".tiff", ".ome.tif", ".ome.tiff", ".zarr", ".ome.zarr", ".png"):
        assert ending in text


def test_jpeg_is_not_lossless(tmp_path, source):
    with pytest.raises(ConversionError, match="not lossless"):
        convert(source, tmp_path / "out.tif", compression="jpeg", lossless=True)
