"""Zarr chunks, read into device memory by every method."""

import logging

import numpy as np
import pytest

from napari_wsigpu import read_zarr_to_gpu
from napari_wsigpu.gpu.transfer import gds, zarr_reader
from napari_wsigpu.model.errors import DeviceError
from napari_wsigpu.slide import runtime

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def device():
    try:
        found = runtime.default().devices.worker(0).device
    except DeviceError as error:
        pytest.skip(str(error))
    return found


@pytest.fixture
def cupy(device):
    return pytest.importorskip("cupy")


@pytest.fixture(params=["threads", "kvikio"])
def way(request, monkeypatch):
    """Reader of the files; kvikio also in its compatibility mode."""
    if request.param == "kvikio":
        pytest.importorskip("kvikio")
    monkeypatch.setenv(gds.GDS, {"threads": "off", "kvikio": "kvikio"}[request.param])
    monkeypatch.setattr(gds, "direct_reads", gds.DirectReads())
    yield request.param
    # kvikio did not fail and fall back to threads.
    assert (gds.direct_reads.module() is not None) == (request.param == "kvikio")


zarr_tests = pytest.importorskip("tests.gpu.test_zarr")
no_warning = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")


@no_warning
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("name", zarr_tests.STORED)
def test_arrays(tmp_path, way, name, missing, small, monkeypatch, caplog, cupy):
    own = zarr_tests.way_of(name)
    if own == "nvcomp":
        pytest.importorskip("nvidia.nvcomp")
    if small:
        monkeypatch.setattr(zarr_reader, "BATCH_BYTES", 5000)
    monkeypatch.setattr(zarr_reader, "_warned", set())
    array = zarr_tests.make(tmp_path / "a.zarr", missing=missing, **zarr_tests.STORED[name])
    for selection in zarr_tests.SELECTIONS:
        expected = np.asarray(array[selection])
        for how in ("auto", own, "host"):
            found = read_zarr_to_gpu(array, selection, how=how)
            assert isinstance(found, cupy.ndarray)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found.get(), expected, err_msg=f"{how} {selection}")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float64", "complex64"])
@pytest.mark.parametrize("index", ["start", "end"])
def test_chunks_that_are_not_aligned(tmp_path, dtype, index):
    import zarr

    codec = zarr.codecs.ShardingCodec(
        chunk_shape=zarr_tests.CHUNKS, codecs=[zarr.codecs.BytesCodec()], index_location=index
    )
    array = zarr_tests.make(
        tmp_path / "a.zarr", dtype=dtype, chunks=zarr_tests.SHARDS, serializer=codec
    )
    found = read_zarr_to_gpu(array, np.s_[1:, 3:50], how="direct")
    np.testing.assert_array_equal(found.get(), array[1:, 3:50])


@no_warning
@pytest.mark.parametrize("chunk", [512, 2048])
@pytest.mark.parametrize("name", ["raw v3", "zstd v3", "LZ4 v3", "LZ4 v2"])
def test_large_chunks(tmp_path, name, chunk, cupy, caplog):
    import zarr

    own = zarr_tests.way_of(name)
    options = zarr_tests.STORED[name].copy()
    if own == "nvcomp":
        pytest.importorskip("nvidia.nvcomp")
        kind = options["compressors"], options["zarr_format"]
        options["compressors"] = zarr_tests.compressor(*kind)
    else:
        options["compressors"] = None
    y, x, c = np.ogrid[:3000, :2500, :3]
    pixels = ((y // 3 + x * (c + 1)) % 251).astype(np.uint8)
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=pixels.shape, chunks=(chunk, chunk, 3), dtype="u1", **options
    )
    array[...] = pixels
    found = read_zarr_to_gpu(array, np.s_[5:2999], how=own)
    np.testing.assert_array_equal(found.get(), pixels[5:2999])
