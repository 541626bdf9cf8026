"""The bytes of a level, read without any library."""

import os
from contextlib import ExitStack

import numpy as np
import pytest

from benchmarks.transfers.plain_copy import laid_out, plain_copy, read_fully
from benchmarks.transfers.target import Target
from benchmarks.transfers.timing import Absent
from tests.writers import slides

RAW = {
    "tiles": {},
    "strips": {"tile": None, "rowsperstrip": 32},
    "big endian": {"byteorder": ">"},
}


@pytest.mark.parametrize("options", RAW.values(), ids=RAW)
def test_the_bytes_are_the_level(tmp_path, options):
    path = tmp_path / "slide.tif"
    pixels = slides.picture(150, 200, 3, "uint16")
    slides.write_pyramid(path, pixels, (), compression=None, photometric="rgb", **options)
    with ExitStack() as stack:
        found = laid_out(Target(path, 0, stack), np.fromfile(path, np.uint8), 0)
    np.testing.assert_array_equal(found, pixels)


@pytest.mark.parametrize("options", [{"compression": "zlib"}, {"planarconfig": "separate"}])
def test_what_is_not_plain_is_left_out(tmp_path, options):
    path = tmp_path / "slide.tif"
    pixels = slides.picture(150, 200)
    axes = {}
    if "planarconfig" in options:
        pixels, axes = np.moveaxis(pixels, -1, 0), {"metadata": {"axes": "CYX"}}
        options = options | {"compression": None}
    slides.write_pyramid(path, pixels, (), photometric="rgb", **options, **axes)
    with ExitStack() as stack:
        target = Target(path, 0, stack)
        target.no_gpu = ""
        found = plain_copy(target, stack)
    assert isinstance(found, Absent)
    assert found.reason == "the level's tiles are not plain pixels"


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="this system has no preadv")
def test_short_reads_go_on(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    right = os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, views, at: right(handle, [views[0][:7]], at))
    room = bytearray(90)
    with path.open("rb") as file:
        read_fully(file.fileno(), memoryview(room), 10)
        with pytest.raises(EOFError, match="cut short"):
            read_fully(file.fileno(), memoryview(room), 11)
    assert room[:89] == bytes(range(11, 100))
