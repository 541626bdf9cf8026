"""The command `python -m benchmarks`, on small slides and without a GPU."""

import json
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import openslide
import pytest
from PIL import Image

from benchmarks import machine
from benchmarks.__main__ import main
from benchmarks.transfers import kvikio_process, session, target
from napari_wsigpu.cli.doctor import Driver
from napari_wsigpu.gpu.device import driver
from tests.fakes.host_cupy import install
from tests.writers import slides, zarrs

pytest.importorskip("zarr")

HEIGHT, WIDTH = 300, 420
NO_CUDA = "has no NVIDIA driver"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Have no NVIDIA driver, wherever the tests run."""
    monkeypatch.setattr(driver, "driver_is_there", lambda: False)
    monkeypatch.setattr(machine, "find_driver", lambda: Driver(reason="no NVIDIA driver was found"))


@pytest.fixture
def gpu(monkeypatch, host_gpu):
    """A GPU that is the host, without kvikio."""
    install(monkeypatch)
    monkeypatch.setattr(kvikio_process, "find_spec", lambda name: None)


@pytest.fixture
def slide(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(HEIGHT, WIDTH))
    return path


@pytest.fixture
def bench(tmp_path):
    """Run a benchmark; return its status and its record."""

    def run(*words):
        record = tmp_path / "record.json"
        given = [*map(str, words), "--rounds", "2", "--json", str(record)]
        status = main([*given, "--folder", str(tmp_path / "files")])
        return status, json.loads(record.read_text()) if record.exists() else None

    return run


def rows_of(record, case):
    return {row["way"]: row for row in record["rows"] if row["case"] == case}


def assert_right(row):
    assert (row["missing"], row["wrong"], row["largest_difference"]) == ("", False, 0)
    assert 0 < row["best_ms"] <= row["median_ms"]
    assert row["megabytes_a_second"] > 0


@pytest.mark.parametrize(("level", "size"), [(0, (WIDTH, HEIGHT)), (1, (WIDTH // 2, HEIGHT // 2))])
def test_read(bench, slide, level, size):
    status, record = bench("read", slide, "--level", level)
    assert status == 0
    assert (record["width"], record["height"]) == size
    assert record["right_pixels_by"] == "tifffile"
    host = rows_of(record, "whole level to the host, warm")
    for name in ("napari-wsigpu, CPU", "tifffile", "OpenSlide"):
        assert_right(host[name])
    assert NO_CUDA in host["napari-wsigpu, GPU"]["missing"]
    device = rows_of(record, "whole level to the device, warm")
    assert len(device) == 6
    for row in device.values():
        assert row["missing"].startswith("not here: ")
        assert row["median_ms"] is None


def test_it_says_what_it_measured_where(bench, slide, capsys):
    status, record = bench("read", slide, "--cold")
    assert status == 0
    printed = capsys.readouterr().out
    assert "whole level to the host, cold" in printed
    assert "slide.svs, level 0: 420 x 300" in printed
    assert "page cache cold" in printed
    assert "napari-wsigpu, kvikio, GDS on: not here: 'cuda:0' can't be used" in printed
    here = record["environment"]
    assert here["gpudirect_storage"] == "not here, no NVIDIA driver was found"
    assert here["gpus"] == []
    assert here["packages"]["tifffile"]
    assert here["cores"] > 0


@pytest.mark.parametrize("codec", ["none", "jpeg", "jpeg2000"])
def test_a_slide_is_made_and_removed(bench, tmp_path, codec):
    status, record = bench("read", "--size", 600, "--tile", 128, "--codec", codec)
    assert status == 0
    assert (record["width"], record["tile"]) == (600, [128, 128])
    for name, row in rows_of(record, "whole level to the host, warm").items():
        if name in ("napari-wsigpu, CPU", "tifffile"):
            assert_right(row)
    assert list((tmp_path / "files").iterdir()) == []


def test_round_trip(bench, slide):
    status, record = bench("round-trip", slide)
    assert status == 0
    rows = rows_of(record, "read and written to raw Zarr")
    for name in ("napari-wsigpu, CPU", "tifffile, zarr-python", "OpenSlide, zarr-python"):
        assert_right(rows[name])
    assert len(rows) == 6


@pytest.mark.parametrize(
    "words", [("read", "--cold"), ("round-trip",), ("viewport", "--viewports", 100)]
)
def test_zarr(bench, tmp_path, words):
    folder = tmp_path / "slide.zarr"
    zarrs.write_image(folder, [np.moveaxis(slides.picture(200, 300), -1, 0)])
    status, record = bench(*words, folder)
    assert status == 0
    assert (record["slide"], record["compression"]) == ("slide.zarr", "Zarr")
    timed = [row for row in record["rows"] if row["median_ms"] is not None]
    peer = "zarr-python, zarr-python" if words[0] == "round-trip" else "zarr-python"
    assert {row["way"] for row in timed} == {"napari-wsigpu, CPU", peer}
    assert record["right_pixels_by"] == "zarr-python"
    for row in timed:
        assert_right(row)


def test_all_files_of_a_zarr_folder_are_dropped_from_the_page_cache(bench, tmp_path, monkeypatch):
    folder, dropped = tmp_path / "slide.zarr", set()
    zarrs.write_image(folder, [np.moveaxis(slides.picture(200, 300), -1, 0)])
    monkeypatch.setattr(target, "forget", dropped.update)
    assert bench("read", folder, "--cold")[0] == 0
    assert dropped == {str(path) for path in folder.rglob("*") if path.is_file()}
    assert len(dropped) > 10


def test_round_trip_of_separate_planes(bench, tmp_path):
    path = tmp_path / "planes.tif"
    slides.write_pyramid(
        path,
        np.moveaxis(slides.picture(200, 300, 3, "uint16"), -1, 0),
        (),
        planarconfig="separate",
        photometric="rgb",
        metadata={"axes": "CYX"},
    )
    status, record = bench("round-trip", path)
    assert status == 0
    rows = rows_of(record, "read and written to raw Zarr")
    assert_right(rows["napari-wsigpu, CPU"])
    assert_right(rows["tifffile, zarr-python"])
    assert "8-bit RGB" in rows["OpenSlide, zarr-python"]["missing"]


@pytest.mark.parametrize("words", [("read",), ("round-trip",), ("viewport", "--viewports", 100)])
def test_channels_on_pages_of_their_own(bench, tmp_path, words):
    path = tmp_path / "slide.ome.tif"
    pixels = np.moveaxis(slides.picture(200, 300, 4, "uint16"), -1, 0)
    slides.write_pyramid(path, pixels, (), metadata={"axes": "CYX"}, photometric="minisblack")
    status, record = bench(*words, path)
    assert status == 0
    assert record["channels"] == 4
    compared = [row for row in record["rows"] if row["median_ms"] is not None]
    assert len(compared) == 2
    for row in compared:
        assert_right(row)


@pytest.mark.parametrize("name", ["zarr-write", "zarr-write-lz4"])
def test_zarr_write(bench, name):
    status, record = bench(name, "--size", 300, "--chunks", "64,128")
    assert status == 0
    for chunk in (64, 128):
        rows = rows_of(record, f"chunks of {chunk} x {chunk}")
        assert_right(rows["napari-wsigpu, NumPy"])
        assert_right(rows["zarr-python, NumPy"])
        assert NO_CUDA in rows["napari-wsigpu, CuPy"]["missing"]
        assert bool(rows["tifffile, TIFF"]["missing"]) == (name == "zarr-write-lz4")


def test_chunks_larger_than_the_picture_are_left_out(bench):
    status, record = bench("zarr-write", "--size", 300)
    assert status == 0
    assert rows_of(record, "chunks of 256 x 256")["napari-wsigpu, NumPy"]["median_ms"]
    for chunk in (512, 1024, 2048, 4096):
        [row] = rows_of(record, f"chunks of {chunk} x {chunk}").values()
        assert row["missing"] == "not here: the picture is smaller"


def test_viewport(bench, slide):
    status, record = bench("viewport", slide, "--viewports", "128,1000")
    assert status == 0
    rows = rows_of(record, "128 x 128 to the host, warm file")
    for name in ("napari-wsigpu, CPU", "tifffile", "OpenSlide"):
        assert_right(rows[name])
    left_out = rows_of(record, "1000 x 1000")
    assert left_out["all"]["missing"] == "not here: level 0 is smaller"


@pytest.mark.parametrize(
    "words",
    [
        ("read", "--size", "512", "--tile", "128"),
        ("zarr-write", "--size", "128", "--chunks", "32,64"),
    ],
)
def test_a_plot(bench, tmp_path, words):
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.png"
    assert bench(*words, "--plot", path)[0] == 0
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.width > 1000
        assert np.asarray(picture.convert("L")).std() > 5


def test_wrong_pixels_are_a_failure(bench, slide, monkeypatch, capsys):
    right = openslide.OpenSlide.read_region

    def read_region(self, *given):
        picture = right(self, *given)
        picture.putpixel((5, 7), (1, 2, 3, 255))
        return picture

    monkeypatch.setattr(openslide.OpenSlide, "read_region", read_region)
    status, record = bench("read", slide)
    assert status == 1
    rows = rows_of(record, "whole level to the host, warm")
    assert [name for name, row in rows.items() if row["wrong"]] == ["OpenSlide"]
    assert rows["OpenSlide"]["largest_difference"] > 3
    assert "WRONG" in capsys.readouterr().out


def test_a_peer_that_fails_is_a_row(bench, slide, monkeypatch):
    def read_region(*given):
        raise openslide.OpenSlideError("out of order")

    monkeypatch.setattr(openslide.OpenSlide, "read_region", read_region)
    status, record = bench("read", slide)
    assert status == 0
    rows = rows_of(record, "whole level to the host, warm")
    assert rows["OpenSlide"]["missing"] == "failed: out of order"
    assert_right(rows["tifffile"])


def test_a_peer_that_is_absent_is_a_row(bench, slide, monkeypatch):
    monkeypatch.setitem(sys.modules, "openslide", None)
    status, record = bench("read", slide)
    assert status == 0
    row = rows_of(record, "whole level to the host, warm")["OpenSlide"]
    assert row["missing"].startswith("not here: it can't be imported")


@pytest.mark.parametrize(
    ("module", "words", "command"),
    [
        ("matplotlib.figure", ["read", "--plot", "bench.png"], "napari-wsigpu[bench]"),
        ("zarr", ["zarr-write"], "napari-wsigpu[zarr]"),
        ("zarr", ["round-trip", "--size", "128", "--tile", "64"], "napari-wsigpu[zarr]"),
    ],
)
def test_a_missing_package_is_one_sentence(bench, monkeypatch, capsys, module, words, command):
    monkeypatch.setitem(sys.modules, module, None)
    status, record = bench(*words)
    assert (status, record) == (1, None)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert f'pip install "{command}"' in said[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.svs"], "There is no file"),
        (["{slide}", "--level", "9"], "has no level 9; its levels are 0 to"),
        (
            ["http://user:SECRET@host/a.svs?SECRET"],
            "'http://host/a.svs' lies on a server, but reading from a disk is measured; download",
        ),
    ],
)
def test_what_can_not_be_read_is_one_sentence(bench, slide, capsys, words, said):
    assert bench("read", *(word.format(slide=slide) for word in words)) == (1, None)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_a_level_larger_than_memory_is_one_sentence(bench, slide, monkeypatch, capsys):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 100_000)
    assert bench("read", slide) == (1, None)
    assert "choose a coarser one, up to --level 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["read"], "Level 0 of a slide of 16384 x 16384 is 0.8 GB"),
        (["round-trip", "--level", "1"], "Level 1 of a slide of 16384 x 16384 is 0.1 GB"),
        (["zarr-write"], "A picture of 16384 x 16384 is 0.8 GB"),
    ],
)
def test_what_is_too_large_for_memory_is_not_made(bench, monkeypatch, capsys, words, said):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 1e8)
    assert bench(*words, "--size", 16384) == (1, None)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"{said}, too large to be held in memory here; choose a smaller --size.\n"


def test_a_full_disk_is_one_sentence(bench, tmp_path, capsys):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        assert bench("read", "--size", 600, "--tile", 512) == (1, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capsys.readouterr().err == "A file can't be written (File too large); try --folder.\n"
    assert list((tmp_path / "files").iterdir()) == []


def test_a_record_that_can_not_be_written_is_one_sentence(bench, tmp_path, monkeypatch, capsys):
    def fail(self, *given, **options):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_text", fail)
    assert bench("read", "--size", 128, "--tile", 64) == (1, None)
    assert capsys.readouterr().err == (
        f"A file '{tmp_path / 'record.json'}' can't be written (Permission denied); "
        "give another file.\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plot", "{folder}/bench.jpg"], "bench.jpg does not end in .png"),
        (["--plot", "{folder}/absent/bench.png"], "there is no folder {folder}/absent"),
        (["--json", "{folder}/absent/bench.json"], "there is no folder {folder}/absent"),
        (["--json", "{folder}"], "{folder} is a folder"),
    ],
)
def test_files_that_make_no_sense_are_refused(tmp_path, capsys, words, said):
    with pytest.raises(SystemExit):
        main(["read", *(word.format(folder=tmp_path) for word in words)])
    assert said.format(folder=tmp_path) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_written_is_one_sentence(tmp_path, capsys):
    Path(tmp_path, "file").write_text("")
    words = ["zarr-write", "--size", "64", "--folder", str(tmp_path / "file")]
    assert main(words) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "try --folder" in lines[0]


class TestInterrupts:
    """Of Ctrl-C: one sentence, and nothing is left behind."""

    @pytest.fixture(autouse=True)
    def sure_handler(self):
        """Have Python's own handler, and find it again."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        assert signal.signal(signal.SIGINT, before) is signal.default_int_handler

    @pytest.fixture
    def check(self, bench, tmp_path, capsys):
        def run(*words):
            assert bench(*words) == (130, None)
            assert capsys.readouterr().err == "Interrupted.\n"
            assert list((tmp_path / "files").iterdir()) == []

        return run

    def test_while_a_slide_is_made(self, check, monkeypatch):
        def make(path, *_):
            path.write_bytes(bytes(1000))
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(session, "make_slide", make)
        check("read")

    @pytest.mark.parametrize("reads", [1, 2])
    def test_while_one_is_read_wait_for_it(self, check, slide, monkeypatch, reads):
        read, done = openslide.OpenSlide.read_region, []

        def read_region(self, *given):
            if len(done) == reads - 1:
                signal.raise_signal(signal.SIGINT)
            done.append(read(self, *given))
            return done[-1]

        monkeypatch.setattr(openslide.OpenSlide, "read_region", read_region)
        check("read", slide)
        assert len(done) == reads

    def test_while_all_is_removed(self, check, monkeypatch):
        remove = shutil.rmtree

        def interrupted(*given, **options):
            signal.raise_signal(signal.SIGINT)
            remove(*given, **options)

        monkeypatch.setattr(session.shutil, "rmtree", interrupted)
        monkeypatch.setattr(session.Session, "finish", lambda *_: None)
        check("read", "--size", 128, "--tile", 64)

    def test_for_the_second_time_do_not_wait(self, check, slide, monkeypatch):
        def read_region(self, *given):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError

        monkeypatch.setattr(openslide.OpenSlide, "read_region", read_region)
        check("read", slide)


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--tile", "100"], ["--size", "many"]])
def test_numbers_that_make_no_sense_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        main(["read", *words])
    assert "error: argument" in capsys.readouterr().err


