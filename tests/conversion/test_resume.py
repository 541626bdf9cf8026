"""Killed and interrupted conversions that are resumed."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from napari_wsigpu import convert, open_slide
from napari_wsigpu.conversion.journal import RECORD, Journal
from napari_wsigpu.model import errors
from tests.conversion.test_convert import (
    assert_equal_levels,
    large_image,
    pyramid_of,
    tifffile_levels,
    zarr_levels,
)
from tests.writers import slides

# Prints the number of done tiles and commits every tile.
CONVERT = """
import os, sys
from napari_wsigpu.conversion import convert_slide
convert_slide.COMMIT_SECONDS = 0
os.fsync = lambda handle: None
convert_slide.convert(sys.argv[1], sys.argv[2], compression="zstd", tile_size=64, workers=1,
            progress=lambda done, total: print(done, total, flush=True))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "s.svs"
    slides.write_aperio(path, large_image(1000, 1100), (4,), tile=(256, 256))
    return path


def convert_until(source, target, share):
    """Kill a conversion after a share of its tiles, and return the number of done tiles."""
    command = [sys.executable, "-c", CONVERT, source, target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        done = 0
        for line in process.stdout:
            done, total = map(int, line.split())
            if done >= share * total:
                break
        process.send_signal(signal.SIGKILL)
        process.stdout.read()
    assert process.returncode == -signal.SIGKILL
    return done


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.parametrize("name", ["out.tif", "out.zarr"])
def test_killed_conversion_resumes(tmp_path, source, name):
    if name == "out.zarr":
        pytest.importorskip("zarr")
    target = tmp_path / name
    moments = sorted(random.Random(name).uniform(0.05, 0.95) for _ in range(2))
    done = 0
    for moment in moments:
        done = max(done, convert_until(source, target, moment))
        assert not target.exists()
        assert [path.name for path in tmp_path.iterdir()] == [f"{name}.part"]
    counts = []
    finished = convert(
        source,
        target,
        compression="zstd",
        tile_size=64,
        progress=lambda count, total: counts.append((count, total)),
    )
    total = counts[-1][1]
    assert (finished.tiles_found, total) in counts
    assert finished.tiles_found >= done > 0
    assert finished.tiles_found + finished.tiles_encoded == total
    assert [path.name for path in tmp_path.iterdir()] == [name]
    read = zarr_levels if name == "out.zarr" else tifffile_levels
    assert_equal_levels(read(target), pyramid_of(source))
    with open_slide(source, "cpu") as slide:
        associated = {key: image.read() for key, image in slide.associated_images.items()}
    if name == "out.tif":
        with open_slide(target, "cpu") as slide:
            assert set(slide.associated_images) == {"thumbnail"}
            np.testing.assert_array_equal(
                slide.associated_images["thumbnail"].read(), associated["thumbnail"]
            )


def interrupted(source, target, **options):
    """Convert some tiles, then interrupt the conversion."""

    def stop(done, total):
        if done > total / 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, target, progress=stop, **options)
    assert not target.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
