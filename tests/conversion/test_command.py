"""`wsigpu convert`."""

import errno
import hashlib
import io
import os
import signal
import subprocess
import sys

import pytest

from napari_wsigpu.cli import main
from napari_wsigpu.conversion import command, convert
from tests.writers import slides


@pytest.fixture
def source(tmp_path):
    slides.write_aperio(tmp_path / "s.svs", slides.picture(300, 400), (), tile=(64, 64))
    return tmp_path / "s.svs"


def test_the_last_line_is_sha256sums(tmp_path, source, capsys):
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

    monkeypatch.setattr(command, "convert", convert)
    words = (
        "--compression zstd --tile-size 128 --levels 3 --region 1,2,30,40 --level 1 --workers 2 "
        "--quality 80 --private --overwrite --shard 4 --color srgb --z 3 --t 1"
    )
    assert main(["convert", str(source), str(tmp_path / "out.tif"), *words.split()]) == 130
    assert "goes on where this one ended" in capsys.readouterr().err
    del given["progress"]
    assert given == {
        "compression": "zstd", "tile_size": 128, "levels": 3, "region": (1, 2, 30, 40), "level": 1,
        "workers": 2, "quality": 80, "private": True, "overwrite": True, "shard": 4,
        "color": "srgb", "z": 3, "t": 1,
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
    assert line.startswith("The region -1,0,5,10 reaches beyond the slide of 400 x 300 pixels")


def test_a_region_that_was_forgotten(tmp_path, source, capsys):
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


def test_a_failure_says_where_the_rest_goes_on(tmp_path, source, monkeypatch, capsys):
    write, calls = os.write, []

    def full(handle, data):
        calls.append(data)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data)

    target = tmp_path / "out.tif"
    monkeypatch.setattr("os.write", full)
    assert main(["convert", str(source), str(target)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"There is no room left for '{target}'; free some and convert again.",
        f"What is written lies in '{target}.part'; the same conversion goes on there.",
    ]


def test_what_is_begun_anew_is_said_once(tmp_path, source):
    target = tmp_path / "out.tif"

    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, target, compression="raw", progress=stop)
    words = ["-c", "import sys; from napari_wsigpu.cli import main; sys.exit(main())"]
    words += ["convert", source, target]
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    assert ended.stderr.count("begun anew") == 1


def test_the_bar_on_a_terminal(tmp_path, source, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["convert", str(source), str(tmp_path / "out.tif"), "--tile-size", "32"]) == 0
    drawn = terminal.getvalue()
    assert "100%  130 of 130 tiles" in drawn
    assert all(len(line) <= 80 for line in drawn.split("\r"))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one process")
def test_control_c_ends_it_cleanly(tmp_path):
    source, target = tmp_path / "s.svs", tmp_path / "out.tif"
    slides.write_aperio(source, slides.picture(1500, 1500), (), tile=(256, 256))
    script = (
        "import sys; from napari_wsigpu.cli import main\n"
        "from napari_wsigpu.conversion import command\n"
        "old = command.convert\n"
        "def convert(*words, progress, **options):\n"
        "    def both(*counts):\n"
        "        print(*counts, flush=True)\n"
        "        progress(*counts)\n"
        "    return old(*words, progress=both, **options)\n"
        "command.convert = convert; sys.exit(main(sys.argv[1:]))"
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
    assert err.splitlines() == ["Interrupted; the same command goes on where this one ended."]
    assert not target.exists()
    assert (tmp_path / "out.tif.part" / "journal").exists()


def test_the_time_that_is_left_is_told_by_what_was_done_lately(monkeypatch, capsys):
    """Tiles that were there are checked in no time."""
    now = [100.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    bar = command._Bar()
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
