"""Our reading and writing through kvikio, in processes of its modes."""

import os
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile

from benchmarks.synthetic import make_picture
from benchmarks.transfers import kvikio_process, reading, zarr_write
from benchmarks.transfers.kvikio_process import MODES, KvikioModes, KvikioProcess
from benchmarks.transfers.reference import Region
from benchmarks.transfers.round_trip import copy_by_kvikio
from benchmarks.transfers.timing import Absent
from napari_wsigpu.model.errors import DeviceError
from tests.fakes.host_cupy import install
from tests.writers import slides

pytest.importorskip("zarr")


def reasons(modes, against=""):
    ways = modes.ways(os.getenv, lambda item: (item,), against)
    assert all(isinstance(each, Absent) for each in ways)
    assert [each.name for each in ways] == list(MODES)
    return {each.reason for each in ways}


def test_a_process_has_the_environment_of_its_mode():
    for mode in MODES.values():
        process = KvikioProcess(mode)
        try:
            assert {name: process.call(os.getenv, name) for name in mode} == mode
        finally:
            process.close()
    assert "KVIKIO_COMPAT_MODE" not in os.environ


def test_a_process_that_ends_by_itself_is_an_error():
    process = KvikioProcess({})
    try:
        with pytest.raises(DeviceError, match="ended by itself"):
            process.call(os._exit, 3)
    finally:
        process.close()


def test_without_a_gpu_there_is_no_process():
    with ExitStack() as stack:
        assert reasons(KvikioModes("no GPU", stack)) == {"no GPU"}


def test_without_kvikio_there_is_no_process(monkeypatch):
    monkeypatch.setattr(kvikio_process, "find_spec", lambda name: None)
    with ExitStack() as stack:
        (reason,) = reasons(KvikioModes("", stack))
    assert "pip install kvikio-cu12" in reason


@pytest.mark.parametrize(
    ("works", "direct", "refusal"),
    [
        (["read", "GDS"], True, ""),
        (["read"], False, ""),
        (["read"], True, "kvikio has no GPUDirect Storage (off, as it is)"),
    ],
)
def test_gds_on_means_that_it_works(monkeypatch, works, direct, refusal):
    found = {"works": works, "note": "off, as it is"}
    monkeypatch.setattr(kvikio_process, "probe_kvikio", lambda: found)
    assert kvikio_process._refusal(direct) == refusal


def test_a_broken_kvikio_is_a_reason(monkeypatch):
    def fail():
        raise RuntimeError("no\ncuFile")

    monkeypatch.setattr(kvikio_process, "probe_kvikio", fail)
    assert kvikio_process._refusal(False) == "kvikio can't be used (no cuFile)"


@pytest.fixture
def by_kvikio(monkeypatch, host_gpu):
    """What is read by kvikio: all, or nothing."""
    install(monkeypatch)
    direct_reads = SimpleNamespace(module=lambda: "kvikio")
    monkeypatch.setattr(reading, "direct_reads", direct_reads)
    yield direct_reads
    reading.close()


@pytest.fixture
def path(tmp_path):
    slides.write_pyramid(tmp_path / "slide.tif", slides.picture(150, 200), (), compression=None)
    return str(tmp_path / "slide.tif")


def test_reading(by_kvikio, path):
    given = path, 0, Region(30, 20, 100, 90), False
    expected = tifffile.imread(path)[20:110, 30:130]
    np.testing.assert_array_equal(reading.read(True, *given), expected)
    assert reading.read(False, *given) > 0


def test_copying(by_kvikio, path, tmp_path):
    given = path, 0, str(tmp_path / "copy.zarr")
    np.testing.assert_array_equal(copy_by_kvikio(True, *given), tifffile.imread(path))
    assert copy_by_kvikio(False, *given) > 0


@pytest.mark.parametrize("work", [reading.read, copy_by_kvikio])
def test_what_is_read_without_kvikio_is_no_figure_of_it(by_kvikio, path, tmp_path, work):
    by_kvikio.module = lambda: None
    given = (str(tmp_path / "copy.zarr"),)
    if work is reading.read:
        given = Region(0, 0, 10, 10), False
    with pytest.raises(DeviceError, match="kvikio could not read the file"):
        work(False, path, 0, *given)


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_writing(by_kvikio, tmp_path, codec):
    given = 100, 32, codec, str(tmp_path / "a.zarr")
    try:
        found = zarr_write.write_by_kvikio(True, *given)
        assert zarr_write.write_by_kvikio(False, *given) > 0
    finally:
        zarr_write._on_device.cache_clear()
        zarr_write._encoder.cache_clear()
    np.testing.assert_array_equal(found, make_picture(100))