@pytest.mark.parametrize("name", ["out.tif", "out.zarr"])
def test_conversion_killed_at_any_step_resumes(tmp_path, name):
    if name == "out.zarr":
        pytest.importorskip("zarr")
    slides.write_aperio(tmp_path / "s.svs", slides.picture(200, 300), (2,), tile=(64, 64))
    command = [sys.executable, "-m", "tests.conversion.killed"]
    done = subprocess.run(
        [*command, tmp_path / "s.svs", tmp_path, name, "4"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps, killed = map(int, done.stdout.split())
    assert steps > killed == 4


@pytest.mark.parametrize("shard", [None, 4])
def test_partial_chunks_are_removed(tmp_path, source, shard):
    """zarr-python and `put_chunk` write a chunk to a temporary file first."""
    pytest.importorskip("zarr")
    options = {"compression": "zstd", "tile_size": 256, "shard": shard}
    whole = convert(source, tmp_path / "whole.zarr", **options)
    target = tmp_path / "out.zarr"
    interrupted(source, target, **options)
    data = tmp_path / "out.zarr.part" / "data"
    (data / "0" / "c" / "0" / "0" / "1.d98c3f.partial").write_bytes(b"half")
    (data / "zarr.d98c3f.partial").write_bytes(b"{")
    assert convert(source, target, **options).checksum == whole.checksum


@pytest.mark.parametrize("compression", [None, "deflate"])
def test_interrupted_conversion_resumes(tmp_path, source, compression):
    target = tmp_path / "out.tif"
    interrupted(source, target, compression=compression, lossless=True)
    done = convert(source, target, compression=compression, lossless=True)
    assert done.tiles_found > 0
    assert_equal_levels(pyramid_of(target), pyramid_of(source))


OPTIONS = {
    "out.tif": {"compression": "deflate", "tile_size": 64},
    "copied.tif": {},
    "raw.ome.tif": {"compression": "raw"},
    "out.zarr": {"compression": "zstd", "tile_size": 64},
    "lz4.zarr": {"compression": "lz4", "tile_size": 64, "shard": 3},
}


def zero(path, start, size):
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(size))


def cut_in_half(path):
    os.truncate(path, path.stat().st_size // 2)


def damage_file(data, kind):
    size = data.stat().st_size
    if kind == "zeros":
        zero(data, size // 2, 1000)
    elif kind == "cut":
        cut_in_half(data)
    elif kind == "head":
        zero(data, 0, 1000)
    else:
        data.unlink()


def damage_folder(data, kind):
    chunks = sorted(path for path in data.glob("0/c/*/*/*") if path.is_file())
    some = chunks[len(chunks) // 2]
    if kind == "zeros":
        zero(some, 0, some.stat().st_size)
    elif kind == "cut":
        cut_in_half(some)
    elif kind == "head":
        zero(data / "0" / "zarr.json", 0, 10)
    else:
        some.unlink()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "zeros") for name in OPTIONS),
        *((name, kind) for name in ("out.tif", "lz4.zarr") for kind in ("cut", "head", "gone")),
    ],
)
def test_damaged_tiles_are_written_again(tmp_path, name, kind):
    if name.endswith("zarr"):
        pytest.importorskip("zarr")
    source = tmp_path / "s.svs"
    slides.write_aperio(source, large_image(500, 700), (4,), tile=(64, 64))
    whole = convert(source, tmp_path / f"whole.{name}", **OPTIONS[name])
    target = tmp_path / name
    interrupted(source, target, **OPTIONS[name])
    data = tmp_path / f"{name}.part" / "data"
    (damage_folder if data.is_dir() else damage_file)(data, kind)
    counts = []
    done = convert(source, target, **OPTIONS[name], progress=lambda *count: counts.append(count))
    assert done.checksum == whole.checksum
    assert [note for note in done.notes if "damaged" in note] == list(done.notes)
    assert len(done.notes) == (kind != "head")
    assert counts[-1] == (whole.tiles_copied + whole.tiles_encoded,) * 2
    if kind != "head":
        assert counts == sorted(counts)


@pytest.mark.parametrize("name", OPTIONS)
def test_verification_reports_progress_and_can_be_cancelled(tmp_path, name):
    if name.endswith("zarr"):
        pytest.importorskip("zarr")
    source, target = tmp_path / "s.svs", tmp_path / name
    slides.write_aperio(source, large_image(500, 700), (4,), tile=(64, 64))
    whole = convert(source, tmp_path / f"whole.{name}", **OPTIONS[name])
    interrupted(source, target, **OPTIONS[name])
    counts = []

    def stop(done, total):
        counts.append(done)
        if len(counts) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, target, **OPTIONS[name], progress=stop)
    assert counts == sorted(counts)
    ended = len(counts)
    done = convert(source, target, **OPTIONS[name], progress=lambda done, _: counts.append(done))
    assert counts[ended:] == sorted(counts[ended:])
    assert counts[ended] < done.tiles_found <= counts[-1]
    assert done.checksum == whole.checksum