@pytest.mark.parametrize("codec", ["none", "jpeg"])
def test_read_with_a_gpu(gpu, bench, codec):
    status, record = bench("read", "--size", 600, "--tile", 128, "--codec", codec)
    assert status == 0
    host = rows_of(record, "whole level to the host, warm")
    device = rows_of(record, "whole level to the device, warm")
    assert_right(host["napari-wsigpu, GPU"])
    for name in ("napari-wsigpu, GPU", "tifffile, then copied"):
        assert_right(device[name])
    for name in kvikio_process.MODES:
        assert "kvikio is not installed" in device[name]["missing"]
    alone = device["pread, pinned copy: bytes alone"]
    if codec == "none":
        assert_right(alone)
    else:
        assert alone["missing"] == "not here: the level's tiles are not plain pixels"


def test_round_trip_with_a_gpu(gpu, bench, slide):
    status, record = bench("round-trip", slide)
    assert status == 0
    assert_right(rows_of(record, "read and written to raw Zarr")["napari-wsigpu, GPU"])


@pytest.mark.parametrize("name", ["zarr-write", "zarr-write-lz4"])
def test_zarr_write_with_a_gpu(gpu, bench, name):
    status, record = bench(name, "--size", 300, "--chunks", 64)
    assert status == 0
    rows = rows_of(record, "chunks of 64 x 64")
    assert_right(rows["napari-wsigpu, CuPy"])
    assert_right(rows["zarr-python, CuPy"])


def test_chunks_that_nvcomp_does_not_take_are_rows(gpu, bench):
    side = 2400
    status, record = bench("zarr-write-lz4", "--size", side, "--chunks", side)
    assert status == 0
    rows = rows_of(record, f"chunks of {side} x {side}")
    assert rows["napari-wsigpu, CuPy"]["missing"] == (
        "not here: nvCOMP's LZ4 takes at most 16 MiB a chunk, not 16.5"
    )
    assert_right(rows["napari-wsigpu, NumPy"])
