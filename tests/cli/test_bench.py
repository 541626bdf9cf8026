"""The command `wsigpu bench`, on small slides and without a GPU."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from napari_wsigpu.cli import bench, main
from napari_wsigpu.gpu.device import driver
from napari_wsigpu.slide.slide import Slide, open_slide
from tests.fakes.host_cupy import install
from tests.writers import slides

HEIGHT, WIDTH = 300, 420


@pytest.fixture
def no_gpu(monkeypatch):
    """Hide the NVIDIA driver, if there is one."""
    monkeypatch.setattr(driver, "driver_available", lambda: False)


@pytest.fixture
def slide(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(HEIGHT, WIDTH))
    return path


@pytest.fixture
def run(tmp_path):
    """Run the command; return its status and its record."""

    def run(*words, seconds=0.05):
        record = tmp_path / "record.json"
        given = [*map(str, words), "--seconds", str(seconds), "--json", str(record)]
        status = main(["bench", *given])
        return status, json.loads(record.read_text()) if record.exists() else None

    return run


def damage(path, row, column):
    with open_slide(path) as slide:
        offset = int(slide.layout.levels[0].grid.offsets[0, row, column])
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(64))


def assert_measured(row, decoder, memory):
    assert decoder in row["decoder"]
    assert row["memory"] == memory
    assert row["viewports"] > 0
    assert 0 < row["viewport_median_ms"] <= row["viewport_p95_ms"]
    assert row["patches_per_second"] > 0
    assert row["megapixels_per_second"] > 0


@pytest.mark.usefixtures("no_gpu")
def test_a_slide_smaller_than_a_viewport(run, slide, capsys):
    status, record = run(slide)
    assert status == 0
    [row] = record["rows"]
    assert_measured(row, "CPU", "host")
    assert record["size"] == [WIDTH, HEIGHT]
    assert record["failed_tiles"] == {}
    assert {found["name"] for found in record["machine"]["software"]} >= {"NumPy", "CPU cores"}
    shown = capsys.readouterr()
    title, heads, _, cells, absent = shown.out.strip().splitlines()
    assert title == "slide.svs, level 0: 420 x 300, 3 x uint8, tiles 64 x 48, JPEG"
    assert heads.split("  ")[0] == "decoder"
    assert re.fullmatch(r"CPU, to host memory( +[\d.,]+){4}", cells)
    assert (
        absent
        == "not decoded by a GPU: 'cuda:0' can't be used because this machine has no NVIDIA driver"
    )
    assert shown.err == ""


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("size", [(1, 1), (100, 255), (257, 100)])
def test_slides_smaller_than_a_patch(run, tmp_path, size):
    path = tmp_path / "slide.tif"
    slides.write_pyramid(path, slides.picture(*size), (), photometric="rgb")
    status, record = run(path)
    assert status == 0
    assert_measured(record["rows"][0], "CPU", "host")


@pytest.mark.usefixtures("no_gpu")
def test_regions_lie_anywhere_and_caches_are_empty(run, tmp_path, monkeypatch):
    """Each viewport is read with an empty cache; patches and the sweep start with one."""
    path = tmp_path / "slide.tif"
    slides.write_pyramid(
        path, slides.picture(2100, 4200), (), tile=(512, 512), compression=None, photometric="rgb"
    )
    asked, places = [], {}
    one, many, clear = Slide.read_region, Slide.read_regions, Slide.clear_cache

    def read_region(self, location, size, *given, **options):
        asked.append(("region", location, size))
        return one(self, location, size, *given, **options)

    def read_regions(self, locations, size, *given, **options):
        asked.append(("regions", options["batch_size"], size))
        return many(self, noted(locations, size), size, *given, **options)

    def noted(locations, size):
        for location in locations:
            places.setdefault(size, []).append(location)
            yield location

    def clear_cache(self):
        asked.append(("clear",))
        clear(self)

    monkeypatch.setattr(Slide, "read_region", read_region)
    monkeypatch.setattr(Slide, "read_regions", read_regions)
    monkeypatch.setattr(Slide, "clear_cache", clear_cache)
    assert run(path)[0] == 0
    sizes = {size for kind, *_, size in filter(lambda item: len(item) == 3, asked)}
    assert sizes == {(1920, 1200), (256, 256), (1400, 1050)}
    for number, (kind, *given) in enumerate(asked):
        if kind == "regions" or given[1:] == [(1920, 1200)]:
            assert asked[number - 1] == ("clear",)
    patches = np.array(places[256, 256])
    assert len(patches) >= 64
    assert (patches >= 0).all()
    assert (patches <= (4200 - 256, 2100 - 256)).all()
    assert len(np.unique(patches % 64, axis=0)) > 32
    assert (0, 0) in places[1400, 1050]


@pytest.mark.usefixtures("no_gpu")
def test_damaged_tiles_are_named_and_the_rest_is_measured(run, tmp_path, capsys):
    path = tmp_path / "slide.tif"
    options = {"compression": "jpeg", "photometric": "rgb", "tile": (512, 512)}
    slides.write_pyramid(path, slides.picture(2048, 6144), (), **options)
    damage(path, 3, 11)
    status, record = run(path, seconds=0.5)
    assert status == 1
    [row] = record["rows"]
    assert row["viewports"] > 0
    assert row["viewport_median_ms"] > 0
    assert row["megapixels_per_second"] > 0
    assert list(record["failed_tiles"]) == ["level 0, row 3, column 11"]
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"The tile at level 0, row 3, column 11 of '{path}' could not be")


@pytest.mark.usefixtures("no_gpu")
def test_nothing_but_damaged_tiles(run, tmp_path, capsys):
    path = tmp_path / "slide.tif"
    slides.write_pyramid(path, slides.picture(64, 64), (), photometric="rgb")
    damage(path, 0, 0)
    status, record = run(path)
    assert status == 1
    [row] = record["rows"]
    assert {row[name] for name in bench.COLUMNS} == {None}
    shown = capsys.readouterr()
    assert re.search(r"CPU, to host memory( +-){4}\n", shown.out)
    assert "The tile at level 0, row 0, column 0" in shown.err


def test_the_gpu_is_measured_to_both_memories(run, slide, monkeypatch, host_gpu, capsys):
    install(monkeypatch)
    status, record = run(slide)
    assert status == 0
    assert record["no_gpu"] == ""
    for row, expected in zip(
        record["rows"], [("CPU", "host"), ("GPU 0", "host"), ("GPU 0", "GPU")], strict=True
    ):
        assert_measured(row, *expected)
    assert "not decoded by a GPU" not in capsys.readouterr().out


def test_what_the_gpu_does_not_decode_is_measured_to_it(run, tmp_path, monkeypatch, host_gpu):
    install(monkeypatch)
    path = tmp_path / "slide.tif"
    pixels = slides.picture(HEIGHT, WIDTH)
    slides.write_pyramid(path, pixels, (), photometric="rgb", compression="lzma")
    status, record = run(path)
    assert status == 0
    first, second = record["rows"]
    assert_measured(first, "CPU", "host")
    assert_measured(second, "CPU", "GPU")
    assert "LZMA" in record["no_gpu"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{folder}/absent.svs"], "There is no file '{folder}/absent.svs'; check the path."),
        (["{folder}/text.svs"], "text.svs' is not a TIFF or DICOM slide"),
    ],
)
def test_unreadable_slide_is_one_sentence(run, tmp_path, capsys, words, said):
    (tmp_path / "text.svs").write_text("no slide")
    assert run(*(word.format(folder=tmp_path) for word in words)) == (1, None)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert said.format(folder=tmp_path) in shown.err


@pytest.mark.usefixtures("no_gpu")
def test_unwritable_record_is_one_sentence(run, slide, monkeypatch, capsys):
    def fail(self, *given, **options):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_text", fail)
    assert run(slide) == (1, None)
    record = slide.with_name("record.json")
    assert capsys.readouterr().err == (
        f"You don't have permission to write '{record}'; choose another folder.\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "0"], "0 is not a positive number"),
        (["--seconds", "nan"], "nan is not a positive number"),
        (["--seconds", "long"], "long is not a positive number"),
        (["--json", "{folder}/absent/bench.json"], "there is no folder {folder}/absent"),
        (["--json", "{folder}"], "{folder} is a folder"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, capsys, words, said):
    with pytest.raises(SystemExit):
        main(["bench", "slide.svs", *(word.format(folder=tmp_path) for word in words)])
    assert said.format(folder=tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["read_region", "read_regions"])
def test_ctrl_c_waits_for_reads(run, slide, monkeypatch, capsys, leaves_nothing, name):
    read = getattr(Slide, name)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(self, *given, **options):
        signal.raise_signal(signal.SIGINT)
        return read(self, *given, **options)

    monkeypatch.setattr(Slide, name, interrupted)
    try:
        assert run(slide) == (130, None)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "Interrupted.\n")