def test_changed_options_restart(tmp_path, source):
    target = tmp_path / "out.tif"
    interrupted(source, target, compression="deflate")
    done = convert(source, target, compression="raw")
    assert done.tiles_found == 0
    assert "started from scratch, because the options have changed" in done.notes[0]
    assert_equal_levels(pyramid_of(target), pyramid_of(source))


@pytest.mark.parametrize("name", ["out.tif", "out.zarr"])
def test_changed_source_restarts(tmp_path, name):
    source, target = tmp_path / "s.svs", tmp_path / name
    slides.write_aperio(source, slides.picture(300, 300), (), tile=(64, 64))
    interrupted(source, target, compression="zstd")
    slides.write_aperio(source, slides.picture(290, 300)[::-1], (), tile=(64, 64))
    done = convert(source, target, compression="zstd")
    assert done.tiles_found == 0
    assert "the source has changed" in done.notes[0]
    read = zarr_levels if name == "out.zarr" else tifffile_levels
    assert_equal_levels(read(target), pyramid_of(source))


def test_source_changes_during_the_conversion(tmp_path):
    source = tmp_path / "s.svs"
    slides.write_aperio(source, slides.picture(300, 300), (), tile=(64, 64))

    with open_slide(source, "cpu") as slide:
        source.write_bytes(source.read_bytes() + b"more")
        with pytest.raises(errors.SlideError, match="has changed"):
            convert(slide, tmp_path / "out.tif")
    assert not (tmp_path / "out.tif").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="there files are not locked")
def test_concurrent_conversions_to_one_target(tmp_path, source):
    target = tmp_path / "out.tif"
    refused = []

    def also(done, total):
        if not refused:
            with pytest.raises(errors.ConversionError, match="Another conversion") as error:
                convert(source, target, compression="raw")
            refused.append(error)

    convert(source, target, compression="raw", progress=also)
    assert refused
    assert_equal_levels(pyramid_of(target), pyramid_of(source))


def journal_of_three(path):
    journal = Journal(path, {"source": 1}, [(1, 2, 3), (2, 1, 1)])
    if not journal.found:
        journal.add(0, 0, 1, 2, 4096, 100, 7)
        journal.add(1, 0, 0, 0, 5000, 100, 8)
        journal.add(1, 1, 0, 0, 5100, 100, 9)
        journal.commit()
    return journal


def test_truncated_record_is_dropped(tmp_path):
    journal_of_three(tmp_path / "journal").close()
    data = (tmp_path / "journal").read_bytes()
    (tmp_path / "journal").write_bytes(data[:-1])
    journal = journal_of_three(tmp_path / "journal")
    assert journal.found
    assert journal.is_done(0).tolist() == [[False] * 3, [False, False, True]]
    assert journal.is_done(1).tolist() == [[False]]
    assert journal.end == 5100
    journal.add(1, 1, 0, 0, 6000, 50, 9)
    journal.commit()
    journal.close()
    journal = journal_of_three(tmp_path / "journal")
    assert journal.is_done(1).all()
    assert journal.end == 6050
    journal.close()


@pytest.mark.parametrize("byte", [b"\0", b"\xff"])
def test_records_after_a_damaged_one_are_not_trusted(tmp_path, byte):
    journal_of_three(tmp_path / "journal").close()
    data = (tmp_path / "journal").read_bytes()
    size = RECORD.itemsize
    (tmp_path / "journal").write_bytes(data[: -2 * size] + byte * size + data[-size:])
    journal = journal_of_three(tmp_path / "journal")
    assert journal.is_done(0).sum() == 1
    assert journal.counts[1].tolist() == [[[-1]], [[-1]]]
    journal.close()


@pytest.mark.parametrize("head", [b"nonsense\n", b"{}\n", b"[1]\n", b"\xff\xfe\n"])
def test_damaged_journal_restarts(tmp_path, head):
    (tmp_path / "journal").write_bytes(head)
    journal = Journal(tmp_path / "journal", {"source": 1}, [(1, 1, 1)])
    assert not journal.found
    assert "damaged" in journal.changed
    journal.close()
