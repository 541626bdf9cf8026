"""The command `wsigpu check`."""

import json
import signal
import weakref

import numpy as np
import pytest
import tifffile

from napari_wsigpu import native, open_slide
from napari_wsigpu.cli import main
from tests.writers import slides, stacks

needs_core = pytest.mark.skipif(not native.available, reason=native.reason)


@pytest.fixture
def path(tmp_path):
    slides.write_aperio(tmp_path / "slide.svs", slides.picture(300, 400))
    return tmp_path / "slide.svs"


def replace_tile(path, number, change):
    """Replace the bytes of a tile of level 0 by as many others."""
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        offset, length = page.dataoffsets[number], page.databytecounts[number]
    data = bytearray(path.read_bytes())
    tile = bytes(data[offset : offset + length])
    changed = change(tile)
    assert len(changed) == length
    data[offset : offset + length] = changed
    path.write_bytes(data)


def halve(tile):
    """Return the first half of a JPEG with an end marker."""
    return tile[: len(tile) // 2] + b"\xff\xd9" + bytes(len(tile) - len(tile) // 2 - 2)


def stored_tiles(path):
    with tifffile.TiffFile(path) as file:
        return sum(np.count_nonzero(page.databytecounts) for page in file.pages)


def test_a_sound_slide(path, capsys):
    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr()
    tiles = stored_tiles(path)
    assert printed.out == f"{path}\n  sound       {tiles} of {tiles} tiles\n"
    assert printed.err == ""


def test_problems_of_the_file_are_listed(path, capsys):
    with tifffile.TiffFile(path) as file:
        place = file.pages[0].tags["TileByteCounts"].valueoffset
    data = bytearray(path.read_bytes())
    data[place : place + 4] = bytes(4)
    path.write_bytes(data)
    assert main(["check", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (problem,) = [line for line in lines if line.startswith("  problem ")]
    assert "a size of 0 bytes" in problem
    assert main(["check", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == [problem.split(maxsplit=1)[1]]


@needs_core
def test_half_a_tile_is_damaged(path, capsys):
    replace_tile(path, 1, halve)
    assert main(["check", "--json", str(path)]) == 1
    found = json.loads(capsys.readouterr().out)
    [damaged] = found["damaged"]
    assert damaged["tile"] == "level 0, row 0, column 1"
    assert "ends within a row" in damaged["reason"]
    assert (found["tiles"], found["sound"]) == (stored_tiles(path), stored_tiles(path) - 1)


@needs_core
def test_bytes_after_the_last_pixel_are_doubtful(path, capsys):
    whole = slides.picture(300, 400)
    # A tile that compresses better leaves room for the bytes.
    whole[:240, :240] = 200
    slides.write_aperio(other := path.with_name("other.svs"), whole)
    with tifffile.TiffFile(other) as file:
        page = file.pages[0]
        start, length = page.dataoffsets[0], page.databytecounts[0]
    flat = other.read_bytes()[start : start + length]

    def pad(tile):
        return flat[:-2] + b"\x12" * (len(tile) - len(flat)) + b"\xff\xd9"

    replace_tile(path, 0, pad)
    assert main(["check", str(path)]) == 0
    assert "  doubtful    level 0, row 0, column 0: extraneous-bytes\n" in capsys.readouterr().out


def test_all_planes_are_checked(tmp_path):
    with open_slide(stacks.save(tmp_path, "TZCYX", stacks.stack()), "cpu") as slide:
        calls = []
        found = slide.check_tiles(lambda done, total: calls.append((done, total)))
        tiles = sum(level.grid.byte_counts.any(axis=0).sum() for level in slide.layout.levels)
        assert found.tiles == slide.planes.count * tiles
    assert calls[-1] == (found.tiles, found.tiles)
    assert found.sound == found.tiles


def test_ctrl_c_during_a_finalizer_is_not_lost(path):
    """Python drops the exceptions that finalizers raise."""

    def interrupt(done, total):
        weakref.finalize(set(), signal.raise_signal, signal.SIGINT)

    with open_slide(path, "cpu") as slide:
        with pytest.raises(KeyboardInterrupt):
            slide.check_tiles(interrupt)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not slide.check_tiles().damaged


def test_no_tile_stays_in_memory(path):
    with open_slide(path, "cpu") as slide:
        slide.check_tiles()
        before = slide.stats()["cache_hits"]
        slide.read_region((0, 0), (300, 200))
        assert slide.stats()["cache_hits"] == before


def test_an_unreadable_file(tmp_path, capsys):
    assert main(["check", str(tmp_path / "missing.svs")]) == 1
    assert "There is no file" in capsys.readouterr().err


def test_an_unknown_device(path, capsys):
    assert main(["check", "--device", "tpu", str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_gpu_names_tiles_that_it_cannot_decode(path, host_gpu):
    replace_tile(path, 1, lambda tile: b"x" * len(tile))
    with open_slide(path, "cuda") as slide:
        found = slide.check_tiles()
    assert [name for name, _ in found.damaged] == ["level 0, row 0, column 1"]
    assert found.sound == stored_tiles(path) - 1
